// Sixteen lanes of fp32 beside pairs of bf16 and fours of bytes: what attention by AVX512-BF16 and VNNI is built of.
//
// Compiled with -DEMULATED the instructions are the same operations in the compiler's own vectors, so that what is
// built of them can be tested on any processor.
#pragma once

#include "core/simd.h"

namespace {

static_assert(W == 16, "whole registers of AVX-512, or of the emulation");

typedef ivec pairs;  // sixteen pairs of bf16

inline pairs load_pairs(const bf16* p) {
    pairs v;
    memcpy(&v, p, sizeof v);
    return v;
}

inline void store_pairs(bf16* p, pairs v) { memcpy(p, &v, sizeof v); }

inline pairs fill_pairs(const bf16* pair) {
    int32_t both;
    memcpy(&both, pair, sizeof both);
    return both - pairs{};
}

// Of four lanes each: a's and b's first, or last, two, a's and b's in turn.
inline vec unpack_low(vec a, vec b) {
    return shuffle<0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29>(a, b);
}
inline vec unpack_high(vec a, vec b) {
    return shuffle<2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31>(a, b);
}

// Interleaved rows (interleave_low, interleave_high) in their order again: the first sixteen dims, the others.
inline vec first_halves(vec low, vec high) {
    return shuffle<0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23>(low, high);
}
inline vec second_halves(vec low, vec high) {
    return shuffle<8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31>(low, high);
}

inline pairs ones() { return 0x3f803f80 - pairs{}; }  // 1.0

}  // namespace

#if defined(__AVX512BF16__)
#include "arch/x86/lanes.h"
#else
#include "arch/emulated_lanes.h"
#endif

namespace {

// 2^x for x <= 0 or not much above, of n vectors side by side; 0 of -inf. Relative error 7.5e-5, a fiftieth of
// rounding to bf16.
template <int n>
inline void exp2_coarse(vec (&x)[n]) {
    vec f[n], p[n];
    for (int i = 0; i < n; i++) f[i] = fraction(x[i]);
    for (int i = 0; i < n; i++) p[i] = fill(0.07802452f) * f[i] + 0.22606717f;
    for (int i = 0; i < n; i++) p[i] = p[i] * f[i] + 0.69583353f;
    for (int i = 0; i < n; i++) p[i] = p[i] * f[i] + 0.99992522f;
    for (int i = 0; i < n; i++) x[i] = times_power_of_2(p[i], x[i]);
}

// The same of one, with a relative error of 4e-6.
inline vec exp2_precise(vec x) {
    const vec f = fraction(x);
    vec p = fill(1.3534167e-2f) * f + 5.2011464e-2f;
    p = p * f + 2.4144275e-1f;
    p = p * f + 6.9300383e-1f;
    p = p * f + 1.0000026f;
    return times_power_of_2(p, x);
}

template <int bit, int... l>
inline float largest_lane(vec v, std::integer_sequence<int, l...> lanes) {
    v = maximum(v, shuffle<(l ^ bit)...>(v, v));
    if constexpr (bit > 1) return largest_lane<bit / 2>(v, lanes);
    return v[0];
}
inline float largest_lane(vec v) { return largest_lane<W / 2>(v, std::make_integer_sequence<int, W>()); }

// The nearest whole numbers, ties to even, of |x| < 2^22.
inline ivec nearest_integers(vec x) {
    const vec magic = fill(12582912.0f);  // 1.5 * 2^23
    return (ivec)(x + magic) - (ivec)magic;
}

// The lanes' numbers.
inline ivec lane_numbers() {
    ivec n;
    for (int i = 0; i < W; i++) n[i] = i;
    return n;
}

// The first `count` lanes of v, `other` elsewhere.
inline vec first_lanes(vec v, int64_t count, float other) {
    const int32_t lanes = count < 0 ? 0 : count > W ? W : count;
    return select(lane_numbers() < lanes, v, fill(other));
}

}  // namespace
