// Inner loops over contiguous fp32 rows, written so that the compiler vectorises them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// One copy of each function per instruction set, chosen when the library is loaded. Levels, not
// processor names: GCC matches a name exactly, and a newer processor would get the slowest copy.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define CPU_OPS_CLONES \
    __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CPU_OPS_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define CPU_OPS_CLONES
#endif

namespace cpu_ops {

// e^x within 2 ulp for x <= 88; smaller than 2^-126 counts as 0. NaN stays NaN.
__attribute__((always_inline)) inline float fast_exp(float x) {
    constexpr float magic = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer
    x = x > 88.0f ? 88.0f : x;           // comparisons with NaN are false: NaN passes
    const float t = x < -88.0f ? -88.0f : x;
    const float n = (t * 1.44269504088896341f + magic) - magic;
    const float r = (t - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const auto exponent = static_cast<std::uint32_t>(static_cast<std::int32_t>(n) + 127);
    const std::uint32_t bits = exponent << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return x < -87.3f ? 0.0f : p * scale;
}

// Partial sums per lane: vectorises without licence to reorder, and is more accurate than one chain.
constexpr int lanes = 32;

__attribute__((always_inline)) inline float sum_lanes(const float *acc) {
    float total = 0;
    for (int i = 0; i < lanes; ++i) total += acc[i];
    return total;
}

void rms_norm_row(const float *x, const float *gain, float *out, float *rstd,
                                 std::int64_t n, float eps);
void rms_norm_row_backward(const float *grad, const float *x, const float *gain,
                                          float rstd, float *dx, float *dgain, std::int64_t n);
void swiglu_row(const float *x, float *out, std::int64_t n);
void swiglu_row_backward(const float *grad, const float *x, float *dx,
                                        std::int64_t n);
void rotate_row(const float *x, float *out, const float *cos, const float *sin,
                               float sign, std::int64_t half, std::int64_t width);
void rotate_row_interleaved(const float *x, float *out, const float *cos,
                                           const float *sin, float sign, std::int64_t half,
                                           std::int64_t width);
float log_sum_exp_row(const float *x, std::int64_t n);
void softmax_row_backward(const float *x, float *out, float lse, float grad,
                                         std::int64_t n);

// One row of an online softmax step; see kernels.cpp.
void softmax_row_online(float *scores, std::int64_t seen, std::int64_t keys,
                                       float *top, float *total, float *sum, std::int64_t width);
void attention_row_backward(float *weights, float *slopes, std::int64_t seen,
                                           std::int64_t keys, float lse, float delta, float scale);
void scale_row(const float *x, float *out, float factor, std::int64_t n);

// Rows of n values, copied or added from one stride to another.
void copy_rows(const float *from, std::int64_t from_stride, float *to, std::int64_t to_stride,
               std::int64_t rows, std::int64_t n);
void add_rows(const float *from, std::int64_t from_stride, float *to, std::int64_t to_stride,
              std::int64_t rows, std::int64_t n);
float dot_row(const float *a, const float *b, std::int64_t n);

} // namespace cpu_ops
