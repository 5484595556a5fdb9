// y * ratio + B (A x) + addend for rows grouped by adapter.
//
// (In the epilogue of the product, panel by panel as outputs come, it took as long: 64 rows with as many adapters on 2
// cores of a Xeon with AMX, all linears of a step of a 350M model but the head, product and deltas 95 ms one after the
// other and 97 as one by matrix units in bf16, 230 and 241 by vectors in fp32. A core can only wait for so many cache
// lines at once, whichever code requests them.)
#include "adapters/layer.h"

namespace {

constexpr int64_t CHUNKS = 2;  // runs of tasks, a thread

template <class T>
void add_deltas(const Layer<T>& l, int64_t threads) {
    const int64_t chunk = ceil_div(max(l.num_tasks, 1), CHUNKS * threads);
    parallel(l.num_tasks, chunk, threads, [&](const Tasks& all) {
        const ScratchArray<float> scratch(l.scratch_size());
        for (Range some; all.take(some);)
            for (int64_t t = some.begin; t < some.end; t++)
                expand_task(l, t, some.end, scratch,
                            [&](int64_t part, int64_t row, int64_t first, delta::PanelSums<T>& sums) {
                                delta::round_panel(sums);
                                l.add_panel(t, part, row, first, sums);
                            });
    });
}

}  // namespace

// x [rows, in], y [rows, outputs]; table: of each place `stride` values, the deltas of this layer's parts first; edges
// [parts + 1]; order [rows]; tasks [1 + rows][3], of which the first says how many there are
KERNEL(add_deltas)(const void* x, void* y, const int64_t* table, const int64_t* edges, const int64_t* order,
                   const int64_t* tasks, int64_t in, int64_t outputs, int64_t parts, int64_t stride, int64_t is_bf16,
                   int64_t threads) {
    auto add = [&](auto* typed) {
        using T = std::remove_pointer_t<decltype(typed)>;
        add_deltas(Layer<T>((const T*)x, (T*)y, table, edges, order, tasks, in, outputs, parts, stride), threads);
    };
    is_bf16 ? add((bf16*)nullptr) : add((float*)nullptr);
}
REPLAYABLE(add_deltas)
