// csrc/arch/tiles.h in plain C, as Intel's manual (SDM, volume 2) writes the operations down.
#pragma once

namespace {

class Tiles {
  public:
    static constexpr bool BY_VECTORS = false;

    Tiles() { memset(tiles, 0xff, sizeof tiles); }  // NaN, lest it be forgotten to zero one

    template <int t>
    void zero() {
        memset(tiles[t], 0, TILE_BYTES);
    }
    template <int t>
    void load(const void* from, int64_t stride) {
        for (int m = 0; m < TILE_ROWS; m++) memcpy(tiles[t] + m * LINE, (const char*)from + m * stride, LINE);
    }
    template <int t>
    void stream(const void* from, int64_t stride) {
        load<t>(from, stride);
    }
    template <int t>
    void keep_awake() {}
    template <int t>
    void store(void* to, int64_t stride) const {
        for (int m = 0; m < TILE_ROWS; m++) memcpy((char*)to + m * stride, tiles[t] + m * LINE, LINE);
    }
    // Within a tile the even and the odd products have sums of their own; whatever is subnormal is zero.
    template <int c, int a, int b>
    void multiply_bf16() {
        for (int m = 0; m < TILE_ROWS; m++) {
            float even[TILE_ROWS] = {}, odd[TILE_ROWS] = {}, sums[TILE_ROWS];
            for (int k = 0; k < TILE_ROWS; k++)
                for (int n = 0; n < TILE_ROWS; n++) {
                    even[n] = normal(even[n] + bf16_at(a, m, 2 * k) * bf16_at(b, k, 2 * n));
                    odd[n] = normal(odd[n] + bf16_at(a, m, 2 * k + 1) * bf16_at(b, k, 2 * n + 1));
                }
            memcpy(sums, tiles[c] + m * LINE, LINE);
            for (int n = 0; n < TILE_ROWS; n++) sums[n] = normal(normal(sums[n]) + normal(even[n] + odd[n]));
            memcpy(tiles[c] + m * LINE, sums, LINE);
        }
    }
    template <class Between>
    void multiply_square_by_rows(Between between) {
        between();
        multiply_bf16<0, 4, 6>();
        multiply_bf16<1, 4, 7>();
        multiply_bf16<2, 5, 6>();
        multiply_bf16<3, 5, 7>();
    }
    template <class Between>
    void multiply_square_by_columns(Between between) {
        multiply_square_by_rows(between);
    }
    template <int c, int a, int b>
    void multiply_bytes() {
        for (int m = 0; m < TILE_ROWS; m++) {
            uint32_t sums[TILE_ROWS];  // which wrap around, as the instruction's do
            memcpy(sums, tiles[c] + m * LINE, LINE);
            for (int k = 0; k < TILE_ROWS; k++)
                for (int n = 0; n < TILE_ROWS; n++)
                    for (int i = 0; i < 4; i++)
                        sums[n] += (int8_t)tiles[a][m * LINE + 4 * k + i] * (int8_t)tiles[b][k * LINE + 4 * n + i];
            memcpy(tiles[c] + m * LINE, sums, LINE);
        }
    }

  private:
    alignas(64) char tiles[8][TILE_BYTES];

    static float normal(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
    float bf16_at(int t, int row, int column) const {
        bf16 value;
        memcpy(&value, tiles[t] + row * LINE + 2 * column, 2);
        return normal(to_float(value));
    }
};

}  // namespace
