// The kernel of attention.cpp for any band between any query and key rows. Merging costs nothing
// of its own: the online softmax goes on from the output and log-sum-exp of earlier tiles.
//
// Tiles that share rows form a group, which one thread works through in order, head by head:
// results do not depend on the number of threads.
#include "tiles.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "products.h"

namespace cpu_ops {
namespace {

using std::int64_t;

constexpr int64_t query_block = 128;
constexpr int64_t key_block = 512;
constexpr int64_t backward_block = 128;

struct Range {
    int64_t begin, end;
    int64_t size() const { return std::max<int64_t>(end - begin, 0); }
    bool empty() const { return end <= begin; }
};

// Keys that some row of [rows.begin, rows.end) sees.
Range keys_of_rows(const Tile &tile, Range rows) {
    return {std::max<int64_t>(0, rows.begin - tile.high),
            std::min(tile.k_count, rows.end - tile.low)};
}

// Rows that see some key of [keys.begin, keys.end).
Range rows_of_keys(const Tile &tile, Range keys) {
    return {std::max<int64_t>(0, keys.begin + tile.low),
            std::min(tile.q_count, keys.end + tile.high)};
}

// Keys that row i sees, counted from keys.begin.
Range seen(const Tile &tile, int64_t i, Range keys) {
    const int64_t size = keys.size();
    const int64_t first = std::clamp<int64_t>(i - tile.high - keys.begin, 0, size);
    return {first, std::clamp<int64_t>(i - tile.low + 1 - keys.begin, first, size)};
}

using Groups = std::vector<std::vector<int64_t>>;

// Gives tiles whose rows [start, start + count) overlap the same leader.
template <class Start, class Count>
void unite(const Tile *tiles, int64_t count, std::vector<int64_t> &leader, Start start,
           Count length) {
    const auto find = [&](int64_t i) {
        while (leader[static_cast<std::size_t>(i)] != i) i = leader[static_cast<std::size_t>(i)];
        return i;
    };
    std::vector<int64_t> order(static_cast<std::size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
        return start(tiles[a]) < start(tiles[b]);
    });
    int64_t end = std::numeric_limits<int64_t>::min(), last = 0;
    for (const int64_t i : order) {
        if (start(tiles[i]) < end) {
            const int64_t a = find(i), b = find(last);
            leader[static_cast<std::size_t>(std::max(a, b))] = std::min(a, b);
        }
        end = std::max(end, start(tiles[i]) + length(tiles[i]));
        last = i;
    }
}

// Tiles that share query rows, and with `keys` also those that share key rows; largest group first.
Groups group_tiles(const Tile *tiles, int64_t count, bool keys) {
    std::vector<int64_t> leader(static_cast<std::size_t>(count));
    std::iota(leader.begin(), leader.end(), 0);
    unite(tiles, count, leader, [](const Tile &t) { return t.q_start; },
          [](const Tile &t) { return t.q_count; });
    if (keys)
        unite(tiles, count, leader, [](const Tile &t) { return t.k_start; },
              [](const Tile &t) { return t.k_count; });
    std::vector<std::vector<int64_t>> of_leader(static_cast<std::size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        int64_t top = i;
        while (leader[static_cast<std::size_t>(top)] != top)
            top = leader[static_cast<std::size_t>(top)];
        of_leader[static_cast<std::size_t>(top)].push_back(i);
    }
    Groups groups;
    for (auto &group : of_leader)
        if (!group.empty()) groups.push_back(std::move(group));
    const auto work = [&](const std::vector<int64_t> &group) {
        int64_t total = 0;
        for (const int64_t i : group) total += tiles[i].q_count * tiles[i].k_count;
        return total;
    };
    std::stable_sort(groups.begin(), groups.end(),
                     [&](const auto &a, const auto &b) { return work(a) > work(b); });
    return groups;
}

void forward_block(const Tile &tile, Range rows, int64_t head, bool fresh, const Rows &q,
                   const Rows &k, const Rows &v, const Rows &out, const Rows &lse,
                   const Shape &shape) {
    thread_local std::vector<float> score_memory, sum_memory;
    const int64_t count = rows.size(), width = shape.value_width, first = tile.q_start + rows.begin;
    const int64_t kv_head = head / (shape.heads / shape.kv_heads);
    float *scores = scratch(score_memory, query_block * key_block);
    float *sum = scratch(sum_memory, query_block * width);
    float top[query_block], total[query_block];
    for (int64_t i = 0; i < count; ++i) {
        const float before = fresh ? -std::numeric_limits<float>::infinity()
                                   : *lse.at(first + i, head);
        const bool nothing = before == -std::numeric_limits<float>::infinity();
        top[i] = nothing ? std::numeric_limits<float>::lowest() : before;
        total[i] = nothing ? 0.0f : 1.0f;
        if (nothing)
            std::fill(sum + i * width, sum + (i + 1) * width, 0.0f);
        else
            std::copy_n(out.at(first + i, head), width, sum + i * width);
    }
    const Range all = keys_of_rows(tile, rows);
    for (int64_t begin = all.begin; begin < all.end; begin += key_block) {
        const Range keys{begin, std::min(all.end, begin + key_block)};
        multiply(count, keys.size(), shape.width, shape.scale,
                 {q.at(first, head), q.row, false},
                 {k.at(tile.k_start + begin, kv_head), k.row, true}, 0.0f, scores, key_block);
        for (int64_t i = 0; i < count; ++i) {
            const Range part = seen(tile, rows.begin + i, keys);
            float *row = scores + i * key_block;
            std::fill(row, row + part.begin, 0.0f);
            softmax_row_online(row + part.begin, part.size(), keys.size() - part.begin, top + i,
                               total + i, sum + i * width, width);
        }
        multiply(count, width, keys.size(), 1.0f, {scores, key_block, false},
                 {v.at(tile.k_start + begin, kv_head), v.row, false}, 1.0f, sum, width);
    }
    for (int64_t i = 0; i < count; ++i) {
        scale_row(sum + i * width, out.at(first + i, head), 1.0f / total[i], width);
        *lse.at(first + i, head) = std::log(total[i]) + top[i];
    }
}

// Keys outermost, as in attention.cpp; all three gradients are added to.
void backward_tile(const Tile &tile, int64_t kv_head, const Rows &grad, const Rows &q,
                   const Rows &k, const Rows &v, const Rows &out, const Rows &lse, const Rows &dq,
                   const Rows &dk, const Rows &dv, const Shape &shape) {
    constexpr int64_t block = backward_block;
    thread_local std::vector<float> weight_memory, slope_memory, delta;
    float *weights = scratch(weight_memory, block * block);
    float *slopes = scratch(slope_memory, block * block);
    const int64_t group = shape.heads / shape.kv_heads;
    delta.resize(static_cast<std::size_t>(group * tile.q_count));
    for (int64_t g = 0; g < group; ++g)
        for (int64_t i = 0; i < tile.q_count; ++i) {
            const int64_t head = kv_head * group + g, row = tile.q_start + i;
            delta[static_cast<std::size_t>(g * tile.q_count + i)] =
                dot_row(grad.at(row, head), out.at(row, head), shape.value_width);
        }
    for (int64_t begin = 0; begin < tile.k_count; begin += block) {
        const Range keys{begin, std::min(tile.k_count, begin + block)};
        const Range all = rows_of_keys(tile, keys);
        const Matrix key{k.at(tile.k_start + begin, kv_head), k.row, false};
        const Matrix value{v.at(tile.k_start + begin, kv_head), v.row, false};
        for (int64_t g = 0; g < group; ++g) {
            const int64_t head = kv_head * group + g;
            for (int64_t from = all.begin; from < all.end; from += block) {
                const int64_t rows = std::min(block, all.end - from), first = tile.q_start + from;
                const Matrix query{q.at(first, head), q.row, false};
                const Matrix upstream{grad.at(first, head), grad.row, false};
                multiply(rows, keys.size(), shape.width, shape.scale, query,
                         {key.data, key.stride, true}, 0.0f, weights, block);
                multiply(rows, keys.size(), shape.value_width, 1.0f, upstream,
                         {value.data, value.stride, true}, 0.0f, slopes, block);
                for (int64_t i = 0; i < rows; ++i) {
                    const Range part = seen(tile, from + i, keys);
                    float *weight = weights + i * block, *slope = slopes + i * block;
                    std::fill(weight, weight + part.begin, 0.0f);
                    std::fill(slope, slope + part.begin, 0.0f);
                    attention_row_backward(
                        weight + part.begin, slope + part.begin, part.size(),
                        keys.size() - part.begin, *lse.at(first + i, head),
                        delta[static_cast<std::size_t>(g * tile.q_count + from + i)], shape.scale);
                }
                multiply(keys.size(), shape.value_width, rows, 1.0f, {weights, block, true},
                         upstream, 1.0f, dv.at(tile.k_start + begin, kv_head), dv.row);
                multiply(keys.size(), shape.width, rows, 1.0f, {slopes, block, true}, query, 1.0f,
                         dk.at(tile.k_start + begin, kv_head), dk.row);
                multiply(rows, shape.width, keys.size(), 1.0f, {slopes, block, false}, key, 1.0f,
                         dq.at(first, head), dq.row);
            }
        }
    }
}

} // namespace

void tiles_forward(const Rows &q, const Rows &k, const Rows &v, const Rows &out, const Rows &lse,
                   const Tile *tiles, int64_t count, int64_t fresh, const Shape &shape,
                   int threads) {
    struct Task {
        const std::vector<int64_t> *group;
        int64_t head;
        Range rows; // of the only tile of its group; empty for all rows of every tile
    };
    const Groups groups = group_tiles(tiles, count, false);
    std::vector<Task> tasks;
    for (const auto &group : groups) {
        const int64_t rows = tiles[group[0]].q_count;
        for (int64_t head = 0; head < shape.heads; ++head) {
            if (group.size() > 1) {
                tasks.push_back({&group, head, {0, 0}});
                continue;
            }
            // The last block sees the most keys: it goes first.
            for (int64_t b = (rows - 1) / query_block; b >= 0; --b)
                tasks.push_back(
                    {&group, head, {b * query_block, std::min(rows, (b + 1) * query_block)}});
        }
    }
    parallel_blocks(static_cast<int64_t>(tasks.size()), threads, [&](int64_t t) {
        const Task &task = tasks[static_cast<std::size_t>(t)];
        for (const int64_t i : *task.group) {
            const Tile &tile = tiles[i];
            const Range rows = task.rows.empty() ? Range{0, tile.q_count} : task.rows;
            for (int64_t from = rows.begin; from < rows.end; from += query_block)
                forward_block(tile, {from, std::min(rows.end, from + query_block)}, task.head,
                              i < fresh, q, k, v, out, lse, shape);
        }
    });
}

void tiles_backward(const Rows &grad, const Rows &q, const Rows &k, const Rows &v, const Rows &out,
                    const Rows &lse, const Rows &dq, const Rows &dk, const Rows &dv,
                    const Tile *tiles, int64_t count, const Shape &shape, int threads) {
    const Groups groups = group_tiles(tiles, count, true);
    const int64_t tasks = static_cast<int64_t>(groups.size()) * shape.kv_heads;
    parallel_blocks(tasks, threads, [&](int64_t t) {
        for (const int64_t i : groups[static_cast<std::size_t>(t / shape.kv_heads)])
            backward_tile(tiles[i], t % shape.kv_heads, grad, q, k, v, out, lse, dq, dk, dv, shape);
    });
}

} // namespace cpu_ops
