// The products by the processor's matrix units.
#include "linear/amx_in_place.h"
#include "linear/amx_int8.h"
#include "linear/amx_packed.h"

// x [rows, in], w [outputs, in], bias [outputs] or null, out [rows, outputs]; sums are in fp32, of which the
// instruction makes 0 where they are subnormal, as of the inputs
KERNEL(amx_in_place_linear_bf16)(const bf16* x, const bf16* w, const bf16* bias, bf16* out, int64_t rows, int64_t in,
                                 int64_t outputs, int64_t threads) {
    using namespace amx_bf16::in_place;
    linear(Product<AddBias<bf16>>{{x, rows, in}, {w, outputs, in}, nullptr, {out, bias, outputs}}, threads);
}
REPLAYABLE(amx_in_place_linear_bf16)

// As amx_in_place_linear_bf16, of which it gives the same bits.
KERNEL(amx_packed_linear_bf16)(const bf16* x, const bf16* w, const bf16* bias, bf16* out, int64_t rows, int64_t in,
                               int64_t outputs, int64_t threads) {
    using namespace amx_bf16::packed;
    linear(Product<AddBias<bf16>>{{{x, rows, in}, {w, outputs, in}, nullptr, {out, bias, outputs}}}, threads);
}
REPLAYABLE(amx_packed_linear_bf16)

// As amx_in_place_linear_bf16, but out [rows, width] = silu(gates) * values, of w [2 * width, in], the gates' rows first;
// to rounding as apart
KERNEL(amx_in_place_swiglu_bf16)(const bf16* x, const bf16* w, bf16* out, int64_t rows, int64_t in, int64_t width,
                                 int64_t threads) {
    using namespace amx_bf16::in_place;
    linear(Product<SwiGLU<bf16>>{{x, rows, in}, {w, 2 * width, in}, nullptr, {out, width}}, threads);
}
REPLAYABLE(amx_in_place_swiglu_bf16)

// As amx_in_place_swiglu_bf16, of which it gives the same bits.
KERNEL(amx_packed_swiglu_bf16)(const bf16* x, const bf16* w, bf16* out, int64_t rows, int64_t in, int64_t width,
                               int64_t threads) {
    using namespace amx_bf16::packed;
    linear(Product<SwiGLU<bf16>>{{{x, rows, in}, {w, 2 * width, in}, nullptr, {out, width}}}, threads);
}
REPLAYABLE(amx_packed_swiglu_bf16)

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
