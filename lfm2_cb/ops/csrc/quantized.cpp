// x @ W.T for weights of 8 bits a channel or 4 bits a group, read in place (ops/quantized.py has the layouts and the
// torch reference).
//
// The arithmetic is the same on every processor. Each row of x is rounded to 15 bits in chunks of 1024 inputs, finer
// than the weights by far, and products are summed in 32-bit integers: nothing overflows (1024 * 16383 * 127 < 2^31),
// and no order of summation matters. So a row's result depends neither on the rows beside it nor on the instruction
// set; and it is quick, as one multiply-add takes twice as many products of 16-bit integers as of fp32.
//
// A thread takes PANEL outputs of a block of rows. A tile of a few rows stays in the first-level cache while a chunk of
// the panel's weights passes by, one or two outputs at a time, whose sums are in registers; the panel comes from the
// second-level cache for the next tiles, and the weights that come next are asked for meanwhile.
#include "integers.h"
#include "rounding.h"

namespace {

constexpr int64_t GROUP = 32, MAX_GROUPS = CHUNK / GROUP;
constexpr int64_t PANEL = 32;      // outputs: 32 KB of int8 weights a chunk
constexpr int64_t ROW_BLOCK = 96;  // rows: 192 KB of inputs a chunk, for the second-level cache

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Loops marked so are unrolled whole, so that their arrays are registers.
#define UNROLLED _Pragma("GCC unroll 16")

constexpr int fours(int n) { return (n + 3) / 4 * 4; }

// Each of COUNT accumulators, a multiple of four, summed.
template <int COUNT, class Vec4>
inline void sum_all(const Vec4* accumulators, float* sums) {
    for (int i = 0; i < COUNT; i += 4) {
        const vec4 four = to_floats(sum_each4(accumulators + i));
        memcpy(sums + i, &four, sizeof four);
    }
}

// Each of a tile's accumulators [ROWS][OUTS] summed, into rows of PANEL.
template <int ROWS, int OUTS, class Vec4>
inline void store_sums(const Vec4* accumulators, float* sums) {
    float totals[fours(ROWS * OUTS)];
    sum_all<fours(ROWS * OUTS)>(accumulators, totals);
    for (int r = 0; r < ROWS; r++) memcpy(sums + r * PANEL, totals + r * OUTS, OUTS * sizeof(float));
}

template <int OUTS>
inline void multiply_row(Sums& first, Sums& second, V a, V b, const int16_t* x) {
    const V inputs = load_inputs(x);
    first = multiply_add(first, a, inputs);
    if (OUTS == 2) second = multiply_add(second, b, inputs);
}

// 8 bits a weight, a scale an output.
struct Int8 {
    static constexpr int ROWS = 6;  // of a tile: what the registers of AVX2 hold
    static constexpr int64_t CHUNK_BYTES = CHUNK;

    // The products of a chunk's inputs x [ROWS][CHUNK] and two outputs' weights; group_scales are not used.
    template <int ROWS, int OUTS>
    static inline void multiply(const int16_t* x, const char* weights, int64_t stride, int64_t length,
                                const float*, float* sums) {
        const int8_t* w = (const int8_t*)weights;
        const int64_t whole = length / LANES * LANES;
        int8_t rest[OUTS * LANES];  // what no whole vector holds, and zeros
        if (whole < length) {
            memset(rest, 0, sizeof rest);
            for (int o = 0; o < OUTS; o++) memcpy(rest + o * LANES, w + o * stride + whole, length - whole);
        }
        Sums first[ROWS] = {}, second[ROWS] = {};
        for (int64_t k = 0, end = whole; k < length; end = length, w = rest - whole, stride = LANES)
            for (; k < end; k += LANES) {
                const V a = load_weights(w + k), b = OUTS == 2 ? load_weights(w + stride + k) : a;
                UNROLLED for (int r = 0; r < ROWS; r++)
                    multiply_row<OUTS>(first[r], second[r], a, b, x + r * CHUNK + k);
            }
        ivec4 folded[fours(ROWS * OUTS)] = {};
        UNROLLED for (int r = 0; r < ROWS; r++) {
            folded[r * OUTS] = fold(first[r]);
            if (OUTS == 2) folded[r * OUTS + OUTS - 1] = fold(second[r]);
        }
        store_sums<ROWS, OUTS>(folded, sums);
    }
};

// 64 weights of 4 bits are 16 words of 16 bits, whose four parts are the weights of four vectors; two vectors are a
// group. A group's products with its inputs come in eight sums: the same eight everywhere, as they are weighed and
// summed on in fp32.
typedef int16_t Words __attribute__((vector_size(32)));
typedef int32_t ivec8 __attribute__((vector_size(32)));
typedef float vec8 __attribute__((vector_size(32)));
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

// 4 bits a weight, a scale for each 32 of an output.
struct Int4 {
    static constexpr int ROWS = 4;
    static constexpr int64_t CHUNK_BYTES = CHUNK / 2;

    template <int ROWS, int OUTS>
    static inline void multiply(const int16_t* x, const char* weights, int64_t stride, int64_t length,
                                const float* group_scales, float* sums) {
        const int64_t groups = (length + 2 * GROUP - 1) / (2 * GROUP) * 2;
        vec8 acc[OUTS][ROWS] = {};
        for (int64_t g = 0; g < groups; g += 2)
            UNROLLED for (int o = 0; o < OUTS; o++) {
                const Words words = load_words(weights + o * stride + g * GROUP / 2);
                const float* scales = group_scales + o * MAX_GROUPS + g;
                UNROLLED for (int r = 0; r < ROWS; r++) {
                    const int16_t* inputs = x + r * CHUNK + g * GROUP;
                    add_group(acc[o][r], part<0>(words), part<1>(words), inputs, scales[0]);
                    add_group(acc[o][r], part<2>(words), part<3>(words), inputs + GROUP, scales[1]);
                }
            }
        vec4 folded[fours(ROWS * OUTS)] = {};
        UNROLLED for (int r = 0; r < ROWS; r++) {
            folded[r * OUTS] = fold(acc[0][r]);
            if (OUTS == 2) folded[r * OUTS + OUTS - 1] = fold(acc[OUTS - 1][r]);
        }
        store_sums<ROWS, OUTS>(folded, sums);
    }
};

struct Problem {
    const char* weights;        // [outputs][stride bytes]
    const bf16* group_scales;   // [outputs][groups]: of Int4
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

// The sums of ROWS rows and a panel's outputs over a chunk: [ROWS][PANEL].
template <class Kind, int ROWS, int OUTS>
void multiply_panel(const Problem& p, const int16_t* x, const char* weights, int64_t outputs, int64_t length,
                    const float* group_scales, Ahead ahead, float* sums) {
    int64_t o = 0;
    for (; o + OUTS <= outputs; o += OUTS) {
        for (int64_t j = 0; j < OUTS; j++) ahead.ask(p.stride, o + j);
        Kind::template multiply<ROWS, OUTS>(x, weights + o * p.stride, p.stride, length, group_scales + o * MAX_GROUPS,
                                            sums + o);
    }
    if (o < outputs)
        Kind::template multiply<ROWS, 1>(x, weights + o * p.stride, p.stride, length, group_scales + o * MAX_GROUPS,
                                         sums + o);
}

template <class Kind, int OUTS>
void multiply_rows(int64_t rows, const Problem& p, const int16_t* x, const char* weights, int64_t outputs,
                   int64_t length, const float* scales, Ahead ahead, float* sums) {
    switch (rows) {
        case 1: return multiply_panel<Kind, 1, OUTS>(p, x, weights, outputs, length, scales, ahead, sums);
        case 2: return multiply_panel<Kind, 2, OUTS>(p, x, weights, outputs, length, scales, ahead, sums);
        case 3: return multiply_panel<Kind, 3, OUTS>(p, x, weights, outputs, length, scales, ahead, sums);
        case 4: return multiply_panel<Kind, 4, OUTS>(p, x, weights, outputs, length, scales, ahead, sums);
    }
    if constexpr (Kind::ROWS > 4) {
        if (rows == 5) return multiply_panel<Kind, 5, OUTS>(p, x, weights, outputs, length, scales, ahead, sums);
        multiply_panel<Kind, 6, OUTS>(p, x, weights, outputs, length, scales, ahead, sums);
    }
}

// out = acc [rows][WIDTH] * scales + bias, where there are these, for `outputs` from `output` on.
template <int64_t WIDTH, class T>
void store_block(const float (*acc)[WIDTH], const T* scales, const T* bias, T* out, int64_t stride, int64_t rows,
                 int64_t output, int64_t outputs) {
    float factors[WIDTH], addends[WIDTH];
    for (int64_t o = 0; o < outputs; o++) {
        factors[o] = scales ? to_float(scales[output + o]) : 1.0f;
        addends[o] = bias ? to_float(bias[output + o]) : 0.0f;
    }
    for (int64_t r = 0; r < rows; r++) {
        T* to = out + r * stride + output;
        int64_t o = 0;
        for (; o + W <= outputs; o += W) store(to + o, load(acc[r] + o) * load(factors + o) + load(addends + o));
        for (; o < outputs; o++) assign(to + o, acc[r][o] * factors[o] + addends[o]);
    }
}

// out[row ... row + rows][output ... output + outputs], of at most ROW_BLOCK rows and PANEL outputs.
template <class Kind, class T>
void compute_block(const Problem& p, const T* scales, const T* bias, T* out, int64_t row, int64_t rows, int64_t output,
                   int64_t outputs) {
    float acc[ROW_BLOCK][PANEL], group_scales[PANEL][MAX_GROUPS];
    memset(acc, 0, rows * sizeof acc[0]);

    const int64_t tiles = (rows + Kind::ROWS - 1) / Kind::ROWS;
    for (int64_t chunk = 0; chunk < p.chunks; chunk++) {
        const char* weights = p.weights + output * p.stride + chunk * Kind::CHUNK_BYTES;
        for (int64_t o = 0; p.groups && o < outputs; o++) {
            const bf16* from = p.group_scales + (output + o) * p.groups + chunk * MAX_GROUPS;
            for (int64_t g = 0; g < smaller(p.groups - chunk * MAX_GROUPS, MAX_GROUPS); g++)
                group_scales[o][g] = to_float(from[g]);
        }
        // One tile asks for weights a few outputs further on; many, each for its part of the next chunk or panel.
        Ahead ahead = {weights + 2 * p.stride, smaller(Kind::CHUNK_BYTES, p.stride - chunk * Kind::CHUNK_BYTES)};
        if (tiles > 1) {
            const bool last = chunk + 1 == p.chunks;
            const int64_t begin = last ? 0 : (chunk + 1) * Kind::CHUNK_BYTES;
            const int64_t lines = (smaller(Kind::CHUNK_BYTES, p.stride - begin) + 63) / 64;
            ahead = {p.weights + (output + (last ? PANEL : 0)) * p.stride + begin, (lines + tiles - 1) / tiles * 64};
        }
        for (int64_t done = 0, tile_rows; done < rows; done += tile_rows, ahead.weights += ahead.bytes) {
            const int64_t left = rows - done, tiles_left = (left + Kind::ROWS - 1) / Kind::ROWS;
            tile_rows = (left + tiles_left - 1) / tiles_left;  // 7 rows are 4 + 3 rather than 6 + 1
            const int64_t i = chunk * p.rows + row + done;
            float sums[Kind::ROWS][PANEL];
            // Memory is read fastest one output after another; two at a time take fewer loads of x.
            auto multiply = tiles == 1 ? multiply_rows<Kind, 1> : multiply_rows<Kind, 2>;
            multiply(tile_rows, p, p.inputs + i * CHUNK, weights, outputs, p.length(chunk), group_scales[0], ahead,
                     sums[0]);
            for (int64_t r = 0; r < tile_rows; r++)
                for (int64_t o = 0; o < PANEL; o += W)
                    store(acc[done + r] + o, load(acc[done + r] + o) + load(sums[r] + o) * p.input_scales[i + r]);
        }
    }
    store_block<PANEL>(acc, scales, bias, out + row * p.outputs, p.outputs, rows, output, outputs);
}

// 8 bits, few rows: what is waited for is memory. OUTS runs of weights are read side by side, each on and on, as the
// processor foresees; the sums and their order are those of compute_block, so the results are the same to the bit.
// What comes between two chunks is kept short, as no further weights are asked for meanwhile.
constexpr int64_t TASK = 256, LINE = 64, AHEAD = 512;  // most outputs of a task; bytes of the cache's line, and of prefetch

// Sums of all rows, and of the outputs `output`, `output + apart`, ...: to sums[row][0, apart, ...].
template <int ROWS, int OUTS>
inline void few_rows_tile(const Problem& p, int64_t output, int64_t apart, float* sums) {
    constexpr int COUNT = fours(ROWS * OUTS);
    float totals[COUNT] = {};
    for (int64_t chunk = 0; chunk < p.chunks; chunk++) {
        const int8_t* w = (const int8_t*)p.weights + output * p.stride + chunk * CHUNK;
        const int16_t* x = p.inputs + chunk * ROWS * CHUNK;
        const int64_t length = p.length(chunk), whole = length / LINE * LINE;
        int64_t run = apart * p.stride;
        int8_t rest[OUTS * LINE];  // what fills no line, and zeros, as behind the inputs
        if (whole < length) {
            memset(rest, 0, sizeof rest);
            for (int o = 0; o < OUTS; o++) memcpy(rest + o * LINE, w + o * run + whole, length - whole);
        }
        Sums acc[ROWS * OUTS] = {};
        for (int64_t k = 0, end = whole; k < length; end = length, w = rest - whole, run = LINE)
            for (; k < end; k += LINE) {
                UNROLLED for (int o = 0; o < OUTS; o++) __builtin_prefetch(w + o * run + k + AHEAD);
                UNROLLED for (int64_t i = k; i < k + LINE; i += LANES) {
                    V weights[OUTS];
                    UNROLLED for (int o = 0; o < OUTS; o++) weights[o] = load_weights(w + o * run + i);
                    UNROLLED for (int r = 0; r < ROWS; r++) {
                        const V inputs = load_inputs(x + r * CHUNK + i);
                        UNROLLED for (int o = 0; o < OUTS; o++)
                            acc[r * OUTS + o] = multiply_add(acc[r * OUTS + o], weights[o], inputs);
                    }
                }
            }
        ivec4 folded[COUNT] = {};
        UNROLLED for (int i = 0; i < ROWS * OUTS; i++) folded[i] = fold(acc[i]);
        float products[COUNT];
        sum_all<COUNT>(folded, products);
        const float* scales = p.input_scales + chunk * ROWS;
        UNROLLED for (int i = 0; i < ROWS * OUTS; i++) totals[i] += products[i] * scales[i / OUTS];
    }
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int o = 0; o < OUTS; o++) sums[r * TASK + o * apart] = totals[r * OUTS + o];
}

template <int ROWS, int OUTS, class T>
void few_rows_task(const Problem& p, const T* scales, const T* bias, T* out, int64_t begin, int64_t end) {
    float sums[ROWS][TASK];
    const int64_t apart = (end - begin) / OUTS;
    for (int64_t i = 0; i < apart; i++) few_rows_tile<ROWS, OUTS>(p, begin + i, apart, sums[0] + i);
    for (int64_t o = begin + apart * OUTS; o < end; o++) few_rows_tile<ROWS, 1>(p, o, 0, sums[0] + o - begin);
    store_block<TASK>(sums, scales, bias, out, p.outputs, ROWS, begin, end - begin);
}

template <class T>
void few_rows(const Problem& p, const T* scales, const T* bias, T* out, int64_t begin, int64_t end) {
    switch (p.rows) {  // as many sums as the registers hold
        case 1: return few_rows_task<1, 4>(p, scales, bias, out, begin, end);
        case 2: return few_rows_task<2, 4>(p, scales, bias, out, begin, end);
        case 3: return few_rows_task<3, 3>(p, scales, bias, out, begin, end);
        case 4: return few_rows_task<4, 2>(p, scales, bias, out, begin, end);
        case 5: return few_rows_task<5, 2>(p, scales, bias, out, begin, end);
        default: return few_rows_task<6, 2>(p, scales, bias, out, begin, end);
    }
}

template <class Kind, class T>
void linear(Problem p, const void* x, const void* scales, const void* bias, void* out, int16_t* inputs,
            float* input_scales, int64_t threads) {
    p.inputs = inputs;
    p.input_scales = input_scales;
    p.chunks = (p.width + CHUNK - 1) / CHUNK;
    const int64_t share = even_share(p.outputs, threads, TASK);  // of few rows
    const int64_t panels = (p.outputs + PANEL - 1) / PANEL, blocks = (p.rows + ROW_BLOCK - 1) / ROW_BLOCK;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p.chunks * p.rows; i++) {
            const int64_t chunk = i / p.rows, row = i % p.rows;
            const T* from = (const T*)x + row * p.width + chunk * CHUNK;
            input_scales[i] = round_chunk(from, p.length(chunk), inputs + i * CHUNK);
        }
        if (std::is_same<Kind, Int8>::value && p.rows <= Int8::ROWS) {
#pragma omp for schedule(static)
            for (int64_t begin = 0; begin < p.outputs; begin += share)
                few_rows(p, (const T*)scales, (const T*)bias, (T*)out, begin, smaller(begin + share, p.outputs));
        } else
#pragma omp for schedule(static)
        for (int64_t i = 0; i < blocks * panels; i++) {
            const int64_t row = i / panels * ROW_BLOCK, output = i % panels * PANEL;
            compute_block<Kind>(p, (const T*)scales, (const T*)bias, (T*)out, row, smaller(p.rows - row, ROW_BLOCK),
                                output, smaller(p.outputs - output, PANEL));
        }
    }
}

}  // namespace

// out [rows, outputs] = x @ W.T + bias, with x [rows, width], weights int8 [outputs, width], scales [outputs] and bias
// [outputs] or null, all but the weights bf16 or all fp32; as scratch inputs int16 [chunks, rows, 1024] and
// input_scales fp32 [chunks, rows].
KERNEL(linear_int8)(const void* x, int64_t is_bf16, const int8_t* weights, const void* scales, const void* bias,
                    int16_t* inputs, float* input_scales, void* out, int64_t rows, int64_t width, int64_t outputs,
                    int64_t threads) {
    Problem p = {(const char*)weights, nullptr, nullptr, nullptr, rows, width, outputs, 0, 0, width};
    if (is_bf16)
        linear<Int8, bf16>(p, x, scales, bias, out, inputs, input_scales, threads);
    else
        linear<Int8, float>(p, x, scales, bias, out, inputs, input_scales, threads);
}
REPLAYABLE(linear_int8)

// The same with weights uint8 [outputs, groups * 16] and scales bf16 [outputs, groups], with an even number of groups.
KERNEL(linear_int4)(const void* x, int64_t is_bf16, const uint8_t* weights, const bf16* scales, const void* bias,
                    int16_t* inputs, float* input_scales, void* out, int64_t rows, int64_t width, int64_t outputs,
                    int64_t threads) {
    const int64_t groups = (width + 2 * GROUP - 1) / (2 * GROUP) * 2;
    Problem p = {(const char*)weights, scales, nullptr, nullptr, rows, width, outputs, 0, groups, groups * 16};
    if (is_bf16)
        linear<Int4, bf16>(p, x, nullptr, bias, out, inputs, input_scales, threads);
    else
        linear<Int4, float>(p, x, nullptr, bias, out, inputs, input_scales, threads);
}
REPLAYABLE(linear_int4)
