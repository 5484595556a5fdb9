// Memory that a kernel needs while it runs: packed operands, and sums that it accumulates later.
#pragma once

#include "core/tiling.h"

// Bytes, aligned to a line and not set to anything, from what the calling thread keeps for this (core/scratch.cpp).
// They are given back by the same thread, the last taken first.
extern "C" void* lfm2_cb_take_scratch(int64_t bytes);
extern "C" void lfm2_cb_give_scratch_back(void* memory, int64_t bytes);

namespace {

// An array of `count` values, freed at the end of its scope; null where `count` is 0.
template <class T>
class ScratchArray {
  public:
    explicit ScratchArray(int64_t count) : bytes(count * sizeof(T)), values((T*)lfm2_cb_take_scratch(bytes)) {}
    ~ScratchArray() { lfm2_cb_give_scratch_back(values, bytes); }
    ScratchArray(const ScratchArray&) = delete;
    ScratchArray& operator=(const ScratchArray&) = delete;

    operator T*() const { return values; }

  private:
    const int64_t bytes;
    T* const values;
};

}  // namespace
