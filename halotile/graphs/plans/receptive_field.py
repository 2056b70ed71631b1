"""How deep the halo must be: declared by the denoiser, probed from a network, or given and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from halotile.errors import ConfigError
from halotile.graphs.jobs.sections import Tile
from halotile.storage.grid import Depth
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.denoisers.function import ArrayDenoiser
from halotile.tasks.trials.probe import check_ragged, probe
from halotile.tasks.trials.rehearsal import rehearse, tiling_error

DIFFER = "tiles differ from the whole image"
"""A note that begins so is kept with the run."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The halo of a job, where it comes from, and what is to be said about it."""

    depth: Depth
    """Before and after, for each tiled axis, in pixels."""
    align: int
    origin: str
    probed: tuple[int, int] | None = None
    """Receptive field and alignment, where they had to be found out."""
    notes: tuple[str, ...] = ()
    difference: float = 0.0
    """How far tiles were from the whole image on a trial, relative to the largest pixel."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, and the difference in words."""
        if not self.difference:
            return self.notes
        note = f"{DIFFER} by {self.difference:.1g} of its largest pixel, on a trial"
        return (*self.notes, note)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """From what became of :func:`~dataclasses.asdict` in a file."""
        return cls(**{name: _with_tuples(value) for name, value in stored.items()})


def _with_tuples(value: Any) -> Any:
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def resolve_reach(tile: Tile, denoiser: Denoiser, dims: int, known: tuple[int, int] | None = None) -> Reach:
    """The depth of a job's tiles. A resumed run keeps what its first run probed: that is ``known``.

    Raises
    ------
    ConfigError
        When a depth smaller than the receptive field is given and seams are not allowed.
    """
    needed, align, probed = denoiser.receptive_field(), denoiser.alignment, None
    origin = f"declared by {denoiser.name}"
    if needed is None:
        needed, align = probed = known or probe(denoiser, dims)
        origin = "probed"
    if tile.depth == "auto":
        return Reach(((needed, needed),) * dims, align, origin, probed)
    given = (tile.depth,) * dims if isinstance(tile.depth, int) else tuple(tile.depth)
    if len(given) != dims:
        raise ConfigError(
            f"tile.depth is {tile.depth}: write one number, or one for each of the {dims} tiled axes."
        )
    depth = tuple((d, d) for d in given)
    if min(given) >= needed:
        return Reach(depth, align, "given", probed)
    if tile.seams == "allow":
        return Reach(
            depth,
            align,
            "given",
            probed,
            (f"depth {min(given)} is below the receptive field {needed}: seams will show",),
        )
    raise ConfigError(
        f"tile.depth is {min(given)} but {denoiser.title}'s receptive field is {needed}: seams would show. "
        f"Write depth: {needed}, or depth: auto, or seams: allow."
    )


def rehearsed(tile: Tile, denoiser: Denoiser, reach: Reach, image: tuple[int, ...]) -> Reach:
    """The reach of a user's network or function after its tiles were compared with a whole image.

    Parameters
    ----------
    image : tuple of int
        Lengths of the tiled axes.

    Returns
    -------
    Reach
        With a larger alignment, where tiles agree with the whole only then; with the difference, where they do not quite.

    Raises
    ------
    ConfigError
        When the tiles show, and nobody said by hand how far it looks, or that seams are allowed; or when the
        network cannot take the image's far edge.
    """
    if isinstance(denoiser, ArrayDenoiser):
        if tile.seams != "allow":
            denoiser.check_depth(reach.depth)
        return reach
    known = denoiser.probed(*reach.probed) if reach.probed else denoiser
    if known.alignment > 1:
        check_ragged(known, image)
    if tile.seams == "allow":
        return reach
    found = rehearse(known, reach.depth, image, search=reach.probed is not None)
    if reach.probed is not None:
        if not found.agrees:
            raise tiling_error(denoiser, found, image)
        reach = replace(reach, align=found.alignment, probed=(reach.probed[0], found.alignment))
    return replace(reach, difference=found.difference)
