// The products of an expert's rows with matrices of 8 bits (csrc/linear/int8.h), by vectors, and what they share with
// those by matrix units.
#pragma once

#include "core/scratch.h"
#include "experts/by_expert.h"
#include "linear/int8_vectors.h"

namespace {

// An epilogue before another: products, of at most two panels, times a scale for each output.
struct Scale {
    const float* scales;
    int64_t from;  // the first scale's output
    Collect next;

    void prefetch(int64_t, int64_t) const {}

    void operator()(int64_t row, int64_t output, const float* products, int64_t count) const {
        float scaled[2 * int8::PANEL];
        for (int64_t o = 0; o < count; o++) scaled[o] = products[o] * scales[output - from + o];
        next(row, output, scaled, count);
    }
};

// Rows laid out: rounded, [whole tiles][padded], and behind them their scales [whole tiles][groups].
template <class Values>
struct Int8Experts {
    using T = Values;
    static constexpr int64_t ROWS = 1, OUTPUTS = 2 * int8::PANEL, WHOLE = 32;
    const int8_t* weights;  // [experts][panels][padded / 4][PANEL][4]
    const int16_t* sums;    // [experts][panels][groups][PANEL]
    const T* scales;        // [experts][outputs]
    int64_t in, outputs;

    template <class Epilogue>
    using Product = int8::Product<float, Epilogue>;

    // Of one expert.
    template <class Epilogue>
    Product<Epilogue> product(int64_t expert, int64_t rows, char* inputs, const Epilogue& epilogue) const {
        Product<Epilogue> p = {nullptr, nullptr, nullptr, rows, in, outputs, (uint8_t*)inputs, nullptr, epilogue};
        p.input_scales = (float*)(inputs + round_up(rows, WHOLE) * p.padded());
        p.weights = weights + expert * p.panels() * int8::PANEL * p.padded();
        p.sums = sums + expert * p.panels() * int8::PANEL * p.groups();
        return p;
    }

    int64_t bytes(int64_t rows) const {
        return round_up(rows, WHOLE) * (round_up(in, 64) + ceil_div(in, int8::GROUP) * sizeof(float));
    }

    void lay_out(const Inputs<T>& from, int64_t row, char* to) const {
        const auto p = product(0, from.count, to, 0);
        for (int64_t group = 0; group < p.groups(); group++) int8::vectors::lay_out(p, from.row(row), row, group);
    }

    // compute(the product of one expert, panels)
    template <class Compute>
    void multiply_by(int64_t expert, int64_t rows, char* inputs, Range part, const Collect& epilogue,
                     Compute compute) const {
        // Of what is computed: of gates that end within two panels, the values behind them as well.
        const int64_t size = min(round_up(part.end, OUTPUTS), outputs) - part.begin;
        const ScratchArray<float> all(size);
        for (int64_t o = 0; o < size; o++) all[o] = to_float(scales[expert * outputs + part.begin + o]);
        compute(product(expert, rows, inputs, Scale{all, part.begin, epilogue}),
                Range{part.begin / int8::PANEL, ceil_div(part.end, int8::PANEL)});
    }

    void multiply(int64_t expert, int64_t rows, char* inputs, Range part, const Collect& epilogue) const {
        multiply_by(expert, rows, inputs, part, epilogue,
                    [](const auto& product, Range panels) { int8::vectors::multiply(product, panels); });
    }
};

// compute(an Int8Experts of gate_up, and one of down).
template <class Compute>
void with_int8(const Call& call, bool is_bf16, const int8_t* gate_up, const int16_t* gate_up_sums,
               const void* gate_up_scales, const int8_t* down, const int16_t* down_sums, const void* down_scales,
               Compute compute) {
    auto start = [&](auto* typed) {
        using T = std::remove_pointer_t<decltype(typed)>;
        compute(Int8Experts<T>{gate_up, gate_up_sums, (const T*)gate_up_scales, call.hidden, 2 * call.width},
                Int8Experts<T>{down, down_sums, (const T*)down_scales, call.width, call.hidden});
    };
    is_bf16 ? start((bf16*)nullptr) : start((float*)nullptr);
}

}  // namespace
