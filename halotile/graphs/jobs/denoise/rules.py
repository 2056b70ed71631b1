"""Rules for the parts of a denoising job that have to agree."""

from __future__ import annotations

from halotile.graphs.kinds.sections import Output, Tile
from halotile.graphs.rules.combinations import Faults, check_depth, check_sizes
from halotile.tasks.denoisers.base import Denoiser


def sizes_of_input(output: Output, tile: Tile, denoiser: Denoiser) -> Faults:
    yield from check_sizes(output, tile, denoiser.scale)


RULES = (sizes_of_input, check_depth)
