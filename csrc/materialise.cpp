// Everything that a step reads, in one walk over the pieces and one buffer.

#include <cstring>
#include <type_traits>

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

PACKED_HOT void write_block(const Outputs& out, const int64_t* from, int64_t at, int64_t count,
                            int64_t position, int32_t document) {
  const size_t bytes = static_cast<size_t>(count) * sizeof(int64_t);
  std::memcpy(out.tokens + at, from, bytes);
  std::memcpy(out.labels + at, from + 1, bytes);
  std::memset(out.valid + at, 1, static_cast<size_t>(count));
  int64_t* const positions = out.positions + at;
  float* const weights = out.weights + at;
  int32_t* const documents = out.documents + at;
  for (int64_t i = 0; i < count; ++i) positions[i] = position + i;
  for (int64_t i = 0; i < count; ++i) weights[i] = 1.0f;
  for (int64_t i = 0; i < count; ++i) documents[i] = document;
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
  for (int64_t i = 0; i < count; i += kBlock)
    write_block(out, from + i, at + i, std::min(kBlock, count - i), position + i, document);
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

// Where each array lies in the buffer, in bytes; see BufferLayout.places.
enum Place {
  kTokens, kPositions, kLabels, kWeights, kDocuments, kValid, kReal, kPadded, kRowCounts, kPlaces
};

// The buffer, and the check that an array lies inside it.
class Buffer {
 public:
  Buffer(py::array_t<uint8_t>& bytes, const py::tuple& places) : places_(places) {
    const bool contiguous = (bytes.flags() & py::array::c_style) != 0;
    if (bytes.ndim() != 1 || !contiguous) fail("buffer: must be contiguous bytes");
    if (places.size() != kPlaces) fail("places: one for each array");
    begin_ = bytes.mutable_data();
    size_ = bytes.size();
  }
  template <class T>
  T* at(Place place, int64_t count) const {
    const auto offset = places_[place].cast<int64_t>();
    if (offset < 0 || offset > size_ || count > (size_ - offset) / int64_t{sizeof(T)})
      fail("buffer: too short");
    uint8_t* const where = begin_ + offset;
    if (reinterpret_cast<uintptr_t>(where) % alignof(T) != 0) fail("buffer: not aligned");
    return reinterpret_cast<T*>(where);
  }

 private:
  const py::tuple& places_;
  uint8_t* begin_;
  int64_t size_;
};

void materialise(const Rows& rows_array, const py::object& extra, const Array64& rows,
                 const Array64& offsets, const Array64& extents, const Array64& piece,
                 int64_t step, int64_t token_fill, int64_t label_fill, const Array32& real,
                 const Array32& padded, const Array64& row_counts, int64_t size, int64_t depths,
                 const py::tuple& places, py::array_t<uint8_t>& bytes) {
  const Source src = source(rows_array, "source");
  const Segments segments{span(rows, "rows"), span(offsets, "offsets"), span(extents, "extents")};
  const Span<Piece> list = pieces_of(piece);
  const int64_t count = segments.row.size;
  if (segments.offset.size != count || segments.extent.size != count) fail("offsets: one each");
  if (step < 1 || step > kMaxTokens) fail("step: must be 1 .. 2**31 - 1");
  if (size < 0 || size > kMaxTokens) fail("size: must be 0 .. 2**31 - 1");
  if (depths < 1 || depths > kMaxDepths) fail("depths: must be 1 .. 16");
  Array64 extra_array;
  const int64_t* beyond = nullptr;
  if (!extra.is_none()) {
    extra_array = py::cast<Array64>(extra);
    if (span(extra_array, "extra").size != src.rows) fail("extra: one per row");
    beyond = extra_array.data();
  }
  const Buffer buffer(bytes, places);
  const auto copy = [&](Place place, const auto& values) {
    using T = std::decay_t<decltype(values[0])>;
    std::copy(values.data, values.data + values.size, buffer.at<T>(place, values.size));
  };
  copy(kReal, span(real, "cu_seqlens"));
  copy(kPadded, span(padded, "cu_seqlens_padded"));
  copy(kRowCounts, span(row_counts, "valid_tokens_per_row"));
  const Outputs out{buffer.at<int64_t>(kTokens, size),
                    buffer.at<int64_t>(kPositions, size),
                    buffer.at<int64_t>(kLabels, size * depths),
                    buffer.at<float>(kWeights, size * depths),
                    buffer.at<int32_t>(kDocuments, size),
                    buffer.at<bool>(kValid, size),
                    size,
                    depths};
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
        py::arg("token_fill"), py::arg("label_fill"), py::arg("cu_seqlens"),
        py::arg("cu_seqlens_padded"), py::arg("valid_tokens_per_row"), py::arg("size"),
        py::arg("depths"), py::arg("places"), py::arg("buffer").noconvert());
}

}  // namespace packed
