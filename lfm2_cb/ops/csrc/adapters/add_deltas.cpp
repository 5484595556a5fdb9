// y * ratio + B (A x) + addend for rows grouped by adapter.
//
// A task is some rows of one adapter, with all parts of the layer. One thread shrinks its rows and expands them, so no
// thread waits in between.
//
// (In the epilogue of the product, panel by panel as outputs come, it took as long: 64 rows with as many adapters on 2
// cores of a Xeon with AMX, all linears of a step of a 350M model but the head, product and deltas 95 ms one after the
// other and 97 as one by matrix units in bf16, 230 and 241 by vectors in fp32. A core can only wait for so many cache
// lines at once, whichever code requests them.)
#include "adapters/delta.h"
#include "core/scratch.h"
#include "core/threads.h"

namespace {

constexpr int64_t CHUNKS = 2;  // runs of tasks, a thread

struct Task {
    int64_t place, first, count;
};

// As ops/adapters.py describes it to the kernels.
template <class T>
struct Layer {
    const T* x;
    T* y;
    const Delta* table;  // of each place `stride` of them, those of the layer's parts first
    const int64_t *edges, *order;
    const Task* tasks;
    int64_t num_tasks, in, outputs, parts, stride;

    // table, stride: in int64 values; tasks [1 + rows][3], of which the first says how many there are
    Layer(const T* x, T* y, const int64_t* table, const int64_t* edges, const int64_t* order, const int64_t* tasks,
          int64_t in, int64_t outputs, int64_t parts, int64_t stride)
        : x(x), y(y), table((const Delta*)table), edges(edges), order(order), tasks((const Task*)(tasks + 3)),
          num_tasks(tasks[0]), in(in), outputs(outputs), parts(parts),
          stride(stride / (int64_t)(sizeof(Delta) / sizeof(int64_t))) {}

    const Delta& delta(int64_t task, int64_t part) const { return table[tasks[task].place * stride + part]; }
    int64_t size(int64_t part) const { return edges[part + 1] - edges[part]; }

    int64_t most_rows() const {
        int64_t most = 0;
        for (int64_t t = 0; t < num_tasks; t++) most = max(most, tasks[t].count);
        return most;
    }
    int64_t most_ranks() const {
        int64_t most = 0;
        for (int64_t t = 0; t < num_tasks; t++)
            for (int64_t p = 0; p < parts; p++) most = max(most, delta(t, p).rank);
        return most;
    }

    const char* end_of_a(const Delta& d) const {
        return (const char*)d.a + round_up(in, delta::PANEL) * d.rank * sizeof(T);
    }
    const char* end_of_b(const Delta& d, int64_t part) const {
        return (const char*)d.b + round_up(size(part), delta::PANEL) * d.rank * sizeof(T);
    }
    // The matrix A of a part, or that of the first after it that has one, before the task `end`.
    const char* next_a(int64_t task, int64_t part, int64_t end) const {
        for (; task < end; task++, part = 0)
            for (; part < parts; part++)
                if (delta(task, part).a) return (const char*)delta(task, part).a;
        return nullptr;
    }

    // The inputs of a task's rows, in the order of blocks.
    void order_inputs(int64_t task, float* to) const {
        const Task& t = tasks[task];
        for (int64_t r = 0; r < t.count; r++)
            delta::order_inputs(x + order[t.first + r] * in, in, to + r * delta::stride_of(in));
    }
};

template <class T>
void add_task(const Layer<T>& l, int64_t task, int64_t end, float* scratch) {
    const int64_t rows = l.tasks[task].count;
    const int64_t* order = l.order + l.tasks[task].first;
    bool is_ordered = false;
    float* h = scratch + rows * delta::stride_of(l.in);
    for (int64_t p = 0; p < l.parts; p++) {
        const Delta& d = l.delta(task, p);
        if (d.is_none()) continue;
        if (d.a) {
            if (!is_ordered) l.order_inputs(task, scratch);
            is_ordered = true;
            delta::shrink(delta::Shrink<T>{(const T*)d.a, scratch, h, l.in, d.rank, d.rank,
                                           {l.end_of_a(d), (const char*)d.b}}, rows);
        }
        const delta::Run run = {l.end_of_b(d, p), l.next_a(task, p + 1, end)};
        for_each_tile({0, rows}, delta::EXPANDED, [&](int64_t row, int64_t count) {
            with_constant<delta::EXPANDED>(count, [&](auto n) {
                for (int64_t first = 0; first < l.size(p); first += delta::PANEL) {
                    T* y = l.y + l.edges[p] + first;
                    delta::expand_panel<decltype(n)::value, T>(
                        d, h + row * d.rank, d.rank, first, min(delta::PANEL, l.size(p) - first),
                        run.ahead((const T*)d.b + first * d.rank),
                        [&](int64_t r) { return y + order[row + r] * l.outputs; });
                }
            });
        });
    }
}

template <class T>
void add_deltas(const Layer<T>& l, int64_t threads) {
    const int64_t rows = l.most_rows(), chunk = ceil_div(max(l.num_tasks, 1), CHUNKS * threads);
    const int64_t size = rows * (delta::stride_of(l.in) + l.most_ranks());
    parallel(l.num_tasks, chunk, threads, [&](const Tasks& all) {
        const ScratchArray<float> scratch(size);
        for (Range some; all.take(some);)
            for (int64_t t = some.begin; t < some.end; t++) add_task(l, t, some.end, scratch);
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
