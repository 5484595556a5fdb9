// The products of dense weights by vectors.
#include "linear/few_rows.h"
#include "linear/many_rows.h"

// x [rows, in], w [outputs, in], bias [outputs] or null, residual [rows, outputs], which is added, or null, out [rows,
// outputs], all in one dtype; sums are in fp32
KERNEL(few_rows_linear_f32)(const float* x, const float* w, const float* bias, const float* residual, float* out,
                            int64_t rows, int64_t in, int64_t outputs, int64_t threads) {
    few_rows::linear(x, w, AddBias<float>{out, bias, outputs, residual}, rows, in, threads);
}
REPLAYABLE(few_rows_linear_f32)

KERNEL(few_rows_linear_bf16)(const bf16* x, const bf16* w, const bf16* bias, const bf16* residual, bf16* out,
                             int64_t rows, int64_t in, int64_t outputs, int64_t threads) {
    few_rows::linear(x, w, AddBias<bf16>{out, bias, outputs, residual}, rows, in, threads);
}
REPLAYABLE(few_rows_linear_bf16)

// As few_rows_linear
KERNEL(many_rows_linear_f32)(const float* x, const float* w, const float* bias, const float* residual, float* out,
                             int64_t rows, int64_t in, int64_t outputs, int64_t threads) {
    using namespace many_rows;
    matmul(Matmul<float, AddBias<float>>{x, w, rows, in, outputs, {out, bias, outputs, residual}}, threads);
}
REPLAYABLE(many_rows_linear_f32)

KERNEL(many_rows_linear_bf16)(const bf16* x, const bf16* w, const bf16* bias, const bf16* residual, bf16* out,
                              int64_t rows, int64_t in, int64_t outputs, int64_t threads) {
    const ScratchArray<float> inputs(rows * in);
    parallel_for(rows, threads, [&](int64_t r) {
        int64_t k = r * in;
        for (; k + W <= (r + 1) * in; k += W) store(inputs + k, load(x + k));
        for (; k < (r + 1) * in; k++) inputs[k] = to_float(x[k]);
    });
    using namespace many_rows;
    matmul(Matmul<bf16, AddBias<bf16>>{inputs, w, rows, in, outputs, {out, bias, outputs, residual}}, threads);
}
REPLAYABLE(many_rows_linear_bf16)
