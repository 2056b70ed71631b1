"""The job ``denoise`` as plain frozen values, its checks and rules, and its plan as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from halotile.graphs.kinds.base import Check, Figures, Row
from halotile.graphs.kinds.sections import DenoiserChoice, Input, Output, Tile, TiledJob
from halotile.graphs.plans.notes import MOST_LISTED
from halotile.graphs.plans.rows import cost_rows, device_text, output_rows, probe_rows, tiles_text
from halotile.graphs.rules.values import Above, AtLeast, Faults, check_depth, check_pattern, check_sizes
from halotile.graphs.words import counted, shape_text
from halotile.tasks.denoisers.base import Denoiser, Leveled
from halotile.tasks.options import Auto

if TYPE_CHECKING:
    from halotile.tasks.noise.residual import Residual


@dataclass(frozen=True, kw_only=True)
class NoiseModel:
    """The noise of the image, for a denoiser with ``sigma: auto``."""

    model: Literal["auto", "gaussian", "poisson-gaussian"] = "gaussian"
    """gaussian: the same everywhere in a plane. poisson-gaussian: that of counted photons and of the readout, which grows with brightness.
    auto: poisson-gaussian where samples of every plane clearly show it."""
    gain: float | Auto = "auto"
    """poisson-gaussian: value of one photon, in the units of the file. auto: estimated with the rest for each channel, time point and other plane."""
    offset: float = 0.0
    """poisson-gaussian with a gain: value without any photon, in the units of the file."""
    read_sigma: float = 0.0
    """gaussian: the noise level where it is known; poisson-gaussian with a gain: the noise of the readout. Standard deviation in the units of the file; 0 with
    gaussian: estimated."""
    shared: Literal["channel", "image", "none"] = "channel"
    """poisson-gaussian without a gain: planes that one detector measured, and that are estimated together. none: each plane by itself."""


@dataclass(frozen=True, kw_only=True)
class Denoising(TiledJob):
    """A denoising job."""

    kind: ClassVar[str] = "denoise"

    input: Input
    denoiser: DenoiserChoice | Any
    """A :class:`DenoiserChoice`, or the denoiser itself where a script passes one."""
    channels: Mapping[str, DenoiserChoice] = field(default_factory=dict)
    """Other denoisers of some channels, by name or by number from 0, such as {FISH: {name: none}}."""
    noise: NoiseModel = field(default_factory=NoiseModel)


def _finite(value: float) -> str | None:
    return None if math.isfinite(value) else f"{value} is not finite; write a number"


CHECKS: Mapping[tuple[str, str], Check] = {
    ("noise", "gain"): Above(0),
    ("noise", "offset"): _finite,
    ("noise", "read_sigma"): AtLeast(0),
}


def sizes_of_input(output: Output, tile: Tile, denoiser: Denoiser) -> Faults:
    yield from check_sizes(output, tile, denoiser.scale)


def noise_of_camera(noise: NoiseModel) -> Faults:
    """Yield values of a camera that a noise model has no use for."""
    given = [key for key in ("gain", "offset", "read_sigma") if getattr(noise, key) not in ("auto", 0)]
    if given == ["read_sigma"] and noise.model == "gaussian":
        return
    if given and noise.model != "poisson-gaussian":
        yield (
            ("noise", given[0]),
            "is for model: poisson-gaussian, or read_sigma alone for gaussian; write the model beside it, or leave it out",
        )
    elif given and noise.gain == "auto":
        yield (
            ("noise", given[0]),
            "is for a known gain; write noise.gain as well, in units of the file per photon, or leave this key out",
        )


def noise_of_denoiser(
    noise: NoiseModel,
    denoiser: Denoiser,
    input: Input,  # noqa: A002 - the name of the section
) -> Faults:
    """Yield photon noise for a denoiser that cannot be given its level, or is given another one."""
    if noise.model != "poisson-gaussian":
        return
    if not isinstance(denoiser, Leveled):
        yield (
            ("noise", "model"),
            f"poisson-gaussian is for denoisers with a noise level, which {denoiser.title} has not; write gaussian, or another denoiser",
        )
    elif denoiser.scale != 1 or denoiser.channels[0] != denoiser.channels[1]:
        yield (
            ("noise", "model"),
            f"poisson-gaussian is for denoisers that keep the shape of the image, unlike {denoiser.title}; write gaussian",
        )
    elif not denoiser.wants_noise_level:
        yield (
            ("denoiser", "sigma"),
            "has to be auto beside noise.model: poisson-gaussian, whose level depends on brightness; write sigma: auto",
        )
    elif "sigma" in input.sides:
        yield (
            ("input", "sides"),
            "holds sigma, and noise.model: poisson-gaussian has levels of its own; leave one of them out",
        )


def kept_defects(input: Input, denoiser: Denoiser) -> Faults:  # noqa: A002 - the name of the section
    """Yield defects that are to be kept where the result has other pixels."""
    if input.defects_in_output == "kept" and (denoiser.scale != 1 or denoiser.channels[0] != denoiser.channels[1]):
        yield ("input", "defects_in_output"), f"is kept, and {denoiser.title} changes the image's shape; write replaced"


RULES = (check_pattern, sizes_of_input, check_depth, noise_of_camera, noise_of_denoiser, kept_defects)


def title(job: Denoising) -> str:
    """Describe a job in a few words."""
    return f"{job.denoiser.name} from {job.input.path} to {job.output.path}"


def plan_rows(figures: Figures) -> list[Row]:
    """Return the figures of ``Plan.summary()`` as rows, in the order of the questions they answer."""
    return [
        ("input", str(figures["input"])),
        ("", f"{shape_text(figures['shape'])} {figures['dtype']}, axes {figures['axes']}"),
        ("output", str(figures["output"])),
        ("", f"{shape_text(figures['output_shape'])} {figures['output_dtype']}, pixel size {figures['pixel_size']}"),
        ("denoiser", f"{figures['denoiser']}, {device_text(figures)}"),
        *((key, str(figures[key])) for key in ("std", "calibration") if key in figures),
        *(("", f"{', '.join(part['channels'])}: {part['setting']}") for part in figures.get("channels", ())),
        ("", ""),
        *output_rows(figures),
        ("tiles", tiles_text(figures)),
        ("depth", f"{_depth(figures['depth'])} pixels, {figures['depth_from']}"),
        ("boundary", str(figures["boundary"])),
        *([("stripes", str(figures["stripes"]))] if figures.get("stripes") else []),
        ("read", f"{figures['read_amplification']:.2f} × the image"),
        ("computed", f"{figures['compute_redundancy']:.2f} × the image"),
        ("", ""),
        *cost_rows(figures),
        *probe_rows(figures),
    ]


def residual_row(planes: Sequence[str], residuals: Sequence[Residual], count: int) -> Row:
    """Return the size of the residual in each plane that was looked at, of so many, with its correlation; of many planes, the ranges.

    >>> from halotile.tasks.noise.residual import Residual
    >>> residual_row(["DAPI", "GFP"], [Residual(0.97, (-0.02, -0.01)), Residual(1.2, (0.31, 0.02))], 2)[1]
    '0.97 (DAPI), 1.20 (GFP) of the noise level, correlation of neighbours -0.01 along the rows (x), 0.31 down the columns (y)'
    >>> residual_row([f"t={n}" for n in range(0, 40, 4)], [Residual(0.9, (n / 100, 0.0)) for n in range(10)], 40)[1]
    '0.90 of the noise level, correlation of neighbours 0.00 to 0.09 down the columns (y); looked at 10 of 40 planes, t=0 to t=36'
    """
    ratios = [f"{r.ratio:.2f}" for r in residuals]
    correlations = sorted(residuals, key=lambda r: r.correlation)
    if len(planes) <= MOST_LISTED:
        sizes = ", ".join(f"{ratio} ({plane})" if plane else ratio for ratio, plane in zip(ratios, planes, strict=True))
        text = ", ".join(r.correlation_text for r in residuals)
        names = ""
    else:
        sizes = " to ".join(sorted({min(ratios), max(ratios)}))
        text = f"{round(correlations[0].correlation, 2) + 0.0:.2f} to {correlations[-1].correlation_text}"
        names = f", {planes[0]} to {planes[-1]}"
    looked = f"; looked at {len(planes):,} of {count:,} planes{names}" if len(planes) < count else ""
    return "residual", f"{sizes} of the noise level, correlation of neighbours {text}{looked}"


def residual_warning(planes: Sequence[str], residuals: Sequence[Residual], known: Sequence[str] = ()) -> str:
    """Return a warning where more than noise was taken away, with what is known of the reason; empty where not."""
    found = [(plane, residual) for plane, residual in zip(planes, residuals, strict=True) if residual.is_structured]
    if not found:
        return ""
    where = f" in {'; '.join(plane for plane, _ in found)}" if any(plane for plane, _ in found) else ""
    most = max((residual for _, residual in found), key=lambda residual: residual.correlation)
    return (
        f"the residual, which is what was removed, holds structure of the image{where}: the denoising was too strong, unless the noise itself is correlated: its level is "
        "then estimated too low, and a higher level may give a better result. "
        f"The correlation of neighbours is {most.correlation_text}. "
        f"{'. '.join([*(note[0].upper() + note[1:] for note in known), '`recon-cli try` compares settings on a crop'])}"
    )


def shift_warning(planes: Sequence[str], residuals: Sequence[Residual]) -> str:
    """Return a warning where the brightness was changed; empty where not.

    >>> from halotile.tasks.noise.residual import Residual
    >>> shift_warning(["c=0", "c=1"], [Residual(1.0, (0.0, 0.0), -2.5), Residual(1.0, (0.0, 0.0), 0.1)]).partition(":")[0]
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
        "brightness. If it is a network, its weights were trained on images of another kind: train on images like this one"
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

    >>> _depth([[8, 8], [8, 8]]), _depth([[8, 8], [4, 2]])
    ('8', '8 × 4+2')
    """
    pairs = [(pair, pair) if isinstance(pair, int) else tuple(pair) for pair in depth]
    words = [str(before) if before == after else f"{before}+{after}" for before, after in pairs]
    return words[0] if len(set(words)) == 1 else " × ".join(words)
