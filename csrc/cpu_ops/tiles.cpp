// Tiles that share rows form a group, which one thread works through in order, head by head:
// results do not depend on the number of threads.
#include "tiles.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "parallel.h"

namespace cpu_ops {
namespace {

using std::int64_t;

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

} // namespace

void tiles_forward(const Forward &pass, const Tile *tiles, int64_t count, int64_t fresh,
                   int threads) {
    struct Task {
        const std::vector<int64_t> *group;
        int64_t head;
        Range rows; // of the only tile of its group; empty for all rows of every tile
    };
    const Groups groups = group_tiles(tiles, count, false);
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += tiles[i].q_count;
    const int64_t step = rows_of_task(total, pass.shape.heads, threads);
    std::vector<Task> tasks;
    for (const auto &group : groups) {
        const int64_t rows = tiles[group[0]].q_count;
        for (int64_t head = 0; head < pass.shape.heads; ++head) {
            if (group.size() > 1) {
                tasks.push_back({&group, head, {0, 0}});
                continue;
            }
            // The last rows see the most keys: they go first.
            for (int64_t b = (rows - 1) / step; b >= 0; --b)
                tasks.push_back({&group, head, {b * step, std::min(rows, (b + 1) * step)}});
        }
    }
    parallel_blocks(static_cast<int64_t>(tasks.size()), threads, [&](int64_t t) {
        const Task &task = tasks[static_cast<std::size_t>(t)];
        for (const int64_t i : *task.group) {
            const Range rows = task.rows.empty() ? Range{0, tiles[i].q_count} : task.rows;
            for (int64_t from = rows.begin; from < rows.end; from += step)
                tile_forward(tiles[i], {from, std::min(rows.end, from + step)}, task.head,
                             i < fresh, pass);
        }
    });
}

void tiles_backward(const Backward &pass, const Tile *tiles, int64_t count, int64_t fresh,
                    int threads) {
    const Shape &shape = pass.shape;
    const Groups groups = group_tiles(tiles, count, true);
    const int64_t tasks = static_cast<int64_t>(groups.size()) * shape.kv_heads;
    parallel_blocks(tasks, threads, [&](int64_t t) {
        const int64_t kv_head = t % shape.kv_heads;
        const auto &group = groups[static_cast<std::size_t>(t / shape.kv_heads)];
        // A tile on its own is the first on its keys; others may meet there in any order.
        const bool alone = group.size() == 1;
        if (!alone)
            for (const int64_t i : group) {
                const Range keys{tiles[i].k_start, tiles[i].k_start + tiles[i].k_count};
                clear_rows(pass.dk, keys, kv_head, shape.width);
                clear_rows(pass.dv, keys, kv_head, shape.value_width);
            }
        for (const int64_t i : group) tile_backward(tiles[i], kv_head, i < fresh, alone, pass);
    });
}

} // namespace cpu_ops
