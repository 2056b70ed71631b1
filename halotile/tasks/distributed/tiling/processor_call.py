"""Calls of a processor on a batch of tiles, on a worker."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from halotile.tasks.distributed.tiling.tiles import Tiles
from halotile.tasks.distributed.transport.arguments import Argument
from halotile.tasks.distributed.transport.calls import Tensors
from halotile.tasks.distributed.transport.loaded_objects import load_for_call
from halotile.tasks.distributed.transport.packing import Packed
from halotile.tasks.distributed.transport.random_state import Draw
from halotile.tasks.distributed.transport.tensors import check_tensor


@dataclass(frozen=True)
class ProcessorCall:
    """``processor(batch, ...)``, with the halo of each tile trimmed.

    Parameters
    ----------
    processor : Packed
        The network or function.
    constants : Packed, optional
        Positional arguments and keywords that are not tensors.
    arguments : tuple of Argument
        Arguments that are tensors; they follow the batch among the inputs.
    weights : tuple of str
        Names of the weights of the network that need gradients; the weights follow the arguments.
    tiles : Tiles, optional
        Tiles that results are trimmed for; without them, results are not trimmed.
    draw : Draw, optional
        Random numbers of the call.
    """

    processor: Packed
    constants: Packed | None
    arguments: tuple[Argument, ...] = ()
    weights: tuple[str, ...] = ()
    tiles: Tiles | None = None
    draw: Draw | None = None

    def for_batch(self, number: int) -> ProcessorCall:
        """Return the same call with random numbers for the batch that begins with this tile."""
        return replace(self, draw=self.draw and self.draw.for_number(number))

    def __call__(self, batch: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
        with load_for_call(self.draw, self.processor, self.constants) as (processor, constants):
            given, named = constants or ([], {})
            args, kwargs = list(given), dict(named)
            for argument, tensor in zip(self.arguments, tensors, strict=False):
                if isinstance(argument.place, int):
                    args[argument.place] = tensor
                else:
                    kwargs[argument.place] = tensor
            values = tensors[len(self.arguments) :]
            if values:
                weights = dict(zip(self.weights, values, strict=True))
                result = torch.func.functional_call(processor, weights, (batch, *args), kwargs)
            else:
                result = processor(batch, *args, **kwargs)
        check_tensor("the processor", result)
        if self.tiles is None:
            return (result,)
        self.tiles.check_result(result, batch)
        return (self.tiles.trim(result),)


@dataclass(frozen=True)
class ImageCall:
    """A processor call on some tiles of an image, of which only their windows are read.

    Parameters
    ----------
    call : ProcessorCall
        The call on the batch.
    tiles : Tiles
        The tiles of the image.
    numbers : tuple of int
        The tiles of the batch.
    """

    call: ProcessorCall
    tiles: Tiles
    numbers: tuple[int, ...]

    def __call__(self, image: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
        batch = torch.cat([self.tiles.window(image, number) for number in self.numbers])
        arguments = self.call.arguments
        parts = (
            argument.for_tiles(tensor, self.tiles, self.numbers)
            for argument, tensor in zip(arguments, tensors, strict=False)
        )
        return self.call(batch, *parts, *tensors[len(arguments) :])
