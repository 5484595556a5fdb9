// x @ W.T for weights of 8 bits, by vectors: csrc/linear/int8.h has the arithmetic.
//
// A vector's lanes are outputs, so weights are loaded as they lie, four inputs of all lanes at a time, and the inputs
// are broadcast; nothing is summed across lanes. A tile of a few rows and one panel, whose sums are in registers, goes
// through all inputs. With few rows, memory is the limit and is read fastest in several streams: a tile then has
// several panels. With many rows, the panel stays in the cache for the next tiles, and the next panel is prefetched
// meanwhile.
#pragma once

#include "arch/dot.h"
#include "linear/int8.h"

namespace {
namespace int8::vectors {

constexpr int VECTORS = PANEL / W;  // of a panel
constexpr int ROWS = 10 / VECTORS;  // of a tile: its sums are ten registers, of 16
constexpr int64_t ROW_BLOCK = 80;   // rows whose inputs the second-level cache holds
constexpr int64_t STRETCH = 128;    // inputs between which a prefetcher makes a step
// Bytes that are prefetched ahead where memory is the limit. (Two cores of a Xeon with VNNI, linears of a 350M step,
// ms with 2, 3, 4, 6 and 8 KB: 5 rows 11.4, 9.6, 9.7, 9.4, 9.6; 8 rows 10.5, 10.2, 10.0, 9.9, 10.0.)
constexpr int64_t AHEAD = 4096;

// A group of the row `from`: inputs [rows][padded], scales [rows][groups].
template <class Product, class Row>
void lay_out(const Product& p, const Row* from, int64_t row, int64_t group) {
    uint8_t* to = (uint8_t*)p.inputs + row * p.padded() + group * GROUP;
    p.input_scales[row * p.groups() + group] = p.round(from, group, ZERO, to);
}

// A tile of TILE_ROWS rows and of panels `panel`, `panel + apart`, ... Without a prefetcher it prefetches its
// own weights, but for one row: there the processor's own prefetching is better.
template <int TILE_ROWS, int PANELS, class Product>
void compute_tile(const Product& p, int64_t row, int64_t panel, int64_t apart, Prefetcher* prefetcher) {
    constexpr int ALL = PANELS * VECTORS;
    const int64_t padded = p.padded(), groups = p.groups();
    const uint8_t* x = (const uint8_t*)p.inputs + row * padded;
    const int8_t* w = p.weights + panel * PANEL * padded;
    const int16_t* sums = p.sums + panel * groups * PANEL;
    const float* scales = p.input_scales + row * groups;
    float totals[TILE_ROWS][PANELS][PANEL] = {};
    for (int64_t g = 0; g < groups; g++) {
        Sums acc[TILE_ROWS][ALL];
        UNROLLED for (int v = 0; v < ALL; v++) {
            const int64_t from = v / VECTORS * apart * groups * PANEL + g * PANEL + v % VECTORS * W;
            UNROLLED for (int r = 0; r < TILE_ROWS; r++) acc[r][v] = zeros_of(sums + from);
        }
        for (int64_t k = g * GROUP, last = min(k + GROUP, padded); k < last;) {
            if (prefetcher) prefetcher->step();
            for (const int64_t end = min(k + STRETCH, last); k < end; k += 8) {
                if (TILE_ROWS > 1 && !prefetcher)
                    UNROLLED for (int j = 0; j < PANELS; j++) {
                        const int8_t* later = w + j * apart * PANEL * padded + k * PANEL + AHEAD / PANELS;
                        __builtin_prefetch(later);
                        __builtin_prefetch(later + FOUR);
                    }
                decltype(weights_for<TILE_ROWS, FOUR>(w)) weights[ALL];
                UNROLLED for (int v = 0; v < ALL; v++) {
                    const int64_t vector = v / VECTORS * apart * PANEL * padded + v % VECTORS * (4 * W);
                    weights[v] = weights_for<TILE_ROWS, FOUR>(w + vector + k * PANEL);
                }
                UNROLLED for (int r = 0; r < TILE_ROWS; r++) {
                    const Eight inputs = load_eight(x + r * padded + k);
                    UNROLLED for (int v = 0; v < ALL; v++)
                        acc[r][v] = multiply_add<FOUR>(acc[r][v], inputs, weights[v]);
                }
            }
        }
        UNROLLED for (int r = 0; r < TILE_ROWS; r++)
            UNROLLED for (int v = 0; v < ALL; v++) {
                float* to = totals[r][0] + v * W;
                store(to, add_scaled(load(to), acc[r][v], scales[r * groups + g]));
            }
    }
    for (int r = 0; r < TILE_ROWS; r++)
        for (int j = 0; j < PANELS; j++) p.finish(row + r, panel + j * apart, totals[r][j]);
}

// All rows, at most ROWS, and some of the panels.
template <int TILE_ROWS, int PANELS, class Product>
void compute_runs(const Product& p, Range panels) {
    const int64_t apart = panels.size() / PANELS;
    for (int64_t i = 0; i < apart; i++)
        compute_tile<TILE_ROWS, PANELS>(p, 0, panels.begin + i, apart, nullptr);
    for (int64_t i = panels.begin + apart * PANELS; i < panels.end; i++)
        compute_tile<TILE_ROWS, 1>(p, 0, i, 0, nullptr);
}

// How many panels a tile of few rows has. (Measured on two cores of a Xeon with VNNI, linears of a 350M step, ms: 5
// rows by one panel 17.6, by three 14.2, by four 15.1.)
constexpr int panels_beside(int rows) {
    const int few = 8 / (rows * VECTORS), more = SUMS_HELD / (rows * VECTORS);
    const int panels = few > 3 || few >= more ? few : more < 3 ? more : 3;
    return panels < 1 ? 1 : panels;
}

// One panel for some rows.
template <class Product>
void compute_panel(const Product& p, Range rows, int64_t panel) {
    const int64_t bytes = PANEL * p.padded(), tiles = ceil_div(rows.size(), ROWS);
    const char* next = (const char*)p.weights + (panel + 1) % p.panels() * bytes;
    Prefetcher prefetcher = Prefetcher::over(next, next + bytes, tiles * ceil_div(p.padded(), STRETCH));
    for_each_tile(rows, ROWS, [&](int64_t row, int64_t count) {
        with_constant<ROWS>(count, [&](auto tile_rows) {
            compute_tile<decltype(tile_rows)::value, 1>(p, row, panel, 0, &prefetcher);
        });
    });
}

// All rows and some of the panels.
template <class Product>
void multiply(const Product& p, Range panels) {
    if (p.rows <= ROWS)
        return with_constant<ROWS>(p.rows, [&](auto rows) {
            constexpr int n = decltype(rows)::value;
            compute_runs<n, panels_beside(n)>(p, panels);
        });
    for (int64_t row = 0; row < p.rows; row += ROW_BLOCK)
        for (int64_t panel = panels.begin; panel < panels.end; panel++)
            compute_panel(p, {row, min(row + ROW_BLOCK, p.rows)}, panel);
}

template <class Product>
void linear(const Product& p, int64_t threads) {
    const int64_t blocks = ceil_div(p.rows, ROW_BLOCK), panels = p.panels();
    p.round_all(threads, [&](int64_t row, int64_t group) { lay_out(p, p.x + row * p.width, row, group); });
    if (p.rows <= ROWS)
        parallel_parts(panels, threads, [&](Range part) { multiply(p, part); });
    else
        parallel_for(blocks * panels, threads, [&](int64_t task) {
            const int64_t row = task / panels * ROW_BLOCK;
            compute_panel(p, {row, min(row + ROW_BLOCK, p.rows)}, task % panels);
        });
}

}  // namespace int8::vectors
}  // namespace
