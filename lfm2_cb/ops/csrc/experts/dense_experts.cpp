// The experts of a layer in full precision by vectors.
#include "experts/by_vectors.h"

// out [rows, hidden] = the sum over a row's choices, `selected` [rows, top_k] (numbers of experts), of its `weights`
// times down(silu(gate(x)) * up(x)), with x [rows, hidden]; the matrices of the experts, gate_up [experts, 2 * width,
// hidden], gates first, and down [experts, hidden, width]. All in one dtype; sums are in fp32. Experts with more rows
// than `few` take the product for many. scratch [bytes]: as experts/native.py reckons.
KERNEL(experts_f32)(const float* x, const int64_t* selected, const float* weights, const float* gate_up,
                    const float* down, float* out, char* scratch, int64_t bytes, int64_t rows, int64_t top_k,
                    int64_t experts, int64_t hidden, int64_t width, int64_t few, int64_t threads) {
    const ByVectors<float> first = {{gate_up, hidden, 2 * width}, few}, second = {{down, width, hidden}, few};
    mix_experts({x, selected, weights, out, rows, top_k, experts, hidden, width, threads, {scratch, scratch + bytes}},
                first, second);
}
REPLAYABLE(experts_f32)

KERNEL(experts_bf16)(const bf16* x, const int64_t* selected, const bf16* weights, const bf16* gate_up, const bf16* down,
                     bf16* out, char* scratch, int64_t bytes, int64_t rows, int64_t top_k, int64_t experts,
                     int64_t hidden, int64_t width, int64_t few, int64_t threads) {
    const ByVectors<bf16> first = {{gate_up, hidden, 2 * width}, few}, second = {{down, width, hidden}, few};
    mix_experts({x, selected, weights, out, rows, top_k, experts, hidden, width, threads, {scratch, scratch + bytes}},
                first, second);
}
REPLAYABLE(experts_bf16)
