// What a layer does to each token by itself, and the short convolution: one pass over memory each, sums in fp32.
#include "core/activation.h"
#include "core/prefetch.h"
#include "core/scratch.h"
#include "core/threads.h"

namespace {

template <class T>
inline void round_to(float* x) {
    T rounded;
    assign(&rounded, *x);
    *x = to_float(rounded);
}

// Waking a thread costs as much as so many values.
inline int64_t threads_for(int64_t values, int64_t num_threads) {
    return worthwhile_threads(values, 16384, num_threads);
}

// What RMSNorm of dim values scales them by.
template <class T>
inline float norm_scale(const T* from, int64_t dim, float eps) {
    vec squares = {};
    int64_t i = 0;
    for (; i + W <= dim; i += W) squares += load(from + i) * load(from + i);
    float total = sum(squares);
    for (; i < dim; i++) total += to_float(from[i]) * to_float(from[i]);
    return 1.0f / sqrtf(total / dim + eps);
}

// RMSNorm of dim values: rounded to T before they are scaled, as in the stock model.
template <class T>
inline void normalize(const T* from, const T* weight, T* to, int64_t dim, float eps) {
    const float scale = norm_scale(from, dim, eps);
    int64_t i = 0;
    for (; i + W <= dim; i += W) store(to + i, rounded<T>(load(from + i) * scale) * load(weight + i));
    for (; i < dim; i++) {
        float normed = to_float(from[i]) * scale;
        round_to<T>(&normed);
        assign(to + i, normed * to_float(weight[i]));
    }
}

template <class T>
inline void add(const T* a, const T* b, T* to, int64_t dim) {
    int64_t i = 0;
    for (; i + W <= dim; i += W) store(to + i, load(a + i) + load(b + i));
    for (; i < dim; i++) assign(to + i, to_float(a[i]) + to_float(b[i]));
}

template <class T>
void rms_norm(const T* x, const T* residual, const T* weight, T* total, T* out, int64_t tokens, int64_t dim, float eps,
              int64_t num_threads) {
    parallel_for(tokens, threads_for(tokens * dim, num_threads), [&](int64_t t) {
        const T* from = x + t * dim;
        if (residual) {
            add(from, residual + t * dim, total + t * dim, dim);
            from = total + t * dim;
        }
        normalize(from, weight, out + t * dim, dim, eps);
    });
}

constexpr int64_t HEADS = 16;  // whose scales are known before any is turned, so that nothing waits for a root

// RMSNorm of up to HEADS heads of a token, each by the same weights, and RoPE, rounding each product and their sum as
// torch does.
template <class T>
inline void norm_rotate(const T* x, const T* weight, const T* cosines, const T* sines, T* to, int64_t heads,
                        int64_t dim, float eps) {
    const int64_t half = dim / 2;
    float scales[HEADS];
    for (int64_t h = 0; h < heads; h++) scales[h] = norm_scale(x + h * dim, dim, eps);
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        const int64_t j = half + i;
        const vec weights[] = {load(weight + i), load(weight + j)};
        const vec c[] = {load(cosines + i), load(cosines + j)}, s[] = {load(sines + i), load(sines + j)};
        for (int64_t h = 0; h < heads; h++) {
            vec first = load(x + h * dim + i) * scales[h], second = load(x + h * dim + j) * scales[h];
            round_both(first, second, T());
            first *= weights[0], second *= weights[1];
            round_both(first, second, T());
            vec a = first * c[0], b = second * s[0], d = second * c[1], e = first * s[1];
            round_both(a, b, T());
            round_both(d, e, T());
            store(to + h * dim + i, a - b);
            store(to + h * dim + j, d + e);
        }
    }
    for (; i < half; i++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t j = half + i;
            float first = to_float(x[h * dim + i]) * scales[h], second = to_float(x[h * dim + j]) * scales[h];
            for (float* normed : {&first, &second}) round_to<T>(normed);
            first *= to_float(weight[i]), second *= to_float(weight[j]);
            for (float* scaled : {&first, &second}) round_to<T>(scaled);
            float a = first * to_float(cosines[i]), b = second * to_float(sines[i]);
            float c = second * to_float(cosines[j]), d = first * to_float(sines[j]);
            for (float* product : {&a, &b, &c, &d}) round_to<T>(product);
            assign(to + h * dim + i, a - b);
            assign(to + h * dim + j, c + d);
        }
}

template <class T>
void norm_rotate(const T* x, const T* q_weight, const T* k_weight, const T* cosines, const T* sines, T* q, T* k,
                 int64_t tokens, int64_t stride, int64_t heads, int64_t kv_heads, int64_t dim, float eps,
                 int64_t num_threads) {
    const int64_t both = heads + kv_heads;
    parallel_for(tokens, threads_for(tokens * both * dim, num_threads), [&](int64_t t) {
        const auto turn = [&](const T* from, const T* weight, T* to, int64_t count) {
            for (int64_t h = 0; h < count; h += HEADS)
                norm_rotate(from + h * dim, weight, cosines + t * dim, sines + t * dim, to + h * dim,
                            min(HEADS, count - h), dim, eps);
        };
        turn(x + t * stride, q_weight, q + t * heads * dim, heads);
        turn(x + t * stride + heads * dim, k_weight, k + t * kv_heads * dim, kv_heads);
    });
}

// RoPE by the same angles for all rows, rounded once.
template <class T>
void rotate_alike(const T* x, const float* cosines, const float* sines, T* out, int64_t rows, int64_t dim,
                  int64_t num_threads) {
    const int64_t half = dim / 2;
    parallel_for(rows, threads_for(rows * dim, num_threads), [&](int64_t row) {
        const T* from = x + row * dim;
        T* to = out + row * dim;
        int64_t i = 0;
        for (; i + W <= half; i += W) {
            const vec first = load(from + i), second = load(from + half + i);
            const vec c = load(cosines + i), s = load(sines + i);
            store(to + i, first * c - second * s);
            store(to + half + i, second * c + first * s);
        }
        for (; i < half; i++) {
            const float first = to_float(from[i]), second = to_float(from[half + i]);
            assign(to + i, first * cosines[i] - second * sines[i]);
            assign(to + half + i, second * cosines[i] + first * sines[i]);
        }
    });
}

template <class T>
void swiglu(const T* x, T* out, int64_t tokens, int64_t width, int64_t num_threads) {
    parallel_for(tokens, threads_for(tokens * width, num_threads), [&](int64_t row) {
        const T *gate = x + row * 2 * width, *value = gate + width;
        T* to = out + row * width;
        int64_t i = 0;
        for (; i + W <= width; i += W) store(to + i, silu(load(gate + i), T()) * load(value + i));
        for (; i < width; i++) {
            float g = to_float(gate[i]);
            assign(to + i, g / (1.0f + expf(-g)) * to_float(value[i]));
        }
    });
}

// cos and sin of position * frequency, each twice over, for either half of a head.
template <class F, class T>
void rotary(const int64_t* positions, const F* frequencies, T* cosines, T* sines, int64_t tokens, int64_t half,
            float scale, int64_t num_threads) {
    parallel_for(tokens, threads_for(tokens * half * 16, num_threads), [&](int64_t t) {
        for (int64_t i = 0; i < half; i++) {
            // rounded to fp32 before its cosine, as in torch
            const float angle = (float)positions[t] * to_float(frequencies[i]);
            for (int64_t at : {2 * t * half + i, (2 * t + 1) * half + i}) {
                assign(cosines + at, (float)cos((double)angle) * scale);
                assign(sines + at, (float)sin((double)angle) * scale);
            }
        }
    });
}

template <class T>
inline void multiply(const T* a, const T* b, T* to, int64_t size) {
    int64_t i = 0;
    for (; i + W <= size; i += W) store(to + i, load(a + i) * load(b + i));
    for (; i < size; i++) assign(to + i, to_float(a[i]) * to_float(b[i]));
}

// A row of the inputs of the convolution, rounded products of two.
template <class T>
struct Product {
    const T *a, *b;
};

// out = gate * the rounded convolution of as many rows as there are taps (TAPS, if that is known).
template <int TAPS, class T>
inline void convolve(const Product<T>* rows, int64_t kernel, const float* by_tap, const T* bias, const T* gate, T* out,
                     int64_t hidden) {
    const int64_t taps = TAPS ? TAPS : kernel;
    int64_t i = 0;
    for (; i + 2 * W <= hidden; i += 2 * W) {
        vec s = bias ? load(bias + i) : vec{}, t = bias ? load(bias + i + W) : vec{};
        UNROLLED
        for (int64_t k = 0; k < taps; k++) {
            const T *a = rows[k].a + i, *b = rows[k].b + i;
            vec x = load(a) * load(b), y = load(a + W) * load(b + W);
            round_both(x, y, T());
            s += x * load(by_tap + k * hidden + i);
            t += y * load(by_tap + k * hidden + i + W);
        }
        round_both(s, t, T());
        store_two(out + i, load(gate + i) * s, load(gate + i + W) * t);
    }
    for (; i < hidden; i++) {
        float s = bias ? to_float(bias[i]) : 0.0f;
        for (int64_t k = 0; k < taps; k++) {
            float x = to_float(rows[k].a[i]) * to_float(rows[k].b[i]);
            round_to<T>(&x);
            s += x * by_tap[k * hidden + i];
        }
        round_to<T>(&s);
        assign(out + i, to_float(gate[i]) * s);
    }
}

// Products are taken anew for each tap that reads them, and the token after the next is fetched meanwhile: with
// products stored in a pass of their own 4,096 tokens of 1,024 took 2.6 ms in place of 1.9 (two cores of an Intel
// Xeon).
template <class T>
void short_conv(const T* bcx, const int64_t* taps, const T* weight, const T* bias, T* extended, T* out, T* cache,
                const int64_t* read_rows, const int64_t* write_rows, const int64_t* write_index, int64_t sequences,
                int64_t tokens, int64_t hidden, int64_t kernel, int64_t num_writes, bool whole,
                int64_t num_threads) {
    const int64_t window = kernel - 1, num_states = sequences * window;
    const ScratchArray<float> by_tap(kernel * hidden);  // weight, transposed
    const ScratchArray<T> ones(hidden);
    for (int64_t k = 0; k < kernel; k++)
        for (int64_t i = 0; i < hidden; i++) by_tap[k * hidden + i] = to_float(weight[i * kernel + k]);
    for (int64_t i = 0; i < hidden; i++) assign(ones + i, 1.0f);
    const auto input = [&](int64_t row) -> Product<T> {
        if (row < num_states) return {extended + row * hidden, ones};
        const T* b = bcx + (row - num_states) * 3 * hidden;
        return {b, b + 2 * hidden};
    };
    const auto write = [&](int64_t row, T* to) {
        const Product<T> x = input(row);
        if (x.b == ones)
            memcpy(to, x.a, hidden * sizeof(T));
        else
            multiply(x.a, x.b, to, hidden);
    };
    const int64_t threads = threads_for(tokens * hidden, num_threads);
    parallel_for(num_states, threads, [&](int64_t row) {
        const int64_t from = read_rows[row / window] * window + row % window;
        memcpy(extended + row * hidden, cache + from * hidden, hidden * sizeof(T));
    });
    // From here on the states in `extended` are read alone.
    parallel_parts(tokens, threads, [&](Range part) {
        const ScratchArray<Product<T>> rows(kernel);
        for (int64_t t = part.begin; t < part.end; t++) {
            const T* own = bcx + t * 3 * hidden;
            prefetch_lines<2>((const char*)(own + 2 * 3 * hidden), 3 * hidden * sizeof(T));
            for (int64_t k = 0; k < kernel; k++) rows[k] = input(taps[k * tokens + t]);
            const auto by_taps = kernel == 3 ? convolve<3, T> : convolve<0, T>;
            by_taps(rows, kernel, by_tap, bias, own + hidden, out + t * hidden, hidden);
            if (whole) write(num_states + t, extended + (num_states + t) * hidden);
        }
    });
    parallel_for(num_writes * window, threads, [&](int64_t j) {
        if (write_rows[j / window] >= 0)
            write(write_index[j], cache + (write_rows[j / window] * window + j % window) * hidden);
    });
}

}  // namespace

// out [rows], of so many bytes each: the table's rows whose numbers `ids` has
KERNEL(gather_rows)(const char* table, const int64_t* ids, char* out, int64_t rows, int64_t bytes,
                    int64_t num_threads) {
    parallel_for(rows, threads_for(rows * bytes, num_threads),
                 [=](int64_t i) { memcpy(out + i * bytes, table + ids[i] * bytes, bytes); });
}
REPLAYABLE(gather_rows)

// x, out [tokens, dim]; weight [dim]. With `residual` [tokens, dim], not null: total = x + residual is normed. As in
// the stock model, the normed values are rounded to the dtype before they are scaled.
KERNEL(rms_norm)(const void* x, const void* residual, const void* weight, void* total, void* out, int64_t tokens,
                 int64_t dim, int64_t is_bf16, double eps, int64_t num_threads) {
    if (is_bf16)
        rms_norm((const bf16*)x, (const bf16*)residual, (const bf16*)weight, (bf16*)total, (bf16*)out, tokens, dim, eps,
                 num_threads);
    else
        rms_norm((const float*)x, (const float*)residual, (const float*)weight, (float*)total, (float*)out, tokens, dim,
                 eps, num_threads);
}
REPLAYABLE(rms_norm)

// x [tokens, heads + kv_heads, dim], `stride` values from token to token; weights [dim]; cosines, sines [tokens, dim];
// q [tokens, heads, dim], k [tokens, kv_heads, dim]: RMS-normed per head as above, then turned by RoPE.
KERNEL(norm_rotate)(const void* x, const void* q_weight, const void* k_weight, const void* cosines, const void* sines,
                    void* q, void* k, int64_t tokens, int64_t stride, int64_t heads, int64_t kv_heads, int64_t dim,
                    int64_t is_bf16, double eps, int64_t num_threads) {
    if (is_bf16)
        norm_rotate((const bf16*)x, (const bf16*)q_weight, (const bf16*)k_weight, (const bf16*)cosines,
                    (const bf16*)sines, (bf16*)q, (bf16*)k, tokens, stride, heads, kv_heads, dim, eps, num_threads);
    else
        norm_rotate((const float*)x, (const float*)q_weight, (const float*)k_weight, (const float*)cosines,
                    (const float*)sines, (float*)q, (float*)k, tokens, stride, heads, kv_heads, dim, eps, num_threads);
}
REPLAYABLE(norm_rotate)

// x, out [rows, dim], turned by RoPE, all by the same angles; cosines, sines [dim / 2] in fp32
KERNEL(rotate_alike)(const void* x, const float* cosines, const float* sines, void* out, int64_t rows, int64_t dim,
                     int64_t is_bf16, int64_t num_threads) {
    is_bf16 ? rotate_alike((const bf16*)x, cosines, sines, (bf16*)out, rows, dim, num_threads)
            : rotate_alike((const float*)x, cosines, sines, (float*)out, rows, dim, num_threads);
}

// cosines, sines [tokens, 2 * half] of positions [tokens] times frequencies [half], both times scale
KERNEL(rotary)(const int64_t* positions, const void* frequencies, void* cosines, void* sines, int64_t tokens,
               int64_t half, int64_t bf16_frequencies, int64_t is_bf16, double scale, int64_t num_threads) {
    const float* f = (const float*)frequencies;
    const bf16* b = (const bf16*)frequencies;
    if (is_bf16)
        bf16_frequencies ? rotary(positions, b, (bf16*)cosines, (bf16*)sines, tokens, half, scale, num_threads)
                         : rotary(positions, f, (bf16*)cosines, (bf16*)sines, tokens, half, scale, num_threads);
    else
        bf16_frequencies ? rotary(positions, b, (float*)cosines, (float*)sines, tokens, half, scale, num_threads)
                         : rotary(positions, f, (float*)cosines, (float*)sines, tokens, half, scale, num_threads);
}
REPLAYABLE(rotary)

// to [tokens, dim] = a + b
KERNEL(add)(const void* a, const void* b, void* to, int64_t tokens, int64_t dim, int64_t is_bf16, int64_t num_threads) {
    parallel_for(tokens, threads_for(tokens * dim, num_threads), [=](int64_t t) {
        const int64_t i = t * dim;
        is_bf16 ? add((const bf16*)a + i, (const bf16*)b + i, (bf16*)to + i, dim)
                : add((const float*)a + i, (const float*)b + i, (float*)to + i, dim);
    });
}
REPLAYABLE(add)

// out [tokens, dim] = x, rounded
KERNEL(to_bf16)(const float* x, bf16* out, int64_t tokens, int64_t dim, int64_t num_threads) {
    parallel_for(tokens, threads_for(tokens * dim, num_threads), [=](int64_t t) {
        const float* from = x + t * dim;
        int64_t i = 0;
        for (; i + W <= dim; i += W) store(out + t * dim + i, load(from + i));
        for (; i < dim; i++) assign(out + t * dim + i, from[i]);
    });
}
REPLAYABLE(to_bf16)

// x [tokens, 2, width]: gates and values; out [tokens, width] = silu(gate) * value
KERNEL(swiglu)(const void* x, void* out, int64_t tokens, int64_t width, int64_t is_bf16, int64_t num_threads) {
    is_bf16 ? swiglu((const bf16*)x, (bf16*)out, tokens, width, num_threads)
            : swiglu((const float*)x, (float*)out, tokens, width, num_threads);
}
REPLAYABLE(swiglu)

// bcx [tokens, 3, hidden]: B, C and x; out [tokens, hidden] = C * conv(B * x). cache [any, kernel - 1, hidden]: its
// rows `read_rows` [sequences] are the states. extended [sequences * (kernel - 1) + tokens, hidden] becomes all states
// with B * x behind them, of which the latter are stored only if it is to be `whole`; taps [kernel, tokens] are rows
// of it; weight [hidden, kernel]; bias [hidden] or null. Last, the cache's rows `write_rows` [num_writes], where they
// are not below 0, get extended's rows `write_index` [num_writes, kernel - 1].
KERNEL(short_conv)(const void* bcx, const int64_t* taps, const void* weight, const void* bias, void* extended,
                   void* out, void* cache, const int64_t* read_rows, const int64_t* write_rows,
                   const int64_t* write_index, int64_t sequences, int64_t tokens, int64_t hidden, int64_t kernel,
                   int64_t num_writes, int64_t whole, int64_t is_bf16, int64_t num_threads) {
    if (is_bf16)
        short_conv((const bf16*)bcx, taps, (const bf16*)weight, (const bf16*)bias, (bf16*)extended, (bf16*)out,
                   (bf16*)cache, read_rows, write_rows, write_index, sequences, tokens, hidden, kernel, num_writes,
                   whole, num_threads);
    else
        short_conv((const float*)bcx, taps, (const float*)weight, (const float*)bias, (float*)extended, (float*)out,
                   (float*)cache, read_rows, write_rows, write_index, sequences, tokens, hidden, kernel, num_writes,
                   whole, num_threads);
}
REPLAYABLE(short_conv)
