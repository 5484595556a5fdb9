// x @ weight.T (+ bias) for many rows of x, summed in fp32; the weights are read from where they are.
//
// A thread takes a group of GROUP outputs and a chunk of DEPTH inputs of them at a time, and lays these weights out in
// fp32, in panels of PANEL outputs as [input][output]: what the second cache holds. Each tile of ROWS rows of x then
// stays in the first cache while the panels pass over it, PANEL sums of ROWS rows being kept in registers. A sum is
// taken input by input, so a row's result does not depend on the rows beside it, nor on the number of threads.
#pragma once

#include "core/epilogue.h"
#include "core/scratch.h"
#include "core/threads.h"

namespace {
namespace many_rows {

constexpr int VECTORS = W == 16 ? 4 : 2, PANEL = VECTORS * W;  // AVX2 has 16 registers: 6 * 2 sums, 2 weights, 1 input
constexpr int ROWS = 6;
constexpr int64_t GROUP = 64, DEPTH = 1024;

template <class T, class Epilogue>
struct Matmul {
    const float* x;  // [rows, in]
    const T* w;      // [outputs, in]
    int64_t rows, in, outputs;
    Epilogue epilogue;
};

// Where a tile's sums go between two chunks, and at the end.
struct Target {
    float* sums;  // [rows, GROUP], from the tile's first row and output on
    bool first, last;
    int64_t row, output, width;  // of the tile; width: how many of the panel's outputs there are
};

// panels[p][k][o] = w[p * PANEL + o][k] for `outputs` rows of w of which `depth` inputs are taken; zeros beyond.
template <class T>
void lay_out(const T* w, int64_t in, int64_t outputs, int64_t depth, float* panels) {
    for (int64_t first = 0; first < outputs; first += W) {
        float* to = panels + first / PANEL * DEPTH * PANEL + first % PANEL;
        int64_t k = 0;
        if (first + W <= outputs)
            for (; k + W <= depth; k += W) {
                vec v[W];
                for (int i = 0; i < W; i++) v[i] = load(w + (first + i) * in + k);
                transpose(v);
                for (int i = 0; i < W; i++) store(to + (k + i) * PANEL, v[i]);
            }
        for (; k < depth; k++)
            for (int i = 0; i < W; i++) to[k * PANEL + i] = first + i < outputs ? to_float(w[(first + i) * in + k]) : 0;
    }
}

template <int rows, class Epilogue>
inline void tile(const float* x, int64_t in, const float* panel, int64_t depth, const Target& target,
                 const Epilogue& epilogue) {
    vec sums[rows][VECTORS] = {};
    if (!target.first)
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++) sums[r][v] = load(target.sums + r * GROUP + v * W);
    for (int64_t k = 0; k < depth; k++) {
        vec weights[VECTORS];
        for (int v = 0; v < VECTORS; v++) weights[v] = load(panel + k * PANEL + v * W);
        for (int r = 0; r < rows; r++) {
            const vec input = fill(x[r * in + k]);
            for (int v = 0; v < VECTORS; v++) sums[r][v] += input * weights[v];
        }
    }
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < VECTORS; v++) store(target.sums + r * GROUP + v * W, sums[r][v]);
        if (target.last) epilogue(target.row + r, target.output, target.sums + r * GROUP, target.width);
    }
}

// A group's outputs of some rows. scratch: the panels, then the sums of the rows.
template <class T, class Epilogue>
void compute_group(const Matmul<T, Epilogue>& m, int64_t group, Range rows, float* scratch) {
    const int64_t first = group * GROUP, outputs = min(m.outputs - first, GROUP);
    float *panels = scratch, *sums = scratch + GROUP * DEPTH;
    const bool one_chunk = m.in <= DEPTH;  // then no tile's sums are kept
    for (int64_t from = 0; from < m.in; from += DEPTH) {
        const int64_t depth = min(m.in - from, DEPTH);
        lay_out(m.w + first * m.in + from, m.in, outputs, depth, panels);
        for (int64_t row = rows.begin; row < rows.end; row += ROWS)
            for (int64_t o = 0; o < outputs; o += PANEL) {
                const float *x = m.x + row * m.in + from, *panel = panels + o * DEPTH;
                const Target target = {sums + (one_chunk ? 0 : row - rows.begin) * GROUP + o, from == 0,
                                       from + depth == m.in, row, first + o, min(outputs - o, PANEL)};
                with_constant<ROWS>(min(rows.end - row, ROWS), [&](auto count) {
                    tile<decltype(count)::value>(x, m.in, panel, depth, target, m.epilogue);
                });
            }
    }
}

// Values of compute_group's scratch for as many rows.
inline int64_t scratch_size(int64_t rows, int64_t in) {
    return GROUP * DEPTH + (in <= DEPTH ? ROWS : rows) * GROUP;
}

// Threads share the groups; where these are few, rows are split as well, in multiples of a tile.
template <class T, class Epilogue>
void matmul(const Matmul<T, Epilogue>& m, int64_t threads) {
    const int64_t groups = ceil_div(m.outputs, GROUP), tiles = ceil_div(m.rows, ROWS);
    const int64_t splits = min(ceil_div(4 * threads, groups), ceil_div(tiles, 8));
    const int64_t most = ceil_div(tiles, splits) * ROWS;
    parallel(groups * splits, 1, threads, [&](const Tasks& tasks) {
        const ScratchArray<float> scratch(scratch_size(most, m.in));
        for (Range task; tasks.take(task);) {
            const int64_t begin = task.begin % splits * most;
            if (begin < m.rows) compute_group(m, task.begin / splits, {begin, min(begin + most, m.rows)}, scratch);
        }
    });
}

}  // namespace many_rows
}  // namespace
