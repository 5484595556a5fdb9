// x @ weight.T (+ bias) for many rows of x by the processor's matrix units, with the weights as they lie in the module.
//
// The product is taken as weight @ x.T: the weights' rows are then what a tile's rows are, and are loaded from where
// they are; x, which is small, is laid out once a call. Of 4 bytes each (2 inputs in bf16, 4 in int8), a tile of the
// weights holds [16 outputs][16 fours], one of x [16 fours][16 tokens], and one of sums [16 outputs][16 tokens].
//
// A thread takes panels of 32 outputs, one after another, each for all tokens of a block, whose x the second-level
// cache holds; a step multiplies two tiles of the weights by two of x. While it computes with a panel it asks for the
// next, which follows it in memory, line by line: so memory is read on and on, however many tokens there are.
//
// A sum is taken step by step, in the order of the inputs, and within a step as the instruction does it. So a row's
// result does not depend on the rows beside it, nor on the number of threads.
#include "amx.h"
#include "rounding.h"

namespace {

constexpr int64_t PANEL = 2 * SIDE;         // outputs
constexpr int64_t STEP = 2 * TILE;          // bytes of x in a step
constexpr int64_t BLOCK_BYTES = 1 << 20;    // of x, half of the second-level cache
constexpr int64_t CHUNK_STEPS = CHUNK / LINE;

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t ratio_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// to[four][row] = from[row][four], 4 bytes each, of 16 rows `stride` bytes apart.
void transpose_tile(const void* from, int64_t stride, void* to) {
    for (int64_t row = 0; row < SIDE; row += W)
        for (int64_t four = 0; four < SIDE; four += W) {
            vec v[W];
            for (int i = 0; i < W; i++) memcpy(v + i, (const char*)from + (row + i) * stride + 4 * four, sizeof *v);
            transpose(v);
            for (int i = 0; i < W; i++) memcpy((char*)to + (four + i) * LINE + 4 * row, v + i, sizeof *v);
        }
}

// out[token][output] of as many of both as there are, from sums [16 outputs][16 tokens]; bias may be null.
template <class T>
void write(const float* sums, const T* bias, T* out, int64_t tokens, int64_t outputs, int64_t stride) {
    float turned[SIDE * SIDE];
    transpose_tile(sums, LINE, turned);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t o = 0; o < outputs; o += W) {
            const vec v = load(turned + t * SIDE + o), sum = bias && o + W <= outputs ? v + load(bias + o) : v;
            if (o + W <= outputs)
                store(out + t * stride + o, sum);
            else
                for (int64_t i = 0; o + i < outputs; i++)
                    assign(out + t * stride + o + i, bias ? v[i] + to_float(bias[o + i]) : v[i]);
        }
}

// What of the next panel is asked for at each step.
struct Ahead {
    const char *next, *end;
    int64_t lines;

    void ask() {
        const char* stop = end - next < lines * LINE ? end : next + lines * LINE;
        for (const char* line = next; line < stop; line += LINE) __builtin_prefetch(line, 0, 2);  // into the second cache
        next = stop;
    }
};

struct Panel {
    const char* weights;  // 32 rows of whole lines
    int64_t stride;       // bytes
    int64_t first, outputs;
};

// Tiles 0 ... 3 += the panel's two tiles by two of x, for `steps` steps.
template <class Kind>
inline void multiply(Tiles& tiles, const char* weights, int64_t stride, const char* x, int64_t steps, Ahead& ahead) {
    for (int64_t s = 0; s < steps; s++) {
        ahead.ask();
        tiles.load<4>(weights + s * LINE, stride);
        tiles.load<6>(x + s * STEP, LINE);
        Kind::template first<0, 4, 6>(tiles);
        tiles.load<5>(weights + SIDE * stride + s * LINE, stride);
        Kind::template first<2, 5, 6>(tiles);
        tiles.load<7>(x + s * STEP + TILE, LINE);
        Kind::template second<1, 4, 7>(tiles);
        Kind::template second<3, 5, 7>(tiles);
    }
}

inline void zero_sums(Tiles& tiles) {
    tiles.zero<0>();
    tiles.zero<1>();
    tiles.zero<2>();
    tiles.zero<3>();
}

// As [which 16 outputs][which tile of x][16 outputs][16 tokens].
template <class Sum>
inline void store_sums(const Tiles& tiles, Sum sums[2][2][SIDE][SIDE]) {
    tiles.store<0>(sums[0][0], LINE);
    tiles.store<1>(sums[0][1], LINE);
    tiles.store<2>(sums[1][0], LINE);
    tiles.store<3>(sums[1][1], LINE);
}

// bf16 by bf16. The two tiles of x are 16 tokens each.
struct Bf16 {
    static constexpr int64_t TOKENS = 2 * SIDE, BYTES = 2, PACKED_STEPS = 1;

    const bf16 *x, *bias;
    bf16* out;
    int64_t rows, in, outputs;

    template <int c, int a, int b>
    static void first(Tiles& tiles) {
        tiles.multiply_bf16<c, a, b>();
    }
    template <int c, int a, int b>
    static void second(Tiles& tiles) {
        tiles.multiply_bf16<c, a, b>();
    }

    // A step of a group of tokens; zeros beyond the rows and beyond the inputs.
    void pack(int64_t group, int64_t step, char* to) const {
        const int64_t begin = step * LINE / BYTES, length = smaller(LINE / BYTES, in - begin);
        for (int64_t t = group * TOKENS; t < (group + 1) * TOKENS; t += SIDE, to += TILE) {
            const bf16* from = x + t * in + begin;
            if (t + SIDE <= rows && length == LINE / BYTES) {
                transpose_tile(from, in * BYTES, to);
                continue;
            }
            char filled[TILE] = {};
            for (int64_t i = 0; i < smaller(SIDE, rows - t); i++)
                memcpy(filled + i * LINE, from + i * in, length * BYTES);
            transpose_tile(filled, LINE, to);
        }
    }

    void compute(Tiles& tiles, const Panel& panel, int64_t group, const char* packed, Ahead& ahead) const {
        zero_sums(tiles);
        multiply<Bf16>(tiles, panel.weights, panel.stride, packed, ratio_up(in * BYTES, LINE), ahead);
        alignas(64) float sums[2][2][SIDE][SIDE];
        store_sums(tiles, sums);
        for (int64_t a = 0; a < 2; a++)
            for (int64_t b = 0; b < 2; b++) {
                const int64_t token = group * TOKENS + b * SIDE, output = panel.first + a * SIDE;
                write(sums[a][b][0], bias ? bias + output : nullptr, out + token * outputs + output,
                      smaller(SIDE, rows - token), smaller(SIDE, panel.outputs - a * SIDE), outputs);
            }
    }
};

// int8 weights by inputs rounded to 16 bits: these are 256 * a signed byte + an unsigned one, the two tiles of x. The
// sums wrap around where they must, and are, put together, the whole products' own: csrc/quantized.cpp shows why those
// fit. They are weighed and added chunk by chunk as there, so the results are the same to the bit.
template <class T>
struct Int8 {
    static constexpr int64_t TOKENS = SIDE, BYTES = 1, PACKED_STEPS = CHUNK_STEPS;

    const T *x, *scales, *bias;
    T* out;
    int64_t rows, in, outputs;
    float* input_scales;  // [chunks][groups * 16]

    template <int c, int a, int b>
    static void first(Tiles& tiles) {
        tiles.multiply_signed<c, a, b>();
    }
    template <int c, int a, int b>
    static void second(Tiles& tiles) {
        tiles.multiply_unsigned<c, a, b>();
    }

    float* scales_of(int64_t chunk, int64_t group) const {
        return input_scales + (chunk * ratio_up(rows, TOKENS) + group) * TOKENS;
    }

    // A chunk of a group of tokens, from the step that it begins with.
    void pack(int64_t group, int64_t step, char* to) const {
        const int64_t begin = step * LINE, length = smaller(CHUNK, in - begin);
        int8_t high[SIDE][CHUNK];
        uint8_t low[SIDE][CHUNK];
        for (int64_t t = 0; t < TOKENS; t++) {
            const int64_t row = group * TOKENS + t;
            int16_t rounded[CHUNK] = {};
            scales_of(begin / CHUNK, group)[t] = row < rows ? round_chunk(x + row * in + begin, length, rounded) : 0.0f;
            for (int64_t k = 0; k < CHUNK; k++) {
                high[t][k] = rounded[k] >> 8;
                low[t][k] = rounded[k] & 255;
            }
        }
        for (int64_t s = 0; s < ratio_up(length, LINE); s++) {
            transpose_tile(high[0] + s * LINE, CHUNK, to + s * STEP);
            transpose_tile(low[0] + s * LINE, CHUNK, to + s * STEP + TILE);
        }
    }

    void compute(Tiles& tiles, const Panel& panel, int64_t group, const char* packed, Ahead& ahead) const {
        float acc[PANEL][SIDE] = {};
        const int64_t steps = ratio_up(in, LINE);
        for (int64_t step = 0; step < steps; step += CHUNK_STEPS) {
            zero_sums(tiles);
            multiply<Int8>(tiles, panel.weights + step * LINE, panel.stride, packed + step * STEP,
                           smaller(CHUNK_STEPS, steps - step), ahead);
            alignas(64) int32_t sums[2][2][SIDE][SIDE];
            store_sums(tiles, sums);
            const float* token_scales = scales_of(step / CHUNK_STEPS, group);
            for (int64_t o = 0; o < PANEL; o++)
                for (int64_t t = 0; t < SIDE; t += W) {
                    uvec high, low;
                    memcpy(&high, sums[o / SIDE][0][o % SIDE] + t, sizeof high);
                    memcpy(&low, sums[o / SIDE][1][o % SIDE] + t, sizeof low);
                    const vec total = __builtin_convertvector((ivec)((high << 8) + low), vec);
                    store(acc[o] + t, load(acc[o] + t) + total * load(token_scales + t));
                }
        }
        for (int64_t o = 0; o < panel.outputs; o++) {
            const float scale = to_float(scales[panel.first + o]), addend = bias ? to_float(bias[panel.first + o]) : 0.0f;
            for (int64_t t = 0; t < SIDE; t += W) store(acc[o] + t, load(acc[o] + t) * scale + addend);
        }
        for (int64_t a = 0; a < PANEL; a += SIDE)
            write(acc[a], (const T*)nullptr, out + group * TOKENS * outputs + panel.first + a,
                  smaller(TOKENS, rows - group * TOKENS), smaller(SIDE, panel.outputs - a), outputs);
    }
};

// Tasks begin ... end: blocks of groups of tokens, and in each the panels.
template <class Kind>
void compute_tasks(const Kind& kind, const char* weights, const char* packed, int64_t block, int64_t begin,
                   int64_t end) {
    const int64_t stride = kind.in * Kind::BYTES, steps = ratio_up(stride, LINE);
    const int64_t panels = ratio_up(kind.outputs, PANEL), groups = ratio_up(kind.rows, Kind::TOKENS);
    char* filled = nullptr;  // a panel with zeros where there are no weights; rows beyond the outputs do not matter
    Tiles tiles;
    for (int64_t task = begin; task < end; task++) {
        const int64_t first = task % panels * PANEL, group = task / panels * block;
        const int64_t last_group = smaller(group + block, groups);
        Panel panel = {weights + first * stride, stride, first, smaller(PANEL, kind.outputs - first)};
        if (panel.outputs < PANEL || stride % LINE) {
            if (!filled) filled = (char*)calloc(PANEL, steps * LINE);
            for (int64_t o = 0; o < panel.outputs; o++)
                memcpy(filled + o * steps * LINE, panel.weights + o * stride, stride);
            panel.weights = filled;
            panel.stride = steps * LINE;
        }
        const int64_t next = (task + 1) % panels * PANEL, next_outputs = smaller(PANEL, kind.outputs - next);
        Ahead ahead = {weights + next * stride, weights + (next + next_outputs) * stride,
                       ratio_up(PANEL, last_group - group)};
        if (task + 1 == end) ahead.end = ahead.next;
        for (int64_t g = group; g < last_group; g++) kind.compute(tiles, panel, g, packed + g * steps * STEP, ahead);
    }
    free(filled);
}

template <class Kind>
void linear(const Kind& kind, const char* weights, int64_t threads) {
    const int64_t steps = ratio_up(kind.in * Kind::BYTES, LINE), parts = ratio_up(steps, Kind::PACKED_STEPS);
    const int64_t panels = ratio_up(kind.outputs, PANEL), groups = ratio_up(kind.rows, Kind::TOKENS);
    // Blocks of equal size that the cache holds, and at least as many tasks as threads where there are tokens enough.
    const int64_t most = BLOCK_BYTES / (steps * STEP) > 0 ? BLOCK_BYTES / (steps * STEP) : 1;
    const int64_t wanted = ratio_up(threads, panels), needed = ratio_up(groups, most);
    const int64_t block = ratio_up(groups, smaller(needed > wanted ? needed : wanted, groups));
    const int64_t tasks = ratio_up(groups, block) * panels;
    char* packed = (char*)aligned_alloc(LINE, groups * steps * STEP);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < groups * parts; i++) {
            const int64_t group = i / parts, step = i % parts * Kind::PACKED_STEPS;
            kind.pack(group, step, packed + (group * steps + step) * STEP);
        }
        const int64_t thread = omp_get_thread_num(), all = omp_get_num_threads();
        compute_tasks(kind, weights, packed, block, tasks * thread / all, tasks * (thread + 1) / all);
    }
    free(packed);
}

template <class T>
void linear_int8(const void* x, const int8_t* weights, const void* scales, const void* bias, void* out, int64_t rows,
                 int64_t in, int64_t outputs, int64_t threads) {
    const int64_t scratch = ratio_up(in, CHUNK) * ratio_up(rows, SIDE) * SIDE * sizeof(float);
    float* input_scales = (float*)aligned_alloc(LINE, scratch);
    linear(Int8<T>{(const T*)x, (const T*)scales, (const T*)bias, (T*)out, rows, in, outputs, input_scales},
           (const char*)weights, threads);
    free(input_scales);
}

}  // namespace

// x [rows, in], w [outputs, in], bias [outputs] or null, out [rows, outputs]; sums are in fp32, of which the
// instruction makes 0 where they are subnormal, as of the inputs
KERNEL(amx_linear_bf16)(const bf16* x, const bf16* w, const bf16* bias, bf16* out, int64_t rows, int64_t in,
                        int64_t outputs, int64_t threads) {
    linear(Bf16{x, bias, out, rows, in, outputs}, (const char*)w, threads);
}
REPLAYABLE(amx_linear_bf16)

// As linear_int8 (csrc/quantized.cpp), to the bit.
KERNEL(amx_linear_int8)(const void* x, int64_t is_bf16, const int8_t* weights, const void* scales, const void* bias,
                        void* out, int64_t rows, int64_t in, int64_t outputs, int64_t threads) {
    if (is_bf16)
        linear_int8<bf16>(x, weights, scales, bias, out, rows, in, outputs, threads);
    else
        linear_int8<float>(x, weights, scales, bias, out, rows, in, outputs, threads);
}
REPLAYABLE(amx_linear_int8)
