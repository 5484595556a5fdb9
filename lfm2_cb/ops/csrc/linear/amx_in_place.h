// x @ weight.T (+ bias) in bf16 for rows of x that the second-level cache holds by the processor's matrix units, with the
// weights as they lie in the module: csrc/linear/amx_bf16.h has the arithmetic.
//
// The product is taken as weight @ x.T: the weights' rows are then what a tile's rows are, and are loaded from where
// they are; x, which is small, is laid out once a call, as tiles of [16 pairs of inputs][16 tokens]. A tile of sums is
// [16 outputs][16 tokens], and is turned at the end (which took a third of the time at 256 rows as long as it was done in
// fp32).
//
// A thread takes panels of outputs, one after another, each for all tokens. While it computes with a panel it asks for
// the next, which follows it in memory, line by line: so memory is read on and on, however many tokens there are.
// (Measured on one core of a Xeon with AMX, the linears of a 350M step: taking the inputs in chunks, so that x stays in
// the first-level cache, is slower by a third, as memory is then read in short runs. Keeping half of a panel in the
// first-level cache and streaming the rest takes 3 to 10 % less from 64 rows on.)
#pragma once

#include "linear/amx_bf16.h"

namespace {
namespace amx_bf16::in_place {

constexpr int64_t KEPT = 32;  // steps of a panel's first outputs that stay in the first-level cache for all tokens

// `packed` is [tile of 16 tokens][step].
template <class Epilogue>
using Product = amx_bf16::Product<Epilogue>;

// A panel's rows of weights, of whole lines, in two tiles; its first result, and how many.
struct Panel {
    const char *weights, *others;
    int64_t stride, first, results;
};

// Tiles of sums, two of outputs by TOKENS of 16 tokens, 0 and 1 of the first outputs: += the panel by tiles of x.
template <int TOKENS>
inline void multiply(Tiles& tiles, const Panel& panel, const char* x, int64_t steps, Prefetcher& prefetcher) {
    const char *first = panel.weights, *second = panel.others, *others = x + steps * TILE_BYTES;
    for (int64_t s = 0; s < steps; s++) {
        s < KEPT ? tiles.load<4>(first + s * LINE, panel.stride) : tiles.stream<4>(first + s * LINE, panel.stride);
        tiles.stream<6>(x + s * TILE_BYTES, LINE);
        prefetcher.step();
        tiles.multiply_bf16<0, 4, 6>();
        tiles.stream<5>(second + s * LINE, panel.stride);
        prefetcher.step();
        tiles.multiply_bf16<2, 5, 6>();
        if constexpr (TOKENS == 2) {
            tiles.stream<7>(others + s * TILE_BYTES, LINE);
            tiles.multiply_bf16<1, 4, 7>();
            tiles.multiply_bf16<3, 5, 7>();
        }
        if (s % AWAKE == AWAKE - 1) tiles.keep_awake<6>();
    }
}

// Whether an epilogue takes results that are rounded and turned.
template <class Epilogue, class = void>
constexpr bool TAKES_RESULTS = false;
template <class Epilogue>
constexpr bool TAKES_RESULTS<Epilogue, std::void_t<decltype(&Epilogue::put)>> = true;

// Sums [2][16 outputs][16 tokens], `apart` values from one to the other, of the tokens from `token` on. They are rounded
// and put side by side by twos before they are turned, which then takes half the work.
template <class Epilogue>
void finish_rounded(const Product<Epilogue>& p, const Panel& panel, const float* sums, int64_t apart, int64_t token) {
    constexpr int64_t RESULTS = Product<Epilogue>::RESULTS;
    alignas(64) uint32_t pairs[TILE_ROWS][TILE_ROWS] = {};  // [two outputs][token]
    alignas(64) bf16 rows[TILE_ROWS][PANEL];
    for (int64_t i = 0; i < RESULTS / 2; i++)
        for (int64_t t = 0; t < TILE_ROWS; t += W) {
            const int64_t o = 2 * i, output = panel.first + o;
            const float* from = sums + o / TILE_ROWS * apart + o % TILE_ROWS * TILE_ROWS + t;
            const uvec both = rounded_pairs(p.epilogue.of_output(output, from, apart),
                                            p.epilogue.of_output(output + 1, from + TILE_ROWS, apart));
            memcpy(pairs[i] + t, &both, sizeof both);
        }
    transpose_tile(pairs, LINE, rows);
    for (int64_t t = 0; t < min(TILE_ROWS, p.x.rows - token); t++) {
        p.epilogue.put(token + t, panel.first, rows[t], panel.results);
        p.epilogue.prefetch(token + t, panel.first + RESULTS);  // written next
    }
}

// The same, turned in fp32.
template <class Epilogue>
void finish_sums(const Product<Epilogue>& p, const Panel& panel, const float* sums, int64_t apart, int64_t token) {
    alignas(64) float turned[TILE_ROWS][PANEL];
    for (int h = 0; h < 2; h++)
        transpose_tile(sums + h * apart, LINE, turned[0] + h * TILE_ROWS, PANEL * sizeof(float));
    for (int64_t t = 0; t < min(TILE_ROWS, p.x.rows - token); t++)
        p.epilogue(token + t, panel.first, turned[t], panel.results);
}

template <class Epilogue>
void finish(const Product<Epilogue>& p, const Panel& panel, const float* sums, int64_t apart, int64_t token) {
    if constexpr (TAKES_RESULTS<Epilogue>)
        finish_rounded(p, panel, sums, apart, token);
    else
        finish_sums(p, panel, sums, apart, token);
}

template <int TOKENS, class Epilogue>
void compute_group(Tiles& tiles, const Product<Epilogue>& p, const Panel& panel, int64_t token_tile,
                   Prefetcher& prefetcher) {
    const int64_t steps = p.x.steps();
    alignas(64) float sums[2][2][TILE_ROWS * TILE_ROWS];
    tiles.zero<0>();
    tiles.zero<1>();
    tiles.zero<2>();
    tiles.zero<3>();
    multiply<TOKENS>(tiles, panel, p.packed + token_tile * steps * TILE_BYTES, steps, prefetcher);
    tiles.store<0>(sums[0][0], LINE);
    tiles.store<2>(sums[1][0], LINE);
    if constexpr (TOKENS == 2) {
        tiles.store<1>(sums[0][1], LINE);
        tiles.store<3>(sums[1][1], LINE);
    }
    for (int t = 0; t < TOKENS; t++)
        finish(p, panel, sums[0][t], 2 * TILE_ROWS * TILE_ROWS, (token_tile + t) * TILE_ROWS);
}

template <class Epilogue>
void compute_panels(const Product<Epilogue>& p, Range range) {
    const int64_t stride = p.weights.stride(), steps = p.steps(), token_tiles = ceil_div(p.x.rows, TILE_ROWS);
    char* filled = nullptr;  // a panel with zeros where there are no weights; rows beyond the outputs do not matter
    Tiles tiles;
    for (int64_t i = range.begin; i < range.end; i++) {
        Panel panel = {p.weights.at(p.row(i, 0), 0), p.weights.at(p.row(i, 1), 0), stride, p.row(i, 0), p.results_of(i)};
        if (panel.results < p.RESULTS || stride % LINE) {
            if (!filled) filled = (char*)calloc(PANEL, steps * LINE);
            panel.weights = filled;
            panel.stride = steps * LINE;
            panel.others = filled + TILE_ROWS * panel.stride;
            for (int64_t tile = 0; tile < 2; tile++)
                for (int64_t o = 0; o < p.outputs_of(i, tile); o++)
                    memcpy(filled + (tile * TILE_ROWS + o) * panel.stride, p.weights.at(p.row(i, tile) + o, 0), stride);
        }
        Prefetcher prefetcher = {};
        if (i + 1 < range.end)
            prefetcher = Prefetcher::over(p.weights.at(p.row(i + 1, 0), 0), TILE_ROWS * stride, p.apart() * stride, 2,
                                          2 * ceil_div(token_tiles, 2) * steps);
        for (int64_t t = 0; t < token_tiles; t += 2)
            t + 1 < token_tiles ? compute_group<2>(tiles, p, panel, t, prefetcher)
                                : compute_group<1>(tiles, p, panel, t, prefetcher);
    }
    free(filled);
}

template <class Epilogue>
void linear(Product<Epilogue> p, int64_t threads) {
    const int64_t steps = p.steps(), token_tiles = ceil_div(p.x.rows, TILE_ROWS);
    char* packed = (char*)aligned_alloc(LINE, token_tiles * steps * TILE_BYTES);
    p.packed = packed;
    parallel_for(token_tiles * steps, worthwhile_threads(p.x.rows * p.x.columns, 16384, threads), [&](int64_t i) {
        p.x.transpose_tile_to(i / steps * TILE_ROWS, i % steps, packed + i * TILE_BYTES);
    });
    parallel_parts(p.panels(), threads, [&](Range part) { compute_panels(p, part); });
    free(packed);
}

}  // namespace amx_bf16::in_place
}  // namespace
