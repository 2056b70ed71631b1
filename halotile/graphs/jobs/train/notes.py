"""Notes of a training on the images that it learns from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halotile.storage.arrays import Source
from halotile.storage.views import readable_parts
from halotile.tasks.training.patches import PatchSource, TrainingImage

UNLIKE = 10.0
"""Ratio of brightness, offset included, of the brightest and the darkest image or channel above which there is a note."""
SQUARES = 16
"""Squares of each channel that are looked at."""


def notes_of_images(patches: PatchSource, sources: Sequence[Source]) -> list[str]:
    """Return what the images lack, what of them is left out, and what one network cannot learn together; ``sources`` are the images as they are stored."""
    notes = []
    if not patches.has_held_out:
        notes.append("the images are too small for patches that are held out: the curve has no validation")
    values = [image.values for image in patches.images]
    if ends := sorted({end for each in values for end in each.saturated}):
        listed = ", ".join(f"{end:g}" for end in ends[:3])
        notes.append(
            f"pixels of {listed} are saturated: those on their own, such as hot pixels, are left out"
        )
    seconds = [image.second_values for image in patches.images]
    if far := next((each.far for each in (*values, *seconds) if each.far), None):
        notes.append(
            f"pixels of {far.value:.10g}, far from all others ({far.low:,.5g} to {far.high:,.5g}), are left out: write input.nodata: {far.value:.10g} "
            "here and for the denoising, or input.nodata: none if they are measurements"
        )
    sizes = [(each.size, source.path) for each, source in zip(values, sources, strict=True) if each.size]
    if sizes and max(sizes)[0] > UNLIKE * min(sizes)[0]:
        (low, dark), (high, bright) = min(sizes), max(sizes)
        notes.append(
            f"{bright} is {high / low:,.3g} times as bright as {dark}: one network learns next to nothing from the darkest images. Train one for "
            "each kind, or scale them to the same brightness"
        )
    return notes + _notes_of_channels(patches.images[0], sources[0].path)


def _notes_of_channels(image: TrainingImage, path: str) -> list[str]:
    """Return a note on channels of very unlike brightness."""
    if image.channels < 2:
        return []
    sizes = [(size, channel) for channel in range(image.channels) if (size := _size(image, channel))]
    if not sizes or max(sizes)[0] <= UNLIKE * min(sizes)[0]:
        return []
    (low, dark), (high, bright) = min(sizes), max(sizes)
    return [
        f"channel {bright} of {path} is {high / low:,.3g} times as bright as channel {dark}: a short training mixes channels that show different things, "
        "most of all such ones. Give it thousands of steps, or train on each channel"
    ]


def _size(image: TrainingImage, channel: int) -> float:
    """Return the mean of the absolute values of a channel, 0 where none is known."""
    parts = readable_parts(image.source, image.sampled(SQUARES, channel))
    values = np.concatenate([np.zeros(0), *(part[np.isfinite(part)] for _, part in parts)])
    return float(np.abs(values).mean()) if values.size else 0.0
