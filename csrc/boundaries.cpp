// Boundary scan and layout.

#include <algorithm>
#include <cstring>

#include "arrays.h"

namespace packed {
namespace {

constexpr int64_t kBlock = 64;

// Bit i: p[i] is an EOD, a pad or a negative id.
PACKED_HOT uint64_t special_bits(const int64_t* p, int64_t eod, int64_t pad) {
  uint8_t flags[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) flags[i] = (p[i] == eod) | (p[i] == pad) | (p[i] < 0);
  uint64_t words[kBlock / 8];
  std::memcpy(words, flags, sizeof(words));
  uint64_t any = 0;
  for (const uint64_t word : words) any |= word;
  if (any == 0) return 0;
  uint64_t bits = 0;
  // The product gathers the low bits of eight bytes in its top byte.
  for (int64_t w = 0; w < kBlock / 8; ++w)
    bits |= ((words[w] * uint64_t{0x0102040810204080}) >> 56) << (8 * w);
  return bits;
}

uint64_t special_bits_tail(const int64_t* p, int64_t count, int64_t eod, int64_t pad) {
  uint64_t bits = 0;
  for (int64_t i = 0; i < count; ++i)
    bits |= static_cast<uint64_t>(p[i] == eod || p[i] == pad || p[i] < 0) << i;
  return bits;
}

struct Segment {
  int64_t row;
  int64_t offset;
  int64_t length;
  bool closed;
};

// Returns the row's valid tokens, or -1 for a negative id outside padding.
int64_t scan_row(const int64_t* p, int64_t row, int64_t limit, int64_t eod, int64_t pad,
                 bool exact_shared, std::vector<Segment>& found) {
  const bool shared = eod == pad;
  int64_t valid = 0;
  int64_t start = -1;  // of the open segment
  int64_t next = 0;    // first column after the last special one
  for (int64_t base = 0; base < limit; base += kBlock) {
    uint64_t bits = limit - base >= kBlock ? special_bits(p + base, eod, pad)
                                           : special_bits_tail(p + base, limit - base, eod, pad);
    for (; bits; bits &= bits - 1) {
      const int64_t column = base + __builtin_ctzll(bits);
      const int64_t token = p[column];
      if (start < 0 && column > next) start = next;
      const bool is_pad = shared ? (token == pad && start < 0 && !exact_shared) : token == pad;
      next = column + 1;
      if (is_pad) {
        if (start >= 0) {
          found.push_back({row, start, column - start, false});
          valid += column - start;
          start = -1;
        }
        continue;
      }
      if (token < 0) return -1;
      if (start < 0) start = column;
      if (token == eod) {
        found.push_back({row, start, next - start, true});
        valid += next - start;
        start = -1;
      }
    }
  }
  if (start < 0 && next < limit) start = next;
  if (start >= 0) {
    found.push_back({row, start, limit - start, false});
    valid += limit - start;
  }
  return valid;
}

// The result lives until this thread's next scan: its pages are used again, not faulted in anew.
const std::vector<Segment>& scan_rows(const Source& src, int64_t eod, int64_t pad,
                               const Span<int64_t>& limits, int64_t* counts) {
  const bool exact = limits.data != nullptr;
  if (exact && limits.size != src.rows) fail("row_lengths: one value per row is needed");
  static thread_local std::vector<Segment> found;
  found.clear();
  for (int64_t r = 0; r < src.rows; ++r) {
    int64_t limit = src.width;
    if (exact) limit = limits[r] < 0 ? 0 : (limits[r] < limit ? limits[r] : limit);
    counts[r] = scan_row(src.row(r), r, limit, eod, pad, exact, found);
    if (counts[r] < 0) fail("tokens: negative token id in a position that is not padding");
  }
  return found;
}

// Keeps the converted array alive beside the span over it.
struct Optional {
  Array64 array;
  Span<int64_t> values;
  Optional(const py::object& object, const char* name) {
    if (object.is_none()) return;
    array = py::cast<Array64>(object);
    values = span(array, name);
    if (values.data == nullptr) fail(std::string(name) + ": empty");
  }
};

py::tuple scan(const Rows& tokens, int64_t eod, int64_t pad, const py::object& row_lengths) {
  const Source src = source(tokens, "tokens");
  const Optional limits(row_lengths, "row_lengths");
  py::array_t<int64_t> valid(src.rows);
  int64_t* counts = valid.mutable_data();
  const std::vector<Segment>* scanned = nullptr;
  {
    py::gil_scoped_release release;
    scanned = &scan_rows(src, eod, pad, limits.values, counts);
  }
  const std::vector<Segment>& found = *scanned;
  const auto size = static_cast<py::ssize_t>(found.size());
  py::array_t<int64_t> rows(size), offsets(size), lengths(size);
  py::array_t<bool> closed(size);
  int64_t* r = rows.mutable_data();
  int64_t* o = offsets.mutable_data();
  int64_t* n = lengths.mutable_data();
  bool* c = closed.mutable_data();
  for (const Segment& s : found) {
    *r++ = s.row;
    *o++ = s.offset;
    *n++ = s.length;
    *c++ = s.closed;
  }
  return py::make_tuple(rows, offsets, lengths, closed, valid);
}

// Scan, extents and layout of a batch of rows in one go: what build_pack_plan starts from.
py::tuple plan_rows(const Rows& tokens, const py::object& extra, int64_t eod, int64_t pad,
                    const py::object& row_lengths, int64_t multiple) {
  const Source src = source(tokens, "tokens");
  const Optional limits(row_lengths, "row_lengths");
  const Optional after(extra, "extra_token");
  if (after.values.data && after.values.size != src.rows) fail("extra_token: one value per row");
  if (multiple < 1 || multiple > kMaxTokens) fail("alignment: must be 1 .. 2**31 - 1");
  py::array_t<int64_t> valid(src.rows);
  int64_t* counts = valid.mutable_data();
  const std::vector<Segment>* scanned = nullptr;
  {
    py::gil_scoped_release release;
    scanned = &scan_rows(src, eod, pad, limits.values, counts);
  }
  const std::vector<Segment>& found = *scanned;
  const auto size = static_cast<py::ssize_t>(found.size());
  // Rows of one [4, n] array: source row, offset, length, extent.
  py::array_t<int64_t> segments({py::ssize_t{4}, size});
  py::array_t<int32_t> real(size + 1), padded(size + 1);
  int64_t* out = segments.mutable_data();
  int32_t* r = real.mutable_data();
  int32_t* p = padded.mutable_data();
  int64_t at = 0, at_padded = 0;
  r[0] = p[0] = 0;
  for (int64_t i = 0; i < size; ++i) {
    const Segment& s = found[static_cast<size_t>(i)];
    int64_t extent = s.length;
    if (after.values.data && !s.closed && s.offset + s.length == src.width) {
      const int64_t token = after.values[s.row];
      const bool stated = limits.values.data == nullptr || limits.values[s.row] == src.width + 1;
      if (stated && (pad == eod || token != pad)) {
        if (token < 0) fail("extra_token: negative token id in a row that is not padded");
        ++extent;
      }
    }
    out[i] = s.row;
    out[size + i] = s.offset;
    out[2 * size + i] = s.length;
    out[3 * size + i] = extent;
    at += s.length;
    at_padded += multiple == 1 ? s.length : (s.length + multiple - 1) / multiple * multiple;
    if (at_padded > kMaxTokens)
      fail("tokens: " + std::to_string(at_padded) + " tokens in one pack exceed 2**31 - 1");
    r[i + 1] = static_cast<int32_t>(at);
    p[i + 1] = static_cast<int32_t>(at_padded);
  }
  return py::make_tuple(segments, real, padded, valid);
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

// Longest segment, longest padded segment, segments with a token, positions with a depth-0
// target, sum of squared lengths.
py::tuple summary(const Array64& lengths, const Array64& extents, const Array32& padded_array) {
  const Span<int64_t> length = span(lengths, "lengths");
  const Span<int64_t> extent = span(extents, "extents");
  const Span<int32_t> padded = span(padded_array, "cu_seqlens_padded");
  if (extent.size != length.size) fail("extents: one per segment");
  if (padded.size != length.size + 1) fail("cu_seqlens_padded: needs one entry per segment + 1");
  int64_t longest = 0, longest_padded = 0, filled = 0;
  uint64_t supervised = 0, squares = 0;  // unsigned: lengths that no pack has may wrap around
  for (int64_t i = 0; i < length.size; ++i) {
    longest = std::max(longest, length[i]);
    longest_padded = std::max(longest_padded, static_cast<int64_t>(padded[i + 1]) - padded[i]);
    filled += length[i] != 0;
    if (extent[i] > 0)
      supervised += static_cast<uint64_t>(std::max<int64_t>(std::min(extent[i] - 1, length[i]), 0));
    squares += static_cast<uint64_t>(length[i]) * static_cast<uint64_t>(length[i]);
  }
  return py::make_tuple(longest, longest_padded, filled, static_cast<int64_t>(supervised),
                        static_cast<int64_t>(squares));
}

}  // namespace

void bind_boundaries(py::module_& m) {
  m.def("scan", &scan, py::arg("tokens"), py::arg("eod_id"), py::arg("pad_id"),
        py::arg("row_lengths"));
  m.def("plan_rows", &plan_rows, py::arg("tokens"), py::arg("extra_token"), py::arg("eod_id"),
        py::arg("pad_id"), py::arg("row_lengths"), py::arg("segment_multiple"));
  m.def("summary", &summary, py::arg("lengths"), py::arg("extents"),
        py::arg("cu_seqlens_padded"));
  m.def("layout", &layout, py::arg("lengths"), py::arg("segment_multiple"));
}

}  // namespace packed
