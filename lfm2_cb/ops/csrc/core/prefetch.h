// Prefetching memory while other work is done.
#pragma once

#include "core/tiling.h"

namespace {

constexpr int64_t LINE = 64;  // bytes

// A line into the cache level of the hint: 3 for the first, 2 for the second. Not by the compiler's builtin where
// there is another way: GCC takes a function that does nothing else for one without effect, and leaves its calls out.
template <int HINT = 3>
inline void prefetch_line(const void* line) {
#if defined(__x86_64__)
    if (HINT == 3)
        asm volatile("prefetcht0 %0" : : "m"(*(const char*)line));
    else
        asm volatile("prefetcht1 %0" : : "m"(*(const char*)line));
#else
    __builtin_prefetch(line, 0, HINT);
#endif
}

// The first `bytes` at `from`, into the cache level of the hint. Prefetching beyond the end of memory does no harm.
template <int HINT = 3>
inline void prefetch_lines(const char* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE) prefetch_line<HINT>(from + i);
}

// Runs of memory of one length, some lines a step, into the second-level cache.
struct Prefetcher {
    const char *next, *end;                         // of the run that is prefetched now
    int64_t lines = 0, bytes = 0, stride = 0, more = 0;  // of a run; bytes from one to the next; those behind this one

    // [from, end), spread over so many steps
    static Prefetcher over(const char* from, const char* end, int64_t steps) {
        return {from, end, ceil_div(end - from, LINE * steps)};
    }
    // `runs` of so many bytes, likewise
    static Prefetcher over(const char* from, int64_t bytes, int64_t stride, int64_t runs, int64_t steps) {
        return {from, from + bytes, ceil_div(runs * ceil_div(bytes, LINE), steps), bytes, stride, runs - 1};
    }

    [[gnu::always_inline]] void step() {
        const char* stop = end - next < lines * LINE ? end : next + lines * LINE;
        for (; next < stop; next += LINE) prefetch_line<2>(next);
        if (next >= end && more > 0) {
            end += stride;
            next = end - bytes;
            more--;
        }
    }
};

// As many runs of memory side by side, of each a line in turn. A run is of `pieces`, `stride` bytes from one to the
// next.
template <int RUNS>
struct InterleavedPrefetcher {
    const char* runs[RUNS];
    int64_t lines, bytes, stride, pieces;  // lines a step; bytes of a piece
    int64_t run = 0, begin = 0, offset = 0;  // of the piece and the line that are prefetched next

    [[gnu::always_inline]] void step() {
        for (int64_t i = 0; i < lines && pieces > 0; i++) {
            prefetch_line<2>(runs[run] + offset);
            if (++run == RUNS) next_line();
        }
    }

  private:
    void next_line() {
        run = 0;
        offset += LINE;
        if (offset - begin < bytes) return;
        offset = begin += stride;
        pieces--;
    }
};

}  // namespace
