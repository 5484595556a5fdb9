// Inputs rounded to integers, by the largest of some that share a scale.
#pragma once

#include "core/simd.h"

namespace {

constexpr int64_t ROUNDED = 16384;      // inputs that are worth waking a thread for
constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, held in the lower bits

// It is looked for among the bits, in the order of the absolute values, so that a NaN is the largest and comes out.
template <class T>
float largest_absolute(const T* x, int64_t length) {
    int32_t largest_bits = 0;
    for (int64_t k = 0; k < length; k++) {
        const float value = to_float(x[k]);
        int32_t bits;
        memcpy(&bits, &value, 4);
        bits &= 0x7fffffff;
        largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    float most;
    memcpy(&most, &largest_bits, 4);
    return most;
}

// Whole numbers -limit ... limit, plus `zero`, to[0 ... padded]; beyond the length there are zeros. Returns the scale.
template <class T, class Whole>
float round_inputs(const T* x, int64_t length, int64_t padded, float limit, int32_t zero, Whole* to) {
    const float most = largest_absolute(x, length), inverse = most < 1e-30f ? 0.0f : limit / most;
    for (int64_t k = 0; k < length; k++) {
        const float rounded = to_float(x[k]) * inverse + MAGIC;
        int32_t bits;
        memcpy(&bits, &rounded, 4);
        to[k] = (Whole)(bits + zero);
    }
    for (int64_t k = length; k < padded; k++) to[k] = (Whole)zero;
    return most / limit;
}

}  // namespace
