// The experts of a layer in 8 bits by vectors.
#include "experts/int8_experts.h"

// As experts_f32 (csrc/experts/dense_experts.cpp) for x, weights and out in bf16 or fp32, with matrices of 8 bits:
// each is its values, sums and scales, as linear_int8 has them, with a first dimension for the experts.
KERNEL(experts_int8)(const void* x, int64_t is_bf16, const int64_t* selected, const void* weights,
                     const int8_t* gate_up, const int16_t* gate_up_sums, const void* gate_up_scales, const int8_t* down,
                     const int16_t* down_sums, const void* down_scales, void* out, char* scratch, int64_t bytes,
                     int64_t rows, int64_t top_k, int64_t experts, int64_t hidden, int64_t width, int64_t threads) {
    const Call call = {x, selected, weights, out, rows, top_k, experts, hidden, width, threads,
                       {scratch, scratch + bytes}};
    with_int8(call, is_bf16, gate_up, gate_up_sums, gate_up_scales, down, down_sums, down_scales,
              [&](const auto& first, const auto& second) { mix_experts(call, first, second); });
}
REPLAYABLE(experts_int8)
