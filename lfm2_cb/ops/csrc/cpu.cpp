// supported_<isa>(): whether this processor, and its operating system, have the instruction set. Compiled by itself
// first, to ask; an old compiler, or its assembler, fails at it, and the instruction set is left out.
#include "simd.h"

#if defined(__AMX_TILE__) || defined(__AVXVNNI__)
#include <cpuid.h>
#endif
#if defined(__AVXVNNI__)
namespace {

bool processor_has_avx_vnni() {  // not every compiler's __builtin_cpu_supports knows it
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4)) != 0;
}

}  // namespace
#endif

#if defined(__AMX_TILE__)
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// The tile registers, of the size that csrc/amx.h counts on, and their products of bf16 and int8.
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

}  // namespace
#endif

extern "C" int JOIN(supported, ISA)() {
#if defined(__AVX512F__)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("fma");
#if defined(__AMX_TILE__)
    return avx512 && __builtin_cpu_supports("avx512vnni") && processor_has_amx() && system_has_amx();
#elif defined(__AVX512VNNI__)
    return avx512 && __builtin_cpu_supports("avx512vnni");
#else
    return avx512;
#endif
#elif defined(__AVX2__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#if defined(__AVXVNNI__)
    return avx2 && processor_has_avx_vnni();
#else
    return avx2;
#endif
#else
    return 1;
#endif
}

// Never called: here an assembler fails that does not know the instructions.
extern "C" void JOIN(probe, ISA)() {
#if defined(__AMX_TILE__)
    asm volatile("tilerelease");
#elif defined(__AVX512VNNI__)
    asm volatile("vpdpbusd %zmm0, %zmm0, %zmm0");
#elif defined(__AVXVNNI__)
    asm volatile("{vex} vpdpbusd %ymm0, %ymm0, %ymm0");
#endif
}
