// A segment is one tile whose rows nobody else has. A task is a run of query rows forward, a key-value
// head of a segment backward, and computes the same whoever runs it.
#include "attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "parallel.h"
#include "tile.h"

namespace cpu_ops {

Sgemm &sgemm() {
    static Sgemm pointer = nullptr;
    return pointer;
}

namespace {

using std::int64_t;

struct Segment {
    int64_t row, start, length;
};

// Longest first, so that no thread is left with a giant at the end.
std::vector<Segment> longest_first(const int64_t *segments, int64_t count) {
    std::vector<Segment> result;
    result.reserve(static_cast<std::size_t>(count));
    for (int64_t i = 0; i < count; ++i)
        result.push_back({segments[3 * i], segments[3 * i + 1], segments[3 * i + 2]});
    std::stable_sort(result.begin(), result.end(),
                     [](const Segment &a, const Segment &b) { return a.length > b.length; });
    return result;
}

Rows rows_of(const Stream &x, int64_t row) { return {x.data + row * x.row, x.slot, x.head}; }

// Every row sees the keys up to its own.
Tile causal_tile(const Segment &segment) {
    constexpr int64_t unbounded = std::numeric_limits<int64_t>::max() / 4;
    return {segment.start, segment.length, segment.start, segment.length, 0, unbounded};
}

} // namespace

void attention_forward(const Stream &q, const Stream &k, const Stream &v, const Stream &out,
                       const Stream &lse, const int64_t *segments, int64_t count,
                       const Shape &shape, int threads) {
    struct Task {
        Segment segment;
        int64_t head;
        Range rows;
    };
    const std::vector<Segment> sorted = longest_first(segments, count);
    int64_t total = 0;
    for (const Segment &segment : sorted) total += segment.length;
    const int64_t step = rows_of_task(total, shape.heads, threads);
    std::vector<Task> tasks;
    for (const Segment &segment : sorted) {
        // The last rows see the most keys: they go first.
        for (int64_t b = (segment.length - 1) / step; b >= 0; --b)
            for (int64_t head = 0; head < shape.heads; ++head)
                tasks.push_back(
                    {segment, head, {b * step, std::min(segment.length, (b + 1) * step)}});
    }
    parallel_blocks(static_cast<int64_t>(tasks.size()), threads, [&](int64_t i) {
        const Task &task = tasks[static_cast<std::size_t>(i)];
        const int64_t row = task.segment.row;
        const Forward pass{rows_of(q, row),   rows_of(k, row),   rows_of(v, row),
                           rows_of(out, row), rows_of(lse, row), shape};
        tile_forward(causal_tile(task.segment), task.rows, task.head, true, pass);
    });
}

void attention_backward(const Stream &grad, const Stream &q, const Stream &k, const Stream &v,
                        const Stream &out, const Stream &lse, const Stream &dq, const Stream &dk,
                        const Stream &dv, const int64_t *segments, int64_t count,
                        const Shape &shape, int threads) {
    const std::vector<Segment> sorted = longest_first(segments, count);
    const int64_t tasks = count * shape.kv_heads;
    parallel_blocks(tasks, threads, [&](int64_t i) {
        const Segment &segment = sorted[static_cast<std::size_t>(i / shape.kv_heads)];
        const int64_t kv_head = i % shape.kv_heads, row = segment.row;
        const Backward pass{rows_of(grad, row), rows_of(q, row),   rows_of(k, row),
                            rows_of(v, row),    rows_of(out, row), rows_of(lse, row),
                            {nullptr, 0, 0},    rows_of(dq, row),  rows_of(dk, row),
                            rows_of(dv, row),   shape};
        tile_backward(causal_tile(segment), kv_head, true, true, pass);
    });
}

} // namespace cpu_ops
