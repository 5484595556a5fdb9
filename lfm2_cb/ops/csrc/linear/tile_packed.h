// x @ weight.T (+ bias) in bf16 for many rows of x by tiles: csrc/linear/tile_bf16.h has the arithmetic.
//
// The weights, which lie in the module as they are, are packed on their way: a thread lays a block of panels out as
// tiles of [16 pairs of inputs][16 outputs], once a call, and keeps it in the second-level cache while x passes by in
// groups of 32 rows; half a group's first steps stay in the first-level cache for all panels of the block. Many inputs
// are taken in chunks, between which sums are kept as tiles. x is read as it lies, but for rows that do not fill a
// group. A tile of sums is then [16 rows][16 outputs], as the result is.
//
// (The sizes were measured on two cores of a Xeon with AMX and 2 MB of second-level cache each, ms for the linears of
// 2,048 tokens of a 350M model: products of 4,608 inputs in chunks of 24 steps 130, of 36 or 48 113, of 72 132. When x
// was laid out in tiles first, those of 1,024 inputs and outputs took 29 instead of 23. By vectors, on two cores of an
// AMD EPYC (Zen 5) with 1 MB of it each, 9,216 outputs of 1,024 inputs in blocks of 1, 2, 4 and 8 panels: 64 rows 1.67,
// 1.65, 1.63 and 1.78 ms, 1,024 rows 23.4, 22.8, 22.0 and 22.8; without prefetching the next block 2.0 and 22.6.)
#pragma once

#include "linear/tile_bf16.h"

namespace {
namespace tile_bf16::packed {

constexpr int64_t GROUP = 2 * TILE_ROWS;         // rows of x that are multiplied together
constexpr int64_t PAIR = 2 * TILE_BYTES;         // two tiles: a step of a panel
constexpr int64_t BLOCK_BYTES = 12 * 32 * PAIR;  // of packed weights
constexpr int64_t MOST_PANELS = Tiles::BY_VECTORS ? 4 : 12;  // of a block
constexpr int64_t WHOLE = 64, CHUNK = 36;        // more steps than WHOLE are taken in chunks
constexpr int64_t KEPT = 32;                     // tiles of a group that stay in the first-level cache
constexpr int64_t WAY = 4096;  // bytes: what lies so far apart has the same place in the first-level cache

// The rows of a group, from some step on: two rows of tiles, one step after another.
struct Group {
    const char *first, *second;
    int64_t stride, step;  // bytes from row to row, and from step to step

    // Asks for `count` steps of it, in so many steps of work.
    Prefetcher prefetcher(int64_t count, int64_t steps) const {
        return stride > LINE ? Prefetcher::over(first, count * step, stride, GROUP, steps)
                             : Prefetcher::over(first, count * step, second - first, 2, steps);
    }
};

// `packed` is [group][2][step], of groups that do not lie in x.values or are not read from there.
template <class Epilogue>
struct Product : tile_bf16::Product<Epilogue> {
    using tile_bf16::Product<Epilogue>::x;
    using tile_bf16::Product<Epilogue>::packed;
    using tile_bf16::Product<Epilogue>::steps;

    int64_t chunk() const { return steps() <= WHOLE ? steps() : ceil_div(steps(), ceil_div(steps(), CHUNK)); }
    int64_t block() const { return max(1, min(MOST_PANELS, BLOCK_BYTES / (chunk() * PAIR))); }
    int64_t groups() const { return ceil_div(x.rows, GROUP); }

    // Groups from this one on are packed: those that are not whole, or whose rows would drive each other out of the
    // cache.
    int64_t first_packed() const {
        return x.values && x.columns % STEP == 0 && x.stride() % WAY != 0 ? x.rows / GROUP : 0;
    }
    Group group(int64_t g, int64_t step) const {
        const int64_t first = first_packed();
        if (g < first) {
            const char* rows = x.at(g * GROUP, step);
            return {rows, rows + TILE_ROWS * x.stride(), x.stride(), LINE};
        }
        const char* tiles = packed + (2 * (g - first) * steps() + step) * TILE_BYTES;
        return {tiles, tiles + steps() * TILE_BYTES, LINE, TILE_BYTES};
    }
};

// The lines that some rows' results of a panel will be written to. One is prefetched a step: all at once they would be
// in the way of the tiles.
template <class Epilogue>
struct ResultLines {
    const Epilogue& epilogue;
    Range rows;
    int64_t output;

    [[gnu::always_inline]] void step() {
        if (rows.begin < rows.end) epilogue.prefetch(rows.begin++, output);
    }
};

// Sums of a group and a panel that are finished while the next are computed, a row a step (software pipelining): while
// the matrix units multiply, those for vectors have little to do. (Measured on one core of a Xeon with AMX, 2,048
// rows, ms with the sums finished at once and so: SwiGLU of 1,024 inputs 29.6 and 23.0, 4,608 inputs 14.5 and 13.3.)
template <class Epilogue>
struct PendingRows {
    const Epilogue& epilogue;
    const float* sums = nullptr;  // [row][PANEL]
    Range rows = {0, 0};
    int64_t output = 0, count = 0;

    void take(const float* all, Range its_rows, int64_t its_output, int64_t its_count) {
        sums = all;
        rows = its_rows;
        output = its_output;
        count = its_count;
    }
    [[gnu::always_inline]] void step() {
        if (rows.begin == rows.end) return;
        epilogue(rows.begin++, output, sums, count);
        sums += PANEL;
    }
    void finish() {
        while (rows.begin < rows.end) step();
    }
};

// What is multiplied before the sums are stored, or finished: some panels over a chunk of steps.
struct Block {
    Range panels, steps;
};

// The weights of the block that comes next, prefetched by vectors, so that packing them does not wait for memory. (The
// matrix units get this kernel for so many rows that packing takes little.) Of gates, and of their values.
struct NextWeights {
    Prefetcher first = {}, second = {};

    template <class Epilogue>
    static NextWeights over(const Product<Epilogue>& p, const Block& block, int64_t steps) {
        const auto rows_of = [&](int64_t tile) {
            return Prefetcher::over(p.weights.at(p.row(block.panels.begin, tile), block.steps.begin),
                                    block.steps.size() * LINE, p.weights.stride(), block.panels.size() * p.RESULTS,
                                    steps);
        };
        if (!Tiles::BY_VECTORS || block.panels.size() == 0) return {};
        return {rows_of(0), p.GATED ? rows_of(1) : Prefetcher{}};
    }

    [[gnu::always_inline]] void step() {
        if constexpr (Tiles::BY_VECTORS) {
            first.step();
            second.step();
        }
    }
};

// Tiles 0 ... 3 += two tiles of x by two of weights, over some steps. `kept`: whether the first rows of x are to stay
// in the first-level cache; `in_chunks`: whether there are sums to prefetch. (The tiles that come from the second-level
// cache are loaded first and before any product: 0 to 4 % quicker than each just before its use, SwiGLU of 2,048
// rows.)
template <bool kept, bool in_chunks, class Epilogue>
inline void multiply(Tiles& tiles, const Group& x, const char* weights, Range steps, Prefetcher& next_x,
                     Prefetcher& next_sums, NextWeights& next_weights, ResultLines<Epilogue>& results,
                     PendingRows<Epilogue>& pending) {
    const char *first = x.first + steps.begin * x.step, *second = x.second + steps.begin * x.step;
    weights += steps.begin * PAIR;
    for (int64_t s = steps.begin; s < steps.end; s++, first += x.step, second += x.step, weights += PAIR) {
        tiles.stream<6>(weights, LINE);
        tiles.stream<7>(weights + TILE_BYTES, LINE);
        kept ? tiles.load<4>(first, x.stride) : tiles.stream<4>(first, x.stride);
        tiles.stream<5>(second, x.stride);
        tiles.multiply_square_by_rows([&] { pending.step(); });
        next_x.step();
        if constexpr (in_chunks) next_sums.step();
        next_weights.step();
        results.step();
        if (s % AWAKE == AWAKE - 1) tiles.keep_awake<7>();
    }
}

// The tiles of sums, as the rows [GROUP][PANEL] that they are.
inline void store_rows(Tiles& tiles, float (*sums)[PANEL]) {
    tiles.store<0>(sums[0], sizeof *sums);
    tiles.store<1>(sums[0] + TILE_ROWS, sizeof *sums);
    tiles.store<2>(sums[TILE_ROWS], sizeof *sums);
    tiles.store<3>(sums[TILE_ROWS] + TILE_ROWS, sizeof *sums);
}

// A block, for some groups. packed_weights, sums [group][panel][SUMS]: room for them; next: the block that follows.
template <bool in_chunks, class Epilogue>
void compute_block(Tiles& tiles, const Product<Epilogue>& p, Range groups, const Block& block, const Block& next,
                   char* packed_weights, char* sums) {
    const auto [panels, steps] = block;
    const int64_t count = steps.size();
    const bool is_last = steps.end == p.steps();
    for (int64_t i = 0; i < panels.size() * 2; i++)
        for (int64_t s = 0; s < count; s++)
            p.weights.transpose_tile_to(p.row(panels.begin + i / 2, i % 2), steps.begin + s,
                                        packed_weights + (i / 2 * count + s) * PAIR + i % 2 * TILE_BYTES);
    NextWeights next_weights = NextWeights::over(p, next, groups.size() * panels.size() * count);
    alignas(64) float finished[GROUP][PANEL];
    PendingRows<Epilogue> pending = {p.epilogue};
    for (int64_t g = groups.begin; g < groups.end; g++) {
        const Group x = p.group(g, steps.begin), after = p.group(min(g + 1, groups.end - 1), steps.begin);
        Prefetcher next_x = after.prefetcher(count, panels.size() * count);
        for (int64_t i = 0; i < panels.size(); i++, sums += SUMS) {
            if (in_chunks && steps.begin > 0) {
                load_sums(tiles, sums);
            } else {
                tiles.zero<0>();
                tiles.zero<1>();
                tiles.zero<2>();
                tiles.zero<3>();
            }
            // (4,608 inputs, 1,024 outputs, 4,096 rows, two cores, ms: 11.7 so; prefetched all at once, and not before
            // they are first written, 12.9.)
            Prefetcher next_sums = {};
            if (in_chunks) next_sums = Prefetcher::over(sums + SUMS, sums + 2 * SUMS, count);
            const char* weights = packed_weights + i * count * PAIR;
            const int64_t panel = panels.begin + i, output = panel * p.RESULTS;
            const Range rows = {g * GROUP, is_last ? min((g + 1) * GROUP, p.x.rows) : 0};
            ResultLines<Epilogue> results = {p.epilogue, rows, output};
            multiply<true, in_chunks>(tiles, x, weights, {0, min(KEPT, count)}, next_x, next_sums, next_weights, results,
                                      pending);
            multiply<false, in_chunks>(tiles, x, weights, {min(KEPT, count), count}, next_x, next_sums, next_weights,
                                       results, pending);
            if (in_chunks && !is_last) {
                store_sums(tiles, sums);
                continue;
            }
            pending.finish();
            store_rows(tiles, finished);
            pending.take(finished[0], rows, output, p.results_of(panel));
        }
    }
    pending.finish();
}

template <class Epilogue>
void compute(const Product<Epilogue>& p, Range groups, Range panels) {
    const int64_t steps = p.steps(), chunk = p.chunk(), chunks = ceil_div(steps, chunk);
    const int64_t wide = ceil_div(panels.size(), p.block()), blocks = wide * chunks;
    const ScratchArray<char> packed_weights(p.block() * chunk * PAIR);
    const ScratchArray<char> sums(chunks > 1 ? groups.size() * p.block() * SUMS : 0);
    // All chunks of some panels, then those of the next.
    const auto block_at = [&](int64_t i) -> Block {
        if (i == blocks) return {{0, 0}, {0, 0}};
        const Range part = part_of(panels.size(), i / chunks, wide);
        return {{panels.begin + part.begin, panels.begin + part.end},
                {i % chunks * chunk, min((i % chunks + 1) * chunk, steps)}};
    };
    Tiles tiles;
    for (int64_t i = 0; i < blocks; i++) {
        const Block block = block_at(i), next = block_at(i + 1);
        sums ? compute_block<true>(tiles, p, groups, block, next, packed_weights, sums)
             : compute_block<false>(tiles, p, groups, block, next, packed_weights, sums);
    }
}

template <class Epilogue>
void linear(Product<Epilogue> p, int64_t threads) {
    const int64_t steps = p.steps(), groups = p.groups(), panels = p.panels();
    // Threads share the panels; where these are few, the rows as well.
    const int64_t row_parts = min(ceil_div(threads, panels), groups), panel_parts = ceil_div(threads, row_parts);
    const int64_t first_packed = p.first_packed(), to_pack = 2 * (groups - first_packed);  // rows of tiles
    const ScratchArray<char> packed(to_pack * steps * TILE_BYTES);
    p.packed = packed;
    parallel_for(to_pack, threads, [&](int64_t i) {
        for (int64_t s = 0; s < steps; s++)
            p.x.copy_tile((2 * first_packed + i) * TILE_ROWS, s, packed + (i * steps + s) * TILE_BYTES);
    });
    parallel_for(row_parts * panel_parts, threads, [&](int64_t task) {
        compute(p, part_of(groups, task % row_parts, row_parts), part_of(panels, task / row_parts, panel_parts));
    });
}

}  // namespace tile_bf16::packed
}  // namespace
