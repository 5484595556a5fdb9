// x @ W.T for weights of 8 bits (ops/linear/int8.py has their layout and the torch reference): what the kernels share.
//
// The arithmetic is the same on every processor. Inputs are rounded to 8 bits, GROUP of a row by a scale of their own;
// a group's products are summed in 32-bit integers, where nothing overflows and no order matters, and the groups one
// after another in fp32. So a row's result depends neither on the rows beside it nor on the instruction set.
//
// For vectors, which multiply unsigned bytes by signed ones, rounded inputs are stored plus ZERO. This adds ZERO times
// the sum of a group's weights to the group's sums, so the sums start from minus that value.
#pragma once

#include "core/epilogue.h"
#include "core/prefetch.h"
#include "core/rounding.h"
#include "core/threads.h"

namespace {
namespace int8 {

constexpr int64_t PANEL = 16;        // outputs whose weights lie together
constexpr int64_t FOUR = PANEL * 4;  // bytes: a panel's weights of four inputs
constexpr int64_t GROUP = 512;       // inputs that share a scale
constexpr int32_t ZERO = 128;

// W outputs' sums of a group of zeros, taken off.
inline ivec zeros_of(const int16_t* sums) {
    typedef int16_t Shorts __attribute__((vector_size(2 * W)));
    Shorts v;
    memcpy(&v, sums, sizeof v);
    return __builtin_convertvector(v, ivec) * -ZERO;
}

// total + products * scale.
inline vec add_scaled(vec total, ivec products, float scale) {
    return multiply_add(__builtin_convertvector(products, vec), fill(scale), total);
}

// T: float or bf16.
template <class T, class Finish>
struct Product {
    using Epilogue = Finish;

    const T* x;             // [rows][width]
    const int8_t* weights;  // [panels][padded / 4][PANEL][4]
    const int16_t* sums;    // [panels][groups][PANEL], of the weights
    int64_t rows, width, outputs;
    void* inputs;         // [rows][padded] bytes, in the order of the kernel; rows: to a multiple of 32
    float* input_scales;  // as many for each group
    Epilogue epilogue;

    int64_t padded() const { return round_up(width, 64); }
    int64_t groups() const { return ceil_div(width, GROUP); }
    int64_t panels() const { return ceil_div(outputs, PANEL); }

    // A group of the row `from` and, up to `group_size`, zeros; returns its scale.
    template <class Row, class Byte>
    float round(const Row* from, int64_t group, int32_t zero, Byte* to) const {
        const int64_t begin = group * GROUP;
        return round_inputs(from + begin, min(GROUP, width - begin), group_size(group), 127.0f, zero, to);
    }
    // lay_out(row, group) for all of them.
    template <class LayOut>
    void round_all(int64_t threads, const LayOut& lay_out) const {
        parallel_for(rows * groups(), worthwhile_threads(rows * width, ROUNDED, threads),
                     [&](int64_t i) { lay_out(i / groups(), i % groups()); });
    }
    int64_t group_size(int64_t group) const { return min(GROUP, padded() - group * GROUP); }

    // Of a panel's outputs in one row, from the sums of all groups [PANEL].
    void finish(int64_t row, int64_t panel, const float* totals) const {
        epilogue(row, panel * PANEL, totals, min(PANEL, outputs - panel * PANEL));
    }
};

// compute(a Product of what a kernel was called with): with `gated`, of gates and values.
template <bool gated, class Compute>
void with_product(const void* x, bool is_bf16, const int8_t* weights, const int16_t* sums, const void* scales,
                  const void* bias, const void* residual, void* inputs, float* input_scales, void* out, int64_t rows,
                  int64_t width, int64_t outputs, Compute compute) {
    auto start = [&](auto* typed) {
        using T = std::remove_pointer_t<decltype(typed)>;
        auto with = [&](auto epilogue) {
            compute(Product<T, decltype(epilogue)>{(const T*)x, weights, sums, rows, width, outputs, inputs,
                                                   input_scales, epilogue});
        };
        if constexpr (gated)
            with(ScaleAndSwiGLU<T>{(T*)out, (const T*)scales, outputs / 2});
        else
            with(ScaleAndAddBias<T>{(T*)out, (const T*)scales, (const T*)bias, outputs, (const T*)residual});
    };
    is_bf16 ? start((bf16*)nullptr) : start((float*)nullptr);
}

}  // namespace int8
}  // namespace
