// Everything that a step reads, in one walk over the pieces and one buffer.

#include <cstring>

#include "walk.h"

namespace packed {

PACKED_HOT void iota(int64_t* to, int64_t count, int64_t first, int64_t step) {
  for (int64_t i = 0; i < count; ++i) to[i] = first + i * step;
}

namespace {

// Long pieces are written block by block, so that the second read of a token hits the cache.
constexpr int64_t kBlock = 2048;
constexpr int64_t kShort = 48;
constexpr int64_t kMaxDepths = 16;

struct Outputs {
  int64_t* tokens;
  int64_t* positions;
  int64_t* labels;   // [depths, size]
  float* weights;    // [depths, size]
  int32_t* documents;
  bool* valid;
  int64_t size;
  int64_t depths;
};

struct Segments {
  Span<int64_t> row, offset, extent;
};

void write_padding(const Outputs& out, int64_t a, int64_t b, int64_t token_fill,
                   int64_t label_fill) {
  std::fill(out.tokens + a, out.tokens + b, token_fill);
  std::fill(out.positions + a, out.positions + b, int64_t{0});
  std::fill(out.documents + a, out.documents + b, int32_t{-1});
  std::fill(out.valid + a, out.valid + b, false);
  for (int64_t d = 0; d < out.depths; ++d) {
    std::fill(out.labels + d * out.size + a, out.labels + d * out.size + b, label_fill);
    std::fill(out.weights + d * out.size + a, out.weights + d * out.size + b, 0.0f);
  }
}

// `count` positions whose own token and depth-d target both lie in `from`.
void write_inside(const Outputs& out, const int64_t* from, int64_t at, int64_t count,
                  int64_t position, int64_t step, int32_t document) {
  if (step != 1 || count < kShort) {
    int64_t* labels = out.labels + at;
    float* weights = out.weights + at;
    for (int64_t i = 0; i < count; ++i) {
      out.tokens[at + i] = from[i * step];
      labels[i] = from[i * step + 1];
      weights[i] = 1.0f;
      out.positions[at + i] = position + i * step;
      out.documents[at + i] = document;
      out.valid[at + i] = true;
    }
    return;
  }
  for (int64_t i = 0; i < count; i += kBlock) {
    const int64_t n = std::min(kBlock, count - i);
    const size_t bytes = static_cast<size_t>(n) * sizeof(int64_t);
    std::memcpy(out.tokens + at + i, from + i, bytes);
    std::memcpy(out.labels + at + i, from + i + 1, bytes);
    iota(out.positions + at + i, n, position + i, 1);
    std::fill(out.weights + at + i, out.weights + at + i + n, 1.0f);
    std::fill(out.documents + at + i, out.documents + at + i + n, document);
    std::memset(out.valid + at + i, 1, static_cast<size_t>(n));
  }
}

void write_piece(const Outputs& out, const Source& src, const int64_t* beyond,
                 const Segments& segments, const Piece& p, int64_t step, int64_t label_fill) {
  const int64_t row = segments.row[p.segment];
  const int64_t column = segments.offset[p.segment] + p.position;
  const int64_t extent = segments.extent[p.segment];
  const int64_t end = segments.offset[p.segment] + extent;  // one past the last held token
  const int64_t last = column + (p.count - 1) * step;       // column of the last own token
  if (p.count == 0) return;
  if (row < 0 || row >= src.rows || column < 0 || last >= src.width || last >= end ||
      end > src.width + (beyond != nullptr))
    fail("rows: a segment reaches outside the source rows");
  const int64_t* base = src.row(row);
  const auto token_at = [&](int64_t c) { return c < src.width ? base[c] : beyond[row]; };
  const auto document = static_cast<int32_t>(p.segment);
  // Positions whose depth-0 target is an ordinary column; the few others one by one.
  const int64_t plain_end = std::min(end, src.width);
  const int64_t room = plain_end - 1 - column;
  const int64_t plain =
      room <= 0 ? 0 : std::min(p.count, step == 1 ? room : (room + step - 1) / step);
  write_inside(out, base + column, p.destination, plain, p.position, step, document);
  for (int64_t i = plain; i < p.count; ++i) {
    const int64_t at = p.destination + i;
    const int64_t c = column + i * step;
    out.tokens[at] = base[c];
    out.positions[at] = p.position + i * step;
    out.documents[at] = document;
    out.valid[at] = true;
    out.labels[at] = c + 1 < end ? token_at(c + 1) : label_fill;
    out.weights[at] = c + 1 < end ? 1.0f : 0.0f;
  }
  for (int64_t d = 1; d < out.depths; ++d) {
    int64_t* labels = out.labels + d * out.size + p.destination;
    float* weights = out.weights + d * out.size + p.destination;
    const int64_t n = held(p, extent, step, 1 + d);
    for (int64_t i = 0; i < n; ++i) labels[i] = token_at(column + i * step + 1 + d);
    std::fill(weights, weights + n, 1.0f);
    std::fill(labels + n, labels + p.count, label_fill);
    std::fill(weights + n, weights + p.count, 0.0f);
  }
}

void materialise(const Rows& rows_array, const py::object& extra, const Array64& rows,
                 const Array64& offsets, const Array64& extents, const Array64& piece,
                 int64_t step, int64_t token_fill, int64_t label_fill,
                 py::array_t<int64_t>& tokens, py::array_t<int64_t>& positions,
                 py::array_t<int64_t>& labels, py::array_t<float>& weights,
                 py::array_t<int32_t>& documents, py::array_t<bool>& valid) {
  const Source src = source(rows_array, "source");
  const Segments segments{span(rows, "rows"), span(offsets, "offsets"), span(extents, "extents")};
  const Span<Piece> list = pieces_of(piece);
  const int64_t count = segments.row.size;
  if (segments.offset.size != count || segments.extent.size != count) fail("offsets: one each");
  if (step < 1 || step > kMaxTokens) fail("step: must be 1 .. 2**31 - 1");
  Array64 extra_array;
  const int64_t* beyond = nullptr;
  if (!extra.is_none()) {
    extra_array = py::cast<Array64>(extra);
    if (span(extra_array, "extra").size != src.rows) fail("extra: one per row");
    beyond = extra_array.data();
  }
  const int64_t size = tokens.size();
  const auto check = [&](const py::array& array, int ndim, const char* name) {
    const bool contiguous = (array.flags() & py::array::c_style) != 0;
    const bool fits = array.ndim() == ndim && array.shape(ndim - 1) == size;
    if (!contiguous || !fits) fail(std::string(name) + ": wrong shape, or not contiguous");
  };
  check(tokens, 1, "tokens");
  check(positions, 1, "positions");
  check(labels, 2, "labels");
  check(weights, 2, "weights");
  check(documents, 1, "documents");
  check(valid, 1, "valid");
  const int64_t depths = labels.shape(0);
  if (depths < 1 || depths > kMaxDepths || weights.shape(0) != depths)
    fail("labels: needs 1 to 16 depths, and as many weights");
  const Outputs out{tokens.mutable_data(),    positions.mutable_data(), labels.mutable_data(),
                    weights.mutable_data(),   documents.mutable_data(), valid.mutable_data(),
                    size,                     depths};
  py::gil_scoped_release release;
  walk(
      list, std::min(count, kMaxTokens), size,
      [&](const Piece& p) { write_piece(out, src, beyond, segments, p, step, label_fill); },
      [&](int64_t a, int64_t b) { write_padding(out, a, b, token_fill, label_fill); });
}

}  // namespace

void bind_materialise(py::module_& m) {
  m.def("materialise", &materialise, py::arg("source"), py::arg("extra"), py::arg("rows"),
        py::arg("offsets"), py::arg("extents"), py::arg("piece"), py::arg("step"),
        py::arg("token_fill"), py::arg("label_fill"), py::arg("tokens").noconvert(),
        py::arg("positions").noconvert(), py::arg("labels").noconvert(),
        py::arg("weights").noconvert(), py::arg("documents").noconvert(),
        py::arg("valid").noconvert());
}

}  // namespace packed
