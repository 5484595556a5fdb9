// Writes keys or values into the cache's blocks, unchanged or rounded to 8 bits with a scale a row. The layout and the
// torch reference, which this matches to the bit, are in ops/attention/kv_blocks.py.
#include "core/threads.h"

namespace {

constexpr float LIMIT = 127.0f, TINY = 1e-30f;

inline vec absolute(vec v) { return (vec)((ivec)v & 0x7fffffff); }

// The row's scale, a number that bf16 holds; NaN where a value is not finite.
template <class T>
inline float scale_of(const T* row, int64_t dim) {
    vec top = {}, bad = {};
    int64_t i = 0;
    for (; i + W <= dim; i += W) {
        vec x = load(row + i);
        top = maximum(top, absolute(x)), bad += x - x;  // x - x: 0, or NaN
    }
    float max = largest(top), off = sum(bad);
    for (; i < dim; i++) {
        float x = fabsf(to_float(row[i]));
        max = x > max ? x : max, off += x - x;
    }
    bf16 scale;
    assign(&scale, (max > TINY ? max : TINY) / LIMIT + off);
    return to_float(scale);
}

inline int8_t round_to_int8(float x) {
    float whole = nearbyintf(x);
    return whole > LIMIT ? LIMIT : whole < -LIMIT ? -LIMIT : whole == whole ? whole : 0;
}

template <class T>
void write(const T* rows, const int64_t* slots, int8_t* values, bf16* scales, int64_t tokens, int64_t heads,
           int64_t dim, int64_t stride, int64_t num_threads) {
    const int64_t threads = worthwhile_threads(tokens * heads * dim, 16384, num_threads);
    parallel_for(tokens * heads, threads, [&](int64_t row) {
        if (slots[row] < 0) return;
        const T* from = rows + row / heads * stride + row % heads * dim;
        int8_t* to = values + slots[row] * dim;
        const float scale = scale_of(from, dim);
        int64_t i = 0;
        for (; i + W <= dim; i += W) {
            const vec magic = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number, ties to even
            vec whole = (load(from + i) / scale + magic) - magic;
            whole = maximum(fill(-LIMIT), -maximum(fill(-LIMIT), -whole));
            ivec lanes = __builtin_convertvector(whole, ivec);
            for (int l = 0; l < W; l++) to[i + l] = lanes[l];
        }
        for (; i < dim; i++) to[i] = round_to_int8(to_float(from[i]) / scale);
        assign(scales + slots[row], scale);
    });
}

}  // namespace

// rows [tokens, heads, dim] in fp32 or bf16, stride values from token to token; slots [tokens * heads], rows of values
// [.., dim] and of scales [..]; below 0: the row is not written.
KERNEL(write_int8_rows)(
    const void* rows, const int64_t* slots, int8_t* values, bf16* scales, int64_t tokens, int64_t heads, int64_t dim,
    int64_t stride, int64_t is_bf16, int64_t num_threads) {
    is_bf16 ? write((const bf16*)rows, slots, values, scales, tokens, heads, dim, stride, num_threads)
            : write((const float*)rows, slots, values, scales, tokens, heads, dim, stride, num_threads);
}
REPLAYABLE(write_int8_rows)

// The same as they are: rows' bytes, dim_bytes each and stride_bytes from token to token, to the rows of blocks.
KERNEL(write_rows)(
    const char* rows, const int64_t* slots, char* blocks, int64_t tokens, int64_t heads, int64_t dim_bytes,
    int64_t stride_bytes, int64_t num_threads) {
    parallel_for(tokens * heads, worthwhile_threads(tokens * heads * dim_bytes, 65536, num_threads), [&](int64_t row) {
        const char* from = rows + row / heads * stride_bytes + row % heads * dim_bytes;
        if (slots[row] >= 0) memcpy(blocks + slots[row] * dim_bytes, from, dim_bytes);
    });
}
REPLAYABLE(write_rows)
