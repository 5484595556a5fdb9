// x @ W.T for weights of 4 bits, a scale for 32 (ops/int4.py has the layout and the torch reference).
//
// The arithmetic is the same on every processor. Each row of x is rounded to 15 bits in chunks of 1024 inputs, finer
// than the weights by far, and a group's products are summed in 32-bit integers. So a row's result depends neither on
// the rows beside it nor on the instruction set.
//
// A thread takes PANEL outputs of a block of rows. A tile of a few rows stays in the first-level cache while a chunk of
// the panel's weights passes by, one or two outputs at a time, whose sums are in registers; the panel comes from the
// second-level cache for the next tiles, and the weights that come next are asked for meanwhile.
#include "rounding.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t CHUNK = 1024;    // inputs that are rounded together
constexpr float LIMIT = 16383.0f;  // of a rounded input
constexpr int64_t GROUP = 32, MAX_GROUPS = CHUNK / GROUP;
constexpr int64_t CHUNK_BYTES = CHUNK / 2;
constexpr int64_t PANEL = 32;      // outputs: 16 KB of weights a chunk
constexpr int ROWS = 4;            // of a tile: what the registers of AVX2 hold
constexpr int64_t ROW_BLOCK = 96;  // rows: 192 KB of inputs a chunk, for the second-level cache

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Loops marked so are unrolled whole, so that their arrays are registers.
#define UNROLLED _Pragma("GCC unroll 16")

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
    const int64_t groups = (length + 2 * GROUP - 1) / (2 * GROUP) * 2;
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
    const int16_t* inputs;      // [chunks][rows][CHUNK]
    const float* input_scales;  // [chunks][rows]
    int64_t rows, width, outputs, chunks, groups, stride;

    int64_t length(int64_t chunk) const { return smaller(width - chunk * CHUNK, CHUNK); }
};

// Weights to ask for: `bytes` of each of a panel's outputs. The processor does not see such short runs coming, and
// would wait for each. Asking beyond the end does no harm.
struct Ahead {
    const char* weights;
    int64_t bytes;

    void ask(int64_t stride, int64_t output) const {
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(weights + output * stride + i);
    }
};

// The sums of TILE_ROWS rows and a panel's outputs over a chunk: [TILE_ROWS][PANEL].
template <int TILE_ROWS, int OUTS>
void multiply_panel(const Problem& p, const int16_t* x, const char* weights, int64_t outputs, int64_t length,
                    const float* group_scales, Ahead ahead, float* sums) {
    int64_t o = 0;
    for (; o + OUTS <= outputs; o += OUTS) {
        for (int64_t j = 0; j < OUTS; j++) ahead.ask(p.stride, o + j);
        multiply<TILE_ROWS, OUTS>(x, weights + o * p.stride, p.stride, length, group_scales + o * MAX_GROUPS, sums + o);
    }
    if (o < outputs)
        multiply<TILE_ROWS, 1>(x, weights + o * p.stride, p.stride, length, group_scales + o * MAX_GROUPS, sums + o);
}

template <int OUTS>
void multiply_rows(int64_t rows, const Problem& p, const int16_t* x, const char* weights, int64_t outputs,
                   int64_t length, const float* scales, Ahead ahead, float* sums) {
    switch (rows) {
        case 1: return multiply_panel<1, OUTS>(p, x, weights, outputs, length, scales, ahead, sums);
        case 2: return multiply_panel<2, OUTS>(p, x, weights, outputs, length, scales, ahead, sums);
        case 3: return multiply_panel<3, OUTS>(p, x, weights, outputs, length, scales, ahead, sums);
        case 4: return multiply_panel<4, OUTS>(p, x, weights, outputs, length, scales, ahead, sums);
    }
}

// out = acc [rows][PANEL] + bias, where there is one, for `outputs` from `output` on.
template <class T>
void store_block(const float (*acc)[PANEL], const T* bias, T* out, int64_t stride, int64_t rows, int64_t output,
                 int64_t outputs) {
    float addends[PANEL] = {};
    for (int64_t o = 0; bias && o < outputs; o++) addends[o] = to_float(bias[output + o]);
    for (int64_t r = 0; r < rows; r++) {
        T* to = out + r * stride + output;
        int64_t o = 0;
        for (; o + W <= outputs; o += W) store(to + o, load(acc[r] + o) + load(addends + o));
        for (; o < outputs; o++) assign(to + o, acc[r][o] + addends[o]);
    }
}

// out[row ... row + rows][output ... output + outputs], of at most ROW_BLOCK rows and PANEL outputs.
template <class T>
void compute_block(const Problem& p, const T* bias, T* out, int64_t row, int64_t rows, int64_t output,
                   int64_t outputs) {
    float acc[ROW_BLOCK][PANEL], group_scales[PANEL][MAX_GROUPS];
    memset(acc, 0, rows * sizeof acc[0]);

    const int64_t tiles = (rows + ROWS - 1) / ROWS;
    for (int64_t chunk = 0; chunk < p.chunks; chunk++) {
        const char* weights = p.weights + output * p.stride + chunk * CHUNK_BYTES;
        for (int64_t o = 0; o < outputs; o++) {
            const bf16* from = p.group_scales + (output + o) * p.groups + chunk * MAX_GROUPS;
            for (int64_t g = 0; g < smaller(p.groups - chunk * MAX_GROUPS, MAX_GROUPS); g++)
                group_scales[o][g] = to_float(from[g]);
        }
        // One tile asks for weights a few outputs further on; many, each for its part of the next chunk or panel.
        Ahead ahead = {weights + 2 * p.stride, smaller(CHUNK_BYTES, p.stride - chunk * CHUNK_BYTES)};
        if (tiles > 1) {
            const bool last = chunk + 1 == p.chunks;
            const int64_t begin = last ? 0 : (chunk + 1) * CHUNK_BYTES;
            const int64_t lines = (smaller(CHUNK_BYTES, p.stride - begin) + 63) / 64;
            ahead = {p.weights + (output + (last ? PANEL : 0)) * p.stride + begin, (lines + tiles - 1) / tiles * 64};
        }
        for (int64_t done = 0, tile_rows; done < rows; done += tile_rows, ahead.weights += ahead.bytes) {
            const int64_t left = rows - done, tiles_left = (left + ROWS - 1) / ROWS;
            tile_rows = (left + tiles_left - 1) / tiles_left;  // 7 rows are 4 + 3 rather than 6 + 1
            const int64_t i = chunk * p.rows + row + done;
            float sums[ROWS][PANEL];
            // Memory is read fastest one output after another; two at a time take fewer loads of x.
            auto multiply = tiles == 1 ? multiply_rows<1> : multiply_rows<2>;
            multiply(tile_rows, p, p.inputs + i * CHUNK, weights, outputs, p.length(chunk), group_scales[0], ahead,
                     sums[0]);
            for (int64_t r = 0; r < tile_rows; r++)
                for (int64_t o = 0; o < PANEL; o += W)
                    store(acc[done + r] + o, load(acc[done + r] + o) + load(sums[r] + o) * p.input_scales[i + r]);
        }
    }
    store_block(acc, bias, out + row * p.outputs, p.outputs, rows, output, outputs);
}

template <class T>
void linear(Problem p, const void* x, const void* bias, void* out, int16_t* inputs, float* input_scales,
            int64_t threads) {
    p.inputs = inputs;
    p.input_scales = input_scales;
    p.chunks = (p.width + CHUNK - 1) / CHUNK;
    const int64_t panels = (p.outputs + PANEL - 1) / PANEL, blocks = (p.rows + ROW_BLOCK - 1) / ROW_BLOCK;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p.chunks * p.rows; i++) {
            const int64_t chunk = i / p.rows, row = i % p.rows;
            const T* from = (const T*)x + row * p.width + chunk * CHUNK;
            input_scales[i] = round_inputs(from, p.length(chunk), CHUNK, LIMIT, 0, inputs + i * CHUNK);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < blocks * panels; i++) {
            const int64_t row = i / panels * ROW_BLOCK, output = i % panels * PANEL;
            compute_block(p, (const T*)bias, (T*)out, row, smaller(p.rows - row, ROW_BLOCK), output,
                          smaller(p.outputs - output, PANEL));
        }
    }
}

}  // namespace

// out [rows, outputs] = x @ W.T + bias, with x [rows, width] and bias [outputs] or null, both bf16 or both fp32,
// weights uint8 [outputs, groups * 16] and scales bf16 [outputs, groups], with an even number of groups; as scratch
// inputs int16 [chunks, rows, 1024] and input_scales fp32 [chunks, rows].
KERNEL(linear_int4)(const void* x, int64_t is_bf16, const uint8_t* weights, const bf16* scales, const void* bias,
                    int16_t* inputs, float* input_scales, void* out, int64_t rows, int64_t width, int64_t outputs,
                    int64_t threads) {
    const int64_t groups = (width + 2 * GROUP - 1) / (2 * GROUP) * 2;
    Problem p = {(const char*)weights, scales, nullptr, nullptr, rows, width, outputs, 0, groups, groups * 16};
    if (is_bf16)
        linear<bf16>(p, x, bias, out, inputs, input_scales, threads);
    else
        linear<float>(p, x, bias, out, inputs, input_scales, threads);
}
REPLAYABLE(linear_int4)
