// Boundary scan and layout.

#include "arrays.h"

namespace packed {
namespace {

// First index at or after `begin` that holds an EOD, a pad or a negative id, else `end`.
PACKED_HOT int64_t next_special(const int64_t* p, int64_t begin, int64_t end, int64_t eod,
                                int64_t pad) {
  constexpr int64_t kBlock = 32;
  int64_t i = begin;
  for (; i + kBlock <= end; i += kBlock) {
    int64_t any = 0;
    for (int64_t k = 0; k < kBlock; ++k) {
      const int64_t t = p[i + k];
      any |= static_cast<int64_t>(t == eod) | static_cast<int64_t>(t == pad) |
             static_cast<int64_t>(t < 0);
    }
    if (any) break;
  }
  for (; i < end; ++i)
    if (p[i] == eod || p[i] == pad || p[i] < 0) return i;
  return end;
}

struct Found {
  std::vector<int64_t> rows, offsets, lengths;
  std::vector<uint8_t> closed;
};

// Returns false for a negative id outside padding.
bool scan_row(const int64_t* p, int64_t row, int64_t limit, int64_t eod, int64_t pad,
              bool exact_shared, Found& found, int64_t& valid) {
  const bool shared = eod == pad;
  int64_t start = -1;  // of the open segment
  const auto emit = [&](int64_t end, bool closed) {
    found.rows.push_back(row);
    found.offsets.push_back(start);
    found.lengths.push_back(end - start);
    found.closed.push_back(closed);
    valid += end - start;
    start = -1;
  };
  int64_t column = 0;
  while (column < limit) {
    const int64_t special = next_special(p, column, limit, eod, pad);
    if (start < 0 && special > column) start = column;
    if (special == limit) break;
    const int64_t token = p[special];
    const bool is_pad = shared ? (token == pad && start < 0 && !exact_shared) : token == pad;
    if (is_pad) {
      if (start >= 0) emit(special, false);
    } else {
      if (token < 0) return false;
      if (start < 0) start = special;
      if (token == eod) emit(special + 1, true);
    }
    column = special + 1;
  }
  if (start >= 0) emit(limit, false);
  return true;
}

py::tuple scan(const Rows& tokens, int64_t eod, int64_t pad, const py::object& row_lengths) {
  const Source src = source(tokens, "tokens");
  const bool exact = !row_lengths.is_none();
  Array64 limits_array;
  Span<int64_t> limits;
  if (exact) {
    limits_array = py::cast<Array64>(row_lengths);
    limits = span(limits_array, "row_lengths");
    if (limits.size != src.rows) fail("row_lengths: one value per row is needed");
  }
  py::array_t<int64_t> valid(src.rows);
  int64_t* counts = valid.mutable_data();
  Found found;
  bool ok = true;
  {
    py::gil_scoped_release release;
    for (int64_t r = 0; r < src.rows && ok; ++r) {
      int64_t limit = src.width;
      if (exact) limit = limits[r] < 0 ? 0 : (limits[r] < limit ? limits[r] : limit);
      counts[r] = 0;
      ok = scan_row(src.row(r), r, limit, eod, pad, exact, found, counts[r]);
    }
  }
  if (!ok) fail("tokens: negative token id in a position that is not padding");
  py::array_t<bool> closed(static_cast<py::ssize_t>(found.closed.size()));
  std::copy(found.closed.begin(), found.closed.end(), closed.mutable_data());
  return py::make_tuple(to_numpy(found.rows), to_numpy(found.offsets), to_numpy(found.lengths),
                        closed, valid);
}

py::tuple layout(const Array64& lengths, int64_t multiple) {
  const Span<int64_t> size = span(lengths, "lengths");
  if (multiple < 1 || multiple > kMaxTokens) fail("segment_multiple: must be 1 .. 2**31 - 1");
  py::array_t<int32_t> real(size.size + 1), padded(size.size + 1);
  int32_t* r = real.mutable_data();
  int32_t* p = padded.mutable_data();
  int64_t at = 0, at_padded = 0;
  r[0] = p[0] = 0;
  for (int64_t i = 0; i < size.size; ++i) {
    const int64_t n = size[i];
    if (n < 0) fail("lengths: must not be negative");
    if (n > kMaxTokens) fail("lengths: a segment exceeds 2**31 - 1 tokens");
    at += n;
    at_padded += multiple == 1 ? n : (n + multiple - 1) / multiple * multiple;
    if (at_padded > kMaxTokens)
      fail("lengths: " + std::to_string(at_padded) + " tokens in one pack exceed 2**31 - 1");
    r[i + 1] = static_cast<int32_t>(at);
    p[i + 1] = static_cast<int32_t>(at_padded);
  }
  return py::make_tuple(real, padded);
}

}  // namespace

void bind_boundaries(py::module_& m) {
  m.def("scan", &scan, py::arg("tokens"), py::arg("eod_id"), py::arg("pad_id"),
        py::arg("row_lengths"));
  m.def("layout", &layout, py::arg("lengths"), py::arg("segment_multiple"));
}

}  // namespace packed
