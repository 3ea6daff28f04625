// Runs of rows from one tensor to another, whatever the order of rows and heads in memory.
#pragma once

#include <cstdint>

#include "tile.h"

namespace cpu_ops {

// Rows [from, from + count) become, or are added to, rows [to, to + count).
struct RowRun {
    std::int64_t to, from, count;
};

enum class Put { copy, add };

// Rows that runs write are disjoint.
void put_runs(Put how, const Rows &to, const Rows &from, const RowRun *runs, std::int64_t count,
              std::int64_t heads, std::int64_t width, int threads);

} // namespace cpu_ops
