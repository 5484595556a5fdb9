// csrc/arch/dot.h's products by VNNI, or by AVX2 and AVX-512 without it.
//
// In assembly, as weights are then no instructions of their own but operands in memory; with 32 registers, those of
// several rows are loaded once.
#pragma once

#include <immintrin.h>

namespace {

typedef Sums Lanes __attribute__((aligned(1), may_alias));  // in memory

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
#if defined(__AVX512VNNI__)
template <int>
inline Sums multiply_add(Sums acc, const Eight& x, const Eight& w) {
    asm("vpdpbusd %1, %2, %0" : "+v"(acc) : "v"(w.first), "v"(x.first));
    asm("vpdpbusd %1, %2, %0" : "+v"(acc) : "v"(w.second), "v"(x.second));
    return acc;
}
#endif
#else
// Two instructions' products are summed in 16 bits before they are widened. What is summed, inputs 0, 1, 4, 5 and
// 2, 3, 6, 7 each, never overflows: see ops/linear/int8.py.
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
#endif

}  // namespace
