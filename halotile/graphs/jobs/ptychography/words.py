"""A ptychography job, its plan and its result as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halotile.graphs.amounts import counted
from halotile.graphs.jobs.ptychography.job import Ptychography
from halotile.graphs.kinds.base import Figures, Row
from halotile.graphs.plans.rows import cost_rows
from halotile.graphs.units import shape_text
from halotile.storage.scans.lengths import shown_length, shown_resolution
from halotile.tasks.ptychography.recipe import warning_of_halves

LIKELIHOOD = "poisson_nll"
"""The loss without a zero: the `amplitude_mse` of its result is compared with that of the noise."""
FAR_ABOVE = 2
"""Loss, relative to that of the noise, of which the user is told what it may come from."""
HELD_OUT = (
    "{:.0%} of the pixels of each pattern are held out: their loss decides which epoch of a stage is kept"
)
MORE_EPOCHS = "the loss on the held-out pixels still falls: more epochs may give a better object"
LOST = 5e-3
"""Share of the light of a mode that was not found."""
BELOW = 0.95
"""Loss, relative to that of the noise in as many pixels as were not needed to fit the model, below which the noise itself was fitted."""
CAUSES = (
    "unless the object looks right, more epochs or modes may be needed, intensities to refine where the beam varied, or the geometry may be another one (order and signs of the "
    "positions' axes, focus, near or far field, pixels that do not count)"
)


def title(job: Ptychography) -> str:
    """Describe a job in a few words."""
    return f"ptychography of {job.input.path}"


def headline(figures: Figures) -> str:
    """Describe a plan in one line."""
    epochs, workers = counted(figures["epochs"], "epoch"), counted(figures["workers"], "worker")
    return (
        f"{counted(figures['positions'], 'pattern')} of {shape_text(figures['pattern'])}: {epochs}, {workers}"
    )


def plan_rows(figures: Figures) -> list[Row]:
    """Return a plan as a table."""
    height, width = figures["pixel"]
    return [
        ("input", str(figures["input"])),
        ("", f"{counted(figures['positions'], 'pattern')} of {shape_text(figures['pattern'])}"),
        ("output", str(figures["output"])),
        (
            "object",
            f"{shape_text(figures['object'])} pixels of {shown_length(height)} × {shown_length(width)}",
        ),
        ("model", f"{figures['module'] or _own_model(figures)}, {figures['loss']}"),
        *([("", HELD_OUT.format(figures["held_out"]))] if figures["held_out"] else []),
        ("refined", ", ".join(figures["refine"])),
        *(
            [("in memory", f"{counted(figures['window'], 'pattern')} a slot at a time")]
            if figures["window"]
            else []
        ),
        ("", ""),
        *[("stages" if n == 0 else "", stage) for n, stage in enumerate(figures["stages"])],
        *(
            [("resolution", "of two halves of the positions, which takes twice the time")]
            if figures["resolution"]
            else []
        ),
        ("", ""),
        *cost_rows(figures),
    ]


def _own_model(figures: Figures) -> str:
    length = figures["focus"]
    focus = (
        "" if length is None else f", {length if isinstance(length, str) else f'{length:g} m'} from the focus"
    )
    return f"{figures['field']} field{focus}, {counted(figures['modes'], 'mode')}"


def result_rows(
    # last row of the curve; beside it `worst_patterns` and `worst_losses`, lists, `median_loss` and `mean_loss`
    last: Mapping[str, Any],
    drawing: Path,  # drawing of the object
    loss: str = "",  # name of what was minimised
    noise: float | None = None,  # about the `amplitude_mse` that the noise of photons alone gives
    free: float = 0.0,  # numbers that the fit is free to choose, relative to the counts
) -> list[Row]:
    """Return the end of a reconstruction as a table.

    Examples
    --------
    >>> result_rows({"loss": 0.25}, Path("scan.png"))
    [('loss', '0.25'), ('drawing', 'scan.png')]
    >>> result_rows({"loss": 0.25}, Path("scan.png"), "amplitude_mse", 0.2)[0]
    ('loss', '0.25; for these counts the noise of photons alone gives about 0.2')
    >>> result_rows({"loss": 0.5}, Path("scan.png"), "amplitude_mse", 0.2)[1][1][:52]
    'the loss is 2.5 times that of photons alone: unless '
    >>> result_rows({"loss": 0.17}, Path("scan.png"), "amplitude_mse", 0.2, 0.04)[1][1][:70]
    'the loss is 15 % below that of photons alone: the object follows noise'
    >>> result_rows({"loss": -13.0, "mean_loss": 0.17}, Path("scan.png"), "poisson_nll", 0.2, 0.04)[1][1][:79]
    'the amplitude_mse is 15 % below that of photons alone: the object follows noise'
    >>> result_rows({"loss": 0.17, "kept": 9, "loss_of_kept": 0.19}, Path("scan.png"), "amplitude_mse", 0.2)[:2]
    [('loss', '0.19; for these counts the noise of photons alone gives about 0.2'), ('kept', 'epoch 9, which had the lowest loss on the held-out pixels')]
    >>> result_rows({"loss": 0.25, "loss_of_halves": 0.8, "resolution": 2e-7}, Path("scan.png"))[1]
    ('warning', 'the two halves are not done, with a loss of 0.8: the object of all positions may be finer. More epochs tell')
    >>> result_rows({"worst_patterns": [12345, 2], "worst_losses": [0.8, 0.5], "median_loss": 0.25}, Path("scan.png"))[0]
    ('worst', 'patterns 12345, 2 with amplitude_mse of 0.8, 0.5; the median is 0.25')
    """
    rows = []
    if "loss" in last:
        last = {**last, "loss": last.get("loss_of_kept", last["loss"])}
        what = "amplitude_mse" if loss == LIKELIHOOD else "loss"
        misfit = last.get("mean_loss", noise or 0.0) if loss == LIKELIHOOD else last["loss"]
        of_noise = noise if what == "loss" else None
        about = (
            f"; for these counts the noise of photons alone gives about {of_noise:.2g}" if of_noise else ""
        )
        rows.append(("loss", f"{last['loss']:.4g}{about}"))
        if noise and misfit > FAR_ABOVE * noise:
            rows.append(
                ("warning", f"the {what} is {misfit / noise:.2g} times that of photons alone: {CAUSES}")
            )
        if "kept" in last:
            rows.append(
                ("kept", f"epoch {last['kept']:,.0f}, which had the lowest loss on the held-out pixels")
            )
            if last["kept"] == last.get("iteration"):
                rows.append(("note", MORE_EPOCHS))
        elif noise and misfit < BELOW * (1 - free) * noise:
            below = f"the {what} is {100 * (1 - misfit / noise):.0f} % below that of photons alone: the object follows noise"
            rows.append(("warning", f"{below}. Write held_out: 0.05"))
    if last.get("faintest_mode", 1) < LOST:
        lost = f"a mode of the probe has {last['faintest_mode']:.2g} of the light: the patterns do not tell it from changes of the object, or it is not there"
        rows.append(("warning", f"{lost}. Write fewer modes, or give the modes as input.start"))
    of_halves = last.get("loss_of_halves")
    if of_halves is not None and (warning := warning_of_halves(last["loss"], of_halves, loss)):
        rows.append(("warning", warning))
    if "resolution" in last:
        rows.append(
            (
                "resolution",
                f"{shown_resolution(last['resolution'], last.get('resolution_bound', 0))} (half a period: Fourier ring correlation at 1/2 bit)",
            )
        )
    if "worst_patterns" in last:
        numbers = ", ".join(map(str, last["worst_patterns"]))
        losses = ", ".join(f"{loss:.4g}" for loss in last["worst_losses"])
        worst = f"patterns {numbers} with amplitude_mse of {losses}; the median is {last['median_loss']:.4g}"
        rows.append(("worst", worst))
    return [*rows, ("drawing", str(drawing))]
