// x @ weight.T (+ bias) for many rows of x, summed in fp32; the weights are read from where they are.
//
// A thread takes a group of GROUP outputs and a chunk of DEPTH inputs of them at a time, and lays these weights out in
// fp32, in panels of PANEL outputs as [input][output]: what the second cache holds. Each tile of ROWS rows of x then
// stays in the first cache while the panels pass over it, PANEL sums of ROWS rows being kept in registers. A sum is
// taken input by input, so a row's result does not depend on the rows beside it, nor on the number of threads.
#include "simd.h"

namespace {

constexpr int VECTORS = W == 16 ? 4 : 2, PANEL = VECTORS * W;  // AVX2 has 16 registers: 6 * 2 sums, 2 weights, 1 input
constexpr int ROWS = 6;
constexpr int64_t GROUP = 64, DEPTH = 1024;

struct Matmul {
    const float* x;  // [rows, in]
    int64_t rows, in, outputs;
};

// Where a tile's sums go between two chunks, and at the end.
template <class T>
struct Target {
    T* out;        // [rows, outputs], from the tile's first row and output on
    const T* bias; // from the tile's first output on, or null
    float* sums;   // [rows, GROUP], likewise
    bool first, last;
    int64_t outputs, width;  // width: how many of the panel's outputs there are
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

template <int rows, class T>
inline void tile(const float* x, int64_t in, const float* panel, int64_t depth, const Target<T>& target) {
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
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) {
            if (!target.last) {
                store(target.sums + r * GROUP + v * W, sums[r][v]);
            } else if ((v + 1) * W <= target.width) {
                const vec bias = target.bias ? load(target.bias + v * W) : vec{};
                store(target.out + r * target.outputs + v * W, sums[r][v] + bias);
            } else {
                for (int64_t o = v * W; o < target.width; o++)
                    assign(target.out + r * target.outputs + o,
                           sums[r][v][o - v * W] + (target.bias ? to_float(target.bias[o]) : 0.0f));
            }
        }
}

// A group's outputs of rows begin ... end. scratch: the panels, then the sums of the rows.
template <class T>
void compute_group(const Matmul& m, const T* w, const T* bias, T* out, int64_t group, int64_t begin, int64_t end,
                   float* scratch) {
    const int64_t first = group * GROUP, outputs = m.outputs - first < GROUP ? m.outputs - first : GROUP;
    float *panels = scratch, *sums = scratch + GROUP * DEPTH;
    for (int64_t from = 0; from < m.in; from += DEPTH) {
        const int64_t depth = m.in - from < DEPTH ? m.in - from : DEPTH;
        lay_out(w + first * m.in + from, m.in, outputs, depth, panels);
        for (int64_t row = begin; row < end; row += ROWS)
            for (int64_t o = 0; o < outputs; o += PANEL) {
                const float *x = m.x + row * m.in + from, *panel = panels + o * DEPTH;
                const Target<T> target = {out + row * m.outputs + first + o,
                                          bias ? bias + first + o : nullptr,
                                          sums + (row - begin) * GROUP + o,
                                          from == 0,
                                          from + depth == m.in,
                                          m.outputs,
                                          outputs - o < PANEL ? outputs - o : PANEL};
                switch (end - row) {
                    case 1: tile<1>(x, m.in, panel, depth, target); break;
                    case 2: tile<2>(x, m.in, panel, depth, target); break;
                    case 3: tile<3>(x, m.in, panel, depth, target); break;
                    case 4: tile<4>(x, m.in, panel, depth, target); break;
                    case 5: tile<5>(x, m.in, panel, depth, target); break;
                    default: tile<ROWS>(x, m.in, panel, depth, target);
                }
            }
    }
}

// Threads share the groups; where these are few, rows are split as well, in multiples of a tile.
template <class T>
void matmul(const Matmul& m, const T* w, const T* bias, T* out, int64_t threads) {
    const int64_t groups = (m.outputs + GROUP - 1) / GROUP, tiles = (m.rows + ROWS - 1) / ROWS;
    int64_t splits = (4 * threads + groups - 1) / groups;
    splits = splits < (tiles + 7) / 8 ? splits : (tiles + 7) / 8;
    const int64_t most = (tiles + splits - 1) / splits * ROWS;
#pragma omp parallel num_threads(threads)
    {
        const int64_t bytes = (GROUP * DEPTH + (m.in > DEPTH ? most * GROUP : 0)) * sizeof(float);
        float* scratch = (float*)aligned_alloc(64, bytes);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < groups * splits; task++) {
            const int64_t begin = task % splits * most, end = begin + most < m.rows ? begin + most : m.rows;
            if (begin < end) compute_group(m, w, bias, out, task / splits, begin, end, scratch);
        }
        free(scratch);
    }
}

}  // namespace

// x [rows, in], w [outputs, in], bias [outputs] or null, out [rows, outputs], all in one dtype; sums are in fp32
KERNEL(many_rows_linear_f32)(const float* x, const float* w, const float* bias, float* out, int64_t rows, int64_t in,
                             int64_t outputs, int64_t threads) {
    matmul({x, rows, in, outputs}, w, bias, out, threads);
}
REPLAYABLE(many_rows_linear_f32)

KERNEL(many_rows_linear_bf16)(const bf16* x, const bf16* w, const bf16* bias, bf16* out, int64_t rows, int64_t in,
                              int64_t outputs, int64_t threads) {
    float* inputs = (float*)aligned_alloc(64, (rows * in + 15) / 16 * 16 * sizeof(float));
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        int64_t k = r * in;
        for (; k + W <= (r + 1) * in; k += W) store(inputs + k, load(x + k));
        for (; k < (r + 1) * in; k++) inputs[k] = to_float(x[k]);
    }
    matmul({inputs, rows, in, outputs}, w, bias, out, threads);
    free(inputs);
}
REPLAYABLE(many_rows_linear_bf16)
