// The tile registers of AMX: eight matrices of 16 rows of 64 bytes, and their products.
//
// Compiled with -mamx-tile -mamx-bf16 -mamx-int8 these are the instructions; else the same operations in plain C, so
// that what is built of them can be tested on any processor.
#pragma once

#include "core/prefetch.h"

namespace {

constexpr int64_t TILE_ROWS = 16;           // rows of a tile, and its columns of 4 bytes
constexpr int64_t TILE_BYTES = TILE_ROWS * LINE;  // bytes

}  // namespace

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include "arch/x86/tiles.h"
#else
#include "arch/emulated_tiles.h"
#endif
