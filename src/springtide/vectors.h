/* What the compiled kernels share: vectors of eight floats and a fast exponential. `compiled.py` lets every source find
 * it, and builds them anew when it changes. */
#ifndef SPRINGTIDE_VECTORS_H
#define SPRINGTIDE_VECTORS_H

#include <math.h>
#include <stdint.h>

typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8 __attribute__((vector_size(32)));

static inline __attribute__((always_inline)) v8 greater(v8 a, v8 b) {
    i8 mask = a > b;
    return (v8)(((i8)a & mask) | ((i8)b & ~mask));
}
static inline __attribute__((always_inline)) v8 spread(float x) { return (v8){x, x, x, x, x, x, x, x}; }
static inline __attribute__((always_inline)) float total(v8 x) {
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

/* exp for x <= 0, relative error about 1e-7 (Cephes' polynomial); below -87 it stays at e^-87. */
static inline __attribute__((always_inline)) float exp_(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = floorf(x * 1.44269504088896341f + 0.5f);
    x -= n * 0.693359375f;
    x -= n * -2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    union { int32_t i; float f; } power = {.i = ((int32_t)n + 127) << 23};
    return y * power.f;
}

#endif
