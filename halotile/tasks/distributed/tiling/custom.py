"""Images cut and joined by a tiling strategy of the caller's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halotile.errors import ConfigError
from halotile.tasks.distributed.transport.arguments import Argument

CUSTOM = (
    "get_num_patches",
    "get_local_patches",
    "reduce_patches",
    "apply_batching",
    "unpack_batched_results",
)
"""What a strategy of one's own answers to: the methods of ``deepinv.distributed.strategies.DistributedSignalStrategy``."""


class CustomTiles:
    """The tiles of images of one shape.

    Parameters
    ----------
    strategy : object
        With the methods of deepinv's strategies.
    shape : tuple of int
        Of the image.
    max_batch_size : int, optional
        For the strategy.
    """

    def __init__(self, strategy: Any, shape: tuple[int, ...], max_batch_size: int | None) -> None:
        self.strategy = strategy
        self.shape = shape
        self.max_batch_size = max_batch_size
        self.numbers = list(range(strategy.get_num_patches()))
        if not self.numbers:
            raise ConfigError(f"{self._name} makes no patches of an image of shape {shape}.")

    @property
    def axes(self) -> tuple[int, ...]:
        """Those that it may cut: which it does cut, it does not say."""
        return tuple(range(2, len(self.shape)))

    def cut(self, image: torch.Tensor) -> list[torch.Tensor]:
        """The batches of the tiles of an image."""
        patches = [patch for _, patch in self.strategy.get_local_patches(image, self.numbers)]
        return list(self.strategy.apply_batching(patches, max_batch_size=self.max_batch_size))

    def beside(
        self, argument: Argument, tensor: torch.Tensor, batches: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """What each of the batches of an image needs of a tensor."""
        if argument.role == "image":
            return self.cut(tensor.expand(self.shape[0], *tensor.shape[1:]))
        return [argument.repeated(tensor, len(batch) // self.shape[0]) for batch in batches]

    def joined(
        self, image: torch.Tensor, batches: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The image of processed batches.

        Raises
        ------
        ConfigError
            For results of another size: a strategy has no word for where they go.
        """
        for batch, result in zip(batches, results, strict=True):
            if result.shape != batch.shape:
                raise ConfigError(
                    f"the processor makes {tuple(result.shape)} of tiles of shape {tuple(batch.shape)}, and {self._name} joins tiles "
                    "as large as it cut them. Write tiling_strategy='overlap_tiling', which upscales and takes other channels."
                )
        made = self.strategy.unpack_batched_results(results, len(self.numbers))
        whole = torch.zeros_like(image)
        self.strategy.reduce_patches(whole, list(zip(self.numbers, made, strict=True)))
        return whole

    @property
    def _name(self) -> str:
        return type(self.strategy).__name__
