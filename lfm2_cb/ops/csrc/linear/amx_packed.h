// x @ weight.T (+ bias) in bf16 for many rows of x by the processor's matrix units: csrc/linear/amx_bf16.h has the
// arithmetic.
//
// The weights, which lie in the module as they are, are packed on their way: a thread lays a block of panels out as
// tiles of [16 pairs of inputs][16 outputs], once a call, and keeps it in the second-level cache while x passes by in
// groups of 32 rows; a group's first steps stay in the first-level cache for all panels of the block. Many inputs are
// taken in chunks, between which sums are kept as tiles. x is laid out once a call, too, as tiles that are copies of it.
// A tile of sums is then [16 rows][16 outputs], as the result is.
//
// (The sizes were measured on one core of a Xeon with AMX and 2 MB of second-level cache: linears of 2,048 rows take as
// long as with stored packed weights, of 512 rows less.)
#pragma once

#include "linear/amx_bf16.h"

namespace {
namespace amx_bf16::packed {

constexpr int64_t GROUP = 2 * TILE_ROWS;       // rows of x that are multiplied together
constexpr int64_t PAIR = 2 * TILE_BYTES;       // two tiles: a step of a group or of a panel
constexpr int64_t BLOCK_BYTES = 12 * 32 * PAIR;  // of packed weights
constexpr int64_t MOST_PANELS = 12;            // of a block
constexpr int64_t WHOLE = 64, CHUNK = 24;      // more steps than WHOLE are taken in chunks
constexpr int64_t KEPT = 18;                   // steps of a group that stay in the first-level cache
constexpr int64_t SUMS = 4 * TILE_BYTES;       // of a group and a panel

template <class Epilogue>
struct Product {
    Matrix x, weights;
    const char* packed;  // x in tiles: [group][step][2 tiles]
    Epilogue epilogue;

    int64_t steps() const { return x.steps(); }
    int64_t chunk() const { return steps() <= WHOLE ? steps() : CHUNK; }
    int64_t block() const { return max(1, min(MOST_PANELS, BLOCK_BYTES / (chunk() * PAIR))); }
    int64_t panels() const { return ceil_div(weights.rows, PANEL); }
    int64_t groups() const { return ceil_div(x.rows, GROUP); }
};

// Tiles 0 ... 3 += two tiles of x by two of weights. `kept`: whether x is to stay in the first-level cache.
template <bool kept>
inline void multiply(Tiles& tiles, const char* x, const char* weights, Range steps, Prefetcher& prefetcher) {
    x += steps.begin * PAIR;
    weights += steps.begin * PAIR;
    for (int64_t s = steps.begin; s < steps.end; s++, x += PAIR, weights += PAIR) {
        kept ? tiles.load<4>(x, LINE) : tiles.stream<4>(x, LINE);
        tiles.stream<6>(weights, LINE);
        tiles.multiply_bf16<0, 4, 6>();
        tiles.stream<7>(weights + TILE_BYTES, LINE);
        tiles.multiply_bf16<1, 4, 7>();
        kept ? tiles.load<5>(x + TILE_BYTES, LINE) : tiles.stream<5>(x + TILE_BYTES, LINE);
        tiles.multiply_bf16<2, 5, 6>();
        tiles.multiply_bf16<3, 5, 7>();
        prefetcher.step();
        if (s % AWAKE == AWAKE - 1) tiles.keep_awake<7>();
    }
}

inline void load_sums(Tiles& tiles, const char* sums) {
    tiles.stream<0>(sums, LINE);
    tiles.stream<1>(sums + TILE_BYTES, LINE);
    tiles.stream<2>(sums + 2 * TILE_BYTES, LINE);
    tiles.stream<3>(sums + 3 * TILE_BYTES, LINE);
}

inline void store_sums(Tiles& tiles, char* sums) {
    tiles.store<0>(sums, LINE);
    tiles.store<1>(sums + TILE_BYTES, LINE);
    tiles.store<2>(sums + 2 * TILE_BYTES, LINE);
    tiles.store<3>(sums + 3 * TILE_BYTES, LINE);
}

// Asks for the lines that a group's results of a panel will be written to.
template <class Epilogue>
void prefetch_results(const Product<Epilogue>& p, int64_t group, int64_t panel) {
    const int64_t row = group * GROUP;
    for (int64_t r = 0; r < min(GROUP, p.x.rows - row); r++) p.epilogue.prefetch(row + r, panel * PANEL);
}

// The sums of a group and a panel, as the rows that they are.
template <class Epilogue>
void finish(Tiles& tiles, const Product<Epilogue>& p, int64_t group, int64_t panel) {
    alignas(64) float sums[GROUP][PANEL];
    tiles.store<0>(sums[0], sizeof sums[0]);
    tiles.store<1>(sums[0] + TILE_ROWS, sizeof sums[0]);
    tiles.store<2>(sums[TILE_ROWS], sizeof sums[0]);
    tiles.store<3>(sums[TILE_ROWS] + TILE_ROWS, sizeof sums[0]);
    const int64_t row = group * GROUP, output = panel * PANEL;
    for (int64_t r = 0; r < min(GROUP, p.x.rows - row); r++)
        p.epilogue(row + r, output, sums[r], min(PANEL, p.weights.rows - output));
}

// A block's panels over a chunk of steps, for some groups. scratch: the packed weights; sums [group][panel][SUMS].
template <class Epilogue>
void compute_chunk(Tiles& tiles, const Product<Epilogue>& p, Range groups, Range panels, Range steps, char* scratch,
                   char* sums) {
    const int64_t count = steps.size(), all = p.steps();
    for (int64_t i = 0; i < panels.size() * 2; i++)
        for (int64_t s = 0; s < count; s++)
            p.weights.transpose_tile_to(panels.begin * PANEL + i * TILE_ROWS, steps.begin + s,
                                        scratch + (i / 2 * count + s) * PAIR + i % 2 * TILE_BYTES);
    for (int64_t g = groups.begin; g < groups.end; g++) {
        const char *x = p.packed + (g * all + steps.begin) * PAIR, *next = x + all * PAIR;
        const int64_t asked = g + 1 < groups.end ? count * PAIR : 0;
        Prefetcher prefetcher = Prefetcher::over(next, next + asked, panels.size() * count);
        for (int64_t i = 0; i < panels.size(); i++, sums += SUMS) {
            if (steps.begin > 0) {
                load_sums(tiles, sums);
            } else {
                tiles.zero<0>();
                tiles.zero<1>();
                tiles.zero<2>();
                tiles.zero<3>();
            }
            if (steps.end == all) prefetch_results(p, g, panels.begin + i);
            const char* weights = scratch + i * count * PAIR;
            multiply<true>(tiles, x, weights, {0, min(KEPT, count)}, prefetcher);
            multiply<false>(tiles, x, weights, {min(KEPT, count), count}, prefetcher);
            steps.end == all ? finish(tiles, p, g, panels.begin + i) : store_sums(tiles, sums);
        }
    }
}

template <class Epilogue>
void compute(const Product<Epilogue>& p, Range groups, Range panels) {
    const int64_t steps = p.steps(), chunk = p.chunk(), block = p.block();
    char* scratch = (char*)aligned_alloc(LINE, block * chunk * PAIR);
    char* sums = chunk < steps ? (char*)aligned_alloc(LINE, groups.size() * block * SUMS) : nullptr;
    Tiles tiles;
    for (int64_t first = panels.begin; first < panels.end; first += block)
        for (int64_t step = 0; step < steps; step += chunk)
            compute_chunk(tiles, p, groups, {first, min(first + block, panels.end)}, {step, min(step + chunk, steps)},
                          scratch, sums);
    free(sums);
    free(scratch);
}

template <class Epilogue>
void linear(Product<Epilogue> p, int64_t threads) {
    const int64_t steps = p.steps(), groups = p.groups(), panels = p.panels();
    // Threads share the panels; where these are few, the rows as well.
    const int64_t row_parts = min(ceil_div(threads, panels), groups), panel_parts = ceil_div(threads, row_parts);
    char* packed = (char*)aligned_alloc(LINE, groups * steps * PAIR);
    p.packed = packed;
    parallel_for(groups * 2, threads, [&](int64_t tile) {
        for (int64_t s = 0; s < steps; s++)
            p.x.copy_tile(tile * TILE_ROWS, s, packed + (tile / 2 * steps + s) * PAIR + tile % 2 * TILE_BYTES);
    });
    parallel_for(row_parts * panel_parts, threads, [&](int64_t task) {
        compute(p, part_of(groups, task % row_parts, row_parts), part_of(panels, task / row_parts, panel_parts));
    });
    free(packed);
}

}  // namespace amx_bf16::packed
}  // namespace
