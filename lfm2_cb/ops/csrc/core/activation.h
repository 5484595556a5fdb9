// SiLU, for results that stay in fp32 or are rounded to bf16.
#pragma once

#include "core/simd.h"

namespace {

// x * sigmoid(x)
inline vec silu(vec x, float) { return x / (1.0f + exponential(-x)); }

#if defined(__AVX512F__)
// To be rounded to bf16: e^-x as a power of 2, to 3 millionths, and a reciprocal in place of the quotient. (The bound
// keeps it finite; beyond it the result is too small for its rounding to matter.)
inline vec silu(vec x, bf16) {
    const vec power = -maximum(fill(-120.0f), x * 1.44269504f);
    vec r, exponential, reciprocal;
    asm("vreduceps $1, %1, %0" : "=v"(r) : "v"(power));  // what is above the whole number
    vec p = fill(1.342669701e-2f);
    p = p * r + 5.224245377e-2f;
    p = p * r + 2.412802143e-1f;
    p = p * r + 6.930448437e-1f;
    p = p * r + 1.0f;
    asm("vscalefps %2, %1, %0" : "=v"(exponential) : "v"(p), "v"(power));  // p * 2^floor(power)
    const vec denominator = 1.0f + exponential;
    asm("vrcp14ps %1, %0" : "=v"(reciprocal) : "v"(denominator));
    return x * (reciprocal * (2.0f - denominator * reciprocal));
}
#else
inline vec silu(vec x, bf16) { return silu(x, 0.0f); }
#endif

}  // namespace
