/* Medians of small windows by sorting networks, of large ones by counting. Of NaN they only tell that there are some: the lesser of NaN and a number depends on their order. */
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
MEDIAN(7)


/* The pixels of a window as bits by rank, with their number in each part of PART ranks and in each group of GROUP parts. */
typedef struct {
  uint64_t *bits;
  int32_t *counts, *groups;
  ptrdiff_t part;   /* where the last median was: the next one is near it, but in stripes and the like */
  ptrdiff_t before; /* pixels of the window in all parts before that */
} Window;
enum { WORD = 64, PART = 512, GROUP = 64 };

/* Let a pixel enter, `by` 1, or leave, -1. */
INLINE toggle(Window *window, uint32_t rank, int32_t by) {
  ptrdiff_t part = rank / PART;
  window->bits[rank / WORD] ^= (uint64_t)1 << rank % WORD;
  window->counts[part] += by;
  window->groups[part / GROUP] += by;
  window->before += part < window->part ? by : 0;
}

/* Go to the part of the pixel of a window that has `wanted` before it, by whole groups where it is far. */
INLINE go_to(Window *window, ptrdiff_t wanted) {
  ptrdiff_t part = window->part, before = window->before;
  while (before > wanted) {
    while (part % GROUP == 0 && before - window->groups[part / GROUP - 1] > wanted) {
      part -= GROUP;
      before -= window->groups[part / GROUP];
    }
    before -= window->counts[--part];
  }
  while (before + window->counts[part] <= wanted) {
    before += window->counts[part++];
    while (part % GROUP == 0 && before + window->groups[part / GROUP] <= wanted) {
      before += window->groups[part / GROUP];
      part += GROUP;
    }
  }
  window->part = part;
  window->before = before;
}

/* The rank of the pixel of a window that has `wanted` before it. */
static inline __attribute__((always_inline)) uint32_t pixel_after(Window *window, ptrdiff_t wanted) {
  go_to(window, wanted);
  wanted -= window->before;
  const uint64_t *word = window->bits + window->part * (PART / WORD);
  for (int count; (count = __builtin_popcountll(*word)) <= wanted; word++)
    wanted -= count;
  uint64_t left = *word;
  while (wanted--)
    left &= left - 1;
  return (uint32_t)((word - window->bits) * WORD + __builtin_ctzll(left));
}

/* Sort keys, and where they come from, by one digit of DIGIT bits after the other; the result is in keys[1] and origins[1]. */
enum { DIGIT = 11, DIGITS = 3 };
INLINE sort(uint32_t *keys[2], uint32_t *origins[2], ptrdiff_t count) {
  for (int pass = 0; pass < DIGITS; pass++) {
    const uint32_t *from = keys[pass % 2], *origin = origins[pass % 2];
    uint32_t *to = keys[1 - pass % 2], *moved = origins[1 - pass % 2], starts[1 << DIGIT] = {0};
    for (ptrdiff_t i = 0; i < count; i++)
      starts[from[i] >> pass * DIGIT & ((1 << DIGIT) - 1)]++;
    for (uint32_t digit = 0, start = 0; digit < 1 << DIGIT; digit++) {
      uint32_t here = starts[digit];
      starts[digit] = start;
      start += here;
    }
    for (ptrdiff_t i = 0; i < count; i++) {
      uint32_t place = starts[from[i] >> pass * DIGIT & ((1 << DIGIT) - 1)]++;
      to[place] = from[i];
      moved[place] = origin[i];
    }
  }
}

/* Every pixel of the widened image, at most UINT32_MAX of them, has a rank. The window goes right, down, left, down: a column or a row enters as another one leaves. */
KERNEL median_of(const float *image, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t size, int32_t *has_nan, float *out) {
  ptrdiff_t depth = size / 2, wide = columns + size - 1, count = (rows + size - 1) * wide, parts = count / PART + 1;
  uint32_t *room = malloc(4 * count * sizeof *room);
  Window window = {
      .bits = calloc(parts * (PART / WORD), sizeof(uint64_t)),
      .counts = calloc(parts, sizeof(int32_t)),
      .groups = calloc(parts / GROUP + 1, sizeof(int32_t)),
  };
  int failed = !room || !window.bits || !window.counts || !window.groups;
  if (!failed) {
    uint32_t *keys[2] = {room, room + count}, *origins[2] = {room + 2 * count, room + 3 * count}, *ranks = room;
    for (ptrdiff_t y = 0; y < rows + size - 1; y++)
      widen(image + nearest(y - depth, rows) * columns, columns, -depth, wide, (float *)keys[0] + y * wide, has_nan);
    for (ptrdiff_t i = 0; i < count; i++) {
      uint32_t bits;
      memcpy(&bits, &keys[0][i], sizeof bits);
      keys[0][i] = bits ^ (bits >> 31 ? UINT32_MAX : (uint32_t)1 << 31); /* in the order of the numbers */
      origins[0][i] = (uint32_t)i;
    }
    sort(keys, origins, count);
    for (ptrdiff_t i = 0; i < count; i++)
      ranks[origins[1][i]] = (uint32_t)i;
    for (ptrdiff_t y = 0; y < size; y++)
      for (ptrdiff_t x = 0; x < size; x++)
        toggle(&window, ranks[y * wide + x], 1);
    for (ptrdiff_t y = 0, x = 0, step = 1; y < rows; y++, step = -step) {
      for (;; x += step) {
        uint32_t key = keys[1][pixel_after(&window, size * size / 2)];
        key ^= key >> 31 ? (uint32_t)1 << 31 : UINT32_MAX;
        memcpy(out + y * columns + x, &key, sizeof key);
        if (x + step < 0 || x + step >= columns)
          break;
        const uint32_t *old = ranks + y * wide + (step > 0 ? x : x + size - 1);
        for (ptrdiff_t k = 0; k < size; k++) {
          toggle(&window, old[k * wide], -1);
          toggle(&window, old[k * wide + step * size], 1);
        }
      }
      const uint32_t *old = ranks + y * wide + x;
      for (ptrdiff_t k = 0; k < size && y + 1 < rows; k++) {
        toggle(&window, old[k], -1);
        toggle(&window, old[k + size * wide], 1);
      }
    }
  }
  free(room);
  free(window.bits);
  free(window.counts);
  free(window.groups);
  return failed;
}
