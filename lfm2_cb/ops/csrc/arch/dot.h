// Sums of products of bytes, four of them a lane: the instruction set's own, or in plain C.
#pragma once

#include "core/simd.h"

namespace {

// W sums of products of integers.
typedef int32_t Sums __attribute__((vector_size(4 * W)));

// Eight inputs, fours of bytes, each in all lanes.
struct Eight {
    Sums first, second;
};
typedef const int32_t __attribute__((may_alias)) Four;
inline Eight load_eight(const uint8_t* x) { return {*(Four*)x - Sums{}, *(Four*)(x + 4) - Sums{}}; }

}  // namespace

// multiply_add<APART>(acc, x, w): acc + the products of eight inputs and W outputs' weights: of four inputs `w`, and
// of the other four `APART` behind. weights_for<ROWS, APART>(w): these, as so many rows are best multiplied by them.
#if defined(__AVX2__)
#include "arch/x86/dot.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "arch/arm/dot.h"
#else
namespace {

inline Sums multiply_four(Sums acc, Sums x, const int8_t* weights) {
    Sums w;
    memcpy(&w, weights, sizeof w);
    return acc + (w << 24 >> 24) * (x & 255) + (w << 16 >> 24) * (x >> 8 & 255) + (w << 8 >> 24) * (x >> 16 & 255) +
           (w >> 24) * (x >> 24 & 255);
}
template <int APART>
inline Sums multiply_add(Sums acc, const Eight& x, const int8_t* w) {
    return multiply_four(multiply_four(acc, x.first, w), x.second, w + APART);
}

}  // namespace
#endif

namespace {

#if defined(__AVX512VNNI__)
constexpr int SUMS_HELD = 18;  // vectors of sums that the registers hold beside weights and inputs

template <int ROWS, int APART, std::enable_if_t<(ROWS > 1), int> = 0>
inline Eight weights_for(const int8_t* w) {
    Eight loaded;
    memcpy(&loaded.first, w, sizeof loaded.first);
    memcpy(&loaded.second, w + APART, sizeof loaded.second);
    return loaded;
}
template <int ROWS, int APART, std::enable_if_t<ROWS == 1, int> = 0>
#else
constexpr int SUMS_HELD = 8;

template <int ROWS, int APART>
#endif
inline const int8_t* weights_for(const int8_t* w) {
    return w;
}

}  // namespace
