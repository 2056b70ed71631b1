"""How deep the halo must be: declared by the denoiser, probed from a network, or given and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halotile.errors import ConfigError
from halotile.graphs.job import Job
from halotile.storage.grid import Depth
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.probe import probe


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


def resolve_reach(
    job: Job, denoiser: Denoiser, dims: int, previous: Mapping[str, Any] | None = None
) -> Reach:
    """The depth of a job. A resumed run keeps what its first run probed.

    Raises
    ------
    ConfigError
        When a depth smaller than the receptive field is given and seams are not allowed.
    """
    needed, align, probed = denoiser.receptive_field(), denoiser.alignment, None
    origin = f"declared by {denoiser.name}"
    if needed is None:
        known = previous["identity"].get("probed") if previous else None
        needed, align = probed = tuple(known) if known else probe(denoiser, dims)
        origin = "probed"
    if job.tile.depth == "auto":
        return Reach(((needed, needed),) * dims, align, origin, probed)
    given = (job.tile.depth,) * dims if isinstance(job.tile.depth, int) else tuple(job.tile.depth)
    if len(given) != dims:
        raise ConfigError(
            f"tile.depth is {job.tile.depth}: write one number, or one for each of the {dims} tiled axes."
        )
    depth = tuple((d, d) for d in given)
    if min(given) >= needed:
        return Reach(depth, align, "given", probed)
    if job.tile.seams == "allow":
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
