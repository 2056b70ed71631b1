"""Stripes of the image of a job: what samples show, the decision, and the pass that measures every line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
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
from halotile.tasks.noise.stripes import (
    GROUP,
    LEAST_LENGTH,
    LEAST_LINES,
    LineCorrections,
    Lines,
    WithoutOwnStripes,
    WithoutStripes,
    agreement,
    line_offsets,
    means_along,
)
from halotile.tasks.roles import Roles, respanned

PHASE = "stripes"
PLACES, SAMPLED_LINES, SAMPLED_MEANS = 4, 512, 128
"""Places where stripes are looked for along each axis, lines of each, and means along a line."""
CLEAR = 0.4
"""Share of lines that have to be off in all parts of their length for stripes to be clear: noise alone has 0.07."""
PLANES = 16
"""Planes whose lines are written together."""


@dataclass(frozen=True)
class Striped:
    """The decision on stripes, with their standard deviation in samples."""

    lines: Lines | None = None  # lines whose stripes are removed
    axis: str = ""  # axis along which lines differ; empty without clear stripes, and where none are removed
    rms: float = 0.0

    @property
    def text(self) -> str:
        """The stripes in a few words; empty without any."""
        return f"{self.rms:.3g} rms along {self.axis}, {'removed' if self.lines else 'kept'}" if self.axis else ""

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.axis or self.lines:
            return ()
        lines = "columns" if self.axis == "x" else "rows"
        return (
            f"{lines} are off by {self.rms:.3g} rms, each over its whole length in samples: stripes of the instrument, which a denoiser keeps in part. "
            f"To remove them first, write input.stripes: {{axis: {self.axis}}}",
        )

    @property
    def decided(self) -> str | dict[str, str | bool]:
        """The value of ``input.stripes``."""
        return ({"axis": self.axis} | ({"gain": True} if self.lines.gain else {})) if self.lines else "none"

    def samples(self, view: Readable) -> Readable:
        """The image without stripes, as far as each sample shows its own."""
        return WithoutOwnStripes(view, self.lines) if self.lines else view

    def read(self, source: Readable, view: Readable) -> Readable:
        """The image without stripes, which are measured where it is read."""
        return WithoutStripes(source, view, LineCorrections(view, self.lines), self.lines) if self.lines else source


def choose_stripes(job: Denoising, view: Readable, roles: Roles, previous: Mapping[str, Any] | None) -> Striped:
    """Decide whether stripes are removed; a resumed run keeps the decision that it began with. ``view``: image with NaN in its holes."""
    wanted = job.input.stripes
    known = previous["identity"].get("stripes") if previous else None
    if isinstance(wanted, str):
        found = {axis: _seen(view, lines) for axis in "xy" if (lines := _lines(view, roles, axis))}
        clear = {axis: seen.rms for axis, seen in found.items() if seen.share > CLEAR}
        if wanted == "auto" and previous is not None:
            lines = Lines(**known) if known else None
            axis = roles.axes[lines.across] if lines else ""
            return Striped(lines, axis, found[axis].rms if axis else 0.0)
        if not clear:
            return Striped()
        axis = max(clear, key=lambda each: clear[each])
        return Striped(_lines(view, roles, axis) if wanted == "auto" else None, axis, clear[axis])
    axis = str(wanted["axis"])
    lines = _lines(view, roles, axis)
    if lines is None:
        raise ConfigError(
            f"input.stripes.axis is {axis}, and the image has {shape_text(view.shape)} pixels along {''.join(roles.axes)}: stripes are measured on "
            f"{LEAST_LINES} lines or more of {LEAST_LENGTH} pixels or more along y and x. Leave input.stripes out."
        )
    return Striped(replace(lines, gain=bool(wanted.get("gain", False))), axis, _seen(view, lines).rms)


def _lines(view: Readable, roles: Roles, axis: str) -> Lines | None:
    """Return the lines that differ along an axis; None where they are too few or too short."""
    if not {"x", "y"} <= set(roles.axes):
        return None
    across, along = roles.axes.index(axis), roles.axes.index("y" if axis == "x" else "x")
    is_enough = view.shape[across] >= LEAST_LINES and view.shape[along] >= LEAST_LENGTH
    return Lines(across, along) if is_enough else None


class _Seen(NamedTuple):
    """Standard deviation of stripes in samples, and the share of lines that are off over their whole length."""

    rms: float
    share: float


def _seen(view: Readable, lines: Lines) -> _Seen:
    """Look for stripes at a few places that are spread evenly."""
    others = [axis for axis in range(len(view.shape)) if axis not in (lines.across, lines.along)]
    counts = tuple(view.shape[axis] for axis in others)
    places: dict[Region, None] = {}
    for number in range(PLACES):
        index = np.unravel_index(number * math.prod(counts) // PLACES, counts) if others else ()
        room = max(0, view.shape[lines.across] - SAMPLED_LINES)
        start = number * room // (PLACES - 1)
        spans = {axis: (int(at), int(at) + 1) for axis, at in zip(others, index, strict=True)}
        spans[lines.across] = (start, min(start + SAMPLED_LINES, view.shape[lines.across]))
        places[respanned(Region.whole(view.shape), spans)] = None
    found = []
    for place in places:
        with suppress(DamagedData, InputUnreadable):  # a run names the blocks that they belong to
            means = means_along(view, lines, place, SAMPLED_MEANS)
            found.append(_Seen(line_offsets(means).rms, agreement(means)))
    if not found:
        return _Seen(0.0, 0.0)
    return _Seen(math.sqrt(np.mean([seen.rms**2 for seen in found])), float(np.median([seen.share for seen in found])))


def grid_of(corrections: LineCorrections) -> Grid:
    """Return the blocks of the pass that measures lines: a group of lines, of several planes where these are small."""
    lines, shape = corrections.lines, corrections.shape
    block = [GROUP if axis == lines.across else n if axis == lines.along else 1 for axis, n in enumerate(shape)]
    last = max((axis for axis in range(len(shape)) if axis not in (lines.across, lines.along)), default=None)
    if last is not None:
        block[last] = PLANES
    return Grid(shape, tuple(map(min, block, shape)), ((0, 0),) * len(shape))


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
