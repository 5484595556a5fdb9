// x @ weight.T (+ bias) in bf16 by tiles, with the deltas of each row's adapter added: the bits of
// tile_in_place_linear_bf16 and add_deltas after it.
//
// The product of some tens of rows computes, and leaves memory idle; deltas, of which each row reads its own, wait for
// memory. So a thread prefetches deltas while it multiplies, into the second-level cache, and expands those that have
// arrived after each panel. Their sums are kept, rounded, until the products are there.
//
// (Measured on 2 cores of an AMD EPYC, Zen 5, the linears of eight layers of a 350M model but the head with adapters
// of rank 16 in bf16, ms, for the product alone, with add_deltas after it, and so: 64 rows with as many adapters 24.2,
// 34.1 and 30.5; with few rows memory is what both wait for: 16 rows 9.5, 12.0 and 12.1. With the sums kept in fp32 64
// rows took 33.)
#include "adapters/layer.h"
#include "linear/tile_in_place.h"

namespace {

// Sums of all rows that have adapters, in the order of tasks, before they are added.
struct Expanded {
    const Layer<bf16>& layer;
    bf16* sums;  // [rows][stride]

    // Of a row of a task, the panel from `first` on of a part.
    bf16* at(int64_t task, int64_t part, int64_t row, int64_t first) const {
        return sums + (layer.tasks[task].first + row) * stride(layer) + begin(part) + first;
    }
    // Whole panels, each aligned, whatever a part's size.
    int64_t begin(int64_t part) const { return round_up(layer.edges[part], delta::PANEL) + part * delta::PANEL; }
    static int64_t stride(const Layer<bf16>& layer) {
        return round_up(layer.outputs, delta::PANEL) + layer.parts * delta::PANEL;
    }
};

// The matrices of some tasks, one after another, into the second-level cache, some lines a step.
class DeltaPrefetcher {
  public:
    DeltaPrefetcher(const Layer<bf16>& layer, Range tasks, int64_t steps) : l(layer), left(tasks) {
        int64_t bytes = 0;
        for (int64_t t = tasks.begin; t < tasks.end; t++)
            for (int64_t run = 0; run < 2 * l.parts; run++) bytes += open(t, run);
        lines = ceil_div(bytes, LINE * max(steps, 1));
        matrix = -1;
        next_matrix();
    }

    // The first whose matrices have not all been prefetched.
    int64_t task() const { return left.begin; }

    [[gnu::always_inline]] void step() {
        const char* stop = end - next < lines * LINE ? end : next + lines * LINE;
        for (; next < stop; next += LINE) prefetch_line<2>(next);
        if (next == end) next_matrix();
    }

  private:
    const Layer<bf16>& l;
    Range left;
    int64_t lines, matrix;
    const char *next = nullptr, *end = nullptr;

    // A part's A, or B: its bytes.
    int64_t open(int64_t task, int64_t index) {
        const int64_t part = index / 2;
        const Delta& d = l.delta(task, part);
        next = (const char*)(index % 2 ? d.b : d.a);
        end = !d.a ? next : index % 2 ? l.end_of_b(d, part) : l.end_of_a(d);
        return end - next;
    }

    __attribute__((noinline)) void next_matrix() {
        for (; left.size() > 0; left.begin++, matrix = -1)
            while (++matrix < 2 * l.parts)
                if (open(left.begin, matrix)) return;
        next = end;
    }
};

// Tasks that a thread does between the panels that it multiplies.
struct DeltasBeside {
    const Expanded& expanded;
    Range tasks;
    DeltaPrefetcher prefetcher;
    float* scratch;

    [[gnu::always_inline]] void step() { prefetcher.step(); }
    void advance() { expand_until(prefetcher.task()); }
    void expand_until(int64_t task) {
        for (; tasks.begin < task; tasks.begin++)
            expand_task(expanded.layer, tasks.begin, tasks.end, scratch,
                        [&](int64_t part, int64_t row, int64_t first, delta::PanelSums<bf16>& sums) {
                            delta::store_panel(expanded.at(tasks.begin, part, row, first), sums);
                        });
    }
};

void adapted_linear(tile_bf16::in_place::Product<AddBias<bf16>> p, const Layer<bf16>& l, int64_t threads) {
    using namespace tile_bf16::in_place;
    const ScratchArray<char> packed(packed_size(p));
    pack_inputs(p, packed, threads);
    p.packed = packed;
    const ScratchArray<bf16> sums(p.x.rows * Expanded::stride(l));
    const Expanded expanded = {l, sums};
    const int64_t parts = min(threads, p.panels());
    parallel_for(parts, threads, [&](int64_t i) {
        const ScratchArray<float> scratch(l.scratch_size());
        const Range panels = part_of(p.panels(), i, parts), tasks = part_of(l.num_tasks, i, parts);
        DeltasBeside deltas = {expanded, tasks, DeltaPrefetcher(l, tasks, steps_of(p, panels)), scratch};
        compute_panels(p, panels, deltas);
        deltas.expand_until(tasks.end);
    });
    parallel_for(l.num_tasks, threads, [&](int64_t task) {
        for (int64_t row = 0; row < l.tasks[task].count; row++)
            for (int64_t part = 0; part < l.parts; part++) {
                if (l.delta(task, part).is_none()) continue;
                for (int64_t first = 0; first < l.size(part); first += delta::PANEL) {
                    delta::PanelSums<bf16> sums;
                    delta::load_panel(expanded.at(task, part, row, first), sums);
                    l.add_panel(task, part, row, first, sums);
                }
            }
    });
}

}  // namespace

// x [rows, in], w [outputs, in], bias [outputs] or null, out [rows, outputs]; table, edges, order, tasks, parts,
// stride: as those of add_deltas
KERNEL(tile_adapted_linear_bf16)(const bf16* x, const bf16* w, const bf16* bias, bf16* out, const int64_t* table,
                                const int64_t* edges, const int64_t* order, const int64_t* tasks, int64_t rows,
                                int64_t in, int64_t outputs, int64_t parts, int64_t stride, int64_t threads) {
    adapted_linear({{x, rows, in}, {w, outputs, in}, nullptr, {out, bias, outputs, nullptr}},
                   Layer<bf16>(x, out, table, edges, order, tasks, in, outputs, parts, stride), threads);
}
REPLAYABLE(tile_adapted_linear_bf16)
