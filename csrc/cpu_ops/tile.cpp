// The algorithm of FlashAttention-2 (https://arxiv.org/abs/2307.08691) on CPU blocks that stay in L2.
// torch's own CPU kernel spends as long on the softmax as on the products; here each block is touched
// once for it.
//
// Rows of a head lie far apart in memory, at a stride that maps them to a few sets of the cache. What
// many products read is therefore copied together first.
#include "tile.h"

#include <limits>
#include <vector>

#include "kernels.h"
#include "products.h"

namespace cpu_ops {
namespace {

using std::int64_t;

constexpr int64_t query_block = 128;
constexpr int64_t key_block = 512;
constexpr int64_t backward_block = 128;
constexpr int64_t edge_block = 32;      // where a band ends inside of a block
constexpr int64_t product_lanes = 16;   // products of multiples of it are fastest
constexpr int64_t few_users = 256;      // rows that no more others see stay where they are
constexpr int64_t task_rows = 1024;     // forward: keys are gathered once for so many
constexpr int64_t backward_rows = 4096; // backward: likewise; bounds what a thread holds

constexpr float infinity = std::numeric_limits<float>::infinity();

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

int64_t filled(int64_t count) { return (count + product_lanes - 1) / product_lanes * product_lanes; }

// Zeros behind the last keys of a tile, to fill up the lanes of a product. Only there: what is computed
// for a row must not depend on the rows it comes with.
int64_t padding_of(const Tile &tile, Range keys) {
    return keys.end == tile.k_count ? filled(tile.k_count) - tile.k_count : 0;
}

Range common(Range a, Range b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

// Keys that row i sees, counted from keys.begin.
Range seen(const Tile &tile, int64_t i, Range keys) {
    const int64_t size = keys.size();
    const int64_t first = std::clamp<int64_t>(i - tile.high - keys.begin, 0, size);
    return {first, std::clamp<int64_t>(i - tile.low + 1 - keys.begin, first, size)};
}

// What of a block is seen, as rectangles body(rows, keys). Where the band ends inside of it, narrow ones
// skip most of what is hidden: of a diagonal block, 3/8 of it. That matters for short tiles, which
// have little else. Runs of keys suit products that sum over rows, runs of rows those over keys.
template <bool by_keys, class Body>
void for_each_rectangle(const Tile &tile, Range rows, Range keys, const Body &body) {
    // Keys that all rows see, but a few, so that products are of whole lanes.
    int64_t left = std::clamp(rows.end - 1 - tile.high, keys.begin, keys.end);
    left = std::min(keys.begin + filled(left - keys.begin), keys.end);
    int64_t right = std::clamp(rows.begin - tile.low + 1, left, keys.end);
    if (right < keys.end) right -= (right - left) % product_lanes;
    if (left < right) body(rows, Range{left, right});
    const auto edge = [&](Range hidden) {
        if (hidden.empty()) return;
        const Range along = by_keys ? hidden : rows;
        for (int64_t begin = along.begin; begin < along.end; begin += edge_block) {
            const Range run{begin, std::min(along.end, begin + edge_block)};
            const Range across = by_keys ? common(rows, rows_of_keys(tile, run))
                                         : common(hidden, keys_of_rows(tile, run));
            if (across.empty()) continue;
            by_keys ? body(across, run) : body(run, across);
        }
    };
    edge({keys.begin, left});
    edge({right, keys.end});
}

// Rows of a head: side by side in memory that a thread keeps, or where they are.
class Panel {
  public:
    // Rows to read, and zeros behind them.
    void load(const Rows &x, Range rows, int64_t head, int64_t width, bool gathered,
              int64_t padding = 0) {
        gathered = padding > 0 || (gathered && x.row != width);
        if (!gathered) return look_at(x, rows, head);
        reserve(rows.size() + padding, width);
        copy_rows(x.at(rows.begin, head), x.row, data_, width, rows.size(), width);
        std::fill_n(row(rows.size()), padding * width, 0.0f);
    }
    // Rows to add to, and afterwards to `close`; `fresh` ones hold nothing yet.
    void open(const Rows &x, Range rows, int64_t head, int64_t width, bool gathered, bool fresh) {
        gathered = gathered && x.row != width;
        put_ = !gathered ? nullptr : fresh ? copy_rows : add_rows;
        if (!gathered) {
            if (fresh) clear_rows(x, rows, head, width);
            return look_at(x, rows, head);
        }
        reserve(rows.size(), width);
        std::fill_n(data_, rows.size() * width, 0.0f);
    }
    void close(const Rows &x, Range rows, int64_t head) const {
        if (put_ != nullptr)
            put_(data_, stride_, x.at(rows.begin, head), x.row, rows.size(), stride_);
    }
    void reserve(int64_t rows, int64_t width) {
        stride_ = width;
        data_ = scratch(memory_, rows * width);
    }
    float *row(int64_t i) const { return data_ + i * stride_; }
    Matrix from(int64_t i, bool transposed = false) const { return {row(i), stride_, transposed}; }
    int64_t stride() const { return stride_; }

  private:
    void look_at(const Rows &x, Range rows, int64_t head) {
        data_ = x.at(rows.begin, head);
        stride_ = x.row;
    }

    std::vector<float> memory_;
    float *data_ = nullptr;
    int64_t stride_ = 0;
    decltype(&copy_rows) put_ = nullptr;
};

struct ForwardScratch {
    Panel query, key, value, sum, scores;
    std::vector<float> top, total;
};

// Where the online softmax of some rows stands before a tile.
void start_rows(Range rows, int64_t head, bool fresh, const Forward &pass, ForwardScratch &s) {
    const int64_t count = rows.size(), width = pass.shape.value_width;
    s.sum.reserve(count, width);
    s.top.resize(static_cast<std::size_t>(count));
    s.total.resize(static_cast<std::size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        const int64_t row = rows.begin + i;
        const float before = fresh ? -infinity : *pass.lse.at(row, head);
        const bool nothing = before == -infinity;
        s.top[static_cast<std::size_t>(i)] =
            nothing ? std::numeric_limits<float>::lowest() : before;
        s.total[static_cast<std::size_t>(i)] = nothing ? 0.0f : 1.0f;
        if (nothing)
            std::fill_n(s.sum.row(i), width, 0.0f);
        else
            std::copy_n(pass.out.at(row, head), width, s.sum.row(i));
    }
}

// A block of a tile: where it lies in the panels of its rows and of its keys, and how many zeros follow
// its keys.
struct Block {
    Range rows, keys;
    int64_t panel_row, panel_key, padding;

    int64_t row(Range some) const { return some.begin - panel_row; }
    int64_t key(Range some) const { return some.begin - panel_key; }
    // Keys of a product, with the zeros if they are the last ones.
    int64_t columns(Range some) const {
        return some.size() + (some.end == keys.end ? padding : 0);
    }
    int64_t columns_from(int64_t first) const { return keys.size() + padding - first; }
};

void attend(const Tile &tile, const Block &block, const Shape &shape, ForwardScratch &s) {
    const auto scores = [&](Range rows, Range keys) {
        return s.scores.row(rows.begin - block.rows.begin) + (keys.begin - block.keys.begin);
    };
    for_each_rectangle<true>(tile, block.rows, block.keys, [&](Range rows, Range keys) {
        multiply(rows.size(), block.columns(keys), shape.width, shape.scale,
                 s.query.from(block.row(rows)), s.key.from(block.key(keys), true), 0.0f,
                 scores(rows, keys), key_block);
    });
    for (int64_t i = block.rows.begin; i < block.rows.end; ++i) {
        const Range part = seen(tile, i, block.keys);
        const int64_t at = i - block.panel_row;
        float *row = s.scores.row(i - block.rows.begin);
        std::fill(row, row + part.begin, 0.0f);
        softmax_row_online(row + part.begin, part.size(), block.columns_from(part.begin),
                           &s.top[static_cast<std::size_t>(at)],
                           &s.total[static_cast<std::size_t>(at)], s.sum.row(at),
                           shape.value_width);
    }
    for_each_rectangle<false>(tile, block.rows, block.keys, [&](Range rows, Range keys) {
        multiply(rows.size(), shape.value_width, keys.size(), 1.0f,
                 {scores(rows, keys), key_block, false}, s.value.from(block.key(keys)), 1.0f,
                 s.sum.row(block.row(rows)), s.sum.stride());
    });
}

struct BackwardScratch {
    Panel query, grad, dq, key, value, dk, dv, weights, slopes;
    std::vector<float> lse, delta;
};

void block_backward(const Tile &tile, const Block &block, const Shape &shape, BackwardScratch &s) {
    constexpr int64_t stride = backward_block;
    const auto offset = [&](Range rows, Range keys) {
        return (rows.begin - block.rows.begin) * stride + keys.begin - block.keys.begin;
    };
    float *weights = s.weights.row(0), *slopes = s.slopes.row(0);
    for_each_rectangle<true>(tile, block.rows, block.keys, [&](Range rows, Range keys) {
        const int64_t row = block.row(rows), key = block.key(keys), at = offset(rows, keys);
        multiply(rows.size(), block.columns(keys), shape.width, shape.scale, s.query.from(row),
                 s.key.from(key, true), 0.0f, weights + at, stride);
        multiply(rows.size(), block.columns(keys), shape.value_width, 1.0f, s.grad.from(row),
                 s.value.from(key, true), 0.0f, slopes + at, stride);
    });
    for (int64_t i = block.rows.begin; i < block.rows.end; ++i) {
        const Range part = seen(tile, i, block.keys);
        const int64_t at = (i - block.rows.begin) * stride;
        float *weight = weights + at, *slope = slopes + at;
        std::fill(weight, weight + part.begin, 0.0f);
        std::fill(slope, slope + part.begin, 0.0f);
        const auto state = static_cast<std::size_t>(i - block.panel_row);
        attention_row_backward(weight + part.begin, slope + part.begin, part.size(),
                               block.columns_from(part.begin), s.lse[state], s.delta[state],
                               shape.scale);
    }
    for_each_rectangle<true>(tile, block.rows, block.keys, [&](Range rows, Range keys) {
        const int64_t row = block.row(rows), key = block.key(keys), at = offset(rows, keys);
        multiply(keys.size(), shape.value_width, rows.size(), 1.0f, {weights + at, stride, true},
                 s.grad.from(row), 1.0f, s.dv.row(key), s.dv.stride());
        multiply(keys.size(), shape.width, rows.size(), 1.0f, {slopes + at, stride, true},
                 s.query.from(row), 1.0f, s.dk.row(key), s.dk.stride());
    });
    for_each_rectangle<false>(tile, block.rows, block.keys, [&](Range rows, Range keys) {
        multiply(rows.size(), shape.width, keys.size(), 1.0f,
                 {slopes + offset(rows, keys), stride, false}, s.key.from(block.key(keys)), 1.0f,
                 s.dq.row(block.row(rows)), s.dq.stride());
    });
}

void clear_keys(const Tile &tile, Range keys, int64_t kv_head, const Backward &pass) {
    const Range rows{tile.k_start + keys.begin, tile.k_start + keys.end};
    clear_rows(pass.dk, rows, kv_head, pass.shape.width);
    clear_rows(pass.dv, rows, kv_head, pass.shape.value_width);
}

// Gradients of some rows of a tile, from one query head. Keys of the tile from `untouched` on hold
// nothing yet; returns from where on that is so afterwards.
int64_t rows_backward(const Tile &tile, Range rows, int64_t head, int64_t kv_head, bool fresh,
                      int64_t untouched, const Backward &pass, BackwardScratch &s) {
    constexpr int64_t block = backward_block;
    const Shape &shape = pass.shape;
    const Range at{tile.q_start + rows.begin, tile.q_start + rows.end};
    const bool gather_queries = tile.k_count > few_users, gather_keys = tile.q_count > few_users;
    s.query.load(pass.q, at, head, shape.width, gather_queries);
    s.grad.load(pass.grad, at, head, shape.value_width, gather_queries);
    s.dq.open(pass.dq, at, head, shape.width, gather_queries, fresh);
    s.lse.resize(static_cast<std::size_t>(rows.size()));
    s.delta.resize(static_cast<std::size_t>(rows.size()));
    const bool kept = pass.delta.data != nullptr;
    for (int64_t i = 0; i < rows.size(); ++i) {
        const auto state = static_cast<std::size_t>(i);
        s.lse[state] = *pass.lse.at(at.begin + i, head);
        if (kept && !fresh) {
            s.delta[state] = *pass.delta.at(at.begin + i, head);
            continue;
        }
        s.delta[state] =
            dot_row(s.grad.row(i), pass.out.at(at.begin + i, head), shape.value_width);
        if (kept) *pass.delta.at(at.begin + i, head) = s.delta[state];
    }
    const Range all = keys_of_rows(tile, rows);
    clear_keys(tile, {untouched, all.begin}, kv_head, pass);
    for (int64_t begin = all.begin / block * block; begin < all.end; begin += block) {
        const Range keys = common(all, {begin, begin + block});
        const Range key_rows{tile.k_start + keys.begin, tile.k_start + keys.end};
        const bool fresh_keys = keys.begin >= untouched;
        if (!fresh_keys) clear_keys(tile, {untouched, keys.end}, kv_head, pass);
        const int64_t padding = padding_of(tile, keys);
        s.key.load(pass.k, key_rows, kv_head, shape.width, gather_keys, padding);
        s.value.load(pass.v, key_rows, kv_head, shape.value_width, gather_keys, padding);
        s.dk.open(pass.dk, key_rows, kv_head, shape.width, gather_keys, fresh_keys);
        s.dv.open(pass.dv, key_rows, kv_head, shape.value_width, gather_keys, fresh_keys);
        const Range seeing = common(rows, rows_of_keys(tile, keys));
        for (int64_t from = seeing.begin; from < seeing.end; from += block) {
            const Range some{from, std::min(seeing.end, from + block)};
            block_backward(tile, {some, keys, rows.begin, keys.begin, padding}, shape, s);
        }
        s.dk.close(pass.dk, key_rows, kv_head);
        s.dv.close(pass.dv, key_rows, kv_head);
        untouched = std::max(untouched, keys.end);
    }
    s.dq.close(pass.dq, at, head);
    return std::max(untouched, all.begin);
}

} // namespace

int64_t rows_of_task(int64_t rows, int64_t heads, int threads) {
    int64_t result = task_rows;
    while (result > query_block && rows / result * heads < 4 * threads) result /= 2;
    return result;
}

void tile_forward(const Tile &tile, Range rows, int64_t head, bool fresh, const Forward &pass) {
    thread_local ForwardScratch s;
    const Shape &shape = pass.shape;
    const int64_t kv_head = head / (shape.heads / shape.kv_heads);
    const Range at{tile.q_start + rows.begin, tile.q_start + rows.end};
    start_rows(at, head, fresh, pass, s);
    s.query.load(pass.q, at, head, shape.width, tile.k_count > few_users);
    s.scores.reserve(query_block, key_block);
    const Range all = keys_of_rows(tile, rows);
    // Blocks begin at multiples of their size, whichever rows come together.
    for (int64_t begin = all.begin / key_block * key_block; begin < all.end; begin += key_block) {
        const Range keys = common(all, {begin, begin + key_block});
        const Range key_rows{tile.k_start + keys.begin, tile.k_start + keys.end};
        const int64_t padding = padding_of(tile, keys);
        const bool gathered = tile.q_count > few_users;
        s.key.load(pass.k, key_rows, kv_head, shape.width, gathered, padding);
        s.value.load(pass.v, key_rows, kv_head, shape.value_width, gathered, padding);
        for (int64_t from = rows.begin; from < rows.end; from += query_block) {
            const Range some{from, std::min(rows.end, from + query_block)};
            const Range visible = common(keys, keys_of_rows(tile, some));
            if (!visible.empty())
                attend(tile,
                       {some, visible, rows.begin, keys.begin, padding_of(tile, visible)}, shape,
                       s);
        }
    }
    for (int64_t i = 0; i < rows.size(); ++i) {
        const float total = s.total[static_cast<std::size_t>(i)];
        scale_row(s.sum.row(i), pass.out.at(at.begin + i, head), 1.0f / total, shape.value_width);
        *pass.lse.at(at.begin + i, head) = std::log(total) + s.top[static_cast<std::size_t>(i)];
    }
}

void tile_backward(const Tile &tile, int64_t kv_head, bool fresh, bool fresh_keys,
                   const Backward &pass) {
    thread_local BackwardScratch s;
    s.weights.reserve(backward_block, backward_block);
    s.slopes.reserve(backward_block, backward_block);
    const int64_t group = pass.shape.heads / pass.shape.kv_heads;
    int64_t untouched = fresh_keys ? 0 : tile.k_count;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
        for (int64_t begin = 0; begin < tile.q_count; begin += backward_rows)
            untouched =
                rows_backward(tile, {begin, std::min(tile.q_count, begin + backward_rows)}, head,
                              kv_head, fresh, untouched, pass, s);
    clear_keys(tile, {untouched, tile.k_count}, kv_head, pass); // what no row sees
}

void clear_rows(const Rows &x, Range rows, int64_t head, int64_t width) {
    for (int64_t i = rows.begin; i < rows.end; ++i) std::fill_n(x.at(i, head), width, 0.0f);
}

} // namespace cpu_ops
