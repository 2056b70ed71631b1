/* Symmetric weights along rows and columns: see weigh_symmetric in shifted_sums.py. */
#include "kernels.h"

#define STRETCH 512 /* pixels whose sum stays in the fastest cache while all weights are applied */

INLINE weigh(const float *const *at, const float *weights, ptrdiff_t depth, ptrdiff_t count, float *restrict out) {
  for (ptrdiff_t start = 0; start < count; start += STRETCH) {
    ptrdiff_t end = start + STRETCH < count ? start + STRETCH : count;
    for (ptrdiff_t i = start; i < end; i++)
      out[i] = at[depth][i] * weights[0];
    ptrdiff_t k = 1;
    for (; k < depth; k += 2) { /* two at a time: half as many reads and writes of the sum */
      const float *a = at[depth - k], *b = at[depth + k], *c = at[depth - k - 1], *d = at[depth + k + 1];
      float near = weights[k], far = weights[k + 1];
      for (ptrdiff_t i = start; i < end; i++)
        out[i] = (out[i] + (a[i] + b[i]) * near) + (c[i] + d[i]) * far;
    }
    if (k == depth) {
      const float *a = at[0], *b = at[2 * depth];
      for (ptrdiff_t i = start; i < end; i++)
        out[i] += (a[i] + b[i]) * weights[depth];
    }
  }
}

KERNEL smooth(const float *image, ptrdiff_t rows, ptrdiff_t columns, const float *down, ptrdiff_t above, const float *across,
              ptrdiff_t before, float *out) {
  float *row = malloc((columns + 2 * before) * sizeof *row);
  const float **at = malloc((2 * (above > before ? above : before) + 1) * sizeof *at);
  if (row && at)
    for (ptrdiff_t y = 0; y < rows; y++) {
      for (ptrdiff_t k = -above; k <= above; k++) {
        ptrdiff_t there = y + k < 0 ? 0 : y + k < rows ? y + k : rows - 1;
        at[above + k] = image + there * columns;
      }
      weigh(at, down, above, columns, row + before);
      for (ptrdiff_t k = 0; k < before; k++) {
        row[k] = row[before];
        row[before + columns + k] = row[before + columns - 1];
      }
      for (ptrdiff_t k = 0; k <= 2 * before; k++)
        at[k] = row + k;
      weigh(at, across, before, columns, out + y * columns);
    }
  int failed = !(row && at);
  free(row);
  free(at);
  return failed;
}
