/* Non-local means: see NonLocalMeans.apply in nlm.py. A part of the plane at a time, whose sums stay in the cache for all shifts. */
#include "kernels.h"

#define HEIGHT 64
#define WIDTH 512

#define ONE(k) at[k][i]
#define TWO(k) (ONE(k) + ONE(k + 1))
#define FOUR(k) (TWO(k) + TWO(k + 2))
#define EIGHT(k) (FOUR(k) + FOUR(k + 4))
#define SUM(size, terms)                                                                                                       \
  case size:                                                                                                                   \
    for (ptrdiff_t i = 0; i < count; i++)                                                                                      \
      out[i] = terms;                                                                                                          \
    break;

/* Sums in the order of box_sum in shifted_sums.py. */
INLINE sum(const float *const *at, ptrdiff_t size, ptrdiff_t count, float *restrict out) {
  switch (size) {
    SUM(1, ONE(0))
    SUM(3, ONE(0) + TWO(1))
    SUM(5, ONE(0) + FOUR(1))
    SUM(7, (ONE(0) + TWO(1)) + FOUR(3))
    SUM(9, ONE(0) + EIGHT(1))
    SUM(11, (ONE(0) + TWO(1)) + EIGHT(3))
    SUM(13, (ONE(0) + FOUR(1)) + EIGHT(5))
    SUM(15, ((ONE(0) + TWO(1)) + FOUR(3)) + EIGHT(7))
  }
}

/* See exponential_ in nlm.py. */
INLINE exponential_of(float *values, ptrdiff_t count) {
  for (ptrdiff_t i = 0; i < count; i++) {
    float x = values[i], shifted = x * 1.44269504f + 12582912.0f, power = shifted - 12582912.0f;
    float rest = (x - power * 0.693359375f) - power * -2.12194440e-4f;
    float series = 1.9875691500e-4f;
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4B400000u + 127u) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    float result = ((series * (rest * rest) + rest) + 1.0f) * scale;
    values[i] = x < -87.0f ? 0.0f : result;
  }
}

KERNEL exponential(float *values, ptrdiff_t count) {
  exponential_of(values, count);
  return 0;
}

struct plane {
  const float *pixels;
  ptrdiff_t rows, columns;
};

/* Parts of the plane: rows y0 to y1, columns x0 to x1; their sums, with WIDTH numbers a row. */
struct part {
  ptrdiff_t y0, y1, x0, x1;
  float *total, *weights;
};

INLINE square_differences(struct plane plane, ptrdiff_t y, ptrdiff_t dy, ptrdiff_t dx, ptrdiff_t from, ptrdiff_t to,
                          float *restrict out) {
  ptrdiff_t left = dx < 0 ? -dx : 0, right = plane.columns - (dx > 0 ? dx : 0), a = from > left ? from : left, b = to < right ? to : right;
  if (y < 0 || y + dy >= plane.rows) { /* no pairs in this row */
    memset(out, 0, (to - from) * sizeof *out);
    return;
  }
  for (ptrdiff_t x = from; x < a; x++)
    out[x - from] = 0.0f;
  const float *here = plane.pixels + y * plane.columns, *there = here + dy * plane.columns;
  for (ptrdiff_t x = a; x < b; x++) {
    float difference = here[x] - there[x + dx];
    out[x - from] = difference * difference;
  }
  for (ptrdiff_t x = b; x < to; x++)
    out[x - from] = 0.0f;
}

/* Adds to row y of a part the pixels (dy, dx) away, the weights of which begin with that for column `from`. */
INLINE add(struct plane plane, struct part part, ptrdiff_t y, ptrdiff_t dy, ptrdiff_t dx, const float *restrict weight,
           ptrdiff_t from, ptrdiff_t to) {
  if (y < part.y0 || y >= part.y1)
    return;
  ptrdiff_t a = from > part.x0 ? from : part.x0, b = to < part.x1 ? to : part.x1, row = (y - part.y0) * WIDTH - part.x0;
  const float *pixels = plane.pixels + (y + dy) * plane.columns;
  float *restrict total = part.total, *restrict weights = part.weights;
  for (ptrdiff_t x = a; x < b; x++) {
    total[row + x] += weight[x - from] * pixels[x + dx];
    weights[row + x] += weight[x - from];
  }
}

/* Adds all pairs of pixels (dy, dx) apart of which one is in the part: those whose upper pixel is in rows `first` to `last` and columns
   `from` to `to`. `squares` holds the rows that a patch covers, each in the place of the one `high` rows below it. */
INLINE compare(struct plane plane, struct part part, ptrdiff_t dy, ptrdiff_t dx, ptrdiff_t high, ptrdiff_t wide, float allowance,
               float steepness, float *scratch, ptrdiff_t room) {
  ptrdiff_t left = dx < 0 ? -dx : 0, right = plane.columns - (dx > 0 ? dx : 0);
  ptrdiff_t from = dx > 0 ? part.x0 - dx : part.x0, to = dx < 0 ? part.x1 - dx : part.x1, first = part.y0 - dy;
  ptrdiff_t last = part.y1 < plane.rows - dy ? part.y1 : plane.rows - dy;
  from = from > left ? from : left, to = to < right ? to : right, first = first > 0 ? first : 0;
  if (from >= to)
    return;
  float *sums = scratch, *weight = scratch + room, *squares = scratch + 2 * room;
  const float *at[15];
  /* Upwards, so that each pixel gets its partner below before that above. */
  for (ptrdiff_t row = last - 1 + high / 2; row >= first - high / 2; row--) {
    square_differences(plane, row, dy, dx, from - wide / 2, to + wide / 2, squares + (row + high) % high * room);
    ptrdiff_t y = row + high / 2;
    if (y >= last)
      continue;
    for (ptrdiff_t k = 0; k < high; k++)
      at[k] = squares + (row + k + high) % high * room;
    sum(at, high, to - from + wide - 1, sums);
    for (ptrdiff_t k = 0; k < wide; k++)
      at[k] = sums + k;
    sum(at, wide, to - from, weight);
    for (ptrdiff_t i = 0; i < to - from; i++) {
      float excess = weight[i] - allowance;
      weight[i] = (excess < 0.0f ? 0.0f : excess) * steepness;
    }
    exponential_of(weight, to - from);
    add(plane, part, y, dy, dx, weight, from, to);
    add(plane, part, y + dy, -dy, -dx, weight, from + dx, to + dx);
  }
}

KERNEL nonlocal_means(const float *image, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t high, ptrdiff_t wide, ptrdiff_t down,
                      ptrdiff_t across, float allowance, float steepness, float *out) {
  struct plane plane = {image, rows, columns};
  down = down < rows ? down : rows - 1, across = across < columns ? across : columns - 1;
  ptrdiff_t room = WIDTH + across + wide;
  float *scratch = malloc((2 * HEIGHT * WIDTH + (high + 2) * room) * sizeof *scratch);
  if (!scratch)
    return 1;
  for (ptrdiff_t y0 = 0; y0 < rows; y0 += HEIGHT)
    for (ptrdiff_t x0 = 0; x0 < columns; x0 += WIDTH) {
      ptrdiff_t y1 = y0 + HEIGHT < rows ? y0 + HEIGHT : rows, x1 = x0 + WIDTH < columns ? x0 + WIDTH : columns;
      struct part part = {y0, y1, x0, x1, scratch, scratch + HEIGHT * WIDTH};
      for (ptrdiff_t y = y0; y < y1; y++)
        for (ptrdiff_t x = x0; x < x1; x++) {
          part.total[(y - y0) * WIDTH + x - x0] = image[y * columns + x];
          part.weights[(y - y0) * WIDTH + x - x0] = 1.0f;
        }
      for (ptrdiff_t dy = 0; dy <= down; dy++)
        for (ptrdiff_t dx = dy ? -across : 1; dx <= across; dx++)
          compare(plane, part, dy, dx, high, wide, allowance, steepness, scratch + 2 * HEIGHT * WIDTH, room);
      for (ptrdiff_t y = y0; y < y1; y++)
        for (ptrdiff_t x = x0; x < x1; x++)
          out[y * columns + x] = part.total[(y - y0) * WIDTH + x - x0] / part.weights[(y - y0) * WIDTH + x - x0];
    }
  free(scratch);
  return 0;
}
