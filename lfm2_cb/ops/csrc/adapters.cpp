// y * ratio + B (A x) + addend for rows grouped by adapter: ops/adapters.py has the layout.
//
// A task is some rows of one adapter, with all parts of a layer: one thread shrinks them to the rank and expands them, so
// nothing is waited for in between. An adapter's matrices of a layer lie one behind the other and are read once a task, at
// the memory's speed: lines are asked for in the order of memory, `AHEAD` bytes before their turn, whatever the order
// they are used in, and at the end of a task those of the next one.
#include "core/prefetch.h"
#include "core/threads.h"

namespace {

constexpr int64_t PANEL = 32;       // outputs side by side in B
constexpr int64_t AHEAD = 4096;     // bytes
constexpr int64_t CHUNKS = 4;       // runs of tasks, a thread
constexpr int ROWS = 4, RANKS = 4;  // of a tile of sums
constexpr int FEW_ROWS_RANKS = 16;  // of a tile of one row
constexpr int EXPANDED = W == 16 ? 8 : 2;  // rows that expand together

struct Delta {  // as ops/adapters.py describes it
    const void *a, *b;
    const float *ratio, *addend;
    int64_t rank;
};

struct Task {
    int64_t place, first, count;
};

// A block is one load: W fp32 in their order, or 2 * W bf16, first the even ones, then the odd ones.
template <class T>
constexpr int PARTS = sizeof(T) == 4 ? 1 : 2;
template <class T>
constexpr int BLOCK = W * PARTS<T>;

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

// Asks for lines on and on: to the end of a range of memory, then from the beginning of the next one.
class Ahead {
  public:
    Ahead(const char* begin, const char* end, const char* next) : at(begin + AHEAD), end(end), next(next) {
        if (at >= end) at = next + (at - end);
    }
    template <int lines>
    void step() {
        UNROLLED for (int i = 0; i < lines; i++) {
            prefetch_line(at);
            at += LINE;
            if (at == end) at = next;
        }
    }

  private:
    const char *at, *end, *next;
};

template <class T>
struct Shrink {
    const T* a;       // [rank][in]
    const float* x;   // [rows][stride], in the order of blocks, with zeros behind
    float* h;         // [rows][rank]
    int64_t in, stride, rank;
};

template <int rows, int ranks, class T>
void shrink_tile(const Shrink<T>& s, int64_t row, int64_t rank, Ahead& ahead) {
    vec sums[rows * ranks] = {};
    const T* a = s.a + rank * s.in;
    const float* x = s.x + row * s.stride;
    const int64_t whole = s.in / BLOCK<T> * BLOCK<T>;
    int64_t run = s.in;
    T rest[ranks * BLOCK<T>];  // what fills no block, and zeros
    if (whole < s.in) {
        memset(rest, 0, sizeof rest);
        for (int j = 0; j < ranks; j++) memcpy(rest + j * BLOCK<T>, a + j * run + whole, (s.in - whole) * sizeof(T));
    }
    int64_t k = 0;
    for (int64_t end = whole; k < s.in; end = s.in, a = rest - whole, run = BLOCK<T>)
        for (; k < end; k += BLOCK<T>) {
            ahead.template step<ranks * BLOCK<T> * (int)sizeof(T) / LINE>();
            vec inputs[rows][PARTS<T>];
            UNROLLED for (int r = 0; r < rows; r++)
                UNROLLED for (int p = 0; p < PARTS<T>; p++) inputs[r][p] = load(x + r * s.stride + k + p * W);
            UNROLLED for (int j = 0; j < ranks; j++) {
                vec weights[PARTS<T>];
                load_block(a + j * run + k, weights);
                UNROLLED for (int r = 0; r < rows; r++)
                    UNROLLED for (int p = 0; p < PARTS<T>; p++) sums[r * ranks + j] += weights[p] * inputs[r][p];
            }
        }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int j = 0; j < ranks; j++) s.h[(row + r) * s.rank + rank + j] = sum(sums[r * ranks + j]);
}

template <class T>
void shrink(const Shrink<T>& s, int64_t rows, Ahead& ahead) {
    if (rows == 1) {
        int64_t rank = 0;
        for (; rank + FEW_ROWS_RANKS <= s.rank; rank += FEW_ROWS_RANKS) shrink_tile<1, FEW_ROWS_RANKS>(s, 0, rank, ahead);
        if (rank < s.rank)
            with_constant<FEW_ROWS_RANKS>(s.rank - rank, [&](auto left) {
                shrink_tile<1, decltype(left)::value>(s, 0, rank, ahead);
            });
        return;
    }
    for (int64_t rank = 0; rank < s.rank; rank += RANKS)
        with_constant<RANKS>(min(RANKS, s.rank - rank), [&](auto ranks) {
            for_each_tile({0, rows}, ROWS, [&](int64_t row, int64_t count) {
                with_constant<ROWS>(count, [&](auto n) {
                    shrink_tile<decltype(n)::value, decltype(ranks)::value>(s, row, rank, ahead);
                });
            });
        });
}

template <class T>
struct Expand {
    const Delta& delta;
    const float* h;        // [rows][rank]
    T* y;                  // of the part's first output
    const int64_t* order;  // of each row, where it is in y
    int64_t outputs, stride;
};

// One block of outputs of one row: y * ratio + sums + addend.
template <class T>
inline void finish_block(const Delta& delta, int64_t output, T* y, vec (&sums)[PARTS<T>]) {
    vec values[PARTS<T>];
    load_block(y, values);
    for (int p = 0; p < PARTS<T>; p++) {
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

template <int rows, class T>
void expand_rows(const Expand<T>& e, int64_t row, Ahead& ahead) {
    constexpr int BLOCKS = PANEL / BLOCK<T>;
    const int64_t rank = e.delta.rank;
    const float* h = e.h + row * rank;
    const bool plain = !e.delta.ratio && !e.delta.addend;
    for (int64_t first = 0; first < e.outputs; first += PANEL) {
        const T* b = (const T*)e.delta.b + first * rank;
        vec sums[rows][BLOCKS][PARTS<T>] = {};
        for (int64_t k = 0; k < rank; k++) {
            ahead.template step<PANEL * (int)sizeof(T) / LINE>();
            UNROLLED for (int i = 0; i < BLOCKS; i++) {
                vec weights[PARTS<T>];
                load_block(b + k * PANEL + i * BLOCK<T>, weights);
                UNROLLED for (int r = 0; r < rows; r++)
                    UNROLLED for (int p = 0; p < PARTS<T>; p++) sums[r][i][p] += weights[p] * h[r * rank + k];
            }
        }
        for (int r = 0; r < rows; r++) {
            T* to = e.y + e.order[row + r] * e.stride + first;
            T last[PANEL] = {};  // of a panel that is not whole
            const int64_t count = min(PANEL, e.outputs - first);
            T* at = count < PANEL ? last : to;
            if (at == last) memcpy(last, to, count * sizeof(T));
            UNROLLED for (int i = 0; i < BLOCKS; i++) {
                T* block = at + i * BLOCK<T>;
                if (plain) {
                    vec values[PARTS<T>];
                    load_block(block, values);
                    UNROLLED for (int p = 0; p < PARTS<T>; p++) values[p] += sums[r][i][p];
                    store_block(block, values);
                } else {
                    finish_block(e.delta, first + i * BLOCK<T>, block, sums[r][i]);
                }
            }
            if (at == last) memcpy(to, last, count * sizeof(T));
        }
    }
}

template <class T>
struct Layer {
    const T* x;
    T* y;
    const Delta* table;
    const int64_t *edges, *order;
    int64_t in, outputs, parts, stride;  // stride: deltas of a place

    const Delta* of(const Task& task) const { return table + task.place * stride; }
};

// What a task's deltas take of memory: their matrices lie one behind the other.
template <class T>
const char* begin_of(const Layer<T>& l, const Task& task) {
    for (int64_t p = 0; p < l.parts; p++)
        if (l.of(task)[p].a) return (const char*)l.of(task)[p].a;
    return nullptr;
}

template <class T>
const char* end_of(const Layer<T>& l, const Task& task) {
    for (int64_t p = l.parts; p-- > 0;)
        if (const Delta& d = l.of(task)[p]; d.b)
            return (const char*)d.b + round_up(round_up(l.edges[p + 1] - l.edges[p], PANEL) * d.rank * sizeof(T), LINE);
    return nullptr;
}

template <class T>
void order_inputs(const T* x, int64_t in, float* to) {
    const int64_t whole = in / BLOCK<T> * BLOCK<T>;
    T rest[BLOCK<T>] = {};
    memcpy(rest, x + whole, (in - whole) * sizeof(T));
    for (int64_t k = 0; k < in; k += BLOCK<T>) {
        vec block[PARTS<T>];
        load_block(k < whole ? x + k : rest, block);
        for (int p = 0; p < PARTS<T>; p++) store(to + k + p * W, block[p]);
    }
}

template <class T>
void run(const Layer<T>& l, const Task& task, const Task& next, float* scratch) {
    const int64_t* order = l.order + task.first;
    const char* begin = begin_of(l, task);
    Ahead ahead(begin, end_of(l, task), begin_of(l, next));
    const int64_t stride = round_up(l.in, 2 * W) + W;
    if (begin)
        for (int64_t r = 0; r < task.count; r++) order_inputs(l.x + order[r] * l.in, l.in, scratch + r * stride);
    float* h = scratch + task.count * stride;
    for (int64_t p = 0; p < l.parts; p++) {
        const Delta& delta = l.of(task)[p];
        if (!delta.a && !delta.ratio && !delta.addend) continue;
        if (delta.a) shrink(Shrink<T>{(const T*)delta.a, scratch, h, l.in, stride, delta.rank}, task.count, ahead);
        const Expand<T> expand = {delta, h, l.y + l.edges[p], order, l.edges[p + 1] - l.edges[p], l.outputs};
        for_each_tile({0, task.count}, EXPANDED, [&](int64_t row, int64_t count) {
            with_constant<EXPANDED>(count, [&](auto n) { expand_rows<decltype(n)::value>(expand, row, ahead); });
        });
    }
}

template <class T>
void add_deltas(const Layer<T>& l, const int64_t* tasks, int64_t threads) {
    const int64_t count = tasks[0];
    const Task* task = (const Task*)(tasks + 3);
    int64_t rank = 0, rows = 0;
    for (int64_t t = 0; t < count; t++) {
        rows = max(rows, task[t].count);
        for (int64_t p = 0; p < l.parts; p++) rank = max(rank, l.of(task[t])[p].rank);
    }
    const int64_t size = round_up(rows * (round_up(l.in, 2 * W) + W + rank), 16) * sizeof(float);
    const int64_t chunk = ceil_div(max(count, 1), CHUNKS * threads);
    parallel(count, chunk, threads, [&](const Tasks& all) {
        float* scratch = (float*)aligned_alloc(64, size);
        for (Range some; all.take(some);)
            for (int64_t t = some.begin; t < some.end; t++)
                run(l, task[t], task[min(t + 1, some.end - 1)], scratch);
        free(scratch);
    });
}

}  // namespace

// x [rows, in], y [rows, outputs]; table: of each place `stride` values, the deltas of this layer's parts first; edges
// [parts + 1]; order [rows]; tasks [1 + rows][3], of which the first says how many there are
KERNEL(add_deltas)(const void* x, void* y, const int64_t* table, const int64_t* edges, const int64_t* order,
                   const int64_t* tasks, int64_t in, int64_t outputs, int64_t parts, int64_t stride, int64_t is_bf16,
                   int64_t threads) {
    const Delta* deltas = (const Delta*)table;
    stride /= sizeof(Delta) / sizeof(int64_t);
    if (is_bf16)
        add_deltas(Layer<bf16>{(const bf16*)x, (bf16*)y, deltas, edges, order, in, outputs, parts, stride}, tasks, threads);
    else
        add_deltas(Layer<float>{(const float*)x, (float*)y, deltas, edges, order, in, outputs, parts, stride}, tasks,
                   threads);
}
REPLAYABLE(add_deltas)
