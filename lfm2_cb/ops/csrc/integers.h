// Vectors of bytes, and sums of their products: what csrc/int8.cpp computes with.
#pragma once

#include "simd.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// W sums of products of integers.
typedef int32_t Sums __attribute__((vector_size(4 * W)));

typedef Sums Lanes __attribute__((aligned(1), may_alias));  // in memory

// Eight inputs, fours of bytes, each in all lanes.
struct Eight {
    Sums first, second;
};
typedef const int32_t __attribute__((may_alias)) Four;
inline Eight load_eight(const uint8_t* x) { return {*(Four*)x - Sums{}, *(Four*)(x + 4) - Sums{}}; }

// acc + the products of eight inputs and W outputs' weights: of four inputs `w`, and of the other four `apart` behind.
//
// Two instructions' products are summed in 16 bits before they are widened. What is summed, inputs 0, 1, 4, 5 and
// 2, 3, 6, 7 each, never overflows: see ops/int8.py.
//
// In assembly, as weights are then no instructions of their own but operands in memory.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
template <int APART>
inline Sums multiply_add(Sums acc, const Eight& x, const int8_t* w) {
#if defined(__AVX512VNNI__)
    asm("vpdpbusd %1, %2, %0" : "+v"(acc) : "m"(*(const Lanes*)w), "v"(x.first));
    asm("vpdpbusd %1, %2, %0" : "+v"(acc) : "m"(*(const Lanes*)(w + APART)), "v"(x.second));
#else
    asm("%{vex%} vpdpbusd %1, %2, %0" : "+x"(acc) : "m"(*(const Lanes*)w), "x"(x.first));
    asm("%{vex%} vpdpbusd %1, %2, %0" : "+x"(acc) : "m"(*(const Lanes*)(w + APART)), "x"(x.second));
#endif
    return acc;
}
#elif defined(__AVX2__)
template <int APART>
inline Sums multiply_add(Sums acc, const Eight& x, const int8_t* w) {
#if defined(__AVX512F__)
    const Sums ones = (Sums)_mm512_set1_epi16(1);
#else
    const Sums ones = (Sums)_mm256_set1_epi16(1);
#endif
    Sums first, second;
    asm("vpmaddubsw %5, %3, %1\n\t"
        "vpmaddubsw %6, %4, %2\n\t"
        "vpaddw %2, %1, %1\n\t"
        "vpmaddwd %7, %1, %1\n\t"
        "vpaddd %1, %0, %0"
        : "+v"(acc), "=&v"(first), "=&v"(second)
        : "v"(x.first), "v"(x.second), "m"(*(const Lanes*)w), "m"(*(const Lanes*)(w + APART)), "v"(ones));
    return acc;
}
#else
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
#endif

}  // namespace
