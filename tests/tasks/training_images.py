"""Images in memory that trainings draw patches from."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.tasks.training.patches import PatchSource, TrainingImage
from tests.tasks.denoising import Counted


def source_of(pixels: NDArray[Any], patch: int = 16, **options: Any) -> PatchSource:
    return PatchSource((TrainingImage(Counted(pixels), (pixels.ndim - 2, pixels.ndim - 1), **options),), patch)


def numbered(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """An image in which every pixel has another value."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
