// swiglu(x @ W13.T) @ W2.T for weights of 8 bits and many rows, by the processor's matrix units: to the bit what the
// two products of csrc/linear/tile_int8.h give.
//
// Gated results are the inputs of the second product. A thread computes one group of these inputs after another and
// rounds them in place, in the second-level cache: in memory they take half the space, are written in whole lines, and
// are not read again for rounding.
#pragma once

#include "linear/tile_int8.h"

namespace {
namespace int8::tiles {

// The epilogue of gates and values whose results are kept: of a group of outputs, for all rows or for 32.
template <class T>
struct KeepGated : ScaleAndSwiGLU<T> {
    T* kept;  // [rows][GROUP]
    int64_t first_row, mask, first_output;

    T* at(int64_t row) const { return kept + ((row - first_row) & mask) * GROUP; }
    void prefetch(int64_t, int64_t) const {}
    void operator()(int64_t row, int64_t output, const float* sums, int64_t) const {
        this->finish(output, sums, at(row) + output - first_output);
    }
};

// The gated results that are a group of the second product's inputs, of some rows, rounded into its tiles.
template <class T, class Second>
void gate_group(const Product<T, ScaleAndSwiGLU<T>>& p, const Second& second, int64_t group, Range row_groups,
                int64_t then) {
    const int64_t first = group * GROUP, last = min(first + GROUP, second.width);
    const Range pairs = {first / PANEL, last / PANEL};
    const bool at_once = block_bytes(p.rows) / (2 * PANEL * p.padded()) >= pairs.size();
    const int64_t rows = at_once ? ROWS : row_groups.size() * ROWS;
    const ScratchArray<T> scratch(rows * GROUP);
    const KeepGated<T> keep = {p.epilogue, scratch, row_groups.begin * ROWS, at_once ? ROWS - 1 : -1, first};
    const Product<T, KeepGated<T>> kept = {p.x,       p.weights, p.sums,         p.rows, p.width,
                                           p.outputs, p.inputs,  p.input_scales, keep};
    compute(kept, row_groups, pairs, then, [&](int64_t g) {
        for (int64_t row = g * ROWS; row < min((g + 1) * ROWS, p.rows); row++)
            lay_out(second, keep.at(row) - first, row, group);
    });
}

// second.inputs and input_scales are made here; second.x is not read.
template <class T, class Second>
void mlp(const Product<T, ScaleAndSwiGLU<T>>& gated, const Second& second, int64_t threads) {
    round_inputs_of(gated, threads);
    // Threads share the groups of the second product's inputs and, of those that are left over, the rows.
    const int64_t row_groups = ceil_div(gated.rows, ROWS), cells = second.groups() * row_groups;
    const int64_t parts = min(threads, cells);
    parallel_for(parts, threads, [&](int64_t task) {
        for (Range mine = part_of(cells, task, parts); mine.size() > 0;) {
            const int64_t group = mine.begin / row_groups, from = mine.begin % row_groups;
            const int64_t end = min(row_groups, from + mine.size());
            const int64_t then = min(ceil_div(mine.end, row_groups) * GROUP, second.width) / PANEL;
            gate_group(gated, second, group, {from, end}, then);
            mine.begin += end - from;
        }
    });
    multiply_rounded(second, threads);
}

}  // namespace int8::tiles
}  // namespace
