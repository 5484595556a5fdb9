// The experts of a layer by the processor's matrix units: csrc/linear/amx_bf16.h and amx_int8.h.
#include "experts/by_vectors.h"
#include "experts/int8_experts.h"
#include "linear/amx_in_place.h"
#include "linear/amx_int8.h"
#include "linear/amx_packed.h"

namespace {

// By the number of rows: up to `few` by vectors, up to `some` with the weights in place, more with them packed.
struct ByTiles {
    using T = bf16;
    static constexpr int64_t ROWS = 2 * TILE_ROWS, OUTPUTS = amx_bf16::PANEL;
    FewRows<bf16> by_few;
    int64_t few, some;

    int64_t steps() const { return ceil_div(by_few.in, amx_bf16::STEP); }
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
                    amx_bf16::transpose_tile(rows, LINE, to + (tile * steps() + step) * TILE_BYTES);
                } else {
                    copy_tile(inputs, tile, step, to + (tile * steps() + step) * TILE_BYTES);
                }
    }

    // [16 rows][STEP], with zeros beyond the inputs.
    static void copy_tile(const Inputs<bf16>& inputs, int64_t tile, int64_t step, char* to) {
        const int64_t rows = min(TILE_ROWS, inputs.count - tile * TILE_ROWS);
        const int64_t values = min(amx_bf16::STEP, inputs.in - step * amx_bf16::STEP);
        if (rows < TILE_ROWS || values < amx_bf16::STEP) memset(to, 0, TILE_BYTES);
        for (int64_t r = 0; r < rows; r++)
            memcpy(to + r * LINE, inputs.row(tile * TILE_ROWS + r) + step * amx_bf16::STEP, values * sizeof(bf16));
    }

    void multiply(int64_t expert, int64_t rows, const char* inputs, Range part, const Collect& epilogue) const {
        if (rows <= few) return by_few.multiply(expert, rows, inputs, part, epilogue);
        const int64_t in = by_few.in, outputs = by_few.outputs;
        const amx_bf16::Matrix x = {nullptr, rows, in}, matrix = {by_few.stack + expert * outputs * in, outputs, in};
        const Range panels = {part.begin / OUTPUTS, ceil_div(part.end, OUTPUTS)};
        if (rows <= some)
            amx_bf16::in_place::compute_panels(
                amx_bf16::in_place::Product<Collect>{x, matrix, inputs, epilogue}, panels);
        else
            amx_bf16::packed::compute(amx_bf16::packed::Product<Collect>{{x, matrix, inputs, epilogue}},
                                      {0, ceil_div(rows, ROWS)}, panels);
    }
};

// 8 bits: up to `few` rows by vectors.
template <class Values>
struct Int8ByTiles : Int8Experts<Values> {
    int64_t few;

    void lay_out(const Inputs<Values>& from, int64_t row, char* to) const {
        if (from.count <= few) return Int8Experts<Values>::lay_out(from, row, to);
        const auto p = this->product(0, from.count, to, 0);
        for (int64_t group = 0; group < p.groups(); group++) int8::tiles::lay_out(p, from.row(row), row, group);
    }

    void multiply(int64_t expert, int64_t rows, char* inputs, Range part, const Collect& epilogue) const {
        if (rows <= few) return Int8Experts<Values>::multiply(expert, rows, inputs, part, epilogue);
        this->multiply_by(expert, rows, inputs, part, epilogue,
                          [](const auto& product, Range panels) { int8::tiles::multiply(product, panels); });
    }
};

}  // namespace

// As experts_bf16 (csrc/experts/dense_experts.cpp). Experts with more rows than `few` are multiplied by the matrix
// units, with more than `some` by way of packed weights.
KERNEL(amx_experts_bf16)(const bf16* x, const int64_t* selected, const bf16* weights, const bf16* gate_up,
                         const bf16* down, bf16* out, char* scratch, int64_t bytes, int64_t rows, int64_t top_k,
                         int64_t experts, int64_t hidden, int64_t width, int64_t few, int64_t some, int64_t threads) {
    const ByTiles first = {{gate_up, hidden, 2 * width}, few, some}, second = {{down, width, hidden}, few, some};
    mix_experts({x, selected, weights, out, rows, top_k, experts, hidden, width, threads, {scratch, scratch + bytes}},
                first, second);
}
REPLAYABLE(amx_experts_bf16)

// As experts_int8 (csrc/experts/int8_experts.cpp), to the bit. Experts with more rows than `few` are multiplied by
// the matrix units.
KERNEL(amx_experts_int8)(const void* x, int64_t is_bf16, const int64_t* selected, const void* weights,
                         const int8_t* gate_up, const int16_t* gate_up_sums, const void* gate_up_scales,
                         const int8_t* down, const int16_t* down_sums, const void* down_scales, void* out,
                         char* scratch, int64_t bytes, int64_t rows, int64_t top_k, int64_t experts, int64_t hidden,
                         int64_t width, int64_t few, int64_t threads) {
    const Call call = {x, selected, weights, out, rows, top_k, experts, hidden, width, threads,
                       {scratch, scratch + bytes}};
    with_int8(call, is_bf16, gate_up, gate_up_sums, gate_up_scales, down, down_sums, down_scales,
              [&](const auto& first, const auto& second) {
                  using Experts = Int8ByTiles<typename std::decay_t<decltype(first)>::T>;
                  mix_experts(call, Experts{first, few}, Experts{second, few});
              });
}
REPLAYABLE(amx_experts_int8)
