// The products of weights of 4 bits.
#include "linear/int4.h"

// out [rows, outputs] = x @ W.T + bias, rounded, + residual, with x [rows, width], bias [outputs] or null and residual
// [rows, outputs] or null, all bf16 or all fp32, weights uint8 [outputs, groups * 16] and scales bf16 [outputs,
// groups], with an even number of groups; as scratch inputs int16 [chunks, rows, 1024] and input_scales fp32 [chunks,
// rows].
KERNEL(linear_int4)(const void* x, int64_t is_bf16, const uint8_t* weights, const bf16* scales, const void* bias,
                    const void* residual, int16_t* inputs, float* input_scales, void* out, int64_t rows, int64_t width,
                    int64_t outputs, int64_t threads) {
    const int64_t groups = ceil_div(width, 2 * int4::GROUP) * 2;
    int4::Problem p = {(const char*)weights, scales, nullptr, nullptr, rows, width, outputs, 0, groups, groups * 16};
    if (is_bf16)
        int4::linear<bf16>(p, x, bias, residual, out, inputs, input_scales, threads);
    else
        int4::linear<float>(p, x, bias, residual, out, inputs, input_scales, threads);
}
REPLAYABLE(linear_int4)
