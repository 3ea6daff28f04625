// Matrix products of attention kernels, by the BLAS that torch itself calls.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"

namespace cpu_ops {

// BLAS may round differently for another alignment: every thread's scratch starts on a cache line.
inline float *scratch(std::vector<float> &memory, std::int64_t size) {
    constexpr std::size_t line = 64;
    const std::size_t needed = static_cast<std::size_t>(size) + line / sizeof(float);
    if (memory.size() < needed) memory.resize(needed); // never smaller: growing again fills it
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    return memory.data() + (line - address % line) % line / sizeof(float);
}

struct Matrix {
    const float *data;
    std::int64_t stride;
    bool transposed;
};

// c[m, n] = alpha * a[m, k] b[k, n] + beta * c, all row-major.
inline void multiply(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, Matrix a,
                     Matrix b, float beta, float *c, std::int64_t c_stride) {
    const int rows = static_cast<int>(m), columns = static_cast<int>(n),
              inner = static_cast<int>(k);
    const int lda = static_cast<int>(a.stride), ldb = static_cast<int>(b.stride),
              ldc = static_cast<int>(c_stride);
    // Column-major BLAS sees the transposed problem: c^T = b^T a^T.
    sgemm()(b.transposed ? "T" : "N", a.transposed ? "T" : "N", &columns, &rows, &inner, &alpha,
            b.data, &ldb, a.data, &lda, &beta, c, &ldc);
}

} // namespace cpu_ops
