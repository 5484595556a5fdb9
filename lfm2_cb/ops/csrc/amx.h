// The tile registers of AMX: eight matrices of 16 rows of 64 bytes, and their products.
//
// Compiled with -mamx-tile -mamx-bf16 -mamx-int8 these are the instructions; else the same operations in plain C, as
// Intel's manual (SDM, volume 2) writes them down, so that what is built of them can be tested on any processor.
#pragma once

#include "simd.h"

namespace {

constexpr int64_t SIDE = 16;          // rows of a tile, and its columns of 4 bytes
constexpr int64_t LINE = 64;          // bytes of a row
constexpr int64_t TILE = SIDE * LINE; // bytes

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)

// This thread's tile registers, for as long as the object lives. Afterwards they are released, or the system would go
// on saving them with the thread.
//
// Not the compiler's intrinsics: GCC's do not say that loading a tile reads memory, so what was written just before
// might not be there yet; and they want a register's number as a token, which no template has.
class Tiles {
  public:
    Tiles() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        static_assert(sizeof shapes == 64, "what ldtilecfg reads");
        for (int t = 0; t < 8; t++) {
            shapes.row_bytes[t] = LINE;
            shapes.rows[t] = SIDE;
        }
        asm volatile("ldtilecfg %0" : : "m"(shapes));
    }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;

    template <int t>
    void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(t));
    }
    // 16 rows of 64 bytes, `stride` bytes apart
    template <int t>
    void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(t) : "memory");
    }
    template <int t>
    void store(void* to, int64_t stride) const {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(t) : "memory");
    }
    // c[m][n] += sum over k of a[m][k] * b[k][n]. Pairs of bf16: a[m][2k], a[m][2k + 1] and b[k][2n], b[k][2n + 1].
    template <int c, int a, int b>
    void multiply_bf16() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }
    // Fours of bytes likewise, unsigned by signed, in 32-bit integers.
    template <int c, int a, int b>
    void multiply_bytes() {
        asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }
};

#else

class Tiles {
  public:
    Tiles() { memset(tiles, 0xff, sizeof tiles); }  // NaN, lest it be forgotten to zero one

    template <int t>
    void zero() {
        memset(tiles[t], 0, TILE);
    }
    template <int t>
    void load(const void* from, int64_t stride) {
        for (int m = 0; m < SIDE; m++) memcpy(tiles[t] + m * LINE, (const char*)from + m * stride, LINE);
    }
    template <int t>
    void store(void* to, int64_t stride) const {
        for (int m = 0; m < SIDE; m++) memcpy((char*)to + m * stride, tiles[t] + m * LINE, LINE);
    }
    // Within a tile the even and the odd products have sums of their own; whatever is subnormal is zero.
    template <int c, int a, int b>
    void multiply_bf16() {
        for (int m = 0; m < SIDE; m++) {
            float even[SIDE] = {}, odd[SIDE] = {}, sums[SIDE];
            for (int k = 0; k < SIDE; k++)
                for (int n = 0; n < SIDE; n++) {
                    even[n] = normal(even[n] + bf16_at(a, m, 2 * k) * bf16_at(b, k, 2 * n));
                    odd[n] = normal(odd[n] + bf16_at(a, m, 2 * k + 1) * bf16_at(b, k, 2 * n + 1));
                }
            memcpy(sums, tiles[c] + m * LINE, LINE);
            for (int n = 0; n < SIDE; n++) sums[n] = normal(normal(sums[n]) + normal(even[n] + odd[n]));
            memcpy(tiles[c] + m * LINE, sums, LINE);
        }
    }
    template <int c, int a, int b>
    void multiply_bytes() {
        for (int m = 0; m < SIDE; m++) {
            uint32_t sums[SIDE];  // which wrap around, as the instruction's do
            memcpy(sums, tiles[c] + m * LINE, LINE);
            for (int k = 0; k < SIDE; k++)
                for (int n = 0; n < SIDE; n++)
                    for (int i = 0; i < 4; i++)
                        sums[n] += (uint8_t)tiles[a][m * LINE + 4 * k + i] * (int8_t)tiles[b][k * LINE + 4 * n + i];
            memcpy(tiles[c] + m * LINE, sums, LINE);
        }
    }

  private:
    alignas(64) char tiles[8][TILE];

    static float normal(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
    float bf16_at(int t, int row, int column) const {
        bf16 value;
        memcpy(&value, tiles[t] + row * LINE + 2 * column, 2);
        return normal(to_float(value));
    }
};

#endif

}  // namespace
