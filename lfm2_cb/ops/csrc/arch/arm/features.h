// Which of the instruction sets that sources are compiled for an ARM processor (aarch64) supports, beyond NEON.
#pragma once

#if defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

bool processor_supports_isa() {
    bool all = true;
#if defined(__linux__)
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    const unsigned long dotprod = 1ul << 20, i8mm = 1ul << 13, bf16 = 1ul << 14;  // as Linux numbers them
#else
    const unsigned long first = 0, second = 0, dotprod = 1, i8mm = 1, bf16 = 1;  // there is no asking
#endif
    (void)first, (void)second, (void)dotprod, (void)i8mm, (void)bf16;
#if defined(__ARM_FEATURE_DOTPROD)
    all = all && (first & dotprod) != 0;
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
    all = all && (second & i8mm) != 0;
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    all = all && (second & bf16) != 0;
#endif
    return all;
}

void probe_assembler() {
#if defined(__ARM_FEATURE_DOTPROD)
    asm volatile("sdot v0.4s, v0.16b, v0.16b" : : : "v0");
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
    asm volatile("usdot v0.4s, v0.16b, v0.16b" : : : "v0");
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    asm volatile("bfdot v0.4s, v0.8h, v0.8h" : : : "v0");
#endif
}

}  // namespace
