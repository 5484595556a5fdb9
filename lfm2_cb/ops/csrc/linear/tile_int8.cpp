// The products of bytes by the processor's matrix units.
#include "linear/tile_int8_mlp.h"

// As linear_int8 (csrc/linear/int8.cpp), with inputs and input_scales of a multiple of 32 rows.
KERNEL(tile_linear_int8)(const void* x, int64_t is_bf16, const int8_t* weights, const int16_t* sums,
                        const void* scales, const void* bias, const void* residual, void* inputs, float* input_scales,
                        void* out, int64_t rows, int64_t width, int64_t outputs, int64_t threads) {
    int8::with_product<false>(x, is_bf16, weights, sums, scales, bias, residual, inputs, input_scales, out, rows,
                              width, outputs, [=](const auto& product) { int8::tiles::linear(product, threads); });
}
REPLAYABLE(tile_linear_int8)

// The same, to the bit, as tile_linear_int8 without bias and then `swiglu` (csrc/pointwise.cpp): out [rows,
// outputs / 2]; half the outputs, a multiple of 16, are gates, and their values come behind them
KERNEL(tile_swiglu_int8)(const void* x, int64_t is_bf16, const int8_t* weights, const int16_t* sums, const void* scales,
                        void* inputs, float* input_scales, void* out, int64_t rows, int64_t width, int64_t outputs,
                        int64_t threads) {
    int8::with_product<true>(x, is_bf16, weights, sums, scales, nullptr, nullptr, inputs, input_scales, out, rows,
                             width, outputs, [=](const auto& product) { int8::tiles::linear(product, threads); });
}
REPLAYABLE(tile_swiglu_int8)

// The same, to the bit, as tile_swiglu_int8 of weights13 and then tile_linear_int8 of weights2, with residual or null
// and without bias: out [rows, outputs]; `gated` are the inputs of the second, half the outputs of the first.
KERNEL(tile_mlp_int8)(const void* x, int64_t is_bf16, const int8_t* weights13, const void* scales13,
                     const int8_t* weights2, const void* scales2, const void* residual, void* inputs,
                     float* input_scales, void* gated_inputs, float* gated_scales, void* out, int64_t rows,
                     int64_t width, int64_t gated, int64_t outputs, int64_t threads) {
    auto start = [&](auto* typed) {
        using T = std::remove_pointer_t<decltype(typed)>;
        const int8::Product<T, ScaleAndSwiGLU<T>> first = {
            (const T*)x, weights13, nullptr, rows, width, 2 * gated, inputs, input_scales,
            {nullptr, (const T*)scales13, gated}};
        const int8::Product<T, ScaleAndAddBias<T>> second = {
            nullptr, weights2, nullptr, rows, gated, outputs, gated_inputs, gated_scales,
            {(T*)out, (const T*)scales2, nullptr, outputs, (const T*)residual}};
        int8::tiles::mlp(first, second, threads);
    };
    is_bf16 ? start((bf16*)nullptr) : start((float*)nullptr);
}
REPLAYABLE(tile_mlp_int8)
