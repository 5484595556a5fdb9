// What this processor multiplies at best, in 1e12 operations (a multiplication, an addition) a second, on random data:
// one operand from the first cache, the other streamed from the second, as in the best of matrix products.
// Compiled by roofline.py with -march=native; nothing of the package is in it.
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t NEAR = 32 << 10, FAR = 1 << 20;  // bytes of the operands, of each thread

struct Operands {
    char *near, *far;
    Operands() : near((char*)aligned_alloc(64, NEAR)), far((char*)aligned_alloc(64, FAR)) {
        uint64_t x = 88172645463325252ull;
        for (int64_t i = 0; i < NEAR + FAR; i += 2) {
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            uint16_t value = 0x3f00 | (x & 0x80ff);  // bf16 of either sign between 1/2 and 2
            memcpy(i < NEAR ? near + i : far + i - NEAR, &value, 2);
        }
    }
    ~Operands() { free(near), free(far); }
};

// Runs `pass`, which does `operations`, on every thread for so many seconds.
template <class Pass>
double rate(int threads, double seconds, double operations, Pass pass) {
    double total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
        Operands operands;
        pass(operands);
#pragma omp barrier
        double start = omp_get_wtime(), now;
        int64_t passes = 0;
        do {
            pass(operands);
            passes++;
            now = omp_get_wtime();
        } while (now - start < seconds);
        total = passes * operations / (now - start);
    }
    return total / 1e12;
}

#if defined(__AMX_TILE__)
template <bool bytes>
void tiles(const Operands& at) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
    asm volatile("ldtilecfg %0" : : "m"(shapes));
    asm volatile("tilezero %%tmm0\n tilezero %%tmm1\n tilezero %%tmm2\n tilezero %%tmm3" : :);
    int64_t stride = 64;
    for (int64_t i = 0; i < FAR; i += 2048) {
        const char *a = at.near + i % NEAR, *b = at.far + i;
        asm volatile("tileloadd (%0,%1,1), %%tmm4\n tileloadd 1024(%0,%1,1), %%tmm5"
                     : : "r"(a), "r"(stride) : "memory");
        asm volatile("tileloaddt1 (%0,%1,1), %%tmm6\n tileloaddt1 1024(%0,%1,1), %%tmm7"
                     : : "r"(b), "r"(stride) : "memory");
        if (bytes)
            asm volatile("tdpbssd %%tmm6, %%tmm4, %%tmm0\n tdpbssd %%tmm7, %%tmm4, %%tmm1\n"
                         "tdpbssd %%tmm6, %%tmm5, %%tmm2\n tdpbssd %%tmm7, %%tmm5, %%tmm3" : :);
        else
            asm volatile("tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n tdpbf16ps %%tmm7, %%tmm4, %%tmm1\n"
                         "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n tdpbf16ps %%tmm7, %%tmm5, %%tmm3" : :);
    }
    asm volatile("tilerelease" : :);
}
constexpr double PRODUCTS = FAR / 2048 * 4;
#endif

// Vectors: two at a time of the second cache by as many broadcast values as registers hold sums for.
template <int VALUES, class Sum, class Step>
void vectors(const Operands& at, Sum zero, Step step) {
    Sum sums[2][VALUES];
    for (auto& row : sums)
        for (Sum& sum : row) sum = zero;
    for (int64_t i = 0; i < FAR; i += 2 * (int64_t)sizeof(Sum))
#pragma GCC unroll 16
        for (int j = 0; j < VALUES; j++)
            for (int half = 0; half < 2; half++)
                step(sums[half][j], at.far + i + half * sizeof(Sum), at.near + i % NEAR + 4 * j);
    for (auto& row : sums)
        for (Sum& sum : row) asm volatile("" : : "x"(sum));
}

}  // namespace

// bf16, or fp32 where the processor has no arithmetic in bf16.
extern "C" double floating_rate(int threads, double seconds) {
#if defined(__AMX_BF16__)
    syscall(SYS_arch_prctl, 0x1023, 18);
    return rate(threads, seconds, PRODUCTS * 2 * 16 * 16 * 32, tiles<false>);
#elif defined(__AVX512BF16__)
    auto step = [](__m512& sum, const char* b, const char* a) {
        int32_t pair;
        memcpy(&pair, a, 4);
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_load_si512(b), (__m512bh)_mm512_set1_epi32(pair));
    };
    return rate(threads, seconds, FAR / 64 * 8 * 64.0,
                [&](const Operands& at) { vectors<8>(at, _mm512_setzero_ps(), step); });
#elif defined(__AVX512F__)
    auto step = [](__m512& sum, const char* b, const char* a) {
        sum = _mm512_fmadd_ps(_mm512_load_ps(b), _mm512_set1_ps(*(const float*)a), sum);
    };
    return rate(threads, seconds, FAR / 64 * 8 * 32.0,
                [&](const Operands& at) { vectors<8>(at, _mm512_setzero_ps(), step); });
#elif defined(__AVX2__) && defined(__FMA__)
    auto step = [](__m256& sum, const char* b, const char* a) {
        sum = _mm256_fmadd_ps(_mm256_load_ps((const float*)b), _mm256_set1_ps(*(const float*)a), sum);
    };
    return rate(threads, seconds, FAR / 32 * 4 * 16.0,
                [&](const Operands& at) { vectors<4>(at, _mm256_setzero_ps(), step); });
#else
    return 0;
#endif
}

// 8-bit integers with 32-bit sums; 0 where there is no instruction for them.
extern "C" double bytes_rate(int threads, double seconds) {
#if defined(__AMX_INT8__)
    syscall(SYS_arch_prctl, 0x1023, 18);
    return rate(threads, seconds, PRODUCTS * 2 * 16 * 16 * 64, tiles<true>);
#elif defined(__AVX512VNNI__)
    auto step = [](__m512i& sum, const char* b, const char* a) {
        int32_t four;
        memcpy(&four, a, 4);
        sum = _mm512_dpbusd_epi32(sum, _mm512_load_si512(b), _mm512_set1_epi32(four));
    };
    return rate(threads, seconds, FAR / 64 * 8 * 128.0,
                [&](const Operands& at) { vectors<8>(at, _mm512_setzero_si512(), step); });
#else
    return 0;
#endif
}

// GB a second by which all threads together read memory.
extern "C" double read_rate(int threads, double seconds) {
    constexpr int64_t SIZE = 256 << 20;
    char* memory = (char*)aligned_alloc(64, SIZE);
    memset(memory, 1, SIZE);
    double best = 0, end = omp_get_wtime() + seconds;
    do {
        double start = omp_get_wtime();
        uint64_t total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total) schedule(static)
        for (int64_t i = 0; i < SIZE / 4096; i++) {
            const uint64_t* page = (const uint64_t*)(memory + i * 4096);
            uint64_t sums[8] = {};
            for (int j = 0; j < 512; j += 8)
                for (int k = 0; k < 8; k++) sums[k] += page[j + k];
            for (uint64_t sum : sums) total += sum;
        }
        asm volatile("" : : "r"(total));
        double found = SIZE / (omp_get_wtime() - start) / 1e9;
        if (found > best) best = found;
    } while (omp_get_wtime() < end);
    free(memory);
    return best;
}
