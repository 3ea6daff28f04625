// Pieces of segments, and the gathers that walk them.

#include <algorithm>
#include <cstring>

#include "walk.h"

namespace packed {
namespace {

// Writes a piece at `end`, or lengthens the last one where it goes on in output and segment.
Piece* append(Piece* begin, Piece* end, const Piece& piece, int64_t step) {
  if (end != begin) {
    Piece& last = end[-1];
    if (last.segment == piece.segment && last.destination + last.count == piece.destination &&
        last.position + last.count * step == piece.position) {
      last.count += piece.count;
      return end;
    }
  }
  *end = piece;
  return end + 1;
}

py::array_t<int64_t> pieces(const Array64& lengths, const Array32& cu_seqlens_padded,
                            const Array64& starts, const Array64& counts, int64_t step) {
  const Span<int64_t> length = span(lengths, "lengths");
  const Span<int32_t> padded = span(cu_seqlens_padded, "cu_seqlens_padded");
  const Span<int64_t> start = span(starts, "starts");
  const Span<int64_t> count = span(counts, "counts");
  if (padded.size != length.size + 1) fail("cu_seqlens_padded: needs one entry per segment + 1");
  if (padded[0] != 0) fail("cu_seqlens_padded: must start at 0");
  if (start.size != count.size) fail("counts: needs one entry per run");
  if (step < 1 || step > kMaxTokens) fail("step: must be 1 .. 2**31 - 1");
  const int64_t n = length.size;
  // A run adds one piece for every segment it touches; runs don't overlap, so a segment boundary
  // lies inside at most one of them. Overlapping runs of a careless caller are refused.
  py::array_t<int64_t> result({static_cast<py::ssize_t>(n + start.size), py::ssize_t{4}});
  Piece* const begin_out = reinterpret_cast<Piece*>(result.mutable_data());
  Piece* out = begin_out;
  {
    py::gil_scoped_release release;
    const int64_t total = padded[n];
    int64_t reached = -1;
    int64_t segment = 0;
    int64_t destination = 0;
    for (int64_t r = 0; r < start.size && n > 0; ++r) {
      int64_t position = start[r];
      int64_t left = count[r];
      if (left < 0 || position < 0 || left > kMaxTokens || position > kMaxTokens ||
          (left > 0 && position + (left - 1) * step >= total))
        fail("starts: a run lies outside the pack");
      if (left > 0 && position <= reached) fail("starts: runs must ascend and not overlap");
      if (left > 0) reached = position + (left - 1) * step;
      while (left > 0) {
        if (position < padded[segment] || position >= padded[segment + 1]) {
          // Runs ascend, so the segment is nearly always the next one.
          if (position >= padded[segment + 1] && segment + 2 <= n &&
              position < padded[segment + 2])
            ++segment;
          else
            segment = std::upper_bound(padded.data, padded.data + n, position) - padded.data - 1;
        }
        const int64_t begin = padded[segment];
        const int64_t end = segment + 1 == n ? total : padded[segment + 1];
        const int64_t inside = position - begin;
        const int64_t here =
            std::min(left, step == 1 ? end - position : (end - position + step - 1) / step);
        if (here < 1) fail("cu_seqlens_padded: must not fall");
        int64_t real = length[segment] - inside;
        if (real > 0) {
          real = std::min(here, step == 1 ? real : (real + step - 1) / step);
          out = append(begin_out, out, {destination, segment, inside, real}, step);
        }
        destination += here;
        position += here * step;
        left -= here;
      }
    }
  }
  return result[py::slice(0, out - begin_out, 1)].cast<py::array_t<int64_t>>();
}

// The pieces of the whole pack: every segment that holds a token, where it lies.
py::array_t<int64_t> whole_pieces(const Array64& lengths, const Array32& cu_seqlens_padded) {
  const Span<int64_t> length = span(lengths, "lengths");
  const Span<int32_t> padded = span(cu_seqlens_padded, "cu_seqlens_padded");
  if (padded.size != length.size + 1) fail("cu_seqlens_padded: needs one entry per segment + 1");
  int64_t count = 0;
  for (int64_t i = 0; i < length.size; ++i) count += length[i] > 0;
  py::array_t<int64_t> result({static_cast<py::ssize_t>(count), py::ssize_t{4}});
  Piece* out = reinterpret_cast<Piece*>(result.mutable_data());
  for (int64_t i = 0; i < length.size; ++i)
    if (length[i] > 0) *out++ = {padded[i], i, 0, length[i]};
  return result;
}

py::array_t<int64_t> gather(const Rows& rows_array, const py::object& extra, const Array64& rows,
                            const Array64& offsets, const Array64& extents, const Array64& piece,
                            int64_t step, int64_t shift, int64_t size, int64_t fill,
                            const py::object& out) {
  const Source src = source(rows_array, "source");
  const Span<int64_t> row = span(rows, "rows");
  const Span<int64_t> offset = span(offsets, "offsets");
  const Span<int64_t> extent = span(extents, "extents");
  const Span<Piece> list = pieces_of(piece);
  if (offset.size != row.size || extent.size != row.size) fail("offsets: one per segment");
  if (step < 1 || shift < 0) fail("step: must be positive, and shift not negative");
  Array64 extra_array;
  const int64_t* beyond = nullptr;
  if (!extra.is_none()) {
    extra_array = py::cast<Array64>(extra);
    const Span<int64_t> values = span(extra_array, "extra");
    if (values.size != src.rows) fail("extra: one per row");
    beyond = values.data;
  }
  py::array_t<int64_t> result = output<int64_t>(out, size);
  int64_t* dst = result.mutable_data();
  {
    py::gil_scoped_release release;
    walk(
        list, row.size, size,
        [&](const Piece& p) {
          const int64_t n = held(p, extent[p.segment], step, shift);
          int64_t* to = dst + p.destination;
          if (n > 0) {
            const int64_t r = row[p.segment];
            const int64_t column = offset[p.segment] + p.position + shift;
            const int64_t last = column + (n - 1) * step;
            if (r < 0 || r >= src.rows || column < 0 || last > src.width ||
                (last == src.width && beyond == nullptr))
              fail("rows: a segment reaches outside the source rows");
            const int64_t inside = last == src.width ? n - 1 : n;
            const int64_t* from = src.row(r) + column;
            if (step == 1) {
              if (inside < 16) {
                for (int64_t i = 0; i < inside; ++i) to[i] = from[i];
              } else {
                std::memcpy(to, from, static_cast<size_t>(inside) * sizeof(int64_t));
              }
            } else {
              for (int64_t i = 0; i < inside; ++i) to[i] = from[i * step];
            }
            if (inside != n) to[inside] = beyond[r];
          }
          std::fill(to + n, to + p.count, fill);
        },
        [&](int64_t a, int64_t b) { std::fill(dst + a, dst + b, fill); });
  }
  return result;
}

template <class T>
py::array_t<T> mask(const Array64& extents, const Array64& piece, int64_t step, int64_t shift,
                    int64_t size, const py::object& out) {
  const Span<int64_t> extent = span(extents, "extents");
  const Span<Piece> list = pieces_of(piece);
  if (step < 1 || shift < 0) fail("step: must be positive, and shift not negative");
  py::array_t<T> result = output<T>(out, size);
  T* dst = result.mutable_data();
  {
    py::gil_scoped_release release;
    walk(
        list, extent.size, size,
        [&](const Piece& p) {
          const int64_t n = held(p, extent[p.segment], step, shift);
          std::fill(dst + p.destination, dst + p.destination + n, T(1));
          std::fill(dst + p.destination + n, dst + p.destination + p.count, T(0));
        },
        [&](int64_t a, int64_t b) { std::fill(dst + a, dst + b, T(0)); });
  }
  return result;
}

py::array_t<int64_t> position_ids(const Array64& piece, int64_t step, int64_t size,
                                  const py::object& out) {
  const Span<Piece> list = pieces_of(piece);
  py::array_t<int64_t> result = output<int64_t>(out, size);
  int64_t* dst = result.mutable_data();
  {
    py::gil_scoped_release release;
    walk(
        list, std::numeric_limits<int64_t>::max(), size,
        [&](const Piece& p) { iota(dst + p.destination, p.count, p.position, step); },
        [&](int64_t a, int64_t b) { std::fill(dst + a, dst + b, int64_t{0}); });
  }
  return result;
}

py::array_t<int32_t> document_ids(const Array64& piece, int64_t size, const py::object& out) {
  const Span<Piece> list = pieces_of(piece);
  py::array_t<int32_t> result = output<int32_t>(out, size);
  int32_t* dst = result.mutable_data();
  {
    py::gil_scoped_release release;
    walk(
        list, kMaxTokens, size,
        [&](const Piece& p) {
          std::fill(dst + p.destination, dst + p.destination + p.count,
                    static_cast<int32_t>(p.segment));
        },
        [&](int64_t a, int64_t b) { std::fill(dst + a, dst + b, int32_t{-1}); });
  }
  return result;
}

}  // namespace

void bind_gather(py::module_& m) {
  m.def("pieces", &pieces, py::arg("lengths"), py::arg("cu_seqlens_padded"), py::arg("starts"),
        py::arg("counts"), py::arg("step"));
  m.def("whole_pieces", &whole_pieces, py::arg("lengths"), py::arg("cu_seqlens_padded"));
  m.def("gather", &gather, py::arg("source"), py::arg("extra"), py::arg("rows"),
        py::arg("offsets"), py::arg("extents"), py::arg("piece"), py::arg("step"),
        py::arg("shift"), py::arg("size"), py::arg("fill"), py::arg("out") = py::none());
  m.def("held_mask", &mask<bool>, py::arg("extents"), py::arg("piece"), py::arg("step"),
        py::arg("shift"), py::arg("size"), py::arg("out") = py::none());
  m.def("held_weights", &mask<float>, py::arg("extents"), py::arg("piece"), py::arg("step"),
        py::arg("shift"), py::arg("size"), py::arg("out") = py::none());
  m.def("position_ids", &position_ids, py::arg("piece"), py::arg("step"), py::arg("size"),
        py::arg("out") = py::none());
  m.def("document_ids", &document_ids, py::arg("piece"), py::arg("size"),
        py::arg("out") = py::none());
}

}  // namespace packed
