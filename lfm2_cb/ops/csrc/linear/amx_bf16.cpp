// x @ weight.T (+ bias) for many rows of x by the processor's matrix units, with the weights as they lie in the module.
//
// The product is taken as weight @ x.T: the weights' rows are then what a tile's rows are, and are loaded from where
// they are; x, which is small, is laid out once a call. A tile of the weights holds
// [16 outputs][16 pairs of inputs], one of x [16 pairs][16 tokens], and one of sums [16 outputs][16 tokens].
//
// A thread takes panels of 32 outputs, one after another, each for all tokens of a block, whose x the second-level
// cache holds; a step multiplies two tiles of the weights by two of x. While it computes with a panel it asks for the
// next, which follows it in memory, line by line: so memory is read on and on, however many tokens there are.
//
// A sum is taken step by step, in the order of the inputs, and within a step as the instruction does it. So a row's
// result does not depend on the rows beside it, nor on the number of threads.
#include "arch/tiles.h"
#include "core/epilogue.h"

namespace {

constexpr int64_t PANEL = 2 * TILE_ROWS;         // outputs
constexpr int64_t STEP = 2 * TILE_BYTES;          // bytes of x in a step
constexpr int64_t BLOCK_BYTES = 1 << 20;    // of x, half of the second-level cache

// to[four][row] = from[row][four], 4 bytes each, of 16 rows `stride` bytes apart.
void transpose_tile(const void* from, int64_t stride, void* to) {
    for (int64_t row = 0; row < TILE_ROWS; row += W)
        for (int64_t four = 0; four < TILE_ROWS; four += W) {
            vec v[W];
            for (int i = 0; i < W; i++) memcpy(v + i, (const char*)from + (row + i) * stride + 4 * four, sizeof *v);
            transpose(v);
            for (int i = 0; i < W; i++) memcpy((char*)to + (four + i) * LINE + 4 * row, v + i, sizeof *v);
        }
}

// Sums [16 outputs][16 tokens] of as many of both as there are.
template <class Epilogue>
void finish(const float* sums, int64_t token, int64_t tokens, int64_t output, int64_t outputs,
            const Epilogue& epilogue) {
    float turned[TILE_ROWS * TILE_ROWS];
    transpose_tile(sums, LINE, turned);
    for (int64_t t = 0; t < tokens; t++) epilogue(token + t, output, turned + t * TILE_ROWS, outputs);
}

struct Panel {
    const char* weights;  // 32 rows of whole lines
    int64_t stride;       // bytes
    int64_t first, outputs;
};

// Tiles 0 ... 3 += the panel's two tiles by two of x, for `steps` steps.
inline void multiply(Tiles& tiles, const char* weights, int64_t stride, const char* x, int64_t steps, Prefetcher& prefetcher) {
    for (int64_t s = 0; s < steps; s++) {
        prefetcher.step();
        tiles.load<4>(weights + s * LINE, stride);
        tiles.load<6>(x + s * STEP, LINE);
        tiles.multiply_bf16<0, 4, 6>();
        tiles.load<5>(weights + TILE_ROWS * stride + s * LINE, stride);
        tiles.multiply_bf16<2, 5, 6>();
        tiles.load<7>(x + s * STEP + TILE_BYTES, LINE);
        tiles.multiply_bf16<1, 4, 7>();
        tiles.multiply_bf16<3, 5, 7>();
    }
}

inline void zero_sums(Tiles& tiles) {
    tiles.zero<0>();
    tiles.zero<1>();
    tiles.zero<2>();
    tiles.zero<3>();
}

// As [which 16 outputs][which tile of x][16 outputs][16 tokens].
inline void store_sums(const Tiles& tiles, float sums[2][2][TILE_ROWS][TILE_ROWS]) {
    tiles.store<0>(sums[0][0], LINE);
    tiles.store<1>(sums[0][1], LINE);
    tiles.store<2>(sums[1][0], LINE);
    tiles.store<3>(sums[1][1], LINE);
}

// The two tiles of x are 16 tokens each.
constexpr int64_t TOKENS = 2 * TILE_ROWS, BYTES = 2;

struct Product {
    const bf16 *x, *bias;
    bf16* out;
    int64_t rows, in, outputs;

    // A step of a group of tokens; zeros beyond the rows and beyond the inputs.
    void pack(int64_t group, int64_t step, char* to) const {
        const int64_t begin = step * LINE / BYTES, length = min(LINE / BYTES, in - begin);
        for (int64_t t = group * TOKENS; t < (group + 1) * TOKENS; t += TILE_ROWS, to += TILE_BYTES) {
            const bf16* from = x + t * in + begin;
            if (t + TILE_ROWS <= rows && length == LINE / BYTES) {
                transpose_tile(from, in * BYTES, to);
                continue;
            }
            char filled[TILE_BYTES] = {};
            for (int64_t i = 0; i < min(TILE_ROWS, rows - t); i++)
                memcpy(filled + i * LINE, from + i * in, length * BYTES);
            transpose_tile(filled, LINE, to);
        }
    }

    void compute(Tiles& tiles, const Panel& panel, int64_t group, const char* packed, Prefetcher& prefetcher) const {
        zero_sums(tiles);
        multiply(tiles, panel.weights, panel.stride, packed, ceil_div(in * BYTES, LINE), prefetcher);
        alignas(64) float sums[2][2][TILE_ROWS][TILE_ROWS];
        store_sums(tiles, sums);
        for (int64_t a = 0; a < 2; a++)
            for (int64_t b = 0; b < 2; b++) {
                const int64_t token = group * TOKENS + b * TILE_ROWS, output = panel.first + a * TILE_ROWS;
                finish(sums[a][b][0], token, min(TILE_ROWS, rows - token), output,
                       min(TILE_ROWS, panel.outputs - a * TILE_ROWS), AddBias<bf16>{out, bias, outputs});
            }
    }
};

// Tasks begin ... end: blocks of groups of tokens, and in each the panels.
void compute_tasks(const Product& product, const char* weights, const char* packed, int64_t block, int64_t begin,
                   int64_t end) {
    const int64_t stride = product.in * BYTES, steps = ceil_div(stride, LINE);
    const int64_t panels = ceil_div(product.outputs, PANEL), groups = ceil_div(product.rows, TOKENS);
    char* filled = nullptr;  // a panel with zeros where there are no weights; rows beyond the outputs do not matter
    Tiles tiles;
    for (int64_t task = begin; task < end; task++) {
        const int64_t first = task % panels * PANEL, group = task / panels * block;
        const int64_t last_group = min(group + block, groups);
        Panel panel = {weights + first * stride, stride, first, min(PANEL, product.outputs - first)};
        if (panel.outputs < PANEL || stride % LINE) {
            if (!filled) filled = (char*)calloc(PANEL, steps * LINE);
            for (int64_t o = 0; o < panel.outputs; o++)
                memcpy(filled + o * steps * LINE, panel.weights + o * stride, stride);
            panel.weights = filled;
            panel.stride = steps * LINE;
        }
        const int64_t next = (task + 1) % panels * PANEL, next_outputs = min(PANEL, product.outputs - next);
        Prefetcher prefetcher = {weights + next * stride, weights + (next + next_outputs) * stride,
                                 ceil_div(PANEL, last_group - group)};
        if (task + 1 == end) prefetcher.end = prefetcher.next;
        for (int64_t g = group; g < last_group; g++) product.compute(tiles, panel, g, packed + g * steps * STEP, prefetcher);
    }
    free(filled);
}

void linear(const Product& product, const char* weights, int64_t threads) {
    const int64_t steps = ceil_div(product.in * BYTES, LINE);
    const int64_t panels = ceil_div(product.outputs, PANEL), groups = ceil_div(product.rows, TOKENS);
    // Blocks of equal size that the cache holds, and at least as many tasks as threads where there are tokens enough.
    const int64_t most = max(BLOCK_BYTES / (steps * STEP), 1);
    const int64_t wanted = ceil_div(threads, panels), needed = ceil_div(groups, most);
    const int64_t block = ceil_div(groups, min(max(needed, wanted), groups));
    const int64_t tasks = ceil_div(groups, block) * panels;
    char* packed = (char*)aligned_alloc(LINE, groups * steps * STEP);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < groups * steps; i++) product.pack(i / steps, i % steps, packed + i * STEP);
        const int64_t thread = omp_get_thread_num(), all = omp_get_num_threads();
        compute_tasks(product, weights, packed, block, tasks * thread / all, tasks * (thread + 1) / all);
    }
    free(packed);
}

}  // namespace

// x [rows, in], w [outputs, in], bias [outputs] or null, out [rows, outputs]; sums are in fp32, of which the
// instruction makes 0 where they are subnormal, as of the inputs
KERNEL(amx_linear_bf16)(const bf16* x, const bf16* w, const bf16* bias, bf16* out, int64_t rows, int64_t in,
                        int64_t outputs, int64_t threads) {
    linear(Product{x, bias, out, rows, in, outputs}, (const char*)w, threads);
}
REPLAYABLE(amx_linear_bf16)
