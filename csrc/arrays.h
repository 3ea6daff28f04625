// Numpy arrays as plain pointers with sizes, and the checks that keep every access inside them.
//
// The Python side validates arguments for people; the checks here protect memory: no array that
// a caller can build makes this code read or write outside a buffer.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

// Wider vectors where the processor has them. Sanitisers can't run the resolver this needs.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#define PACKED_HOT __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define PACKED_HOT
#endif

namespace packed {

namespace py = pybind11;

using Array64 = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
using Array32 = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using ArrayBool = py::array_t<bool, py::array::c_style | py::array::forcecast>;
using ArrayF32 = py::array_t<float, py::array::c_style | py::array::forcecast>;
// Rows may be a slice of wider rows, so the row stride is free.
using Rows = py::array_t<int64_t, py::array::forcecast>;

constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

[[noreturn]] inline void fail(const std::string& message) { throw std::invalid_argument(message); }

template <class T>
struct Span {
  const T* data = nullptr;
  int64_t size = 0;
  const T& operator[](int64_t i) const { return data[i]; }
};

template <class T, int Flags>
Span<T> span(const py::array_t<T, Flags>& array, const char* name) {
  if (array.ndim() != 1) fail(std::string(name) + ": must have one dimension");
  return {array.data(), static_cast<int64_t>(array.shape(0))};
}

struct Source {
  const int64_t* data = nullptr;
  int64_t rows = 0;
  int64_t width = 0;
  int64_t stride = 0;  // in elements
  const int64_t* row(int64_t r) const { return data + r * stride; }
};

inline Source source(const Rows& array, const char* name) {
  if (array.ndim() != 2) fail(std::string(name) + ": must have two dimensions");
  const int64_t size = sizeof(int64_t);
  if (array.shape(1) > 1 && array.strides(1) != size)
    fail(std::string(name) + ": rows must be contiguous");
  if (array.shape(0) > 1 && array.strides(0) % size != 0)
    fail(std::string(name) + ": rows must be aligned");
  return {array.data(), array.shape(0), array.shape(1),
          array.shape(0) > 1 ? array.strides(0) / size : 0};
}

// A part of a segment that is contiguous in the output; see reference.py.
struct Piece {
  int64_t destination;
  int64_t segment;
  int64_t position;
  int64_t count;
};
static_assert(sizeof(Piece) == 4 * sizeof(int64_t), "pieces are rows of an int64 [m, 4] array");

inline Span<Piece> pieces_of(const Array64& array) {
  if (array.ndim() != 2 || array.shape(1) != 4) fail("piece: must have shape [m, 4]");
  return {reinterpret_cast<const Piece*>(array.data()), static_cast<int64_t>(array.shape(0))};
}

template <class T>
py::array_t<T> to_numpy(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

// Use the caller's buffer if there is one of the right shape and type, else a new one.
template <class T>
py::array_t<T> output(const py::object& out, int64_t size) {
  if (size < 0) fail("size: must not be negative");
  if (out.is_none()) return py::array_t<T>(size);
  if (!py::isinstance<py::array_t<T>>(out)) fail("out: wrong dtype");
  auto array = py::reinterpret_borrow<py::array_t<T>>(out);
  if (array.ndim() != 1 || array.shape(0) != size) fail("out: wrong shape");
  if (size > 1 && array.strides(0) != static_cast<py::ssize_t>(sizeof(T)))
    fail("out: must be contiguous");
  return array;
}

void bind_boundaries(py::module_& m);
void bind_gather(py::module_& m);
void bind_materialise(py::module_& m);
void bind_partition(py::module_& m);
void bind_affinity(py::module_& m);
void bind_packers(py::module_& m);

}  // namespace packed
