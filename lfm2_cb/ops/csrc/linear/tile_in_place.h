// x @ weight.T (+ bias) in bf16 for up to some hundred rows of x by tiles, with the weights as they lie in the module:
// csrc/linear/tile_bf16.h has the arithmetic.
//
// The product is taken as weight @ x.T: the weights' rows are then what a tile's rows are, and are loaded from where
// they are; x, which is small, is laid out once a call, as tiles of [16 pairs of inputs][16 tokens]. A tile of sums is
// [16 outputs][16 tokens], and is turned at the end.
//
// A thread takes panels of outputs, one after another, each for all tokens. While it computes with a panel it
// prefetches the next, line by line, however many tokens there are, and finishes the results of the panel before. If x
// does not fit the second-level cache, the steps are taken in chunks, between which sums are kept as tiles.
//
// (Measured on a Xeon with AMX, the linears of a 350M step but the head, ms. By two cores, from huge pages: the next
// panel prefetched in 2, 4, 8 and 16 runs of memory side by side, 32 rows 22.4, 20.7, 20.0 and 20.3; 64 rows 26.9,
// 24.5, 24.0 and 24.1; 128 rows 36.2, 36.1, 35.1 and 36.8. By one core, from pages of 4 KB, where memory takes longer:
// keeping half of a panel in the first-level cache and streaming the rest takes 3 to 10 % less from 64 rows on.
// Results made while the next group is multiplied: 256 rows 151 before, 120 so; for up to 64 rows they are made at
// once, as there is time while memory is waited for: 32 rows 42 and not 45. Chunks, products of 4,608 inputs: 256 rows
// 53 without, 40 with them, 36 when the next chunk of x is prefetched; chunks of 400 to 800 tiles are within 4 %.)
#pragma once

#include "linear/tile_bf16.h"

namespace {
namespace tile_bf16::in_place {

constexpr int64_t GROUP = 2 * TILE_ROWS;  // tokens that are multiplied together
constexpr int64_t WAITING = 2 * GROUP;    // with up to so many tokens memory is what is waited for
constexpr int64_t KEPT = 32;  // steps of a panel's first outputs that stay in the first-level cache for all tokens
constexpr int RUNS = 8;       // of memory that a panel is prefetched in
constexpr int64_t WHOLE = 1024, CHUNK = 640;  // tiles of x: with more than WHOLE the steps are taken in chunks
constexpr int64_t BLOCK = 16;                 // panels that are taken for a chunk before the next one
using Prefetch = InterleavedPrefetcher<RUNS>;

// `packed` is [tile of 16 tokens][step].
template <class Epilogue>
using Product = tile_bf16::Product<Epilogue>;

// A panel's rows of weights, of whole lines, in two tiles, over some steps; its first result, and how many.
struct Panel {
    const char *weights, *others;
    int64_t stride, first, results;
    Range steps;

    // Prefetches it in so many steps of work.
    Prefetch prefetcher(int64_t work) const {
        const int64_t rows = PANEL / RUNS, bytes = steps.size() * LINE;
        Prefetch p = {{}, ceil_div(PANEL * steps.size(), work), bytes, stride, rows};
        if (bytes >= stride) p.bytes = rows * stride, p.pieces = 1;
        for (int run = 0; run < RUNS; run++) p.runs[run] = (run % 2 ? others : weights) + run / 2 * rows * stride;
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

// Work of another kind that a thread does between products.
struct NoOther {
    void step() {}     // each step
    void advance() {}  // after each panel
};

// What is done beside the products, a little each step.
template <class Epilogue, class Other>
struct Beside {
    Finisher<Epilogue> finisher;
    Other& other;
    Prefetch weights = {};
    Prefetcher x = {};
};

// Tiles of sums, two of outputs by TOKENS of 16 tokens, 0 and 1 of the first outputs: += the panel by tiles of x.
// All four are loaded before any is multiplied, those of x first. (Each loaded just before its use, SwiGLU of 128 and
// 256 rows took 3 to 5 % longer on one core.)
template <int TOKENS, bool IN_CHUNKS, class Epilogue, class Other>
inline void multiply(Tiles& tiles, const Panel& panel, const char* x, const char* others, int64_t awake,
                     Beside<Epilogue, Other>& beside) {
    const char *first = panel.weights, *second = panel.others;
    for (int64_t s = 0; s < panel.steps.size(); s++) {
        tiles.stream<6>(x + s * TILE_BYTES, LINE);
        if constexpr (TOKENS == 2) tiles.stream<7>(others + s * TILE_BYTES, LINE);
        s < KEPT ? tiles.load<4>(first + s * LINE, panel.stride) : tiles.stream<4>(first + s * LINE, panel.stride);
        tiles.stream<5>(second + s * LINE, panel.stride);
        beside.weights.step();
        if constexpr (TOKENS == 2) {
            tiles.multiply_square_by_columns([&] {
                beside.weights.step();
                beside.other.step();
            });
            beside.other.step();
        } else {
            tiles.multiply_bf16<0, 4, 6>();
            tiles.multiply_bf16<2, 5, 6>();
            beside.weights.step();
            beside.other.step();
        }
        if constexpr (IN_CHUNKS) beside.x.step();
        beside.finisher.step();
        if (s % awake == awake - 1) tiles.keep_awake<6>();
    }
}

// A panel by a group of tokens. sums [SUMS]: those of the steps before, and where these go if there are more.
// (As a function of its own it has registers enough for the loop.)
template <int TOKENS, bool IN_CHUNKS, class Epilogue, class Other>
__attribute__((noinline)) void compute_group(Tiles& tiles, const Product<Epilogue>& p, const Panel& panel,
                                             int64_t token_tile, char* sums, Beside<Epilogue, Other>& beside) {
    const int64_t steps = p.steps();
    const bool is_waiting = p.x.rows <= WAITING;
    if (IN_CHUNKS && panel.steps.begin > 0) {
        load_sums(tiles, sums);
        prefetch_lines<2>(sums + SUMS, SUMS);
    } else {
        tiles.zero<0>();
        tiles.zero<1>();
        tiles.zero<2>();
        tiles.zero<3>();
    }
    const char* x = p.packed + (token_tile * steps + panel.steps.begin) * TILE_BYTES;
    multiply<TOKENS, IN_CHUNKS>(tiles, panel, x, x + steps * TILE_BYTES, is_waiting ? AWAKE / 2 : AWAKE, beside);
    if (IN_CHUNKS && panel.steps.end < steps) return store_sums(tiles, sums);
    beside.finisher.finish();
    store_sums(tiles, (char*)beside.finisher.sums);
    beside.finisher.begin(panel, token_tile * TILE_ROWS);
    if (is_waiting) beside.finisher.finish();
}

// A panel as it lies in the module.
template <class Epilogue>
Panel panel_of(const Product<Epilogue>& p, int64_t i, Range steps) {
    return {p.weights.at(p.row(i, 0), steps.begin), p.weights.at(p.row(i, 1), steps.begin), p.weights.stride(),
            p.row(i, 0), p.results_of(i), steps};
}

template <class Epilogue>
bool is_whole(const Product<Epilogue>& p, int64_t i) {
    return p.results_of(i) == p.RESULTS && p.weights.stride() % LINE == 0;
}

// The same with zeros where there are no weights, in `filled`; rows beyond the outputs do not matter.
template <class Epilogue>
Panel filled_panel(const Product<Epilogue>& p, int64_t i, Range steps, char* filled) {
    const int64_t stride = steps.size() * LINE, bytes = min(stride, p.weights.stride() - steps.begin * LINE);
    for (int64_t tile = 0; tile < 2; tile++)
        for (int64_t o = 0; o < p.outputs_of(i, tile); o++) {
            char* row = filled + (tile * TILE_ROWS + o) * stride;
            memcpy(row, p.weights.at(p.row(i, tile) + o, steps.begin), bytes);
            memset(row + bytes, 0, stride - bytes);
        }
    return {filled, filled + TILE_ROWS * stride, stride, p.row(i, 0), p.results_of(i), steps};
}

// Some panels over chunks of steps: all panels for a chunk, then for the next.
template <bool IN_CHUNKS, class Epilogue, class Other>
void compute_block(Tiles& tiles, const Product<Epilogue>& p, Range panels, int64_t chunk, char* filled, char* sums,
                   Beside<Epilogue, Other>& beside) {
    const int64_t steps = p.steps(), token_tiles = ceil_div(p.x.rows, TILE_ROWS), groups = ceil_div(token_tiles, 2);
    const int64_t count = panels.size(), pieces = count * ceil_div(steps, chunk), work = groups * chunk;
    const auto steps_of = [&](int64_t piece) -> Range {
        return {piece / count * chunk, min((piece / count + 1) * chunk, steps)};
    };
    for (int64_t piece = 0; piece < pieces; piece++) {
        const int64_t i = piece % count, next = piece + 1;
        const Range part = steps_of(piece), after = {part.end, min(part.end + chunk, steps)};
        const Panel panel = is_whole(p, panels.begin + i) ? panel_of(p, panels.begin + i, part)
                                                          : filled_panel(p, panels.begin + i, part, filled);
        beside.weights = {};
        if (next < pieces)
            beside.weights = panel_of(p, panels.begin + next % count, steps_of(next)).prefetcher(2 * work);
        if (IN_CHUNKS && i == count / 2 && after.size() > 0)  // half of the panels are enough for the next chunk of x
            beside.x = Prefetcher::over(p.packed + after.begin * TILE_BYTES, after.size() * TILE_BYTES,
                                        steps * TILE_BYTES, token_tiles, (count - i) * work);
        for (int64_t t = 0; t < token_tiles; t += 2) {
            char* at = sums + (i * groups + t / 2) * SUMS;
            t + 1 < token_tiles ? compute_group<2, IN_CHUNKS>(tiles, p, panel, t, at, beside)
                                : compute_group<1, IN_CHUNKS>(tiles, p, panel, t, at, beside);
        }
        beside.other.advance();
    }
}

template <class Epilogue, class Other>
void compute_panels(const Product<Epilogue>& p, Range range, Other& other) {
    const int64_t steps = p.steps(), groups = ceil_div(p.x.rows, GROUP), size = 2 * groups * steps;
    const int64_t chunk = size <= WHOLE ? steps : ceil_div(steps, ceil_div(size, CHUNK));
    const int64_t block = chunk < steps ? BLOCK : range.size();
    const ScratchArray<char> filled(is_whole(p, range.end - 1) ? 0 : PANEL * chunk * LINE);
    const ScratchArray<char> sums(chunk < steps ? (block * groups + 1) * SUMS : 0);
    Tiles tiles;
    Beside<Epilogue, Other> beside = {Finisher<Epilogue>(p), other};
    for_each_tile(range, block, [&](int64_t first, int64_t count) {
        chunk < steps ? compute_block<true>(tiles, p, {first, first + count}, chunk, filled, sums, beside)
                      : compute_block<false>(tiles, p, {first, first + count}, chunk, filled, sums, beside);
    });
    beside.finisher.finish();
}

template <class Epilogue>
void compute_panels(const Product<Epilogue>& p, Range range) {
    NoOther other;
    compute_panels(p, range, other);
}

// Room for x in tiles.
template <class Epilogue>
int64_t packed_size(const Product<Epilogue>& p) {
    return ceil_div(p.x.rows, TILE_ROWS) * p.steps() * TILE_BYTES;
}

template <class Epilogue>
void pack_inputs(const Product<Epilogue>& p, char* packed, int64_t threads) {
    const int64_t steps = p.steps(), tiles = ceil_div(p.x.rows, TILE_ROWS) * steps;
    parallel_for(tiles, worthwhile_threads(p.x.rows * p.x.columns, 16384, threads), [&](int64_t i) {
        p.x.transpose_tile_to(i / steps * TILE_ROWS, i % steps, packed + i * TILE_BYTES);
    });
}

// Steps of a thread's panels.
template <class Epilogue>
int64_t steps_of(const Product<Epilogue>& p, Range panels) {
    return panels.size() * ceil_div(p.x.rows, GROUP) * p.steps() * 2;
}

template <class Epilogue>
void linear(Product<Epilogue> p, int64_t threads) {
    const ScratchArray<char> packed(packed_size(p));
    pack_inputs(p, packed, threads);
    p.packed = packed;
    parallel_parts(p.panels(), threads, [&](Range part) { compute_panels(p, part); });
}

}  // namespace tile_bf16::in_place
}  // namespace
