"""Tensors beside the image among the arguments of a processor: how they go with the tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from halotile.tasks.distributed.tiling.tiles import Tiles

Role = Literal["image", "sample", "constant"]
"""Of an argument: cut as the image is, repeated for the images of each tile, or handed on."""


@dataclass(frozen=True)
class Argument:
    """A tensor among the arguments of a processor.

    Parameters
    ----------
    place : int or str
        Its position behind the image, or its keyword.
    role : str
        How it goes with the tiles.
    """

    place: int | str
    role: Role

    def of(self, tensor: torch.Tensor, tiles: Tiles, numbers: tuple[int, ...]) -> torch.Tensor:
        """What the batch of these tiles needs of it."""
        if self.role == "image":
            if tensor.shape[0] == 1 and 0 not in tiles.axes:
                tensor = tensor.expand(tiles.shape[0], *tensor.shape[1:])
            whole = replace(tiles, shape=tuple(tensor.shape))
            return torch.cat([whole.window(tensor, number) for number in numbers])
        return self.repeated(tensor, len(numbers))

    def repeated(self, tensor: torch.Tensor, count: int) -> torch.Tensor:
        """What a batch of so many tiles of each image needs of what is not cut."""
        if self.role == "sample" and count > 1:
            return tensor.repeat(count, *(1,) * (tensor.dim() - 1))
        return tensor


def tensors_of(
    args: Sequence[Any], words: Mapping[str, Any], image: Sequence[int], axes: Sequence[int]
) -> tuple[tuple[Argument, ...], list[torch.Tensor]]:
    """The tensors among arguments, with what each is to the tiles of an image of this shape that is cut along these axes."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *words.items()]
    found = [(place, value) for place, value in places if isinstance(value, torch.Tensor)]
    arguments = tuple(Argument(place, role_of(value.shape, image, axes)) for place, value in found)
    return arguments, [value for _, value in found]


def role_of(shape: Sequence[int], image: Sequence[int], axes: Sequence[int]) -> Role:
    """What a tensor of one shape is to the tiles of an image of another.

    As large as the image where that is cut, it is cut as well. Otherwise its first axis may be that of the batch. Of a batch
    of one image that is told from axes of length 1 by what follows: fewer axes than those of an image, and not a single number.

    Examples
    --------
    >>> [role_of(shape, (4, 3, 64, 64), (2, 3)) for shape in [(4, 1, 64, 64), (4, 2), (4,), (7, 2), ()]]
    ['image', 'sample', 'sample', 'constant', 'constant']
    >>> [role_of(shape, (1, 3, 64, 64), (2, 3)) for shape in [(1, 2), (1,), (1, 1, 5, 5)]]
    ['sample', 'constant', 'constant']
    """
    if len(shape) == len(image) and all(shape[axis] == image[axis] for axis in axes):
        return "image"
    if not shape or 0 in axes or shape[0] != image[0]:
        return "constant"
    is_one = image[0] == 1 and (len(shape) >= len(image) or math.prod(shape) == 1)
    return "constant" if is_one else "sample"
