// Keys in the layout of tiles.
#pragma once

#include "arch/tiles.h"
#include "attention/bf16_attention.h"

namespace {

constexpr int TILE_VALUES = TILE_BYTES / 2;  // of bf16

// Sixteen keys, a tile for 32 dims: [pair of dims][key][2].
template <int DIM, class C>
inline void pack_keys(const C* rows, bf16 (*to)[TILE_VALUES]) {
    for (int step = 0; step < DIM / 32; step++) {
        vec v[SIXTEEN];
        for (int k = 0; k < SIXTEEN; k++) v[k] = (vec)load_pairs(rows + k * DIM + 32 * step);
        transpose(v);
        memcpy(to[step], v, sizeof v);
    }
}

}  // namespace
