// Shared by the attention kernels for queries in bf16, which process sixteen contiguous keys at a time.
#pragma once

#include "arch/lanes.h"
#include "attention/sequence.h"

namespace {

constexpr int SIXTEEN = 16, KEYS = 64, GROUPS = KEYS / SIXTEEN;  // keys whose scores are taken at once

struct Attention {
    const bf16* q;
    const void *keys, *values;
    const bf16 *key_scales, *value_scales;  // of keys and values in 8 bits, one a row
    const Sequence* sequences;
    const int64_t* block_ids;
    void* out;
    float* lse;
    int64_t heads, kv_heads, group, block_size, q_stride;
    float scaling;
    bool out_is_float;
    const float *near, *near_lse;  // null, or what is known of other keys, which is to be merged in

    float log2_scaling() const { return scaling * 1.44269504088896341f; }  // from scores to powers of 2

    // Mixed values, in the order of the dims, of a query of a head; max: what the exponents are taken from.
    template <int DIM>
    void write(int64_t token, int64_t head, const vec* mixed, float sum, float max) const {
        const int64_t at = token * heads + head;
        const float log_sum = max * 0.693147180559945f + logf(sum);
        const float share = near ? 1 / (1 + expf(near_lse[at] - log_sum)) : 1;  // of all exponentials
        const vec factor = fill(share / sum);
        for (int c = 0; c < DIM / W; c += 2) {
            vec a = mixed[c] * factor, b = mixed[c + 1] * factor;
            if (near) {
                a += load(near + at * DIM + c * W) * (1 - share);
                b += load(near + at * DIM + (c + 1) * W) * (1 - share);
            }
            if (out_is_float)
                store((float*)out + at * DIM + c * W, a), store((float*)out + at * DIM + (c + 1) * W, b);
            else
                store_pairs((bf16*)out + at * DIM + c * W, round_to_pairs(a, b));
        }
        if (lse) lse[at] = log_sum;
    }
};

// Up to 64 keys of a sequence, from a multiple of 16 on: where sixteen and sixteen lie among the cache's rows.
struct KeyTile {
    int64_t rows[GROUPS];
    int keys, groups;

    void locate(const Attention& a, const Sequence& s, int64_t kv_head, int64_t first, int64_t end) {
        keys = min(KEYS, end - first), groups = ceil_div(keys, SIXTEEN);
        const int64_t* block = a.block_ids + s.table + first / a.block_size;
        int64_t offset = first % a.block_size;
        for (int g = 0; g < groups; g++) {
            rows[g] = (*block * a.kv_heads + kv_head) * a.block_size + offset;
            if ((offset += SIXTEEN) == a.block_size) offset = 0, block++;
        }
    }
};

// Sixteen rows of values; zeros, in `copy`, for those beyond the first `keys`, whose weights are 0 but which may hold
// anything.
template <int DIM, class C>
inline const C* existing_rows(const C* rows, int keys, C* copy) {
    if (keys >= SIXTEEN) return rows;
    memcpy(copy, rows, keys * DIM * sizeof(C));
    memset(copy + keys * DIM, 0, (SIXTEEN - keys) * DIM * sizeof(C));
    return copy;
}

}  // namespace
