// csrc/arch/dot.h's products by the instructions of ARM: unsigned by signed bytes (i8mm), or signed by signed ones.
#pragma once

#include <arm_neon.h>

namespace {

static_assert(W == 4, "a register of NEON");

inline Sums multiply_four(Sums acc, Sums x, const int8_t* weights) {
    const int8x16_t w = vld1q_s8(weights);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return (Sums)vusdotq_s32((int32x4_t)acc, (uint8x16_t)x, w);
#else
    // x - 128 is signed; what that takes off, 128 times the weights, is added again.
    const int32x4_t weights_sum = vdotq_s32(vdupq_n_s32(0), w, vdupq_n_s8(1));
    const Sums sums = (Sums)vdotq_s32((int32x4_t)acc, (int8x16_t)(x ^ (int32_t)0x80808080), w);
    return sums + ((Sums)weights_sum << 7);
#endif
}
template <int APART>
inline Sums multiply_add(Sums acc, const Eight& x, const int8_t* w) {
    return multiply_four(multiply_four(acc, x.first, w), x.second, w + APART);
}

}  // namespace
