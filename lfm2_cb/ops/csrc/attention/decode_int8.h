// Decode attention over a cache of 8 bits, by products of fours of bytes.
#pragma once

#include "attention/decode_tile.h"

namespace {

// A query in two bytes a dim, the upper and, in 128ths, what is left. The instruction wants bytes without a sign: the
// keys get 128 more, of which the sums are rid again.
template <int DIM>
struct Query<DIM, int8_t> {
    ivec dims[2][DIM / 64], offset[2];
    float scale;

    void set(const bf16* q) {
        vec top = fill(1e-20f), bad = {};
        for (int i = 0; i < DIM; i += W) {
            const vec x = load(q + i);
            top = maximum(top, maximum(x, -x)), bad += x - x;  // 0, or NaN
        }
        const float unit = largest_lane(top) / 127;
        int8_t bytes[2][DIM];
        for (int i = 0; i < DIM; i += W) {
            const vec x = load(q + i) / unit;
            const ivec upper = nearest_integers(x);
            store_low_bytes(bytes[0] + i, upper);
            store_low_bytes(bytes[1] + i, nearest_integers((x - __builtin_convertvector(upper, vec)) * 128));
        }
        memcpy(dims, bytes, sizeof dims);
        for (int part = 0; part < 2; part++) {
            offset[part] = ivec{};
            for (int c = 0; c < DIM / 64; c++)
                offset[part] -= dot_bytes(ivec{}, (int32_t)0x80808080 - ivec{}, dims[part][c]);
        }
        scale = unit / 128 + sum(bad);
    }
};

template <int DIM, int HEADS>
inline void score(const Query<DIM, int8_t>* q, const int8_t* keys, const int8_t* ahead, vec (&scores)[HEADS]) {
    ivec sums[HEADS][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        ivec x[HEADS][4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            prefetch_row<DIM>(ahead, 4 * i + j);
            ivec acc[HEADS][2];
            for (int h = 0; h < HEADS; h++) acc[h][0] = q[h].offset[0], acc[h][1] = q[h].offset[1];
            for (int c = 0; c < DIM / 64; c++) {
                ivec key;
                memcpy(&key, keys + (4 * i + j) * DIM + 64 * c, sizeof key);
                key ^= (int32_t)0x80808080;
                for (int h = 0; h < HEADS; h++)
                    for (int part = 0; part < 2; part++)
                        acc[h][part] = dot_bytes(acc[h][part], key, q[h].dims[part][c]);
            }
            for (int h = 0; h < HEADS; h++) x[h][j] = (acc[h][0] << 7) + acc[h][1];
        }
        for (int h = 0; h < HEADS; h++) sums[h][i] = sums_of_four(x[h]);
    }
    for (int h = 0; h < HEADS; h++) scores[h] = __builtin_convertvector(sums_of_sixteen(sums[h]), vec);
}

// Weights times the values' scales, in two bytes.
template <>
struct Weights<int8_t> {
    alignas(64) uint8_t bytes[2][KEYS];  // upper, lower
    float unit;

    vec set(const vec* exponentials, const vec* scales) {
        vec weights[GROUPS], sum = {}, top = fill(1e-30f), bad = {};
        for (int g = 0; g < GROUPS; g++) {
            sum += exponentials[g];
            weights[g] = exponentials[g] * scales[g];
            top = maximum(top, weights[g]), bad += weights[g] - weights[g];  // 0, or NaN
        }
        const float high = largest_lane(top);
        for (int g = 0; g < GROUPS; g++) {
            const ivec whole = nearest_integers(weights[g] * (65535 / high));
            store_low_bytes(bytes[0] + g * SIXTEEN, whole >> 8);
            store_low_bytes(bytes[1] + g * SIXTEEN, whole);
        }
        unit = high / 65535 + ::sum(bad);
        return sum;
    }
};

template <int DIM, int HEADS>
inline void mix_tile(const Weights<int8_t>* weights, const int8_t* const* rows, int groups, const int8_t* const* ahead,
                     State<DIM>* states) {
    for (int c = 0; c < DIM; c += 64) {
        ivec acc[HEADS][2][4] = {};
        for (int g = 0; g < groups; g++)
            for (int k = 0; k < SIXTEEN; k += 4) {
                if (!c)
                    for (int i = 0; i < 4; i++) prefetch_row<DIM>(ahead[g], k + i);
                ivec four[4], turned[4];
                for (int i = 0; i < 4; i++) memcpy(four + i, rows[g] + (k + i) * DIM + c, sizeof *four);
                interleave_bytes(four, turned);
                for (int h = 0; h < HEADS; h++)
                    for (int part = 0; part < 2; part++) {
                        const pairs w = fill_pairs((const bf16*)(weights[h].bytes[part] + g * SIXTEEN + k));
                        for (int i = 0; i < 4; i++) acc[h][part][i] = dot_bytes(acc[h][part][i], w, turned[i]);
                    }
            }
        for (int h = 0; h < HEADS; h++)
            for (int i = 0; i < 4; i++) {
                const ivec whole = (acc[h][0][i] << 8) + acc[h][1][i];
                states[h].mixed[c / W + i] += __builtin_convertvector(whole, vec) * weights[h].unit;
            }
    }
}

template <int DIM>
inline void set_right(const vec* mixed, vec* to, int8_t) {
    for (int c = 0; c < DIM / W; c += 4)
        for (int i = 0; i < 4; i++)
            for (int lane = 0; lane < 4; lane++)
                memcpy((float*)(to + c + lane) + 4 * i, (const float*)(mixed + c + i) + 4 * lane, 4 * sizeof(float));
}

}  // namespace
