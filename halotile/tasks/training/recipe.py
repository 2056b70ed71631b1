"""Everything that defines a training. Declaring one imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halotile.tasks.networks.base import Network
from halotile.tasks.training.patches import PatchSource


@dataclass(frozen=True)
class Recipe:
    """A training."""

    patches: PatchSource  # images
    network: Network  # architecture
    method: str  # one of `METHODS`
    # steps, batch, slots: number of steps, patches of a step, and parts that a batch has for the ranks to share
    steps: int
    batch: int
    slots: int
    rate: float  # learning rate of Adam in the first step; it ends at 0, along half a cosine
    every: int  # steps from one row of the curve to the next
    mode: Literal["exact", "fast"] = "exact"  # order in which gradients are added: see `fit`
    checkpoint: Path = Path()  # checkpoint, curve, examples: files on a disk that all ranks see
    curve: Path = Path()
    examples: Path = Path()

    @property
    def channels(self) -> int:
        """Channels of the images."""
        return self.patches.images[0].channels
