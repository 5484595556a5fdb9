// Memory asked for while there is other work to do.
#pragma once

#include "simd.h"

namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t ratio_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What comes next in memory, some lines at a time, into the second-level cache.
struct Ahead {
    static constexpr int64_t LINE = 64;  // bytes

    const char *next, *end;
    int64_t lines;

    void ask() {
        const char* stop = end - next < lines * LINE ? end : next + lines * LINE;
        for (const char* line = next; line < stop; line += LINE) __builtin_prefetch(line, 0, 2);
        next = stop;
    }
};

}  // namespace
