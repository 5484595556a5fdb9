// Routing: the experts of each row, and their weights.
#include "core/threads.h"

namespace {

constexpr int64_t MOST_EXPERTS = 1024;

template <class T>
inline float round_to(float x) {
    T rounded;
    assign(&rounded, x);
    return to_float(rounded);
}

// One row, rounded after each operation as torch does.
template <class T>
void route(const T* logits, const float* bias, int64_t experts, int64_t top_k, bool normalize, float scale,
           int64_t* selected, T* weights) {
    float scores[MOST_EXPERTS], ranks[MOST_EXPERTS];
    for (int64_t e = 0; e < experts; e++) {
        scores[e] = round_to<T>(1.0f / (1.0f + expf(-to_float(logits[e]))));
        ranks[e] = scores[e] + (bias ? bias[e] : 0.0f);
    }
    bool taken[MOST_EXPERTS] = {};
    float total = 0;
    for (int64_t i = 0; i < top_k; i++) {
        int64_t best = -1;
        for (int64_t e = 0; e < experts; e++)
            if (!taken[e] && (best < 0 || ranks[e] > ranks[best])) best = e;
        taken[best] = true;
        selected[i] = best;
        total += scores[best];
    }
    const float divisor = round_to<T>(round_to<T>(total) + 1e-6f);
    for (int64_t i = 0; i < top_k; i++) {
        const float weight = scores[selected[i]];
        assign(weights + i, (normalize ? round_to<T>(weight / divisor) : weight) * scale);
    }
}

template <class T>
void route_all(const T* logits, const float* bias, int64_t* selected, T* weights, int64_t rows, int64_t experts,
               int64_t top_k, bool normalize, float scale, int64_t threads) {
    parallel_for(rows, worthwhile_threads(rows * experts * top_k, 16384, threads), [&](int64_t r) {
        route(logits + r * experts, bias, experts, top_k, normalize, scale, selected + r * top_k, weights + r * top_k);
    });
}

}  // namespace

// logits [rows, experts] and weights [rows, top_k], both bf16 or both fp32; bias fp32 [experts] or null; selected
// [rows, top_k], by falling score, of equal ones the first. At most 1024 experts.
KERNEL(route)(const void* logits, const float* bias, int64_t* selected, void* weights, int64_t rows, int64_t experts,
              int64_t top_k, int64_t normalize, int64_t is_bf16, double scale, int64_t threads) {
    if (is_bf16)
        route_all((const bf16*)logits, bias, selected, (bf16*)weights, rows, experts, top_k, normalize, scale, threads);
    else
        route_all((const float*)logits, bias, selected, (float*)weights, rows, experts, top_k, normalize, scale,
                  threads);
}
REPLAYABLE(route)
