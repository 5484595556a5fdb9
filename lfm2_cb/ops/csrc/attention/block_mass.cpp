// The share of its attention that each block of queries gives to each block of keys, by tiles (csrc/arch/tiles.h).
//
// Every sixteenth query attends for its block: its softmax over all keys it sees, summed over each block of them. So
// the work is a sixteenth of the attention's scores, and no values are read. Every other one of these counts for a
// second estimate, so that what one of them chooses can be measured by the other.
#if defined(__AMX_BF16__) || defined(ZEN4) || defined(EMULATED)
#include "attention/packed_keys.h"
#include "core/scratch.h"

namespace {

constexpr int STRIDE = 16, SAMPLES = QUERY_BLOCK / STRIDE;  // queries of a block that attend for it
constexpr int TILES = 8;                                    // of sixteen rows, a row being a query of one head

struct Item {
    int32_t sequence, head;
    int64_t first_row, rows;
};

// A thread's memory; beside it [rows][key blocks] largest scores, times log2(e), and sums of exponentials by them.
template <int DIM>
struct Scratch {
    alignas(64) float scores[GROUPS][TILE_ROWS][SIXTEEN];
    bf16 keys[GROUPS][DIM / 32][TILE_VALUES];
    bf16 q[TILES][DIM / 32][TILE_VALUES];
    int64_t visible[TILES * TILE_ROWS];
};

template <int DIM, class C>
struct BlockMass {
    const Attention& a;
    float* mass;
    int64_t size;  // of an estimate
    Scratch<DIM>& z;
    Tiles& tiles;
    float *tops, *sums;
    const Item& item;
    const Sequence& s;

    int64_t num_blocks() const { return ceil_div(s.num_keys, KEYS); }
    int64_t at(int64_t row, int64_t block) const { return row * round_up(num_blocks(), W) + block; }
    int64_t query(int64_t row) const { return min(row / a.group * STRIDE + STRIDE - 1, s.num_queries - 1); }

    void pack_queries() {
        for (int64_t row = 0; row < round_up(item.rows, TILE_ROWS); row++) {
            const int64_t real = item.first_row + min(row, item.rows - 1), head = item.head * a.group + real % a.group;
            z.visible[row] = s.num_keys - s.num_queries + query(real) + 1;
            const bf16* from = a.q + (s.first_query + query(real)) * a.q_stride + head * DIM;
            for (int step = 0; step < DIM / 32; step++)
                store_pairs(z.q[row / TILE_ROWS][step] + row % TILE_ROWS * 32, load_pairs(from + 32 * step));
        }
    }

    void score(int64_t t) {
        for (int g = 0; g < GROUPS; g++) {
            tiles.template zero<0>();
            for (int step = 0; step < DIM / 32; step++) {
                tiles.template load<4>(z.q[t][step], LINE);
                tiles.template load<5>(z.keys[g][step], LINE);
                tiles.template multiply_bf16<0, 4, 5>();
            }
            tiles.template store<0>(z.scores[g], LINE);
        }
    }

    void sum_up(int64_t t, int64_t block, const vec* key_scales) {
        for (int r = 0; r < TILE_ROWS; r++) {
            const int64_t row = t * TILE_ROWS + r, seen = z.visible[row] - block * KEYS;
            vec x[GROUPS];
            for (int g = 0; g < GROUPS; g++) {
                x[g] = load(z.scores[g][r]) * a.log2_scaling();
                if (sizeof(C) == 1) x[g] *= key_scales[g];
                if (seen < KEYS) x[g] = first_lanes(x[g], seen - g * SIXTEEN, -INFINITY);
            }
            const float top = largest_lane(maximum(maximum(x[0], x[1]), maximum(x[2], x[3])));
            for (int g = 0; g < GROUPS; g++) x[g] -= fill(top == -INFINITY ? 0 : top);
            exp2_coarse(x);
            tops[at(row, block)] = top;
            sums[at(row, block)] = sum((x[0] + x[1]) + (x[2] + x[3]));
        }
    }

    void go_over_keys() {
        const C* keys = (const C*)a.keys;
        const int64_t end = z.visible[item.rows - 1];
        for (int64_t block = 0; block < num_blocks(); block++) {
            KeyTile tile;
            vec key_scales[GROUPS] = {};
            if (block * KEYS < end) tile.locate(a, s, item.head, block * KEYS, end);
            for (int g = 0; g < GROUPS && block * KEYS + g * SIXTEEN < end; g++) {
                pack_keys<DIM>(keys + tile.rows[g] * DIM, z.keys[g]);
                if (sizeof(C) == 1) key_scales[g] = load(a.key_scales + tile.rows[g]);
            }
            for (int64_t t = 0; t * TILE_ROWS < item.rows; t++) {
                score(t);
                sum_up(t, block, key_scales);
            }
        }
    }

    // A row's share of every block is added to what its block of queries gives.
    void add_shares() {
        const int64_t n = num_blocks();
        for (int64_t row = 0; row < item.rows; row++) {
            float *top = tops + at(row, 0), *part = sums + at(row, 0);
            for (int64_t b = n; b < round_up(n, W); b++) top[b] = -INFINITY, part[b] = 0;
            vec largest = load(top), total = {};
            for (int64_t b = W; b < n; b += W) largest = maximum(largest, load(top + b));
            largest = fill(largest_lane(largest));
            for (int64_t b = 0; b < n; b += W) {
                const vec mass = load(part + b) * exp2_precise(load(top + b) - largest);
                store(part + b, mass);
                total += mass;
            }
            const int64_t sample = (item.first_row + row) / a.group, query_block = sample / SAMPLES, half = sample % 2;
            const int64_t samples = min(SAMPLES, ceil_div(s.num_queries - query_block * QUERY_BLOCK, STRIDE));
            const float share = 1 / (sum(total) * ((samples + 1 - half) / 2) * a.group);
            float* to = block_list(mass + half * size, s, a.kv_heads, item.head, query_block);
            for (int64_t b = 0; b < n; b++) to[b] += part[b] * share;
        }
    }

    void run() {
        pack_queries();
        go_over_keys();
        add_shares();
    }
};

template <int DIM, class C>
void run(const Attention& a, float* mass, int64_t size, const Item* items, int64_t num_items, int64_t most_keys,
         int64_t threads) {
    const int64_t cells = TILES * TILE_ROWS * round_up(ceil_div(most_keys, KEYS), W);
    parallel(num_items, 1, threads, [&](const Tasks& tasks) {
        const FlushSubnormals flush;
        Tiles tiles;
        const ScratchArray<Scratch<DIM>> scratch(1);
        const ScratchArray<float> memory(2 * cells);
        for (Range range; tasks.take(range);) {
            const Item& item = items[range.begin];
            const Sequence& s = a.sequences[item.sequence];
            BlockMass<DIM, C>{a, mass, size, *scratch, tiles, memory, memory + cells, item, s}.run();
        }
    });
}

}  // namespace

// mass [2][size]: zeros, each half laid out as the sequences' lists are (`Sequence::lists`, all 0 or above); it
// becomes, of the attention of each block of queries, the share that every block of keys has, by one half of the
// sample and by the other (zeros, where a block has one query in the sample). The rest as of prefill_attention.
KERNEL(block_mass)(
    const bf16* q, const void* keys, const bf16* key_scales, const Sequence* sequences, const int64_t* block_ids,
    float* mass, int64_t num_sequences, int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size,
    int64_t q_stride, int64_t size, double scaling, int64_t num_threads) {
    const Attention a = {q, keys, nullptr, key_scales, nullptr, sequences, block_ids, nullptr, nullptr, heads, kv_heads,
                         heads / kv_heads, block_size, q_stride, (float)scaling, false, nullptr, nullptr};
    // Items of whole blocks of queries, so that no two add to the same sums.
    const int64_t rows_of_block = SAMPLES * a.group, most = max(1, TILES * TILE_ROWS / rows_of_block) * rows_of_block;
    int64_t num_items = 0, most_keys = 0;
    for (int64_t i = 0; i < num_sequences; i++) {
        num_items += kv_heads * ceil_div(ceil_div(sequences[i].num_queries, STRIDE) * a.group, most);
        most_keys = max(most_keys, sequences[i].num_keys);
    }
    const ScratchArray<Item> items(num_items);
    Item* next = items;
    for (int32_t i = 0; i < num_sequences; i++) {
        const int64_t rows = ceil_div(sequences[i].num_queries, STRIDE) * a.group;
        for (int64_t first = 0; first < rows; first += most)
            for (int32_t head = 0; head < kv_heads; head++) *next++ = {i, head, first, min(most, rows - first)};
    }
    auto by_cache = key_scales ? dim == 64 ? run<64, int8_t> : run<128, int8_t>
                               : dim == 64 ? run<64, bf16> : run<128, bf16>;
    by_cache(a, mass, size, items, num_items, most_keys, num_threads);
}
#endif
