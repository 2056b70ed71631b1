"""Images cut and assembled by a user's own tiling strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halotile.errors import ConfigError
from halotile.tasks.distributed.tiling.processor_call import Argument

STRATEGY_METHODS = (
    "get_num_patches",
    "get_local_patches",
    "reduce_patches",
    "apply_batching",
    "unpack_batched_results",
)
"""Methods of a user's strategy: those of ``deepinv.distributed.strategies.DistributedSignalStrategy``."""


@dataclass
class CustomTiles:
    """The tiles of images of one shape.

    Parameters
    ----------
    strategy : object
        An object with the methods of deepinv's strategies.
    shape : tuple of int
        Shape of the image.
    max_batch_size : int, optional
        Batch size for the strategy.
    """

    strategy: Any
    shape: tuple[int, ...]
    max_batch_size: int | None

    def __post_init__(self) -> None:
        self.numbers = list(range(self.strategy.get_num_patches()))
        if not self.numbers:
            raise ConfigError(f"{self._name} makes no patches of an image of shape {self.shape}.")

    @property
    def axes(self) -> tuple[int, ...]:
        """Axes that the strategy may cut; it does not report which of them it does cut."""
        return tuple(range(2, len(self.shape)))

    def cut(self, image: torch.Tensor) -> list[torch.Tensor]:
        """Cut an image into batches of tiles."""
        patches = [patch for _, patch in self.strategy.get_local_patches(image, self.numbers)]
        return list(self.strategy.apply_batching(patches, max_batch_size=self.max_batch_size))

    def cut_argument(
        self, argument: Argument, tensor: torch.Tensor, batches: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the part of an argument that goes with each batch of an image."""
        if argument.role == "image":
            return self.cut(tensor.expand(self.shape[0], *tensor.shape[1:]))
        return [argument.repeat(tensor, len(batch) // self.shape[0]) for batch in batches]

    def join(
        self, image: torch.Tensor, batches: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Assemble the image from processed batches.

        Raises
        ------
        ConfigError
            For results of another size, which a strategy cannot place.
        """
        for batch, result in zip(batches, results, strict=True):
            if result.shape != batch.shape:
                raise ConfigError(
                    f"the processor returned {tuple(result.shape)} for tiles of shape {tuple(batch.shape)}, and {self._name} joins "
                    "tiles of the size it cut. Write tiling_strategy='overlap_tiling', which allows other sizes and channels."
                )
        tiles = self.strategy.unpack_batched_results(results, len(self.numbers))
        whole = torch.zeros_like(image)
        self.strategy.reduce_patches(whole, list(zip(self.numbers, tiles, strict=True)))
        return whole

    @property
    def _name(self) -> str:
        return type(self.strategy).__name__
