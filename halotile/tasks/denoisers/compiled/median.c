/* Medians by sorting networks. Of NaN they only tell that there are some: the lesser of NaN and a number depends on their order. */
#include "kernels.h"

#define LESSER(a, b) ((a) < (b) ? (a) : (b))
#define GREATER(a, b) ((a) < (b) ? (b) : (a))
#include "networks.h" /* written by hatch_build.py: sort_columns_N and middle_N for small windows */

/* `count` pixels of a row beginning with `from`, the outermost ones repeated beyond its ends, without negative zeros. */
INLINE widen(const float *row, ptrdiff_t columns, ptrdiff_t from, ptrdiff_t count, float *restrict out, int32_t *has_nan) {
  ptrdiff_t i = 0, inside = columns - from < count ? columns - from : count;
  int32_t found = 0;
  for (; from + i < 0; i++)
    out[i] = row[0] + 0.0f;
  for (; i < inside; i++) {
    float value = row[from + i] + 0.0f;
    found |= value != value;
    out[i] = value;
  }
  for (; i < count; i++)
    out[i] = row[columns - 1] + 0.0f;
  *has_nan |= found;
}

static inline ptrdiff_t nearest(ptrdiff_t y, ptrdiff_t rows) { return y < 0 ? 0 : y < rows ? y : rows - 1; }

/* A ring of `size` widened rows; row y is in the place y + size / 2, modulo size. */
#define MEDIAN(size)                                                                                                           \
  KERNEL median_##size(const float *image, ptrdiff_t rows, ptrdiff_t columns, int32_t *has_nan, float *out) {                  \
    ptrdiff_t depth = size / 2, wide = columns + size - 1;                                                                     \
    float *room = malloc(2 * size * wide * sizeof *room), *sorted[size];                                                       \
    if (!room)                                                                                                                 \
      return 1;                                                                                                                \
    for (ptrdiff_t k = 0; k < size; k++)                                                                                       \
      sorted[k] = room + (size + k) * wide;                                                                                    \
    for (ptrdiff_t y = -depth; y < rows + depth; y++) {                                                                        \
      widen(image + nearest(y, rows) * columns, columns, -depth, wide, room + (y + depth) % size * wide, has_nan);             \
      if (y < depth)                                                                                                           \
        continue;                                                                                                              \
      const float *at[size];                                                                                                   \
      for (ptrdiff_t k = 0; k < size; k++)                                                                                     \
        at[k] = room + (y - depth + k) % size * wide;                                                                          \
      sort_columns_##size(at, wide, sorted);                                                                                   \
      middle_##size(sorted, columns, out + (y - depth) * columns);                                                             \
    }                                                                                                                          \
    free(room);                                                                                                                \
    return 0;                                                                                                                  \
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
KERNEL median_of(const float *image, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t size, const Step *steps, ptrdiff_t of_columns,
                 ptrdiff_t count, ptrdiff_t registers, ptrdiff_t pitch, ptrdiff_t stretch, ptrdiff_t result,
                 int32_t *has_nan, float *out) {
  ptrdiff_t depth = size / 2;
  float *room = malloc(registers * pitch * sizeof *room);
  if (!room)
    return 1;
  for (ptrdiff_t y = 0; y < rows; y++)
    for (ptrdiff_t x = 0; x < columns; x += stretch) {
      ptrdiff_t length = columns - x < stretch ? columns - x : stretch;
      for (ptrdiff_t k = 0; k < size; k++)
        widen(image + nearest(y + k - depth, rows) * columns, columns, x - depth, length + size - 1, room + k * pitch, has_nan);
      follow(steps, of_columns, room, length + size - 1);
      follow(steps + of_columns, count - of_columns, room, length);
      memcpy(out + y * columns + x, room + result, length * sizeof *out);
    }
  free(room);
  return 0;
}
