// Rounding inputs to integers; the largest input of a group determines the group's scale.
#pragma once

#include "core/simd.h"

namespace {

constexpr int64_t ROUNDED = 16384;      // inputs that are worth waking a thread for
constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, held in the lower bits

typedef int16_t Shorts __attribute__((vector_size(4 * W)));

// The absolute values of some numbers, in their order, as integers.
inline Shorts magnitudes(const bf16* x) {
    Shorts v;
    memcpy(&v, x, sizeof v);
    return v & 0x7fff;
}
inline ivec magnitudes(const float* x) { return (ivec)load(x) & 0x7fffffff; }

inline float with_magnitude(bf16, int32_t bits) { return to_float(bf16{(uint16_t)bits}); }
inline float with_magnitude(float, int32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// It is looked for among the bits, in the order of the absolute values, so that a NaN is the largest and comes out.
template <class T>
float largest_absolute(const T* x, int64_t length) {
    constexpr int64_t LANES = 4 * W / sizeof(T);
    decltype(magnitudes(x)) most = {};
    int64_t k = 0;
    for (; k + LANES <= length; k += LANES) {
        const auto some = magnitudes(x + k);
        most = some > most ? some : most;
    }
    using Bits = std::conditional_t<sizeof(T) == 2, int16_t, int32_t>;
    Bits lanes[LANES], largest = 0;
    memcpy(lanes, &most, sizeof most);
    for (Bits bits : lanes) largest = bits > largest ? bits : largest;
    for (; k < length; k++) {
        Bits bits;
        memcpy(&bits, x + k, sizeof bits);
        bits &= sizeof(T) == 2 ? 0x7fff : 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    return with_magnitude(T(), largest);
}

// Whole numbers in the lowest bits of each lane.
inline uvec whole(vec x, vec inverse, int32_t zero) {
    return (uvec)((ivec)multiply_add(x, inverse, fill(MAGIC)) + zero);
}

// Rounds 2 * W numbers to bytes.
inline void round_bytes(const bf16* x, vec inverse, int32_t zero, void* to) {
    uvec pairs;
    memcpy(&pairs, x, sizeof pairs);
    const uvec lower = whole((vec)(pairs << 16), inverse, zero) & 0xff;
    const uvec upper = whole((vec)(pairs & 0xffff0000), inverse, zero) & 0xff;
    const hvec bytes = __builtin_convertvector(lower | upper << 8, hvec);
    memcpy(to, &bytes, sizeof bytes);
}
inline void round_bytes(const float* x, vec inverse, int32_t zero, void* to) {
    typedef uint8_t Bytes __attribute__((vector_size(W)));
    for (int i = 0; i < 2; i++) {
        const Bytes bytes = __builtin_convertvector(whole(load(x + i * W), inverse, zero), Bytes);
        memcpy((char*)to + i * W, &bytes, sizeof bytes);
    }
}

// Whole numbers -limit ... limit, plus `zero`, to[0 ... padded]; beyond the length there are zeros. Returns the scale.
template <class T, class Whole>
float round_inputs(const T* x, int64_t length, int64_t padded, float limit, int32_t zero, Whole* to) {
    const float most = largest_absolute(x, length), inverse = most < 1e-30f ? 0.0f : limit / most;
    int64_t k = 0;
    if (sizeof(Whole) == 1)
        for (; k + 2 * W <= length; k += 2 * W) round_bytes(x + k, fill(inverse), zero, to + k);
    for (; k < length; k++) {
        const float rounded = multiply_add(to_float(x[k]), inverse, MAGIC);
        int32_t bits;
        memcpy(&bits, &rounded, 4);
        to[k] = (Whole)(bits + zero);
    }
    for (; k < padded; k++) to[k] = (Whole)zero;
    return most / limit;
}

}  // namespace
