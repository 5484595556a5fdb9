// How work is split: into tiles of rows, and into parts.
#pragma once

#include "core/simd.h"

namespace {

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t size, int64_t multiple) { return ceil_div(size, multiple) * multiple; }

struct Range {
    int64_t begin, end;

    int64_t size() const { return end - begin; }
};

// Part i of n, as equal as can be, of 0 ... size.
inline Range part_of(int64_t size, int64_t i, int64_t n) { return {size * i / n, size * (i + 1) / n}; }

// How many of `size` a task has: at most `most`, and such that every thread has as many tasks.
inline int64_t even_share(int64_t size, int64_t threads, int64_t most) {
    return ceil_div(size, ceil_div(size, threads * most) * threads);
}

// Threads for work of which `per_thread` is worth waking one.
inline int64_t worthwhile_threads(int64_t work, int64_t per_thread, int64_t threads) {
    return min(1 + work / per_thread, threads);
}

// body(begin, rows) for tiles of at most `most` rows, as equal as can be: 7 rows are 4 + 3 rather than 6 + 1.
template <class Body>
inline void for_each_tile(Range range, int64_t most, Body body) {
    for (int64_t left = ceil_div(range.size(), most), rows; left > 0; range.begin += rows, left--) {
        rows = ceil_div(range.size(), left);
        body(range.begin, rows);
    }
}

template <int n>
struct Constant {
    static constexpr int value = n;
};

// body(Constant<n>) for the n of 1 ... MOST that is `value`: code of its own for each number of rows.
template <int MOST, class Body>
inline void with_constant(int64_t value, Body body) {
    if (value == MOST)
        body(Constant<MOST>());
    else if constexpr (MOST > 1)
        with_constant<MOST - 1>(value, body);
}

}  // namespace
