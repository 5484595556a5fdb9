// x @ W.T for weights of 8 bits a channel or 4 bits a group, read once and in place (ops/quantized.py has the layouts
// and the torch reference).
//
// The arithmetic is the same on every processor. Each row of x is rounded to 15 bits in chunks of 1024 inputs, finer
// than the weights by far, and products are summed in 32-bit integers: nothing overflows (1024 * 16383 * 127 < 2^31),
// and no order of summation matters. So a row's result depends neither on the rows beside it nor on the instruction
// set; and it is quick, as one multiply-add takes twice as many products of 16-bit integers as of fp32.
#include "simd.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t CHUNK = 1024, GROUP = 32, MAX_GROUPS = CHUNK / GROUP;
constexpr float LIMIT = 16383.0f;  // of a rounded input
constexpr int64_t OUTPUTS = 16;    // a task's outputs: 16 KB of int8 weights a chunk

struct Problem {
    const void* weights;         // [outputs][stride bytes]
    const float* scales;         // [outputs]: of int8
    const bf16* group_scales;    // [outputs][groups]: of int4
    const float* bias;           // [outputs] or null
    const int16_t* inputs;       // [chunks][rows][CHUNK]
    const float* input_scales;   // [chunks][rows]
    float* out;                  // [rows][outputs]
    int64_t rows, width, outputs, chunks, groups, stride;

    int64_t length(int64_t chunk) const { return width - chunk * CHUNK < CHUNK ? width - chunk * CHUNK : CHUNK; }
};

// V: LANES 16-bit values. Sums: of their products, by pairs.
typedef int32_t Sums __attribute__((vector_size(4 * W)));
constexpr int LANES = 2 * W;
#if defined(__AVX512F__)
typedef __m512i V;
inline V load_weights(const int8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline V load_inputs(const int16_t* p) { return _mm512_loadu_si512(p); }
inline Sums multiply_add(Sums acc, V w, V x) { return acc + (Sums)_mm512_madd_epi16(w, x); }
#elif defined(__AVX2__)
typedef __m256i V;
inline V load_weights(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline V load_inputs(const int16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Sums multiply_add(Sums acc, V w, V x) { return acc + (Sums)_mm256_madd_epi16(w, x); }
#else
typedef int16_t V __attribute__((vector_size(4 * W)));
inline V load_weights(const int8_t* p) {
    V v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
}
inline V load_inputs(const int16_t* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline Sums multiply_add(Sums acc, V w, V x) {
    for (int i = 0; i < W; i++) acc[i] += w[2 * i] * x[2 * i] + w[2 * i + 1] * x[2 * i + 1];
    return acc;
}
#endif

inline int32_t total(Sums v) {
    int32_t s = 0;
    for (int i = 0; i < W; i++) s += v[i];
    return s;
}

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
inline ivec8 dot_group(Words first, Words second, const int16_t* x) {
#if defined(__AVX2__)
    __m256i sums = _mm256_madd_epi16((__m256i)first, (__m256i)load_words(x));
    return (ivec8)sums + (ivec8)_mm256_madd_epi16((__m256i)second, (__m256i)load_words(x + 16));
#else
    ivec8 sums;
    for (int i = 0; i < 8; i++)
        sums[i] = first[2 * i] * x[2 * i] + first[2 * i + 1] * x[2 * i + 1] + second[2 * i] * x[2 * i + 16] +
                  second[2 * i + 1] * x[2 * i + 17];
    return sums;
#endif
}

// Loops marked so are unrolled whole, so that their arrays are registers.
#define UNROLLED _Pragma("GCC unroll 8")

__attribute__((noinline)) int32_t dot_rest(const int16_t* x, const int8_t* w, int64_t length) {
    int32_t sum = 0;
    for (int64_t k = 0; k < length; k++) sum += x[k] * w[k];
    return sum;
}

// What one chunk of the inputs adds to ROWS x OUTS outputs.
template <int ROWS, int OUTS>
inline void add_int8(const Problem& p, int64_t chunk, int64_t row, int64_t output) {
    constexpr int STEPS = ROWS == 1 ? 4 : 1;  // sums a product, where there are few products
    const int16_t* x = p.inputs + (chunk * p.rows + row) * CHUNK;
    const int8_t* w = (const int8_t*)p.weights + output * p.stride + chunk * CHUNK;
    const int64_t length = p.length(chunk), whole = length / (STEPS * LANES) * (STEPS * LANES);
    Sums acc[ROWS][OUTS][STEPS] = {};
    for (int64_t k = 0; k < whole; k += STEPS * LANES)
        UNROLLED for (int s = 0; s < STEPS; s++) {
            V loaded[OUTS];
            UNROLLED for (int o = 0; o < OUTS; o++) loaded[o] = load_weights(w + o * p.stride + k + s * LANES);
            UNROLLED for (int r = 0; r < ROWS; r++) {
                V inputs = load_inputs(x + r * CHUNK + k + s * LANES);
                UNROLLED for (int o = 0; o < OUTS; o++)
                    acc[r][o][s] = multiply_add(acc[r][o][s], loaded[o], inputs);
            }
        }
    int32_t sums[ROWS][OUTS];
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int o = 0; o < OUTS; o++) {
            Sums sum = acc[r][o][0];
            UNROLLED for (int s = 1; s < STEPS; s++) sum += acc[r][o][s];
            sums[r][o] = total(sum);
        }
    if (whole < length)
        for (int r = 0; r < ROWS; r++)
            for (int o = 0; o < OUTS; o++)
                sums[r][o] += dot_rest(x + r * CHUNK + whole, w + o * p.stride + whole, length - whole);
    UNROLLED for (int r = 0; r < ROWS; r++) {
        const float input_scale = p.input_scales[chunk * p.rows + row + r];
        float* out = p.out + (row + r) * p.outputs + output;
        UNROLLED for (int o = 0; o < OUTS; o++) out[o] += (float)sums[r][o] * (input_scale * p.scales[output + o]);
    }
}

template <int ROWS, int OUTS>
inline void add_int4(const Problem& p, int64_t chunk, int64_t row, int64_t output) {
    const int16_t* x = p.inputs + (chunk * p.rows + row) * CHUNK;
    const uint8_t* w = (const uint8_t*)p.weights + output * p.stride + chunk * CHUNK / 2;
    const int64_t groups = (p.length(chunk) + 2 * GROUP - 1) / (2 * GROUP) * 2;
    float scales[MAX_GROUPS][OUTS];
    for (int o = 0; o < OUTS; o++)
        for (int64_t g = 0; g < groups; g++)
            scales[g][o] = to_float(p.group_scales[(output + o) * p.groups + chunk * MAX_GROUPS + g]);
    vec8 acc[ROWS][OUTS] = {};
    for (int64_t g = 0; g < groups; g += 2) {
        Words words[OUTS];
        UNROLLED for (int o = 0; o < OUTS; o++) words[o] = load_words(w + o * p.stride + g * GROUP / 2);
        UNROLLED for (int half = 0; half < 2; half++)
            UNROLLED for (int o = 0; o < OUTS; o++) {
                Words first = half ? part<2>(words[o]) : part<0>(words[o]);
                Words second = half ? part<3>(words[o]) : part<1>(words[o]);
                UNROLLED for (int r = 0; r < ROWS; r++) {
                    ivec8 exact = dot_group(first, second, x + r * CHUNK + (g + half) * GROUP);
                    acc[r][o] += __builtin_convertvector(exact, vec8) * scales[g + half][o];
                }
            }
    }
    UNROLLED for (int r = 0; r < ROWS; r++) {
        const float input_scale = p.input_scales[chunk * p.rows + row + r];
        float* out = p.out + (row + r) * p.outputs + output;
        UNROLLED for (int o = 0; o < OUTS; o++) {
            vec8 a = acc[r][o];
            out[o] += (((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))) * input_scale;
        }
    }
}

// Asks for a chunk's weights of a few outputs that come later: the processor does not see such short runs coming, and
// would wait for each (from memory this is twice as fast). Asking beyond the end does no harm.
inline void prefetch(const Problem& p, int64_t chunk, int64_t output, int64_t outputs, int64_t chunk_bytes) {
    const char* w = (const char*)p.weights + output * p.stride + chunk * chunk_bytes;
    const int64_t rest = p.stride - chunk * chunk_bytes, bytes = rest < chunk_bytes ? rest : chunk_bytes;
    for (int64_t o = 0; o < outputs; o++)
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(w + o * p.stride + i);
}

template <bool INT8, int ROWS, int OUTS>
void add_outputs(const Problem& p, int64_t chunk, int64_t row, int64_t begin, int64_t end) {
    int64_t output = begin;
    for (; output + OUTS <= end; output += OUTS) {
        if (row == 0) prefetch(p, chunk, output + 2 * OUTS, OUTS, INT8 ? CHUNK : CHUNK / 2);
        if constexpr (INT8)
            add_int8<ROWS, OUTS>(p, chunk, row, output);
        else
            add_int4<ROWS, OUTS>(p, chunk, row, output);
    }
    for (; output < end; output++)
        if constexpr (INT8)
            add_int8<ROWS, 1>(p, chunk, row, output);
        else
            add_int4<ROWS, 1>(p, chunk, row, output);
}

// Outputs begin ... end of all rows. Their weights, a chunk at a time, stay in the first-level cache while the rows
// pass by, so they are read from memory once.
template <bool INT8>
void compute_outputs(const Problem& p, int64_t begin, int64_t end) {
    constexpr int MOST = INT8 ? 6 : 4;  // rows at once: what the registers of AVX2 hold
    for (int64_t row = 0; row < p.rows; row++)
        for (int64_t o = begin; o < end; o++) p.out[row * p.outputs + o] = p.bias ? p.bias[o] : 0.0f;
    for (int64_t chunk = 0; chunk < p.chunks; chunk++)
        for (int64_t row = 0, rows; row < p.rows; row += rows) {
            const int64_t left = p.rows - row, blocks = (left + MOST - 1) / MOST;
            rows = (left + blocks - 1) / blocks;  // 7 rows are 4 + 3 rather than 6 + 1
            switch (rows) {
                case 1: add_outputs<INT8, 1, INT8 ? 1 : 4>(p, chunk, row, begin, end); break;
                case 2: add_outputs<INT8, 2, 2>(p, chunk, row, begin, end); break;
                case 3: add_outputs<INT8, 3, 2>(p, chunk, row, begin, end); break;
                case 4: add_outputs<INT8, 4, 2>(p, chunk, row, begin, end); break;
                case 5: add_outputs<INT8, 5, 2>(p, chunk, row, begin, end); break;
                default: add_outputs<INT8, 6, 2>(p, chunk, row, begin, end);
            }
        }
}

// A chunk of one row to LIMIT by its largest value, which is returned over LIMIT. It is looked for among the bits, in
// the order of the absolute values, so that a NaN is the largest and comes out. Beyond the row there are zeros.
template <class T>
float round_chunk(const T* x, int64_t length, int16_t* to) {
    int32_t largest_bits = 0;
    for (int64_t k = 0; k < length; k++) {
        const float value = to_float(x[k]);
        int32_t bits;
        memcpy(&bits, &value, 4);
        bits &= 0x7fffffff;
        largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    float most;
    memcpy(&most, &largest_bits, 4);
    const float inverse = most < 1e-30f ? 0.0f : LIMIT / most;
    for (int64_t k = 0; k < length; k++) {
        const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, held in the lower bits
        const float rounded = to_float(x[k]) * inverse + magic;
        int32_t bits;
        memcpy(&bits, &rounded, 4);
        to[k] = (int16_t)bits;
    }
    for (int64_t k = length; k < CHUNK; k++) to[k] = 0;
    return most / LIMIT;
}

template <bool INT8, class T>
void linear(Problem p, const T* x, int16_t* inputs, float* input_scales, int64_t threads) {
    p.inputs = inputs;
    p.input_scales = input_scales;
    p.chunks = (p.width + CHUNK - 1) / CHUNK;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p.chunks * p.rows; i++) {
            const int64_t chunk = i / p.rows, row = i % p.rows;
            input_scales[i] = round_chunk(x + row * p.width + chunk * CHUNK, p.length(chunk), inputs + i * CHUNK);
        }
#pragma omp for schedule(static)
        for (int64_t begin = 0; begin < p.outputs; begin += OUTPUTS)
            compute_outputs<INT8>(p, begin, begin + OUTPUTS < p.outputs ? begin + OUTPUTS : p.outputs);
    }
}

}  // namespace

// out fp32 [rows, outputs] = x @ W.T + bias, with x fp32 or bf16 [rows, width], weights int8 [outputs, width], scales
// fp32 [outputs], bias fp32 [outputs] or null; as scratch inputs int16 [chunks, rows, 1024] and input_scales fp32
// [chunks, rows].
KERNEL(linear_int8)(const void* x, int64_t x_is_bf16, const int8_t* weights, const float* scales, const float* bias,
                    int16_t* inputs, float* input_scales, float* out, int64_t rows, int64_t width, int64_t outputs,
                    int64_t threads) {
    Problem p = {weights, scales, nullptr, bias, nullptr, nullptr, out, rows, width, outputs, 0, 0, width};
    if (x_is_bf16)
        linear<true>(p, (const bf16*)x, inputs, input_scales, threads);
    else
        linear<true>(p, (const float*)x, inputs, input_scales, threads);
}

// The same with weights uint8 [outputs, groups * 16] and scales bf16 [outputs, groups], with an even number of groups.
KERNEL(linear_int4)(const void* x, int64_t x_is_bf16, const uint8_t* weights, const bf16* scales, const float* bias,
                    int16_t* inputs, float* input_scales, float* out, int64_t rows, int64_t width, int64_t outputs,
                    int64_t threads) {
    const int64_t groups = (width + 2 * GROUP - 1) / (2 * GROUP) * 2;
    Problem p = {weights, nullptr, scales, bias, nullptr, nullptr, out, rows, width, outputs, 0, groups, groups * 16};
    if (x_is_bf16)
        linear<false>(p, (const bf16*)x, inputs, input_scales, threads);
    else
        linear<false>(p, (const float*)x, inputs, input_scales, threads);
}
