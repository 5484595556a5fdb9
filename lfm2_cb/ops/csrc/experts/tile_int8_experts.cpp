// The experts of a layer in 8 bits by the processor's matrix units: csrc/linear/tile_int8.h.
#include "experts/int8_experts.h"
#include "linear/tile_int8.h"

namespace {

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

// As experts_int8 (csrc/experts/int8_experts.cpp), to the bit. Experts with more rows than `few` are multiplied by
// the matrix units.
KERNEL(tile_experts_int8)(const void* x, int64_t is_bf16, const int64_t* selected, const void* weights,
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
REPLAYABLE(tile_experts_int8)
