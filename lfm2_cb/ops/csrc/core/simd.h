// What every kernel file includes. It is compiled once for each instruction set, with ISA=plain, avx2, avx512, ...:
// vectors are as wide as that one's registers, in the compiler's own vector types, so the code is written once.
//
// Everything but the kernels must be in an unnamed namespace (or static), and only the C part of the standard library
// may be used: of a shared inline function, the linker would keep one instruction set's copy for all.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

// types alone
#include <type_traits>
#include <utility>

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
// KERNEL(f)(...): a function that Python calls by the name f, of pointers, int64_t and double; last the threads.
#define KERNEL(name) extern "C" void JOIN(name, ISA)
// REPLAYABLE(f), after the kernel f: it can also be called with its arguments in memory, as csrc/replay.cpp does.
#define REPLAYABLE(name) \
    extern "C" void JOIN(replay_##name, ISA)(const Arg* args) { call_with(JOIN(name, ISA), args); }

// Loops marked so are unrolled whole, so that their arrays are registers.
#define UNROLLED _Pragma("GCC unroll 16")

union Arg {
    void* pointer;
    int64_t integer;
    double real;
};

namespace {

#if defined(__AVX512F__) || defined(EMULATED) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr int W = 16;  // fp32 lanes
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef uint16_t hvec __attribute__((vector_size(2 * W)));
struct bf16 {
    uint16_t bits;
};

template <class T>
inline T take(const Arg& arg) {
    if constexpr (std::is_pointer<T>::value) return (T)arg.pointer;
    else if constexpr (std::is_floating_point<T>::value) return arg.real;
    else return arg.integer;
}

template <class... T, size_t... i>
inline void call_with(void (*kernel)(T...), const Arg* args, std::index_sequence<i...>) {
    kernel(take<T>(args[i])...);
}

template <class... T>
inline void call_with(void (*kernel)(T...), const Arg* args) {
    call_with(kernel, args, std::index_sequence_for<T...>());
}

// (Of 16 lanes GCC makes seven instructions.)
inline uvec widened(hvec h) {
#if defined(__AVX512F__)
    uvec u;
    asm("vpmovzxwd %1, %0" : "=v"(u) : "vm"(h));
    return u;
#else
    return __builtin_convertvector(h, uvec);
#endif
}

inline vec load(const float* p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

inline vec load(const bf16* p) {
    hvec h;
    memcpy(&h, p, sizeof h);
    return (vec)(widened(h) << 16);
}

inline void store(float* p, vec v) { memcpy(p, &v, sizeof v); }

#if defined(__AVX512BF16__)
// The nearest bf16 of each lane: ties to even as in torch, NaN stays NaN. (The instruction makes 0 of what is
// subnormal.)
inline hvec to_bf16(vec v) {
    hvec h;
    asm("vcvtneps2bf16 %1, %0" : "=v"(h) : "v"(v));
    return h;
}

inline void store(bf16* p, vec v) {
    hvec h = to_bf16(v);
    memcpy(p, &h, sizeof h);
}

inline uvec nearest_bf16(vec v) { return widened(to_bf16(v)); }
#else
// The bits of the nearest bf16 in the lower half of each lane: ties to even as in torch, NaN stays NaN.
inline uvec nearest_bf16(vec v) {
    uvec u = (uvec)v, nan = (uvec)(v != v);
    uvec rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return (rounded & ~nan) | (nan & 0x7fc0);
}

inline void store(bf16* p, vec v) {
    hvec h = __builtin_convertvector(nearest_bf16(v), hvec);
    memcpy(p, &h, sizeof h);
}
#endif

// Two vectors side by side. (The instruction makes 0 of what is subnormal.)
inline void store_two(float* p, vec first, vec second) {
    store(p, first);
    store(p + W, second);
}
inline void store_two(bf16* p, vec first, vec second) {
#if defined(__AVX512BF16__)
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(first) : "v"(first), "v"(second));
    memcpy(p, &first, sizeof first);
#else
    store(p, first);
    store(p + W, second);
#endif
}

// Two vectors rounded to bf16, lane by lane: the first in a lane's lower half, the second in its upper one. (The
// instruction makes 0 of what is subnormal.)
inline uvec rounded_pairs(vec lower, vec upper) {
#if defined(__AVX512BF16__)
    typedef uint16_t halves __attribute__((vector_size(64)));
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(lower) : "v"(lower), "v"(upper));
    constexpr halves sides = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (uvec)__builtin_shuffle((halves)lower, sides);
#else
    return nearest_bf16(lower) | nearest_bf16(upper) << 16;
#endif
}

// What would be stored, as fp32.
template <class T>
inline vec rounded(vec v) {
    return sizeof(T) == sizeof(float) ? v : (vec)(nearest_bf16(v) << 16);
}

// Both as they would be stored.
inline void round_both(vec& a, vec& b, float) {}
inline void round_both(vec& a, vec& b, bf16) {
    const uvec both = rounded_pairs(a, b);
    a = (vec)(both << 16);
    b = (vec)(both & 0xffff0000);
}

inline vec fill(float x) { return x - vec{}; }  // not 0 + x, which is work: it makes 0 of -0

// a * b + c, rounded once where the instruction set can: written out, as compilers fuse it in one place and not in
// another.
inline vec multiply_add(vec a, vec b, vec c) {
#if defined(__FMA__)
    asm("vfmadd231ps %1, %2, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
#elif defined(__aarch64__)
    float32x4_t as[W / 4], bs[W / 4], cs[W / 4];
    memcpy(as, &a, sizeof a), memcpy(bs, &b, sizeof b), memcpy(cs, &c, sizeof c);
    UNROLLED for (int i = 0; i < W / 4; i++) cs[i] = vfmaq_f32(cs[i], as[i], bs[i]);
    memcpy(&c, cs, sizeof c);
    return c;
#else
    return a * b + c;
#endif
}
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
inline void assign(float* p, float x) { *p = x; }
inline void assign(bf16* p, float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    p->bits = x != x ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

// What would be stored, as fp32.
template <class T>
inline float rounded(float x) {
    T stored;
    assign(&stored, x);
    return to_float(stored);
}

inline vec select(ivec condition, vec yes, vec no) {
    return (vec)((condition & (ivec)yes) | (~condition & (ivec)no));
}

inline vec maximum(vec a, vec b) {
#if defined(__AVX512F__)
    vec larger;  // (GCC compares and selects.)
    asm("vmaxps %2, %1, %0" : "=v"(larger) : "v"(a), "v"(b));
    return larger;
#else
    return a > b ? a : b;
#endif
}

// Lane l: lane lanes[l] of a, and from W on of b.
template <int... lanes>
inline vec shuffle(vec a, vec b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, lanes...);
#else
    return __builtin_shuffle(a, b, (ivec){lanes...});
#endif
}

template <int bit, int... l>
inline float sum(vec v, std::integer_sequence<int, l...> lanes) {
    v += shuffle<(l ^ bit)...>(v, v);
    if constexpr (bit > 1) return sum<bit / 2>(v, lanes);
    return v[0];
}

inline float sum(vec v) { return sum<W / 2>(v, std::make_integer_sequence<int, W>()); }

// Lanes whose number has the bit: of b, the others of a; to each is added its neighbour (the bit flipped) in the same.
template <int bit, int... l>
inline vec add_neighbours(vec a, vec b, std::integer_sequence<int, l...>) {
    return shuffle<(l & bit ? W + l : l)...>(a, b) + shuffle<(l ^ bit)...>(shuffle<(l & bit ? W + l : l)...>(b, a), b);
}

// Lane l: the sum of v[l]'s lanes; v is used up.
template <int bit = 1>
inline vec sum_each(vec* v) {
    if constexpr (bit < W) {
        for (int j = 0; j < W / 2 / bit; j++)
            v[j] = add_neighbours<bit>(v[2 * j], v[2 * j + 1], std::make_integer_sequence<int, W>());
        return sum_each<2 * bit>(v);
    } else {
        return v[0];
    }
}

// v, W vectors of W lanes, transposed in place: squares on either side of the diagonal are exchanged, wider and wider.
template <int bit, int... l>
inline void exchange(vec* v, std::integer_sequence<int, l...>) {
    for (int i = 0; i < W; i++)
        if (!(i & bit)) {
            vec a = v[i], b = v[i | bit];
            v[i] = shuffle<(l & bit ? W + (l ^ bit) : l)...>(a, b);
            v[i | bit] = shuffle<(l & bit ? W + l : l ^ bit)...>(a, b);
        }
}

template <int bit = 1>
inline void transpose(vec* v) {
    exchange<bit>(v, std::make_integer_sequence<int, W>());
    if constexpr (2 * bit < W) transpose<2 * bit>(v);
}

inline float largest(vec v) {
    float m = v[0];
    for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m;
    return m;
}

// e^x to 2 units in the last place; 0 below the smallest normal number, so also for -inf. Cephes' polynomial.
inline vec exponential(vec x) {
    const vec low = fill(-87.33654f), high = fill(88.37626f);
    ivec underflow = (ivec)(x < low);
    x = select((ivec)(x > high), high, select(underflow, low, x));
    const vec magic = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    vec shifted = x * 1.44269504088896341f + magic;
    vec n = shifted - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = fill(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vec scale = (vec)(((ivec)shifted - (ivec)magic + 127) << 23);
    return select(underflow, vec{}, p * scale);
}

}  // namespace
