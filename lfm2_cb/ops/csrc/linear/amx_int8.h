// x @ W.T for weights of 8 bits and many rows, by the processor's matrix units: csrc/linear/int8.h has the arithmetic,
// which is the same to the bit.
//
// Inputs are rounded into tiles of 16 rows and 64 inputs; 16 fours of inputs of a panel's weights lie as a tile reads
// them. A thread takes a block of panels, which the second-level cache holds, while the inputs pass by in groups of 32
// rows, CHUNK groups of inputs at a time, which stay in the first-level cache; the next block is asked for meanwhile.
// A group's products are added to those before, row by row, while the next group is multiplied. Behind the last row
// lies what makes the tile whole; it is computed with and not stored.
#pragma once

#include "arch/tiles.h"
#include "linear/int8.h"

namespace {
namespace int8::tiles {

static_assert(PANEL == TILE_ROWS && FOUR == LINE && GROUP % LINE == 0, "a tile holds a panel's weights of 64 inputs");

constexpr int64_t ROWS = 2 * TILE_ROWS, OUTPUTS = 2 * PANEL;  // that are multiplied together
constexpr int64_t PAIR = 2 * TILE_BYTES;                      // two tiles of inputs: a step of a group of rows
constexpr int64_t CHUNK = 2;                                  // groups of inputs that stay in the first-level cache

// Bytes of a block of weights. (Measured on one core of a Xeon with AMX and 2 MB of second-level cache, with 128 KB, 256
// KB, 512 KB, 768 KB, 1 MB and 1.25 MB, ms: 4,608 inputs and 1,024 outputs 64 rows .27 .27 .31 .31 .36 .39, 128 rows .48
// .48 .43 .51 .55 .58, 256 rows - 1.03 .95 .93 .95 1.02, 512 rows - 2.80 2.00 1.73 1.64 1.88; 1,024 inputs and 9,216
// outputs with SwiGLU 64 rows .61 .59 .63 .66 .72 .77, 128 rows 1.00 .96 .96 1.02 1.14 1.18, 256 rows - 1.89 1.85 1.93
// 1.80 2.09, 512 rows - 3.73 3.87 3.76 3.36 3.95.)
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
    for (int64_t k = 0; k < p.group_size(group); k += LINE)
        memcpy(to + (group * GROUP + k) / LINE * PAIR, rounded + k, LINE);
}

// Two panels of weights that are multiplied together: neighbours or, with gates, these and their values.
template <class Product>
struct Pairs {
    static constexpr bool GATED = TAKES_GATES<typename Product::Epilogue>;
    static constexpr int64_t RESULTS = GATED ? PANEL : OUTPUTS;  // of a pair
    const Product& p;

    int64_t count() const { return GATED ? p.panels() / 2 : ceil_div(p.panels(), 2); }
    int64_t bytes() const { return PANEL * p.padded(); }  // of a panel
    int64_t results_from(int64_t pair) const { return (GATED ? p.outputs / 2 : p.outputs) - pair * RESULTS; }
    const char* first(int64_t pair) const { return (const char*)p.weights + pair * (GATED ? 1 : 2) * bytes(); }
    // (A last panel without a neighbour is multiplied twice.)
    const char* second(int64_t pair) const {
        return first(pair) + (GATED ? count() : 2 * pair + 1 < p.panels() ? 1 : 0) * bytes();
    }
    // Asks for some of them, in so many steps.
    Prefetcher prefetcher(Range pairs, int64_t steps) const {
        if (pairs.size() == 0) return {};
        const char* from = first(pairs.begin);
        if (GATED) return Prefetcher::over(from, pairs.size() * bytes(), count() * bytes(), 2, steps);
        return Prefetcher::over(from, second(pairs.end - 1) + bytes(), steps);
    }
};

// A group of rows by a pair of panels over a group of inputs.
template <class Product>
struct Part {
    const Product* p;
    int64_t row, rows, pair, group;
    float (*totals)[OUTPUTS];  // [ROWS], of the groups before

    int64_t first_step() const { return group * (GROUP / LINE); }
    int64_t steps() const { return p->group_size(group) / LINE; }
    bool is_last() const { return group + 1 == p->groups(); }
    const float* scales() const { return p->input_scales + (row / ROWS * p->groups() + group) * ROWS; }
    const char* inputs() const { return (const char*)p->inputs + row * p->padded() + first_step() * PAIR; }

    // The products of some rows are added to the totals; the last group's make results of them.
    void add(const int32_t (*products)[OUTPUTS], Range range) const {
        if (group == 0)
            is_last() ? add<true, true>(products, range) : add<true, false>(products, range);
        else
            is_last() ? add<false, true>(products, range) : add<false, false>(products, range);
    }
    template <bool IS_FIRST, bool IS_LAST>
    void add(const int32_t (*products)[OUTPUTS], Range range) const {
        constexpr int64_t RESULTS = Pairs<Product>::RESULTS;
        const float* of_rows = scales();
        const int64_t results = Pairs<Product>{*p}.results_from(pair);
        const auto epilogue = p->epilogue;
        for (int64_t r = range.begin; r < range.end; r++) {
            alignas(64) float sums[OUTPUTS];
            float* to = IS_LAST ? sums : totals[r];
            for (int64_t o = 0; o < OUTPUTS; o += W) {
                ivec product;
                memcpy(&product, products[r] + o, sizeof product);
                store(to + o, add_scaled(IS_FIRST ? vec{} : load(totals[r] + o), product, of_rows[r]));
            }
            if (!IS_LAST) continue;
            if (results >= RESULTS)  // told apart, so that the usual number is a constant
                epilogue(row + r, pair * RESULTS, sums, RESULTS);
            else
                epilogue(row + r, pair * RESULTS, sums, results);
        }
    }
};

// A part's products, which are added some rows a step.
template <class Product>
struct Pending {
    alignas(64) int32_t products[ROWS][OUTPUTS];
    Part<Product> part = {};
    int64_t next = 0, rows_a_step = 0;

    void begin(const Part<Product>& of, int64_t steps) {
        part = of;
        next = 0;
        rows_a_step = ceil_div(part.rows, steps);
    }
    void step() {
        if (next < part.rows) add(min(next + rows_a_step, part.rows));
    }
    void finish() {
        if (next < part.rows) add(part.rows);
    }
    void add(int64_t end) {
        part.add(products, {next, end});
        next = end;
    }
};

// Multiplies by tiles and meanwhile adds by vectors, which are units of their own.
template <class Product>
class Multiplier {
  public:
    explicit Multiplier(const Product& p) : pairs{p} {}

    void multiply(const Part<Product>& part, Prefetcher& weights, Prefetcher& inputs) {
        part.rows > TILE_ROWS ? multiply<2>(part, weights, inputs) : multiply<1>(part, weights, inputs);
    }
    void finish() {
        int32_t(*const to)[OUTPUTS] = take_held();
        take<0>(to);
        take<1>(to);
        take<2>(to);
        take<3>(to);
        for (auto& some : pending) some.finish();
    }

  private:
    const Pairs<Product> pairs;
    Tiles tiles;
    Part<Product> held = {};  // whose products tiles 0 ... 3 hold
    // Gates keep vectors busy for longer than tiles need for a group, so these have a place of their own and the time
    // of a chunk. (One core of a Xeon with AMX, 2,048 rows of 1,024 inputs and 9,216 outputs, ms: 16.5, with one place
    // 17.2; without gates 15.0, with two 16.8.)
    Pending<Product> pending[1 + Pairs<Product>::GATED];

    // Tiles 0 ... 3: the products of TILES tiles of rows and two panels.
    template <int TILES>
    void multiply(const Part<Product>& part, Prefetcher& weights, Prefetcher& inputs) {
        const int64_t steps = part.steps(), begin = part.first_step() * TILE_BYTES;
        const char* x = part.inputs();
        const char *first = pairs.first(part.pair) + begin, *second = pairs.second(part.pair) + begin;
        const int64_t lines_a_step = part.is_last() ? ceil_div(part.rows, steps) : 0;
        int64_t line = 0;
        int32_t(*const to)[OUTPUTS] = take_held();
        held = part;
        for (int64_t s = 0; s < steps; s++) {
            load<TILES>(x + s * PAIR, first + s * TILE_BYTES, second + s * TILE_BYTES);
            s == 0 ? multiply_first<TILES>(to) : multiply<TILES>();
            weights.step();
            inputs.step();
            for (const int64_t end = min(line + lines_a_step, part.rows); line < end; line++)
                pairs.p.epilogue.prefetch(part.row + line, part.pair * pairs.RESULTS);
            for (auto& some : pending) some.step();
        }
    }
    // One after another, those of weights first: 24 ns a step in a loop of nothing else, 26 with products between them;
    // and weights not into the first-level cache: 1,024 inputs and 9,216 outputs 18.6 ms, by `load` 22.0 (one core of a
    // Xeon with AMX, 2,048 rows).
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
    // A part's first products, between which those of the part before are taken: so tiles go on multiplying. (Taken at
    // once they cost 3 ns a step.)
    template <int TILES>
    [[gnu::always_inline]] void multiply_first(int32_t (*to)[OUTPUTS]) {
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
    [[gnu::always_inline]] void take(int32_t (*to)[OUTPUTS]) {
        tiles.store<t>(to[t / 2 * TILE_ROWS] + t % 2 * PANEL, sizeof *to);
        tiles.zero<t>();
    }
    // Where the products that tiles hold are to be taken, to be added from then on.
    int32_t (*take_held())[OUTPUTS] {
        if (held.rows == 0) return pending[0].products;  // none
        Pending<Product>& to = pending[pairs.GATED && held.is_last()];
        pending[0].finish();
        to.finish();
        const int64_t chunk = held.group - held.group % CHUNK;
        to.begin(held, &to == pending ? held.steps() : held.first_step() + held.steps() - chunk * (GROUP / LINE));
        held.rows = 0;
        return to.products;
    }
};

// Some pairs of panels by groups of 32 rows.
template <class Product>
void compute(const Product& p, Range row_groups, Range range) {
    typedef float Totals[ROWS][OUTPUTS];
    const Pairs<Product> pairs = {p};
    const int64_t groups = p.groups(), block = max(1, block_bytes(p.rows) / (2 * pairs.bytes()));
    Totals* totals = (Totals*)aligned_alloc(LINE, max(2, block) * sizeof(Totals));
    Multiplier<Product> multiplier(p);
    for_each_tile(range, block, [&](int64_t begin, int64_t count) {
        const int64_t end = begin + count, steps = count * (p.padded() / LINE);
        const int64_t held = groups <= CHUNK ? 2 : max(2, count);  // totals: a pair's, and one's that is being finished
        Prefetcher weights = pairs.prefetcher({end, min(end + count, range.end)}, row_groups.size() * steps);
        for (int64_t g = row_groups.begin; g < row_groups.end; g++) {
            const int64_t row = g * ROWS, rows = min(ROWS, p.rows - row);
            const char* next = (const char*)p.inputs + (row + ROWS) * p.padded();
            Prefetcher inputs = Prefetcher::over(next, next + (g + 1 < row_groups.end ? ROWS * p.padded() : 0), steps);
            for (int64_t chunk = 0; chunk < groups; chunk += CHUNK)
                for (int64_t i = 0; i < count; i++)
                    for (int64_t group = chunk; group < min(chunk + CHUNK, groups); group++)
                        multiplier.multiply({&p, row, rows, begin + i, group, totals[(g * count + i) % held]}, weights,
                                            inputs);
        }
        multiplier.finish();
    });
    free(totals);
}

// All rows and some of the panels, which begin at an even one.
template <class Product>
void multiply(const Product& p, Range panels) {
    compute(p, {0, ceil_div(p.rows, ROWS)}, {panels.begin / 2, ceil_div(panels.end, 2)});
}

template <class Product>
void linear(const Product& p, int64_t threads) {
    const int64_t pairs = Pairs<Product>{p}.count(), row_groups = ceil_div(p.rows, ROWS);
    // Threads share the panels; where these are few, the rows as well.
    const int64_t row_parts = min(ceil_div(threads, pairs), row_groups), parts = ceil_div(threads, row_parts);
    p.round_all(threads, [&](int64_t row, int64_t group) { lay_out(p, p.x + row * p.width, row, group); });
    parallel_for(row_parts * parts, threads, [&](int64_t task) {
        compute(p, part_of(row_groups, task % row_parts, row_parts), part_of(pairs, task / row_parts, parts));
    });
}

}  // namespace int8::tiles
}  // namespace
