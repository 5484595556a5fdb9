// y * ratio + B (A x) + addend, for rows of one adapter: ops/adapters.py has the layout. B (A x) is rounded before it
// is added, as PEFT's is.
//
// Rows are shrunk to the rank, block by block of inputs, and expanded, panel by panel of outputs. A row's sums are
// taken in one order, whatever the rows beside it. Matrices are read sequentially, and prefetched into the
// second-level cache some KB ahead; at the end of a matrix, the next one is prefetched. (Measured on 2 cores of a Xeon
// with AMX, 64 adapters of rank 16 in bf16, where memory is read at 36 GB/s at most: 27 GB/s; into the first-level
// cache 26, 16 KB before their turn 26, with a look at every line where a matrix ends 21.)
#pragma once

#include "core/prefetch.h"

namespace {

struct Delta {  // as ops/adapters.py describes it
    const void *a, *b;
    const float *ratio, *addend;
    int64_t rank;

    bool is_none() const { return !a && !ratio && !addend; }
};

namespace delta {

constexpr int64_t PANEL = 32;       // inputs side by side in A, and outputs in B
constexpr int64_t AHEAD = 8192;     // bytes
constexpr int ROWS = 4, RANKS = 4;  // of a tile of sums
constexpr int FEW_ROWS_RANKS = 16;  // of a tile of one row
constexpr int EXPANDED = W == 16 ? 8 : 2;  // rows that expand together

// A block is one load: W fp32 in their order, or 2 * W bf16, first the even ones, then the odd ones.
template <class T>
constexpr int PARTS = sizeof(T) == 4 ? 1 : 2;
template <class T>
constexpr int BLOCK = W * PARTS<T>;
template <class T>
constexpr int BLOCKS = PANEL / BLOCK<T>;
template <class T>
constexpr int LINES = PANEL * sizeof(T) / LINE;

inline void load_block(const float* from, vec (&to)[1]) { to[0] = load(from); }
inline void load_block(const bf16* from, vec (&to)[2]) {
    uvec pairs;
    memcpy(&pairs, from, sizeof pairs);
    to[0] = (vec)(pairs << 16);
    to[1] = (vec)(pairs & 0xffff0000);
}
inline void store_block(float* to, const vec (&from)[1]) { store(to, from[0]); }
inline void store_block(bf16* to, const vec (&from)[2]) {
    const uvec pairs = nearest_bf16(from[0]) | nearest_bf16(from[1]) << 16;
    memcpy(to, &pairs, sizeof pairs);
}

// A matrix, and what is read after it: AHEAD bytes are from the end of the one to the beginning of the other.
struct Run {
    const char *end, *next;

    // From what is read now to what is to be prefetched.
    int64_t ahead(const void* now) const { return (const char*)now + AHEAD < end ? AHEAD : next - end + AHEAD; }
};

template <class T>
inline void prefetch_ahead(const T* line, int64_t ahead) {
    UNROLLED for (int i = 0; i < LINES<T>; i++) prefetch_line<2>((const char*)line + i * LINE + ahead);
}

// Values from one row of inputs in the order of blocks to the next.
inline int64_t stride_of(int64_t in) { return round_up(in, PANEL) + W; }

// A row of inputs in the order of blocks, with zeros to the end of the last panel.
template <class T>
void order_inputs(const T* x, int64_t in, float* to) {
    const int64_t whole = in / BLOCK<T> * BLOCK<T>;
    T rest[BLOCK<T>] = {};
    memcpy(rest, x + whole, (in - whole) * sizeof(T));
    for (int64_t k = 0; k < round_up(in, PANEL); k += BLOCK<T>) {
        vec block[PARTS<T>] = {};
        if (k < in) load_block(k < whole ? x + k : rest, block);
        for (int p = 0; p < PARTS<T>; p++) store(to + k + p * W, block[p]);
    }
}

template <class T>
struct Shrink {
    const T* a;      // [panels][rank][PANEL]
    const float* x;  // [rows][stride_of(in)], in the order of blocks
    float* h;        // [rows][h_stride], of which the first `rank`
    int64_t in, rank, h_stride;
    Run run;
};

template <int rows, int ranks, class T>
void shrink_tile(const Shrink<T>& s, int64_t row, int64_t rank) {
    vec sums[rows * ranks] = {};
    const int64_t stride = stride_of(s.in);
    const T* a = s.a + rank * PANEL;
    const float* x = s.x + row * stride;
    for (int64_t k = 0; k < s.in; k += PANEL, a += s.rank * PANEL) {
        const int64_t ahead = s.run.ahead(a);
        UNROLLED for (int i = 0; i < BLOCKS<T>; i++) {
            vec inputs[rows][PARTS<T>];
            UNROLLED for (int r = 0; r < rows; r++)
                UNROLLED for (int p = 0; p < PARTS<T>; p++)
                    inputs[r][p] = load(x + r * stride + k + i * BLOCK<T> + p * W);
            UNROLLED for (int j = 0; j < ranks; j++) {
                if (i == 0) prefetch_ahead(a + j * PANEL, ahead);
                vec weights[PARTS<T>];
                load_block(a + j * PANEL + i * BLOCK<T>, weights);
                UNROLLED for (int r = 0; r < rows; r++)
                    UNROLLED for (int p = 0; p < PARTS<T>; p++) sums[r * ranks + j] += weights[p] * inputs[r][p];
            }
        }
    }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int j = 0; j < ranks; j++) s.h[(row + r) * s.h_stride + rank + j] = sum(sums[r * ranks + j]);
}

template <class T>
void shrink(const Shrink<T>& s, int64_t rows) {
    if (rows == 1) {
        int64_t rank = 0;
        for (; rank + FEW_ROWS_RANKS <= s.rank; rank += FEW_ROWS_RANKS) shrink_tile<1, FEW_ROWS_RANKS>(s, 0, rank);
        if (rank < s.rank)
            with_constant<FEW_ROWS_RANKS>(s.rank - rank, [&](auto left) {
                shrink_tile<1, decltype(left)::value>(s, 0, rank);
            });
        return;
    }
    for (int64_t rank = 0; rank < s.rank; rank += RANKS)
        with_constant<RANKS>(min(RANKS, s.rank - rank), [&](auto ranks) {
            for_each_tile({0, rows}, ROWS, [&](int64_t row, int64_t count) {
                with_constant<ROWS>(count, [&](auto n) {
                    shrink_tile<decltype(n)::value, decltype(ranks)::value>(s, row, rank);
                });
            });
        });
}

// A panel's sums of one row, in the order of blocks.
template <class T>
using PanelSums = vec[BLOCKS<T>][PARTS<T>];

inline void load_panel(const bf16* from, PanelSums<bf16>& sums) {
    UNROLLED for (int i = 0; i < BLOCKS<bf16>; i++) load_block(from + i * BLOCK<bf16>, sums[i]);
}
inline void store_panel(bf16* to, const PanelSums<bf16>& sums) {
    UNROLLED for (int i = 0; i < BLOCKS<bf16>; i++) store_block(to + i * BLOCK<bf16>, sums[i]);
}

// To what the type of the outputs holds.
inline void round_panel(PanelSums<float>&) {}
inline void round_panel(PanelSums<bf16>& sums) {
    for (auto& block : sums)
        for (vec& values : block) values = (vec)(nearest_bf16(values) << 16);
}

// One block of outputs of one row: y * ratio + sums + addend.
template <class T>
inline void add_block(const Delta& delta, int64_t output, T* y, vec (&sums)[PARTS<T>]) {
    vec values[PARTS<T>];
    load_block(y, values);
    for (int p = 0; p < PARTS<T>; p++) {
        if (!delta.ratio && !delta.addend) {
            sums[p] += values[p];
            continue;
        }
        vec ratio = fill(1), addend = {};
        for (int l = 0; l < W; l++) {
            const int64_t o = output + (PARTS<T> == 1 ? l : 2 * l + p);
            if (delta.ratio) ratio[l] = delta.ratio[o];
            if (delta.addend) addend[l] = delta.addend[o];
        }
        sums[p] += addend;
        if (delta.ratio) sums[p] += values[p] * ratio;
        else sums[p] += values[p];
    }
    store_block(y, sums);
}

// The outputs of one row in a panel, `count` from `first` on.
template <class T>
inline void add_panel(const Delta& delta, int64_t first, int64_t count, T* y, PanelSums<T>& sums) {
    T last[PANEL] = {};  // of a panel that is not whole
    T* at = count < PANEL ? last : y;
    if (at == last) memcpy(last, y, count * sizeof(T));
    UNROLLED for (int i = 0; i < BLOCKS<T>; i++) add_block(delta, first + i * BLOCK<T>, at + i * BLOCK<T>, sums[i]);
    if (at == last) memcpy(y, last, count * sizeof(T));
}

// A panel of `rows` rows: its outputs from `first` on, which is a multiple of PANEL. h [rows][h_stride]; ahead: from
// B's panel to what is to be prefetched; put(row, sums).
template <int rows, class T, class Put>
inline void expand_panel(const Delta& delta, const float* h, int64_t h_stride, int64_t first, int64_t ahead,
                         const Put& put) {
    const T* b = (const T*)delta.b + first * delta.rank;
    PanelSums<T> sums[rows] = {};
    for (int64_t k = 0; k < delta.rank; k++) {
        prefetch_ahead(b + k * PANEL, ahead);
        UNROLLED for (int i = 0; i < BLOCKS<T>; i++) {
            vec weights[PARTS<T>];
            load_block(b + k * PANEL + i * BLOCK<T>, weights);
            UNROLLED for (int r = 0; r < rows; r++)
                UNROLLED for (int p = 0; p < PARTS<T>; p++) sums[r][i][p] += weights[p] * h[r * h_stride + k];
        }
    }
    for (int r = 0; r < rows; r++) put(r, sums[r]);
}

}  // namespace delta
}  // namespace
