"""A prior's denoiser as a denoising task, so that a GPU can be tried for the blocks that will be computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from halotile.graphs.jobs.reconstruct.problem.forms import Form
from halotile.storage.disk.object_path import OutputPath
from halotile.storage.grid import Grid
from halotile.storage.rim import Readable
from halotile.storage.sharded.output import Layout, ShardWriter
from halotile.tasks.convolution.overlap_save import PERIOD
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.denoised_image import Denoised
from halotile.tasks.noise.draws import RandomImage
from halotile.tasks.priors.base import Prior, denoised_of

SEED = 0
"""Seed of the random image that a trial denoises where there is no image yet."""


@dataclass(frozen=True)
class CutImage:
    """An image cut into blocks.

    Parameters
    ----------
    prior : Prior
        The prior that acts on each block.
    grid : Grid
        The blocks.
    form : Form
        Method that computes the gradient: it decides which region of a denoised image is requested at once.
    """

    prior: Prior
    grid: Grid
    form: Form


def denoising_of(
    cut: CutImage, layout: Layout, images: Iterable[Readable], output: OutputPath
) -> DenoiseTask | None:
    """Return the denoising of a prior on a block, region by region, as a task; None where it denoises nothing.

    Parameters
    ----------
    cut : CutImage
        The blocks and the prior.
    layout : Layout
        Layout of the solver's images.
    images : iterable of Readable
        The first that could be an iterate is denoised, else random numbers.
    output : Path or ObjectPath
        Path of the result. Nothing is written there.
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
