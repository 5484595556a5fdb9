// x @ W.T for weights of 8 bits, by vectors: csrc/linear/int8.h has the arithmetic.
//
// A vector's lanes are outputs, so weights are loaded as they lie, four inputs of all lanes at a time, and the inputs
// are broadcast; nothing is summed across lanes. A tile of a few rows and one panel, whose sums are in registers, goes
// through all inputs. Of few rows, memory is waited for, and is read fastest in several runs side by side: a tile is
// then of several panels. Of many, the panel is in the cache for the next tiles, and the panel that comes next is asked
// for meanwhile.
#include "arch/dot.h"
#include "linear/int8.h"

namespace {

constexpr int VECTORS = PANEL / W;  // of a panel
constexpr int ROWS = 10 / VECTORS;  // of a tile: its sums are ten registers, of 16
constexpr int64_t ROW_BLOCK = 80;   // rows whose inputs the second-level cache holds
constexpr int64_t AHEAD = 2048;     // bytes asked for where memory is waited for

// A tile of TILE_ROWS rows and of panels `panel`, `panel + apart`, ... Without a prefetcher it asks for its own weights;
// of one row the processor foresees them better.
template <int TILE_ROWS, int PANELS, class Product>
void compute_tile(const Product& p, int64_t row, int64_t panel, int64_t apart, Prefetcher* prefetcher) {
    constexpr int ALL = PANELS * VECTORS;
    const int64_t padded = p.padded(), groups = p.groups();
    const uint8_t* x = p.inputs + row * padded;
    const int8_t* w = p.weights + panel * PANEL * padded;
    const int16_t* sums = p.sums + panel * groups * PANEL;
    const float* scales = p.input_scales + row * groups;
    float totals[TILE_ROWS][PANELS][PANEL] = {};
    for (int64_t g = 0; g < groups; g++) {
        if (prefetcher) prefetcher->step();
        Sums acc[TILE_ROWS][ALL];
        UNROLLED for (int v = 0; v < ALL; v++) {
            const int64_t from = v / VECTORS * apart * groups * PANEL + g * PANEL + v % VECTORS * W;
            UNROLLED for (int r = 0; r < TILE_ROWS; r++) acc[r][v] = zeros_of(sums + from);
        }
        for (int64_t k = g * GROUP, last = min(k + GROUP, padded); k < last; k += 8) {
            if (TILE_ROWS > 1 && !prefetcher)
                UNROLLED for (int j = 0; j < PANELS; j++) {
                    const int8_t* later = w + j * apart * PANEL * padded + k * PANEL + AHEAD / PANELS;
                    __builtin_prefetch(later);
                    __builtin_prefetch(later + FOUR);
                }
            UNROLLED for (int r = 0; r < TILE_ROWS; r++) {
                const Eight inputs = load_eight(x + r * padded + k);
                UNROLLED for (int v = 0; v < ALL; v++) {
                    const int8_t* from = w + v / VECTORS * apart * PANEL * padded + k * PANEL + v % VECTORS * (4 * W);
                    acc[r][v] = multiply_add<FOUR>(acc[r][v], inputs, from);
                }
            }
        }
        UNROLLED for (int r = 0; r < TILE_ROWS; r++)
            UNROLLED for (int v = 0; v < ALL; v++) {
                float* to = totals[r][0] + v * W;
                store(to, load(to) + __builtin_convertvector(acc[r][v], vec) * scales[r * groups + g]);
            }
    }
    for (int r = 0; r < TILE_ROWS; r++)
        for (int j = 0; j < PANELS; j++) p.finish(row + r, panel + j * apart, totals[r][j]);
}

// All rows, at most ROWS, and some of the panels.
template <int TILE_ROWS, int PANELS, class Product>
void compute_runs(const Product& p, Range panels) {
    const int64_t apart = panels.size() / PANELS;
    for (int64_t i = 0; i < apart; i++)
        compute_tile<TILE_ROWS, PANELS>(p, 0, panels.begin + i, apart, nullptr);
    for (int64_t i = panels.begin + apart * PANELS; i < panels.end; i++)
        compute_tile<TILE_ROWS, 1>(p, 0, i, 0, nullptr);
}

// How many panels fill a tile of few rows.
constexpr int panels_beside(int rows) { return rows * VECTORS > 8 ? 1 : 8 / (rows * VECTORS); }

// One panel for some rows.
template <class Product>
void compute_panel(const Product& p, Range rows, int64_t panel) {
    const int64_t bytes = PANEL * p.padded(), tiles = ceil_div(rows.size(), ROWS);
    const char* next = (const char*)p.weights + (panel + 1) % p.panels() * bytes;
    Prefetcher prefetcher = Prefetcher::over(next, next + bytes, tiles * p.groups());
    for_each_tile(rows, ROWS, [&](int64_t row, int64_t count) {
        with_constant<ROWS>(count, [&](auto tile_rows) {
            compute_tile<decltype(tile_rows)::value, 1>(p, row, panel, 0, &prefetcher);
        });
    });
}

template <class Product>
void linear(const Product& p, int64_t threads) {
    const int64_t blocks = ceil_div(p.rows, ROW_BLOCK), panels = p.panels();
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t task = 0; task < p.rows * p.groups(); task++) p.round(task);
        if (p.rows <= ROWS) {
            with_constant<ROWS>(p.rows, [&](auto rows) {
                constexpr int n = decltype(rows)::value;
                compute_runs<n, panels_beside(n)>(p, share_of_thread(panels));
            });
        } else {
#pragma omp for schedule(static)
            for (int64_t task = 0; task < blocks * panels; task++) {
                const int64_t row = task / panels * ROW_BLOCK;
                compute_panel(p, {row, min(row + ROW_BLOCK, p.rows)}, task % panels);
            }
        }
    }
}

}  // namespace

// out [rows, outputs] = x @ W.T + bias, with x [rows, width], scales [outputs] and bias [outputs] or null, all bf16 or
// all fp32; weights int8 [panels, padded / 4, 16, 4] and their sums int16 [panels, groups, 16]; as scratch inputs uint8
// [rows, padded] and input_scales fp32 [rows, groups]. Padded: to 64.
KERNEL(linear_int8)(const void* x, int64_t is_bf16, const int8_t* weights, const int16_t* sums, const void* scales,
                    const void* bias, uint8_t* inputs, float* input_scales, void* out, int64_t rows, int64_t width,
                    int64_t outputs, int64_t threads) {
    with_product(x, is_bf16, weights, sums, scales, bias, inputs, input_scales, out, rows, width, outputs,
                 [=](const auto& product) { linear(product, threads); });
}
REPLAYABLE(linear_int8)

template <class T>
static void copy_row(const int8_t* panel, int64_t lane, float scale, T* out, int64_t width) {
    for (int64_t k = 0; k < width; k++) assign(out + k, panel[k / 4 * FOUR + lane * 4 + k % 4] * scale);
}

// out [rows, width], bf16 or fp32 as the scales are: the rows of the matrix whose numbers `indices` has.
KERNEL(rows_int8)(const int64_t* indices, const int8_t* weights, const void* scales, int64_t is_bf16, void* out,
                  int64_t rows, int64_t width, int64_t fours, int64_t) {
    for (int64_t i = 0; i < rows; i++) {
        const int64_t index = indices[i];
        const int8_t* panel = weights + index / PANEL * fours * FOUR;
        if (is_bf16)
            copy_row(panel, index % PANEL, to_float(((const bf16*)scales)[index]), (bf16*)out + i * width, width);
        else
            copy_row(panel, index % PANEL, ((const float*)scales)[index], (float*)out + i * width, width);
    }
}
