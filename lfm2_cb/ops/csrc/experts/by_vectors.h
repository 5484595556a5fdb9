// The products of an expert's rows by vectors: csrc/linear/few_rows.h and many_rows.h.
#pragma once

#include "experts/by_expert.h"
#include "linear/few_rows.h"
#include "linear/many_rows.h"

namespace {

// Rows laid out for csrc/linear/few_rows.h, and their products.
template <class Values>
struct FewRows {
    using T = Values;
    const T* stack;  // [experts][outputs][in]
    int64_t in, outputs;

    int64_t bytes(int64_t rows) const { return rows * few_rows::stride_of<T>(in) * sizeof(few_rows::Input<T>); }

    void lay_out(const Inputs<T>& inputs, int64_t row, char* to) const {
        few_rows::order_inputs(inputs.row(row), in, (few_rows::Input<T>*)to + row * few_rows::stride_of<T>(in));
    }

    void multiply(int64_t expert, int64_t rows, const char* inputs, Range part, const Collect& epilogue) const {
        const T* matrix = stack + expert * outputs * in;
        const few_rows::Linear<T, Collect> linear = {(const few_rows::Input<T>*)inputs, matrix, rows, in, outputs,
                                                     few_rows::stride_of<T>(in), epilogue};
        for_each_tile(part, few_rows::TASK, [&](int64_t begin, int64_t count) {
            few_rows::outputs_of(linear, begin, begin + count);
        });
    }
};

// The same, and those of more rows than `few` by csrc/linear/many_rows.h.
template <class Values>
struct ByVectors {
    using T = Values;
    static constexpr int64_t ROWS = 1, OUTPUTS = many_rows::GROUP;
    FewRows<T> by_few;
    int64_t few;

    int64_t bytes(int64_t rows) const { return max(by_few.bytes(rows), rows * by_few.in * sizeof(float)); }

    void lay_out(const Inputs<T>& inputs, int64_t row, char* to) const {
        if (inputs.count <= few) return by_few.lay_out(inputs, row, to);
        const T* from = inputs.row(row);
        float* floats = (float*)to + row * inputs.in;
        int64_t k = 0;
        for (; k + W <= inputs.in; k += W) store(floats + k, load(from + k));
        for (; k < inputs.in; k++) floats[k] = to_float(from[k]);
    }

    void multiply(int64_t expert, int64_t rows, const char* inputs, Range part, const Collect& epilogue) const {
        if (rows <= few) return by_few.multiply(expert, rows, inputs, part, epilogue);
        const int64_t in = by_few.in, outputs = by_few.outputs;
        const many_rows::Matmul<T, Collect> matmul = {(const float*)inputs, by_few.stack + expert * outputs * in, rows,
                                                       in, outputs, epilogue};
        const ScratchArray<float> scratch(many_rows::scratch_size(rows, in));
        for (int64_t group = part.begin / OUTPUTS; group < ceil_div(part.end, OUTPUTS); group++)
            many_rows::compute_group(matmul, group, {0, rows}, scratch);
    }
};

}  // namespace
