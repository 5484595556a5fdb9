// x @ weight.T (+ bias) for few rows of x: the weights are read once, from where they are, at the memory's speed.
//
// A thread takes a run of output channels, a tile of CHANNELS of them at a time. A tile's weights stay in the first
// cache while all rows of x pass over them, ROWS at a time, each loaded vector being used for a whole side of the tile.
#include "simd.h"

namespace {

constexpr int ROWS = 4, CHANNELS = 3;  // 12 accumulators, and 4 + 1 registers for what is loaded: AVX2 has 16
constexpr int64_t AHEAD = 512;         // bytes of prefetch along each weight row

template <int rows, int channels, typename T>
inline void tile(const float* x, const T* w, const T* bias, float* out, int64_t in, int64_t out_stride) {
    vec sums[rows][channels] = {};
    int64_t k = 0;
    for (; k + W <= in; k += W) {
        vec xs[rows];
        for (int r = 0; r < rows; r++) xs[r] = load(x + r * in + k);
        for (int c = 0; c < channels; c++) {
            const T* at = w + c * in + k;
            __builtin_prefetch((const char*)at + AHEAD);
            vec ws = load(at);
            for (int r = 0; r < rows; r++) sums[r][c] += xs[r] * ws;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < channels; c++) {
            float s = sum(sums[r][c]);
            for (int64_t rest = k; rest < in; rest++) s += x[r * in + rest] * to_float(w[c * in + rest]);
            out[r * out_stride + c] = s + (bias ? to_float(bias[c]) : 0.0f);
        }
}

template <int channels, typename T>
inline void all_rows(const float* x, const T* w, const T* bias, float* out, int64_t rows, int64_t in, int64_t stride) {
    int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS) tile<ROWS, channels>(x + r * in, w, bias, out + r * stride, in, stride);
    switch (rows - r) {
        case 3: tile<3, channels>(x + r * in, w, bias, out + r * stride, in, stride); break;
        case 2: tile<2, channels>(x + r * in, w, bias, out + r * stride, in, stride); break;
        case 1: tile<1, channels>(x + r * in, w, bias, out + r * stride, in, stride); break;
    }
}

template <typename T>
void linear(const float* x, const T* w, const T* bias, float* out, int64_t rows, int64_t in, int64_t channels,
            int64_t threads) {
    const int64_t tiles = (channels + CHANNELS - 1) / CHANNELS;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t c = t * CHANNELS;
        const T* b = bias ? bias + c : nullptr;
        switch (channels - c) {
            case 1: all_rows<1>(x, w + c * in, b, out + c, rows, in, channels); break;
            case 2: all_rows<2>(x, w + c * in, b, out + c, rows, in, channels); break;
            default: all_rows<3>(x, w + c * in, b, out + c, rows, in, channels);
        }
    }
}

}  // namespace

// x [rows, in] fp32, w [channels, in], bias [channels] or null, out [rows, channels] fp32
KERNEL(few_rows_linear_f32)(const float* x, const float* w, const float* bias, float* out, int64_t rows, int64_t in,
                            int64_t channels, int64_t threads) {
    linear(x, w, bias, out, rows, in, channels, threads);
}

KERNEL(few_rows_linear_bf16)(const float* x, const bf16* w, const bf16* bias, float* out, int64_t rows, int64_t in,
                             int64_t channels, int64_t threads) {
    linear(x, w, bias, out, rows, in, channels, threads);
}
