// Shared by decode attention (decode_attention.cpp) over every kind of cache: the state of a head, and the online
// softmax over a tile's scores.
#pragma once

#include "attention/bf16_attention.h"
#include "core/prefetch.h"

namespace {

// What has been found so far of a head.
template <int DIM>
struct State {
    vec sum;             // of exponentials, in lanes
    vec mixed[DIM / W];  // values, in the order in which interleaving leaves the dims
    float max;           // of scores, as powers of 2

    void clear() {
        memset(this, 0, sizeof *this);
        max = -INFINITY;
    }
};

// Start to fetch a row, if there is one.
template <int DIM, class C>
inline void prefetch_row(const C* rows, int i) {
    if (rows) prefetch_lines<2>((const char*)(rows + i * DIM), DIM * sizeof(C));
}

// Lanes added up across vectors of fp32 or integers: of x[0 ... 3] by fours of lanes, then of four such by sixteens.
template <class V>
inline V add_across(V a, V b) {
    return (V)unpack_low((vec)a, (vec)b) + (V)unpack_high((vec)a, (vec)b);
}
template <class V>
inline V sums_of_four(const V* x) {
    return add_across(add_across(x[0], x[2]), add_across(x[1], x[3]));
}
template <class V>
inline V add_fours(V a, V b) {
    return (V)shuffle<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>((vec)a, (vec)b) +
           (V)shuffle<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>((vec)a, (vec)b);
}
template <class V>
inline V sums_of_sixteen(const V* x) {
    return add_fours(add_fours(x[0], x[1]), add_fours(x[2], x[3]));
}

// Scores of up to 64 keys become exponentials, and the state of a head is brought to the new maximum.
template <int DIM>
inline void online_softmax_update(vec* scores, int keys, float scale, State<DIM>& state) {
    if (keys < KEYS)
        for (int g = 0; g < GROUPS; g++) scores[g] = first_lanes(scores[g], keys - g * SIXTEEN, -INFINITY);
    const float top = scale * largest_lane(maximum(maximum(scores[0], scores[1]), maximum(scores[2], scores[3])));
    if (top > state.max) {
        const vec shrink = exp2_precise(fill(state.max - top));
        state.max = top;
        state.sum *= shrink;
        for (int c = 0; c < DIM / W; c++) state.mixed[c] *= shrink;
    }
    const float base = state.max == -INFINITY ? 0 : state.max;  // all scores so far are -inf
    for (int g = 0; g < GROUPS; g++) scores[g] = exp2_precise(scores[g] * scale - base);
}

// A cache of C's is what decode_bf16.h and decode_int8.h say: by these, a query made ready for scores and weights made
// ready for values, and by `score`, `mix_tile` and `set_right`.
template <int DIM, class C>
struct Query;
template <class C>
struct Weights;

}  // namespace
