// Memory asked for while there is other work to do.
#pragma once

#include "core/tiling.h"

namespace {

constexpr int64_t LINE = 64;  // bytes

// The first `bytes` at `from`, into the cache level of the hint. Asking beyond the end of memory does no harm.
template <int HINT = 3>
inline void prefetch_lines(const char* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch(from + i, 0, HINT);
}

// A run of memory, some lines a step, into the second-level cache.
struct Prefetcher {
    const char *next, *end;
    int64_t lines;

    // [from, end), spread over so many steps
    static Prefetcher over(const char* from, const char* end, int64_t steps) {
        return {from, end, ceil_div(end - from, LINE * steps)};
    }

    void step() {
        const char* stop = end - next < lines * LINE ? end : next + lines * LINE;
        for (; next < stop; next += LINE) __builtin_prefetch(next, 0, 2);
    }
};

}  // namespace
