"""The prior of a job: its denoiser, and the cutting of the image for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from halotile.graphs.jobs.reconstruct.job import Reconstruction
from halotile.graphs.jobs.reconstruct.problem.forms import Form
from halotile.graphs.plans.choices import describe_denoiser, describe_options
from halotile.graphs.plans.cutting import grid_of, rim_of, tiling_of
from halotile.graphs.plans.resources.sizes import Geometry
from halotile.graphs.plans.trials.denoiser_trials import DenoiserTrial, tried
from halotile.graphs.plans.trials.gpu_trials import channels_last_of, on_device
from halotile.graphs.plans.trials.receptive_field import Halo
from halotile.graphs.waiting import Report
from halotile.storage.disk.object_path import OutputPath
from halotile.storage.grid import Grid
from halotile.storage.rim import Readable
from halotile.storage.sharded.output import Layout, ShardWriter
from halotile.tasks.convolution.overlap_save import PERIOD
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.image_task import Denoised
from halotile.tasks.noise.simulated import RandomImage
from halotile.tasks.priors.base import DenoisingPrior, Prior, denoised_of

SEED = 0
"""Seed of the random image that a trial denoises where there is no image yet."""


@dataclass(frozen=True)
class CutImage:
    """An image cut into blocks."""

    prior: Prior  # prior that acts on each block
    grid: Grid  # blocks
    # method that computes the gradient: it decides which region of a denoised image is requested at once
    form: Form


def denoising_of(
    cut: CutImage, layout: Layout, images: Iterable[Readable], output: OutputPath
) -> DenoiseTask | None:
    """Return the denoising of a prior on a block, region by region, as a task; None where it denoises nothing.

    ``cut``: blocks and the prior; ``layout``: layout of the solver's images; ``images``: first that could be an iterate is denoised, else random
    numbers; ``output``: path of the result. Nothing is written there.
    """
    denoised = denoised_of(cut.prior)
    if denoised is None:
        return None
    fitting = (image for image in images if (image.shape, image.dtype) == (denoised.shape, denoised.dtype))
    return DenoiseTask(
        source=next(fitting, RandomImage(denoised.shape, denoised.dtype, SEED)),
        sides={},
        writer=ShardWriter(output, layout),
        grid=_grid(denoised, cut, layout),
        rim=denoised.rim,
        roles=denoised.roles,
        denoiser=denoised.denoiser,
        tiling=denoised.tiling,
        channels_out=1,
        device=denoised.device,
        precision=denoised.precision,
        on_nan="propagate",
        overlap=False,  # a region is waited for: the solver computes with it
        channels_last=denoised.channels_last,
        seals=denoised.seals,
    )


def _grid(denoised: Denoised, cut: CutImage, layout: Layout) -> Grid:
    """Return the regions requested at once: a block or a shard, with the margin of later iterations of a pass."""
    form, grid, spatial = cut.form, denoised.grid, denoised.roles.spatial
    edges = layout.shard if form.by_shard else grid.block
    # Along the rim of the image operators are not folded, and transforms are extended to whole cells.
    drawn_out = PERIOD // 2 if form.is_fft else 0
    around = 2 * (form.per_pass - 1) * (cut.prior.reach() + form.fused_reach + drawn_out)
    grown = (
        min(b + around * (axis in spatial), n)
        for axis, (b, n) in enumerate(zip(edges, grid.shape, strict=True))
    )
    return replace(
        grid, block=tuple(-(-edge // align) * align for edge, align in zip(grown, grid.align, strict=True))
    )


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
