// csrc/arch/lanes.h by the instructions of ARM: sixteen lanes are four registers. What is no product is left to the
// compiler.
#pragma once

#include <arm_neon.h>

namespace {

// Parts of sixteen lanes, a register each, made of those of up to three others.
template <class V, class Part, class Operation>
inline V by_registers(const V& a, const ivec& b, const ivec& c, Operation operation) {
    Part parts[4];
    int32x4_t bs[4], cs[4];
    memcpy(parts, &a, sizeof parts), memcpy(bs, &b, sizeof bs), memcpy(cs, &c, sizeof cs);
    UNROLLED for (int i = 0; i < 4; i++) parts[i] = operation(parts[i], bs[i], cs[i]);
    V result;
    memcpy(&result, parts, sizeof result);
    return result;
}

// acc + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]. (In assembly: given vectors of bf16, GCC 12 makes a constant 1.0 one of
// fp16.)
inline vec dot_bf16(vec acc, pairs a, pairs b) {
    return by_registers<vec, float32x4_t>(acc, a, b, [](float32x4_t sum, int32x4_t x, int32x4_t y) {
        asm("bfdot %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(x), "w"(y));
        return sum;
    });
}

// acc + fours of unsigned bytes times fours of signed ones
inline ivec dot_bytes(ivec acc, ivec a, ivec b) {
    return by_registers<ivec, int32x4_t>(acc, a, b, [](int32x4_t sum, int32x4_t x, int32x4_t y) {
        return vusdotq_s32(sum, (uint8x16_t)x, (int8x16_t)y);
    });
}

}  // namespace
