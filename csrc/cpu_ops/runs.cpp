#include "runs.h"

#include <algorithm>
#include <vector>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "kernels.h"
#include "parallel.h"

namespace cpu_ops {
namespace {

using std::int64_t;

constexpr int64_t block_values = 16384;     // of a task: 64 KB
constexpr int64_t streamed_values = 1 << 17; // more than stay in a cache anyway

// Rows of all heads in one go, unless both sides keep the rows of a head together.
void put_run(decltype(&copy_rows) put, const Rows &to, const Rows &from, const RowRun &run,
             int64_t heads, int64_t width) {
    if (to.head == width && from.head == width) {
        put(from.at(run.from, 0), from.row, to.at(run.to, 0), to.row, run.count, heads * width);
    } else if (to.row == width && from.row == width) {
        for (int64_t h = 0; h < heads; ++h)
            put(from.at(run.from, h), width, to.at(run.to, h), width, run.count, width);
    } else {
        for (int64_t r = 0; r < run.count; ++r)
            put(from.at(run.from + r, 0), from.head, to.at(run.to + r, 0), to.head, heads, width);
    }
}

#ifdef __SSE__
// copy_rows past the caches: lines that another processor has read need not be fetched to be
// overwritten, which takes half of the time.
void stream_rows(const float *from, int64_t from_stride, float *to, int64_t to_stride, int64_t rows,
                 int64_t n) {
    for (int64_t r = 0; r < rows; ++r, from += from_stride, to += to_stride)
        for (int64_t i = 0; i < n; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
}

bool can_stream(const Rows &to, int64_t width) {
    return reinterpret_cast<std::uintptr_t>(to.data) % 16 == 0 && to.row % 4 == 0 &&
           to.head % 4 == 0 && width % 4 == 0;
}
#endif

} // namespace

void put_runs(Put how, const Rows &to, const Rows &from, const RowRun *runs, int64_t count,
              int64_t heads, int64_t width, int threads) {
    auto put = how == Put::add ? add_rows : copy_rows;
    std::vector<int64_t> ends(static_cast<std::size_t>(count));
    int64_t rows = 0;
    for (int64_t i = 0; i < count; ++i)
        ends[static_cast<std::size_t>(i)] = rows += runs[i].count;
#ifdef __SSE__
    const bool streams =
        how == Put::copy && rows * heads * width >= streamed_values && can_stream(to, width);
    if (streams) put = stream_rows;
#endif
    const int64_t step = std::max<int64_t>(1, block_values / std::max<int64_t>(heads * width, 1));
    parallel_blocks((rows + step - 1) / step, threads, [&](int64_t block) {
        const int64_t last = std::min(rows, (block + 1) * step);
        int64_t row = block * step;
        auto i = std::upper_bound(ends.begin(), ends.end(), row) - ends.begin();
        for (; row < last; ++i) {
            const RowRun &run = runs[i];
            const int64_t end = ends[static_cast<std::size_t>(i)];
            const int64_t skipped = row - (end - run.count), some = std::min(end, last) - row;
            put_run(put, to, from, {run.to + skipped, run.from + skipped, some}, heads, width);
            row += some;
        }
#ifdef __SSE__
        if (streams) _mm_sfence();
#endif
    });
}

} // namespace cpu_ops
