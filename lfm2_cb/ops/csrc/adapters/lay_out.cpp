// Matrices of adapters from files to the panels that delta.h has: each is read and written once.
#include "adapters/delta.h"
#include "core/threads.h"

namespace {

constexpr int64_t TOGETHER = 4;  // matrices that a thread takes at a time

// to [panels][rank][PANEL] = from [size][rank] * scale, as ops/adapters.py describes it; one of the strides is 1
struct Move {
    void* to;
    const void* from;
    int64_t size, rank, size_stride, rank_stride, is_bf16;
    double scale;
};

// W values, of which only the first `count` are there.
template <class T>
inline vec load_some(const T* from, int64_t count) {
    if (count >= W) return load(from);
    T values[W] = {};
    if (count > 0) memcpy(values, from, count * sizeof(T));
    return load(values);
}

// W by W values from `from` on, of which so many are there: v[k] has the outputs (or inputs) of rank k.
template <class T>
inline void load_square(const Move& m, const T* from, int64_t count, int64_t ranks, vec (&v)[W]) {
    if (m.size_stride == 1) {
        for (int64_t k = 0; k < ranks; k++) v[k] = load_some(from + k * m.rank_stride, count);
    } else {
        for (int64_t i = 0; i < W; i++) v[i] = load_some(from + min(i, count - 1) * m.size_stride, ranks);
        for (int64_t i = max(count, 0); i < W; i++) v[i] = vec{};
        transpose(v);
    }
}

template <class To, class From>
void lay_out(const Move& m) {
    const vec scale = fill((float)m.scale);
    To* to = (To*)m.to;
    for (int64_t first = 0; first < m.size; first += delta::PANEL, to += m.rank * delta::PANEL)
        for (int64_t rank = 0; rank < m.rank; rank += W)
            for (int64_t i = 0; i < delta::PANEL; i += W) {
                const int64_t ranks = min(W, m.rank - rank), count = min(W, m.size - first - i);
                vec v[W] = {};
                if (count > 0)
                    load_square(m, (const From*)m.from + (first + i) * m.size_stride + rank * m.rank_stride, count,
                                ranks, v);
                for (int64_t k = 0; k < ranks; k++) store(to + (rank + k) * delta::PANEL + i, v[k] * scale);
            }
}

template <class To>
void lay_out_all(const Move* moves, int64_t count, int64_t threads) {
    parallel(count, TOGETHER, threads, [&](const Tasks& tasks) {
        for (Range some; tasks.take(some);)
            for (int64_t i = some.begin; i < some.end; i++)
                moves[i].is_bf16 ? lay_out<To, bf16>(moves[i]) : lay_out<To, float>(moves[i]);
    });
}

}  // namespace

// moves [count][8]; to_bf16: the dtype of what is written
KERNEL(lay_out_adapter)(const int64_t* moves, int64_t count, int64_t to_bf16, int64_t threads) {
    to_bf16 ? lay_out_all<bf16>((const Move*)moves, count, threads)
            : lay_out_all<float>((const Move*)moves, count, threads);
}
