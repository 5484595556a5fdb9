// Vectors of 16-bit integers, and sums of their products: what csrc/quantized.cpp computes with.
#pragma once

#include "simd.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// V: LANES 16-bit values. Sums: of their products, by pairs.
typedef int32_t Sums __attribute__((vector_size(4 * W)));
typedef int32_t ivec4 __attribute__((vector_size(16)));
typedef float vec4 __attribute__((vector_size(16)));
constexpr int LANES = 2 * W;
#if defined(__AVX512F__)
typedef __m512i V;
inline V load_weights(const int8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline V load_inputs(const int16_t* p) { return _mm512_loadu_si512(p); }
#if defined(__AVX512VNNI__)
inline Sums multiply_add(Sums acc, V w, V x) { return (Sums)_mm512_dpwssd_epi32((V)acc, w, x); }
#else
inline Sums multiply_add(Sums acc, V w, V x) { return acc + (Sums)_mm512_madd_epi16(w, x); }
#endif
inline ivec4 fold(Sums v) {
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256((V)v), _mm512_extracti64x4_epi64((V)v, 1));
    return (ivec4)_mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
#elif defined(__AVX2__)
typedef __m256i V;
inline V load_weights(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline V load_inputs(const int16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Sums multiply_add(Sums acc, V w, V x) {
    // As written: compilers load the inputs once for each output, and the loads are then what is waited for.
#if defined(__AVXVNNI__)
    asm("%{vex%} vpdpwssd %1, %2, %0" : "+x"(acc) : "x"(w), "x"(x));
#else
    V products;
    asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(products) : "x"(w), "x"(x));
#endif
    return acc;
}
inline ivec4 fold(Sums v) {
    return (ivec4)_mm_add_epi32(_mm256_castsi256_si128((V)v), _mm256_extracti128_si256((V)v, 1));
}
#else
typedef int16_t V __attribute__((vector_size(4 * W)));
typedef int8_t Bytes __attribute__((vector_size(2 * W)));
inline V load_weights(const int8_t* p) {
    Bytes bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, V);
}
inline V load_inputs(const int16_t* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline Sums multiply_add(Sums acc, V w, V x) {
    const ivec ws = (ivec)w, xs = (ivec)x;  // two values each, apart as vectors: one by one takes long to compile
    return acc + (ws << 16 >> 16) * (xs << 16 >> 16) + (ws >> 16) * (xs >> 16);
}
inline ivec4 fold(Sums v) { return v; }
#endif

// Lane i: the sum of v[i]'s lanes, (0 + 1) + (2 + 3) for every instruction set.
#if defined(__AVX2__)
inline ivec4 sum_each4(const ivec4* v) {
    __m128i low = _mm_hadd_epi32((__m128i)v[0], (__m128i)v[1]), high = _mm_hadd_epi32((__m128i)v[2], (__m128i)v[3]);
    return (ivec4)_mm_hadd_epi32(low, high);
}
inline vec4 sum_each4(const vec4* v) {
    __m128 low = _mm_hadd_ps((__m128)v[0], (__m128)v[1]), high = _mm_hadd_ps((__m128)v[2], (__m128)v[3]);
    return (vec4)_mm_hadd_ps(low, high);
}
#else
template <class Vec4>
inline Vec4 sum_each4(const Vec4* v) {
    Vec4 sums;
    for (int i = 0; i < 4; i++) sums[i] = (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
    return sums;
}
#endif

inline vec4 to_floats(ivec4 v) { return __builtin_convertvector(v, vec4); }
inline vec4 to_floats(vec4 v) { return v; }

}  // namespace
