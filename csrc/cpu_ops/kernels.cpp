#include "kernels.h"

#include <limits>

namespace cpu_ops {

// y = x * rstd * gain with rstd = 1 / sqrt(mean(x^2) + eps).
CPU_OPS_CLONES void rms_norm_row(const float *__restrict x, const float *__restrict gain,
                                 float *__restrict out, float *rstd, std::int64_t n, float eps) {
    float acc[lanes] = {};
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes)
        for (int j = 0; j < lanes; ++j) acc[j] += x[i + j] * x[i + j];
    for (int j = 0; i + j < n; ++j) acc[j] += x[i + j] * x[i + j];
    const float scale = 1.0f / std::sqrt(sum_lanes(acc) / static_cast<float>(n) + eps);
    *rstd = scale;
    for (i = 0; i < n; ++i) out[i] = x[i] * scale * gain[i];
}

// dx = rstd * (g*gain - x * rstd^2 * mean(g*gain*x)); dgain += g * x * rstd.
CPU_OPS_CLONES void rms_norm_row_backward(const float *__restrict grad, const float *__restrict x,
                                          const float *__restrict gain, float rstd,
                                          float *__restrict dx, float *__restrict dgain,
                                          std::int64_t n) {
    float acc[lanes] = {};
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes)
        for (int j = 0; j < lanes; ++j) acc[j] += grad[i + j] * gain[i + j] * x[i + j];
    for (int j = 0; i + j < n; ++j) acc[j] += grad[i + j] * gain[i + j] * x[i + j];
    const float mean = sum_lanes(acc) / static_cast<float>(n) * rstd * rstd;
    for (i = 0; i < n; ++i) {
        const float g = grad[i];
        dx[i] = rstd * (g * gain[i] - x[i] * mean);
        dgain[i] += g * x[i] * rstd;
    }
}

// out = silu(a) * b for the row [a | b] of 2n values.
CPU_OPS_CLONES void swiglu_row(const float *__restrict x, float *__restrict out, std::int64_t n) {
    const float *__restrict b = x + n;
    for (std::int64_t i = 0; i < n; ++i) out[i] = x[i] / (1.0f + fast_exp(-x[i])) * b[i];
}

CPU_OPS_CLONES void swiglu_row_backward(const float *__restrict grad, const float *__restrict x,
                                        float *__restrict dx, std::int64_t n) {
    const float *__restrict b = x + n;
    float *__restrict db = dx + n;
    for (std::int64_t i = 0; i < n; ++i) {
        const float sigmoid = 1.0f / (1.0f + fast_exp(-x[i]));
        const float silu = x[i] * sigmoid;
        dx[i] = grad[i] * b[i] * (sigmoid + silu * (1.0f - sigmoid));
        db[i] = grad[i] * silu;
    }
}

// Channels i and i + half turn together; channels from 2 * half on pass through.
CPU_OPS_CLONES void rotate_row(const float *__restrict x, float *__restrict out,
                               const float *__restrict cos, const float *__restrict sin, float sign,
                               std::int64_t half, std::int64_t width) {
    for (std::int64_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[half + i], s = sign * sin[i];
        out[i] = a * cos[i] - b * s;
        out[half + i] = b * cos[i] + a * s;
    }
    for (std::int64_t i = 2 * half; i < width; ++i) out[i] = x[i];
}

// Channels 2i and 2i + 1 turn together.
CPU_OPS_CLONES void rotate_row_interleaved(const float *__restrict x, float *__restrict out,
                                           const float *__restrict cos, const float *__restrict sin,
                                           float sign, std::int64_t half, std::int64_t width) {
    for (std::int64_t i = 0; i < half; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1], s = sign * sin[i];
        out[2 * i] = a * cos[i] - b * s;
        out[2 * i + 1] = b * cos[i] + a * s;
    }
    for (std::int64_t i = 2 * half; i < width; ++i) out[i] = x[i];
}

// log(sum(exp(x))), -inf for a row of -inf or of no column; NaN if any value is NaN.
CPU_OPS_CLONES float log_sum_exp_row(const float *__restrict x, std::int64_t n) {
    constexpr float lowest = std::numeric_limits<float>::lowest();
    float top[lanes];
    for (int j = 0; j < lanes; ++j) top[j] = lowest;
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes)
        for (int j = 0; j < lanes; ++j) top[j] = x[i + j] > top[j] ? x[i + j] : top[j];
    for (int j = 0; i + j < n; ++j) top[j] = x[i + j] > top[j] ? x[i + j] : top[j];
    float highest = lowest;
    for (int j = 0; j < lanes; ++j) highest = top[j] > highest ? top[j] : highest;
    float acc[lanes] = {};
    for (i = 0; i + lanes <= n; i += lanes)
        for (int j = 0; j < lanes; ++j) acc[j] += fast_exp(x[i + j] - highest);
    for (int j = 0; i + j < n; ++j) acc[j] += fast_exp(x[i + j] - highest);
    return std::log(sum_lanes(acc)) + highest;
}

// out = exp(x - lse) * grad; `out` may be `x`.
CPU_OPS_CLONES void softmax_row_backward(const float *x, float *out, float lse, float grad,
                                         std::int64_t n) {
    if (x == out) {
        for (std::int64_t i = 0; i < n; ++i) out[i] = fast_exp(out[i] - lse) * grad;
        return;
    }
    const float *__restrict from = x;
    float *__restrict to = out;
    for (std::int64_t i = 0; i < n; ++i) to[i] = fast_exp(from[i] - lse) * grad;
}

// Turns scores into weights exp(score - top) with the running maximum `top`, adds them to `total`,
// and brings what `sum` and `total` held so far to a new maximum. Columns from `seen` on lie in the
// future: weight 0.
CPU_OPS_CLONES void softmax_row_online(float *__restrict scores, std::int64_t seen,
                                       std::int64_t keys, float *top, float *total,
                                       float *__restrict sum, std::int64_t width) {
    float highest[lanes];
    for (int j = 0; j < lanes; ++j) highest[j] = *top;
    std::int64_t i = 0;
    for (; i + lanes <= seen; i += lanes)
        for (int j = 0; j < lanes; ++j)
            highest[j] = scores[i + j] > highest[j] ? scores[i + j] : highest[j];
    for (int j = 0; i + j < seen; ++j)
        highest[j] = scores[i + j] > highest[j] ? scores[i + j] : highest[j];
    float now = *top;
    for (int j = 0; j < lanes; ++j) now = highest[j] > now ? highest[j] : now;
    float acc[lanes] = {};
    for (i = 0; i + lanes <= seen; i += lanes)
        for (int j = 0; j < lanes; ++j) {
            const float weight = fast_exp(scores[i + j] - now);
            scores[i + j] = weight;
            acc[j] += weight;
        }
    for (int j = 0; i + j < seen; ++j) {
        const float weight = fast_exp(scores[i + j] - now);
        scores[i + j] = weight;
        acc[j] += weight;
    }
    for (i = seen; i < keys; ++i) scores[i] = 0.0f;
    if (now != *top) {
        const float shrink = fast_exp(*top - now);
        *total *= shrink;
        for (i = 0; i < width; ++i) sum[i] *= shrink;
        *top = now;
    }
    *total += sum_lanes(acc);
}

// weights: score -> exp(score - lse). slopes: dP -> dS = weight * (dP - delta) * scale.
CPU_OPS_CLONES void attention_row_backward(float *__restrict weights, float *__restrict slopes,
                                           std::int64_t seen, std::int64_t keys, float lse,
                                           float delta, float scale) {
    for (std::int64_t i = 0; i < seen; ++i) {
        const float weight = fast_exp(weights[i] - lse);
        weights[i] = weight;
        slopes[i] = weight * (slopes[i] - delta) * scale;
    }
    for (std::int64_t i = seen; i < keys; ++i) weights[i] = slopes[i] = 0.0f;
}

CPU_OPS_CLONES void scale_row(const float *__restrict x, float *__restrict out, float factor,
                              std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = x[i] * factor;
}

// In pieces of a fixed size: calling memcpy takes as long as copying a row.
constexpr std::int64_t piece = 16;

CPU_OPS_CLONES void copy_rows(const float *__restrict from, std::int64_t from_stride,
                              float *__restrict to, std::int64_t to_stride, std::int64_t rows,
                              std::int64_t n) {
    for (std::int64_t r = 0; r < rows; ++r, from += from_stride, to += to_stride) {
        std::int64_t i = 0;
        for (; i + piece <= n; i += piece)
            for (int j = 0; j < piece; ++j) to[i + j] = from[i + j];
        for (; i < n; ++i) to[i] = from[i];
    }
}

CPU_OPS_CLONES void add_rows(const float *__restrict from, std::int64_t from_stride,
                             float *__restrict to, std::int64_t to_stride, std::int64_t rows,
                             std::int64_t n) {
    for (std::int64_t r = 0; r < rows; ++r, from += from_stride, to += to_stride)
        for (std::int64_t i = 0; i < n; ++i) to[i] += from[i];
}

CPU_OPS_CLONES float dot_row(const float *__restrict a, const float *__restrict b,
                             std::int64_t n) {
    float acc[lanes] = {};
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes)
        for (int j = 0; j < lanes; ++j) acc[j] += a[i + j] * b[i + j];
    for (int j = 0; i + j < n; ++j) acc[j] += a[i + j] * b[i + j];
    return sum_lanes(acc);
}

} // namespace cpu_ops
