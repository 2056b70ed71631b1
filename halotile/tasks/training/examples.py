"""Example images of a training: patches as they are, and as the network denoises them so far."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.storage.images.png import contrast, encode_png, side_by_side
from halotile.storage.images.sheet import grey

EXAMPLES, EDGE = 4, 64
"""Patches that are drawn, at most, and the pixels of their edges: the page of a run is sent them every second."""
GAP_PIXELS = 2


def draw_examples(noisy: NDArray[Any], denoised: NDArray[Any]) -> list[bytes]:
    """Draw patches in a row above the same ones denoised, as a PNG; in each channel both have the contrast of the noisy one.

    Parameters
    ----------
    noisy, denoised : ndarray
        Shape (patches, channels, rows, columns): the first of one or two channels is drawn in grey, the first three of more in colours.

    Examples
    --------
    >>> import numpy as np
    >>> b"".join(draw_examples(np.zeros((4, 1, 64, 64)), np.zeros((4, 1, 64, 64))))[1:4]
    b'PNG'
    """
    colours = 3 if noisy.shape[1] >= 3 else 1
    above, below = (patches[:EXAMPLES, :colours, :EDGE, :EDGE] for patches in (noisy, denoised))
    levels = [[contrast([channel]) for channel in patch] for patch in above]
    rows = [
        side_by_side([_drawn(patch, ends) for patch, ends in zip(patches, levels, strict=True)], GAP_PIXELS)
        for patches in (above, below)
    ]
    return encode_png(side_by_side([row.swapaxes(0, 1) for row in rows], GAP_PIXELS).swapaxes(0, 1))


def _drawn(patch: NDArray[Any], levels: list[tuple[float, float]]) -> NDArray[np.uint8]:
    """Draw each channel from black to white between its own levels: channels may be of very unlike brightness."""
    scaled = [
        (channel - low) / ((high - low) or 1.0) for channel, (low, high) in zip(patch, levels, strict=True)
    ]
    return grey(np.stack(scaled), 0, 1)
