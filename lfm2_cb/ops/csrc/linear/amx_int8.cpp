// The products of bytes by the processor's matrix units.
#include "linear/amx_int8.h"

// As linear_int8 (csrc/linear/int8.cpp), with inputs and input_scales of a multiple of 32 rows.
KERNEL(amx_linear_int8)(const void* x, int64_t is_bf16, const int8_t* weights, const int16_t* sums,
                        const void* scales, const void* bias, void* inputs, float* input_scales, void* out,
                        int64_t rows, int64_t width, int64_t outputs, int64_t threads) {
    int8::with_product<false>(x, is_bf16, weights, sums, scales, bias, inputs, input_scales, out, rows, width, outputs,
                              [=](const auto& product) { int8::tiles::linear(product, threads); });
}
REPLAYABLE(amx_linear_int8)

// The same, to the bit, as amx_linear_int8 without bias and then `swiglu` (csrc/pointwise.cpp): out [rows,
// outputs / 2]; half the outputs, a multiple of 16, are gates, and their values come behind them
KERNEL(amx_swiglu_int8)(const void* x, int64_t is_bf16, const int8_t* weights, const int16_t* sums, const void* scales,
                        void* inputs, float* input_scales, void* out, int64_t rows, int64_t width, int64_t outputs,
                        int64_t threads) {
    int8::with_product<true>(x, is_bf16, weights, sums, scales, nullptr, inputs, input_scales, out, rows, width,
                             outputs, [=](const auto& product) { int8::tiles::linear(product, threads); });
}
REPLAYABLE(amx_swiglu_int8)
