// The products of weights of 8 bits by vectors.
#include "linear/int8_vectors.h"

// out [rows, outputs] = x @ W.T + bias, rounded, + residual, with x [rows, width], scales [outputs], bias [outputs] or
// null and residual [rows, outputs] or null, all bf16 or all fp32; weights int8 [panels, padded / 4, 16, 4] and their
// sums int16 [panels, groups, 16]; as scratch inputs uint8 [rows, padded] and input_scales fp32 [rows, groups].
// Padded: to 64.
KERNEL(linear_int8)(const void* x, int64_t is_bf16, const int8_t* weights, const int16_t* sums, const void* scales,
                    const void* bias, const void* residual, void* inputs, float* input_scales, void* out, int64_t rows,
                    int64_t width, int64_t outputs, int64_t threads) {
    int8::with_product<false>(x, is_bf16, weights, sums, scales, bias, residual, inputs, input_scales, out, rows,
                              width, outputs, [=](const auto& product) { int8::vectors::linear(product, threads); });
}
REPLAYABLE(linear_int8)

template <class T>
static void copy_row(const int8_t* panel, int64_t lane, float scale, T* out, int64_t width) {
    for (int64_t k = 0; k < width; k++) assign(out + k, panel[k / 4 * int8::FOUR + lane * 4 + k % 4] * scale);
}

// out [rows, width], bf16 or fp32 as the scales are: the rows of the matrix whose numbers `indices` has.
KERNEL(rows_int8)(const int64_t* indices, const int8_t* weights, const void* scales, int64_t is_bf16, void* out,
                  int64_t rows, int64_t width, int64_t fours, int64_t) {
    for (int64_t i = 0; i < rows; i++) {
        const int64_t index = indices[i];
        const int8_t* panel = weights + index / int8::PANEL * fours * int8::FOUR;
        if (is_bf16)
            copy_row(panel, index % int8::PANEL, to_float(((const bf16*)scales)[index]), (bf16*)out + i * width, width);
        else
            copy_row(panel, index % int8::PANEL, ((const float*)scales)[index], (float*)out + i * width, width);
    }
}
