// Inputs rounded to 15 bits in chunks, which the products with integer weights share.
#pragma once

#include "simd.h"

namespace {

constexpr int64_t CHUNK = 1024;    // inputs that share a scale
constexpr float LIMIT = 16383.0f;  // of a rounded input

// A chunk of one row to LIMIT by its largest value, which is returned over LIMIT. It is looked for among the bits, in
// the order of the absolute values, so that a NaN is the largest and comes out. Beyond the row there are zeros.
template <class T>
float round_chunk(const T* x, int64_t length, int16_t* to) {
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
    const float inverse = most < 1e-30f ? 0.0f : LIMIT / most;
    for (int64_t k = 0; k < length; k++) {
        const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, held in the lower bits
        const float rounded = to_float(x[k]) * inverse + magic;
        int32_t bits;
        memcpy(&bits, &rounded, 4);
        to[k] = (int16_t)bits;
    }
    for (int64_t k = length; k < CHUNK; k++) to[k] = 0;
    return most / LIMIT;
}

}  // namespace
