// x @ W.T for weights of 8 bits and many rows, by the processor's matrix units: csrc/linear/int8.h has the arithmetic, which is
// the same to the bit.
//
// The rounded inputs' rows are a tile's rows, and 16 fours of inputs of a panel's weights lie as a tile reads them. A
// step multiplies two tiles of 16 rows by two panels'. Behind the last row lies what makes the tile whole; it is
// computed with and not stored.
#pragma once

#include "arch/tiles.h"
#include "linear/int8.h"

namespace {
namespace int8::tiles {

static_assert(PANEL == TILE_ROWS && FOUR == LINE && GROUP % LINE == 0, "a tile holds a panel's weights of 64 inputs");

constexpr int64_t ROWS = 2 * TILE_ROWS;

// totals [16 rows][16 outputs] += products, by the scale of each row's inputs, `stride` apart.
void add_group(const int32_t* products, const int16_t* sums, const float* scales, int64_t stride,
               int64_t rows, float* totals) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < PANEL; o += W) {
            ivec product;
            memcpy(&product, products + r * PANEL + o, sizeof product);
            float* to = totals + r * PANEL + o;
            store(to, load(to) + __builtin_convertvector(product + zeros_of(sums + o), vec) * scales[r * stride]);
        }
}

// At most 32 rows and two panels.
template <class Product>
void compute_tile(Tiles& tiles, const Product& p, int64_t row, int64_t panel, Prefetcher& prefetcher) {
    const int64_t padded = p.padded(), groups = p.groups();
    const int64_t other = panel + 1 < p.panels() ? panel + 1 : panel;
    const uint8_t* x = p.inputs + row * padded;
    const int8_t *first = p.weights + panel * PANEL * padded, *second = p.weights + other * PANEL * padded;
    alignas(64) int32_t products[2][2][TILE_ROWS * PANEL];
    float totals[2][2][TILE_ROWS * PANEL] = {};
    for (int64_t g = 0; g < groups; g++) {
        prefetcher.step();
        tiles.zero<0>();
        tiles.zero<1>();
        tiles.zero<2>();
        tiles.zero<3>();
        for (int64_t k = g * GROUP, end = min(k + GROUP, padded); k < end; k += LINE) {
            tiles.load<4>(x + k, padded);
            tiles.load<6>(first + k * PANEL, LINE);
            tiles.multiply_bytes<0, 4, 6>();
            tiles.load<7>(second + k * PANEL, LINE);
            tiles.multiply_bytes<1, 4, 7>();
            tiles.load<5>(x + TILE_ROWS * padded + k, padded);
            tiles.multiply_bytes<2, 5, 6>();
            tiles.multiply_bytes<3, 5, 7>();
        }
        tiles.store<0>(products[0][0], LINE);
        tiles.store<1>(products[0][1], LINE);
        tiles.store<2>(products[1][0], LINE);
        tiles.store<3>(products[1][1], LINE);
        for (int64_t a = 0; a < 2; a++)
            for (int64_t b = 0; b < 2; b++)
                add_group(products[a][b], p.sums + ((b ? other : panel) * groups + g) * PANEL,
                          p.input_scales + (row + a * TILE_ROWS) * groups + g, groups, min(TILE_ROWS, p.rows - row - a * TILE_ROWS),
                          totals[a][b]);
    }
    for (int64_t r = 0; r < min(ROWS, p.rows - row); r++)
        for (int64_t b = 0; b <= other - panel; b++)
            p.finish(row + r, panel + b, totals[r / TILE_ROWS][b] + r % TILE_ROWS * PANEL);
}

// Blocks of 32 rows, and a pair of panels.
template <class Product>
void compute_pair(Tiles& tiles, const Product& p, Range blocks, int64_t pair) {
    const int64_t bytes = 2 * PANEL * p.padded(), last = ceil_div(p.panels(), 2) - 1;
    const char *weights = (const char*)p.weights, *end = weights + PANEL * p.padded() * p.panels();
    const char* next = min(pair + 1, last) * bytes + weights;
    const char* next_end = end - next < bytes ? end : next + bytes;
    Prefetcher prefetcher = Prefetcher::over(next, next_end, blocks.size() * p.groups());
    for (int64_t i = blocks.begin; i < blocks.end; i++) compute_tile(tiles, p, i * ROWS, 2 * pair, prefetcher);
}

// All rows and some of the panels, which begin at an even one.
template <class Product>
void multiply(const Product& p, Range panels) {
    Tiles tiles;
    for (int64_t pair = panels.begin / 2; pair < ceil_div(panels.end, 2); pair++)
        compute_pair(tiles, p, {0, ceil_div(p.rows, ROWS)}, pair);
}

template <class Product>
void linear(const Product& p, int64_t threads) {
    const int64_t pairs = ceil_div(p.panels(), 2), tiles_of_rows = ceil_div(p.rows, ROWS);
    p.round_all(threads);
    // Blocks of rows, and in each the pairs of panels: as many rows as leave every thread something to do.
    const int64_t blocks = min(ceil_div(threads, pairs), tiles_of_rows), block = ceil_div(tiles_of_rows, blocks);
    parallel_parts(blocks * pairs, threads, [&](Range tasks) {
        Tiles tiles;
        for (int64_t task = tasks.begin; task < tasks.end; task++) {
            const int64_t begin = task / pairs * block;
            compute_pair(tiles, p, {begin, min(begin + block, tiles_of_rows)}, task % pairs);
        }
    });
}

}  // namespace int8::tiles
}  // namespace
