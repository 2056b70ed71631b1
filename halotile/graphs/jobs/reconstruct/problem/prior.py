"""The prior of a job: its denoiser, and the cutting of the image for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from halotile.graphs.jobs.reconstruct.job import Reconstruction
from halotile.graphs.plans.choices import describe_options
from halotile.graphs.plans.cutting import grid_of, rim_of, tiling_of
from halotile.graphs.plans.denoisers import describe_denoiser
from halotile.graphs.plans.resources.sizes import Geometry
from halotile.graphs.plans.trials.denoiser_trials import DenoiserTrial, tried
from halotile.graphs.plans.trials.gpu_trials import channels_last_of, on_device
from halotile.graphs.plans.trials.receptive_field import Halo
from halotile.graphs.waiting import Report
from halotile.storage.grid import Grid
from halotile.storage.rim import Readable
from halotile.tasks.denoised_image import Denoised
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.priors.base import DenoisingPrior, Prior

TILE = 512


def tried_prior(
    job: Reconstruction,
    denoiser: Denoiser | None,
    image: tuple[int, ...],
    previous: Mapping[str, Any] | None,
    report: Report,
) -> DenoiserTrial:
    """Return the digests of the user's code in the prior, and its halo."""
    if denoiser is None:
        return DenoiserTrial({}, Halo(((0, 0),) * len(image), 1, "no denoiser"))
    return tried(denoiser, job.tile, image, previous, run=job.run, report=report)


def cut_for_prior(
    job: Reconstruction,
    prior: Prior,
    denoiser: Denoiser | None,
    image: Readable,
    geometry: Geometry,
    halo: Halo,
    block: tuple[int, ...],
    device: str,
    precision: str,
    seals: Mapping[str, str],
) -> tuple[Prior, Grid]:
    """Return the prior for this device and precision, and the super-blocks with the halo that it needs."""
    roles = geometry.roles
    if denoiser is None:
        edges = tuple(min(b, n) for b, n in zip(block, geometry.shape, strict=True))
        return prior, Grid(geometry.shape, edges, ((0, 0),) * len(edges))
    if halo.probed:
        denoiser = denoiser.probed(*halo.probed)
    size = TILE if job.tile.size == "auto" else job.tile.size
    tiling = tiling_of(job.tile, denoiser, roles, halo, geometry, size, block, None, image.dtype)
    grid = grid_of(geometry, roles, halo, block, tiling)
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
    assert isinstance(prior, DenoisingPrior)
    return replace(prior, denoised=denoised), grid


def describe_prior(
    prior: Prior, denoiser: Denoiser | None, halo: Halo, seals: Mapping[str, str]
) -> dict[str, Any]:
    """Return a prior as JSON, with the weights of its denoiser by their digests."""
    described: dict[str, Any] = {"name": prior.name, **describe_options(prior)}
    if denoiser is None:
        return described
    return described | {
        "denoiser": describe_denoiser(denoiser),
        "weights": {path.name: seals[str(path)] for path in denoiser.files()},
        "depth": [list(pair) for pair in halo.depth],
    }


def describe_denoised(denoised: Denoised, previous: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the boundary rule of a denoised image as JSON, with its device and tiles on a GPU."""
    return {"boundary": list(denoised.rim.rules), **on_device(denoised, previous)}
