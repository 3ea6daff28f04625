// Tiles of the query-key task graph: partial attention merged into outputs and gradients in place.
#pragma once

#include <cstdint>

#include "attention.h"

namespace cpu_ops {

// Rows of one rank, [rows, heads, width] fp32 with a contiguous last dimension; strides in values.
struct Rows {
    float *data;
    std::int64_t row, head;

    float *at(std::int64_t r, std::int64_t h) const { return data + r * row + h * head; }
};

// Row i of a tile sees its key j where low <= i - j <= high; every row sees one.
struct Tile {
    std::int64_t q_start, q_count, k_start, k_count, low, high;
};

// The first `fresh` tiles are the first to touch their query rows: these need no initial value. In
// other rows lse is -inf, or the log-sum-exp of what out holds.
void tiles_forward(const Rows &q, const Rows &k, const Rows &v, const Rows &out, const Rows &lse,
                   const Tile *tiles, std::int64_t count, std::int64_t fresh, const Shape &shape,
                   int threads);

// Writes dk and dv of the tiles' key rows, and dq of the query rows of the first `fresh` tiles, which
// also leave grad . out of these rows in delta; adds to dq of the others. out and lse are those of
// all tiles of all steps together.
void tiles_backward(const Rows &grad, const Rows &q, const Rows &k, const Rows &v, const Rows &out,
                    const Rows &lse, const Rows &delta, const Rows &dq, const Rows &dk,
                    const Rows &dv, const Tile *tiles, std::int64_t count, std::int64_t fresh,
                    const Shape &shape, int threads);

} // namespace cpu_ops
