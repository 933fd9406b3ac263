/* Causal attention over a prefix tree and its gradients, on a CPU: each node's query once, nothing padded.
 *
 * Built by compiled.py; called by attention.py, which says what is equal to what. A run is `count` nodes in a row; it
 * sees the nodes of its path (intervals of nodes, its own the last) up to each itself. Arrays are [node][head][dim].
 * A run's keys and values are gathered once for all its queries, as rows [key][dim] or as blocks [key / 16][dim][16],
 * in which the dot products of 16 keys are vectors. dim is a multiple of 8. Sums are in one fixed order.
 */
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#define BLOCK 16
#define ROWS 4  /* queries whose scores are computed together: 4 by 16 keys fill eight vector registers */
#define TILE 16 /* queries whose gradients for a key are summed before they are added to memory */

typedef struct {
    long heads, kv_heads, dim, window; /* window: the last keys a node sees, itself included; 0: all */
    float scale;
} Shape;

typedef struct { /* of one run: its first node, its nodes, the nodes before it on its path, and the path */
    long first, count, known, parts;
    const int64_t *path;
} Run;

static Run run_at(const int64_t *runs, const int64_t *paths, long i) {
    Run run = {runs[3 * i], runs[3 * i + 1], 0, runs[3 * i + 5] - runs[3 * i + 2], paths + 2 * runs[3 * i + 2]};
    for (long p = 0; p < run.parts; p++) run.known += run.path[2 * p + 1];
    run.known -= run.count;
    return run;
}

/* One head of the path's nodes of x: to rows [key][dim], blocks [key / 16][dim][16], where not NULL. */
static inline __attribute__((always_inline)) void gather(const float *x, long stride, const Run *run, const long dim,
                                                         float *rows, float *blocks) {
    long key = 0;
    for (long p = 0; p < run->parts; p++) {
        const float *node = x + run->path[2 * p] * stride;
        for (long i = 0; i < run->path[2 * p + 1]; i++, key++, node += stride) {
            if (rows) memcpy(rows + key * dim, node, dim * sizeof(float));
            if (blocks) {
                float *block = blocks + key / BLOCK * BLOCK * dim + key % BLOCK;
                for (long d = 0; d < dim; d++) block[d * BLOCK] = node[d];
            }
        }
    }
}

static void scatter_add(float *x, long stride, const Run *run, long dim, const float *rows) {
    for (long p = 0; p < run->parts; p++) {
        float *node = x + run->path[2 * p] * stride;
        for (long i = 0; i < run->path[2 * p + 1]; i++, node += stride, rows += dim)
            for (long d = 0; d < dim; d++) node[d] += rows[d];
    }
}

/* out [ROWS][width] = y [ROWS][dim] times the keys of blocks from `first` to before `last` */
static inline __attribute__((always_inline)) void dots(const long dim, const float *y, const float *blocks, long first,
                                                       long last, float *out, long width) {
    for (long b = first; b < last; b++) {
        const float *k = blocks + b * BLOCK * dim;
        v8 low[ROWS], high[ROWS];
        for (long r = 0; r < ROWS; r++) low[r] = high[r] = spread(0);
        for (long d = 0; d < dim; d++) {
            v8 a = *(const v8 *)(k + d * BLOCK), c = *(const v8 *)(k + d * BLOCK + 8);
            for (long r = 0; r < ROWS; r++) {
                v8 x = spread(y[r * dim + d]);
                low[r] += x * a;
                high[r] += x * c;
            }
        }
        for (long r = 0; r < ROWS; r++) {
            *(v8 *)(out + r * width + b * BLOCK) = low[r];
            *(v8 *)(out + r * width + b * BLOCK + 8) = high[r];
        }
    }
}

/* out [2][dim] += sum over i in [from, to) of the two weights at w + i * step (and `pair` after it) times x[i] [dim] */
static inline __attribute__((always_inline)) void mix(const long dim, const float *w, long step, long pair,
                                                      const float *x, long from, long to, float *out) {
    const long wide = dim % 32 == 0 ? 32 : (dim % 16 == 0 ? 16 : 8);
    for (long d = 0; d < dim; d += wide) {
        v8 acc[2][4];
        for (long j = 0; j < 2; j++)
            for (long c = 0; c < wide / 8; c++) acc[j][c] = *(v8 *)(out + j * dim + d + 8 * c);
        for (long i = from; i < to; i++)
            for (long j = 0; j < 2; j++) {
                v8 weight = spread(w[i * step + j * pair]);
                for (long c = 0; c < wide / 8; c++) acc[j][c] += weight * *(const v8 *)(x + i * dim + d + 8 * c);
            }
        for (long j = 0; j < 2; j++)
            for (long c = 0; c < wide / 8; c++) *(v8 *)(out + j * dim + d + 8 * c) = acc[j][c];
    }
}

typedef struct { /* of up to TILE queries of one run and KV head: row r is head r % group of node r / group */
    long rows, first, last;       /* first and last block of keys that any of them sees */
    long at[TILE];                /* node * heads + head; -1 where the tile is not full */
    long start[TILE], limit[TILE]; /* the keys each sees */
} Tile;

static Tile tile_at(const Shape *s, const Run *run, long kv, long row, long most) {
    long group = s->heads / s->kv_heads, left = run->count * group - row;
    Tile t = {.rows = left < most ? left : most, .first = -1};
    for (long r = 0; r < TILE; r++) t.at[r] = -1, t.start[r] = 0, t.limit[r] = 0;
    for (long r = 0; r < t.rows; r++) {
        long node = (row + r) / group, limit = run->known + node + 1;
        t.at[r] = (run->first + node) * s->heads + kv * group + (row + r) % group;
        t.limit[r] = limit;
        t.start[r] = s->window && limit > s->window ? limit - s->window : 0;
        if (t.first < 0) t.first = t.start[r] / BLOCK;
        t.last = (limit + BLOCK - 1) / BLOCK;
    }
    return t;
}

static inline __attribute__((always_inline)) void take(const Tile *t, const long dim, const float *x, float scale,
                                                       float *rows, long count) {
    for (long r = 0; r < count; r++)
        for (long d = 0; d < dim; d++) rows[r * dim + d] = t->at[r] < 0 ? 0 : scale * x[t->at[r] * dim + d];
}

/* Keys that a row does not see get `x`, in the blocks of its tile. */
static inline __attribute__((always_inline)) void hide(float *scores, const Tile *t, long r, float x) {
    long from = t->first * BLOCK, to = t->last * BLOCK;
    for (long i = from; i < t->start[r]; i++) scores[i] = x;
    for (long i = t->limit[r] > from ? t->limit[r] : from; i < to; i++) scores[i] = x;
}

static inline __attribute__((always_inline)) float highest(const float *scores, const Tile *t) {
    v8 top = spread(-INFINITY);
    float most = -INFINITY;
    for (long i = t->first * BLOCK; i < t->last * BLOCK; i += 8) top = greater(*(const v8 *)(scores + i), top);
    for (long i = 0; i < 8; i++) most = top[i] > most ? top[i] : most;
    return most;
}

/* Scores of one row to weights exp(score - top), 0 where hidden. */
static inline __attribute__((always_inline)) void weigh(float *scores, const Tile *t, long r, float top) {
    for (long i = t->first * BLOCK; i < t->last * BLOCK; i++) scores[i] = exp_(scores[i] - top);
    hide(scores, t, r, 0);
}

static inline __attribute__((always_inline)) void forward_run(const long dim, const Shape *s, const Run *run,
                                                              const float *q, const float *k, const float *v,
                                                              float *out, float *lse, float *room, long width) {
    float *keys = room, *values = keys + width * dim, *scores = values + width * dim, *y = scores + ROWS * width;
    float *o = y + ROWS * dim;
    long group = s->heads / s->kv_heads, stride = s->kv_heads * dim;
    for (long kv = 0; kv < s->kv_heads; kv++) {
        gather(k + kv * dim, stride, run, dim, NULL, keys);
        gather(v + kv * dim, stride, run, dim, values, NULL);
        for (long row = 0; row < run->count * group; row += ROWS) {
            Tile t = tile_at(s, run, kv, row, ROWS);
            take(&t, dim, q, s->scale, y, ROWS);
            dots(dim, y, keys, t.first, t.last, scores, width);
            memset(o, 0, ROWS * dim * sizeof(float));
            float sums[ROWS];
            for (long r = 0; r < ROWS; r++) {
                float *w = scores + r * width;
                hide(w, &t, r, -INFINITY);
                float top = highest(w, &t);
                weigh(w, &t, r, top);
                v8 sum = spread(0);
                for (long i = t.first * BLOCK; i < t.last * BLOCK; i += 8) sum += *(v8 *)(w + i);
                sums[r] = total(sum);
                if (r < t.rows) lse[t.at[r]] = top + logf(sums[r]);
            }
            long end = t.limit[t.rows - 1];
            for (long r = 0; r < ROWS; r += 2)
                mix(dim, scores + r * width, 1, width, values, t.first * BLOCK, end, o + r * dim);
            for (long r = 0; r < t.rows; r++)
                for (long d = 0; d < dim; d++) out[t.at[r] * dim + d] = o[r * dim + d] / sums[r];
        }
    }
}

static inline __attribute__((always_inline)) void backward_run(
    const long dim, const Shape *s, const Run *run, const float *q, const float *k, const float *v, const float *out,
    const float *lse, const float *dout, float *dq, float *dk, float *dv, float *room, long width) {
    float *keys = room, *values = keys + width * dim, *key_rows = values + width * dim;
    float *dkeys = key_rows + width * dim, *dvalues = dkeys + width * dim;
    float *weights = dvalues + width * dim, *grads = weights + TILE * width;
    float *y = grads + TILE * width, *dy = y + TILE * dim, *dx = dy + TILE * dim;
    long group = s->heads / s->kv_heads, stride = s->kv_heads * dim;
    for (long kv = 0; kv < s->kv_heads; kv++) {
        gather(k + kv * dim, stride, run, dim, key_rows, keys);
        gather(v + kv * dim, stride, run, dim, NULL, values);
        memset(dkeys, 0, 2 * width * dim * sizeof(float));
        for (long row = 0; row < run->count * group; row += TILE) {
            Tile t = tile_at(s, run, kv, row, TILE);
            long full = (t.rows + ROWS - 1) / ROWS * ROWS, from = t.first * BLOCK, end = t.limit[t.rows - 1];
            take(&t, dim, q, s->scale, y, full);
            take(&t, dim, dout, 1.0f, dy, full);
            memset(dx, 0, full * dim * sizeof(float));
            for (long r = 0; r < full; r += ROWS) {
                dots(dim, y + r * dim, keys, t.first, t.last, weights + r * width, width);
                dots(dim, dy + r * dim, values, t.first, t.last, grads + r * width, width);
            }
            for (long r = 0; r < full; r++) {
                float *w = weights + r * width, *g = grads + r * width, delta = 0;
                int real = t.at[r] >= 0;
                if (real)
                    for (long d = 0; d < dim; d++) delta += dy[r * dim + d] * out[t.at[r] * dim + d];
                weigh(w, &t, r, real ? lse[t.at[r]] : INFINITY);
                for (long i = from; i < t.last * BLOCK; i++) g[i] = w[i] * (g[i] - delta);
            }
            for (long r = 0; r < full; r += 2)
                mix(dim, grads + r * width, 1, width, key_rows, from, end, dx + r * dim);
            for (long i = from; i < end; i += 2) { /* y holds the scale, so dkeys do too */
                mix(dim, grads + i, width, 1, y, 0, full, dkeys + i * dim);
                mix(dim, weights + i, width, 1, dy, 0, full, dvalues + i * dim);
            }
            for (long r = 0; r < t.rows; r++)
                for (long d = 0; d < dim; d++) dq[t.at[r] * dim + d] = s->scale * dx[r * dim + d];
        }
        scatter_add(dk + kv * dim, stride, run, dim, dkeys);
        scatter_add(dv + kv * dim, stride, run, dim, dvalues);
    }
}

#define BY_DIM(CALL)                                                                                                   \
    switch (s.dim) {                                                                                                   \
        case 16: CALL(16); break;                                                                                      \
        case 32: CALL(32); break;                                                                                      \
        case 64: CALL(64); break;                                                                                      \
        case 128: CALL(128); break;                                                                                    \
        case 256: CALL(256); break;                                                                                    \
        default: CALL(s.dim);                                                                                          \
    }

/* runs [n + 1][3]: first node, count, first of its intervals; paths [...][2]: first node, count. longest: a path's most
 * nodes. q, out [N][heads][dim]; k, v [N][kv_heads][dim]; lse [N][heads]. Returns 0, or 1 if there is no memory. */
int st_tree_forward(const float *q, const float *k, const float *v, const int64_t *runs, long n, const int64_t *paths,
                    long longest, long heads, long kv_heads, long dim, long window, float scale, float *out,
                    float *lse) {
    Shape s = {heads, kv_heads, dim, window, scale};
    long width = (longest + BLOCK - 1) / BLOCK * BLOCK;
    float *room = calloc(width * (2 * dim + ROWS) + 2 * ROWS * dim, sizeof(float));
    if (!room) return 1;
    for (long i = 0; i < n; i++) {
        Run run = run_at(runs, paths, i);
#define FORWARD(D) forward_run(D, &s, &run, q, k, v, out, lse, room, width)
        BY_DIM(FORWARD)
    }
    free(room);
    return 0;
}

/* As st_tree_forward. dq is written; dk, dv are added to. */
int st_tree_backward(const float *q, const float *k, const float *v, const int64_t *runs, long n, const int64_t *paths,
                     long longest, long heads, long kv_heads, long dim, long window, float scale, const float *out,
                     const float *lse, const float *dout, float *dq, float *dk, float *dv) {
    Shape s = {heads, kv_heads, dim, window, scale};
    long width = (longest + BLOCK - 1) / BLOCK * BLOCK;
    float *room = calloc(width * (5 * dim + 2 * TILE) + 3 * TILE * dim, sizeof(float));
    if (!room) return 1;
    for (long i = 0; i < n; i++) {
        Run run = run_at(runs, paths, i);
#define BACKWARD(D) backward_run(D, &s, &run, q, k, v, out, lse, dout, dq, dk, dv, room, width)
        BY_DIM(BACKWARD)
    }
    free(room);
    return 0;
}
