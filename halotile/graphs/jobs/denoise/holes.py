"""Holes of the image that a job denoises: the values that stand for one, and how many there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from halotile.graphs.jobs.denoise.job import Denoising
from halotile.storage.arrays import Source
from halotile.storage.rim import Readable
from halotile.storage.views import WithoutValue, readable_parts
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


def choose_holes(
    job: Denoising,
    original: Source,
    source: Readable,
    spatial: Sequence[int],
    previous: Mapping[str, Any] | None,
) -> Holed:
    """Decide which values stand for a hole; ``source`` is the image with the axes that the denoiser takes.

    A resumed run keeps the mean that it began with.
    """
    wanted, dtype = job.input.nodata, source.dtype
    value = original.nodata if wanted == "auto" else None
    if isinstance(wanted, int | float) and not np.isnan(wanted):
        value = float(dtype.type(wanted))
    if wanted == "none" or (value is None and dtype.kind != "f"):
        return Holed(None, ())
    found = Holed(Holes(value, 0.0), ())
    known = previous["identity"].get("holes") if previous else None
    if known and known["value"] == value:
        return _noted(Holes(**known), dtype)
    view = found.view(source)
    squares = sample_regions(source.shape, SAMPLES, tuple(spatial[-2:]))
    parts = [part.astype(np.float64).ravel() for _, part in readable_parts(view, squares)]
    pixels = np.concatenate([*parts, np.zeros(0)])
    measured = pixels[np.isfinite(pixels)]
    share = float(np.isnan(pixels).mean()) if pixels.size else 0.0
    return _noted(Holes(value, float(measured.mean()) if measured.size else 0.0, share), dtype)


def _noted(holes: Holes, dtype: np.dtype[np.generic]) -> Holed:
    if not holes.are_likely:
        return Holed(holes, ())
    kept = f"pixels of {describe_value(holes.value, dtype)} are holes: they stay as they are, and no other pixel depends on them"
    return Holed(
        holes,
        (f"{kept} ({holes.share:.2g} of the sampled pixels). To denoise them too, write input.nodata: none",),
    )
