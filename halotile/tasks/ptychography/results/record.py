"""The record of a reconstruction that goes on: its curve and the drawing of its object, for the driver to show."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.storage.disk.durable import DISK
from halotile.storage.images.png import contrast, encode_png, side_by_side
from halotile.storage.images.sheet import grey
from halotile.tasks.groups.training.curve import CurveRow, write_curve
from halotile.tasks.groups.training.fit import write_state
from halotile.tasks.ptychography.recipe import ScanRecipe
from halotile.tasks.ptychography.results.result import correlated_halves, shown_probe
from halotile.tasks.ptychography.state import ReconstructionState

EDGE = 512
"""Longest edge of a drawn object, in pixels."""
BRIGHT = 0.03
"""Least illumination of a pixel that is drawn, relative to the brightest one."""

SHOWN = 500
"""Positions, at most, whose light decides what is drawn."""


def draw_object(image: NDArray[Any], light: NDArray[Any]) -> list[bytes]:
    """Draw modulus and phase of an object side by side, as a PNG; what had little light is black.

    ``image``: complex object; ``light``: sum of the intensities that each of its pixels had.

    Examples
    --------
    >>> b"".join(draw_object(np.ones((8, 8), complex), np.ones((8, 8))))[1:4]
    b'PNG'
    """
    bright = light >= BRIGHT * light.max()
    rows, columns = (slice(n.min(), n.max() + 1) for n in np.nonzero(bright))
    step = -(-max(n.stop - n.start for n in (rows, columns)) // EDGE)
    image, light, bright = (part[rows, columns][::step, ::step] for part in (image, light, bright))
    # The phase of an object is known but for a constant: its mean is drawn in the middle.
    phase = np.angle(image * np.conj((image * light).sum()))
    drawn = []
    for part in (np.abs(image), phase):
        low, high = contrast([part[bright][None, :, None].astype(np.float32)])
        shown = np.where(bright, part, low).astype(np.float32)
        drawn.append(grey(shown[None], low, high))
    return encode_png(side_by_side(drawn))


def illumination(
    probe: NDArray[Any], places: NDArray[np.float64], shape: tuple[int, int]
) -> NDArray[np.float64]:
    """The sum of the intensities of a probe, (modes, rows, columns), at places of an object."""
    intensity = (np.abs(probe) ** 2).sum(0)
    rows, columns = intensity.shape
    light = np.zeros(shape)
    for row, column in places.astype(np.int64):
        light[row : row + rows, column : column + columns] += intensity
    return light


CURVE_SECONDS = 1.0
"""Least time between two curves, by which the driver sees that epochs end; loops wait for each."""
CHECKPOINT_SECONDS, CHECKPOINT_SHARE = 1.0, 0.1
"""Least time between two checkpoints, and most of the time that they may take."""


@dataclass
class Record:
    """Files that rank 0 writes of a reconstruction while it goes on."""

    recipe: ScanRecipe  # reconstruction
    state: ReconstructionState  # its state, which changes
    # gives the object, and the light that its pixels had
    drawn: Callable[[], tuple[NDArray[Any], NDArray[Any]]]
    seconds: dict[int, float] = field(default_factory=dict)
    """Of epochs, as far as this process computed them."""
    saved: int = field(init=False)
    """Epochs in the checkpoint."""
    due: float = field(default_factory=lambda: time.monotonic() + CHECKPOINT_SECONDS)
    """Time of the next checkpoint."""
    written: float = field(default_factory=time.monotonic)
    """Time of the last curve."""

    def __post_init__(self) -> None:
        self.saved = len(self.state.losses)  # it began with these

    def epoch_ended(self, seconds: float, *, is_last: bool) -> None:
        """Write the checkpoint with the drawing, and the curve, where they are due."""
        self.seconds[len(self.state.losses) - 1] = seconds
        began = time.monotonic()
        if is_last or began >= self.due or self._ends_stage:
            self.save()
            self.write(is_last=is_last)
            self.draw()
            took = time.monotonic() - began
            self.due = time.monotonic() + max(CHECKPOINT_SECONDS, took / CHECKPOINT_SHARE)
        elif self.recipe.requests or began >= self.written + CURVE_SECONDS:
            self.write(is_last=False)

    def save(self) -> None:
        """Write the checkpoint, unless it is there. Of those of other stages that of the end of the one before stays."""
        if self.saved == len(self.state.losses):
            return
        checkpoints, like = self.recipe.checkpoints, self.recipe.checkpoint
        number = self.recipe.stage_number(len(self.state.losses) - 1)
        write_state(checkpoints[number], self.state.content())
        self.saved = len(self.state.losses)
        kept = checkpoints[max(0, number - 1) : number + 1]
        for other in like.parent.glob(f"{like.stem}-*{like.suffix}"):
            if other not in kept:
                other.unlink(missing_ok=True)

    @property
    def _ends_stage(self) -> bool:
        first, stage = self.recipe.stage_of(len(self.state.losses) - 1)
        return len(self.state.losses) == first + stage.epochs

    def write(self, *, is_last: bool) -> None:
        """Write the curve, whose last figure at the end is the resolution."""
        rows: list[CurveRow] = [
            {"iteration": n + 1, "loss": loss} | ({"seconds": self.seconds[n]} if n in self.seconds else {})
            for n, loss in enumerate(self.state.losses)
        ]
        if is_last and self.state.held_out:
            first, _ = self.recipe.stage_of(len(rows) - 1)
            kept = first + int(np.argmin(self.state.held_out[first:]))
            rows[-1] |= {"kept": kept + 1, "loss_of_kept": self.state.losses[kept]}
        if is_last and self.recipe.modes > 1:
            light = shown_probe(self.state).abs().square().sum((1, 2))
            rows[-1]["faintest_mode"] = float(light.min() / light.sum())
        if is_last and (rings := correlated_halves(self.recipe, self.state)):
            halves = max(half.losses[-1] for half in self.state.halves)
            rows[-1] |= {
                "resolution": rings.resolution,
                "resolution_bound": rings.bound,
                "loss_of_halves": halves,
            }
        write_curve(self.recipe.curve, len(rows), rows, is_awaited=self.recipe.requests is not None)
        self.written = time.monotonic()

    def draw(self) -> None:
        """Draw the object."""
        if self.recipe.drawing is not None:
            with suppress(OSError):
                DISK.write_file(self.recipe.drawing, draw_object(*self.drawn()), sync=False)


def words_of_kept(recipe: ScanRecipe, epoch: int) -> str:
    """Return the end of a message about an epoch: what a run with other stages goes on from. A loop keeps every epoch."""
    first, _ = recipe.stage_of(epoch)
    if not first or recipe.requests:
        return ""
    return f" The {first} epochs of the stages before are kept: with other stages after them the run goes on from there."
