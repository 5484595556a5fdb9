// Which of the instruction sets that sources are compiled for an x86 processor supports.
#pragma once

#if defined(__AMX_TILE__) || defined(__AVXVNNI__) || defined(ZEN4)
#include <cpuid.h>
#endif
#if defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__AVXVNNI__)
bool processor_has_avx_vnni() {  // not every compiler's __builtin_cpu_supports knows it
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4)) != 0;
}
#endif

#if defined(__AMX_TILE__)
// The tile registers, of the size that arch/tiles.h counts on, and their products of bf16 and int8.
bool processor_has_amx() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25;
    if ((d & bf16) == 0 || (d & tile) == 0 || (d & int8) == 0) return false;
    if (!__get_cpuid_count(0x1d, 1, &a, &b, &c, &d)) return false;  // palette 1
    const unsigned bytes_per_tile = a >> 16, bytes_per_row = b & 0xffff, tiles = b >> 16, rows = c & 0xffff;
    return bytes_per_tile >= 1024 && bytes_per_row >= 64 && tiles >= 8 && rows >= 16;
}

// The system saves the tiles with a thread (XCR0), and lets this process use them, which it must be asked for.
bool system_has_amx() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    unsigned a, b, c, d;
    __cpuid(1, a, b, c, d);
    if ((c & (1u << 27)) == 0) return false;  // OSXSAVE: XCR0 can be read
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    const unsigned tile_config = 1u << 17, tile_data = 1u << 18;
    if ((low & tile_config) == 0 || (low & tile_data) == 0) return false;
    const long get_permitted = 0x1022, request = 0x1023, tile_data_number = 18;
    unsigned long permitted = 0;
    return syscall(SYS_arch_prctl, request, tile_data_number) == 0 &&
           syscall(SYS_arch_prctl, get_permitted, &permitted) == 0 && (permitted & tile_data) != 0;
#else
    return false;
#endif
}
#endif

#if defined(ZEN4)
// AMD's (since Zen 4) multiply and add pairs of bf16 as often as single fp32 numbers. Intel's do it half as often, so
// that fp32 is as fast.
bool processor_is_amd() {
    unsigned a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d)) return false;
    return b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
}
#endif

bool processor_supports_isa() {
    bool all = true;
#if defined(__AVX2__)
    all = all && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#if defined(__AVXVNNI__)
    all = all && processor_has_avx_vnni();
#endif
#if defined(__AVX512F__)
    all = all && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
#if defined(__AVX512VNNI__)
    all = all && __builtin_cpu_supports("avx512vnni");
#endif
#if defined(__AVX512BF16__)
    all = all && __builtin_cpu_supports("avx512bf16");
#endif
#if defined(ZEN4)
    all = all && processor_is_amd();
#endif
#if defined(__AMX_TILE__)
    all = all && processor_has_amx() && system_has_amx();
#endif
    return all;
}

void probe_assembler() {
#if defined(__AMX_TILE__)
    asm volatile("tilerelease");
#endif
#if defined(__AVX512BF16__)
    asm volatile("vdpbf16ps %zmm0, %zmm0, %zmm0");
#endif
#if defined(__AVX512VNNI__)
    asm volatile("vpdpbusd %zmm0, %zmm0, %zmm0");
#endif
#if defined(__AVXVNNI__)
    asm volatile("{vex} vpdpbusd %ymm0, %ymm0, %ymm0");
#endif
}

}  // namespace
