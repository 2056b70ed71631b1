"""A prior's denoiser as a denoising job of its own: what a trial of a GPU takes for the block that is to be computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from halotile.graphs.jobs.reconstruct.forms import Form
from halotile.graphs.jobs.reconstruct.prior import denoised_of
from halotile.storage.grid import Grid
from halotile.storage.rim import Readable
from halotile.storage.sharded.output import Layout, ShardWriter
from halotile.tasks.convolution.overlap_save import PERIOD
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.denoised_image import Denoised
from halotile.tasks.noise.draws import RandomImage
from halotile.tasks.priors import Prior, reach_of

SEED = 0
"""Of the image that is denoised in a trial where there is none yet."""


@dataclass(frozen=True)
class Cut:
    """An image in blocks.

    Parameters
    ----------
    prior : Prior
        What acts on each.
    grid : Grid
        The blocks.
    form : Form
        How the gradient is computed: it decides which region of a denoised image is asked for at once.
    """

    prior: Prior
    grid: Grid
    form: Form


def denoising_of(cut: Cut, layout: Layout, images: Iterable[Readable], output: Path) -> DenoiseTask | None:
    """What a prior computes of a block, region by region; None where it denoises nothing.

    Parameters
    ----------
    cut : Cut
        The blocks and the prior.
    layout : Layout
        That of the solver's images.
    images : iterable of Readable
        The first that could be an iterate is denoised, else random numbers.
    output : Path
        Where the image will be. Nothing is written there.
    """
    denoised = denoised_of(cut.prior)
    if denoised is None:
        return None
    fitting = (image for image in images if (image.shape, image.dtype) == (denoised.shape, denoised.dtype))
    return DenoiseTask(
        source=next(fitting, RandomImage(denoised.shape, denoised.dtype, SEED)),
        sides={},
        writer=ShardWriter(output, layout),
        grid=_grid(denoised, cut.form, layout),
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


def _grid(denoised: Denoised, form: Form, layout: Layout) -> Grid:
    """The regions that are asked for at once: a block or a shard, with what later iterations of a sweep see of it."""
    grid, spatial = denoised.grid, denoised.roles.spatial
    edges = layout.shard if form.by_shard else grid.block
    # Along the rim of the image operators are not folded, and transforms are drawn out to whole cells.
    drawn_out = PERIOD // 2 if form.is_fft else 0
    around = 2 * (form.per_sweep - 1) * (reach_of(denoised) + form.fused_reach + drawn_out)
    grown = (
        min(b + around * (axis in spatial), n)
        for axis, (b, n) in enumerate(zip(edges, grid.shape, strict=True))
    )
    return replace(
        grid, block=tuple(-(-edge // align) * align for edge, align in zip(grown, grid.align, strict=True))
    )
