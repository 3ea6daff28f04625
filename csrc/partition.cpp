// Who holds which position: runs, their expansion, inverses and the min-heap dispatch.

#include <algorithm>
#include <numeric>
#include <queue>

#include "arrays.h"

namespace packed {
namespace {

// Runs of one rank under the per-segment zigzag: chunk r, then chunk 2 * cp - 1 - r.
py::tuple zigzag_runs(const Array32& cu_seqlens_padded, int64_t cp, int64_t rank) {
  const Span<int32_t> cu = span(cu_seqlens_padded, "cu_seqlens_padded");
  if (cp < 1 || cp > kMaxTokens || rank < 0 || rank >= cp) fail("cp_rank: must be 0 .. cp_size-1");
  std::vector<int64_t> starts, counts;
  starts.reserve(static_cast<size_t>(2 * std::max<int64_t>(cu.size, 1)));
  counts.reserve(starts.capacity());
  const auto add = [&](int64_t start, int64_t count) {
    if (!starts.empty() && starts.back() + counts.back() == start) {
      counts.back() += count;
    } else {
      starts.push_back(start);
      counts.push_back(count);
    }
  };
  for (int64_t i = 0; i + 1 < cu.size; ++i) {
    const int64_t length = static_cast<int64_t>(cu[i + 1]) - cu[i];
    if (length == 0) continue;
    if (length < 0 || length % (2 * cp) != 0)
      fail("cu_seqlens_padded: segment " + std::to_string(i) + " has " + std::to_string(length) +
           " tokens, no multiple of 2 * cp_size = " + std::to_string(2 * cp));
    const int64_t chunk = length / (2 * cp);
    add(cu[i] + rank * chunk, chunk);
    add(cu[i] + (2 * cp - 1 - rank) * chunk, chunk);
  }
  return py::make_tuple(to_numpy(starts), to_numpy(counts));
}

py::array_t<int64_t> expand_runs(const Array64& starts, const Array64& counts, int64_t step) {
  const Span<int64_t> start = span(starts, "starts");
  const Span<int64_t> count = span(counts, "counts");
  if (start.size != count.size) fail("counts: one per run");
  int64_t total = 0;
  for (int64_t i = 0; i < count.size; ++i) {
    if (count[i] < 0 || count[i] > kMaxTokens) fail("counts: must be 0 .. 2**31 - 1");
    total += count[i];
  }
  py::array_t<int64_t> result(total);
  int64_t* dst = result.mutable_data();
  py::gil_scoped_release release;
  for (int64_t i = 0; i < start.size; ++i)
    for (int64_t k = 0; k < count[i]; ++k) *dst++ = start[i] + k * step;
  return result;
}

py::array_t<int64_t> inverse_permutation(const Array64& permutation) {
  const Span<int64_t> perm = span(permutation, "permutation");
  py::array_t<int64_t> result(perm.size);
  int64_t* dst = result.mutable_data();
  std::fill(dst, dst + perm.size, int64_t{-1});
  for (int64_t i = 0; i < perm.size; ++i) {
    if (perm[i] < 0 || perm[i] >= perm.size || dst[perm[i]] != -1)
      fail("permutation: value " + std::to_string(perm[i]) + " is out of range or repeated");
    dst[perm[i]] = i;
  }
  return result;
}

// Unmasked causal pairs of every chunk: the sum of (position in document + 1) over its tokens.
py::array_t<int64_t> chunk_areas(const Array64& begins, const Array64& lengths,
                                 const Array64& edges) {
  const Span<int64_t> begin = span(begins, "begins");
  const Span<int64_t> length = span(lengths, "lengths");
  const Span<int64_t> edge = span(edges, "edges");
  if (begin.size != length.size) fail("lengths: one per segment");
  if (edge.size < 1) fail("edges: needs at least one entry");
  for (int64_t i = 1; i < edge.size; ++i)
    if (edge[i] < edge[i - 1] || edge[i] > kMaxTokens) fail("edges: must ascend below 2**31");
  py::array_t<int64_t> result(edge.size - 1);
  int64_t* area = result.mutable_data();
  py::gil_scoped_release release;
  std::fill(area, area + edge.size - 1, int64_t{0});
  int64_t chunk = 0;
  const auto triangle = [](int64_t n) { return n * (n + 1) / 2; };
  for (int64_t s = 0; s < begin.size; ++s) {
    const int64_t first = begin[s];
    const int64_t last = first + length[s];
    while (chunk > 0 && edge[chunk] > first) --chunk;
    while (chunk + 1 < edge.size && edge[chunk + 1] <= first) ++chunk;
    for (; chunk + 1 < edge.size && edge[chunk] < last; ++chunk) {
      const int64_t a = std::max(first, edge[chunk]) - first;
      const int64_t b = std::min(last, edge[chunk + 1]) - first;
      if (b > a) area[chunk] += triangle(b) - triangle(a);
    }
  }
  return result;
}

// Min-heap dispatch of chunks. `classes[i]` is 0 or 1 (two chunk sizes one token apart, or all
// 0); each rank takes exactly `per_rank[class]` chunks of each class.
py::array_t<int64_t> dispatch_ranks(const Array64& areas, const Array64& classes, int64_t cp) {
  const Span<int64_t> area = span(areas, "areas");
  const Span<int64_t> kind = span(classes, "classes");
  if (kind.size != area.size) fail("classes: one per chunk");
  if (cp < 1 || cp > kMaxTokens) fail("cp_size: must be positive");
  int64_t total[2] = {0, 0};
  for (int64_t i = 0; i < kind.size; ++i) {
    if (kind[i] != 0 && kind[i] != 1) fail("classes: must be 0 or 1");
    ++total[kind[i]];
  }
  if (total[0] % cp || total[1] % cp) fail("areas: chunks don't divide evenly over cp_size ranks");
  py::array_t<int64_t> result(area.size);
  int64_t* rank_of = result.mutable_data();
  py::gil_scoped_release release;
  std::vector<int64_t> order(static_cast<size_t>(area.size));
  std::iota(order.begin(), order.end(), 0);
  // Largest area first; among equals the later chunk, as a reversed stable sort gives.
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return area[a] < area[b]; });
  std::reverse(order.begin(), order.end());
  using Entry = std::pair<int64_t, int64_t>;  // load, rank
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> heap;
  std::vector<int64_t> room(static_cast<size_t>(2 * cp));
  for (int64_t r = 0; r < cp; ++r) {
    room[2 * r] = total[0] / cp;
    room[2 * r + 1] = total[1] / cp;
    heap.push({0, r});
  }
  std::vector<Entry> aside;
  for (const int64_t chunk : order) {
    aside.clear();
    for (;;) {
      Entry top = heap.top();
      heap.pop();
      if (room[2 * top.second + kind[chunk]] > 0) {
        --room[2 * top.second + kind[chunk]];
        rank_of[chunk] = top.second;
        top.first += area[chunk];
        if (room[2 * top.second] + room[2 * top.second + 1] > 0) heap.push(top);
        break;
      }
      aside.push_back(top);
    }
    for (const Entry& entry : aside) heap.push(entry);
  }
  return result;
}

}  // namespace

void bind_partition(py::module_& m) {
  m.def("zigzag_runs", &zigzag_runs, py::arg("cu_seqlens_padded"), py::arg("cp_size"),
        py::arg("cp_rank"));
  m.def("expand_runs", &expand_runs, py::arg("starts"), py::arg("counts"), py::arg("step"));
  m.def("inverse_permutation", &inverse_permutation, py::arg("permutation"));
  m.def("chunk_areas", &chunk_areas, py::arg("begins"), py::arg("lengths"), py::arg("edges"));
  m.def("dispatch_ranks", &dispatch_ranks, py::arg("areas"), py::arg("classes"),
        py::arg("cp_size"));
}

}  // namespace packed
