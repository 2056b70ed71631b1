"""The prior of a job: its denoiser, and the cutting of the image for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from halotile.errors import ConfigError
from halotile.graphs.jobs.reconstruct.job import PriorChoice, Reconstruction
from halotile.graphs.plans.cutting import grid_of, rim_of, tiling_of
from halotile.graphs.plans.denoisers import describe_denoiser, make_denoiser
from halotile.graphs.plans.resources.sizes import Geometry
from halotile.graphs.plans.trials.denoiser_trials import Tried, tried
from halotile.graphs.plans.trials.gpu_trials import channels_last_of
from halotile.graphs.plans.trials.receptive_field import Reach
from halotile.graphs.waiting import Report
from halotile.storage.grid import Grid
from halotile.storage.rim import Readable
from halotile.tasks.denoised_image import Denoised
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.denoisers.tv import Proximal
from halotile.tasks.priors import NoPrior, Plugged, Prior, Sparse, Variation

TILE = 512


def denoiser_of(job: Reconstruction) -> Denoiser | None:
    """Return the denoiser of a prior, if it has one, with the noise level set.

    Raises
    ------
    ConfigError
        When there is no denoiser where one is needed, or it cannot be a prior.
    """
    choice = job.prior
    if choice.name == "tv":
        return Proximal(strength=choice.weight, iterations=choice.iterations)
    if choice.name != "pnp":
        return None
    if choice.denoiser is None:
        raise ConfigError(
            "prior.name is pnp: it needs a denoiser. Write prior.denoiser: {name: dncnn, weights: w.safetensors}, say."
        )
    denoiser = make_denoiser(choice.denoiser, job)
    if choice.sigma is not None:
        denoiser = denoiser.with_noise_level(choice.sigma)
    if denoiser.wants_noise_level:
        raise ConfigError(
            "prior.sigma is not given, and the denoiser needs it. Write prior.sigma: 0.05, say."
        )
    if denoiser.scale != 1 or denoiser.channels != (1, 1):
        raise ConfigError(
            f"prior.denoiser: {denoiser.title} makes another shape of an image, or takes several channels. "
            "Use one that gives one pixel for each pixel."
        )
    return denoiser


def tried_prior(
    job: Reconstruction,
    denoiser: Denoiser | None,
    image: tuple[int, ...],
    previous: Mapping[str, Any] | None,
    report: Report,
) -> Tried:
    """Return the digests of the user's code in the prior, and its reach."""
    if denoiser is None:
        return Tried({}, Reach(((0, 0),) * len(image), 1, "no denoiser"))
    return tried(denoiser, job.tile, image, previous, run=job.run, report=report)


def cut_for_prior(
    job: Reconstruction,
    denoiser: Denoiser | None,
    image: Readable,
    geometry: Geometry,
    reach: Reach,
    block: tuple[int, ...],
    device: str,
    precision: str,
    seals: Mapping[str, str],
) -> tuple[Prior, Grid]:
    """Return the prior for this device and precision, and the super-blocks with the halo that it needs."""
    choice, roles = job.prior, geometry.roles
    if denoiser is None:
        edges = tuple(min(b, n) for b, n in zip(block, geometry.shape, strict=True))
        prior: Prior = Sparse(choice.weight) if choice.name == "l1" else NoPrior()
        return prior, Grid(geometry.shape, edges, ((0, 0),) * len(edges))
    if reach.probed:
        denoiser = denoiser.probed(*reach.probed)
    size = TILE if job.tile.size == "auto" else job.tile.size
    tiling = tiling_of(job.tile, denoiser, roles, reach, geometry, size, block, None, image.dtype)
    grid = grid_of(geometry, roles, reach, block, tiling)
    denoised = Denoised(
        image,
        denoiser,
        tiling,
        roles,
        grid,
        rim_of(job.tile, denoiser, roles),
        device=device,
        precision=precision,
        channels_last=(
            denoiser.convolutional and geometry.dims == 2 and channels_last_of(job.tile, device, precision)
        ),
        seals=seals,
    )
    return (
        Variation(denoised, choice.weight) if choice.name == "tv" else Plugged(denoised, choice.weight)
    ), grid


def denoised_of(prior: Prior) -> Denoised | None:
    """Return the denoised image of a prior, if it has one."""
    return prior.denoised if isinstance(prior, Plugged | Variation) else None


def with_denoised(prior: Prior, change: Callable[[Denoised], Denoised]) -> Prior:
    """Return the prior with its denoised image changed."""
    if isinstance(prior, Plugged | Variation):
        return replace(prior, denoised=change(prior.denoised))
    return prior


def describe_prior(
    choice: PriorChoice, denoiser: Denoiser | None, reach: Reach, seals: Mapping[str, str]
) -> dict[str, Any]:
    """Return a prior as JSON, with the weights of its denoiser by their digests."""
    described: dict[str, Any] = {"name": choice.name, "weight": choice.weight}
    if denoiser is None:
        return described
    return described | {
        "denoiser": describe_denoiser(denoiser),
        "weights": {path.name: seals[str(path)] for path in denoiser.files()},
        "depth": [list(pair) for pair in reach.depth],
    }
