// x @ weight.T (+ bias) in bf16 for rows of x that the second-level cache holds by the processor's matrix units, with the
// weights as they lie in the module: csrc/linear/amx_bf16.h has the arithmetic.
//
// The product is taken as weight @ x.T: the weights' rows are then what a tile's rows are, and are loaded from where
// they are; x, which is small, is laid out once a call, as tiles of [16 pairs of inputs][16 tokens]. A tile of sums is
// [16 outputs][16 tokens], and is turned at the end.
//
// A thread takes panels of outputs, one after another, each for all tokens. While it computes with a panel it asks for
// the next, line by line, however many tokens there are, and makes results of the sums before.
//
// (Measured on one core of a Xeon with AMX, the linears of a 350M step, ms of thread CPU time. Keeping half of a panel in
// the first-level cache and streaming the rest takes 3 to 10 % less from 64 rows on. The next panel asked for as one run
// of memory, as 2, 4, 8 and 16 side by side: 64 rows 59, 58, 50, 49 and 47; 128 rows 84, 78, 74, 74 and 75; by two cores
// 16 runs are slower at 16 rows. Results made while the next group is multiplied: 256 rows 151 before, 120 so; for up to
// 64 rows they are made at once, as there is time while memory is waited for: 32 rows 42 and not 45.)
#pragma once

#include "linear/amx_bf16.h"

namespace {
namespace amx_bf16::in_place {

constexpr int64_t GROUP = 2 * TILE_ROWS;  // tokens that are multiplied together
constexpr int64_t WAITING = 2 * GROUP;    // with up to so many tokens memory is what is waited for
constexpr int64_t KEPT = 32;  // steps of a panel's first outputs that stay in the first-level cache for all tokens
constexpr int RUNS = 8;       // of memory that a panel is asked for in
using Prefetch = InterleavedPrefetcher<RUNS>;

// `packed` is [tile of 16 tokens][step].
template <class Epilogue>
using Product = amx_bf16::Product<Epilogue>;

// A panel's rows of weights, of whole lines, in two tiles; its first result, and how many.
struct Panel {
    const char *weights, *others;
    int64_t stride, first, results;

    // Asks for it in so many steps.
    Prefetch prefetcher(int64_t steps) const {
        Prefetch p = {{}, ceil_div(PANEL * stride, LINE * steps), PANEL / RUNS * stride};
        for (int run = 0; run < RUNS; run++) p.runs[run] = (run % 2 ? others : weights) + run / 2 * p.bytes;
        return p;
    }
};

// Whether an epilogue takes results that are rounded and turned.
template <class Epilogue, class = void>
constexpr bool TAKES_RESULTS = false;
template <class Epilogue>
constexpr bool TAKES_RESULTS<Epilogue, std::void_t<decltype(&Epilogue::put)>> = true;

// Makes results of a group's sums, a little each step while the next group is multiplied: vectors and matrices are
// computed side by side then.
//
// Sums are rounded and put side by side by twos before they are turned, which then takes half the work.
template <class Epilogue>
class Finisher {
  public:
    alignas(64) float sums[2][2][TILE_ROWS * TILE_ROWS] = {};  // [tile of outputs][tile of tokens][output][token]

    explicit Finisher(const Product<Epilogue>& product) : p(product) {}

    // Of the sums, which are there now: a panel's, of the tokens from `token` on.
    void begin(const Panel& panel, int64_t token) {
        first = panel.first;
        results = panel.results;
        tokens = {token, min(token + GROUP, p.x.rows)};
        if constexpr (TAKES_RESULTS<Epilogue>)
            next = 0;
        else
            turn_sums();
    }

    void step() {
        if constexpr (TAKES_RESULTS<Epilogue>) {
            if (next >= END) return;
            if (next < PAIRS)
                round(next);
            else if (next < PAIRS + TILES)
                turn(next - PAIRS);
            else
                put(next - PAIRS - TILES);
            next++;
        }
    }

    // What is left of it.
    void finish() {
        while (next < END) step();
    }

  private:
    static constexpr int64_t PAIRS = Product<Epilogue>::RESULTS / 2, TILES = 2 * PAIRS / TILE_ROWS;
    static constexpr int64_t END = PAIRS + TILES + TILE_ROWS;

    const Product<Epilogue>& p;
    int64_t first, results, next = END;
    Range tokens;
    alignas(64) uint32_t pairs[2 * PAIRS][TILE_ROWS];  // [tile of tokens][two outputs][token]
    alignas(64) bf16 turned[TILES * TILE_ROWS][PANEL];

    void round(int64_t pair) {
        constexpr int64_t APART = 2 * TILE_ROWS * TILE_ROWS;
        const int64_t o = 2 * pair, output = first + o;
        for (int64_t tile = 0; tile < 2; tile++)
            for (int64_t t = 0; t < TILE_ROWS; t += W) {
                const float* from = sums[o / TILE_ROWS][tile] + o % TILE_ROWS * TILE_ROWS + t;
                const uvec both = rounded_pairs(p.epilogue.of_output(output, from, APART),
                                                p.epilogue.of_output(output + 1, from + TILE_ROWS, APART));
                memcpy(pairs[tile * PAIRS + pair] + t, &both, sizeof both);
            }
    }

    void turn(int64_t tile) { transpose_tile(pairs[tile * TILE_ROWS], LINE, turned[tile * TILE_ROWS]); }

    // A token's results of either tile.
    void put(int64_t t) {
        for (int64_t tile = 0; tile < 2; tile++) {
            const int64_t token = tokens.begin + tile * TILE_ROWS + t, pair = tile * PAIRS;
            if (token >= tokens.end) return;
            const bf16* from = turned[pair / TILE_ROWS * TILE_ROWS + t] + 2 * (pair % TILE_ROWS);
            results == p.RESULTS ? p.epilogue.put(token, first, from, p.RESULTS)
                                 : p.epilogue.put(token, first, from, results);
            p.epilogue.prefetch(token, first + p.RESULTS);  // written next
        }
    }

    void turn_sums() {
        alignas(64) float rows[TILE_ROWS][PANEL];
        for (int tile = 0; tile < 2; tile++) {
            for (int h = 0; h < 2; h++)
                transpose_tile(sums[h][tile], LINE, rows[0] + h * TILE_ROWS, PANEL * sizeof(float));
            const int64_t token = tokens.begin + tile * TILE_ROWS;
            for (int64_t t = 0; t < min(TILE_ROWS, tokens.end - token); t++)
                p.epilogue(token + t, first, rows[t], results);
        }
    }
};

// Tiles of sums, two of outputs by TOKENS of 16 tokens, 0 and 1 of the first outputs: += the panel by tiles of x.
template <int TOKENS, class Epilogue>
inline void multiply(Tiles& tiles, const Panel& panel, const char* x, int64_t steps, int64_t awake,
                     Prefetch& prefetcher, Finisher<Epilogue>& finisher) {
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
        finisher.step();
        if (s % awake == awake - 1) tiles.keep_awake<6>();
    }
}

// (As a function of its own it has registers enough for the loop.)
template <int TOKENS, class Epilogue>
__attribute__((noinline)) void compute_group(Tiles& tiles, const Product<Epilogue>& p, const Panel& panel,
                                             int64_t token_tile, Prefetch& prefetcher,
                                             Finisher<Epilogue>& finisher) {
    const int64_t steps = p.x.steps();
    const bool is_waiting = p.x.rows <= WAITING;
    tiles.zero<0>();
    tiles.zero<1>();
    tiles.zero<2>();
    tiles.zero<3>();
    multiply<TOKENS>(tiles, panel, p.packed + token_tile * steps * TILE_BYTES, steps, is_waiting ? AWAKE / 2 : AWAKE,
                     prefetcher, finisher);
    finisher.finish();
    tiles.store<0>(finisher.sums[0][0], LINE);
    tiles.store<2>(finisher.sums[1][0], LINE);
    if constexpr (TOKENS == 2) {
        tiles.store<1>(finisher.sums[0][1], LINE);
        tiles.store<3>(finisher.sums[1][1], LINE);
    }
    finisher.begin(panel, token_tile * TILE_ROWS);
    if (is_waiting) finisher.finish();
}

template <class Epilogue>
void compute_panels(const Product<Epilogue>& p, Range range) {
    const int64_t stride = p.weights.stride(), steps = p.steps(), token_tiles = ceil_div(p.x.rows, TILE_ROWS);
    char* filled = nullptr;  // a panel with zeros where there are no weights; rows beyond the outputs do not matter
    Tiles tiles;
    Finisher<Epilogue> finisher(p);
    const auto panel_of = [&](int64_t i) -> Panel {
        return {p.weights.at(p.row(i, 0), 0), p.weights.at(p.row(i, 1), 0), stride, p.row(i, 0), p.results_of(i)};
    };
    for (int64_t i = range.begin; i < range.end; i++) {
        Panel panel = panel_of(i);
        if (panel.results < p.RESULTS || stride % LINE) {
            if (!filled) filled = (char*)calloc(PANEL, steps * LINE);
            panel.weights = filled;
            panel.stride = steps * LINE;
            panel.others = filled + TILE_ROWS * panel.stride;
            for (int64_t tile = 0; tile < 2; tile++)
                for (int64_t o = 0; o < p.outputs_of(i, tile); o++)
                    memcpy(filled + (tile * TILE_ROWS + o) * panel.stride, p.weights.at(p.row(i, tile) + o, 0), stride);
        }
        Prefetch prefetcher = {};
        if (i + 1 < range.end) prefetcher = panel_of(i + 1).prefetcher(2 * ceil_div(token_tiles, 2) * steps);
        for (int64_t t = 0; t < token_tiles; t += 2)
            t + 1 < token_tiles ? compute_group<2>(tiles, p, panel, t, prefetcher, finisher)
                                : compute_group<1>(tiles, p, panel, t, prefetcher, finisher);
    }
    finisher.finish();
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
