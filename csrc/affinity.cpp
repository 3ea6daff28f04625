// Chunks change places between ranks until documents lie together; see reference_affinity.py.

#include <algorithm>
#include <numeric>

#include "arrays.h"

namespace packed {
namespace {

// A document that reaches over a chunk's edge.
struct Document {
  int64_t first, last;  // chunks it touches
  int64_t begin, end;   // its real tokens in the pack
};

class Settlement {
 public:
  Settlement(const Span<int64_t>& ranks, const Span<int64_t>& areas, const Span<int64_t>& classes,
             const Span<int64_t>& begins, const Span<int64_t>& lengths,
             const Span<int64_t>& edges, int64_t cp)
      : area_(areas),
        kind_(classes),
        edge_(edges),
        rank_(ranks.data, ranks.data + ranks.size),
        held_(static_cast<size_t>(cp)),
        load_(static_cast<size_t>(cp), 0),
        left_(static_cast<size_t>(ranks.size), -1),
        right_(static_cast<size_t>(ranks.size), -1) {
    for (int64_t c = 0; c < ranks.size; ++c) {
      held_[index(ranks[c])].push_back(c);
      load_[index(ranks[c])] += areas[c];
    }
    int64_t chunk = 0;
    for (int64_t d = 0; d < begins.size; ++d) {
      if (lengths[d] < 1) continue;
      const Document document{0, 0, begins[d], begins[d] + lengths[d]};
      while (chunk + 1 < ranks.size && edges[chunk + 1] <= document.begin) ++chunk;
      int64_t last = chunk;
      while (last + 1 < ranks.size && edges[last + 1] < document.end) ++last;
      if (last == chunk) continue;
      const auto number = static_cast<int64_t>(documents_.size());
      documents_.push_back({chunk, last, document.begin, document.end});
      for (int64_t c = chunk; c < last; ++c) right_[index(c)] = left_[index(c + 1)] = number;
      chunk = last;
    }
  }

  // Takes area from the fullest rank until none is above the limit.
  void balance(int64_t limit, int64_t budget) {
    while (budget > 0) {
      const auto full = std::max_element(load_.begin(), load_.end());
      const auto idle = std::min_element(load_.begin(), load_.end());
      if (*full <= limit) return;
      int64_t best = *full, best_x = -1, best_y = -1;
      for (const int64_t x : held_[index(full - load_.begin())])
        for (const int64_t y : held_[index(idle - load_.begin())]) {
          const int64_t moved = area_[x] - area_[y];
          const int64_t after = std::max(*full - moved, *idle + moved);
          if (kind_[x] != kind_[y] || after >= best) continue;
          best = after;
          best_x = x;
          best_y = y;
        }
      if (best_x < 0) return;
      const auto pairs = held_[index(full - load_.begin())].size();
      budget -= static_cast<int64_t>(pairs * pairs + load_.size());
      swap(best_x, best_y);
    }
  }

  // Brings chunks to ranks that hold a neighbour of the same document.
  void gather(int64_t limit, int64_t budget) {
    const auto count = static_cast<int64_t>(rank_.size());
    for (bool better = true; better && budget > 0;) {
      better = false;
      for (int64_t x = 0; x < count && budget > 0; ++x) {
        const int64_t before = left_[index(x)] < 0 ? -1 : rank_[index(x - 1)];
        const int64_t after = right_[index(x)] < 0 ? -1 : rank_[index(x + 1)];
        int64_t best = 0, best_y = -1;
        seek(x, before, limit, &best, &best_y, &budget);
        if (after != before) seek(x, after, limit, &best, &best_y, &budget);
        if (best_y < 0) continue;
        swap(x, best_y);
        better = true;
      }
    }
  }

  // Rows that ranks need of the documents, their own included.
  int64_t rows() const {
    int64_t total = 0;
    for (const std::vector<int64_t>& held : held_)
      for (size_t i = 0; i < held.size(); ++i) {
        const int64_t chunk = held[i];
        const int64_t all[2] = {left_[index(chunk)], right_[index(chunk)]};
        for (int side = all[0] == all[1] ? 1 : 0; side < 2; ++side) {
          if (all[side] < 0) continue;
          const Document& d = documents_[index(all[side])];
          if (i + 1 < held.size() && held[i + 1] <= d.last) continue;
          total += std::min(edge_[chunk + 1], d.end) - d.begin;
        }
      }
    return total;
  }

  const std::vector<int64_t>& ranks() const { return rank_; }

 private:
  static size_t index(int64_t i) { return static_cast<size_t>(i); }

  // The chunk of `to` whose exchange with x saves the most rows.
  void seek(int64_t x, int64_t to, int64_t limit, int64_t* best, int64_t* best_y,
            int64_t* budget) const {
    const int64_t from = rank_[index(x)];
    if (to < 0 || to == from) return;
    const int64_t load_from = load_[index(from)], load_to = load_[index(to)];
    for (const int64_t y : held_[index(to)]) {
      const int64_t moved = area_[x] - area_[y];
      if (kind_[x] != kind_[y] || load_to + moved > std::max(limit, load_to) ||
          load_from - moved > std::max(limit, load_from))
        continue;
      --*budget;
      const int64_t saved = gain(x, y);
      if (saved > *best) {
        *best = saved;
        *best_y = y;
      }
    }
  }

  // Rows that no longer travel when x and y change places.
  int64_t gain(int64_t x, int64_t y) const {
    const int64_t all[4] = {left_[index(x)], right_[index(x)], left_[index(y)], right_[index(y)]};
    int64_t saved = 0;
    for (int i = 0; i < 4; ++i) {
      if (all[i] < 0 || std::find(all, all + i, all[i]) != all + i) continue;
      const Document& d = documents_[index(all[i])];
      const int64_t a = rank_[index(x)], b = rank_[index(y)];
      saved += reach(d, a, -1, -1) + reach(d, b, -1, -1);
      saved -= reach(d, a, x, y) + reach(d, b, y, x);
    }
    return saved;
  }

  // Rows of a document that a rank needs: all up to the end of its last chunk of it. One chunk is
  // taken to be `gone` from the rank, and another to have `come`.
  int64_t reach(const Document& d, int64_t rank, int64_t gone, int64_t come) const {
    const std::vector<int64_t>& held = held_[index(rank)];
    auto at = std::upper_bound(held.begin(), held.end(), d.last);
    if (at != held.begin() && *(at - 1) == gone) --at;
    int64_t last = at == held.begin() ? -1 : *(at - 1);
    if (come <= d.last) last = std::max(last, come);
    return last < d.first ? 0 : std::min(edge_[last + 1], d.end) - d.begin;
  }

  void swap(int64_t x, int64_t y) {
    const int64_t a = rank_[index(x)], b = rank_[index(y)];
    replace(held_[index(a)], x, y);
    replace(held_[index(b)], y, x);
    std::swap(rank_[index(x)], rank_[index(y)]);
    load_[index(a)] += area_[y] - area_[x];
    load_[index(b)] += area_[x] - area_[y];
  }

  static void replace(std::vector<int64_t>& held, int64_t old, int64_t now) {
    held.erase(std::lower_bound(held.begin(), held.end(), old));
    held.insert(std::lower_bound(held.begin(), held.end(), now), now);
  }

  Span<int64_t> area_, kind_, edge_;
  std::vector<int64_t> rank_;
  std::vector<std::vector<int64_t>> held_;  // chunks of each rank, ascending
  std::vector<int64_t> load_;
  std::vector<int64_t> left_, right_;  // document over a chunk's left and right edge, or -1
  std::vector<Document> documents_;
};

py::tuple settle_ranks(const Array64& ranks, const Array64& areas, const Array64& classes,
                       const Array64& begins, const Array64& lengths, const Array64& edges,
                       int64_t cp) {
  const Span<int64_t> rank = span(ranks, "ranks");
  const Span<int64_t> area = span(areas, "areas");
  const Span<int64_t> kind = span(classes, "classes");
  const Span<int64_t> begin = span(begins, "begins");
  const Span<int64_t> length = span(lengths, "lengths");
  const Span<int64_t> edge = span(edges, "edges");
  if (cp < 1 || cp > kMaxTokens) fail("cp_size: must be positive");
  if (area.size != rank.size || kind.size != rank.size) fail("areas: one per chunk");
  if (edge.size != rank.size + 1) fail("edges: one more than chunks");
  if (length.size != begin.size) fail("lengths: one per segment");
  // Sums of areas stay below 2**62: there are at most 2**31 chunks' worth of tokens.
  constexpr int64_t kMaxArea = int64_t{1} << 61;
  int64_t total = 0;
  for (int64_t c = 0; c < rank.size; ++c) {
    if (rank[c] < 0 || rank[c] >= cp) fail("ranks: must be 0 .. cp_size - 1");
    if (area[c] < 0 || area[c] > kMaxArea - total) fail("areas: not those of a pack");
    total += area[c];
    if (edge[c] < 0 || edge[c + 1] < edge[c] || edge[c + 1] > kMaxTokens)
      fail("edges: must ascend below 2**31");
  }
  int64_t reached = 0;
  for (int64_t d = 0; d < begin.size; ++d) {
    if (begin[d] < reached || length[d] < 0 || begin[d] > kMaxTokens || length[d] > kMaxTokens)
      fail("begins: segments must ascend and not overlap");
    reached = begin[d] + length[d];
  }
  py::array_t<int64_t> result(rank.size);
  int64_t* out = result.mutable_data();
  int64_t rows = 0;
  {
    py::gil_scoped_release release;
    Settlement settlement(rank, area, kind, begin, length, edge, cp);
    const int64_t limit = total / cp + total / cp / 100;
    const int64_t budget = std::min<int64_t>(64 * rank.size, 250'000);
    settlement.balance(limit, budget);
    settlement.gather(limit, budget);
    std::copy(settlement.ranks().begin(), settlement.ranks().end(), out);
    rows = settlement.rows();
  }
  return py::make_tuple(result, rows);
}

}  // namespace

void bind_affinity(py::module_& m) {
  m.def("settle_ranks", &settle_ranks, py::arg("ranks"), py::arg("areas"), py::arg("classes"),
        py::arg("begins"), py::arg("lengths"), py::arg("edges"), py::arg("cp_size"));
}

}  // namespace packed
