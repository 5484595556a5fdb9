// Attention of one query a sequence over a paged cache, by products of pairs of bf16 or of fours of bytes.
//
// Decoding is limited by reading the cache once, so the work is arranged around that. An item is a sequence, some kv
// heads and a span of its keys, of which 64 at a time are taken for one kv head after another, as they lie in a block.
// Where there are sequences enough an item has all kv heads, so that whole blocks are read in the order of memory (95
// sequences of about 200 keys, 6 layers, two cores of an Intel Xeon with AMX: 9.7 ms by a kv head at a time, 9.1 so).
//
// The heads that share a kv head go two by two over the 64 keys, which the first-level cache holds. Scores are a row
// times the query, and sums of sixteen rows by transposing; values are rows interleaved, times their weights, whose
// order of dims is set right at the end. While keys are multiplied the values beside them are fetched, and while
// values are, the next keys, also those of the next item: about 8 KB ahead was the best of what was tried (same case:
// 12.1 ms without; 7.9 with, but with no computation). Spans are merged in their order, and heads know nothing of each
// other, so a result depends on the sequence alone, not on the number of threads.
#if defined(__AVX512BF16__) || defined(EMULATED) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "attention/decode_bf16.h"
#include "attention/decode_int8.h"
#include "core/scratch.h"
#include "core/threads.h"

namespace {

constexpr int SPAN = 16 * KEYS;   // keys of an item
constexpr int MOST_HEADS = 8;     // that share a kv head
constexpr int MOST_KV_HEADS = 8;  // of an item
constexpr int ITEMS = 8;          // a thread, where there are so many: for equal shares

struct Item {
    int32_t sequence, first_head, num_heads, span;  // heads: of keys and values
    int64_t partial;  // the first of its own partial states, one for each of its queries; -1: it is the whole result
};

struct Problem : Attention {
    int64_t num_queries(const Item& item) const { return item.num_heads * group; }
    // The span's first keys, of which `end` is set.
    int64_t first_key(const Item& item, int64_t& end) const {
        const Sequence& s = sequences[item.sequence];
        const int64_t first = s.first_key + item.span * SPAN;
        end = min(first + SPAN, s.num_keys);
        return first;
    }
    // Keys of the item's i-th head.
    KeyTile locate(const Item& item, int64_t i, int64_t first, int64_t end) const {
        KeyTile tile;
        tile.locate(*this, sequences[item.sequence], item.first_head + i, first, end);
        return tile;
    }
    KeyTile first_tile(const Item& item) const {
        int64_t end;
        const int64_t first = first_key(item, end);
        return locate(item, 0, first, end);
    }
};

// A tile of keys for HEADS queries; `next`, if given, is what comes after it.
template <int DIM, int HEADS, class C>
inline void process_tile(
    const Problem& p, const Query<DIM, C>* q, const KeyTile& tile, const KeyTile* next, State<DIM>* states) {
    const C *keys = (const C*)p.keys, *values = (const C*)p.values;
    const C *rows[GROUPS], *ahead[GROUPS];
    vec scores[HEADS][GROUPS] = {}, scales[GROUPS];
    for (int g = 0; g < tile.groups; g++) {
        vec s[HEADS];
        rows[g] = values + tile.rows[g] * DIM;
        score<DIM, HEADS>(q, keys + tile.rows[g] * DIM, next ? rows[g] : nullptr, s);
        for (int h = 0; h < HEADS; h++) scores[h][g] = s[h];
        if (sizeof(C) == 1)
            for (int h = 0; h < HEADS; h++) scores[h][g] *= load(p.key_scales + tile.rows[g]);
    }
    if (sizeof(C) == 1)
        for (int g = 0; g < GROUPS; g++)
            scales[g] = g < tile.groups
                            ? first_lanes(load(p.value_scales + tile.rows[g]), tile.keys - g * SIXTEEN, 0)
                            : vec{};
    Weights<C> weights[HEADS];
    for (int h = 0; h < HEADS; h++) {
        online_softmax_update(scores[h], tile.keys, q[h].scale * p.log2_scaling(), states[h]);
        states[h].sum += weights[h].set(scores[h], scales);
    }
    alignas(64) C copy[SIXTEEN * DIM];
    const int last = tile.groups - 1;
    rows[last] = existing_rows<DIM>(rows[last], tile.keys - last * SIXTEEN, copy);
    for (int g = 0; g < GROUPS; g++) ahead[g] = next && g < next->groups ? keys + next->rows[g] * DIM : nullptr;
    mix_tile<DIM, HEADS>(weights, rows, tile.groups, ahead, states);
    for (int g = tile.groups; g < GROUPS; g++)
        for (int i = 0; i < SIXTEEN; i++) prefetch_row<DIM>(ahead[g], i);
    if (sizeof(C) == 1 && next)
        for (int g = 0; g < next->groups; g++)
            prefetch_line<2>(p.key_scales + next->rows[g]), prefetch_line<2>(p.value_scales + next->rows[g]);
}

// A tile of keys for the `group` queries of its head.
template <int DIM, class C>
void process_head(
    const Problem& p, const Query<DIM, C>* q, const KeyTile& tile, const KeyTile& next, State<DIM>* states) {
    for (int h = 0; h < p.group; h += 2) {
        const KeyTile* ahead = h ? nullptr : &next;
        h + 1 < p.group ? process_tile<DIM, 2>(p, q + h, tile, ahead, states + h)
                        : process_tile<DIM, 1>(p, q + h, tile, ahead, states + h);
    }
}

template <int DIM, class C>
void attend(const Problem& p, const Item& item, const Item* next_item, State<DIM>* states) {
    const Sequence& s = p.sequences[item.sequence];
    Query<DIM, C> q[MOST_HEADS * MOST_KV_HEADS];
    for (int h = 0; h < p.num_queries(item); h++) {
        q[h].set(p.q + s.first_query * p.q_stride + (item.first_head * p.group + h) * DIM);
        states[h].clear();
    }
    int64_t end;
    const int64_t first = p.first_key(item, end);
    KeyTile tile = p.locate(item, 0, first, end), next = tile;
    for (int64_t key = first; key < end; key += KEYS)
        for (int i = 0; i < item.num_heads; i++, tile = next) {
            if (i + 1 < item.num_heads)
                next = p.locate(item, i + 1, key, end);
            else if (key + KEYS < end)
                next = p.locate(item, 0, key + KEYS, end);
            else if (next_item)
                next = p.first_tile(*next_item);
            process_head(p, q + i * p.group, tile, next, states + i * p.group);
        }
}

// Merge `count` states, `stride` apart, into the first of them.
template <int DIM>
void merge(State<DIM>* states, int64_t count, int64_t stride) {
    for (int64_t i = 1; i < count; i++) {
        State<DIM>&whole = *states, &part = states[i * stride];
        const float max = whole.max > part.max ? whole.max : part.max, base = max == -INFINITY ? 0 : max;
        const vec a = exp2_precise(fill(whole.max - base)), b = exp2_precise(fill(part.max - base));
        whole.max = max;
        whole.sum = whole.sum * a + part.sum * b;
        for (int c = 0; c < DIM / W; c++) whole.mixed[c] = whole.mixed[c] * a + part.mixed[c] * b;
    }
}

template <int DIM, class C>
void write(const Problem& p, const Item& item, const State<DIM>* states) {
    for (int h = 0; h < p.num_queries(item); h++) {
        vec mixed[DIM / W];
        set_right<DIM>(states[h].mixed, mixed, C());
        p.write<DIM>(p.sequences[item.sequence].first_query, item.first_head * p.group + h, mixed, sum(states[h].sum),
                     states[h].max);
    }
}

template <int DIM, class C>
void run(const Problem& p, const Item* items, int64_t num_items, int64_t num_partials, int64_t threads) {
    const ScratchArray<State<DIM>> partials(num_partials);
    parallel(num_items, 1, threads, [&](const Tasks& tasks) {
        const FlushSubnormals flush;
        State<DIM> own[MOST_HEADS * MOST_KV_HEADS];
        Range range, next;  // taken before it is its turn, so that its keys can be fetched
        for (bool more = tasks.take(range); more; range = next) {
            more = tasks.take(next);
            const Item& item = items[range.begin];
            State<DIM>* states = item.partial < 0 ? own : partials + item.partial;
            attend<DIM, C>(p, item, more ? items + next.begin : nullptr, states);
            if (item.partial < 0) write<DIM, C>(p, item, states);
        }
    });
    if (num_partials)
        parallel_for(num_items, threads, [&](int64_t i) {
            const Item& item = items[i];
            if (item.partial < 0 || item.span > 0) return;
            const FlushSubnormals flush;
            const Sequence& s = p.sequences[item.sequence];
            const int64_t spans = ceil_div(s.num_keys - s.first_key, SPAN), queries = p.num_queries(item);
            State<DIM>* states = partials + item.partial;
            for (int h = 0; h < queries; h++) merge(states + h, spans, queries);
            write<DIM, C>(p, item, states);
        });
}

}  // namespace

// q [tokens, heads, dim] in bf16, q_stride values from token to token; keys, values [blocks, kv_heads, block_size,
// dim] in bf16, or in int8 with scales [blocks, kv_heads, block_size] each, else null; sequences [num_sequences], of
// one query each; block_ids of all, one after another. out [tokens, heads, dim] in fp32 or bf16; lse [tokens, heads]
// or null. Only the sequences' tokens are written. dim: 64 or 128; at most 8 heads a kv head; block_size and first
// keys: multiples of 16.
KERNEL(decode_attention)(
    const bf16* q, const void* keys, const void* values, const bf16* key_scales, const bf16* value_scales,
    const Sequence* sequences, const int64_t* block_ids, void* out, float* lse, int64_t num_sequences, int64_t heads,
    int64_t kv_heads, int64_t dim, int64_t block_size, int64_t q_stride, int64_t out_is_float, double scaling,
    int64_t num_threads) {
    const Problem p = {{q, keys, values, key_scales, value_scales, sequences, block_ids, out, lse, heads, kv_heads,
                        heads / kv_heads, block_size, q_stride, (float)scaling, out_is_float != 0, nullptr, nullptr}};
    int64_t num_spans = 0, num_partials = 0, work = 0;
    for (int64_t i = 0; i < num_sequences; i++) {
        const int64_t num_keys = sequences[i].num_keys - sequences[i].first_key;
        num_spans += ceil_div(num_keys, SPAN);
        work += heads * num_keys * dim;
    }
    const int64_t threads = worthwhile_threads(work, 131072, num_threads);
    const int64_t together = max(1, min(MOST_KV_HEADS, num_spans * kv_heads / (ITEMS * threads)));
    const int64_t num_items = num_spans * ceil_div(kv_heads, together);
    const ScratchArray<Item> items(num_items);
    Item* next = items;
    for (int32_t i = 0; i < num_sequences; i++) {
        const int32_t spans = ceil_div(sequences[i].num_keys - sequences[i].first_key, SPAN);
        for (int32_t head = 0; head < kv_heads; head += together)
            for (int32_t span = 0; span < spans; span++, next++) {
                *next = {i, head, (int32_t)min(together, kv_heads - head), span, spans > 1 ? num_partials : -1};
                if (spans > 1) num_partials += p.num_queries(*next);
            }
    }
    auto by_cache = key_scales ? dim == 64 ? run<64, int8_t> : run<128, int8_t>
                               : dim == 64 ? run<64, bf16> : run<128, bf16>;
    by_cache(p, items, num_items, num_partials, threads);
}
REPLAYABLE(decode_attention)
#endif
