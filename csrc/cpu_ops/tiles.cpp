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
constexpr int64_t edge_block = 32;

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

// Calls body(rows, keys) for rectangles that cover what is seen of a block. Where the band ends
// inside of it, narrow ones skip most of what is hidden: of a diagonal block, 3/8 instead of
// nothing. That matters for short tiles, which have little else.
template <class Body>
void for_each_rectangle(const Tile &tile, Range rows, Range keys, const Body &body) {
    // Keys that all rows see.
    const int64_t left = std::clamp(rows.end - 1 - tile.high, keys.begin, keys.end);
    const int64_t right = std::clamp(rows.begin - tile.low + 1, left, keys.end);
    const auto edge = [&](int64_t begin, int64_t end) {
        for (; begin < end; begin += edge_block) {
            const Range some{begin, std::min(end, begin + edge_block)};
            const Range hull = rows_of_keys(tile, some);
            const Range seeing{std::max(rows.begin, hull.begin), std::min(rows.end, hull.end)};
            if (!seeing.empty()) body(seeing, some);
        }
    };
    edge(keys.begin, left);
    if (left < right) body(rows, Range{left, right});
    edge(right, keys.end);
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
        const auto each = [&](const auto &body) {
            for_each_rectangle(tile, rows, keys, [&](Range some, Range part) {
                body(some.begin - rows.begin, some.size(), part.begin - begin, part.size());
            });
        };
        each([&](int64_t i, int64_t height, int64_t j, int64_t length) {
            multiply(height, length, shape.width, shape.scale,
                     {q.at(first + i, head), q.row, false},
                     {k.at(tile.k_start + begin + j, kv_head), k.row, true}, 0.0f,
                     scores + i * key_block + j, key_block);
        });
        for (int64_t i = 0; i < count; ++i) {
            const Range part = seen(tile, rows.begin + i, keys);
            float *row = scores + i * key_block;
            std::fill(row, row + part.begin, 0.0f);
            softmax_row_online(row + part.begin, part.size(), keys.size() - part.begin, top + i,
                               total + i, sum + i * width, width);
        }
        each([&](int64_t i, int64_t height, int64_t j, int64_t length) {
            multiply(height, width, length, 1.0f, {scores + i * key_block + j, key_block, false},
                     {v.at(tile.k_start + begin + j, kv_head), v.row, false}, 1.0f,
                     sum + i * width, width);
        });
    }
    for (int64_t i = 0; i < count; ++i) {
        scale_row(sum + i * width, out.at(first + i, head), 1.0f / total[i], width);
        *lse.at(first + i, head) = std::log(total[i]) + top[i];
    }
}

void clear_rows(const Rows &x, int64_t start, int64_t count, int64_t head, int64_t width) {
    for (int64_t i = start; i < start + count; ++i) std::fill_n(x.at(i, head), width, 0.0f);
}

// What the first tile on query rows does: no other has touched their dq and delta.
void start_queries(const Tile &tile, int64_t kv_head, const Rows &grad, const Rows &out,
                   const Rows &delta, const Rows &dq, const Shape &shape) {
    const int64_t group = shape.heads / shape.kv_heads;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        clear_rows(dq, tile.q_start, tile.q_count, head, shape.width);
        for (int64_t i = tile.q_start; i < tile.q_start + tile.q_count; ++i)
            *delta.at(i, head) = dot_row(grad.at(i, head), out.at(i, head), shape.value_width);
    }
}

// Keys outermost, as in attention.cpp; all three gradients are added to.
void backward_tile(const Tile &tile, int64_t kv_head, const Rows &grad, const Rows &q,
                   const Rows &k, const Rows &v, const Rows &lse, const Rows &delta,
                   const Rows &dq, const Rows &dk, const Rows &dv, const Shape &shape) {
    constexpr int64_t block = backward_block;
    thread_local std::vector<float> weight_memory, slope_memory;
    float *weights = scratch(weight_memory, block * block);
    float *slopes = scratch(slope_memory, block * block);
    const int64_t group = shape.heads / shape.kv_heads;
    for (int64_t begin = 0; begin < tile.k_count; begin += block) {
        const Range keys{begin, std::min(tile.k_count, begin + block)};
        const Range all = rows_of_keys(tile, keys);
        for (int64_t g = 0; g < group; ++g) {
            const int64_t head = kv_head * group + g;
            const auto rectangle = [&](Range rows, Range part) {
                const int64_t count = rows.size(), first = tile.q_start + rows.begin;
                const int64_t key_row = tile.k_start + part.begin;
                const Matrix key{k.at(key_row, kv_head), k.row, false};
                const Matrix query{q.at(first, head), q.row, false};
                const Matrix upstream{grad.at(first, head), grad.row, false};
                multiply(count, part.size(), shape.width, shape.scale, query,
                         {key.data, key.stride, true}, 0.0f, weights, block);
                multiply(count, part.size(), shape.value_width, 1.0f, upstream,
                         {v.at(key_row, kv_head), v.row, true}, 0.0f, slopes, block);
                for (int64_t i = 0; i < count; ++i) {
                    const Range some = seen(tile, rows.begin + i, part);
                    float *weight = weights + i * block, *slope = slopes + i * block;
                    std::fill(weight, weight + some.begin, 0.0f);
                    std::fill(slope, slope + some.begin, 0.0f);
                    attention_row_backward(
                        weight + some.begin, slope + some.begin, some.size(),
                        part.size() - some.begin, *lse.at(first + i, head),
                        *delta.at(first + i, head), shape.scale);
                }
                multiply(part.size(), shape.value_width, count, 1.0f, {weights, block, true},
                         upstream, 1.0f, dv.at(key_row, kv_head), dv.row);
                multiply(part.size(), shape.width, count, 1.0f, {slopes, block, true}, query, 1.0f,
                         dk.at(key_row, kv_head), dk.row);
                multiply(count, shape.width, part.size(), 1.0f, {slopes, block, false}, key, 1.0f,
                         dq.at(first, head), dq.row);
            };
            for (int64_t from = all.begin; from < all.end; from += block)
                for_each_rectangle(tile, {from, std::min(all.end, from + block)}, keys, rectangle);
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
                    const Rows &lse, const Rows &delta, const Rows &dq, const Rows &dk,
                    const Rows &dv, const Tile *tiles, int64_t count, int64_t fresh,
                    const Shape &shape, int threads) {
    const Groups groups = group_tiles(tiles, count, true);
    const int64_t tasks = static_cast<int64_t>(groups.size()) * shape.kv_heads;
    parallel_blocks(tasks, threads, [&](int64_t t) {
        const int64_t kv_head = t % shape.kv_heads;
        const auto &group = groups[static_cast<std::size_t>(t / shape.kv_heads)];
        // Here, where they stay in the cache, and not in a pass over memory of their own.
        for (const int64_t i : group) {
            clear_rows(dk, tiles[i].k_start, tiles[i].k_count, kv_head, shape.width);
            clear_rows(dv, tiles[i].k_start, tiles[i].k_count, kv_head, shape.value_width);
            if (i < fresh) start_queries(tiles[i], kv_head, grad, out, delta, dq, shape);
        }
        for (const int64_t i : group)
            backward_tile(tiles[i], kv_head, grad, q, k, v, lse, delta, dq, dk, dv, shape);
    });
}

} // namespace cpu_ops
