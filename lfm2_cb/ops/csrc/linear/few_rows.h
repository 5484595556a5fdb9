// x @ weight.T (+ bias) for few rows of x: the weights are read once, from where they are, at the memory's speed.
//
// A thread takes up to TASK outputs, a few at a time for all rows. Rows are taken in tiles, each loaded weight being
// used for the whole tile; the next tile finds the weights in the first cache. The code between two tiles is short and
// has no branches, because the processor prefetches no weights during it.
#pragma once

#include "core/epilogue.h"
#include "core/scratch.h"
#include "core/threads.h"

namespace {
namespace few_rows {

constexpr int MOST = 6;            // rows of a tile
constexpr int64_t PASS = 2 * MOST; // rows that pass over the weights together, in one tile or two
constexpr int64_t TASK = 256;      // most outputs of a task: the longer the runs, the better they are foreseen
// Bytes of prefetch along each run of weights. (Measured with AVX-512 on one core of a Xeon, bf16: 2 KB are 7 to 13 %
// quicker than 512 bytes for up to 5 rows; with AVX2, on another machine, 512 were the best.)
constexpr int64_t AHEAD = W == 16 ? 2048 : 512;

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

// acc += a * b, as written: compilers load the inputs once for each output, and the loads are then what is waited for.
inline void multiply_add(vec& acc, vec a, vec b) {
#if defined(__FMA__)
    asm("vfmadd231ps %1, %2, %0" : "+v"(acc) : "v"(a), "v"(b));
#else
    acc += a * b;
#endif
}

template <class T>
int64_t whole_blocks(int64_t in) {
    return in / BLOCK<T> * BLOCK<T>;
}

// Values from one ordered row to the next: rows that are a power of 2 apart would fight for the first cache.
inline int64_t stride_of(int64_t in) { return (in + 31) / 16 * 16; }

// One row of inputs in that order, with zeros to the end of the last block.
template <class T>
void order_inputs(const T* x, int64_t in, float* to) {
    const int64_t whole = whole_blocks<T>(in);
    T rest[BLOCK<T>] = {};
    memcpy(rest, x + whole, (in - whole) * sizeof(T));
    for (int64_t k = 0; k < in; k += BLOCK<T>)
        for (int p = 0; p < PARTS<T>; p++) store(to + k + p * W, load_part(k < whole ? x + k : rest, p));
}

template <class T, class Epilogue>
struct Linear {
    const float* x;  // [rows, stride], ordered
    const T* w;
    int64_t rows, in, outputs, stride;
    Epilogue epilogue;
};

// Sums of `rows` rows from `row` on, and of the outputs `output`, `output + apart`, ...: to sums[row][0, apart, ...].
template <int rows, int outputs, class T, class Epilogue>
inline void tile(const Linear<T, Epilogue>& l, int64_t row, int64_t output, int64_t apart,
                 float* sums) {
    // Few sums would wait for each other: then the parts of a block have their own.
    constexpr int PART_SUMS = rows * outputs * PARTS<T> <= 8 ? PARTS<T> : 1;
    const float* x = l.x + row * l.stride;
    const T* w = l.w + output * l.in;
    const int64_t whole = whole_blocks<T>(l.in);
    int64_t run = apart * l.in;
    T rest[outputs * BLOCK<T>];  // what fills no block, and zeros
    if (whole < l.in) {
        memset(rest, 0, sizeof rest);
        for (int o = 0; o < outputs; o++) memcpy(rest + o * BLOCK<T>, w + o * run + whole, (l.in - whole) * sizeof(T));
    }
    vec acc[PART_SUMS][rows * outputs] = {};
    for (int64_t k = 0, end = whole; k < l.in; end = l.in, w = rest - whole, run = BLOCK<T>)
        for (; k < end; k += BLOCK<T>) {
            UNROLLED for (int o = 0; o < outputs; o++) __builtin_prefetch((const char*)(w + o * run + k) + AHEAD);
            UNROLLED for (int p = 0; p < PARTS<T>; p++) {
                vec weights[outputs];
                UNROLLED for (int o = 0; o < outputs; o++) weights[o] = load_part(w + o * run + k, p);
                UNROLLED for (int r = 0; r < rows; r++) {
                    const vec input = load(x + r * l.stride + k + p * W);
                    UNROLLED for (int o = 0; o < outputs; o++)
                        multiply_add(acc[p % PART_SUMS][r * outputs + o], weights[o], input);
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
    float sums[PASS][TASK];
    const int64_t apart = (end - begin) / most;
    for (int64_t i = 0; i < apart; i++) all_rows<rows, most>(l, row, count, begin + i, apart, sums[0] + i);
    for (int64_t o = begin + apart * most; o < end; o++) all_rows<rows, 1>(l, row, count, o, 0, sums[0] + o - begin);
    for (int64_t r = 0; r < count; r++) l.epilogue(row + r, begin, sums[r], end - begin);
}

// What the registers hold the sums of.
constexpr int runs_beside(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 3 : 2; }

template <class T, class Epilogue>
void outputs_of(const Linear<T, Epilogue>& l, int64_t begin, int64_t end) {
    for (int64_t row = 0; row < l.rows; row += PASS) {
        const int64_t count = min(l.rows - row, PASS);
        with_constant<MOST>(count <= MOST ? count : ceil_div(count, 2), [&](auto rows) {  // 7 rows are 4 + 3
            constexpr int n = decltype(rows)::value;
            all_outputs<n, runs_beside(n)>(l, row, count, begin, end);
        });
    }
}

template <class T>
void linear(const T* x, const T* w, const AddBias<T>& epilogue, int64_t rows, int64_t in, int64_t threads) {
    const int64_t outputs = epilogue.outputs;
    const int64_t stride = stride_of(in);
    const ScratchArray<float> ordered(rows * stride);
    for (int64_t r = 0; r < rows; r++) order_inputs(x + r * in, in, ordered + r * stride);
    const Linear<T, AddBias<T>> l = {ordered, w, rows, in, outputs, stride, epilogue};
    const int64_t share = even_share(outputs, threads, TASK);
    parallel_for(ceil_div(outputs, share), threads, [&](int64_t i) {
        outputs_of(l, i * share, min((i + 1) * share, outputs));
    });
}

}  // namespace few_rows
}  // namespace
