// Exact causal attention inside segments: tiled, online softmax, matrix products by torch's BLAS.
#pragma once

#include <cstdint>

namespace cpu_ops {

// Fortran BLAS, the one that torch itself calls; its address comes from Python.
using Sgemm = void (*)(const char *, const char *, const int *, const int *, const int *,
                       const float *, const float *, const int *, const float *, const int *,
                       const float *, float *, const int *);
Sgemm &sgemm();

// A [rows, slots, heads, width] fp32 tensor whose last dimension is contiguous; strides in values.
struct Stream {
    float *data;
    std::int64_t row, slot, head;

    float *at(std::int64_t r, std::int64_t s, std::int64_t h) const {
        return data + r * row + s * slot + h * head;
    }
};

struct Shape {
    std::int64_t heads, kv_heads, width, value_width;
    float scale;
};

// Segments are [count][3]: row, first slot, length; none is empty. lse is [rows, slots, heads].
void attention_forward(const Stream &q, const Stream &k, const Stream &v, const Stream &out,
                       const Stream &lse, const std::int64_t *segments, std::int64_t count,
                       const Shape &shape, int threads);

void attention_backward(const Stream &grad, const Stream &q, const Stream &k, const Stream &v,
                        const Stream &out, const Stream &lse, const Stream &dq, const Stream &dk,
                        const Stream &dv, const std::int64_t *segments, std::int64_t count,
                        const Shape &shape, int threads);

} // namespace cpu_ops
