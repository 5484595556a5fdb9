// The products in bf16 by tiles (csrc/arch/tiles.h). (The products of bytes are in a separate source file: in a
// large one GCC stops inlining functions into the loops that call them, which costs a tenth of the time.)
#include "linear/tile_in_place.h"
#include "linear/tile_packed.h"

// x [rows, in], w [outputs, in], bias [outputs] or null, residual [rows, outputs], which is added, or null, out [rows,
// outputs]; sums are in fp32, of which the instruction makes 0 where they are subnormal, as of the inputs
KERNEL(tile_in_place_linear_bf16)(const bf16* x, const bf16* w, const bf16* bias, const bf16* residual, bf16* out,
                                 int64_t rows, int64_t in, int64_t outputs, int64_t threads) {
    using namespace tile_bf16::in_place;
    linear(Product<AddBias<bf16>>{{x, rows, in}, {w, outputs, in}, nullptr, {out, bias, outputs, residual}}, threads);
}
REPLAYABLE(tile_in_place_linear_bf16)

// As tile_in_place_linear_bf16, of which it gives the same bits.
KERNEL(tile_packed_linear_bf16)(const bf16* x, const bf16* w, const bf16* bias, const bf16* residual, bf16* out,
                               int64_t rows, int64_t in, int64_t outputs, int64_t threads) {
    using namespace tile_bf16::packed;
    linear(Product<AddBias<bf16>>{{{x, rows, in}, {w, outputs, in}, nullptr, {out, bias, outputs, residual}}},
           threads);
}
REPLAYABLE(tile_packed_linear_bf16)

// As tile_in_place_linear_bf16, but out [rows, width] = silu(gates) * values, of w [2 * width, in], the gates' rows
// first; to rounding as apart
KERNEL(tile_in_place_swiglu_bf16)(const bf16* x, const bf16* w, bf16* out, int64_t rows, int64_t in, int64_t width,
                                 int64_t threads) {
    using namespace tile_bf16::in_place;
    linear(Product<SwiGLU<bf16>>{{x, rows, in}, {w, 2 * width, in}, nullptr, {out, width}}, threads);
}
REPLAYABLE(tile_in_place_swiglu_bf16)

// As tile_in_place_swiglu_bf16, of which it gives the same bits.
KERNEL(tile_packed_swiglu_bf16)(const bf16* x, const bf16* w, bf16* out, int64_t rows, int64_t in, int64_t width,
                               int64_t threads) {
    using namespace tile_bf16::packed;
    linear(Product<SwiGLU<bf16>>{{{x, rows, in}, {w, 2 * width, in}, nullptr, {out, width}}}, threads);
}
REPLAYABLE(tile_packed_swiglu_bf16)
