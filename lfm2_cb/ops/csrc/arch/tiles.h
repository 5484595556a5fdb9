// Eight tiles, matrices of 16 rows of 64 bytes, and their products: the registers of AMX, a processor's matrix units.
// Tiles 0 ... 3 are for sums, 4 ... 7 for what is multiplied.
//
// Compiled with -mamx-tile -mamx-bf16 -mamx-int8 these are the instructions. Compiled with -DZEN4, tiles of bf16 are
// multiplied by vectors, two by two at once. Else they are the instructions in plain C, so that what is built of them
// can be tested on any processor.
#pragma once

#include "core/prefetch.h"

namespace {

constexpr int64_t TILE_ROWS = 16;           // rows of a tile, and its columns of 4 bytes
constexpr int64_t TILE_BYTES = TILE_ROWS * LINE;  // bytes

}  // namespace

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include "arch/x86/tiles.h"
#elif defined(ZEN4)
#include "arch/vector_tiles.h"
#else
#include "arch/emulated_tiles.h"
#endif
