"""A denoising job and its plan as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from halotile.graphs.amounts import counted
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.base import Figures, Row
from halotile.graphs.plans.notes import MOST_LISTED
from halotile.graphs.plans.rows import cost_rows, device_text, output_rows, probe_rows, tiles_text
from halotile.graphs.units import shape_text

if TYPE_CHECKING:
    from halotile.tasks.noise.residual import Residual


def title(job: Denoising) -> str:
    """Describe a job in a few words."""
    return f"{job.denoiser.name} from {job.input.path} to {job.output.path}"


def plan_rows(figures: Figures) -> list[Row]:
    """Return the figures of ``Plan.summary()`` as rows, in the order of the questions they answer."""
    return [
        ("input", str(figures["input"])),
        ("", f"{shape_text(figures['shape'])} {figures['dtype']}, axes {figures['axes']}"),
        ("output", str(figures["output"])),
        (
            "",
            f"{shape_text(figures['output_shape'])} {figures['output_dtype']}, pixel size {figures['pixel_size']}",
        ),
        ("denoiser", f"{figures['denoiser']}, {device_text(figures)}"),
        ("", ""),
        *output_rows(figures),
        ("tiles", tiles_text(figures)),
        ("depth", f"{_depth(figures['depth'])} pixels, {figures['depth_from']}"),
        ("boundary", str(figures["boundary"])),
        ("read", f"{figures['read_amplification']:.2f} × the image"),
        ("computed", f"{figures['compute_redundancy']:.2f} × the image"),
        ("", ""),
        *cost_rows(figures),
        *probe_rows(figures),
    ]


def residual_row(planes: Sequence[str], residuals: Sequence[Residual], count: int) -> Row:
    """Return the size of the residual in each plane that was looked at, of so many, with its correlation; of many planes, the ranges.

    Examples
    --------
    >>> from halotile.tasks.noise.residual import Residual
    >>> residual_row(["DAPI", "GFP"], [Residual(0.97, -0.01), Residual(1.2, 0.31)], 2)
    ('residual', '0.97 (DAPI), 1.20 (GFP) of the noise level, correlation of neighbours -0.01, 0.31')
    >>> residual_row([f"t={n}" for n in range(0, 40, 4)], [Residual(0.9, n / 100) for n in range(10)], 40)[1]
    '0.90 of the noise level, correlation of neighbours 0.00 to 0.09; looked at 10 of 40 planes, t=0 to t=36'
    """
    ratios = [f"{r.ratio:.2f}" for r in residuals]
    correlations = [round(r.correlation, 2) + 0.0 for r in residuals]
    if len(planes) <= MOST_LISTED:
        sizes = ", ".join(
            f"{ratio} ({plane})" if plane else ratio for ratio, plane in zip(ratios, planes, strict=True)
        )
        text = f"{sizes} of the noise level, correlation of neighbours {', '.join(f'{r:.2f}' for r in correlations)}"
        names = ""
    else:
        sizes = " to ".join(sorted({min(ratios), max(ratios)}))
        text = f"{sizes} of the noise level, correlation of neighbours {min(correlations):.2f} to {max(correlations):.2f}"
        names = f", {planes[0]} to {planes[-1]}"
    return "residual", text + (
        f"; looked at {len(planes):,} of {count:,} planes{names}" if len(planes) < count else ""
    )


def residual_warning(planes: Sequence[str], residuals: Sequence[Residual]) -> str:
    """Return a warning where more than noise was taken away; empty where not."""
    named = [plane for plane, residual in zip(planes, residuals, strict=True) if residual.is_structured]
    if not named:
        return ""
    where = f" in {'; '.join(named)}" if any(named) else ""
    return (
        f"the residual, what was taken away, holds structure of the image{where}: denoised too much, unless the noise itself is correlated. "
        "`recon-cli try` compares settings on a crop"
    )


def shift_warning(planes: Sequence[str], residuals: Sequence[Residual]) -> str:
    """Return a warning where the brightness was changed; empty where not.

    Examples
    --------
    >>> from halotile.tasks.noise.residual import Residual
    >>> shift_warning(["c=0", "c=1"], [Residual(1.0, 0.0, -2.5), Residual(1.0, 0.0, 0.1)]).partition(":")[0]
    'the result is brighter than the image in c=0, by 2.5 noise levels on average'
    """
    shifted = [(plane, r.shift) for plane, r in zip(planes, residuals, strict=True) if r.is_shifted]
    if not shifted:
        return ""
    plane, shift = max(shifted, key=lambda each: abs(each[1]))
    where = f" in {plane}" if plane else ""
    more = f" (and in {counted(len(shifted) - 1, 'more plane')})" if len(shifted) > 1 else ""
    return (
        f"the result is {'darker' if shift > 0 else 'brighter'} than the image{where}{more}, by {abs(shift):.2g} noise levels on average: a denoiser keeps the "
        "brightness. Weights that learned from images of another kind do this: train on images like this one"
    )


def headline(figures: Figures) -> str:
    """Describe a plan in one line."""
    blocks, workers = counted(figures["blocks"], "block"), counted(figures["workers"], "worker")
    return (
        f"{figures['denoiser']}: {shape_text(figures['shape'])} {figures['dtype']} in {blocks}, "
        f"depth {_depth(figures['depth'])} ({figures['depth_from']}), {workers}"
    )


def _depth(depth: Any) -> str:
    """Describe halo widths: one number where all sides are equal.

    Examples
    --------
    >>> _depth([[8, 8], [8, 8]]), _depth([[8, 8], [4, 2]])
    ('8', '8 × 4+2')
    """
    pairs = [(pair, pair) if isinstance(pair, int) else tuple(pair) for pair in depth]
    words = [str(before) if before == after else f"{before}+{after}" for before, after in pairs]
    return words[0] if len(set(words)) == 1 else " × ".join(words)
