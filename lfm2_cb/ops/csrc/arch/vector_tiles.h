// csrc/arch/tiles.h by the vectors of csrc/arch/lanes.h, for processors without matrix units that multiply pairs of
// bf16 at full rate.
//
// Tiles 0 ... 3 hold sums, in the first-level cache. Tiles 4 ... 7 are factors: they are read where they lie when they
// are multiplied, so what is there must not change between loading and multiplying.
#pragma once

#include "arch/lanes.h"

namespace {

using TileSums = float[TILE_ROWS][TILE_ROWS];

// Where a tile is read from, and the bytes from row to row.
struct Factor {
    const char* from;
    int64_t stride;
};

// sums[i] += a by b[i], one or two tiles: sixteen sums at a time are kept in registers. A tile is as wide as a line, so
// rows that are apart have their next lines prefetched, as what is multiplied next. (Rows that are a multiple of 2 KB
// apart have few places in the first-level cache. In-place products of 32, 64 and 128 rows for the linears of a 350M
// model made 0.60, 0.51 and 0.73 TFLOP/s without it and 0.71, 0.75 and 0.79 with it: two cores of an AMD EPYC, Zen 5,
// which make 1.0 at most.)
template <int N>
[[gnu::always_inline]] inline void add_products(TileSums* const (&sums)[N], Factor a, const Factor (&b)[N]) {
    constexpr int ROWS = 16 / N;
    for (int row = 0; row < TILE_ROWS; row += ROWS) {
        const char* rows = a.from + row * a.stride;
        vec acc[N][ROWS];
        UNROLLED for (int r = 0; r < ROWS; r++) {
            if (a.stride != LINE) prefetch_line(rows + r * a.stride + LINE);
            UNROLLED for (int i = 0; i < N; i++) acc[i][r] = load((*sums[i])[row + r]);
        }
        for (int k = 0; k < TILE_ROWS; k++) {
            pairs columns[N];
            UNROLLED for (int i = 0; i < N; i++) columns[i] = load_pairs((const bf16*)(b[i].from + k * b[i].stride));
            UNROLLED for (int r = 0; r < ROWS; r++) {
                const pairs factor = fill_pairs((const bf16*)(rows + r * a.stride) + 2 * k);
                UNROLLED for (int i = 0; i < N; i++) acc[i][r] = dot_bf16(acc[i][r], columns[i], factor);
            }
        }
        UNROLLED for (int r = 0; r < ROWS; r++)
            UNROLLED for (int i = 0; i < N; i++) store((*sums[i])[row + r], acc[i][r]);
    }
}

class Tiles {
  public:
    static constexpr bool BY_VECTORS = true;

    template <int t>
    [[gnu::always_inline]] void zero() {
        memset(sums[t], 0, TILE_BYTES);
    }
    template <int t>
    [[gnu::always_inline]] void load(const void* from, int64_t stride) {
        if constexpr (t < SUMS)
            for (int m = 0; m < TILE_ROWS; m++) memcpy(sums[t][m], (const char*)from + m * stride, LINE);
        else
            factors[t - SUMS] = {(const char*)from, stride};
    }
    template <int t>
    [[gnu::always_inline]] void stream(const void* from, int64_t stride) {
        load<t>(from, stride);
    }
    template <int t>
    [[gnu::always_inline]] void store(void* to, int64_t stride) const {
        for (int m = 0; m < TILE_ROWS; m++) memcpy((char*)to + m * stride, sums[t][m], LINE);
    }
    template <int t>
    void keep_awake() {}

    template <int c, int a, int b>
    [[gnu::always_inline]] void multiply_bf16() {
        add_products<1>({&sums[c]}, factors[a - SUMS], {factors[b - SUMS]});
    }
    template <class Between>
    [[gnu::always_inline]] void multiply_square_by_rows(Between between) {
        between();
        add_products<2>({&sums[0], &sums[1]}, factors[0], {factors[2], factors[3]});
        add_products<2>({&sums[2], &sums[3]}, factors[1], {factors[2], factors[3]});
    }
    template <class Between>
    [[gnu::always_inline]] void multiply_square_by_columns(Between between) {
        multiply_square_by_rows(between);
    }

  private:
    static constexpr int SUMS = 4;

    alignas(64) TileSums sums[SUMS];
    Factor factors[8 - SUMS];
};

}  // namespace
