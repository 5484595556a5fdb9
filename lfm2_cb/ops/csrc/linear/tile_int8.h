// x @ W.T for weights of 8 bits and many rows, by the processor's matrix units: csrc/linear/int8.h has the arithmetic,
// which is the same to the bit.
//
// Inputs are rounded into tiles of 16 rows and 64 inputs; 16 fours of inputs of a panel's weights lie as a tile reads
// them. A thread takes a block of panels, which the second-level cache holds, while the inputs pass by in groups of 32
// rows, one or two groups of inputs at a time, which stay in the first-level cache; the next block is prefetched
// meanwhile. Their products are added to those before, row by row, while the next are multiplied. Behind the last row
// lies what makes the tile whole; it is computed with and not stored.
#pragma once

#include "arch/tiles.h"
#include "core/scratch.h"
#include "linear/int8.h"

namespace {
namespace int8::tiles {

static_assert(PANEL == TILE_ROWS && FOUR == LINE && GROUP % LINE == 0, "a tile holds a panel's weights of 64 inputs");

constexpr int64_t ROWS = 2 * TILE_ROWS, OUTPUTS = 2 * PANEL;  // that are multiplied together
constexpr int RUNS = 8;                                       // of memory that weights are prefetched in
using Prefetch = InterleavedPrefetcher<RUNS>;
constexpr int64_t PAIR = 2 * TILE_BYTES;                      // two tiles of inputs: a step of a group of rows

// Bytes of a block of weights. (Measured on one core of a Xeon with AMX and 2 MB of second-level cache, with 128 KB,
// 256 KB, 512 KB, 768 KB, 1 MB and 1.25 MB, ms: 4,608 inputs and 1,024 outputs 64 rows .27 .27 .31 .31 .36 .39, 128
// rows .48 .48 .43 .51 .55 .58, 256 rows - 1.03 .95 .93 .95 1.02, 512 rows - 2.80 2.00 1.73 1.64 1.88; 1,024 inputs
// and 9,216 outputs with SwiGLU 64 rows .61 .59 .63 .66 .72 .77, 128 rows 1.00 .96 .96 1.02 1.14 1.18, 256 rows - 1.89
// 1.85 1.93 1.80 2.09, 512 rows - 3.73 3.87 3.76 3.36 3.95.)
inline int64_t block_bytes(int64_t rows) { return min(max(4 * rows, 256), 1024) << 10; }

// A group of the row `from` into tiles. The last row sets the scales of what makes the tiles whole.
template <class Product, class Row>
void lay_out(const Product& p, const Row* from, int64_t row, int64_t group) {
    alignas(64) int8_t rounded[GROUP];
    float* scales = p.input_scales + (row / ROWS * p.groups() + group) * ROWS;
    scales[row % ROWS] = p.round(from, group, 0, rounded);
    if (row + 1 == p.rows)
        for (int64_t r = row % ROWS + 1; r < ROWS; r++) scales[r] = 0.0f;
    char* to = (char*)p.inputs + row / ROWS * ROWS * p.padded() + row % ROWS * LINE;
    for (int64_t k = 0; k < p.group_size(group); k += LINE) {
        char* line = to + (group * GROUP + k) / LINE * PAIR;
        memcpy(line, rounded + k, LINE);
        __builtin_prefetch(line + ROWS * p.padded(), 1);  // of the next group of rows
    }
}

// Two panels of weights that are multiplied together: neighbours or, with gates, these and their values.
template <class Product>
struct Pairs {
    static constexpr bool GATED = TAKES_GATES<typename Product::Epilogue>;
    static constexpr int64_t RESULTS = GATED ? PANEL : OUTPUTS;  // of a pair
    // Groups of inputs that are added together: gates keep vectors busy for longer than tiles need for one. (One core
    // of a Xeon with AMX, 2,048 rows, ms, minimum of 15, with 1 and 2: 4,608 inputs and 1,024 outputs 9.1 and 10.1;
    // 1,024 inputs and 9,216 outputs with SwiGLU 16.9 and 14.6.)
    static constexpr int CHUNK = GATED ? 2 : 1;
    const Product& p;

    int64_t count() const { return GATED ? p.panels() / 2 : ceil_div(p.panels(), 2); }
    int64_t bytes() const { return PANEL * p.padded(); }  // of a panel
    int64_t results_from(int64_t pair) const { return (GATED ? p.outputs / 2 : p.outputs) - pair * RESULTS; }
    const char* first(int64_t pair) const { return (const char*)p.weights + pair * (GATED ? 1 : 2) * bytes(); }
    // (A last panel without a neighbour is multiplied twice.)
    const char* second(int64_t pair) const {
        return first(pair) + (GATED ? count() : 2 * pair + 1 < p.panels() ? 1 : 0) * bytes();
    }
    // Asks for some of them, in so many steps. (Two cores of a Xeon with AMX, the MLPs of a 350M model, ms, in one
    // run, 4 and 8: 32 rows 12.9, 12.7 and 11.8; 64 rows 17.0, 14.2 and 13.1; 128 rows 21.9, 20.6 and 20.6; 192 rows
    // 29.0, 26.6 and 26.7; from 256 rows on no difference.)
    Prefetch prefetcher(Range pairs, int64_t steps) const {
        if (pairs.size() == 0) return {};
        const char* from = first(pairs.begin);
        const int64_t parts = GATED ? RUNS / 2 : RUNS;  // of what lies together
        const int64_t size = (GATED ? pairs.size() * bytes() : second(pairs.end - 1) + bytes() - from) / parts;
        Prefetch all = {{}, ceil_div(RUNS * size, LINE * steps), size, 0, 1};
        for (int run = 0; run < RUNS; run++)
            all.runs[run] = from + run / parts * count() * bytes() + run % parts * size;
        return all;
    }
};

// A group of rows by a pair of panels over a chunk of the inputs' groups.
template <class Product>
struct Part {
    const Product* p;
    int64_t row, rows, pair;
    Range groups;
    float (*totals)[OUTPUTS];  // [ROWS], of the groups before

    int64_t first_step() const { return groups.begin * (GROUP / LINE); }
    int64_t steps() const { return min(groups.end * GROUP, p->padded()) / LINE - first_step(); }
    bool is_first() const { return groups.begin == 0; }
    bool is_last() const { return groups.end == p->groups(); }
    const float* scales() const { return p->input_scales + (row / ROWS * p->groups() + groups.begin) * ROWS; }
    const char* inputs() const { return (const char*)p->inputs + row * p->padded() + first_step() * PAIR; }
};

typedef int32_t Products[ROWS][OUTPUTS];

// Adds a part's products to its totals, some rows a step; those of the last groups make results of them.
template <class Product, int GROUPS, bool IS_FIRST, bool IS_LAST>
class Adder {
  public:
    // products: of each group.
    Adder(const Part<Product>& part, const Products* products, int64_t steps)
        : products{products}, scales{part.scales()}, totals{part.totals}, epilogue{part.p->epilogue}, row{part.row},
          output{part.pair * RESULTS}, results{Pairs<Product>{*part.p}.results_from(part.pair)}, rows{part.rows},
          rows_a_step{ceil_div(part.rows, steps)} {}

    [[gnu::always_inline]] void step() { add(min(next + rows_a_step, rows)); }
    [[gnu::always_inline]] void finish() { add(rows); }

  private:
    static constexpr int64_t RESULTS = Pairs<Product>::RESULTS;
    const Products* const products;
    const float* const scales;  // of the inputs, [GROUPS][ROWS]
    float (*const totals)[OUTPUTS];
    const typename Product::Epilogue epilogue;
    const int64_t row, output, results, rows, rows_a_step;
    int64_t next = 0;

    [[gnu::always_inline]] void add(int64_t end) {
        for (; next < end; next++) {
            alignas(64) float sums[OUTPUTS];
            float* to = IS_LAST ? sums : totals[next];
            for (int64_t o = 0; o < OUTPUTS; o += W) {
                vec total = IS_FIRST ? vec{} : load(totals[next] + o);
                for (int g = 0; g < GROUPS; g++) {
                    ivec product;
                    memcpy(&product, products[g][next] + o, sizeof product);
                    total = add_scaled(total, product, scales[g * ROWS + next]);
                }
                store(to + o, total);
            }
            if (IS_LAST && results >= RESULTS) epilogue(row + next, output, sums, RESULTS);
            if (IS_LAST && results < RESULTS) finish_some(sums);
        }
    }
    // (Apart, so that the usual number of results is a constant.)
    [[gnu::noinline]] void finish_some(const float* sums) const { epilogue(row + next, output, sums, results); }
};

// Multiplies by tiles and meanwhile adds by vectors, which are units of their own.
template <class Product>
class Multiplier {
  public:
    explicit Multiplier(const Product& p) : pairs{p}, held{&p} {}

    void multiply(const Part<Product>& part, Prefetch& weights, Prefetcher& inputs) {
        with_adder(part.steps(), [&](auto adder) {
            part.rows > TILE_ROWS ? multiply<2>(part, adder, weights, inputs)
                                  : multiply<1>(part, adder, weights, inputs);
        });
        held = part;
        which = 1 - which;
    }
    void finish() {
        Products& to = taken();
        take<0>(to);
        take<1>(to);
        take<2>(to);
        take<3>(to);
        with_adder(1, [](auto adder) { adder.finish(); });
        held.rows = 0;
    }

  private:
    const Pairs<Product> pairs;
    Tiles tiles;
    // The part whose last products tiles 0 ... 3 hold. It is added while the next one is multiplied.
    Part<Product> held;
    static constexpr int CHUNK = Pairs<Product>::CHUNK;
    alignas(64) Products products[2][CHUNK];  // of the held part and the next, of each of its groups
    int which = 0;                            // the next one's

    // Where the held products are to be taken.
    Products& taken() { return products[1 - which][max(1, held.groups.size()) - 1]; }

    // run(the held part's Adder): with nothing held, one without rows.
    template <class Run>
    void with_adder(int64_t steps, Run run) {
        with_constant<CHUNK>(max(1, held.groups.size()), [&](auto groups) {
            constexpr int GROUPS = decltype(groups)::value;
            const Products* of_groups = products[1 - which];
            if (held.rows == 0 || !held.is_first())
                held.rows && held.is_last() ? run(Adder<Product, GROUPS, false, true>(held, of_groups, steps))
                                            : run(Adder<Product, GROUPS, false, false>(held, of_groups, steps));
            else
                held.is_last() ? run(Adder<Product, GROUPS, true, true>(held, of_groups, steps))
                               : run(Adder<Product, GROUPS, true, false>(held, of_groups, steps));
        });
    }

    // Tiles 0 ... 3: the products of TILES tiles of rows and two panels.
    template <int TILES, class Adder>
    void multiply(const Part<Product>& part, Adder& adder, Prefetch& weights, Prefetcher& inputs) {
        const int64_t steps = part.steps(), begin = part.first_step() * TILE_BYTES;
        const char* x = part.inputs();
        const char *first = pairs.first(part.pair) + begin, *second = pairs.second(part.pair) + begin;
        const int64_t lines_a_step = part.is_last() ? ceil_div(part.rows, steps) : 0;
        int64_t line = 0;
        for (int64_t s = 0; s < steps; s++) {
            load<TILES>(x + s * PAIR, first + s * TILE_BYTES, second + s * TILE_BYTES);
            if (s % (GROUP / LINE) == 0)
                multiply_first<TILES>(s == 0 ? taken() : products[which][s / (GROUP / LINE) - 1]);
            else
                multiply<TILES>();
            weights.step();
            inputs.step();
            for (const int64_t end = min(line + lines_a_step, part.rows); line < end; line++)
                pairs.p.epilogue.prefetch(part.row + line, part.pair * pairs.RESULTS);
            if (s > 0) adder.step();
        }
        adder.finish();
    }
    // One after another, those of weights first: 24 ns a step in a loop of nothing else, 26 with products between
    // them; and weights not into the first-level cache: 1,024 inputs and 9,216 outputs 18.6 ms, by `load` 22.0 (one
    // core of a Xeon with AMX, 2,048 rows).
    template <int TILES>
    [[gnu::always_inline]] void load(const char* x, const char* first, const char* second) {
        tiles.stream<6>(first, LINE);
        tiles.stream<7>(second, LINE);
        tiles.load<4>(x, LINE);
        if (TILES == 2) tiles.load<5>(x + TILE_BYTES, LINE);
    }
    template <int TILES>
    [[gnu::always_inline]] void multiply() {
        tiles.multiply_bytes<0, 4, 6>();
        tiles.multiply_bytes<1, 4, 7>();
        if (TILES == 2) {
            tiles.multiply_bytes<2, 5, 6>();
            tiles.multiply_bytes<3, 5, 7>();
        }
    }
    // A group's first products, between which those of the group before are taken: so tiles go on multiplying. (Taken
    // at once they cost 3 ns a step.)
    template <int TILES>
    [[gnu::always_inline]] void multiply_first(Products& to) {
        take<0>(to);
        tiles.multiply_bytes<0, 4, 6>();
        take<1>(to);
        tiles.multiply_bytes<1, 4, 7>();
        take<2>(to);
        if (TILES == 2) tiles.multiply_bytes<2, 5, 6>();
        take<3>(to);
        if (TILES == 2) tiles.multiply_bytes<3, 5, 7>();
    }
    // A tile's products, of two tiles of rows and two panels; it is zero afterwards.
    template <int t>
    [[gnu::always_inline]] void take(Products& to) {
        tiles.store<t>(to[t / 2 * TILE_ROWS] + t % 2 * PANEL, sizeof *to);
        tiles.zero<t>();
    }
};

// Some pairs of panels by groups of 32 rows. passed(g): all their results of a group of rows are there. The first of
// those up to `then` are prefetched meanwhile.
template <class Product, class Passed>
void compute(const Product& p, Range row_groups, Range range, int64_t then, const Passed& passed) {
    typedef float Totals[ROWS][OUTPUTS];
    const Pairs<Product> pairs = {p};
    const int64_t groups = p.groups(), block = max(1, block_bytes(p.rows) / (2 * pairs.bytes()));
    const int64_t chunk = groups <= pairs.CHUNK ? groups : 1;
    const ScratchArray<Totals> totals(max(2, block));
    Multiplier<Product> multiplier(p);
    for_each_tile(range, block, [&](int64_t begin, int64_t count) {
        const int64_t end = begin + count, steps = count * (p.padded() / LINE);
        const int64_t held = chunk == groups ? 2 : max(2, count);  // totals: a pair's, and one's that is being finished
        const bool is_last = end == range.end;
        Prefetch weights = pairs.prefetcher({end, min(end + count, then)}, row_groups.size() * steps);
        for (int64_t g = row_groups.begin; g < row_groups.end; g++) {
            const int64_t row = g * ROWS, rows = min(ROWS, p.rows - row);
            const char* next = (const char*)p.inputs + (row + ROWS) * p.padded();
            Prefetcher inputs = Prefetcher::over(next, next + (g + 1 < row_groups.end ? ROWS * p.padded() : 0), steps);
            for (int64_t group = 0; group < groups; group += chunk)
                for (int64_t i = 0; i < count; i++) {
                    multiplier.multiply({&p, row, rows, begin + i, {group, min(group + chunk, groups)},
                                         totals[(g * count + i) % held]}, weights, inputs);
                    if (is_last && g > row_groups.begin && group + i == 0) passed(g - 1);
                }
        }
        multiplier.finish();
        if (is_last) passed(row_groups.end - 1);
    });
}
template <class Product>
void compute(const Product& p, Range row_groups, Range range) {
    compute(p, row_groups, range, range.end, [](int64_t) {});
}

// All rows and some of the panels, which begin at an even one.
template <class Product>
void multiply(const Product& p, Range panels) {
    compute(p, {0, ceil_div(p.rows, ROWS)}, {panels.begin / 2, ceil_div(panels.end, 2)});
}

// Inputs that are rounded, as threads share it.
template <class Product>
void multiply_rounded(const Product& p, int64_t threads) {
    const int64_t pairs = Pairs<Product>{p}.count(), row_groups = ceil_div(p.rows, ROWS);
    // Threads share the panels; where these are few, the rows as well.
    const int64_t row_parts = min(ceil_div(threads, pairs), row_groups), parts = ceil_div(threads, row_parts);
    parallel_for(row_parts * parts, threads, [&](int64_t task) {
        compute(p, part_of(row_groups, task % row_parts, row_parts), part_of(pairs, task / row_parts, parts));
    });
}

template <class Product>
void round_inputs_of(const Product& p, int64_t threads) {
    p.round_all(threads, [&](int64_t row, int64_t group) { lay_out(p, p.x + row * p.width, row, group); });
}

template <class Product>
void linear(const Product& p, int64_t threads) {
    round_inputs_of(p, threads);
    multiply_rounded(p, threads);
}

}  // namespace int8::tiles
}  // namespace
