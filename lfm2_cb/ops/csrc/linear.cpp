// x @ weight.T (+ bias) for few rows of x: the weights are read once, from where they are, at the memory's speed.
//
// A thread takes TASK outputs, a few at a time for all rows. Rows are taken in tiles, each loaded weight being used for
// the whole tile; the next tile finds the weights in the first cache.
#include "simd.h"

namespace {

constexpr int MOST = 6;        // rows of a tile
constexpr int64_t TASK = 48;   // outputs of a task: a multiple of what a tile may have
constexpr int64_t AHEAD = 512; // bytes of prefetch along each run of weights

// A block of weights is one load: W fp32 in their order, or 2 * W bf16, of which the even ones come first, then the
// odd ones, as taking them apart so costs one operation a vector. The inputs are put into the same order, once.
template <class T>
constexpr int PARTS = sizeof(T) == 4 ? 1 : 2;
template <class T>
constexpr int BLOCK = W * PARTS<T>;

inline vec load_part(const float* block, int) { return load(block); }
inline vec load_part(const bf16* block, int part) {
    uvec pairs;
    memcpy(&pairs, block, sizeof pairs);
    return (vec)(part ? pairs & 0xffff0000 : pairs << 16);
}

// One row of inputs in that order; the rest, which fills no block, stays as it is.
template <class T>
void order_inputs(const T* x, int64_t in, float* to) {
    int64_t k = 0;
    for (; k + BLOCK<T> <= in; k += BLOCK<T>)
        for (int p = 0; p < PARTS<T>; p++) store(to + k + p * W, load_part(x + k, p));
    for (; k < in; k++) to[k] = to_float(x[k]);
}

template <class T>
struct Linear {
    const float* x;  // [rows, stride], ordered
    const T *w, *bias;
    T* out;
    int64_t rows, in, outputs, stride;
};

// Sums of `rows` rows from `row` on, and of the outputs `output`, `output + apart`, ...
template <int rows, int outputs, class T>
inline void tile(const Linear<T>& l, int64_t row, int64_t output, int64_t apart) {
    // Few sums would wait for each other: then the parts of a block have their own.
    constexpr int PART_SUMS = rows * outputs * PARTS<T> <= 8 ? PARTS<T> : 1;
    vec sums[rows][outputs][PART_SUMS] = {};
    const float* x = l.x + row * l.stride;
    const T* w = l.w + output * l.in;
    int64_t k = 0;
    for (; k + BLOCK<T> <= l.in; k += BLOCK<T>) {
        for (int o = 0; o < outputs; o++) __builtin_prefetch((const char*)(w + o * apart * l.in + k) + AHEAD);
        for (int p = 0; p < PARTS<T>; p++) {
            vec weights[outputs];
            for (int o = 0; o < outputs; o++) weights[o] = load_part(w + o * apart * l.in + k, p);
            for (int r = 0; r < rows; r++) {
                const vec input = load(x + r * l.stride + k + p * W);
                for (int o = 0; o < outputs; o++) sums[r][o][p % PART_SUMS] += input * weights[o];
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < outputs; o++) {
            vec whole = sums[r][o][0];
            if constexpr (PART_SUMS == 2) whole += sums[r][o][1];
            const int64_t to = output + o * apart;
            float s = sum(whole);
            for (int64_t rest = k; rest < l.in; rest++)
                s += x[r * l.stride + rest] * to_float(w[o * apart * l.in + rest]);
            assign(l.out + (row + r) * l.outputs + to, s + (l.bias ? to_float(l.bias[to]) : 0.0f));
        }
}

// The tile's outputs for all rows from `row` on, `rows` at a time and then what is left.
template <int rows, int outputs, class T>
inline void all_rows(const Linear<T>& l, int64_t row, int64_t output, int64_t apart) {
    for (; row + rows <= l.rows; row += rows) tile<rows, outputs>(l, row, output, apart);
    if constexpr (rows > 1)
        if (row < l.rows) all_rows<rows - 1, outputs>(l, row, output, apart);
}

// Outputs begin ... end as `most` runs side by side, so that each is read on and on, as the processor foresees.
template <int rows, int most, class T>
inline void all_outputs(const Linear<T>& l, int64_t begin, int64_t end) {
    const int64_t apart = (end - begin) / most;
    for (int64_t i = 0; i < apart; i++) all_rows<rows, most>(l, 0, begin + i, apart);
    for (int64_t o = begin + apart * most; o < end; o++) all_rows<rows, 1>(l, 0, o, 0);
}

template <class T>
void outputs_of(const Linear<T>& l, int64_t begin, int64_t end) {
    const int64_t tiles = (l.rows + MOST - 1) / MOST;
    switch ((l.rows + tiles - 1) / tiles) {  // 7 rows are 4 + 3 rather than 6 + 1; sums are what the registers hold
        case 1: all_outputs<1, 4>(l, begin, end); break;
        case 2: all_outputs<2, 4>(l, begin, end); break;
        case 3: all_outputs<3, 3>(l, begin, end); break;
        case 4: all_outputs<4, 3>(l, begin, end); break;
        case 5: all_outputs<5, 2>(l, begin, end); break;
        default: all_outputs<6, 2>(l, begin, end);
    }
}

template <class T>
void linear(const T* x, const T* w, const T* bias, T* out, int64_t rows, int64_t in, int64_t outputs, int64_t threads) {
    const int64_t stride = (in + 31) / 16 * 16;  // rows that are a power of 2 apart would fight for the first cache
    float* ordered = (float*)aligned_alloc(64, rows * stride * sizeof(float));
    for (int64_t r = 0; r < rows; r++) order_inputs(x + r * in, in, ordered + r * stride);
    const Linear<T> l = {ordered, w, bias, out, rows, in, outputs, stride};
    const int64_t tasks = (outputs + TASK - 1) / TASK;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t t = 0; t < tasks; t++)
        outputs_of(l, t * TASK, (t + 1) * TASK < outputs ? (t + 1) * TASK : outputs);
    free(ordered);
}

}  // namespace

// x [rows, in], w [outputs, in], bias [outputs] or null, out [rows, outputs], all in one dtype; sums are in fp32
KERNEL(few_rows_linear_f32)(const float* x, const float* w, const float* bias, float* out, int64_t rows, int64_t in,
                            int64_t outputs, int64_t threads) {
    linear(x, w, bias, out, rows, in, outputs, threads);
}
REPLAYABLE(few_rows_linear_f32)

KERNEL(few_rows_linear_bf16)(const bf16* x, const bf16* w, const bf16* bias, bf16* out, int64_t rows, int64_t in,
                             int64_t outputs, int64_t threads) {
    linear(x, w, bias, out, rows, in, outputs, threads);
}
REPLAYABLE(few_rows_linear_bf16)
