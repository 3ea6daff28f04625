// Bin assignment of whole documents. Costs are aligned lengths, 1 .. capacity (0 for empty ones).

#include <algorithm>
#include <numeric>
#include <queue>

#include "arrays.h"

namespace packed {
namespace {

void check_costs(const Span<int64_t>& cost, int64_t capacity) {
  if (capacity < 1 || capacity > kMaxTokens) fail("capacity: must be 1 .. 2**31 - 1");
  for (int64_t i = 0; i < cost.size; ++i)
    if (cost[i] < 0 || cost[i] > capacity)
      fail("costs: value " + std::to_string(cost[i]) + " is not between 0 and the capacity");
}

py::array_t<int64_t> next_fit(const Array64& costs, int64_t capacity, int64_t used) {
  const Span<int64_t> cost = span(costs, "costs");
  check_costs(cost, capacity);
  if (used < 0 || used > capacity) fail("used: must be 0 .. capacity");
  py::array_t<int64_t> result(cost.size);
  int64_t* bin = result.mutable_data();
  py::gil_scoped_release release;
  int64_t current = 0;
  for (int64_t i = 0; i < cost.size; ++i) {
    if (used + cost[i] > capacity) {
      ++current;
      used = 0;
    }
    used += cost[i];
    bin[i] = current;
  }
  return result;
}

// Set of integers 0 .. size - 1 with a fast "smallest member >= x": a tree of 64-bit words.
class SuccessorSet {
 public:
  explicit SuccessorSet(int64_t size) {
    do {
      size = (size + 63) / 64;
      levels_.emplace_back(static_cast<size_t>(size), 0);
    } while (size > 1);
  }
  void insert(int64_t x) {
    for (auto& level : levels_) {
      level[static_cast<size_t>(x >> 6)] |= uint64_t{1} << (x & 63);
      x >>= 6;
    }
  }
  void erase(int64_t x) {
    for (auto& level : levels_) {
      uint64_t& word = level[static_cast<size_t>(x >> 6)];
      word &= ~(uint64_t{1} << (x & 63));
      if (word) return;
      x >>= 6;
    }
  }
  // Smallest member >= x, or -1.
  int64_t successor(int64_t x) const {
    for (size_t depth = 0; depth < levels_.size(); ++depth) {
      const int64_t index = x >> 6;
      if (index >= static_cast<int64_t>(levels_[depth].size())) return -1;
      const uint64_t word = levels_[depth][static_cast<size_t>(index)] & (~uint64_t{0} << (x & 63));
      if (word) {
        int64_t found = (index << 6) + __builtin_ctzll(word);
        while (depth-- > 0)
          found = (found << 6) + __builtin_ctzll(levels_[depth][static_cast<size_t>(found)]);
        return found;
      }
      x = index + 1;
    }
    return -1;
  }

 private:
  std::vector<std::vector<uint64_t>> levels_;
};

// Best fit in the given order: the fullest bin with room, the oldest among equals.
class BestFit {
 public:
  BestFit(int64_t capacity, int64_t expected)
      : capacity_(capacity),
        with_room_(capacity + 1),
        head_(static_cast<size_t>(capacity + 1), -1),
        tail_(static_cast<size_t>(capacity + 1), -1) {
    next_.reserve(static_cast<size_t>(expected));
  }
  void open(int64_t room) {
    const int64_t bin = static_cast<int64_t>(next_.size());
    next_.push_back(-1);
    push(room, bin);
  }
  int64_t place(int64_t cost) {
    int64_t room = with_room_.successor(cost);
    if (room < 0) {
      open(capacity_);
      room = capacity_;
    }
    const int64_t bin = pop(room);
    push(room - cost, bin);
    return bin;
  }

 private:
  // Bins of equal room wait in a first-in-first-out list.
  void push(int64_t room, int64_t bin) {
    const auto r = static_cast<size_t>(room);
    next_[static_cast<size_t>(bin)] = -1;
    if (head_[r] < 0) {
      head_[r] = bin;
      with_room_.insert(room);
    } else {
      next_[static_cast<size_t>(tail_[r])] = bin;
    }
    tail_[r] = bin;
  }
  int64_t pop(int64_t room) {
    const auto r = static_cast<size_t>(room);
    const int64_t bin = head_[r];
    head_[r] = next_[static_cast<size_t>(bin)];
    if (head_[r] < 0) with_room_.erase(room);
    return bin;
  }

  int64_t capacity_;
  SuccessorSet with_room_;
  std::vector<int64_t> head_, tail_, next_;
};

py::array_t<int64_t> best_fit(const Array64& costs, int64_t capacity, const Array64& open_rooms) {
  const Span<int64_t> cost = span(costs, "costs");
  const Span<int64_t> room = span(open_rooms, "open_rooms");
  check_costs(cost, capacity);
  check_costs(room, capacity);
  py::array_t<int64_t> result(cost.size);
  int64_t* bin = result.mutable_data();
  py::gil_scoped_release release;
  BestFit fit(capacity, room.size + cost.size);
  for (int64_t i = 0; i < room.size; ++i) fit.open(room[i]);
  for (int64_t i = 0; i < cost.size; ++i) bin[i] = fit.place(cost[i]);
  return result;
}

py::array_t<int64_t> best_fit_decreasing(const Array64& costs, int64_t capacity) {
  const Span<int64_t> cost = span(costs, "costs");
  check_costs(cost, capacity);
  py::array_t<int64_t> result(cost.size);
  int64_t* bin = result.mutable_data();
  py::gil_scoped_release release;
  // Counting sort, longest first, equals in their given order.
  std::vector<int64_t> begin(static_cast<size_t>(capacity + 2), 0);
  for (int64_t i = 0; i < cost.size; ++i) ++begin[static_cast<size_t>(capacity - cost[i] + 1)];
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  std::vector<int64_t> order(static_cast<size_t>(cost.size));
  for (int64_t i = 0; i < cost.size; ++i)
    order[static_cast<size_t>(begin[static_cast<size_t>(capacity - cost[i])]++)] = i;
  BestFit fit(capacity, cost.size);
  for (const int64_t i : order) bin[i] = fit.place(cost[i]);
  return result;
}

// Each document in the given order to the bin of least workload that has room; -1 if none has.
py::array_t<int64_t> greedy_workload(const Array64& costs, const Array64& workloads,
                                     int64_t capacity, const Array64& rooms,
                                     const Array64& loads) {
  const Span<int64_t> cost = span(costs, "costs");
  const Span<int64_t> work = span(workloads, "workloads");
  const Span<int64_t> room_in = span(rooms, "rooms");
  const Span<int64_t> load_in = span(loads, "loads");
  check_costs(cost, capacity);
  check_costs(room_in, capacity);
  if (work.size != cost.size) fail("workloads: one per document");
  if (load_in.size != room_in.size) fail("loads: one per bin");
  py::array_t<int64_t> result(cost.size);
  int64_t* bin = result.mutable_data();
  py::gil_scoped_release release;
  std::vector<int64_t> room(room_in.data, room_in.data + room_in.size);
  using Entry = std::pair<int64_t, int64_t>;  // workload, bin
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> heap;
  for (int64_t b = 0; b < load_in.size; ++b) heap.push({load_in[b], b});
  std::vector<Entry> aside;
  for (int64_t i = 0; i < cost.size; ++i) {
    aside.clear();
    bin[i] = -1;
    while (!heap.empty()) {
      Entry top = heap.top();
      heap.pop();
      const auto b = static_cast<size_t>(top.second);
      if (room[b] >= cost[i]) {
        room[b] -= cost[i];
        bin[i] = top.second;
        top.first += work[i];
        heap.push(top);
        break;
      }
      aside.push_back(top);
    }
    for (const Entry& entry : aside) heap.push(entry);
  }
  return result;
}

py::tuple group(const Array64& bins, int64_t count) {
  const Span<int64_t> bin = span(bins, "bins");
  if (count < 0 || count > kMaxTokens) fail("count: must be 0 .. 2**31 - 1");
  py::array_t<int64_t> order(bin.size), edges(count + 1);
  int64_t* to = order.mutable_data();
  int64_t* edge = edges.mutable_data();
  {
    py::gil_scoped_release release;
    std::fill(edge, edge + count + 1, int64_t{0});
    for (int64_t i = 0; i < bin.size; ++i) {
      if (bin[i] < 0 || bin[i] >= count) fail("bins: a value is out of range");
      ++edge[bin[i] + 1];
    }
    std::partial_sum(edge, edge + count + 1, edge);
    std::vector<int64_t> next(edge, edge + count);
    for (int64_t i = 0; i < bin.size; ++i) to[next[static_cast<size_t>(bin[i])]++] = i;
  }
  return py::make_tuple(order, edges);
}

}  // namespace

void bind_packers(py::module_& m) {
  m.def("group", &group, py::arg("bins"), py::arg("count"));
  m.def("next_fit", &next_fit, py::arg("costs"), py::arg("capacity"), py::arg("used"));
  m.def("best_fit", &best_fit, py::arg("costs"), py::arg("capacity"), py::arg("open_rooms"));
  m.def("best_fit_decreasing", &best_fit_decreasing, py::arg("costs"), py::arg("capacity"));
  m.def("greedy_workload", &greedy_workload, py::arg("costs"), py::arg("workloads"),
        py::arg("capacity"), py::arg("rooms"), py::arg("loads"));
}

}  // namespace packed
