"""The job ``samples`` as plain frozen values, its checks and rules, and its plan as text."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, ClassVar, Literal, Self

import numpy as np

from halotile.errors import ConfigError
from halotile.graphs.jobs.denoise import job as denoise
from halotile.graphs.jobs.reconstruct.job import FidelityChoice, OperatorChoice, PriorChoice
from halotile.graphs.jobs.reconstruct.rules import CHECKS as RECONSTRUCTION
from halotile.graphs.jobs.reconstruct.rules import OPERATOR_RULES
from halotile.graphs.kinds.base import Check, Figures, Row
from halotile.graphs.kinds.sections import DenoiserChoice, Input, Output, Tile, TiledJob, is_pattern
from halotile.graphs.plans.rows import cost_rows, output_rows
from halotile.graphs.rules.values import Above, AtLeast, Faults, check_sizes
from halotile.graphs.words import counted, shape_text, shown
from halotile.tasks.options import Auto, OwnPath, ReadPath


@dataclass(frozen=True, kw_only=True)
class MeasuredOperator(OperatorChoice):
    """An operator by name, with its options, its measurement and the noise of that."""

    noise_sigma: float | Auto | ReadPath = "auto"
    """Standard deviation of the noise of the measurement: a number, or an image with that of each pixel; auto: estimated."""


@dataclass(frozen=True, kw_only=True)
class FieldPrior(PriorChoice):
    """The prior of the image by name, with its options."""

    name: str = "matern"
    """Name of a file in halotile.tasks.priors that is Gaussian."""


@dataclass(frozen=True, kw_only=True)
class MapOutput(Output):
    """The mean, the map of standard deviations, and the draws."""

    std: OwnPath | None = None
    """Path of the Zarr with the standard deviation of each pixel."""
    samples: OwnPath | None = None
    """Path of the draws: draws.zarr stands for draws-000.zarr, draws-001.zarr, and so on; null: draws are not stored."""


@dataclass(frozen=True, kw_only=True)
class PosteriorOptions:
    """The posterior distribution, and its draws."""

    method: Literal["auto", "blocks", "cg", "bootstrap"] = "auto"
    """blocks: each block is solved on itself with a halo. cg: the whole image by many passes, for any operator. bootstrap: the error of a denoiser, from
    denoising again on redrawn noise. auto: bootstrap with a denoiser, else blocks where they do."""
    count: int = 16
    """Draws that the standard deviation comes from; 0: the mean alone."""
    seed: int = 0
    """Seed of the draws: 0 or more."""
    tol: float = 1e-2
    """Largest error of mean and draws, in standard deviations."""
    halo: int | Auto = "auto"
    """blocks: pixels around each block that it is solved with; auto: as many as the tolerance needs, by a trial."""
    estimator: Literal["rao-blackwell", "samples"] = "rao-blackwell"
    """samples: the mean of squares of the draws. rao-blackwell: the variance of a pixel among known ones, and the draws for the rest, with less error."""
    calibrate: Literal["auto", "sure", "none"] = "auto"
    """bootstrap: sure: multiply the standard deviation by one factor, so that its mean square is the error that SURE estimates; none: only report it. auto: sure."""


OF_BOOTSTRAP = {
    "posterior.method": ("auto", "blocks", "cg"),
    "posterior.calibrate": ("auto",),
    "noise": (denoise.NoiseModel(),),
}
# Keys that are for one method, with the values that they have beside the other.
OF_BLOCKS = {
    **{"posterior.method": ("auto", "bootstrap"), "posterior.tol": (1e-2,), "posterior.halo": ("auto",)},
    **{"posterior.estimator": ("rao-blackwell",), "output.samples": (None,), "shape": ("auto",), "exact": (False,)},
    **{"prior": (FieldPrior(),), "fidelity": (FidelityChoice(),)},
}


@dataclass(frozen=True, kw_only=True)
class Sampling(TiledJob):
    """A job for mean and standard deviation of an image."""

    kind: ClassVar[str] = "samples"

    output: MapOutput
    operators: tuple[MeasuredOperator, ...] = ()
    input: Input | None = None
    """The noisy image, for a denoiser in place of operators."""
    denoiser: DenoiserChoice | Any | None = None
    """As in a denoising job."""
    noise: denoise.NoiseModel = field(default_factory=denoise.NoiseModel)
    fidelity: FidelityChoice = field(default_factory=FidelityChoice)
    prior: FieldPrior = field(default_factory=FieldPrior)
    posterior: PosteriorOptions = field(default_factory=PosteriorOptions)
    shape: tuple[int, ...] | Auto = "auto"
    """Shape of the image in pixels; auto: that of the measurements."""
    exact: bool = False
    """Use direct convolutions only."""

    def __post_init__(self) -> None:
        """Refuse operators beside a denoiser, neither of them, and what is for the other one."""
        given = [key for key in ("operators", "input", "denoiser") if getattr(self, key)]
        if given not in (["operators"], ["input", "denoiser"]):
            raise ConfigError(
                f"job: samples has {' and '.join(given) or 'no operators'}. Write operators, for what was measured, or input and denoiser, for the error of that."
            )
        if self.input and (is_pattern(self.input.path) or not self.output.std):
            raise ConfigError(
                f"input.path is {self.input.path}, and output.std {shown(self.output.std)}: a map is of one image. Write the path of one image and an output.std, or job: denoise."
            )
        others, ways = OF_BLOCKS if self.input else OF_BOOTSTRAP, ("operators", "a denoiser")
        for key in (key for key, values in others.items() if attrgetter(key)(self) not in values):
            raise ConfigError(
                f"{key} is for {ways[not self.input]}, and this job has {ways[bool(self.input)]}. Leave it out."
            )

    def moved_into(self, folder: str) -> Self:
        """Return the same job with its outputs in a folder."""
        import os

        moved = super().moved_into(folder)
        further = {key: path for key in ("std", "samples") if (path := getattr(self.output, key))}
        places: dict[str, Any] = {
            key: os.path.join(folder, os.path.basename(os.path.normpath(p))) for key, p in further.items()
        }
        return replace(moved, output=replace(moved.output, **places))


def _tolerance(value: float) -> str | None:
    if value >= 1:
        return f"{value:g} standard deviations is too large an error: write less than 1, such as 0.01"
    return Above(0)(value)


def _noise(value: Any) -> str | None:
    return None if isinstance(value, str) else Above(0)(value)


CHECKS: Mapping[tuple[str, str], Check] = {
    key: RECONSTRUCTION[key] for key in (("operators", "data"), ("fidelity", "name"), ("prior", "name"), ("", "shape"))
} | {
    ("operators", "noise_sigma"): _noise,
    ("posterior", "count"): AtLeast(0),
    ("posterior", "seed"): AtLeast(0),
    ("posterior", "tol"): _tolerance,
    ("posterior", "halo"): AtLeast(1),
    **denoise.CHECKS,
}


def _gaussian(fidelity: FidelityChoice, prior: FieldPrior, operators: tuple[MeasuredOperator, ...]) -> Faults:
    if prior.name != "matern":
        yield (("prior", "name"), f"{prior.name}, which leaves no Gaussian posterior; write matern")
    if fidelity.name not in ("l2", "poisson"):
        yield (
            ("fidelity", "name"),
            f"{fidelity.name}, and draws are of Gaussian noise or of counts; write l2 or poisson",
        )
    if fidelity.name == "poisson" and any(operator.noise_sigma != "auto" for operator in operators):
        yield (
            ("operators", "noise_sigma"),
            "is beside fidelity: poisson, where counts have the noise of their rate; leave it out",
        )


def _maps(output: MapOutput, tile: Tile, posterior: PosteriorOptions, input: Input | None) -> Faults:  # noqa: A002 - the name of the section
    yield from check_sizes(output, tile, 1)
    wanted = ("std" if output.std else "") or ("samples" if output.samples else "")
    if wanted and not posterior.count:
        yield ("posterior", "count"), f"is 0, and output.{wanted} needs draws; write 16, or leave output.{wanted} out"
    if output.std and (input or posterior.estimator == "samples") and posterior.count == 1:
        yield ("posterior", "count"), "is 1: one draw gives no standard deviation; write 16"
    if input:
        return
    for key in ("size", "depth", "boundary", "batch", "axes"):
        if getattr(tile, key) != "auto":
            yield (
                ("tile", key),
                "is for denoisers, and blocks of samples have a halo: leave it out, or write posterior.halo",
            )
    if (output.std or output.samples) and np.dtype(np.float32 if output.dtype == "auto" else output.dtype).kind != "f":
        yield (
            ("output", "dtype"),
            f"{output.dtype} holds whole numbers, and standard deviations and draws are fractions; write float32 or auto",
        )
    if posterior.method == "cg" and posterior.halo != "auto":
        yield ("posterior", "halo"), f"{posterior.halo}, and method: cg has none; leave it out, or write method: blocks"


RULES = (*OPERATOR_RULES[1:], _gaussian, _maps)


def title(job: Sampling) -> str:
    """Describe a job in a few words."""
    if job.input and job.denoiser:
        return f"{job.denoiser.name} from {job.input.path} to {job.output.path}, with its error"
    return f"mean and standard deviation from {counted(len(job.operators), 'operator')} to {job.output.path}"


def essentials(job: dict[str, Any]) -> dict[str, Any]:
    """Return a stored job without the number of its draws: a run with another one may replace it with ``--fresh`` alone."""
    posterior = {key: value for key, value in job.get("posterior", {}).items() if key != "count"}
    return job | {"posterior": posterior}


def headline(figures: Figures) -> str:
    """Describe a plan in one line."""
    if "calibration" in figures:
        return f"{denoise.headline(figures)}, {counted(figures['count'], 'redraw')}, {figures['calibration']}"
    return (
        f"{counted(figures['count'], 'draw')} of {shape_text(figures['shape'])} {figures['dtype']} from "
        f"{counted(len(figures['operators']), 'operator')}, {_method(figures)}, {counted(figures['blocks'], 'block')}, "
        f"{counted(figures['workers'], 'worker')}"
    )


def _method(figures: Figures) -> str:
    if figures["halo"]:
        return f"blocks with a halo of {figures['halo']} pixels, {figures['read_amplification']:.2f} × the image"
    return f"cg, up to about {figures['passes_each']:,} passes for each image"


def _draws(figures: Figures) -> str:
    error = f", std ± {figures['std_error']:.0%}".replace("%", " %") if figures["std_error"] else ""
    return f"{figures['count']}, {figures['estimator']}{error}" if figures["count"] else "none: the mean alone"


def plan_rows(figures: Figures) -> list[Row]:
    """Return a plan as a table."""
    if "calibration" in figures:
        return denoise.plan_rows(figures)
    pairs = zip(figures["operators"], figures["data"], figures["noise"], strict=True)
    lines = [f"{name} of {data}, noise {noise}" for name, data, noise in pairs]
    return [
        *(("" if number else "operators", line) for number, line in enumerate(lines)),
        ("mean", str(figures["output"])),
        *([("std", str(figures["std"]))] if figures["std"] else []),
        ("", f"{shape_text(figures['shape'])} {figures['dtype']}"),
        ("prior", str(figures["prior"])),
        ("draws", _draws(figures)),
        ("method", f"{_method(figures)}: {figures['halo_from']}"),
        ("", ""),
        *output_rows(figures),
        ("", ""),
        *cost_rows(figures),
    ]
