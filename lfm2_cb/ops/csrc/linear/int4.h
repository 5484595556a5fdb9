// x @ W.T for weights of 4 bits, a scale for 32 (ops/linear/int4.py has the layout and the torch reference).
//
// The arithmetic is the same on every processor. Each row of x is rounded to 15 bits in chunks of 1024 inputs, finer
// than the weights by far, and a group's products are summed in 32-bit integers. So a row's result depends neither on
// the rows beside it nor on the instruction set.
//
// A thread takes PANEL outputs of a block of rows. A tile of a few rows stays in the first-level cache while a chunk
// of the panel's weights passes by, one or two outputs at a time, whose sums are in registers; the panel comes from
// the second-level cache for the next tiles, and the weights that come next are prefetched meanwhile.
#pragma once

#include "core/epilogue.h"
#include "core/prefetch.h"
#include "core/rounding.h"
#include "core/threads.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {
namespace int4 {

constexpr int64_t CHUNK = 1024;    // inputs that are rounded together
constexpr float LIMIT = 16383.0f;  // of a rounded input
constexpr int64_t GROUP = 32, MAX_GROUPS = CHUNK / GROUP;
constexpr int64_t CHUNK_BYTES = CHUNK / 2;
constexpr int64_t PANEL = 32;      // outputs: 16 KB of weights a chunk
constexpr int ROWS = 4;            // of a tile: what the registers of AVX2 hold
constexpr int64_t ROW_BLOCK = 96;  // rows: 192 KB of inputs a chunk, for the second-level cache

constexpr int fours(int n) { return (n + 3) / 4 * 4; }

// 64 weights of 4 bits are 16 words of 16 bits, whose four parts are the weights of four vectors; two vectors are a
// group. A group's products with its inputs come in eight sums: the same eight everywhere, as they are weighed and
// summed on in fp32.
typedef int16_t Words __attribute__((vector_size(32)));
typedef int32_t ivec8 __attribute__((vector_size(32)));
typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));
inline Words load_words(const void* p) {
    Words words;
    memcpy(&words, p, sizeof words);
    return words;
}
template <int PART>
inline Words part(Words words) {
    return words << (12 - 4 * PART) >> 12;
}
// Two values each are taken apart as vectors: one by one takes long to compile.
inline ivec8 multiply_pairs(Words w, Words x) {
    const ivec8 ws = (ivec8)w, xs = (ivec8)x;
    return (ws << 16 >> 16) * (xs << 16 >> 16) + (ws >> 16) * (xs >> 16);
}
inline ivec8 dot_group(Words first, Words second, const int16_t* x) {
#if defined(__AVX2__)
    __m256i sums = _mm256_madd_epi16((__m256i)first, (__m256i)load_words(x));
    return (ivec8)sums + (ivec8)_mm256_madd_epi16((__m256i)second, (__m256i)load_words(x + 16));
#else
    return multiply_pairs(first, load_words(x)) + multiply_pairs(second, load_words(x + 16));
#endif
}
inline void add_group(vec8& acc, Words first, Words second, const int16_t* x, float scale) {
    acc += __builtin_convertvector(dot_group(first, second, x), vec8) * scale;
}
inline vec4 fold(vec8 v) { return vec4{v[0], v[1], v[2], v[3]} + vec4{v[4], v[5], v[6], v[7]}; }

// Lane i: the sum of v[i]'s lanes, (0 + 1) + (2 + 3) for every instruction set.
inline vec4 sum_each4(const vec4* v) {
#if defined(__AVX2__)
    __m128 low = _mm_hadd_ps((__m128)v[0], (__m128)v[1]), high = _mm_hadd_ps((__m128)v[2], (__m128)v[3]);
    return (vec4)_mm_hadd_ps(low, high);
#else
    vec4 sums;
    for (int i = 0; i < 4; i++) sums[i] = (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
    return sums;
#endif
}

// The products of a chunk's inputs x [TILE_ROWS][CHUNK] and one or two outputs' weights, into rows of PANEL.
template <int TILE_ROWS, int OUTS>
inline void multiply(const int16_t* x, const char* weights, int64_t stride, int64_t length, const float* group_scales,
                     float* sums) {
    const int64_t groups = ceil_div(length, 2 * GROUP) * 2;
    vec8 acc[OUTS][TILE_ROWS] = {};
    for (int64_t g = 0; g < groups; g += 2)
        UNROLLED for (int o = 0; o < OUTS; o++) {
            const Words words = load_words(weights + o * stride + g * GROUP / 2);
            const float* scales = group_scales + o * MAX_GROUPS + g;
            UNROLLED for (int r = 0; r < TILE_ROWS; r++) {
                const int16_t* inputs = x + r * CHUNK + g * GROUP;
                add_group(acc[o][r], part<0>(words), part<1>(words), inputs, scales[0]);
                add_group(acc[o][r], part<2>(words), part<3>(words), inputs + GROUP, scales[1]);
            }
        }
    constexpr int COUNT = fours(TILE_ROWS * OUTS);
    vec4 folded[COUNT] = {};
    UNROLLED for (int r = 0; r < TILE_ROWS; r++)
        UNROLLED for (int o = 0; o < OUTS; o++) folded[r * OUTS + o] = fold(acc[o][r]);
    float totals[COUNT];
    for (int i = 0; i < COUNT; i += 4) {
        const vec4 four = sum_each4(folded + i);
        memcpy(totals + i, &four, sizeof four);
    }
    for (int r = 0; r < TILE_ROWS; r++) memcpy(sums + r * PANEL, totals + r * OUTS, OUTS * sizeof(float));
}

struct Problem {
    const char* weights;        // [outputs][stride bytes]
    const bf16* group_scales;   // [outputs][groups]
    int16_t* inputs;            // [chunks][rows][CHUNK]
    float* input_scales;        // [chunks][rows]
    int64_t rows, width, outputs, chunks, groups, stride;

    int64_t length(int64_t chunk) const { return min(width - chunk * CHUNK, CHUNK); }

    // A chunk of the row `from`, into the inputs.
    template <class T>
    void round(int64_t chunk, int64_t row, const T* from) const {
        const int64_t i = chunk * rows + row;
        input_scales[i] = round_inputs(from + chunk * CHUNK, length(chunk), CHUNK, LIMIT, 0, inputs + i * CHUNK);
    }
};

// Weights to prefetch: `bytes` of each of a panel's outputs. The processor does not prefetch such short runs itself,
// and would wait for each.
struct NextWeights {
    const char* weights;
    int64_t bytes;

    void prefetch(int64_t stride, int64_t output) const { prefetch_lines(weights + output * stride, bytes); }
};

// The sums of TILE_ROWS rows and a panel's outputs over a chunk: [TILE_ROWS][PANEL].
template <int TILE_ROWS, int OUTS>
void multiply_panel(const Problem& p, const int16_t* x, const char* weights, int64_t outputs, int64_t length,
                    const float* group_scales, NextWeights next, float* sums) {
    int64_t o = 0;
    for (; o + OUTS <= outputs; o += OUTS) {
        for (int64_t j = 0; j < OUTS; j++) next.prefetch(p.stride, o + j);
        multiply<TILE_ROWS, OUTS>(x, weights + o * p.stride, p.stride, length, group_scales + o * MAX_GROUPS, sums + o);
    }
    if (o < outputs)
        multiply<TILE_ROWS, 1>(x, weights + o * p.stride, p.stride, length, group_scales + o * MAX_GROUPS, sums + o);
}

// out[row ... row + rows][output ... output + outputs], of at most ROW_BLOCK rows and PANEL outputs.
template <class Epilogue>
void compute_block(const Problem& p, const Epilogue& epilogue, int64_t row, int64_t rows, int64_t output,
                   int64_t outputs) {
    float acc[ROW_BLOCK][PANEL], group_scales[PANEL][MAX_GROUPS];
    memset(acc, 0, rows * sizeof acc[0]);

    const int64_t tiles = ceil_div(rows, ROWS);
    for (int64_t chunk = 0; chunk < p.chunks; chunk++) {
        const char* weights = p.weights + output * p.stride + chunk * CHUNK_BYTES;
        for (int64_t o = 0; o < outputs; o++) {
            const bf16* from = p.group_scales + (output + o) * p.groups + chunk * MAX_GROUPS;
            for (int64_t g = 0; g < min(p.groups - chunk * MAX_GROUPS, MAX_GROUPS); g++)
                group_scales[o][g] = to_float(from[g]);
        }
        // A single tile prefetches weights a few outputs ahead; of many, each its part of the next chunk or panel.
        NextWeights next = {weights + 2 * p.stride, min(CHUNK_BYTES, p.stride - chunk * CHUNK_BYTES)};
        if (tiles > 1) {
            const bool last = chunk + 1 == p.chunks;
            const int64_t begin = last ? 0 : (chunk + 1) * CHUNK_BYTES;
            const int64_t lines = ceil_div(min(CHUNK_BYTES, p.stride - begin), LINE);
            next = {p.weights + (output + (last ? PANEL : 0)) * p.stride + begin, ceil_div(lines, tiles) * LINE};
        }
        for_each_tile({0, rows}, ROWS, [&](int64_t done, int64_t tile_rows) {
            const int64_t i = chunk * p.rows + row + done;
            const int16_t* x = p.inputs + i * CHUNK;
            float sums[ROWS][PANEL];
            // Memory is read fastest one output after another; two at a time take fewer loads of x.
            with_constant<ROWS>(tile_rows, [&](auto count) {
                constexpr int n = decltype(count)::value;
                auto multiply = tiles == 1 ? multiply_panel<n, 1> : multiply_panel<n, 2>;
                multiply(p, x, weights, outputs, p.length(chunk), group_scales[0], next, sums[0]);
            });
            for (int64_t r = 0; r < tile_rows; r++)
                for (int64_t o = 0; o < PANEL; o += W)
                    store(acc[done + r] + o, load(acc[done + r] + o) + load(sums[r] + o) * p.input_scales[i + r]);
            next.weights += next.bytes;
        });
    }
    for (int64_t r = 0; r < rows; r++) epilogue(row + r, output, acc[r], outputs);
}

template <class T>
void linear(Problem p, const void* x, const void* bias, const void* residual, void* out, int16_t* inputs,
            float* input_scales, int64_t threads) {
    p.inputs = inputs;
    p.input_scales = input_scales;
    p.chunks = ceil_div(p.width, CHUNK);
    const int64_t panels = ceil_div(p.outputs, PANEL), blocks = ceil_div(p.rows, ROW_BLOCK);
    parallel_for(p.chunks * p.rows, worthwhile_threads(p.rows * p.width, ROUNDED, threads), [&](int64_t i) {
        const int64_t row = i % p.rows;
        p.round(i / p.rows, row, (const T*)x + row * p.width);
    });
    const AddBias<T> epilogue = {(T*)out, (const T*)bias, p.outputs, (const T*)residual};
    parallel_for(blocks * panels, threads, [&](int64_t i) {
        const int64_t row = i / panels * ROW_BLOCK, output = i % panels * PANEL;
        compute_block(p, epilogue, row, min(p.rows - row, ROW_BLOCK), output,
                      min(p.outputs - output, PANEL));
    });
}

}  // namespace int4
}  // namespace
