// Causal attention of packed queries over a paged K/V cache, read in place; for few queries a sequence.
//
// The work is cut into items: a tile of a sequence's rows (a row is a query of one head; all heads that share a kv
// head go together, so each key is loaded once for them), one kv head, and a span of the keys. The cuts depend on the
// sequence alone, so neither its batch mates nor the number of threads changes a bit of the result. Within an item an
// online softmax goes over the keys (Milakov & Gimelshein, arXiv 1805.02867); the spans of a long sequence are merged
// by their sums of exponentials, as in flash decoding (Dao et al., 2023). Everything is accumulated in fp32. Where
// there are tiles enough for all threads, an item has all spans, in turn, so that no partial results need be kept.
#include "attention/sequence.h"
#include "core/prefetch.h"
#include "core/scratch.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int ROWS = 16;   // rows of an item
constexpr int TILE = 64;   // keys whose scores are taken at once
constexpr int SPAN = 512;  // keys of a span
constexpr int MANY_ITEMS = 128;  // for any number of threads

inline int64_t num_spans(const Sequence& s) { return ceil_div(s.num_keys - s.first_key, SPAN); }

struct Problem {
    const void *q, *keys, *values;
    const bf16 *key_scales, *value_scales;  // of keys and values in 8 bits, one a row
    const Sequence* sequences;
    const int64_t* block_ids;
    const uint8_t* taken;  // the sequences' lists of blocks, or null
    void* out;
    float* lse;
    int64_t heads, kv_heads, group, dim, padded_dim, block_size, q_stride;
    float scaling;
    bool out_is_float;

    int64_t rows_of(const Sequence& s) const { return s.num_queries * group; }
    int64_t num_tiles(const Sequence& s) const { return (rows_of(s) + ROWS - 1) / ROWS; }
    // Spans of the keys whose partial results are kept to be merged; 1: an item has all keys.
    int64_t num_partials(const Sequence& s) const {
        return num_tiles(s) * kv_heads >= MANY_ITEMS ? 1 : num_spans(s);
    }
};

// Of the keys and values of a tile.
struct Scales {
    float keys[TILE], values[TILE];
};

struct Item {
    int32_t sequence, tile, head, span;
    int64_t partial;  // which of the partial results is its own; -1: it is the whole result, of all spans
};

// (gcc does not find these instructions in a vector conversion.)
inline vec load(const int8_t* p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    vec v;
    for (int i = 0; i < W; i++) v[i] = p[i];
    return v;
#endif
}

inline float to_float(int8_t x) { return x; }

// What an item has found so far: [ROWS] maxima, [ROWS] sums of exponentials, [ROWS][padded_dim] weighted values.
struct State {
    float *max, *sum, *mixed;

    State(float* memory) : max(memory), sum(memory + ROWS), mixed(memory + 2 * ROWS) {}
    static int64_t size(int64_t dim) { return ROWS * (dim + 2); }
};

// Start to fetch a tile's row k, if there is a tile.
template <class T>
inline void prefetch(const T* const* rows, int k, int64_t dim) {
    if (rows) prefetch_lines((const char*)rows[k], dim * sizeof(T));
}

// Scores of NR rows against n keys, W / NR at a time; meanwhile `ahead`, which is needed next, is fetched.
template <int NR, class T, class A>
inline void score(
    const float* q, const T* const* keys, int n, int64_t dim, float (*scores)[TILE], const A* const* ahead) {
    constexpr int NK = W / NR;
    for (int k = 0; k < n; k += NK) {
        for (int j = 0; j < NK; j++) prefetch(ahead, k + j, dim);
        vec acc[W] = {};
        for (int64_t i = 0; i < dim; i += W) {
            vec x[NR];
            for (int r = 0; r < NR; r++) x[r] = load(q + r * dim + i);
            for (int j = 0; j < NK; j++) {
                vec y = load(keys[k + j] + i);
                for (int r = 0; r < NR; r++) acc[r * NK + j] += x[r] * y;
            }
        }
        vec s = sum_each(acc);
        for (int r = 0; r < NR; r++) memcpy(&scores[r][k], (const float*)&s + r * NK, NK * sizeof(float));
    }
}

// mixed += weights @ values, for NR rows and NV vectors of the dims; `ahead` as above.
template <int NR, int NV, class T, class A>
inline void mix(
    const float (*weights)[TILE], const T* const* values, int n, int64_t at, float* mixed, int64_t dim,
    const A* const* ahead) {
    vec acc[NR][NV];
    for (int r = 0; r < NR; r++)
        for (int v = 0; v < NV; v++) acc[r][v] = load(mixed + r * dim + at + v * W);
    for (int k = 0; k < n; k++) {
        prefetch(ahead, k, dim);
        vec y[NV];
        for (int v = 0; v < NV; v++) y[v] = load(values[k] + at + v * W);
        for (int r = 0; r < NR; r++)
            for (int v = 0; v < NV; v++) acc[r][v] += weights[r][k] * y[v];
    }
    for (int r = 0; r < NR; r++)
        for (int v = 0; v < NV; v++) store(mixed + r * dim + at + v * W, acc[r][v]);
}

template <int NR, class T, class A>
inline void mix(
    const float (*weights)[TILE], const T* const* values, int n, float* mixed, int64_t dim, const A* const* ahead) {
    int64_t at = 0;
    for (; at + 4 * W <= dim; at += 4 * W) mix<NR, 4>(weights, values, n, at, mixed, dim, at ? nullptr : ahead);
    for (; at < dim; at += W) mix<NR, 1>(weights, values, n, at, mixed, dim, at ? nullptr : ahead);
}

// A row's scores become exponentials, 0 beyond the keys it sees, and its state is brought to the new maximum.
inline void online_softmax_update(float* scores, int visible, const State& state, int row, int64_t dim) {
    for (int k = visible > 0 ? visible : 0; k < TILE; k++) scores[k] = -INFINITY;
    vec top = load(scores);
    for (int k = W; k < TILE; k += W) top = maximum(top, load(scores + k));
    float max = largest(top);
    if (max > state.max[row]) {
        float shrink = expf(state.max[row] - max);
        state.max[row] = max;
        state.sum[row] *= shrink;
        for (int64_t i = row * dim; i < (row + 1) * dim; i += W) store(state.mixed + i, load(state.mixed + i) * shrink);
    }
    float base = state.max[row] == -INFINITY ? 0 : state.max[row];  // nothing seen yet: all exponentials are 0
    vec total = {};
    for (int k = 0; k < TILE; k += W) {
        vec e = exponential(load(scores + k) - base);
        store(scores + k, e);
        total += e;
    }
    state.sum[row] += sum(total);
}

inline void multiply(float* scores, const float* scales) {
    for (int k = 0; k < TILE; k += W) store(scores + k, load(scores + k) * load(scales + k));
}

// A tile of n keys for all rows. T: what the tile is in; A: what the cache is in, of which the tile's own values and
// the next tile's keys are to be fetched, where given. Keys and values in 8 bits are used as they are: a key's scale
// multiplies its score, and a value's scale its weight.
template <class T, class A>
inline void process_tile(
    const float* q, const T* const* keys, const T* const* values, const Scales* scales, int n, const int* visible,
    int rows, int64_t dim, const State& state, const A* const* ahead, const A* const* next_keys) {
    float scores[ROWS][TILE];
    int r = 0;
    for (; r + 2 <= rows; r += 2) score<2>(q + r * dim, keys, n, dim, scores + r, r ? nullptr : ahead);
    if (r < rows) score<1>(q + r * dim, keys, n, dim, scores + r, r ? nullptr : ahead);
    for (r = 0; r < rows; r++) {
        if (scales) multiply(scores[r], scales->keys);
        online_softmax_update(scores[r], visible[r], state, r, dim);
        if (scales) multiply(scores[r], scales->values);
    }
    for (r = 0; r + 2 <= rows; r += 2)
        mix<2>(scores + r, values, n, state.mixed + r * dim, dim, r ? nullptr : next_keys);
    if (r < rows) mix<1>(scores + r, values, n, state.mixed + r * dim, dim, r ? nullptr : next_keys);
}

template <class T>
inline void unpack(const T* from, float* to, int64_t dim) {
    int64_t i = 0;
    for (; i + W <= dim; i += W) store(to + i, load(from + i));
    for (; i < dim; i++) to[i] = to_float(from[i]);
}

template <class T>
void finish(const Problem& p, const Item& item, const State& state) {
    const Sequence& s = p.sequences[item.sequence];
    for (int64_t row = item.tile * ROWS, r = 0; r < ROWS && row < p.rows_of(s); row++, r++) {
        int64_t to = (s.first_query + row / p.group) * p.heads + item.head * p.group + row % p.group;
        for (int64_t i = 0; i < p.dim; i++) {
            float x = state.mixed[r * p.padded_dim + i] / state.sum[r];
            if (p.out_is_float)
                ((float*)p.out)[to * p.dim + i] = x;
            else
                assign((T*)p.out + to * p.dim + i, x);
        }
        if (p.lse) p.lse[to] = state.max[r] + logf(state.sum[r]);
    }
}

// Where n keys and their values lie; beyond them the last again, as scores are taken a few at a time.
template <class T>
struct Tile {
    const T *keys[TILE], *values[TILE];
    Scales scales;  // set where there are any
    int n;

    void locate(const Problem& p, const Sequence& s, int64_t head, int64_t first, int64_t end) {
        n = end - first < TILE ? end - first : TILE;
        int64_t block = first / p.block_size, offset = first % p.block_size;
        for (int k = 0; k < TILE; k++) {
            int64_t row = (p.block_ids[s.table + block] * p.kv_heads + head) * p.block_size + offset;
            keys[k] = (const T*)p.keys + row * p.dim, values[k] = (const T*)p.values + row * p.dim;
            if (sizeof(T) == 1)
                scales.keys[k] = to_float(p.key_scales[row]), scales.values[k] = to_float(p.value_scales[row]);
            if (k + 1 < n && ++offset == p.block_size) block++, offset = 0;
        }
    }
};

// T: what q is in; C: what the cache is in.
// memory: floats for q [ROWS][padded_dim], and for a tile of keys and one of values, [TILE][padded_dim] each.
template <class T, class C>
void attend(const Problem& p, const Item& item, int64_t span, const State& state, float* memory) {
    const Sequence& s = p.sequences[item.sequence];
    const int64_t dim = p.padded_dim, first_row = item.tile * ROWS;
    const int rows = p.rows_of(s) - first_row < ROWS ? p.rows_of(s) - first_row : ROWS;
    float *q = memory, *key_tile = q + ROWS * dim, *value_tile = key_tile + TILE * dim;
    int64_t seen[ROWS];  // keys that a row sees
    for (int r = 0; r < rows; r++) {
        int64_t query = (first_row + r) / p.group, head = item.head * p.group + (first_row + r) % p.group;
        seen[r] = s.num_keys - s.num_queries + query + 1;
        unpack((const T*)p.q + (s.first_query + query) * p.q_stride + head * p.dim, q + r * dim, p.dim);
        for (int64_t i = 0; i < p.dim; i++) q[r * dim + i] *= p.scaling;
    }
    for (int r = 0; r < ROWS; r++) state.max[r] = -INFINITY, state.sum[r] = 0;
    memset(state.mixed, 0, ROWS * dim * sizeof(float));

    const bool repack = p.dim != dim || (sizeof(C) < 4 && rows > 4);
    const int64_t start = s.first_key + span * SPAN;
    const int64_t end = start + SPAN < seen[rows - 1] ? start + SPAN : seen[rows - 1];
    const uint8_t* taken = block_list(p.taken, s, p.kv_heads, item.head, first_row / p.group / QUERY_BLOCK);
    auto next_taken = [&](int64_t first) {
        while (first < end && !takes(taken, (first - s.first_key) / KEY_BLOCK)) first += TILE;
        return first;
    };
    Tile<C> tiles[2];
    int64_t following = next_taken(start);
    if (following < end) tiles[0].locate(p, s, item.head, following, end);
    for (int64_t first = following, i = 0; first < end; first = following, i ^= 1) {
        const Tile<C>&tile = tiles[i], *next = nullptr;
        const Scales* scales = sizeof(C) == 1 ? &tile.scales : nullptr;
        following = next_taken(first + TILE);
        if (following < end) tiles[i ^ 1].locate(p, s, item.head, following, end), next = &tiles[i ^ 1];
        int visible[ROWS];
        for (int r = 0; r < rows; r++) visible[r] = seen[r] - first < tile.n ? seen[r] - first : tile.n;
        if (!repack) {
            const C* const* next_keys = next ? next->keys : nullptr;
            process_tile(q, tile.keys, tile.values, scales, tile.n, visible, rows, dim, state, tile.values, next_keys);
            continue;
        }
        const float *keys[TILE], *values[TILE];
        for (int k = 0; k < TILE; k++) {
            keys[k] = key_tile + k * dim, values[k] = value_tile + k * dim;
            unpack(tile.keys[k], key_tile + k * dim, p.dim), unpack(tile.values[k], value_tile + k * dim, p.dim);
        }
        const C* const* next_keys = next ? next->keys : nullptr;
        const C* const* next_values = next ? next->values : nullptr;
        process_tile(q, keys, values, scales, tile.n, visible, rows, dim, state, next_values, next_keys);
    }
}

// Bring what was found among some keys to what was found among others.
void merge(const State& whole, const State& part, int64_t dim) {
    for (int r = 0; r < ROWS; r++) {
        if (part.max[r] == -INFINITY) continue;  // also the rows that are not there
        float max = whole.max[r] > part.max[r] ? whole.max[r] : part.max[r];
        float a = expf(whole.max[r] - max), b = expf(part.max[r] - max);
        whole.max[r] = max;
        whole.sum[r] = a * whole.sum[r] + b * part.sum[r];
        for (int64_t i = r * dim; i < (r + 1) * dim; i += W)
            store(whole.mixed + i, load(whole.mixed + i) * a + load(part.mixed + i) * b);
    }
}

template <class T, class C>
void run(const Problem& p, const Item* items, int64_t num_items, float* partials, int64_t num_partials,
         int64_t num_threads) {
    const int64_t dim = p.padded_dim, size = State::size(dim);
    parallel(num_items, 1, num_threads, [&](const Tasks& tasks) {
        const int64_t count = 2 * size + (ROWS + 2 * TILE) * dim;
        const ScratchArray<float> memory(count);
        memset(memory, 0, count * sizeof(float));
        const State whole(memory), part(memory + size);
        float* rest = memory + 2 * size;
        for (Range range; tasks.take(range);) {
            const Item& item = items[range.begin];
            if (item.partial >= 0) {
                attend<T, C>(p, item, item.span, State(partials + item.partial * size), rest);
                continue;
            }
            attend<T, C>(p, item, 0, whole, rest);
            for (int64_t span = 1; span < num_spans(p.sequences[item.sequence]); span++) {
                attend<T, C>(p, item, span, part, rest);
                merge(whole, part, dim);
            }
            finish<T>(p, item, whole);
        }
    });
    if (num_partials)
        parallel_for(num_items, num_threads, [&](int64_t i) {
            if (items[i].partial < 0 || items[i].span > 0) return;
            float* first = partials + items[i].partial * size;
            for (int64_t span = 1; span < p.num_partials(p.sequences[items[i].sequence]); span++)
                merge(State(first), State(first + span * size), dim);
            finish<T>(p, items[i], State(first));
        });
}

}  // namespace

// q [tokens, heads, dim], q_stride values from token to token; keys, values [blocks, kv_heads, block_size, dim];
// sequences [num_sequences] of the struct in sequence.h; block_ids of all, one after another; taken: the lists of
// blocks of those sequences that have some. out [tokens, heads, dim] in fp32 or q's dtype; lse [tokens, heads] or
// null. Only the sequences' tokens are written. q, keys, values: fp32 or all bf16; or keys and values int8, where they
// have scales, [blocks, kv_heads, block_size] each, else null.
KERNEL(paged_attention)(
    const void* q, const void* keys, const void* values, const bf16* key_scales, const bf16* value_scales,
    const Sequence* sequences, const int64_t* block_ids, const uint8_t* taken, void* out, float* lse,
    int64_t num_sequences, int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size, int64_t q_stride,
    int64_t is_bf16, int64_t out_is_float, double scaling, int64_t num_threads) {
    Problem p = {q, keys, values, key_scales, value_scales, sequences, block_ids, taken, out, lse, heads, kv_heads,
                 heads / kv_heads, dim, (dim + W - 1) / W * W, block_size, q_stride, (float)scaling, out_is_float != 0};
    int64_t num_items = 0, num_partials = 0, work = 0;
    for (int64_t s = 0; s < num_sequences; s++) {
        num_items += p.num_tiles(sequences[s]) * kv_heads * p.num_partials(sequences[s]);
        work += p.num_tiles(sequences[s]) * kv_heads * (sequences[s].num_keys - sequences[s].first_key) * dim;
    }
    const ScratchArray<Item> items(num_items);
    Item* next = items;
    for (int32_t s = 0; s < num_sequences; s++) {
        const int64_t spans = p.num_partials(sequences[s]);
        for (int32_t tile = 0; tile < p.num_tiles(sequences[s]); tile++)
            for (int32_t head = 0; head < kv_heads; head++)
                for (int32_t span = 0; span < spans; span++)
                    *next++ = {s, tile, head, span, spans > 1 ? num_partials++ : -1};
    }
    const ScratchArray<float> partials(num_partials * State::size(p.padded_dim));
    // waking a thread costs as much as reading so many values
    const int64_t threads = worthwhile_threads(work, 65536, num_threads);
    auto whole = key_scales ? is_bf16 ? run<bf16, int8_t> : run<float, int8_t>
                            : is_bf16 ? run<bf16, bf16> : run<float, float>;
    whole(p, items, num_items, partials, num_partials, threads);
}
REPLAYABLE(paged_attention)
