"""Stripes of the image of a job: what samples show, the decision, and the pass that measures every line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from halotile.errors import ConfigError, DamagedData, InputUnreadable
from halotile.graphs.amounts import shape_text
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.base import Pass, Records
from halotile.storage.arrays import open_source
from halotile.storage.grid import Grid, Region
from halotile.storage.rim import Readable
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.layout import Layout
from halotile.storage.sharded.output import ShardWriter, create_metadata
from halotile.tasks.image_task import ImageTask
from halotile.tasks.noise import stripes
from halotile.tasks.noise.stripes import LineCorrections, Lines, WithoutOwnStripes, WithoutStripes
from halotile.tasks.roles import Roles, respanned

PHASE = "stripes"
PLACES, SAMPLED_LINES, SAMPLED_MEANS = 4, 512, 128
"""Places where stripes are looked for along each axis, lines of each, and means along a line."""
CLEAR = 0.4
"""Share of lines that have to be off in all parts of their length for stripes to be clear: noise alone has 0.07."""
PLANES = 16
"""Planes whose lines are written together."""


class Striped(NamedTuple):
    """Lines that are off, which are removed or reported."""

    lines: Lines | None = None
    axis: str = ""  # axis along which lines differ; empty without stripes
    rms: float = 0.0  # standard deviation in samples
    are_removed: bool = False

    @property
    def text(self) -> str:
        """The stripes in a few words; empty without any."""
        return f"{self.rms:.3g} rms along {self.axis}, {'removed' if self.are_removed else 'kept'}" if self.axis else ""

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.axis or self.are_removed:
            return ()
        lines = "columns" if self.axis == "x" else "rows"
        return (
            f"{lines} are off by {self.rms:.3g} rms, each over its whole length in samples: stripes of the instrument, which a denoiser keeps in part. "
            f"To remove them first, write input.stripes: {{axis: {self.axis}}}",
        )

    @property
    def decided(self) -> str | dict[str, str | bool]:
        """The value of ``input.stripes``."""
        return {"axis": self.axis, "gain": self.removed.gain} if self.removed else "none"

    @property
    def removed(self) -> Lines | None:
        """The lines whose stripes are removed."""
        return self.lines if self.are_removed else None

    def samples(self, view: Readable) -> Readable:
        """The image without stripes, as far as each sample shows its own."""
        return WithoutOwnStripes(view, self.removed) if self.removed else view

    def read(self, source: Readable, view: Readable) -> Readable:
        """The image without stripes, which are measured where it is read."""
        lines = self.removed
        return WithoutStripes(source, view, LineCorrections(view, lines), lines) if lines else source


def choose_stripes(job: Denoising, view: Readable, roles: Roles, previous: Mapping[str, Any] | None) -> Striped:
    """Decide whether stripes are removed; a resumed run keeps the decision that it began with. ``view``: image with NaN in its holes."""
    wanted, rms = job.input.stripes, None
    if wanted == "auto" and previous is not None:
        known = previous["identity"].get("stripes")
        lines = Lines(**known) if known else None
    elif isinstance(wanted, str):
        found = {
            each: seen for axis in "xy" if (each := _lines(view, roles, axis)) and (seen := _seen(view, each)).are_clear
        }
        lines, rms = max(
            ((each, seen.rms) for each, seen in found.items()), key=lambda pair: pair[1], default=(None, None)
        )
    else:
        lines = _lines(view, roles, str(wanted["axis"]), gain=bool(wanted.get("gain", False)))
        if lines is None:
            raise ConfigError(
                f"input.stripes.axis is {wanted['axis']}, and the image has {shape_text(view.shape)} pixels along {''.join(roles.axes)}: stripes are "
                f"measured on {stripes.LEAST_LINES} lines or more of {stripes.LEAST_LENGTH} pixels or more along y and x. Leave input.stripes out."
            )
    if lines is None:
        return Striped()
    rms = _seen(view, lines).rms if rms is None else rms
    return Striped(lines, roles.axes[lines.across], rms, wanted != "none")


def _lines(view: Readable, roles: Roles, axis: str, *, gain: bool = False) -> Lines | None:
    """Return the lines that differ along an axis; None where they are too few or too short."""
    if not {"x", "y"} <= set(roles.axes):
        return None
    across, along = roles.axes.index(axis), roles.axes.index("y" if axis == "x" else "x")
    is_enough = view.shape[across] >= stripes.LEAST_LINES and view.shape[along] >= stripes.LEAST_LENGTH
    return Lines(across, along, gain) if is_enough else None


class _Seen(NamedTuple):
    """Standard deviation of stripes in samples."""

    rms: float
    are_clear: bool


def _seen(view: Readable, lines: Lines) -> _Seen:
    """Look for stripes at a few places that are spread evenly."""
    counts = tuple(1 if axis in (lines.across, lines.along) else n for axis, n in enumerate(view.shape))
    room = max(0, view.shape[lines.across] - SAMPLED_LINES)
    places = set()
    for number in range(PLACES):
        at = tuple(map(int, np.unravel_index(number * math.prod(counts) // PLACES, counts)))
        start = number * room // (PLACES - 1)
        spans = {lines.across: (start, min(start + SAMPLED_LINES, view.shape[lines.across]))}
        places.add(respanned(Region(at, tuple(i + 1 for i in at)), spans))
    found = []
    for place in sorted(places, key=lambda each: each.start):
        with suppress(DamagedData, InputUnreadable):  # a run names the blocks that they belong to
            means = stripes.means_along(view, lines, place, SAMPLED_MEANS)
            found.append((stripes.line_offsets(means).rms, stripes.agreement(means)))
    rms, shares = np.array(found or [(0.0, 0.0)]).T
    return _Seen(float(np.sqrt(np.mean(rms**2))), bool(np.median(shares) > CLEAR))


def grid_of(corrections: LineCorrections) -> Grid:
    """Return the blocks of the pass that measures lines: a group of lines, of several planes at once."""
    lines, shape = corrections.lines, corrections.shape
    edges = {lines.across: stripes.GROUP, lines.along: shape[lines.along]}
    looped = [axis for axis in range(len(shape)) if axis not in edges]
    edges |= dict.fromkeys(looped, 1) | dict.fromkeys(looped[-1:], PLANES)
    return Grid(shape, tuple(min(edges[axis], n) for axis, n in enumerate(shape)), ((0, 0),) * len(shape))


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
