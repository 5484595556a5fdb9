// The deltas of a layer for rows grouped by adapter, as ops/adapters.py describes them.
//
// A task is some rows of one adapter, with all parts of the layer. One thread shrinks its rows and expands them, so no
// thread waits in between.
#pragma once

#include "adapters/delta.h"
#include "core/scratch.h"
#include "core/threads.h"

namespace {

struct Task {
    int64_t place, first, count;
};

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
    int64_t scratch_size() const { return most_rows() * (delta::stride_of(in) + most_ranks()); }

    // The matrix A of a part, or that of the first after it that has one, before the task `end`.
    const char* next_a(int64_t task, int64_t part, int64_t end) const {
        for (; task < end; task++, part = 0)
            for (; part < parts; part++)
                if (delta(task, part).a) return (const char*)delta(task, part).a;
        return nullptr;
    }

    // The panel from `first` on of a part's outputs of a row of a task's: += sums, and what else its delta does.
    void add_panel(int64_t task, int64_t part, int64_t row, int64_t first, delta::PanelSums<T>& sums) const {
        T* at = y + order[tasks[task].first + row] * outputs + edges[part] + first;
        delta::add_panel(delta(task, part), first, min(delta::PANEL, size(part) - first), at, sums);
    }

    // The inputs of a task's rows, in the order of blocks.
    void order_inputs(int64_t task, float* to) const {
        const Task& t = tasks[task];
        for (int64_t r = 0; r < t.count; r++)
            delta::order_inputs(x + order[t.first + r] * in, in, to + r * delta::stride_of(in));
    }
};

// B (A x) of a task's rows, and zeros where there is neither: put(part, row of the task, first output, sums), panel by
// panel. `end`: of the tasks that this thread has; scratch [scratch_size].
template <class T, class Put>
void expand_task(const Layer<T>& l, int64_t task, int64_t end, float* scratch, const Put& put) {
    const int64_t rows = l.tasks[task].count;
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
                for (int64_t first = 0; first < l.size(p); first += delta::PANEL)
                    delta::expand_panel<decltype(n)::value, T>(
                        d, h + row * d.rank, d.rank, first, run.ahead((const T*)d.b + first * d.rank),
                        [&](int64_t r, delta::PanelSums<T>& sums) { put(p, row + r, first, sums); });
            });
        });
    }
}

}  // namespace
