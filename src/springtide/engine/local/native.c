/* The engine's CPU kernels: what between two matrix products costs more in PyTorch than the products themselves.
 *
 * Compiled on first use by native.py (any C compiler with GCC's vector extensions); the same functions as kernels.py.
 * KV of one layer, BLOCK tokens a block: K [block][kv head][dim][BLOCK], so that scores of BLOCK keys are vectors, and
 * V [block][kv head][BLOCK][dim]. head_dim is a multiple of 8. Single-threaded, no allocation that outlives a call.
 */
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#define BLOCK 16
#define AHEAD 4 /* blocks lie anywhere in the pool: fetched this many ahead, into L2 (measured best of 1 to 12) */
#define ROWS 4 /* query rows that share each read of a key: 4 rows x 16 keys fill eight vector registers */

static inline __attribute__((always_inline)) float square_sum(const float *x, long n) {
    v8 sum = spread(0);
    long i = 0;
    for (; i + 8 <= n; i += 8) { v8 a = *(const v8 *)(x + i); sum += a * a; }
    float rest = total(sum);
    for (; i < n; i++) rest += x[i] * x[i];
    return rest;
}

/* x [n, d] -> out [n, d] */
void st_rms_norm(const float *x, const float *weight, float *out, long n, long d, float eps) {
    for (long row = 0; row < n; row++, x += d, out += d) {
        float scale = 1.0f / sqrtf(square_sum(x, d) / (float)d + eps);
        for (long i = 0; i < d; i++) out[i] = weight[i] * (x[i] * scale);
    }
}

/* gate_up [n, 2 m] -> out [n, m]. gelu_tanh(g) is g * sigmoid(2 u) with GELU's u, silu(g) is g * sigmoid(g). */
void st_gate(const float *gate_up, float *out, long n, long m, long gelu) {
    const float a = gelu ? 1.5957691216057308f : 1.0f, b = gelu ? 0.044715f : 0.0f;
    for (long row = 0; row < n; row++, gate_up += 2 * m, out += m)
        for (long i = 0; i < m; i++) {
            float g = gate_up[i], z = a * g * (1.0f + b * g * g), e = exp_(-fabsf(z));
            out[i] = g * (z >= 0 ? 1.0f : e) / (1.0f + e) * gate_up[m + i];
        }
}

/* Norm (if norm), rotate by cos/sin [dim/2], scale. */
static inline void head(const float *x, float *out, long dim, const float *norm, float eps, const float *cos,
                        const float *sin, float scale) {
    long half = dim / 2;
    if (norm) scale /= sqrtf(square_sum(x, dim) / (float)dim + eps);
    for (long i = 0; i < half; i++) {
        float a = x[i], b = x[half + i];
        if (norm) { a *= norm[i]; b *= norm[half + i]; }
        out[i] = (a * cos[i] - b * sin[i]) * scale;
        out[half + i] = (b * cos[i] + a * sin[i]) * scale;
    }
}

/* qkv [n, (heads + 2 kv_heads) dim] -> queries [n, heads, dim], times scale; keys and values go to the slot's block. */
void st_heads(const float *qkv, float *queries, float *keys, float *values, const float *q_norm, const float *k_norm,
              float eps, float scale, const float *cos, const float *sin, const int32_t *slots,
              const int32_t *positions, const int32_t *tables, long table_width, long n, long heads, long kv_heads,
              long dim) {
    float rotated[dim];
    for (long row = 0; row < n; row++) {
        long position = positions[row], place = position % BLOCK;
        long block = tables[slots[row] * table_width + position / BLOCK];
        const float *c = cos + position * (dim / 2), *s = sin + position * (dim / 2);
        for (long h = 0; h < heads; h++, qkv += dim, queries += dim) head(qkv, queries, dim, q_norm, eps, c, s, scale);
        for (long h = 0; h < kv_heads; h++, qkv += dim) {
            float *target = keys + (block * kv_heads + h) * dim * BLOCK + place;
            head(qkv, rotated, dim, k_norm, eps, c, s, 1.0f);
            for (long i = 0; i < dim; i++) target[i * BLOCK] = rotated[i];
        }
        for (long h = 0; h < kv_heads; h++, qkv += dim)
            memcpy(values + ((block * kv_heads + h) * BLOCK + place) * dim, qkv, dim * sizeof(float));
    }
}

/* Attention of `rows` (<= ROWS, constant) query rows with one KV head of one sequence. Row r sees the keys from
 * starts[r] to before limits[r], counted from the table's first; both ascend, and starts[0] is in its first block.
 * after_keys, after_table: what the next call reads first; fetched at the end, so that no call starts cold. */
static inline __attribute__((always_inline)) void tile(
    const long rows, const long dim, const float **q, float **out, const long *starts, const long *limits,
    const float *keys, const float *values, const int32_t *table, const float *after_keys, const int32_t *after_table,
    long stride, float *scores, long width) {
    long longest = limits[rows - 1], blocks = (longest + BLOCK - 1) / BLOCK;
    for (long b = 0; b < blocks; b++) {
        const float *k = keys + table[b] * stride;
        long ahead = b + AHEAD;
        const float *next = ahead < blocks ? keys + table[ahead] * stride : values + table[ahead % blocks] * stride;
        v8 low[ROWS], high[ROWS];
        for (long r = 0; r < rows; r++) low[r] = high[r] = spread(0);
        for (long d = 0; d < dim; d++) {
            __builtin_prefetch(next + d * BLOCK, 0, 1);
            v8 a = *(const v8 *)(k + d * BLOCK), c = *(const v8 *)(k + d * BLOCK + 8);
            for (long r = 0; r < rows; r++) {
                v8 x = spread(q[r][d]);
                low[r] += x * a;
                high[r] += x * c;
            }
        }
        for (long r = 0; r < rows; r++) {
            *(v8 *)(scores + r * width + b * BLOCK) = low[r];
            *(v8 *)(scores + r * width + b * BLOCK + 8) = high[r];
        }
    }
    for (long r = 0; r < rows; r++) {
        float *s = scores + r * width, most = -INFINITY, sum = 0;
        long padded = blocks * BLOCK;
        for (long i = 0; i < starts[r]; i++) s[i] = -INFINITY;
        for (long i = limits[r]; i < padded; i++) s[i] = -INFINITY;
        v8 top = *(v8 *)s;
        for (long i = 8; i < padded; i += 8) top = greater(*(v8 *)(s + i), top);
        for (long i = 0; i < 8; i++) most = top[i] > most ? top[i] : most;
        for (long i = 0; i < padded; i++) s[i] = exp_(s[i] - most);
        for (long i = limits[r]; i < padded; i++) s[i] = 0;
        v8 sums = spread(0);
        for (long i = 0; i < padded; i += 8) sums += *(v8 *)(s + i);
        sum = 1.0f / total(sums);
        for (long i = 0; i < padded; i++) s[i] *= sum;
        memset(out[r], 0, dim * sizeof(float));
    }
    const long pair = rows > 1 ? 2 : 1, step = dim % 32 == 0 ? 32 : (dim % 16 == 0 ? 16 : 8);
    for (long b = 0; b < blocks; b++) {
        const float *v = values + table[b] * stride;
        long ahead = b + AHEAD;
        const float *next =
            ahead < blocks ? values + table[ahead] * stride : after_keys + after_table[ahead % blocks] * stride;
        for (long i = 0; i < dim * BLOCK; i += 16) __builtin_prefetch(next + i, 0, 1);
        for (long r = 0; r < rows; r += pair)
            for (long d = 0; d < dim; d += step) {
                v8 acc[2][4];
                for (long j = 0; j < pair; j++)
                    for (long i = 0; i < step / 8; i++) acc[j][i] = *(v8 *)(out[r + j] + d + 8 * i);
                for (long p = 0; p < BLOCK; p++)
                    for (long j = 0; j < pair; j++) {
                        v8 x = spread(scores[(r + j) * width + b * BLOCK + p]);
                        for (long i = 0; i < step / 8; i++) acc[j][i] += x * *(const v8 *)(v + p * dim + d + 8 * i);
                    }
                for (long j = 0; j < pair; j++)
                    for (long i = 0; i < step / 8; i++) *(v8 *)(out[r + j] + d + 8 * i) = acc[j][i];
            }
    }
}

static inline __attribute__((always_inline)) void attend(
    const long dim, const float *queries, const float *keys, const float *values, const int32_t *slots,
    const int32_t *positions, const int32_t *tables, long table_width, const int64_t *runs, long n_runs, long heads,
    long kv_heads, long window, float *out, float *scores, long width) {
#define TILE(R) tile(R, dim, q, o, starts, limits, k, v, table + skipped, after, after_table, stride, scores, width)
    long group = heads / kv_heads, stride = kv_heads * dim * BLOCK;
    for (long run = 0; run < n_runs; run++) {
        long first = runs[2 * run], count = runs[2 * run + 1];
        const int32_t *table = tables + slots[first] * table_width;
        const int32_t *next_table = run + 1 < n_runs ? tables + slots[runs[2 * run + 2]] * table_width : table;
        for (long kv = 0; kv < kv_heads; kv++) {
            const float *k = keys + kv * dim * BLOCK, *v = values + kv * dim * BLOCK;
            const float *after = kv + 1 < kv_heads ? k + dim * BLOCK : keys;
            const int32_t *after_table = kv + 1 < kv_heads ? table : next_table;
            for (long row = 0; row < count * group;) {
                const float *q[ROWS];
                float *o[ROWS];
                long starts[ROWS], limits[ROWS], skipped = 0; /* blocks that lie before every row's window */
                long left = count * group - row, rows = left >= 4 ? 4 : (left >= 2 ? 2 : 1);
                for (long r = 0; r < rows; r++) {
                    long token = first + (row + r) / group, at = (token * heads + kv * group + (row + r) % group) * dim;
                    q[r] = queries + at;
                    o[r] = out + at;
                    long limit = positions[token] + 1, start = window && limit > window ? limit - window : 0;
                    if (r == 0) skipped = start / BLOCK;
                    starts[r] = start - skipped * BLOCK;
                    limits[r] = limit - skipped * BLOCK;
                }
                if (rows == 4) TILE(4);
                else if (rows == 2) TILE(2);
                else TILE(1);
                row += rows;
            }
        }
    }
}

/* queries [n, heads, dim] -> out. runs [n_runs, 2]: first row and count of tokens of one slot. longest: keys at most.
 * window: the last keys a token sees, itself included; 0: all. Returns 0, or 1 if there is no memory. */
int st_attend(const float *queries, const float *keys, const float *values, const int32_t *slots,
              const int32_t *positions, const int32_t *tables, long table_width, const int64_t *runs, long n_runs,
              long heads, long kv_heads, long dim, long longest, long window, float *out) {
    long width = (longest + BLOCK - 1) / BLOCK * BLOCK;
    float *scores = malloc(ROWS * width * sizeof(float));
    if (!scores) return 1;
#define ATTEND(D)                                                                                                      \
    attend(D, queries, keys, values, slots, positions, tables, table_width, runs, n_runs, heads, kv_heads, window, out, \
           scores, width)
    switch (dim) {
        case 16: ATTEND(16); break;
        case 32: ATTEND(32); break;
        case 64: ATTEND(64); break;
        case 128: ATTEND(128); break;
        case 256: ATTEND(256); break; /* Gemma 3's */
        default: ATTEND(dim);
    }
    free(scores);
    return 0;
}

/* logits [n, v] -> ids [n], log-probs [n] of softmax(logits * inverse_t). uniform < 0: greedy; else inverse CDF. */
int st_sample(const float *logits, const float *inverse_t, const double *uniform, int32_t *ids, float *logprobs, long n,
              long v) {
    long chunks = (v + 63) / 64;
    float *weights = malloc(chunks * 64 * sizeof(float));
    double *sums = malloc(chunks * sizeof(double));
    if (!weights || !sums) { free(weights); free(sums); return 1; }
    for (long row = 0; row < n; row++, logits += v) {
        float most = logits[0], scale = inverse_t[row];
        double sum = 0;
        long i = 0, chosen = 0;
        if (v >= 8) {
            v8 top = *(const v8 *)logits;
            for (i = 8; i + 8 <= v; i += 8) top = greater(*(const v8 *)(logits + i), top);
            for (long j = 0; j < 8; j++) most = top[j] > most ? top[j] : most;
        }
        for (; i < v; i++) most = logits[i] > most ? logits[i] : most;
        for (i = 0; i < v; i++) weights[i] = exp_((logits[i] - most) * scale);
        for (; i < chunks * 64; i++) weights[i] = 0;
        for (long c = 0; c < chunks; c++) {
            v8 part = spread(0);
            for (long j = 0; j < 64; j += 8) part += *(v8 *)(weights + c * 64 + j);
            sum += sums[c] = (double)total(part);
        }
        if (uniform[row] < 0) {
            while (chosen + 1 < v && logits[chosen] < most) chosen++;
        } else {
            double target = uniform[row] * sum, before = 0;
            long c = 0;
            while (c + 1 < chunks && before + sums[c] <= target) before += sums[c++];
            chosen = c * 64;
            long end = chosen + 64 < v ? chosen + 64 : v;
            while (chosen + 1 < end && (before += (double)weights[chosen]) <= target) chosen++;
        }
        ids[row] = (int32_t)chosen;
        logprobs[row] = (float)((double)((logits[chosen] - most) * scale) - log(sum));
    }
    free(weights);
    free(sums);
    return 0;
}
