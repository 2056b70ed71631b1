"""Checks and rules for the values and parts of a denoising job."""

from __future__ import annotations

import math
from collections.abc import Mapping

from halotile.graphs.jobs.denoise.job import NoiseModel
from halotile.graphs.kinds.base import Check
from halotile.graphs.kinds.sections import Input, Output, Tile
from halotile.graphs.rules.combinations import Faults, check_depth, check_pattern, check_sizes
from halotile.graphs.rules.values import Above, AtLeast
from halotile.tasks.denoisers.base import Denoiser, Leveled


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
    if given and noise.model != "poisson-gaussian":
        yield ("noise", given[0]), "is for model: poisson-gaussian; write that beside it, or leave it out"
    elif given and noise.gain == "auto":
        yield (
            ("noise", given[0]),
            "is for a known gain; write that beside it, in units of the file for each photon, or leave both out",
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


RULES = (check_pattern, sizes_of_input, check_depth, noise_of_camera, noise_of_denoiser)
