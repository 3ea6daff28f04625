// Tiles of the query-key task graph: partial attention merged into outputs and gradients in place.
#pragma once

#include <cstdint>

#include "tile.h"

namespace cpu_ops {

// The first `fresh` tiles are the first to touch their query rows: these need no initial value. In
// other rows lse is -inf, or the log-sum-exp of what out holds.
void tiles_forward(const Forward &pass, const Tile *tiles, std::int64_t count, std::int64_t fresh,
                   int threads);

// Writes dk and dv of the tiles' key rows, and dq of the query rows of the first `fresh` tiles, which
// also leave grad . out of these rows in delta; adds to dq of the others. out and lse are those of
// all tiles of all steps together.
void tiles_backward(const Backward &pass, const Tile *tiles, std::int64_t count,
                    std::int64_t fresh, int threads);

} // namespace cpu_ops
