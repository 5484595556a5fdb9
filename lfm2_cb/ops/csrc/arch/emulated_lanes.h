// csrc/arch/lanes.h in the compiler's own vectors, except for the products that ARM has instructions for.
#pragma once

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "arch/arm/lanes.h"
#else
namespace {

inline vec dot_bf16(vec acc, pairs a, pairs b) {
    acc += (vec)(a & -65536) * (vec)(b & -65536);
    return acc + (vec)(a << 16) * (vec)(b << 16);
}
inline ivec dot_bytes(ivec acc, ivec a, ivec b) {
    for (int shift = 0; shift < 32; shift += 8) acc += (a >> shift & 255) * (b << (24 - shift) >> 24);
    return acc;
}

}  // namespace
#endif

namespace {

inline pairs round_to_pairs(vec first, vec second) {
    hvec both[2] = {__builtin_convertvector(nearest_bf16(first), hvec),
                    __builtin_convertvector(nearest_bf16(second), hvec)};
    return load_pairs((const bf16*)both);
}
template <int begin>
inline pairs interleave(pairs a, pairs b) {
    uint16_t x[32], y[32], mixed[32];
    memcpy(x, &a, sizeof a), memcpy(y, &b, sizeof b);
    for (int i = 0; i < 16; i++) {
        const int from = i / 4 * 8 + begin + i % 4;
        mixed[2 * i] = x[from], mixed[2 * i + 1] = y[from];
    }
    return load_pairs((const bf16*)mixed);
}
inline pairs interleave_low(pairs a, pairs b) { return interleave<0>(a, b); }
inline pairs interleave_high(pairs a, pairs b) { return interleave<4>(a, b); }
inline void interleave_bytes(const ivec* rows, ivec* to) {
    for (int i = 0; i < 4; i++)
        for (int lane = 0; lane < W; lane++) {
            const int at = lane / 4 * 16 + 4 * i + lane % 4;
            int8_t four[4];
            for (int r = 0; r < 4; r++) four[r] = ((const int8_t*)(rows + r))[at];
            memcpy((char*)(to + i) + 4 * lane, four, 4);
        }
}
inline void store_low_bytes(void* to, ivec v) {
    for (int i = 0; i < W; i++) ((char*)to)[i] = v[i];
}
inline bool any_above(vec a, vec b) {
    for (int i = 0; i < W; i++)
        if (a[i] > b[i]) return true;
    return false;
}
inline vec fraction(vec x) {
    for (int i = 0; i < W; i++) x[i] = x[i] == -INFINITY ? 0 : x[i] - floorf(x[i]);
    return x;
}
inline vec times_power_of_2(vec p, vec x) {
    for (int i = 0; i < W; i++) p[i] *= exp2f(floorf(x[i]));
    return p;
}
inline pairs load_pairs(const int8_t* p) {
    vec both[2];
    for (int i = 0; i < 2 * W; i++) both[i / W][i % W] = p[i];
    return round_to_pairs(both[0], both[1]);
}
struct FlushSubnormals {
    FlushSubnormals() {}
};

}  // namespace
