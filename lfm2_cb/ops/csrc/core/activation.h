// SiLU, of results in fp32 or to be rounded to bf16.
#pragma once

#include "core/simd.h"

namespace {

// x * sigmoid(x)
inline vec silu(vec x, float) { return x / (1.0f + exponential(-x)); }

#if defined(__AVX512F__)
// To be rounded to bf16: e^-x as a power of 2, to 3 millionths, and a reciprocal in place of the quotient. (x is beyond
// these bounds only where the result is x, or too small for its rounding to matter.)
inline vec silu(vec x, bf16) {
    const vec power = -maximum(fill(-120.0f), -maximum(fill(-120.0f), x * -1.44269504088896341f));
    const vec magic = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const vec shifted = power + magic, r = power - (shifted - magic);
    vec p = fill(1.33335581e-3f);  // Taylor's
    p = p * r + 9.61812911e-3f;
    p = p * r + 5.55041087e-2f;
    p = p * r + 2.40226507e-1f;
    p = p * r + 6.93147181e-1f;
    p = p * r + 1.0f;
    const vec denominator = 1.0f + (vec)((ivec)p + (((ivec)shifted - (ivec)magic) << 23));
    vec reciprocal;  // to 14 bits
    asm("vrcp14ps %1, %0" : "=v"(reciprocal) : "v"(denominator));
    return x * (reciprocal * (2.0f - denominator * reciprocal));
}
#else
inline vec silu(vec x, bf16) { return silu(x, 0.0f); }
#endif

}  // namespace
