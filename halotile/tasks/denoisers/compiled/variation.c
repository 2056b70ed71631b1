/* Total variation: all dual steps in one way down the image, each a row behind the one before. See _minimise in tv.py. */
#include "kernels.h"

/* `across` has the value of the pixel before its first one; `below` is NULL in the last row. */
INLINE step_row(const float *image, float *current, const float *below, const float *above, float *restrict down,
                float *restrict across, ptrdiff_t count, float ratio, float step) {
  for (ptrdiff_t i = 0; i < count; i++) {
    float slope = below ? below[i] - current[i] : 0.0f, beside = i + 1 < count ? current[i + 1] - current[i] : 0.0f;
    float damping = sqrtf(slope * slope + beside * beside) * ratio + 1.0f;
    down[i] = (down[i] - slope) / damping;
    across[i] = (across[i] - beside) / damping;
  }
  for (ptrdiff_t i = 0; i < count; i++)
    current[i] = image[i] - (((down[i] + across[i]) - above[i]) - across[i - 1]) * step;
}

KERNEL total_variation(const float *image, ptrdiff_t rows, ptrdiff_t columns, float ratio, float step, ptrdiff_t iterations,
                       float *current) {
  ptrdiff_t wide = columns + 1;
  float *down = calloc((rows + 1) * columns, sizeof *down), *across = calloc(rows * wide, sizeof *across);
  if (down && across) {
    memcpy(current, image, rows * columns * sizeof *current);
    for (ptrdiff_t front = 0; front < rows + iterations - 1; front++)
      for (ptrdiff_t n = front < rows ? 0 : front - rows + 1; n < iterations && n <= front; n++) {
        ptrdiff_t y = front - n;
        float *row = current + y * columns;
        step_row(image + y * columns, row, y + 1 < rows ? row + columns : NULL, down + y * columns, down + (y + 1) * columns,
                 across + y * wide + 1, columns, ratio, step);
      }
  }
  int failed = !(down && across);
  free(down);
  free(across);
  return failed;
}
