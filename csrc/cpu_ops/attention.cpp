// The algorithm of FlashAttention-2 (https://arxiv.org/abs/2307.08691) on CPU tiles that stay in L2.
// torch's own CPU kernel spends as long on the softmax as on the products; here each tile is touched
// once for it. A task is a query block forward, a key-value head of a segment backward, and computes
// the same whoever runs it: results do not depend on the number of threads.
#include "attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "products.h"

namespace cpu_ops {

Sgemm &sgemm() {
    static Sgemm pointer = nullptr;
    return pointer;
}

namespace {

using std::int64_t;

constexpr int64_t query_block = 128;
constexpr int64_t key_block = 512;
constexpr int64_t backward_block = 128;

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

struct QueryTask {
    Segment segment;
    int64_t head, begin, end;
};

void forward_task(const QueryTask &task, const Stream &q, const Stream &k, const Stream &v,
                  const Stream &out, const Stream &lse, const Shape &shape) {
    thread_local std::vector<float> score_memory, sum_memory;
    const int64_t rows = task.end - task.begin, width = shape.value_width;
    float *scores = scratch(score_memory, query_block * key_block);
    float *sum = scratch(sum_memory, query_block * width);
    const int64_t kv_head = task.head / (shape.heads / shape.kv_heads);
    const int64_t row = task.segment.row, first = task.segment.start;
    std::fill(sum, sum + rows * width, 0.0f);
    float top[query_block], total[query_block];
    std::fill(top, top + rows, std::numeric_limits<float>::lowest());
    std::fill(total, total + rows, 0.0f);
    for (int64_t begin = 0; begin < task.end; begin += key_block) {
        const int64_t keys = std::min(key_block, task.end - begin);
        multiply(rows, keys, shape.width, shape.scale,
                 {q.at(row, first + task.begin, task.head), q.slot, false},
                 {k.at(row, first + begin, kv_head), k.slot, true}, 0.0f, scores, key_block);
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t seen = std::min(keys, task.begin + i + 1 - begin);
            softmax_row_online(scores + i * key_block, std::max<int64_t>(seen, 0), keys,
                               top + i, total + i, sum + i * width, width);
        }
        multiply(rows, width, keys, 1.0f, {scores, key_block, false},
                 {v.at(row, first + begin, kv_head), v.slot, false}, 1.0f, sum, width);
    }
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t slot = first + task.begin + i;
        scale_row(sum + i * width, out.at(row, slot, task.head), 1.0f / total[i], width);
        *lse.at(row, slot, task.head) = std::log(total[i]) + top[i];
    }
}

struct HeadTask {
    Segment segment;
    int64_t kv_head;
};

// Keys outermost: dk and dv of a block are finished before the next, dq gathers one term from each.
void backward_task(const HeadTask &task, const Stream &grad, const Stream &q, const Stream &k,
                   const Stream &v, const Stream &out, const Stream &lse, const Stream &dq,
                   const Stream &dk, const Stream &dv, const Shape &shape) {
    constexpr int64_t block = backward_block;
    thread_local std::vector<float> weight_memory, slope_memory, delta;
    float *weights = scratch(weight_memory, block * block);
    float *slopes = scratch(slope_memory, block * block);
    const int64_t group = shape.heads / shape.kv_heads, length = task.segment.length;
    const int64_t row = task.segment.row, first = task.segment.start;
    delta.resize(static_cast<std::size_t>(group * length));
    for (int64_t g = 0; g < group; ++g)
        for (int64_t i = 0; i < length; ++i) {
            const int64_t head = task.kv_head * group + g;
            delta[static_cast<std::size_t>(g * length + i)] =
                dot_row(grad.at(row, first + i, head), out.at(row, first + i, head),
                        shape.value_width);
        }
    for (int64_t begin = 0; begin < length; begin += block) {
        const int64_t keys = std::min(block, length - begin);
        const Matrix key{k.at(row, first + begin, task.kv_head), k.slot, false};
        const Matrix value{v.at(row, first + begin, task.kv_head), v.slot, false};
        for (int64_t g = 0; g < group; ++g) {
            const int64_t head = task.kv_head * group + g;
            for (int64_t from = begin; from < length; from += block) {
                const int64_t rows = std::min(block, length - from);
                const Matrix query{q.at(row, first + from, head), q.slot, false};
                const Matrix upstream{grad.at(row, first + from, head), grad.slot, false};
                multiply(rows, keys, shape.width, shape.scale, query, {key.data, key.stride, true},
                         0.0f, weights, block);
                multiply(rows, keys, shape.value_width, 1.0f, upstream,
                         {value.data, value.stride, true}, 0.0f, slopes, block);
                for (int64_t i = 0; i < rows; ++i)
                    attention_row_backward(
                        weights + i * block, slopes + i * block,
                        std::min(keys, from + i + 1 - begin), keys,
                        *lse.at(row, first + from + i, head),
                        delta[static_cast<std::size_t>(g * length + from + i)], shape.scale);
                const float more = g == 0 && from == begin ? 0.0f : 1.0f;
                multiply(keys, shape.value_width, rows, 1.0f, {weights, block, true},
                         upstream, more, dv.at(row, first + begin, task.kv_head), dv.slot);
                multiply(keys, shape.width, rows, 1.0f, {slopes, block, true}, query, more,
                         dk.at(row, first + begin, task.kv_head), dk.slot);
                multiply(rows, shape.width, keys, 1.0f, {slopes, block, false}, key,
                         begin == 0 ? 0.0f : 1.0f, dq.at(row, first + from, head), dq.slot);
            }
        }
    }
}

} // namespace

void attention_forward(const Stream &q, const Stream &k, const Stream &v, const Stream &out,
                       const Stream &lse, const int64_t *segments, int64_t count,
                       const Shape &shape, int threads) {
    std::vector<QueryTask> tasks;
    for (const Segment &segment : longest_first(segments, count)) {
        // The last block sees the most keys: it goes first.
        const int64_t blocks = (segment.length + query_block - 1) / query_block;
        for (int64_t b = blocks - 1; b >= 0; --b)
            for (int64_t head = 0; head < shape.heads; ++head)
                tasks.push_back({segment, head, b * query_block,
                                 std::min(segment.length, (b + 1) * query_block)});
    }
    parallel_blocks(static_cast<int64_t>(tasks.size()), threads, [&](int64_t i) {
        forward_task(tasks[static_cast<std::size_t>(i)], q, k, v, out, lse, shape);
    });
}

void attention_backward(const Stream &grad, const Stream &q, const Stream &k, const Stream &v,
                        const Stream &out, const Stream &lse, const Stream &dq, const Stream &dk,
                        const Stream &dv, const int64_t *segments, int64_t count,
                        const Shape &shape, int threads) {
    std::vector<HeadTask> tasks;
    for (const Segment &segment : longest_first(segments, count))
        for (int64_t head = 0; head < shape.kv_heads; ++head) tasks.push_back({segment, head});
    parallel_blocks(static_cast<int64_t>(tasks.size()), threads, [&](int64_t i) {
        backward_task(tasks[static_cast<std::size_t>(i)], grad, q, k, v, out, lse, dq, dk, dv,
                      shape);
    });
}

} // namespace cpu_ops
