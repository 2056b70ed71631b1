"""Holes of the image that a job denoises: the values that stand for one, and how many there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from halotile.graphs.jobs.denoise.job import Denoising
from halotile.storage.arrays import Source
from halotile.storage.rim import Readable
from halotile.storage.views import WithoutValue
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.holes import Holes, describe_value, fill_reach
from halotile.tasks.noise.estimate import sample_regions

SAMPLES = 16
"""Squares in which holes are counted while a job is planned."""


class Holed(NamedTuple):
    """The values that stand for a hole, and a note about them."""

    holes: Holes | None
    notes: tuple[str, ...]

    def view(self, source: Readable) -> Readable:
        """The image with NaN in its holes."""
        if self.holes is None or self.holes.value is None:
            return source
        return WithoutValue(source, self.holes.value)

    def halo(self, denoiser: Denoiser, depth: int, dims: int) -> int:
        """Pixels that a block reads beyond its halo, to fill holes."""
        possible = self.holes is not None and not denoiser.takes_valid and depth > 0
        return fill_reach(dims) if possible else 0


def choose_holes(job: Denoising, original: Source, source: Readable, spatial: Sequence[int]) -> Holed:
    """Decide which values stand for a hole; ``source`` is the image with the axes that the denoiser takes."""
    wanted, dtype = job.input.nodata, source.dtype
    value = original.nodata if wanted == "auto" else None
    if isinstance(wanted, int | float) and not np.isnan(wanted):
        value = float(dtype.type(wanted))
    if wanted == "none" or (value is None and dtype.kind != "f"):
        return Holed(None, ())
    found = Holed(Holes(value, 0.0), ())
    view = found.view(source)
    squares = sample_regions(source.shape, SAMPLES, tuple(spatial[-2:]))
    pixels = np.concatenate([view.read(square).astype(np.float64).ravel() for square in squares])
    measured = pixels[np.isfinite(pixels)]
    share = float(np.isnan(pixels).mean())
    holes = Holes(value, float(measured.mean()) if measured.size else 0.0, share)
    if not holes.are_likely:
        return Holed(holes, ())
    kept = f"pixels of {describe_value(value, dtype)} are holes: they stay as they are, and no other pixel depends on them"
    return Holed(
        holes, (f"{kept} ({share:.2g} of the sampled pixels). To denoise them too, write input.nodata: none",)
    )
