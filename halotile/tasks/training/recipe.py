"""Everything that defines a training, and the curve that it records. Declaring one imports nothing heavy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halotile.tasks.networks.base import Network
from halotile.tasks.training.patches import PatchSource

if TYPE_CHECKING:
    from halotile.tasks.groups.group import TorchGroup

Row = dict[str, float]


@dataclass(frozen=True)
class Recipe:
    """A training; called on each rank of a group, it goes on from its checkpoint.

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
    checkpoint, curve : Path
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
    checkpoint: Path = Path()
    curve: Path = Path()

    def __call__(self, group: TorchGroup) -> None:
        """Train on this rank.

        Raises
        ------
        InputError
            When the images cannot be read, or have next to nothing to train on.
        Diverged
            When the loss is not finite.
        """
        from halotile.tasks.training.trainer import Trainer

        Trainer(self, group.device).train(group)

    @property
    def channels(self) -> int:
        """Channels of the images."""
        return self.patches.images[0].channels

    def trained(self) -> dict[str, Any]:
        """The weights in the checkpoint, as the denoiser reads them."""
        from halotile.tasks.training.trainer import Trainer

        return Trainer(self, "cpu").trained()


def read_curve(path: Path) -> tuple[int, list[Row]]:
    """The number of steps that are done and the rows of the curve; 0 and none where nothing was recorded."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return 0, []
    return int(content["step"]), list(content["rows"])
