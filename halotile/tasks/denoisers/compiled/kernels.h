/* What all kernels share. Every function returns 0, or 1 where there is no memory. Planes are rows of pixels without gaps.

Compiled without contraction (no fused multiply-add) and without any of -ffast-math: each pixel is the same sequence of single
operations, whatever the width of the vectors, so that a tile has the bits of the whole image. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* One version of each function for each of these kinds of CPU; the loader takes the one that fits. */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define KERNEL __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"))) int
#elif defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 6
#define KERNEL __attribute__((target_clones("avx512f", "avx2", "default"))) int
#else
#define KERNEL int
#endif
#define INLINE static inline __attribute__((always_inline)) void
