// Choosing tokens from logits [rows, size], each row by one thread, without sorting them.
#include "core/scratch.h"
#include "core/threads.h"

namespace {

constexpr int64_t BLOCK = 1024;
constexpr int64_t SUMMED = 128;  // values that are summed in fp32; such sums are summed in fp64

// Whether each of the W places from i (a multiple of W) is allowed: places have a bit each, in words of 32.
inline ivec allowed(const int32_t* bits, int64_t i) {
    ivec lane_bits;
    for (int l = 0; l < W; l++) lane_bits[l] = 1 << l;
    return (((int32_t)((uint32_t)bits[i / 32] >> i % 32) - ivec{}) & lane_bits) != 0;
}

inline bool is_allowed(const int32_t* bits, int64_t i) { return (uint32_t)bits[i / 32] >> i % 32 & 1; }

inline bool none_allowed(const int32_t* bits, int64_t start, int64_t end) {
    uint32_t any = 0;
    for (int64_t word = start / 32; 32 * word < end; word++) any |= (uint32_t)bits[word];
    return any == 0;
}

// The first place of the largest of x, where `masked` of those that `bits` allow; *best its value (-inf where none is
// allowed), or NaN where any is.
template <bool masked, class T>
int64_t best_place(const T* x, const int32_t* bits, int64_t size, float* best) {
    float top = -INFINITY;
    int64_t at = 0;
    bool has_nan = false;
    for (int64_t start = 0; start < size; start += BLOCK) {  // first in which block it is
        const int64_t end = start + BLOCK < size ? start + BLOCK : size;
        if (masked && none_allowed(bits, start, end)) continue;
        vec most = fill(-INFINITY);
        ivec nans = {};
        int64_t i = start;
        for (; i + W <= end; i += W) {
            const vec v = masked ? select(allowed(bits, i), load(x + i), fill(-INFINITY)) : load(x + i);
            nans |= (ivec)(v != v);
            most = maximum(most, v);
        }
        float block_top = largest(most);
        for (int l = 0; l < W; l++) has_nan |= nans[l] != 0;
        for (; i < end; i++) {
            if (masked && !is_allowed(bits, i)) continue;
            const float v = to_float(x[i]);
            has_nan |= v != v;
            if (v > block_top) block_top = v;
        }
        if (block_top > top) {
            top = block_top;
            at = start;
        }
    }
    *best = has_nan ? NAN : top;
    if (has_nan || top == -INFINITY) return 0;
    while (to_float(x[at]) != top || (masked && !is_allowed(bits, at))) at++;
    return at;
}

// out = x where `bits` allow it, else -inf.
template <class T>
void mask(const T* x, const int32_t* bits, int64_t size, float* out) {
    int64_t i = 0;
    for (; i + W <= size; i += W) store(out + i, select(allowed(bits, i), load(x + i), fill(-INFINITY)));
    for (; i < size; i++) out[i] = is_allowed(bits, i) ? to_float(x[i]) : -INFINITY;
}

// All of x that may be among its k largest (and all that tie with them), by place: `places` and `values`, of which
// there is room for `room`. Returns how many there are, or -1 where there is not room enough, or any is NaN.
//
// Of BLOCK groups (a run of places, every W-th of it), the k-th largest maximum is a bound: k values reach it.
int64_t candidates(const float* x, int64_t size, int64_t k, int64_t room, int64_t* places, float* values) {
    float most[BLOCK];
    const int64_t run = (size + BLOCK - 1) / BLOCK * W;  // values a run, W groups
    int64_t num_groups = 0;
    for (int64_t start = 0; start < size; start += run) {
        const int64_t end = start + run < size ? start + run : size;
        vec m = fill(-INFINITY);
        ivec nans = {};
        int64_t i = start;
        for (; i + W <= end; i += W) {
            const vec v = load(x + i);
            nans |= (ivec)(v != v);
            m = maximum(m, v);
        }
        for (int l = 0; i < end; i++, l++) {
            nans[l] |= x[i] != x[i];
            if (x[i] > m[l]) m[l] = x[i];
        }
        for (int l = 0; l < W && num_groups < BLOCK; l++) {
            if (nans[l]) return -1;
            most[num_groups++] = m[l];
        }
    }
    float bound = -INFINITY;
    if (k <= num_groups) {  // the k largest maxima, in order, by insertion
        float top[BLOCK];
        int64_t kept = 0;
        for (int64_t g = 0; g < num_groups; g++) {
            if (kept == k && !(most[g] > top[k - 1])) continue;
            int64_t at = kept < k ? kept++ : k - 1;
            for (; at > 0 && top[at - 1] < most[g]; at--) top[at] = top[at - 1];
            top[at] = most[g];
        }
        bound = top[k - 1];
    }
    int64_t count = 0, other = 0;
    const vec bounds = fill(bound);
    for (int64_t i = 0; i < size; i += W) {
        if (i + W <= size) {
            const ivec reach = (ivec)(load(x + i) >= bounds);
            bool any = false;
            for (int l = 0; l < W; l++) any |= reach[l] != 0;
            if (!any) {
                other = i;
                continue;
            }
        }
        for (int64_t j = i; j < i + W && j < size; j++) {
            if (!(x[j] >= bound)) {
                other = j;
                continue;
            }
            if (count == room) return -1;
            places[count] = j;
            values[count++] = x[j];
        }
    }
    for (int64_t j = count; j < room; j++) {  // what is left names a place that is no candidate
        places[j] = other;
        values[j] = -INFINITY;
    }
    return count;
}

inline float sum_of(const float* x, int64_t size) {
    vec part = {};
    int64_t i = 0;
    for (; i + W <= size; i += W) part += load(x + i);
    float total = sum(part);
    for (; i < size; i++) total += x[i];
    return total;
}

// e^(x - largest) of all; their sum, 0 where there is none or it is not finite.
double weigh(const float* x, int64_t size, float* weights) {
    float top;
    best_place<false>(x, nullptr, size, &top);
    if (!(top > -INFINITY && top < INFINITY)) return 0.0;
    int64_t i = 0;
    for (; i + W <= size; i += W) store(weights + i, exponential(load(x + i) - top));
    for (; i < size; i++) weights[i] = expf(x[i] - top);
    double total = 0.0;
    for (i = 0; i < size; i += SUMMED) total += sum_of(weights + i, i + SUMMED < size ? SUMMED : size - i);
    return total;
}

inline uint32_t ordered(float x) {  // as whole numbers are: -0 and 0 are one
    x += 0.0f;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// out = x where it is in the nucleus of probability p, else -inf, as stock's TopPLogitsWarper has it: going up from
// the smallest, a token is left out while the sum up to it is at most 1 - p. Of equal ones that the line goes through
// as many are left out as stock does (or one more or less, by rounding), but the first: stock's sort leaves to chance
// which.
//
// Radix selection: the sums of all values with the same first 11 bits tell which bits the value at the line has; among
// those that have them, the next 11 bits and the last 10 are found likewise. `scratch`: 3 * size values.
// Returns false where the choice hangs on the rounding of stock's fp32 sums, or there is nothing to choose from.
bool nucleus(const float* x, int64_t size, double p, float* scratch, float* out) {
    const double total = weigh(x, size, scratch), target = (1.0 - p) * total;
    if (!(total > 0.0)) return false;
    float *members = scratch + size, *member_weights = scratch + 2 * size;
    const float *from = x, *weights = scratch;
    int64_t n = size;
    double below = 0.0;  // weight of all values below the members
    for (int shift : {21, 10, 0}) {
        double sums[2048] = {};
        const uint32_t mask = shift ? 2047 : 1023;
        for (int64_t i = 0; i < n; i++) sums[ordered(from[i]) >> shift & mask] += weights[i];
        uint32_t digit = 0, last = mask;
        while (last > 0 && !(sums[last] > 0.0)) last--;
        while (digit < last && below + sums[digit] <= target) below += sums[digit++];
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i++)
            if ((ordered(from[i]) >> shift & mask) == digit) {
                members[kept] = from[i];
                member_weights[kept++] = weights[i];
            }
        from = members;
        weights = member_weights;
        n = kept;
    }
    const float line = members[0];  // as all n members are now
    const double weight = member_weights[0], left_out = floor((target - below) / weight);
    // Stock sums up to 65,536 rounded numbers: what is nearer to the line than its error is for stock to decide, but
    // where that is only about how many of equal ones.
    const double doubt = 6e-6 * target + 1e-9 * total, rest = target - below - left_out * weight;
    const bool sure = (rest >= doubt || left_out >= 1) && (weight - rest >= doubt || left_out + 1 < n);
    if (!sure || !(left_out < n)) return false;
    int64_t i = 0;
    for (; i + W <= size; i += W) {
        const vec v = load(x + i);
        store(out + i, select((ivec)(v > line), v, fill(-INFINITY)));
    }
    for (; i < size; i++) out[i] = x[i] > line ? x[i] : -INFINITY;
    for (int64_t j = 0, ties = 0; ties < n; j++)
        if (x[j] == line && ties++ >= left_out) out[j] = line;
    return true;
}

// The place where the sum of probabilities passes `uniform` (in [0, 1)); -1 where there is nothing to choose from.
int64_t draw(const float* x, int64_t size, double uniform, float* weights) {
    const double total = weigh(x, size, weights), target = uniform * total;
    if (!(total > 0.0)) return -1;
    double passed = 0.0;
    for (int64_t start = 0; start < size; start += SUMMED) {
        const int64_t end = start + SUMMED < size ? start + SUMMED : size;
        const double part = sum_of(weights + start, end - start);
        if (passed + part <= target) {
            passed += part;
            continue;
        }
        for (int64_t i = start; i < end; i++)
            if ((passed += weights[i]) > target) return i;
    }
    while (!(weights[--size] > 0.0f)) continue;  // rounding stepped over it
    return size;
}

}  // namespace

// x [rows, size]; places [rows]: of each row's largest value, the first; best [rows]: it, or NaN where any is.
// bits [masks, words of 32 places] or null; mask_of [rows]: by which of them the row is masked, -1: by none
KERNEL(best_places)(const void* x, const int32_t* bits, const int64_t* mask_of, int64_t* places, float* best,
                    int64_t rows, int64_t size, int64_t is_bf16, int64_t num_threads) {
    const int64_t words = (size + 31) / 32;
    parallel_for(rows, num_threads, [=](int64_t r) {
        const bf16* half = (const bf16*)x + r * size;
        const float* whole = (const float*)x + r * size;
        if (bits && mask_of[r] >= 0) {
            const int32_t* own = bits + mask_of[r] * words;
            places[r] = is_bf16 ? best_place<true>(half, own, size, best + r)
                                : best_place<true>(whole, own, size, best + r);
        } else {
            places[r] = is_bf16 ? best_place<false>(half, nullptr, size, best + r)
                                : best_place<false>(whole, nullptr, size, best + r);
        }
    });
}

// x [rows, size]; bits [rows, words of 32 places]; out [rows, size]: x where its bit is set, else -inf
KERNEL(mask_places)(const void* x, const int32_t* bits, float* out, int64_t rows, int64_t size, int64_t is_bf16,
                    int64_t num_threads) {
    const int64_t words = (size + 31) / 32;
    parallel_for(rows, num_threads, [=](int64_t r) {
        if (is_bf16) mask((const bf16*)x + r * size, bits + r * words, size, out + r * size);
        else mask((const float*)x + r * size, bits + r * words, size, out + r * size);
    });
}

// x [rows, size]; k [rows], at most 1024; places, values [rows, room]; counts [rows]: see `candidates`
KERNEL(top_candidates)(const float* x, const int64_t* k, int64_t* places, float* values, int64_t* counts, int64_t rows,
                       int64_t size, int64_t room, int64_t num_threads) {
    parallel_for(rows, num_threads, [=](int64_t r) {
        counts[r] = candidates(x + r * size, size, k[r], room, places + r * room, values + r * room);
    });
}

// x, out [rows, size]; p [rows] fp64; done [rows]: whether the row is `out` now; see `nucleus`
KERNEL(nucleus)(const float* x, const double* p, float* out, int64_t* done, int64_t rows, int64_t size,
                int64_t num_threads) {
    parallel_parts(rows, num_threads, [=](Range part) {
        const ScratchArray<float> scratch(3 * size);
        for (int64_t r = part.begin; r < part.end; r++)
            done[r] = nucleus(x + r * size, size, p[r], scratch, out + r * size);
    });
}

// x [rows, size]; uniform [rows] fp64; places [rows]: drawn from softmax(x), or -1; see `draw`
KERNEL(draw)(const float* x, const double* uniform, int64_t* places, int64_t rows, int64_t size, int64_t num_threads) {
    parallel_parts(rows, num_threads, [=](Range part) {
        const ScratchArray<float> weights(size);
        for (int64_t r = part.begin; r < part.end; r++) places[r] = draw(x + r * size, size, uniform[r], weights);
    });
}
