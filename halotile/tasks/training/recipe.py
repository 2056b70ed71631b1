"""Everything that defines a training. Declaring one imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halotile.tasks.networks.base import Network
from halotile.tasks.training.patches import PatchSource


@dataclass(frozen=True)
class Recipe:
    """A training.

    Parameters
    ----------
    patches : PatchSource
        The images.
    network : Network
        The architecture.
    method : str
        One of :data:`~halotile.tasks.training.methods.METHODS`.
    steps, batch, slots : int
        Number of steps, patches of a step, and parts that a batch has for the ranks to share.
    rate : float
        Learning rate of Adam in the first step; it ends at 0, along half a cosine.
    every : int
        Steps from one row of the curve to the next.
    mode : {"exact", "fast"}
        Order in which gradients are added: see :func:`~halotile.tasks.groups.training.fit.fit`.
    checkpoint, curve, examples : Path
        Files on a disk that all ranks see.
    """

    patches: PatchSource
    network: Network
    method: str
    steps: int
    batch: int
    slots: int
    rate: float
    every: int
    mode: Literal["exact", "fast"] = "exact"
    checkpoint: Path = Path()
    curve: Path = Path()
    examples: Path = Path()

    @property
    def channels(self) -> int:
        """Channels of the images."""
        return self.patches.images[0].channels
