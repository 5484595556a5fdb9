// The experts of a layer in bf16 by tiles: csrc/linear/tile_bf16.h.
#include "experts/by_vectors.h"
#include "linear/tile_in_place.h"
#include "linear/tile_packed.h"

namespace {

// By the number of rows: up to `few` by vectors, up to `some` with the weights in place, more with them packed.
struct ByTiles {
    using T = bf16;
    static constexpr int64_t ROWS = 2 * TILE_ROWS, OUTPUTS = tile_bf16::PANEL;
    FewRows<bf16> by_few;
    int64_t few, some;

    int64_t steps() const { return ceil_div(by_few.in, tile_bf16::STEP); }
    int64_t bytes(int64_t rows) const {
        return rows <= few ? by_few.bytes(rows) : ceil_div(rows, ROWS) * 2 * steps() * TILE_BYTES;
    }

    void lay_out(const Inputs<bf16>& inputs, int64_t row, char* to) const {
        const int64_t end = min(row + ROWS, inputs.count);
        if (inputs.count <= few) {
            for (; row < end; row++) by_few.lay_out(inputs, row, to);
            return;
        }
        const bool in_place = inputs.count <= some;
        for (int64_t tile = row / TILE_ROWS; tile * TILE_ROWS < end; tile++)
            for (int64_t step = 0; step < steps(); step++)
                if (in_place) {
                    alignas(64) char rows[TILE_BYTES];
                    copy_tile(inputs, tile, step, rows);
                    tile_bf16::transpose_tile(rows, LINE, to + (tile * steps() + step) * TILE_BYTES);
                } else {
                    copy_tile(inputs, tile, step, to + (tile * steps() + step) * TILE_BYTES);
                }
    }

    // [16 rows][STEP], with zeros beyond the inputs.
    static void copy_tile(const Inputs<bf16>& inputs, int64_t tile, int64_t step, char* to) {
        const int64_t rows = min(TILE_ROWS, inputs.count - tile * TILE_ROWS);
        const int64_t values = min(tile_bf16::STEP, inputs.in - step * tile_bf16::STEP);
        if (rows < TILE_ROWS || values < tile_bf16::STEP) memset(to, 0, TILE_BYTES);
        for (int64_t r = 0; r < rows; r++)
            memcpy(to + r * LINE, inputs.row(tile * TILE_ROWS + r) + step * tile_bf16::STEP, values * sizeof(bf16));
    }

    void multiply(int64_t expert, int64_t rows, const char* inputs, Range part, const Collect& epilogue) const {
        if (rows <= few) return by_few.multiply(expert, rows, inputs, part, epilogue);
        const int64_t in = by_few.in, outputs = by_few.outputs;
        const tile_bf16::Matrix x = {nullptr, rows, in}, matrix = {by_few.stack + expert * outputs * in, outputs, in};
        const Range panels = {part.begin / OUTPUTS, ceil_div(part.end, OUTPUTS)};
        if (rows <= some)
            tile_bf16::in_place::compute_panels(
                tile_bf16::in_place::Product<Collect>{x, matrix, inputs, epilogue}, panels);
        else
            tile_bf16::packed::compute(tile_bf16::packed::Product<Collect>{{x, matrix, inputs, epilogue}},
                                      {0, ceil_div(rows, ROWS)}, panels);
    }
};

}  // namespace

// As experts_bf16 (csrc/experts/dense_experts.cpp). Experts with more rows than `few` are multiplied by tiles, with
// more than `some` by way of packed weights.
KERNEL(tile_experts_bf16)(const bf16* x, const int64_t* selected, const bf16* weights, const bf16* gate_up,
                         const bf16* down, bf16* out, char* scratch, int64_t bytes, int64_t rows, int64_t top_k,
                         int64_t experts, int64_t hidden, int64_t width, int64_t few, int64_t some, int64_t threads) {
    const ByTiles first = {{gate_up, hidden, 2 * width}, few, some}, second = {{down, width, hidden}, few, some};
    mix_experts({x, selected, weights, out, rows, top_k, experts, hidden, width, threads, {scratch, scratch + bytes}},
                first, second);
}
REPLAYABLE(tile_experts_bf16)
