// The float64 sum of weights/fingerprint.py at the speed of memory. `float64_sum` there says in which order it adds.

#include <stdint.h>
#include <string.h>

#define LANES 32  // they fit the registers
#define BLOCK 8192

static inline double of_f32(float x) { return x; }

static inline double of_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// Sum x[0..n) into *total; write x to `copy` if there is one, a block at a time, which is then in the cache.
#define SUM(NAME, TYPE, WIDE)                                                      \
    void NAME(const TYPE *x, TYPE *copy, long n, double *total) {                  \
        *total = 0;                                                                \
        for (long start = 0; start < n; start += BLOCK) {                          \
            const TYPE *block = x + start;                                         \
            long count = n - start < BLOCK ? n - start : BLOCK, i = 0;             \
            double sums[LANES] = {0};                                              \
            if (copy) memcpy(copy + start, block, count * sizeof *x);              \
            for (; i + LANES <= count; i += LANES)                                 \
                for (int j = 0; j < LANES; j++) sums[j] += WIDE(block[i + j]);     \
            for (int j = 0; i + j < count; j++) sums[j] += WIDE(block[i + j]);     \
            for (int half = LANES / 2; half; half /= 2)                            \
                for (int j = 0; j < half; j++) sums[j] += sums[j + half];          \
            *total += sums[0];                                                     \
        }                                                                          \
    }

SUM(st_sum_f32, float, of_f32)
SUM(st_sum_bf16, uint16_t, of_bf16)
