// Element-wise training kernels for the CPU: one pass where torch needs three to ten.
//
// Arguments are addresses of fp32 buffers; Python checks shapes, dtypes and strides. The GIL is
// released for the whole call. Every function splits rows into blocks of a fixed size, so results do
// not depend on the number of threads.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "attention.h"
#include "kernels.h"
#include "parallel.h"
#include "runs.h"
#include "tiles.h"

namespace py = pybind11;
using std::int64_t;
using std::uintptr_t;

namespace cpu_ops {
namespace {

const float *in(uintptr_t address) { return reinterpret_cast<const float *>(address); }
float *out(uintptr_t address) { return reinterpret_cast<float *>(address); }

// Runs body(row) for every row, about 64 KB of values a block.
template <class Body>
void for_rows(int64_t rows, int64_t columns, int threads, const Body &body) {
    const int64_t step = std::max<int64_t>(1, 16384 / std::max<int64_t>(columns, 1));
    parallel_blocks((rows + step - 1) / step, threads, [&](int64_t block) {
        const int64_t end = std::min(rows, (block + 1) * step);
        for (int64_t row = block * step; row < end; ++row) body(row);
    });
}

void rms_norm(uintptr_t x, uintptr_t gain, uintptr_t y, uintptr_t rstd, int64_t rows,
              int64_t columns, float eps, int threads) {
    for_rows(rows, columns, threads, [=](int64_t r) {
        rms_norm_row(in(x) + r * columns, in(gain), out(y) + r * columns, out(rstd) + r, columns,
                     eps);
    });
}

// `partial` is a zeroed [blocks, columns] buffer; the caller sums it over blocks.
void rms_norm_backward(uintptr_t grad, uintptr_t x, uintptr_t gain, uintptr_t rstd, uintptr_t dx,
                       uintptr_t partial, int64_t rows, int64_t columns, int64_t blocks,
                       int threads) {
    const int64_t step = (rows + blocks - 1) / blocks;
    parallel_blocks(blocks, threads, [=](int64_t block) {
        const int64_t end = std::min(rows, (block + 1) * step);
        for (int64_t r = block * step; r < end; ++r)
            rms_norm_row_backward(in(grad) + r * columns, in(x) + r * columns, in(gain),
                                  in(rstd)[r], out(dx) + r * columns,
                                  out(partial) + block * columns, columns);
    });
}

void swiglu(uintptr_t x, uintptr_t y, int64_t rows, int64_t columns, int threads) {
    for_rows(rows, columns, threads, [=](int64_t r) {
        swiglu_row(in(x) + 2 * r * columns, out(y) + r * columns, columns);
    });
}

void swiglu_backward(uintptr_t grad, uintptr_t x, uintptr_t dx, int64_t rows, int64_t columns,
                     int threads) {
    for_rows(rows, columns, threads, [=](int64_t r) {
        swiglu_row_backward(in(grad) + r * columns, in(x) + 2 * r * columns,
                            out(dx) + 2 * r * columns, columns);
    });
}

// x is [tokens, heads, width] with the given strides (in values), y is contiguous, freqs is
// [tokens / repeat, 2, half]: cosines, then sines.
void rotate(uintptr_t x, uintptr_t y, uintptr_t freqs, int64_t tokens, int64_t heads, int64_t width,
            int64_t half, int64_t repeat, int64_t token_stride, int64_t head_stride,
            bool interleaved, bool inverse, int threads) {
    const float sign = inverse ? -1.0f : 1.0f;
    const auto row = interleaved ? rotate_row_interleaved : rotate_row;
    for_rows(tokens, heads * width, threads, [=](int64_t t) {
        const float *cos = in(freqs) + t / repeat * 2 * half;
        for (int64_t h = 0; h < heads; ++h)
            row(in(x) + t * token_stride + h * head_stride, out(y) + (t * heads + h) * width, cos,
                cos + half, sign, half, width);
    });
}

void log_sum_exp(uintptr_t x, uintptr_t lse, int64_t rows, int64_t columns, int64_t row_stride,
                 int threads) {
    for_rows(rows, columns, threads, [=](int64_t r) {
        out(lse)[r] = log_sum_exp_row(in(x) + r * row_stride, columns);
    });
}

// y[row] = softmax(x[row]) * grad[row], less grad at the label where this rank holds it (label >= 0);
// zeros in columns from `columns` on, and in every column of a row whose grad is 0. y may be x.
void cross_entropy_backward(uintptr_t x, uintptr_t y, uintptr_t lse, uintptr_t grad,
                            uintptr_t labels, int64_t rows, int64_t columns, int64_t row_stride,
                            int threads) {
    const auto *label = reinterpret_cast<const int64_t *>(labels);
    for_rows(rows, row_stride, threads, [=](int64_t r) {
        float *to = out(y) + r * row_stride;
        const float g = in(grad)[r];
        if (g == 0.0f) {
            std::fill(to, to + row_stride, 0.0f);
            return;
        }
        softmax_row_backward(in(x) + r * row_stride, to, in(lse)[r], g, columns);
        if (label[r] >= 0) to[label[r]] -= g;
        std::fill(to + columns, to + row_stride, 0.0f);
    });
}

// (address, row stride, slot stride, head stride)
using StreamArguments = std::tuple<uintptr_t, int64_t, int64_t, int64_t>;

Stream stream(const StreamArguments &a) {
    return {out(std::get<0>(a)), std::get<1>(a), std::get<2>(a), std::get<3>(a)};
}

void attention(const StreamArguments &q, const StreamArguments &k, const StreamArguments &v,
               const StreamArguments &y, const StreamArguments &lse, uintptr_t segments,
               int64_t count, int64_t heads, int64_t kv_heads, int64_t width, int64_t value_width,
               float scale, int threads) {
    const py::gil_scoped_release release;
    attention_forward(stream(q), stream(k), stream(v), stream(y), stream(lse),
                      reinterpret_cast<const int64_t *>(segments), count,
                      {heads, kv_heads, width, value_width, scale}, threads);
}

void attention_gradients(const StreamArguments &grad, const StreamArguments &q,
                         const StreamArguments &k, const StreamArguments &v,
                         const StreamArguments &y, const StreamArguments &lse,
                         const StreamArguments &dq, const StreamArguments &dk,
                         const StreamArguments &dv, uintptr_t segments, int64_t count,
                         int64_t heads, int64_t kv_heads, int64_t width, int64_t value_width,
                         float scale, int threads) {
    const py::gil_scoped_release release;
    attention_backward(stream(grad), stream(q), stream(k), stream(v), stream(y), stream(lse),
                       stream(dq), stream(dk), stream(dv),
                       reinterpret_cast<const int64_t *>(segments), count,
                       {heads, kv_heads, width, value_width, scale}, threads);
}

// (address, row stride, head stride)
using RowsArguments = std::tuple<uintptr_t, int64_t, int64_t>;

Rows rows(const RowsArguments &a) { return {out(std::get<0>(a)), std::get<1>(a), std::get<2>(a)}; }

// Runs are [count][3] int64, see runs.h.
void put_rows(bool add, const RowsArguments &to, const RowsArguments &from, uintptr_t runs,
              int64_t count, int64_t heads, int64_t width, int threads) {
    const py::gil_scoped_release release;
    put_runs(add ? Put::add : Put::copy, rows(to), rows(from),
             reinterpret_cast<const RowRun *>(runs), count, heads, width, threads);
}

// Tiles are [count][6] int64, see tiles.h.
void attention_tiles(const RowsArguments &q, const RowsArguments &k, const RowsArguments &v,
                     const RowsArguments &y, const RowsArguments &lse, uintptr_t tiles,
                     int64_t count, int64_t fresh, int64_t heads, int64_t kv_heads, int64_t width,
                     int64_t value_width, float scale, int threads) {
    const py::gil_scoped_release release;
    const Shape shape{heads, kv_heads, width, value_width, scale};
    tiles_forward({rows(q), rows(k), rows(v), rows(y), rows(lse), shape},
                  reinterpret_cast<const Tile *>(tiles), count, fresh, threads);
}

void attention_tiles_gradients(const RowsArguments &grad, const RowsArguments &q,
                               const RowsArguments &k, const RowsArguments &v,
                               const RowsArguments &y, const RowsArguments &lse,
                               const RowsArguments &delta, const RowsArguments &dq,
                               const RowsArguments &dk, const RowsArguments &dv, uintptr_t tiles,
                               int64_t count, int64_t fresh, int64_t heads, int64_t kv_heads,
                               int64_t width, int64_t value_width, float scale, int threads) {
    const py::gil_scoped_release release;
    const Shape shape{heads, kv_heads, width, value_width, scale};
    tiles_backward({rows(grad), rows(q), rows(k), rows(v), rows(y), rows(lse), rows(delta),
                    rows(dq), rows(dk), rows(dv), shape},
                   reinterpret_cast<const Tile *>(tiles), count, fresh, threads);
}

} // namespace
} // namespace cpu_ops

PYBIND11_MODULE(_cpu_ops, m) {
    using namespace cpu_ops;
    const auto free = py::call_guard<py::gil_scoped_release>();
    m.doc() = "fp32 element-wise training kernels on CPU; see megatron.packed.accelerator.cpu_ops";
    m.attr("interface") = 3; // _INTERFACE of megatron/packed/accelerator/cpu_ops.py
    m.def("use_gomp", [](uintptr_t address) {
        gomp_parallel() = reinterpret_cast<GompParallel>(address);
    });
    m.def("use_sgemm", [](uintptr_t address) { sgemm() = reinterpret_cast<Sgemm>(address); });
    m.def("use_blas_threads", [](uintptr_t address) {
        set_blas_threads() = reinterpret_cast<SetBlasThreads>(address);
    });
    m.def("has_sgemm", [] { return sgemm() != nullptr; });
    m.def("put_rows", &put_rows);
    m.def("attention", &attention);
    m.def("attention_backward", &attention_gradients);
    m.def("attention_tiles", &attention_tiles);
    m.def("attention_tiles_backward", &attention_tiles_gradients);
    m.def("rms_norm", &rms_norm, free);
    m.def("rms_norm_backward", &rms_norm_backward, free);
    m.def("swiglu", &swiglu, free);
    m.def("swiglu_backward", &swiglu_backward, free);
    m.def("rotate", &rotate, free);
    m.def("log_sum_exp", &log_sum_exp, free);
    m.def("cross_entropy_backward", &cross_entropy_backward, free);
}
