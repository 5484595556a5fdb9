// Attention of one query a sequence over a paged cache, by products of pairs of bf16 or of fours of bytes.
//
// Decoding is reading the cache once, so all is arranged about that. An item is a sequence, a kv head and a span of
// its keys; the heads that share the kv head go two by two over 64 keys, which the first-level cache holds. Scores are
// a row times the query, and sums of sixteen rows by transposing; values are rows interleaved, times their weights,
// whose order of dims is set right at the end. While keys are multiplied the values beside them are fetched, and
// while values are, the next keys, also those of the next item: about 8 KB ahead was the best of what was tried (64
// sequences of about 150 keys, 6 layers, on one core of an Intel Xeon with AMX: 19.8 ms without, 15.2 with). Spans
// are merged in their order, so a result depends on the sequence alone, not on the number of threads.
#if defined(__AVX512BF16__) || defined(EMULATED) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "attention/bf16_attention.h"
#include "core/prefetch.h"
#include "core/threads.h"

namespace {

constexpr int SPAN = 16 * KEYS;  // keys of an item
constexpr int MOST_HEADS = 8;    // that share a kv head

// What has been found so far of a head.
template <int DIM>
struct State {
    vec sum;             // of exponentials, in lanes
    vec mixed[DIM / W];  // values, in the order in which interleaving leaves the dims
    float max;           // of scores, as powers of 2

    void clear() {
        memset(this, 0, sizeof *this);
        max = -INFINITY;
    }
};

// Start to fetch a row, if there is one.
template <int DIM, class C>
inline void prefetch_row(const C* rows, int i) {
    if (rows) prefetch_lines<2>((const char*)(rows + i * DIM), DIM * sizeof(C));
}

// Lanes added up across vectors of fp32 or integers: of x[0 ... 3] by fours of lanes, then of four such by sixteens.
template <class V>
inline V add_across(V a, V b) {
    return (V)unpack_low((vec)a, (vec)b) + (V)unpack_high((vec)a, (vec)b);
}
template <class V>
inline V sums_of_four(const V* x) {
    return add_across(add_across(x[0], x[2]), add_across(x[1], x[3]));
}
template <class V>
inline V add_fours(V a, V b) {
    return (V)shuffle<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>((vec)a, (vec)b) +
           (V)shuffle<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>((vec)a, (vec)b);
}
template <class V>
inline V sums_of_sixteen(const V* x) {
    return add_fours(add_fours(x[0], x[1]), add_fours(x[2], x[3]));
}

// Scores of up to 64 keys become exponentials, and the state of a head is brought to the new maximum.
template <int DIM>
inline void online_softmax_update(vec* scores, int keys, float scale, State<DIM>& state) {
    if (keys < KEYS)
        for (int g = 0; g < GROUPS; g++) scores[g] = first_lanes(scores[g], keys - g * SIXTEEN, -INFINITY);
    const float top = scale * largest_lane(maximum(maximum(scores[0], scores[1]), maximum(scores[2], scores[3])));
    if (top > state.max) {
        const vec shrink = exp2_precise(fill(state.max - top));
        state.max = top;
        state.sum *= shrink;
        for (int c = 0; c < DIM / W; c++) state.mixed[c] *= shrink;
    }
    const float base = state.max == -INFINITY ? 0 : state.max;  // all scores so far are -inf
    for (int g = 0; g < GROUPS; g++) scores[g] = exp2_precise(scores[g] * scale - base);
}

// A cache of C's is what these say: a query made ready for scores, and weights made ready for values.
template <int DIM, class C>
struct Query;
template <class C>
struct Weights;

// A cache of bf16

template <int DIM>
struct Query<DIM, bf16> {
    pairs dims[DIM / 32];
    static constexpr float scale = 1;  // of the scores

    void set(const bf16* q) {
        for (int c = 0; c < DIM / 32; c++) dims[c] = load_pairs(q + 32 * c);
    }
};

// Scores of HEADS queries and sixteen keys; `ahead`, sixteen rows, is fetched meanwhile.
template <int DIM, int HEADS>
inline void score(const Query<DIM, bf16>* q, const bf16* keys, const bf16* ahead, vec (&scores)[HEADS]) {
    vec sums[HEADS][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vec x[HEADS][4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const bf16* row = keys + (4 * i + j) * DIM;
            prefetch_row<DIM>(ahead, 4 * i + j);
            for (int h = 0; h < HEADS; h++) {
                x[h][j] = vec{};
#pragma GCC unroll 4
                for (int c = 0; c < DIM / 32; c++) x[h][j] = dot_bf16(x[h][j], load_pairs(row + 32 * c), q[h].dims[c]);
            }
        }
        for (int h = 0; h < HEADS; h++) sums[h][i] = sums_of_four(x[h]);
    }
    for (int h = 0; h < HEADS; h++) scores[h] = sums_of_sixteen(sums[h]);
}

template <>
struct Weights<bf16> {
    alignas(64) bf16 rounded[KEYS];

    // Returns what to add to the sum: the rounded ones, so that they are shares of a whole.
    vec set(const vec* exponentials, const vec*) {
        vec sum = {};
        for (int g = 0; g < GROUPS; g += 2) {
            const pairs weights = round_to_pairs(exponentials[g], exponentials[g + 1]);
            store_pairs(rounded + g * SIXTEEN, weights);
            sum = dot_bf16(sum, weights, ones());
        }
        return sum;
    }
};

// The values of sixteen keys, from key `first` of the weights.
template <int DIM, int HEADS>
inline void mix(const Weights<bf16>* weights, int first, const bf16* values, const bf16* ahead,
                vec (&mixed)[HEADS][DIM / W]) {
#pragma GCC unroll 2
    for (int k = 0; k < SIXTEEN; k += 2) {
        const bf16* row = values + k * DIM;
        prefetch_row<DIM>(ahead, k), prefetch_row<DIM>(ahead, k + 1);
        pairs w[HEADS];
        for (int h = 0; h < HEADS; h++) w[h] = fill_pairs(weights[h].rounded + first + k);
#pragma GCC unroll 4
        for (int c = 0; c < DIM / 32; c++) {
            const pairs a = load_pairs(row + 32 * c), b = load_pairs(row + DIM + 32 * c);
            const pairs low = interleave_low(a, b), high = interleave_high(a, b);
#pragma GCC unroll 2
            for (int h = 0; h < HEADS; h++) {
                mixed[h][2 * c] = dot_bf16(mixed[h][2 * c], low, w[h]);
                mixed[h][2 * c + 1] = dot_bf16(mixed[h][2 * c + 1], high, w[h]);
            }
        }
    }
}

template <int DIM, int HEADS>
inline void mix_tile(const Weights<bf16>* weights, const bf16* const* rows, int groups, const bf16* const* ahead,
                     State<DIM>* states) {
    vec mixed[HEADS][DIM / W];
    for (int h = 0; h < HEADS; h++)
        for (int c = 0; c < DIM / W; c++) mixed[h][c] = states[h].mixed[c];
    for (int g = 0; g < groups; g++) mix<DIM, HEADS>(weights, g * SIXTEEN, rows[g], ahead[g], mixed);
    for (int h = 0; h < HEADS; h++)
        for (int c = 0; c < DIM / W; c++) states[h].mixed[c] = mixed[h][c];
}

// The dims in their order.
template <int DIM>
inline void set_right(const vec* mixed, vec* to, bf16) {
    for (int c = 0; c < DIM / W; c += 2) {
        to[c] = first_halves(mixed[c], mixed[c + 1]);
        to[c + 1] = second_halves(mixed[c], mixed[c + 1]);
    }
}

// A cache of 8 bits

// A query in two bytes a dim, the upper and, in 128ths, what is left. The instruction wants bytes without a sign: the
// keys get 128 more, of which the sums are rid again.
template <int DIM>
struct Query<DIM, int8_t> {
    ivec dims[2][DIM / 64], offset[2];
    float scale;

    void set(const bf16* q) {
        vec top = fill(1e-20f), bad = {};
        for (int i = 0; i < DIM; i += W) {
            const vec x = load(q + i);
            top = maximum(top, maximum(x, -x)), bad += x - x;  // 0, or NaN
        }
        const float unit = largest_lane(top) / 127;
        int8_t bytes[2][DIM];
        for (int i = 0; i < DIM; i += W) {
            const vec x = load(q + i) / unit;
            const ivec upper = nearest_integers(x);
            store_low_bytes(bytes[0] + i, upper);
            store_low_bytes(bytes[1] + i, nearest_integers((x - __builtin_convertvector(upper, vec)) * 128));
        }
        memcpy(dims, bytes, sizeof dims);
        for (int part = 0; part < 2; part++) {
            offset[part] = ivec{};
            for (int c = 0; c < DIM / 64; c++)
                offset[part] -= dot_bytes(ivec{}, (int32_t)0x80808080 - ivec{}, dims[part][c]);
        }
        scale = unit / 128 + sum(bad);
    }
};

template <int DIM, int HEADS>
inline void score(const Query<DIM, int8_t>* q, const int8_t* keys, const int8_t* ahead, vec (&scores)[HEADS]) {
    ivec sums[HEADS][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        ivec x[HEADS][4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            prefetch_row<DIM>(ahead, 4 * i + j);
            ivec acc[HEADS][2];
            for (int h = 0; h < HEADS; h++) acc[h][0] = q[h].offset[0], acc[h][1] = q[h].offset[1];
            for (int c = 0; c < DIM / 64; c++) {
                ivec key;
                memcpy(&key, keys + (4 * i + j) * DIM + 64 * c, sizeof key);
                key ^= (int32_t)0x80808080;
                for (int h = 0; h < HEADS; h++)
                    for (int part = 0; part < 2; part++)
                        acc[h][part] = dot_bytes(acc[h][part], key, q[h].dims[part][c]);
            }
            for (int h = 0; h < HEADS; h++) x[h][j] = (acc[h][0] << 7) + acc[h][1];
        }
        for (int h = 0; h < HEADS; h++) sums[h][i] = sums_of_four(x[h]);
    }
    for (int h = 0; h < HEADS; h++) scores[h] = __builtin_convertvector(sums_of_sixteen(sums[h]), vec);
}

// Weights times the values' scales, in two bytes.
template <>
struct Weights<int8_t> {
    alignas(64) uint8_t bytes[2][KEYS];  // upper, lower
    float unit;

    vec set(const vec* exponentials, const vec* scales) {
        vec weights[GROUPS], sum = {}, top = fill(1e-30f), bad = {};
        for (int g = 0; g < GROUPS; g++) {
            sum += exponentials[g];
            weights[g] = exponentials[g] * scales[g];
            top = maximum(top, weights[g]), bad += weights[g] - weights[g];  // 0, or NaN
        }
        const float high = largest_lane(top);
        for (int g = 0; g < GROUPS; g++) {
            const ivec whole = nearest_integers(weights[g] * (65535 / high));
            store_low_bytes(bytes[0] + g * SIXTEEN, whole >> 8);
            store_low_bytes(bytes[1] + g * SIXTEEN, whole);
        }
        unit = high / 65535 + ::sum(bad);
        return sum;
    }
};

template <int DIM, int HEADS>
inline void mix_tile(const Weights<int8_t>* weights, const int8_t* const* rows, int groups, const int8_t* const* ahead,
                     State<DIM>* states) {
    for (int c = 0; c < DIM; c += 64) {
        ivec acc[HEADS][2][4] = {};
        for (int g = 0; g < groups; g++)
            for (int k = 0; k < SIXTEEN; k += 4) {
                if (!c)
                    for (int i = 0; i < 4; i++) prefetch_row<DIM>(ahead[g], k + i);
                ivec four[4], turned[4];
                for (int i = 0; i < 4; i++) memcpy(four + i, rows[g] + (k + i) * DIM + c, sizeof *four);
                interleave_bytes(four, turned);
                for (int h = 0; h < HEADS; h++)
                    for (int part = 0; part < 2; part++) {
                        const pairs w = fill_pairs((const bf16*)(weights[h].bytes[part] + g * SIXTEEN + k));
                        for (int i = 0; i < 4; i++) acc[h][part][i] = dot_bytes(acc[h][part][i], w, turned[i]);
                    }
            }
        for (int h = 0; h < HEADS; h++)
            for (int i = 0; i < 4; i++) {
                const ivec whole = (acc[h][0][i] << 8) + acc[h][1][i];
                states[h].mixed[c / W + i] += __builtin_convertvector(whole, vec) * weights[h].unit;
            }
    }
}

template <int DIM>
inline void set_right(const vec* mixed, vec* to, int8_t) {
    for (int c = 0; c < DIM / W; c += 4)
        for (int i = 0; i < 4; i++)
            for (int lane = 0; lane < 4; lane++)
                memcpy((float*)(to + c + lane) + 4 * i, (const float*)(mixed + c + i) + 4 * lane, 4 * sizeof(float));
}

// Both

struct Item {
    int32_t sequence, head, span;
    int64_t partial;  // the first of `group` partial states that are its own; -1: it is the whole result
};

struct Problem : Attention {
    // The span's first keys, of which `end` is set.
    int64_t first_key(const Item& item, int64_t& end) const {
        const Sequence& s = sequences[item.sequence];
        const int64_t first = s.first_key + item.span * SPAN;
        end = min(first + SPAN, s.num_keys);
        return first;
    }
    KeyTile locate(const Item& item, int64_t first, int64_t end) const {
        KeyTile tile;
        tile.locate(*this, sequences[item.sequence], item.head, first, end);
        return tile;
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

template <int DIM, class C>
void attend(const Problem& p, const Item& item, const Item* next_item, State<DIM>* states) {
    const Sequence& s = p.sequences[item.sequence];
    Query<DIM, C> q[MOST_HEADS];
    for (int h = 0; h < p.group; h++) {
        q[h].set(p.q + s.first_query * p.q_stride + (item.head * p.group + h) * DIM);
        states[h].clear();
    }
    int64_t end, next_end;
    const int64_t first = p.first_key(item, end);
    KeyTile tile = p.locate(item, first, end), next = tile;
    for (int64_t key = first; key < end; key += KEYS, tile = next) {
        if (key + KEYS < end) {
            next = p.locate(item, key + KEYS, end);
        } else if (next_item) {
            const int64_t next_first = p.first_key(*next_item, next_end);
            next = p.locate(*next_item, next_first, next_end);
        }
        for (int h = 0; h < p.group; h += 2) {
            const KeyTile* ahead = h ? nullptr : &next;
            h + 1 < p.group ? process_tile<DIM, 2>(p, q + h, tile, ahead, states + h)
                            : process_tile<DIM, 1>(p, q + h, tile, ahead, states + h);
        }
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
    for (int h = 0; h < p.group; h++) {
        vec mixed[DIM / W];
        set_right<DIM>(states[h].mixed, mixed, C());
        p.write<DIM>(p.sequences[item.sequence].first_query, item.head * p.group + h, mixed, sum(states[h].sum),
                     states[h].max);
    }
}

template <int DIM, class C>
void run(const Problem& p, const Item* items, int64_t num_items, int64_t num_partials, int64_t threads) {
    State<DIM>* partials = (State<DIM>*)aligned_alloc(64, (num_partials + 1) * sizeof(State<DIM>));
    parallel(num_items, 4, threads, [&](const Tasks& tasks) {
        const FlushSubnormals flush;
        State<DIM> own[MOST_HEADS];
        for (Range range; tasks.take(range);)
            for (int64_t i = range.begin; i < range.end; i++) {
                State<DIM>* states = items[i].partial < 0 ? own : partials + items[i].partial;
                attend<DIM, C>(p, items[i], i + 1 < num_items ? items + i + 1 : nullptr, states);
                if (items[i].partial < 0) write<DIM, C>(p, items[i], states);
            }
    });
    if (num_partials)
        parallel_for(num_items, threads, [&](int64_t i) {
            if (items[i].partial < 0 || items[i].span > 0) return;
            const FlushSubnormals flush;
            const Sequence& s = p.sequences[items[i].sequence];
            State<DIM>* states = partials + items[i].partial;
            for (int h = 0; h < p.group; h++) merge(states + h, ceil_div(s.num_keys - s.first_key, SPAN), p.group);
            write<DIM, C>(p, items[i], states);
        });
    free(partials);
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
    int64_t num_items = 0, num_partials = 0, work = 0;
    for (int64_t i = 0; i < num_sequences; i++) {
        const int64_t num_keys = sequences[i].num_keys - sequences[i].first_key;
        num_items += kv_heads * ceil_div(num_keys, SPAN);
        work += heads * num_keys * dim;
    }
    Item *items = (Item*)malloc(num_items * sizeof(Item)), *next = items;
    for (int32_t i = 0; i < num_sequences; i++) {
        const int64_t spans = ceil_div(sequences[i].num_keys - sequences[i].first_key, SPAN);
        for (int32_t head = 0; head < kv_heads; head++)
            for (int32_t span = 0; span < spans; span++, next++) {
                *next = {i, head, span, spans > 1 ? num_partials : -1};
                if (spans > 1) num_partials += p.group;
            }
    }
    const int64_t threads = worthwhile_threads(work, 131072, num_threads);
    auto by_cache = key_scales ? dim == 64 ? run<64, int8_t> : run<128, int8_t>
                               : dim == 64 ? run<64, bf16> : run<128, bf16>;
    by_cache(p, items, num_items, num_partials, threads);
    free(items);
}
REPLAYABLE(decode_attention)
#endif
