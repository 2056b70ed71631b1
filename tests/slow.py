"""A denoiser that takes as long as a file says."""

from __future__ import annotations

import time
from pathlib import Path

from tests.support import Image


def slow(pixels: Image, folder: str) -> Image:
    """The image, a little nearer to grey."""
    time.sleep(float(Path(folder, "pace").read_text()))
    half, less = pixels.dtype.type(0.5), pixels.dtype.type(0.98)
    greyer: Image = (pixels - half) * less + half
    return greyer
