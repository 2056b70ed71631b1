"""Stripes of the image of a job: what samples show, the decision, and the pass that measures every line."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from halotile.errors import ConfigError, DamagedData, InputUnreadable
from halotile.graphs.jobs.denoise.image import JobImage, Striped
from halotile.graphs.kinds.base import Pass, Records
from halotile.graphs.words import shape_text
from halotile.storage.arrays import open_source
from halotile.storage.grid import Grid, Region
from halotile.storage.images.planes import channel_titles
from halotile.storage.rim import Readable
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.layout import Layout
from halotile.storage.sharded.output import ShardWriter, create_metadata
from halotile.tasks.image_task import ImageTask
from halotile.tasks.inner_tiles import Roles, respanned
from halotile.tasks.noise import stripes
from halotile.tasks.noise.estimate import spread_evenly
from halotile.tasks.noise.stripes import LineCorrections, StripedLines, WithoutStripes

PHASE = "stripes"
# Places where stripes are looked for along each axis (half of them in each of several channels), channels, lines of a
# place, and means along a line.
PLACES, CHANNELS, SAMPLED_LINES, SAMPLED_MEANS = 4, 8, 512, 128
# Share of lines that have to be off in all parts of their length for stripes to be clear: noise alone has 0.07.
CLEAR = 0.4
# Correlation of offsets and gains, relative to that of noise, from which lines differ by factors; and standard
# deviation of these from which removing them leaves less than offsets alone.
ALIKE, SPREAD = 6.0, 0.04
PLANES = 8  # planes along each axis whose lines are written together


def choose_stripes(image: JobImage) -> Striped:
    """Decide whether stripes are removed; a resumed run keeps the decision that it began with."""
    view, roles, previous = image.view, image.roles, image.previous
    wanted, is_open = image.job.input.stripes, True
    if not isinstance(wanted, str):
        given = _lines(view, roles, str(wanted["axis"]), gain=bool(wanted.get("gain", False)))
        if given is None:
            raise ConfigError(
                f"input.stripes.axis is {wanted['axis']}, and the image has {shape_text(view.shape)} pixels along {''.join(roles.axes)}: stripes are "
                f"measured on {stripes.LEAST_LINES} lines or more of {stripes.LEAST_LENGTH} pixels or more along y and x. Leave input.stripes out."
            )
        possible, is_open = [given], False
    elif wanted == "auto" and previous is not None:
        known = previous["identity"].get("stripes")
        possible, is_open = [StripedLines(**known)] if known else [], False
    else:
        possible = [lines for axis in "xy" if (lines := _lines(view, roles, axis))]
    # Each by itself: one channel's stripes are not another's.
    axis = roles.axes.index("c") if "c" in roles.axes else None
    length = 1 if axis is None else view.shape[axis]
    channels = [*dict.fromkeys(spread_evenly(range(length), CHANNELS))]
    seen = []
    for lines, n in itertools.product(possible, channels):
        at = {} if axis is None else {axis: (n, n + 1)}
        if found := _seen(view, lines, at, PLACES // min(2, length), anyhow=not is_open):
            seen.append((*found, lines, n))
    if not seen:
        return Striped()
    rms, _, gain, lines, _ = max(seen, key=lambda each: (each[1], each[0]))
    those = [n for *_, along, n in seen if along == lines]
    named = "" if len(those) == length else ", ".join(channel_titles(image.original)[n] for n in those)
    return Striped(None if wanted == "none" else lines, roles.axes[lines.across], rms, gain, named)


def _lines(view: Readable, roles: Roles, axis: str, *, gain: bool = False) -> StripedLines | None:
    """Return the lines that differ along an axis; None where they are too few or too short."""
    if not {"x", "y"} <= set(roles.axes):
        return None
    across, along = roles.axes.index(axis), roles.axes.index("y" if axis == "x" else "x")
    is_enough = view.shape[across] >= stripes.LEAST_LINES and view.shape[along] >= stripes.LEAST_LENGTH
    return StripedLines(across, along, gain) if is_enough else None


def _seen(
    view: Readable, lines: StripedLines, channel: Mapping[int, tuple[int, int]], count: int, *, anyhow: bool
) -> tuple[float, bool, bool] | None:
    """Return the standard deviation of stripes at a few places of a channel, and True if they are clear, and if they are factors that are worth removing.

    None where they are not clear, unless they are wanted ``anyhow``.
    """
    plane = (lines.across, lines.along, *channel)
    counts = tuple(1 if axis in plane else n for axis, n in enumerate(view.shape))
    width, places = min(SAMPLED_LINES, view.shape[lines.across]), {}
    for number, at in enumerate(spread_evenly([*np.ndindex(counts)], count)):
        start = number * (view.shape[lines.across] - width) // (count - 1)
        spans = {lines.across: (start, start + width), **channel}
        place = respanned(Region(at, tuple(i + 1 for i in at)), spans)
        with suppress(DamagedData, InputUnreadable), np.errstate(invalid="ignore"):  # a run names damaged blocks
            if place not in places:
                means = stripes.means_along(view, lines, place, SAMPLED_MEANS)
                places[place] = means, stripes.agreement(means)
    is_clear = bool(np.median([share for _, share in places.values()] or [0.0]) > CLEAR)
    if not is_clear and not anyhow:
        return None
    found = []
    for means, share in places.values():
        offsets, alike, gains = stripes.line_offsets(means), 0.0, np.zeros(1)
        if share > CLEAR:
            gains = stripes.with_gains(means, offsets)[1]
            alike = math.sqrt(width) * np.corrcoef(offsets, gains)[0, 1]
        found.append((offsets.std(), abs(alike), gains.std()))
    rms, alikes, spreads = np.array(found or [(0.0, 0.0, 0.0)]).T
    are_factors = np.median(alikes) > ALIKE and np.median(spreads) > SPREAD
    return float(np.sqrt(np.mean(rms**2))), is_clear, bool(are_factors)


def grid_of(corrections: LineCorrections) -> Grid:
    """Return the blocks of the pass that measures lines: a group of lines, of several planes at once."""
    edges = {corrections.lines.across: stripes.GROUP, corrections.lines.along: 2}
    shape = corrections.shape
    return Grid(shape, tuple(min(edges.get(axis, PLANES), n) for axis, n in enumerate(shape)), ((0, 0),) * len(shape))


def corrections_pass(
    corrections: LineCorrections, axes: tuple[str, ...], directory: RunDirectory, threads: int
) -> Pass:
    """Return the pass that measures every line, and writes the corrections beside the run."""
    grid, path = grid_of(corrections), kept_at(directory)
    ones, units = (1.0,) * len(axes), (None,) * len(axes)
    layout = Layout(grid.shape, str(corrections.dtype), grid.block, grid.block, "none", axes, ones, units, ome=False)
    create_metadata(path, layout)
    images = ((ShardWriter(path, layout), replace(corrections, kept={})),)
    return Pass(PHASE, ImageTask(grid, images, io_threads=threads), Records(path.parent, PHASE, (path,), layout))


def kept_at(directory: RunDirectory) -> Path:
    """Return the place of the corrections that a run has measured."""
    return directory.state_path / "stripes" / "lines.zarr"


def with_kept(source: Readable, directory: RunDirectory) -> Readable:
    """Return an image whose corrections are those that a run has measured, where there are any."""
    path = kept_at(directory)
    if not isinstance(source, WithoutStripes) or not path.exists():
        return source
    return replace(source, corrections=open_source(path))
