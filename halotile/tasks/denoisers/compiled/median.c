/* Medians by sorting networks. The image has the margin of the window on all sides, and no negative zeros and NaN are told apart. */
#include "kernels.h"

#define LESSER(a, b) ((a) < (b) ? (a) : (b))
#define GREATER(a, b) ((a) < (b) ? (b) : (a))
#include "networks.h" /* written by hatch_build.py: sort_columns_N and middle_N for small windows */

#define MEDIAN(size)                                                                                                     \
  KERNEL median_##size(const float *image, ptrdiff_t rows, ptrdiff_t columns, float *out) {                              \
    ptrdiff_t wide = columns + size - 1;                                                                                 \
    float *room = malloc(size * wide * sizeof *room), *sorted[size];                                                     \
    if (!room)                                                                                                           \
      return 1;                                                                                                          \
    for (ptrdiff_t k = 0; k < size; k++)                                                                                 \
      sorted[k] = room + k * wide;                                                                                       \
    for (ptrdiff_t y = 0; y < rows; y++) {                                                                               \
      const float *at[size];                                                                                             \
      for (ptrdiff_t k = 0; k < size; k++)                                                                               \
        at[k] = image + (y + k) * wide;                                                                                  \
      sort_columns_##size(at, wide, sorted);                                                                             \
      middle_##size(sorted, columns, out + y * columns);                                                                 \
    }                                                                                                                    \
    free(room);                                                                                                          \
    return 0;                                                                                                            \
  }
MEDIAN(3)
MEDIAN(5)

/* A step of a larger network: registers of the lesser, the greater and both values, with a shift; see network_program.py. */
typedef struct {
  int32_t kind, lesser, greater, one, other;
} Step;
enum { BOTH, LEAST, MOST };

INLINE follow(const Step *steps, ptrdiff_t count, float *room, ptrdiff_t length) {
  for (const Step *step = steps; step < steps + count; step++) {
    const float *a = room + step->one, *b = room + step->other;
    float *low = room + step->lesser, *high = room + step->greater;
    if (step->kind == BOTH) {
#pragma GCC ivdep
      for (ptrdiff_t i = 0; i < length; i++) {
        float x = a[i], y = b[i];
        low[i] = LESSER(x, y);
        high[i] = GREATER(x, y);
      }
    } else if (step->kind == LEAST) {
#pragma GCC ivdep
      for (ptrdiff_t i = 0; i < length; i++)
        low[i] = LESSER(a[i], b[i]);
    } else {
#pragma GCC ivdep
      for (ptrdiff_t i = 0; i < length; i++)
        low[i] = GREATER(a[i], b[i]);
    }
  }
}

/* `stretch` pixels of a row at a time, whose registers, `pitch` apart, stay in the cache. */
KERNEL median_of(ptrdiff_t size, const float *image, ptrdiff_t rows, ptrdiff_t columns, const Step *steps, ptrdiff_t of_columns,
                 ptrdiff_t count, ptrdiff_t registers, ptrdiff_t pitch, ptrdiff_t stretch, ptrdiff_t result, float *out) {
  ptrdiff_t wide = columns + size - 1;
  float *room = malloc(registers * pitch * sizeof *room);
  if (!room)
    return 1;
  for (ptrdiff_t y = 0; y < rows; y++)
    for (ptrdiff_t x = 0; x < columns; x += stretch) {
      ptrdiff_t length = columns - x < stretch ? columns - x : stretch;
      for (ptrdiff_t k = 0; k < size; k++)
        for (ptrdiff_t i = 0; i < length + size - 1; i++)
          room[k * pitch + i] = image[(y + k) * wide + x + i];
      follow(steps, of_columns, room, length + size - 1);
      follow(steps + of_columns, count - of_columns, room, length);
      memcpy(out + y * columns + x, room + result, length * sizeof *out);
    }
  free(room);
  return 0;
}
