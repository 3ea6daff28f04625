// One tile: attention between a run of query rows and a run of key rows, forward and backward.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"

namespace cpu_ops {

// [rows, heads, width] fp32 with a contiguous last dimension; strides in values.
struct Rows {
    float *data;
    std::int64_t row, head;

    float *at(std::int64_t r, std::int64_t h) const { return data + r * row + h * head; }
};

// Row i of a tile sees its key j where low <= i - j <= high; every row sees one.
struct Tile {
    std::int64_t q_start, q_count, k_start, k_count, low, high;
};

struct Range {
    std::int64_t begin, end;
    std::int64_t size() const { return std::max<std::int64_t>(end - begin, 0); }
    bool empty() const { return end <= begin; }
};

// What a forward pass reads and writes.
struct Forward {
    Rows q, k, v, out, lse;
    Shape shape;
};

// What a backward pass reads and writes. delta may have no data: then it is formed again.
struct Backward {
    Rows grad, q, k, v, out, lse, delta, dq, dk, dv;
    Shape shape;
};

// Query rows that one task should take: many, to gather keys for once, but no fewer tasks than keep
// all threads busy. What is computed for a row does not depend on it.
std::int64_t rows_of_task(std::int64_t rows, std::int64_t heads, int threads);

// Attends to a tile's keys from some of its rows. A `fresh` tile is the first to touch its rows;
// elsewhere lse is -inf, or the log-sum-exp of what out holds, and the online softmax goes on from it.
void tile_forward(const Tile &tile, Range rows, std::int64_t head, bool fresh, const Forward &pass);

// Gradients for all query heads of a key-value head. A `fresh` tile is the first to touch its query
// rows, one with `fresh_keys` its key rows: these are written, others added to. delta too is written
// by a fresh tile and read by others.
void tile_backward(const Tile &tile, std::int64_t kv_head, bool fresh, bool fresh_keys,
                   const Backward &pass);

// Zeros in some rows of a head.
void clear_rows(const Rows &x, Range rows, std::int64_t head, std::int64_t width);

} // namespace cpu_ops
