"""The record of a reconstruction that goes on: its curve and the picture of its object, for the driver to show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from numpy.typing import NDArray

from halotile.storage.disk.durable import DISK
from halotile.tasks.groups.training.curve import CurveRow, write_curve
from halotile.tasks.ptychography.recipe import ScanRecipe
from halotile.tasks.ptychography.results.drawing import draw_object
from halotile.tasks.ptychography.results.result import correlated_halves
from halotile.tasks.ptychography.state import ReconstructionState


def record(
    recipe: ScanRecipe,
    state: ReconstructionState,
    drawn: Callable[[], tuple[NDArray[Any], NDArray[Any]]],
    seconds: Mapping[int, float],
    *,
    is_last: bool,
) -> None:
    """Write the curve, whose last figure at the end is the resolution, and draw the object with the light that its pixels had, as ``drawn`` gives them.

    ``seconds`` are those of epochs, as far as this process computed them.
    """
    rows: list[CurveRow] = [
        {"iteration": n + 1, "loss": loss} | ({"seconds": seconds[n]} if n in seconds else {})
        for n, loss in enumerate(state.losses)
    ]
    if is_last and (rings := correlated_halves(recipe, state)):
        rows[-1] |= {"resolution": rings.resolution, "resolution_bound": rings.bound}
    write_curve(recipe.curve, len(rows), rows)
    if recipe.drawing is not None:
        with suppress(OSError):
            DISK.write_file(recipe.drawing, draw_object(*drawn()), sync=False)
