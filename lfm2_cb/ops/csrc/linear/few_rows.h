// x @ weight.T (+ bias) for few rows of x: the weights are read once, from where they are, at the memory's speed.
//
// A thread takes up to TASK outputs, a few at a time for all rows. Rows are taken in tiles, each loaded weight being
// used for the whole tile; the next tile finds the weights in the first cache. The code between two tiles is short and
// has no branches, because the processor prefetches no weights during it.
#pragma once

#if defined(ZEN4)
#include "arch/lanes.h"
#endif
#include "core/epilogue.h"
#include "core/scratch.h"
#include "core/threads.h"

namespace {
namespace few_rows {

constexpr int64_t TASK = 256;      // most outputs of a task: the longer the runs, the better they are foreseen
// Bytes of prefetch along each run of weights. (Measured with AVX-512 on one core of a Xeon, bf16: 2 KB are 7 to 13 %
// quicker than 512 bytes for up to 5 rows; with AVX2, on another machine, 512 were the best.)
constexpr int64_t AHEAD = W == 16 ? 2048 : 512;

// A block of weights is one load: W fp32 in their order, or 2 * W bf16, of which the even ones come first, then the
// odd ones, as taking them apart so costs one operation a vector. The inputs are put into the same order, once.
template <class T>
struct Widened {
    using Input = float;
    using Lanes = vec;
    static constexpr int PARTS = sizeof(T) == 4 ? 1 : 2, BLOCK = W * PARTS;
    static constexpr int MOST = 6;  // rows of a tile

    static vec part(const float* block, int) { return load(block); }
    static vec part(const bf16* block, int part) {
        uvec pairs;
        memcpy(&pairs, block, sizeof pairs);
        return (vec)(part ? pairs & 0xffff0000 : pairs << 16);
    }
    static vec input(const float* from) { return load(from); }
    static void order(const T* block, float* to) {
        for (int p = 0; p < PARTS; p++) store(to + p * W, part(block, p));
    }
    // acc += a * b, as written: compilers load the inputs once for each output, and the loads are then what is waited
    // for.
    static void multiply_add(vec& acc, vec a, vec b) {
#if defined(__FMA__)
        asm("vfmadd231ps %1, %2, %0" : "+v"(acc) : "v"(a), "v"(b));
#else
        acc += a * b;
#endif
    }
};

#if defined(ZEN4)
// Pairs of bf16 are multiplied as they are: a third of the operations. What is subnormal counts as 0. (Two cores
// of an AMD EPYC, Zen 5, the linears of eight layers of a 350M model, ms, so and widened: 1 row 5.9 and 6.0, 6 rows
// 6.7 and 8.4, 8 rows 7.5 and 9.4, 12 rows 9.1 and 13.9.)
struct Pairs {
    using Input = bf16;
    using Lanes = pairs;
    static constexpr int PARTS = 1, BLOCK = 2 * W;
    static constexpr int MOST = 8;

    static pairs part(const bf16* block, int) { return load_pairs(block); }
    static pairs input(const bf16* from) { return load_pairs(from); }
    static void order(const bf16* block, bf16* to) { store_pairs(to, load_pairs(block)); }
    static void multiply_add(vec& acc, pairs a, pairs b) { acc = dot_bf16(acc, a, b); }
};
template <class T>
using Format = std::conditional_t<sizeof(T) == 2, Pairs, Widened<T>>;
#else
template <class T>
using Format = Widened<T>;
#endif
template <class T>
using Input = typename Format<T>::Input;
template <class T>
constexpr int64_t PASS = 2 * Format<T>::MOST;  // rows that pass over the weights together, in one tile or two

template <class T>
int64_t whole_blocks(int64_t in) {
    return in / Format<T>::BLOCK * Format<T>::BLOCK;
}

// Values from one ordered row to the next, whole lines: rows that are a power of 2 apart would fight for the first
// cache.
template <class T>
int64_t stride_of(int64_t in) {
    constexpr int64_t LINE_VALUES = 64 / sizeof(Input<T>);
    return (in + 2 * LINE_VALUES - 1) / LINE_VALUES * LINE_VALUES;
}

// One row of inputs in the order of a block's, with zeros to the end of the last block.
template <class T>
void order_inputs(const T* x, int64_t in, Input<T>* to) {
    constexpr int BLOCK = Format<T>::BLOCK;
    const int64_t whole = whole_blocks<T>(in);
    T rest[BLOCK] = {};
    memcpy(rest, x + whole, (in - whole) * sizeof(T));
    for (int64_t k = 0; k < in; k += BLOCK) Format<T>::order(k < whole ? x + k : rest, to + k);
}

template <class T, class Epilogue>
struct Linear {
    const Input<T>* x;  // [rows, stride], ordered
    const T* w;
    int64_t rows, in, outputs, stride;
    Epilogue epilogue;
};

// Sums of `rows` rows from `row` on, and of the outputs `output`, `output + apart`, ...: to sums[row][0, apart, ...].
template <int rows, int outputs, class T, class Epilogue>
inline void tile(const Linear<T, Epilogue>& l, int64_t row, int64_t output, int64_t apart,
                 float* sums) {
    using F = Format<T>;
    // Few sums would wait for each other: then the parts of a block have their own.
    constexpr int PART_SUMS = rows * outputs * F::PARTS <= 8 ? F::PARTS : 1;
    const Input<T>* x = l.x + row * l.stride;
    const T* w = l.w + output * l.in;
    const int64_t whole = whole_blocks<T>(l.in);
    int64_t run = apart * l.in;
    T rest[outputs * F::BLOCK];  // what fills no block, and zeros
    if (whole < l.in) {
        memset(rest, 0, sizeof rest);
        for (int o = 0; o < outputs; o++) memcpy(rest + o * F::BLOCK, w + o * run + whole, (l.in - whole) * sizeof(T));
    }
    vec acc[PART_SUMS][rows * outputs] = {};
    for (int64_t k = 0, end = whole; k < l.in; end = l.in, w = rest - whole, run = F::BLOCK)
        for (; k < end; k += F::BLOCK) {
            UNROLLED for (int o = 0; o < outputs; o++) __builtin_prefetch((const char*)(w + o * run + k) + AHEAD);
            UNROLLED for (int p = 0; p < F::PARTS; p++) {
                typename F::Lanes weights[outputs];
                UNROLLED for (int o = 0; o < outputs; o++) weights[o] = F::part(w + o * run + k, p);
                UNROLLED for (int r = 0; r < rows; r++) {
                    const typename F::Lanes input = F::input(x + r * l.stride + k + p * W);
                    UNROLLED for (int o = 0; o < outputs; o++)
                        F::multiply_add(acc[p % PART_SUMS][r * outputs + o], weights[o], input);
                }
            }
        }
    constexpr int count = (rows * outputs + W - 1) / W * W;
    vec all[count] = {};
    float totals[count];
    UNROLLED for (int i = 0; i < rows * outputs; i++)
        all[i] = PART_SUMS == 2 ? acc[0][i] + acc[PART_SUMS - 1][i] : acc[0][i];
    for (int i = 0; i < count; i += W) store(totals + i, sum_each(all + i));
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int o = 0; o < outputs; o++) sums[r * TASK + o * apart] = totals[r * outputs + o];
}

// The same for `count` rows: `rows` of them, and the others, as many or one fewer, where there are any.
template <int rows, int outputs, class T, class Epilogue>
inline void all_rows(const Linear<T, Epilogue>& l, int64_t row, int64_t count, int64_t output,
                     int64_t apart, float* sums) {
    tile<rows, outputs>(l, row, output, apart, sums);
    if (count == 2 * rows) tile<rows, outputs>(l, row + rows, output, apart, sums + rows * TASK);
    if constexpr (rows > 1)
        if (count == 2 * rows - 1)
            tile<rows - 1, outputs>(l, row + rows, output, apart, sums + rows * TASK);
}

// Outputs begin ... end as `most` runs side by side, so that each is read on and on, as the processor foresees.
template <int rows, int most, class T, class Epilogue>
void all_outputs(const Linear<T, Epilogue>& l, int64_t row, int64_t count, int64_t begin, int64_t end) {
    float sums[PASS<T>][TASK];
    const int64_t apart = (end - begin) / most;
    for (int64_t i = 0; i < apart; i++) all_rows<rows, most>(l, row, count, begin + i, apart, sums[0] + i);
    for (int64_t o = begin + apart * most; o < end; o++) all_rows<rows, 1>(l, row, count, o, 0, sums[0] + o - begin);
    for (int64_t r = 0; r < count; r++) l.epilogue(row + r, begin, sums[r], end - begin);
}

// What the registers hold the sums of.
constexpr int runs_beside(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 3 : 2; }

template <class T, class Epilogue>
void outputs_of(const Linear<T, Epilogue>& l, int64_t begin, int64_t end) {
    for (int64_t row = 0; row < l.rows; row += PASS<T>) {
        const int64_t count = min(l.rows - row, PASS<T>);
        with_constant<Format<T>::MOST>(count <= Format<T>::MOST ? count : ceil_div(count, 2), [&](auto rows) {  // 7 rows are 4 + 3
            constexpr int n = decltype(rows)::value;
            all_outputs<n, runs_beside(n)>(l, row, count, begin, end);
        });
    }
}

template <class T>
void linear(const T* x, const T* w, const AddBias<T>& epilogue, int64_t rows, int64_t in, int64_t threads) {
    const int64_t outputs = epilogue.outputs;
    const int64_t stride = stride_of<T>(in);
    const ScratchArray<Input<T>> ordered(rows * stride);
    for (int64_t r = 0; r < rows; r++) order_inputs(x + r * in, in, ordered + r * stride);
    const Linear<T, AddBias<T>> l = {ordered, w, rows, in, outputs, stride, epilogue};
    const int64_t share = even_share(outputs, threads, TASK);
    parallel_for(ceil_div(outputs, share), threads, [&](int64_t i) {
        outputs_of(l, i * share, min((i + 1) * share, outputs));
    });
}

}  // namespace few_rows
}  // namespace
