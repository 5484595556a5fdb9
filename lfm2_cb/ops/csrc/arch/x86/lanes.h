// csrc/arch/lanes.h by the instructions of AVX-512, AVX512-BF16 and VNNI.
#pragma once

#include <immintrin.h>

namespace {

// acc + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]
inline vec dot_bf16(vec acc, pairs a, pairs b) {
    return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}

// Thirty-two lanes rounded to bf16, ties to even.
inline pairs round_to_pairs(vec first, vec second) {
    return (pairs)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

// Two rows of 32 dims: the pairs of dims 0..3 of every eight, and of dims 4..7.
inline pairs interleave_low(pairs a, pairs b) { return (pairs)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b); }
inline pairs interleave_high(pairs a, pairs b) { return (pairs)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b); }

// Four rows of 64 bytes: of every sixteen, fours of bytes of dims 4 * i ... 4 * i + 3 go to to[i].
inline void interleave_bytes(const ivec* rows, ivec* to) {
    const __m512i* r = (const __m512i*)rows;
    const __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpackhi_epi8(r[0], r[1]);
    const __m512i c = _mm512_unpacklo_epi8(r[2], r[3]), d = _mm512_unpackhi_epi8(r[2], r[3]);
    to[0] = (ivec)_mm512_unpacklo_epi16(a, c), to[1] = (ivec)_mm512_unpackhi_epi16(a, c);
    to[2] = (ivec)_mm512_unpacklo_epi16(b, d), to[3] = (ivec)_mm512_unpackhi_epi16(b, d);
}

// acc + fours of unsigned bytes times fours of signed ones
inline ivec dot_bytes(ivec acc, ivec a, ivec b) {
    return (ivec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
}

// (Masks of ones, as GCC 12 warns of its own header at the forms without.)
inline void store_low_bytes(void* to, ivec v) {
    _mm_storeu_si128((__m128i*)to, _mm512_maskz_cvtepi32_epi8(-1, (__m512i)v));
}

// Whether a lane of a is above b's.
inline bool any_above(vec a, vec b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0; }

// x - floor(x); 0 of -inf
inline vec fraction(vec x) { return (vec)_mm512_maskz_reduce_ps(-1, (__m512)x, 1); }
// p * 2^floor(x)
inline vec times_power_of_2(vec p, vec x) { return (vec)_mm512_maskz_scalef_ps(-1, (__m512)p, (__m512)x); }

inline pairs load_pairs(const int8_t* p) {
    const __m512i first = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
    const __m512i second = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p + 16)));
    return round_to_pairs((vec)_mm512_cvtepi32_ps(first), (vec)_mm512_cvtepi32_ps(second));
}

// Numbers below the smallest normal one are 0 while it lives: they take the processor a hundred times as long.
class FlushSubnormals {
  public:
    FlushSubnormals() : before(_mm_getcsr()) { _mm_setcsr(before | 0x8040); }
    ~FlushSubnormals() { _mm_setcsr(before); }
    FlushSubnormals(const FlushSubnormals&) = delete;

  private:
    const unsigned before;
};

}  // namespace
