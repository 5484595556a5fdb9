// Attention of many queries over a paged cache, in bf16, by tiles (csrc/arch/tiles.h).
//
// An item is a kv head and some rows of a sequence, a row being a query of one head. A span of its keys and values is
// packed as the tiles want them, into scratch memory that the second-level cache holds. Two tiles of sixteen rows then
// go over it, 64 keys at a time: scores, their exponentials rounded to bf16, and, every 128 keys, the values mixed by
// them; all that a step touches fits the first-level cache (scores of more keys at once halve the speed).
//
// A row is rescaled to a new maximum only if a block has a larger score, which becomes rare. (Keeping the first
// block's maximum unless sums become huge saves 8 %; but then the largest weights are rounded too, and where few keys
// have all the weight, errors are up to a fifth larger than SDPA's.) The rounded weights are what is summed.
//
// A sequence may say which blocks of 64 keys a block of its queries attends to: the span is then made of the blocks
// that any of the item's rows takes, and each two tiles go over their own. Without, all blocks are taken, in the same
// way.
//
// Keys are cut from the first on, sums are taken in their order, and what a row does not see adds zeros: so a row's
// result depends neither on the rows beside it, hence on how a prompt is cut into chunks, nor on the number of
// threads.
#if defined(__AMX_BF16__) || defined(ZEN4) || defined(EMULATED)
#include "attention/packed_keys.h"
#include "core/scratch.h"

namespace {

constexpr int PAIR = 2 * TILE_ROWS;          // rows of two tiles
constexpr int PENDING = 2;                   // blocks of 64 keys whose values are mixed at once

struct Problem : Attention {
    const uint8_t* taken;   // the sequences' lists of blocks, or null
    const int64_t* tokens;  // of q and out, that the sequences' queries are; null: they are the tokens in their order
    bool causal;            // the queries are the last of the keys; else each sees all of them

    int64_t token(const Sequence& s, int64_t row) const {
        const int64_t query = s.first_query + row / group;
        return tokens ? tokens[query] : query;
    }
    int64_t head(int64_t kv_head, int64_t row) const { return kv_head * group + row % group; }
    int64_t query_block(int64_t row) const { return row / group / QUERY_BLOCK; }
    const uint8_t* taken_by(const Sequence& s, int64_t kv_head, int64_t query_block) const {
        return block_list(taken, s, kv_heads, kv_head, query_block);
    }
    int64_t visible(const Sequence& s, int64_t row) const {
        return causal ? s.num_keys - s.num_queries + row / group + 1 : s.num_keys;
    }
};

struct Item {
    int32_t sequence, head;
    int64_t first_row, rows;
};

// A thread's memory: half of a second-level cache of 2 MB.
template <int DIM>
struct Scratch {
    static constexpr int SPAN = 131072 / DIM, ROWS = 65536 / DIM, STEPS = DIM / 32;
    static constexpr int SPAN_BLOCKS = SPAN / KEYS;

    // of a block of keys
    alignas(64) float scores[GROUPS][2][TILE_ROWS][SIXTEEN];
    bf16 weights[PENDING][KEYS / 32][2][TILE_ROWS][32];
    // of the span
    int64_t blocks[SPAN_BLOCKS];                    // which of the sequence's
    bf16 keys[SPAN / SIXTEEN][STEPS][TILE_VALUES];  // [pair of dims][key][2]
    bf16 values[SPAN / 32][DIM / W][TILE_VALUES];   // [pair of keys][dim][2]
    float key_scales[SPAN], value_scales[SPAN];     // of 8 bits
    // of the item's rows
    bf16 q[ROWS / PAIR][2][STEPS][TILE_VALUES];
    float mixed[ROWS / PAIR][2][DIM / W][TILE_ROWS][W];
    vec totals[ROWS / PAIR][PAIR];    // of exponentials, in lanes
    float maxima[ROWS / PAIR][PAIR];  // of scores
    int64_t visible[ROWS];            // keys
};

template <int DIM, class C>
inline void pack_values(const C* rows, bf16 (*to)[TILE_VALUES], int half) {
    for (int k = 0; k < SIXTEEN; k += 2)
        for (int c = 0; c < DIM / W; c += 2) {
            const pairs a = load_pairs(rows + k * DIM + c * W), b = load_pairs(rows + (k + 1) * DIM + c * W);
            const vec low = (vec)interleave_low(a, b), high = (vec)interleave_high(a, b);
            const int at = half * TILE_VALUES / 2 + k * W;
            store_pairs(to[c] + at, (pairs)first_halves(low, high));
            store_pairs(to[c + 1] + at, (pairs)second_halves(low, high));
        }
}

template <int DIM, class C>
struct Prefill {
    const Problem& p;
    Scratch<DIM>& z;
    Tiles& tiles;
    const Item& item;
    const Sequence& s;

    int64_t span_blocks;

    int64_t end() const { return z.visible[item.rows - 1]; }  // of the keys that any row sees
    int64_t first_key(int64_t block) const { return s.first_key + z.blocks[block] * KEYS; }  // of a block of the span

    void pack_queries() {
        for (int64_t row = 0; row < round_up(item.rows, PAIR); row++) {
            const int64_t real = item.first_row + min(row, item.rows - 1);  // the last again, to fill the tiles
            z.visible[row] = p.visible(s, real);
            const bf16* from = p.q + p.token(s, real) * p.q_stride + p.head(item.head, real) * DIM;
            bf16(*to)[TILE_VALUES] = z.q[row / PAIR][row % PAIR / TILE_ROWS];
            for (int step = 0; step < DIM / 32; step++)
                store_pairs(to[step] + row % TILE_ROWS * 32, load_pairs(from + 32 * step));
        }
    }

    // From a block of the sequence on those that any of the rows takes, as many as a span holds. Returns: the next.
    int64_t choose_span(int64_t block) {
        const int64_t seen = ceil_div(end() - s.first_key, KEYS);
        const int64_t first = p.query_block(item.first_row), last = p.query_block(item.first_row + item.rows - 1);
        for (span_blocks = 0; block < seen && span_blocks < Scratch<DIM>::SPAN_BLOCKS; block++) {
            bool taken = false;
            for (int64_t q = first; q <= last && !taken; q++) taken = takes(p.taken_by(s, item.head, q), block);
            if (taken) z.blocks[span_blocks++] = block;
        }
        return block;
    }

    void pack_span() {
        const C *keys = (const C*)p.keys, *values = (const C*)p.values;
        alignas(64) C copy[SIXTEEN * DIM];
        for (int64_t block = 0; block < span_blocks; block++) {
            KeyTile tile;
            tile.locate(p, s, item.head, first_key(block), end());
            for (int g = 0; g < GROUPS; g++) {
                const int64_t at = block * KEYS + g * SIXTEEN;
                const int here = max(0, tile.keys - g * SIXTEEN);
                const int64_t row = here ? tile.rows[g] : 0;
                if (here) pack_keys<DIM>(keys + row * DIM, z.keys[at / SIXTEEN]);
                pack_values<DIM>(existing_rows<DIM>(values + row * DIM, here, copy), z.values[at / 32], at % 32 > 0);
                if (sizeof(C) == 1) {
                    store(z.key_scales + at, load(p.key_scales + row));
                    store(z.value_scales + at, first_lanes(load(p.value_scales + row), here, 0));
                }
            }
        }
    }

    void score(int t, int64_t block) {
        for (int g = 0; g < GROUPS; g++) {
            const bf16(*keys)[TILE_VALUES] = z.keys[block * GROUPS + g];
            tiles.template zero<0>();
            tiles.template zero<1>();
            for (int step = 0; step < DIM / 32; step++) {
                tiles.template load<6>(keys[step], LINE);
                tiles.template load<7>(z.q[t][0][step], LINE);
                tiles.template multiply_bf16<0, 7, 6>();
                tiles.template load<7>(z.q[t][1][step], LINE);
                tiles.template multiply_bf16<1, 7, 6>();
            }
            tiles.template store<0>(z.scores[g][0], LINE);
            tiles.template store<1>(z.scores[g][1], LINE);
        }
    }

    void scale_scores(int64_t block) {
        for (int g = 0; g < GROUPS; g++) {
            const vec scales = load(z.key_scales + block * KEYS + g * SIXTEEN);
            for (int r = 0; r < PAIR; r++) {
                float* scores = z.scores[g][r / TILE_ROWS][r % TILE_ROWS];
                store(scores, load(scores) * scales);
            }
        }
    }

    // -inf for the keys that rows do not see
    void mask(int t, int64_t first_key) {
        for (int r = 0; r < PAIR; r++) {
            const int64_t seen = z.visible[t * PAIR + r] - first_key;
            for (int g = max(0, seen / SIXTEEN); g < GROUPS; g++) {
                float* scores = z.scores[g][r / TILE_ROWS][r % TILE_ROWS];
                store(scores, first_lanes(load(scores), seen - g * SIXTEEN, -INFINITY));
            }
        }
    }

    vec scores(int r, int g) const { return load(z.scores[g][r / TILE_ROWS][r % TILE_ROWS]); }

    // A row whose largest score is among these 64 is brought to it; what is pending must be mixed in.
    void raise_maximum(int t, int r, float max) {
        const bool fresh = z.maxima[t][r] == -INFINITY;
        const vec shrink = exp2_precise(fill((z.maxima[t][r] - max) * p.log2_scaling()));
        z.maxima[t][r] = max;
        if (fresh) return;
        z.totals[t][r] *= shrink;
        for (int c = 0; c < DIM / W; c++) {
            float* mixed = z.mixed[t][r / TILE_ROWS][c][r % TILE_ROWS];
            store(mixed, load(mixed) * shrink);
        }
    }

    // Scores of a row become weights, those of the pending block `i`, and their sum is added to the row's.
    void weigh(int t, int r, int64_t block, int i) {
        const float scaling = p.log2_scaling();
        const vec base = fill(z.maxima[t][r] == -INFINITY ? 0 : z.maxima[t][r] * scaling);
        vec e[GROUPS], sum = z.totals[t][r];
        for (int g = 0; g < GROUPS; g++) e[g] = scores(r, g) * scaling - base;
        exp2_coarse(e);
        if (sizeof(C) == 1)
            for (int g = 0; g < GROUPS; g++) {
                sum += e[g];
                e[g] *= load(z.value_scales + block * KEYS + g * SIXTEEN);
            }
        for (int g = 0; g < GROUPS; g += 2) {
            const pairs rounded = round_to_pairs(e[g], e[g + 1]);
            store_pairs(z.weights[i % PENDING][g / 2][r / TILE_ROWS][r % TILE_ROWS], rounded);
            if (sizeof(C) == 2) sum = dot_bf16(sum, rounded, ones());
        }
        z.totals[t][r] = sum;
    }

    vec largest_scores(int r) const {
        return maximum(maximum(scores(r, 0), scores(r, 1)), maximum(scores(r, 2), scores(r, 3)));
    }

    // Scores of two tiles against blocks[i] become weights. Returns the first of the blocks that is not mixed in yet.
    int online_softmax_update(int t, const uint8_t* blocks, int i, int mixed) {
        uint32_t raised = 0;  // rows
        for (int r = 0; r < PAIR; r++) raised |= (uint32_t)any_above(largest_scores(r), fill(z.maxima[t][r])) << r;
        if (raised) {
            if (mixed < i) mix(t, blocks, mixed, i);
            mixed = i;
            for (int r = 0; r < PAIR; r++)
                if (raised >> r & 1) raise_maximum(t, r, largest_lane(largest_scores(r)));
        }
        for (int r = 0; r < PAIR; r++) weigh(t, r, blocks[i], i);
        return mixed;
    }

    // The values of blocks[begin ... end - 1] by their weights.
    void mix(int t, const uint8_t* blocks, int begin, int end) {
        for (int c = 0; c < DIM / W; c += 2) {
            float(*first)[TILE_ROWS][W] = z.mixed[t][0] + c, (*second)[TILE_ROWS][W] = z.mixed[t][1] + c;
            tiles.template load<0>(first[0], LINE);
            tiles.template load<1>(first[1], LINE);
            tiles.template load<2>(second[0], LINE);
            tiles.template load<3>(second[1], LINE);
            for (int i = begin * 2; i < end * 2; i++) {
                auto& weights = z.weights[i / 2 % PENDING][i % 2];
                const bf16(*values)[TILE_VALUES] = z.values[blocks[i / 2] * 2 + i % 2];
                tiles.template load<6>(values[c], LINE);
                tiles.template load<4>(weights[0], LINE);
                tiles.template load<5>(weights[1], LINE);
                tiles.multiply_square_by_columns([&] { tiles.template load<7>(values[c + 1], LINE); });
            }
            tiles.template store<0>(first[0], LINE);
            tiles.template store<1>(first[1], LINE);
            tiles.template store<2>(second[0], LINE);
            tiles.template store<3>(second[1], LINE);
        }
    }

    void clear(int t) {
        memset(z.mixed[t], 0, sizeof z.mixed[t]);
        memset(z.totals[t], 0, sizeof z.totals[t]);
        for (float& max : z.maxima[t]) max = -INFINITY;
    }

    // Two tiles of rows over the span.
    void attend(int t) {
        const int64_t seen_by_all = z.visible[t * PAIR], seen = z.visible[t * PAIR + PAIR - 1];
        const uint8_t* taken = p.taken_by(s, item.head, p.query_block(item.first_row + t * PAIR));
        uint8_t blocks[Scratch<DIM>::SPAN_BLOCKS];
        int count = 0, mixed = 0;
        for (int block = 0; block < span_blocks && first_key(block) < seen; block++)
            if (takes(taken, z.blocks[block])) blocks[count++] = block;
        for (int i = 0; i < count; i++) {
            const int64_t first = first_key(blocks[i]);
            score(t, blocks[i]);
            if (sizeof(C) == 1) scale_scores(blocks[i]);
            if (seen_by_all < first + KEYS) mask(t, first);
            mixed = online_softmax_update(t, blocks, i, mixed);
            if (i + 1 - mixed == PENDING || i + 1 == count) {
                mix(t, blocks, mixed, i + 1);
                mixed = i + 1;
            }
        }
    }

    void write() const {
        for (int64_t row = 0; row < item.rows; row++) {
            const int64_t t = row / PAIR, r = row % PAIR, real = item.first_row + row;
            vec mixed[DIM / W];
            for (int c = 0; c < DIM / W; c++) mixed[c] = load(z.mixed[t][r / TILE_ROWS][c][r % TILE_ROWS]);
            p.write<DIM>(p.token(s, real), p.head(item.head, real), mixed, sum(z.totals[t][r]),
                         z.maxima[t][r] * p.log2_scaling());
        }
    }

    void run() {
        pack_queries();
        for (int t = 0; t * PAIR < item.rows; t++) clear(t);
        for (int64_t block = 0;;) {
            block = choose_span(block);
            if (!span_blocks) break;
            pack_span();
            for (int t = 0; t * PAIR < item.rows; t++) attend(t);
        }
        write();
    }
};

template <int DIM, class C>
void run(const Problem& p, const Item* items, int64_t num_items, int64_t threads) {
    parallel(num_items, 1, threads, [&](const Tasks& tasks) {
        const FlushSubnormals flush;
        Tiles tiles;
        const ScratchArray<Scratch<DIM>> scratch(1);
        for (Range range; tasks.take(range);) {
            const Item& item = items[range.begin];
            Prefill<DIM, C>{p, *scratch, tiles, item, p.sequences[item.sequence], 0}.run();
        }
    });
}

}  // namespace

// Arguments as of decode_attention (csrc/attention/decode_attention.cpp), but a sequence has any number of queries;
// taken: the lists of blocks of those that have some (`Sequence::lists`); tokens: of q and out, that the queries of
// all sequences are, or null for 0, 1, 2 ...; causal: 0 where each query sees all keys; near [tokens, heads, dim],
// near_lse [tokens, heads]: what is known of other keys of these queries, and the logarithms of its denominators, both
// in fp32: out is then of all keys. Or null.
KERNEL(prefill_attention)(
    const bf16* q, const void* keys, const void* values, const bf16* key_scales, const bf16* value_scales,
    const Sequence* sequences, const int64_t* block_ids, const uint8_t* taken, const int64_t* tokens, const float* near,
    const float* near_lse, void* out, float* lse, int64_t num_sequences, int64_t heads, int64_t kv_heads, int64_t dim,
    int64_t block_size, int64_t q_stride, int64_t out_is_float, int64_t causal, double scaling, int64_t num_threads) {
    const Problem p = {{q, keys, values, key_scales, value_scales, sequences, block_ids, out, lse, heads, kv_heads,
                        heads / kv_heads, block_size, q_stride, (float)scaling, out_is_float != 0, near, near_lse},
                       taken, tokens, causal != 0};
    const int64_t most = dim == 64 ? Scratch<64>::ROWS : Scratch<128>::ROWS;
    int64_t num_items = 0, work = 0;
    for (int64_t i = 0; i < num_sequences; i++) {
        num_items += kv_heads * ceil_div(sequences[i].num_queries * p.group, most);
        work += heads * sequences[i].num_queries * (sequences[i].num_keys - sequences[i].first_key) * dim;
    }
    const ScratchArray<Item> items(num_items);
    Item* next = items;
    for (int32_t i = 0; i < num_sequences; i++) {
        const int64_t rows = sequences[i].num_queries * p.group;
        // Those that see most keys come first.
        for (int64_t first = (ceil_div(rows, most) - 1) * most; first >= 0; first -= most)
            for (int32_t head = 0; head < kv_heads; head++) *next++ = {i, head, first, min(most, rows - first)};
    }
    const int64_t threads = worthwhile_threads(work, 1 << 21, num_threads);
    auto by_cache = key_scales ? dim == 64 ? run<64, int8_t> : run<128, int8_t>
                               : dim == 64 ? run<64, bf16> : run<128, bf16>;
    by_cache(p, items, num_items, threads);
}
REPLAYABLE(prefill_attention)
#endif
