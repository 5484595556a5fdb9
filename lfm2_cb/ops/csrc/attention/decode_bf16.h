// Decode attention over a cache of bf16, by products of pairs.
#pragma once

#include "attention/decode_tile.h"

namespace {

template <int DIM>
struct Query<DIM, bf16> {
    pairs dims[DIM / 32];
    static constexpr float scale = 1;  // of the scores

    void set(const bf16* q) {
        for (int c = 0; c < DIM / 32; c++) dims[c] = load_pairs(q + 32 * c);
    }
};

// Scores of HEADS queries and sixteen keys; `ahead`, sixteen rows, is fetched meanwhile.
template <int DIM, int HEADS>
inline void score(const Query<DIM, bf16>* q, const bf16* keys, const bf16* ahead, vec (&scores)[HEADS]) {
    vec sums[HEADS][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vec x[HEADS][4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const bf16* row = keys + (4 * i + j) * DIM;
            prefetch_row<DIM>(ahead, 4 * i + j);
            for (int h = 0; h < HEADS; h++) {
                x[h][j] = vec{};
#pragma GCC unroll 4
                for (int c = 0; c < DIM / 32; c++) x[h][j] = dot_bf16(x[h][j], load_pairs(row + 32 * c), q[h].dims[c]);
            }
        }
        for (int h = 0; h < HEADS; h++) sums[h][i] = sums_of_four(x[h]);
    }
    for (int h = 0; h < HEADS; h++) scores[h] = sums_of_sixteen(sums[h]);
}

template <>
struct Weights<bf16> {
    alignas(64) bf16 rounded[KEYS];

    // Returns what to add to the sum: the rounded ones, so that they are shares of a whole.
    vec set(const vec* exponentials, const vec*) {
        vec sum = {};
        for (int g = 0; g < GROUPS; g += 2) {
            const pairs weights = round_to_pairs(exponentials[g], exponentials[g + 1]);
            store_pairs(rounded + g * SIXTEEN, weights);
            sum = dot_bf16(sum, weights, ones());
        }
        return sum;
    }
};

// The values of sixteen keys, from key `first` of the weights.
template <int DIM, int HEADS>
inline void mix(const Weights<bf16>* weights, int first, const bf16* values, const bf16* ahead,
                vec (&mixed)[HEADS][DIM / W]) {
#pragma GCC unroll 2
    for (int k = 0; k < SIXTEEN; k += 2) {
        const bf16* row = values + k * DIM;
        prefetch_row<DIM>(ahead, k), prefetch_row<DIM>(ahead, k + 1);
        pairs w[HEADS];
        for (int h = 0; h < HEADS; h++) w[h] = fill_pairs(weights[h].rounded + first + k);
#pragma GCC unroll 4
        for (int c = 0; c < DIM / 32; c++) {
            const pairs a = load_pairs(row + 32 * c), b = load_pairs(row + DIM + 32 * c);
            const pairs low = interleave_low(a, b), high = interleave_high(a, b);
#pragma GCC unroll 2
            for (int h = 0; h < HEADS; h++) {
                mixed[h][2 * c] = dot_bf16(mixed[h][2 * c], low, w[h]);
                mixed[h][2 * c + 1] = dot_bf16(mixed[h][2 * c + 1], high, w[h]);
            }
        }
    }
}

template <int DIM, int HEADS>
inline void mix_tile(const Weights<bf16>* weights, const bf16* const* rows, int groups, const bf16* const* ahead,
                     State<DIM>* states) {
    vec mixed[HEADS][DIM / W];
    for (int h = 0; h < HEADS; h++)
        for (int c = 0; c < DIM / W; c++) mixed[h][c] = states[h].mixed[c];
    for (int g = 0; g < groups; g++) mix<DIM, HEADS>(weights, g * SIXTEEN, rows[g], ahead[g], mixed);
    for (int h = 0; h < HEADS; h++)
        for (int c = 0; c < DIM / W; c++) states[h].mixed[c] = mixed[h][c];
}

// The dims in their order.
template <int DIM>
inline void set_right(const vec* mixed, vec* to, bf16) {
    for (int c = 0; c < DIM / W; c += 2) {
        to[c] = first_halves(mixed[c], mixed[c + 1]);
        to[c + 1] = second_halves(mixed[c], mixed[c + 1]);
    }
}

}  // namespace
