// x @ weight.T (+ bias) in bf16 by tiles (csrc/arch/tiles.h): what the kernels share.
//
// A sum is taken step by step, STEP inputs each, in the order of the inputs, and within a step as the instruction does
// it, whichever of the factors' tiles comes first. So a row's result depends neither on the kernel, nor on the rows
// beside it, nor on the number of threads.
#pragma once

#include "arch/tiles.h"
#include "core/epilogue.h"
#include "core/scratch.h"
#include "core/threads.h"

namespace {
namespace tile_bf16 {

constexpr int64_t PANEL = 2 * TILE_ROWS;  // outputs that are multiplied together
constexpr int64_t STEP = LINE / 2;        // inputs of a tile
constexpr int64_t AWAKE = 8;              // steps after which a tile is stored to no avail
constexpr int64_t SUMS = 4 * TILE_BYTES;  // bytes of a group's and a panel's sums, in tiles 0 ... 3

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

// to[four][row] = from[row][four], 4 bytes each, of 16 rows that are so many bytes apart.
inline void transpose_tile(const void* from, int64_t stride, void* to, int64_t to_stride = LINE) {
    for (int64_t row = 0; row < TILE_ROWS; row += W)
        for (int64_t four = 0; four < TILE_ROWS; four += W) {
            vec v[W];
            for (int i = 0; i < W; i++) memcpy(v + i, (const char*)from + (row + i) * stride + 4 * four, sizeof *v);
            transpose(v);
            for (int i = 0; i < W; i++) memcpy((char*)to + (four + i) * to_stride + 4 * row, v + i, sizeof *v);
        }
}

// A matrix of bf16 in tiles of 16 rows and STEP columns.
struct Matrix {
    const bf16* values;
    int64_t rows, columns;

    int64_t steps() const { return ceil_div(columns, STEP); }
    int64_t stride() const { return columns * 2; }  // bytes
    const char* at(int64_t row, int64_t step) const { return (const char*)(values + row * columns + step * STEP); }
    bool has_whole_tile(int64_t row, int64_t step) const {
        return row + TILE_ROWS <= rows && (step + 1) * STEP <= columns;
    }

    // The tile, [16 rows][STEP], with zeros beyond the matrix.
    void copy_tile(int64_t row, int64_t step, char* to) const {
        if (has_whole_tile(row, step)) {
            for (int64_t r = 0; r < TILE_ROWS; r++) memcpy(to + r * LINE, at(row + r, step), LINE);
            return;
        }
        memset(to, 0, TILE_BYTES);
        const int64_t bytes = min(STEP, columns - step * STEP) * 2;
        for (int64_t r = 0; r < min(TILE_ROWS, rows - row); r++) memcpy(to + r * LINE, at(row + r, step), bytes);
    }

    // The tile as [16 pairs of columns][16 rows], as the second factor is read.
    void transpose_tile_to(int64_t row, int64_t step, char* to) const {
        if (has_whole_tile(row, step)) return transpose_tile(at(row, step), stride(), to);
        alignas(64) char tile[TILE_BYTES];
        copy_tile(row, step, tile);
        transpose_tile(tile, LINE, to);
    }
};

// What is multiplied, by panels of two tiles of outputs, and what becomes of it. The second tile holds the outputs
// that follow the first one's or, with gates, their values.
template <class Epilogue>
struct Product {
    static constexpr bool GATED = TAKES_GATES<Epilogue>;
    static constexpr int64_t RESULTS = GATED ? TILE_ROWS : PANEL;  // of a panel

    Matrix x, weights;
    const char* packed;  // x in tiles, as the kernel lays them out
    Epilogue epilogue;

    int64_t steps() const { return x.steps(); }
    int64_t results() const { return GATED ? weights.rows / 2 : weights.rows; }
    int64_t panels() const { return ceil_div(results(), RESULTS); }
    int64_t results_of(int64_t panel) const { return min(RESULTS, results() - panel * RESULTS); }
    int64_t apart() const { return GATED ? results() : TILE_ROWS; }  // rows from a panel's first tile to its second
    int64_t row(int64_t panel, int64_t tile) const { return panel * RESULTS + tile * apart(); }
    int64_t outputs_of(int64_t panel, int64_t tile) const {
        return min(TILE_ROWS, results_of(panel) - (GATED ? 0 : tile * TILE_ROWS));
    }
};

}  // namespace tile_bf16
}  // namespace
