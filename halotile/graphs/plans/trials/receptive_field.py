"""Depth of the halo: declared by the denoiser, probed from a network, or given and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from halotile.errors import ConfigError
from halotile.graphs.kinds.sections import Tile
from halotile.storage.grid import Depth
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.denoisers.function import ArrayDenoiser
from halotile.tasks.trials.probe import check_ragged, probe
from halotile.tasks.trials.rehearsal import rehearse, tiling_error
from halotile.tasks.trials.trial import check_depth

DIFFER = "tiles differ from the whole image"
"""Start of a note that is kept with the run."""


@dataclass(frozen=True, slots=True)
class Halo:
    """The halo of a job, its origin, and notes about it."""

    depth: Depth
    """Width before and after, for each tiled axis, in pixels."""
    align: int
    origin: str
    probed: tuple[int, int] | None = None
    """Receptive field and alignment, where they had to be probed."""
    notes: tuple[str, ...] = ()
    difference: float = 0.0
    """Largest difference between tiles and the whole image in a trial, relative to the largest pixel."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, and the difference in words."""
        if not self.difference:
            return self.notes
        note = f"{DIFFER} by {self.difference:.1g} of its largest pixel, on a trial"
        return (*self.notes, note)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Build a halo from the JSON of its :func:`~dataclasses.asdict`."""
        return cls(**{name: _with_tuples(value) for name, value in stored.items()})


def _with_tuples(value: Any) -> Any:
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def resolve_halo(tile: Tile, denoiser: Denoiser, dims: int, known: tuple[int, int] | None = None) -> Halo:
    """Return the depth of a job's tiles. A resumed run keeps the probed values of its first run as ``known``."""
    needed, align, probed = denoiser.receptive_field(), denoiser.alignment, None
    origin = f"declared by {denoiser.name}"
    if needed is None:
        probed = known or probe(denoiser, dims)
        described = denoiser.probed(*probed)  # what the job declares takes precedence
        needed, align = described.receptive_field() or 0, described.alignment
        origin = "probed"
    if tile.depth == "auto":
        return Halo(((needed, needed),) * dims, align, origin, probed)
    widths = (tile.depth,) * dims if isinstance(tile.depth, int) else tuple(tile.depth)
    if len(widths) != dims:
        raise ConfigError(
            f"tile.depth is {tile.depth}: write one number, or one for each of the {dims} tiled axes."
        )
    depth = tuple((d, d) for d in widths)
    if min(widths) >= needed:
        return Halo(depth, align, "given", probed)
    if tile.seams == "allow":
        return Halo(
            depth,
            align,
            "given",
            probed,
            (f"depth {min(widths)} is below the receptive field {needed}: seams will show",),
        )
    raise ConfigError(
        f"tile.depth is {min(widths)} but {denoiser.title}'s receptive field is {needed}: seams would show. "
        f"Write depth: {needed}, or depth: auto, or seams: allow."
    )


def is_cut_at_edge(tile: Tile, denoiser: Denoiser) -> bool:
    """Return True where windows end with the image; else a boundary rule continues it."""
    return (denoiser.boundary if tile.boundary == "auto" else tile.boundary) == "cut"


def rehearsed(tile: Tile, denoiser: Denoiser, halo: Halo, image: tuple[int, ...]) -> Halo:
    """Return the halo of a user's network or function after comparing its tiles with a whole image.

    ``image``: lengths of the tiled axes.

    Returns
    -------
    Halo
        With a larger alignment, where tiles agree with the whole only then; with the difference, where they
        do not quite agree.
    """
    is_cut = is_cut_at_edge(tile, denoiser)
    if isinstance(denoiser, ArrayDenoiser):
        if tile.seams != "allow":
            check_depth(denoiser, halo.depth, image, is_cut=is_cut)
        return halo
    probed = denoiser.probed(*halo.probed) if halo.probed else denoiser
    if probed.alignment > 1:
        check_ragged(probed, image)
    if tile.seams == "allow":
        return halo
    rehearsal = rehearse(probed, halo.depth, image, search=halo.probed is not None, is_cut=is_cut)
    if halo.probed is not None:
        if not rehearsal.agrees:
            raise tiling_error(denoiser, rehearsal, image)
        halo = replace(halo, align=rehearsal.alignment, probed=(halo.probed[0], rehearsal.alignment))
    return replace(halo, difference=rehearsal.difference)
