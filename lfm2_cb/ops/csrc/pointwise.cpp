// What a layer does to each token by itself, and the short convolution: one pass over memory each, sums in fp32.
#include "simd.h"

namespace {

template <class T>
inline void round_to(float* x) {
    T rounded;
    assign(&rounded, *x);
    *x = to_float(rounded);
}

// Tokens that are worth a thread of their own: waking one costs as much as this many values.
inline int threads_for(int64_t values, int64_t num_threads) {
    const int64_t worth = 1 + values / 16384;
    return worth < num_threads ? worth : num_threads;
}

template <class T>
void rms_norm(const T* x, const T* weight, T* out, int64_t tokens, int64_t heads, int64_t dim, int64_t stride,
              float eps, int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(threads_for(tokens * heads * dim, num_threads))
    for (int64_t row = 0; row < tokens * heads; row++) {
        const T* from = x + row / heads * stride + row % heads * dim;
        T* to = out + row * dim;
        vec squares = {};
        int64_t i = 0;
        for (; i + W <= dim; i += W) squares += load(from + i) * load(from + i);
        float total = sum(squares);
        for (; i < dim; i++) total += to_float(from[i]) * to_float(from[i]);
        const float scale = 1.0f / sqrtf(total / dim + eps);
        for (i = 0; i + W <= dim; i += W) store(to + i, rounded<T>(load(from + i) * scale) * load(weight + i));
        for (; i < dim; i++) {
            float normed = to_float(from[i]) * scale;
            round_to<T>(&normed);
            assign(to + i, normed * to_float(weight[i]));
        }
    }
}

template <class T>
void swiglu(const T* x, T* out, int64_t tokens, int64_t width, int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(threads_for(tokens * width, num_threads))
    for (int64_t row = 0; row < tokens; row++) {
        const T *gate = x + row * 2 * width, *value = gate + width;
        T* to = out + row * width;
        int64_t i = 0;
        for (; i + W <= width; i += W) {
            vec g = load(gate + i);
            store(to + i, g / (1.0f + exponential(-g)) * load(value + i));
        }
        for (; i < width; i++) {
            float g = to_float(gate[i]);
            assign(to + i, g / (1.0f + expf(-g)) * to_float(value[i]));
        }
    }
}

// `extended`: the states [num_state_rows, hidden] with x [tokens, hidden] behind them.
template <class T>
struct Extended {
    const T *states, *x;
    int64_t num_state_rows, hidden;

    const T* row(int64_t i) const { return i < num_state_rows ? states + i * hidden : x + (i - num_state_rows) * hidden; }
};

template <class T>
void short_conv(const Extended<T>& extended, const int64_t* taps, const T* weight, const T* bias, T* out, T* cache,
                const int64_t* write_rows, const int64_t* write_index, int64_t tokens, int64_t kernel,
                int64_t num_writes, int64_t num_threads) {
    const int64_t hidden = extended.hidden, window = kernel - 1;
#pragma omp parallel num_threads(threads_for(tokens * hidden, num_threads))
    {
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < tokens; t++) {
            T* to = out + t * hidden;
            int64_t i = 0;
            for (; i + W <= hidden; i += W) {
                vec s = bias ? load(bias + i) : vec{};
                for (int64_t k = 0; k < kernel; k++)
                    s += load(extended.row(taps[k * tokens + t]) + i) * load(weight + k * hidden + i);
                store(to + i, s);
            }
            for (; i < hidden; i++) {
                float s = bias ? to_float(bias[i]) : 0.0f;
                for (int64_t k = 0; k < kernel; k++)
                    s += to_float(extended.row(taps[k * tokens + t])[i]) * to_float(weight[k * hidden + i]);
                assign(to + i, s);
            }
        }
#pragma omp for schedule(static)
        for (int64_t j = 0; j < num_writes * window; j++)
            memcpy(cache + (write_rows[j / window] * window + j % window) * hidden, extended.row(write_index[j]),
                   hidden * sizeof(T));
    }
}

}  // namespace

// x [tokens, heads, dim], `stride` values from token to token; weight [dim]; out [tokens, heads, dim]. As in the stock
// model, the normed values are rounded to the dtype before they are scaled.
KERNEL(rms_norm)(const void* x, const void* weight, void* out, int64_t tokens, int64_t heads, int64_t dim,
                 int64_t stride, int64_t is_bf16, double eps, int64_t num_threads) {
    if (is_bf16)
        rms_norm((const bf16*)x, (const bf16*)weight, (bf16*)out, tokens, heads, dim, stride, eps, num_threads);
    else
        rms_norm((const float*)x, (const float*)weight, (float*)out, tokens, heads, dim, stride, eps, num_threads);
}

// x [tokens, 2, width]: gates and values; out [tokens, width] = silu(gate) * value
KERNEL(swiglu)(const void* x, void* out, int64_t tokens, int64_t width, int64_t is_bf16, int64_t num_threads) {
    is_bf16 ? swiglu((const bf16*)x, (bf16*)out, tokens, width, num_threads)
            : swiglu((const float*)x, (float*)out, tokens, width, num_threads);
}

// states [num_state_rows, hidden] and x [tokens, hidden] as one; taps [kernel, tokens] rows of it; weight [kernel,
// hidden]; bias [hidden] or null; out [tokens, hidden]. cache [any, kernel - 1, hidden]: its rows `write_rows`
// [num_writes] get the rows `write_index` [num_writes, kernel - 1]; `states` must be no part of it.
KERNEL(short_conv)(const void* states, const void* x, const int64_t* taps, const void* weight, const void* bias,
                   void* out, void* cache, const int64_t* write_rows, const int64_t* write_index,
                   int64_t num_state_rows, int64_t tokens, int64_t hidden, int64_t kernel, int64_t num_writes,
                   int64_t is_bf16, int64_t num_threads) {
    if (is_bf16)
        short_conv<bf16>({(const bf16*)states, (const bf16*)x, num_state_rows, hidden}, taps, (const bf16*)weight,
                         (const bf16*)bias, (bf16*)out, (bf16*)cache, write_rows, write_index, tokens, kernel,
                         num_writes, num_threads);
    else
        short_conv<float>({(const float*)states, (const float*)x, num_state_rows, hidden}, taps, (const float*)weight,
                          (const float*)bias, (float*)out, (float*)cache, write_rows, write_index, tokens, kernel,
                          num_writes, num_threads);
}
