// x @ W.T for weights of 8 bits and many rows, by the processor's matrix units: csrc/linear/int8.h has the arithmetic,
// which is the same to the bit.
//
// Inputs are rounded into tiles of 16 rows and 64 inputs; 16 fours of inputs of a panel's weights lie as a tile reads
// them. A thread takes a block of panels, which the second-level cache holds, while the inputs pass by in groups of 32
// rows, whose first steps stay in the first-level cache; the next block is asked for meanwhile. Sums of a group of inputs
// are taken while the next group is multiplied. Behind the last row lies what makes the tile whole; it is computed with
// and not stored.
#pragma once

#include "arch/tiles.h"
#include "linear/int8.h"

namespace {
namespace int8::tiles {

static_assert(PANEL == TILE_ROWS && FOUR == LINE && GROUP % LINE == 0, "a tile holds a panel's weights of 64 inputs");

constexpr int64_t ROWS = 2 * TILE_ROWS, OUTPUTS = 2 * PANEL;  // that are multiplied together
constexpr int64_t PAIR = 2 * TILE_BYTES;                      // two tiles of inputs: a step of a group of rows
constexpr int64_t KEPT = 16;  // steps of inputs that stay in the first-level cache

// Bytes of a block of weights. (Measured on one core of a Xeon with AMX and 2 MB of second-level cache, linears of a 350M
// model, ms with 128 KB, 256 KB, 512 KB and 1 MB: 128 rows 68, 74, 77, -; 256 rows 122, 114, 121, -; 512 rows, without the
// head, -, 185, 166, 168; 2,048 rows -, 801, 629, 603.)
inline int64_t block_bytes(int64_t rows) { return min(max(rows, 128), 1024) << 10; }

// What one pair of panels is multiplied with: of the inputs' tiles and scales [groups][ROWS] those of 32 rows.
struct Rows {
    const char* inputs;
    const float* scales;
    int64_t first, count;
};

// A group of the row `from` into tiles. The last row sets the scales of what makes the tiles whole.
template <class Product, class Row>
void lay_out(const Product& p, const Row* from, int64_t row, int64_t group) {
    alignas(64) int8_t rounded[GROUP];
    float* scales = p.input_scales + (row / ROWS * p.groups() + group) * ROWS;
    scales[row % ROWS] = p.round(from, group, 0, rounded);
    if (row + 1 == p.rows)
        for (int64_t r = row % ROWS + 1; r < ROWS; r++) scales[r] = 0.0f;
    char* to = (char*)p.inputs + row / ROWS * ROWS * p.padded() + row % ROWS * LINE;
    for (int64_t k = 0; k < p.group_size(group); k += LINE)
        memcpy(to + (group * GROUP + k) / LINE * PAIR, rounded + k, LINE);
}

// Tiles 0 ... 3: the products of TILES tiles of rows and two panels over a group of inputs.
template <int TILES>
inline void multiply(Tiles& tiles, const char* x, const char* first, const char* second, Range steps,
                     Prefetcher& weights, Prefetcher& inputs) {
    tiles.zero<0>();
    tiles.zero<1>();
    tiles.zero<2>();
    tiles.zero<3>();
    for (int64_t s = steps.begin; s < steps.end; s++) {
        s < KEPT ? tiles.load<4>(x + s * PAIR, LINE) : tiles.stream<4>(x + s * PAIR, LINE);
        tiles.stream<6>(first + s * TILE_BYTES, LINE);
        tiles.multiply_bytes<0, 4, 6>();
        weights.step();
        tiles.stream<7>(second + s * TILE_BYTES, LINE);
        tiles.multiply_bytes<1, 4, 7>();
        inputs.step();
        if constexpr (TILES == 2) {
            s < KEPT ? tiles.load<5>(x + s * PAIR + TILE_BYTES, LINE) : tiles.stream<5>(x + s * PAIR + TILE_BYTES, LINE);
            tiles.multiply_bytes<2, 5, 6>();
            tiles.multiply_bytes<3, 5, 7>();
        }
    }
}

template <int TILES>
inline void store_products(const Tiles& tiles, int32_t (*to)[OUTPUTS]) {
    tiles.store<0>(to[0], sizeof to[0]);
    tiles.store<1>(to[0] + PANEL, sizeof to[0]);
    if constexpr (TILES == 2) {
        tiles.store<2>(to[TILE_ROWS], sizeof to[0]);
        tiles.store<3>(to[TILE_ROWS] + PANEL, sizeof to[0]);
    }
}

// totals += products * the scale of each row; `first`: from 0 on.
inline void add_group(const int32_t (*products)[OUTPUTS], const float* scales, int64_t rows, bool first,
                      float (*totals)[OUTPUTS]) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < OUTPUTS; o += W) {
            ivec product;
            memcpy(&product, products[r] + o, sizeof product);
            const vec before = first ? vec{} : load(totals[r] + o);
            store(totals[r] + o, add_scaled(before, product, scales[r]));
        }
}

template <int TILES, class Product>
void compute_pair(Tiles& tiles, const Product& p, const Rows& rows, int64_t panel, Prefetcher& weights,
                  Prefetcher& inputs) {
    const int64_t padded = p.padded(), groups = p.groups(), steps = padded / LINE;
    const char* first = (const char*)p.weights + panel * PANEL * padded;
    const char* second = panel + 1 < p.panels() ? first + PANEL * padded : first;
    alignas(64) int32_t products[2][ROWS][OUTPUTS];  // by turns
    alignas(64) float totals[ROWS][OUTPUTS];
    for (int64_t g = 0; g < groups; g++) {
        const int64_t step = g * (GROUP / LINE);
        multiply<TILES>(tiles, rows.inputs, first, second, {step, min(step + GROUP / LINE, steps)}, weights, inputs);
        store_products<TILES>(tiles, products[g % 2]);
        if (g > 0) add_group(products[(g - 1) % 2], rows.scales + (g - 1) * ROWS, TILES * TILE_ROWS, g == 1, totals);
    }
    const int64_t last = groups - 1, output = panel * PANEL;
    add_group(products[last % 2], rows.scales + last * ROWS, TILES * TILE_ROWS, last == 0, totals);
    for (int64_t r = 0; r < rows.count; r++)
        p.epilogue(rows.first + r, output, totals[r], min(OUTPUTS, p.outputs - output));
}

// Pairs of panels by groups of 32 rows.
template <class Product>
void compute(const Product& p, Range row_groups, Range pairs) {
    const int64_t padded = p.padded(), bytes = 2 * PANEL * padded, block = max(1, block_bytes(p.rows) / bytes);
    const int64_t weights_bytes = p.panels() * PANEL * padded;
    const char* weights = (const char*)p.weights;
    Tiles tiles;
    for (int64_t begin = pairs.begin; begin < pairs.end; begin += block) {
        const int64_t end = min(begin + block, pairs.end), steps = (end - begin) * (padded / LINE);
        const char* next_begin = weights + end * bytes;
        const char* next_end = weights + min(min(end + block, pairs.end) * bytes, weights_bytes);
        Prefetcher next = Prefetcher::over(next_begin, next_end, row_groups.size() * steps);
        for (int64_t g = row_groups.begin; g < row_groups.end; g++) {
            const char* inputs = (const char*)p.inputs + g * ROWS * padded;
            const Rows rows = {inputs, p.input_scales + g * p.groups() * ROWS, g * ROWS, min(ROWS, p.rows - g * ROWS)};
            const int64_t asked = g + 1 < row_groups.end ? ROWS * padded : 0;
            Prefetcher next_inputs = Prefetcher::over(inputs + ROWS * padded, inputs + ROWS * padded + asked, steps);
            for (int64_t pair = begin; pair < end; pair++)
                rows.count > TILE_ROWS ? compute_pair<2>(tiles, p, rows, 2 * pair, next, next_inputs)
                                       : compute_pair<1>(tiles, p, rows, 2 * pair, next, next_inputs);
        }
    }
}

// All rows and some of the panels, which begin at an even one.
template <class Product>
void multiply(const Product& p, Range panels) {
    compute(p, {0, ceil_div(p.rows, ROWS)}, {panels.begin / 2, ceil_div(panels.end, 2)});
}

template <class Product>
void linear(const Product& p, int64_t threads) {
    const int64_t pairs = ceil_div(p.panels(), 2), row_groups = ceil_div(p.rows, ROWS);
    // Threads share the panels; where these are few, the rows as well.
    const int64_t row_parts = min(ceil_div(threads, pairs), row_groups), parts = ceil_div(threads, row_parts);
    p.round_all(threads, [&](int64_t row, int64_t group) { lay_out(p, p.x + row * p.width, row, group); });
    parallel_for(row_parts * parts, threads, [&](int64_t task) {
        compute(p, part_of(row_groups, task % row_parts, row_parts), part_of(pairs, task / row_parts, parts));
    });
}

}  // namespace int8::tiles
}  // namespace
