"""A processor called on a batch of tiles, on a worker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from halotile.tasks.distributed.tiling.tiles import Tiles
from halotile.tasks.distributed.transport.arguments import Argument
from halotile.tasks.distributed.transport.calls import Tensors
from halotile.tasks.distributed.transport.loaded_objects import lent
from halotile.tasks.distributed.transport.packing import Packed
from halotile.tasks.distributed.transport.random_state import Draw
from halotile.tasks.distributed.transport.tensors import check_tensor


@dataclass(frozen=True)
class Processed:
    """``processor(batch, ...)``, trimmed to what is kept of each tile.

    Parameters
    ----------
    processor : Packed
        The network or function.
    rest : Carried, optional
        Positional arguments and keywords that are no tensors.
    arguments : tuple of Argument
        Those that are; they follow the batch among the inputs.
    parameters : tuple of str
        Names of weights of the network that follow them: those that are to have gradients.
    tiles : Tiles, optional
        How results are trimmed; not at all when left out.
    draw : Draw, optional
        What random numbers it has, wherever it runs.
    """

    processor: Packed
    rest: Packed | None
    arguments: tuple[Argument, ...] = ()
    parameters: tuple[str, ...] = ()
    tiles: Tiles | None = None
    draw: Draw | None = None

    def of(self, number: int) -> Processed:
        """The same with random numbers of its own, for the batch that begins with this tile."""
        return replace(self, draw=self.draw and self.draw.of(number))

    def __call__(self, batch: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
        with lent(self.draw, self.processor, self.rest) as (processor, given):
            rest, words = given or ([], {})
            positional, keywords = list(rest), dict(words)
            for argument, tensor in zip(self.arguments, tensors, strict=False):
                if isinstance(argument.place, int):
                    positional[argument.place] = tensor
                else:
                    keywords[argument.place] = tensor
            result = self._call(processor, batch, positional, keywords, tensors[len(self.arguments) :])
        check_tensor("the processor", result)
        if self.tiles is not None:
            self.tiles.check_made(result, batch)
        return (result if self.tiles is None else self.tiles.trimmed(result),)

    def _call(
        self,
        processor: Any,
        batch: torch.Tensor,
        positional: list[Any],
        words: dict[str, Any],
        weights: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        if not weights:
            result: torch.Tensor = processor(batch, *positional, **words)
            return result
        named = dict(zip(self.parameters, weights, strict=True))
        called: torch.Tensor = torch.func.functional_call(processor, named, (batch, *positional), words)
        return called


@dataclass(frozen=True)
class CutOut:
    """The same on an image, of which only the windows of some tiles are read.

    Parameters
    ----------
    processed : Processed
        What is done to the batch.
    tiles : Tiles
        How the image is cut.
    numbers : tuple of int
        The tiles of the batch.
    """

    processed: Processed
    tiles: Tiles
    numbers: tuple[int, ...]

    def __call__(self, image: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
        batch = torch.cat([self.tiles.window(image, number) for number in self.numbers])
        arguments = self.processed.arguments
        cut = (a.of(t, self.tiles, self.numbers) for a, t in zip(arguments, tensors, strict=False))
        return self.processed(batch, *cut, *tensors[len(arguments) :])
