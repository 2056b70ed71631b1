"""Calls of a processor on a batch of tiles, with the parts of its arguments that go with each tile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from halotile.errors import ConfigError
from halotile.tasks.denoisers.base import NARROW
from halotile.tasks.devices.device import is_out_of_memory
from halotile.tasks.devices.memory_limits import size_limited
from halotile.tasks.distributed.tiling.batch_statistics import UnmeasuredLayer, fixed_statistics, measure
from halotile.tasks.distributed.tiling.tiles import Tiles
from halotile.tasks.distributed.transport.calls import Tensors
from halotile.tasks.distributed.transport.objects import Packed, load_for_call
from halotile.tasks.distributed.transport.random_state import Draw
from halotile.tasks.distributed.transport.tensors import check_tensor
from halotile.tasks.trials.probe import FAR, LENGTHS, stride_along
from halotile.tasks.trials.trial import Trial


@dataclass(frozen=True)
class StrideTrial:
    """The multiple on which tiles of a processor have to begin, found by calling it on windows."""

    call: ProcessorCall  # call on windows, without tiles
    channels: int  # channels, dims: number of channels of the images, and of axes after that of the channels
    dims: int
    axes: tuple[int, ...]  # axes in question, counted from the one after the channels
    limit_bytes: int | None  # largest size of the process

    def __call__(self, like: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
        """Return the multiple for windows of the dtype of ``like``, or ``FAR`` or ``PLACED``.

        It is NaN if the processor fails, and infinite if it runs out of memory.
        """

        def model(windows: torch.Tensor) -> torch.Tensor:
            arguments = zip(self.call.arguments, tensors, strict=True)
            parts = (_expand(argument, tensor, windows) for argument, tensor in arguments)
            (result,) = self.call(windows.to(like), *parts)
            assert result is not None
            return result.cpu()

        with size_limited(self.limit_bytes):
            try:
                window = torch.zeros(1, self.channels, *[NARROW[self.dims]] * self.dims)
                with torch.no_grad():
                    result = model(window)
                scale = max(1, result.shape[2] // window.shape[2])
                trial = Trial(model, "the processor", (self.channels, result.shape[1]), scale, self.dims)
                strides = [stride_along(trial, axis) for axis in self.axes]
            except Exception as error:
                return (torch.tensor([float("inf" if is_out_of_memory(error) else "nan")]),)
        # FAR and PLACED are both below any stride.
        return (torch.tensor([float(min(strides) if min(strides) <= 0 else math.lcm(*strides))]),)


def has_trial(image: torch.Tensor, axes: Sequence[int]) -> bool:
    """Return True for images that are cut along spatial axes, and whose dtype has NaN."""
    dtype = image.dtype if isinstance(image.dtype, torch.dtype) else None
    is_float = dtype is None or dtype.is_floating_point or dtype.is_complex
    return is_float and len(image.shape) - 2 in LENGTHS and min(axes, default=0) >= 2


def shrink_argument(argument: Argument, tensor: torch.Tensor) -> torch.Tensor:
    """Reduce an argument to the part that can be expanded for windows of any size."""
    if argument.role == "image":
        return tensor[(slice(1), slice(None), *[slice(1)] * (tensor.dim() - 2))]
    return tensor[:1] if argument.role == "sample" else tensor


def _expand(argument: Argument, tensor: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
    if argument.role == "image":
        return tensor.expand(len(windows), tensor.shape[1], *windows.shape[2:])
    return argument.repeat(tensor, len(windows))


def tiling_error(name: str, stride: float) -> ConfigError:
    """Return the error for a processor that cannot be tiled."""
    reason = (
        f"looks at the whole image, or at least {max(LENGTHS[2]) // 2 - 1} pixels far: tiles cannot give its result. A "
        "normalisation, attention or Fourier transform over all pixels does that. Write a local network"
        if stride == FAR
        else "gives other pixels where a window begins elsewhere: its result depends on the position of the tile. A position encoding "
        "does that. Write a network without one"
    )
    return ConfigError(
        f"{name} {reason}; or distribute(..., unsafe=True), if each tile by itself is what you want."
    )


Images = tuple[int, int]
"""Numbers of some images of a batch: the first, and the one after the last."""
Role = Literal["image", "sample", "constant"]
"""Role of an argument: cut like the image, repeated for the images of each tile, or passed on as it is."""


@dataclass(frozen=True)
class Argument:
    """A tensor among the arguments of a processor."""

    place: int | str  # its position after the image, or its keyword
    role: Role

    def for_tiles(self, tensor: torch.Tensor, tiles: Tiles, numbers: tuple[int, ...]) -> torch.Tensor:
        """Return the part of a tensor that goes with the batch of these tiles."""
        if self.role == "image":
            if tensor.shape[0] == 1 and 0 not in tiles.axes:
                tensor = tensor.expand(tiles.shape[0], *tensor.shape[1:])
            whole = replace(tiles, shape=tuple(tensor.shape))
            return torch.cat([whole.window(tensor, number) for number in numbers])
        return self.repeat(tensor, len(numbers))

    def select_images(self, tensor: torch.Tensor, images: Images, count: int) -> torch.Tensor:
        """Return the part of a tensor that goes with some of ``count`` images."""
        is_for_each = self.role != "constant" and tensor.shape[0] == count
        return tensor[slice(*images)] if is_for_each else tensor

    def repeat(self, tensor: torch.Tensor, count: int) -> torch.Tensor:
        """Repeat a tensor that is not cut for a batch of ``count`` tiles of each image."""
        if self.role == "sample" and count > 1:
            return tensor.repeat(count, *(1,) * (tensor.dim() - 1))
        return tensor


def find_tensors(
    args: Sequence[Any], kwargs: Mapping[str, Any], image: Sequence[int], axes: Sequence[int]
) -> tuple[tuple[Argument, ...], list[torch.Tensor]]:
    """Find the tensors among arguments, with their roles for an image that is cut along these axes."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    found = [(place, value) for place, value in places if isinstance(value, torch.Tensor)]
    arguments = tuple(Argument(place, find_role(value.shape, image, axes)) for place, value in found)
    return arguments, [value for _, value in found]


def find_role(shape: Sequence[int], image: Sequence[int], axes: Sequence[int]) -> Role:
    """Role of a tensor of one shape for the tiles of an image of another.

    A tensor as large as the image along the cut axes is cut like it. Otherwise its first axis may be the
    batch axis. For a batch of one image, an axis of length 1 counts as the batch axis if the tensor has fewer
    axes than the image and more than one element.

    Examples
    --------
    >>> [find_role(shape, (4, 3, 64, 64), (2, 3)) for shape in [(4, 1, 64, 64), (4, 2), (4,), (7, 2), ()]]
    ['image', 'sample', 'sample', 'constant', 'constant']
    >>> [find_role(shape, (1, 3, 64, 64), (2, 3)) for shape in [(1, 2), (1,), (1, 1, 5, 5)]]
    ['sample', 'constant', 'constant']
    """
    if len(shape) == len(image) and all(shape[axis] == image[axis] for axis in axes):
        return "image"
    if not shape or 0 in axes or shape[0] != image[0]:
        return "constant"
    is_ambiguous = image[0] == 1 and (len(shape) >= len(image) or math.prod(shape) == 1)
    return "constant" if is_ambiguous else "sample"


@dataclass(frozen=True)
class ProcessorCall:
    """``processor(batch, ...)``, with the halo of each tile trimmed."""

    processor: Packed  # network or function
    constants: Packed | None  # positional arguments and keywords that are not tensors
    arguments: tuple[Argument, ...] = ()  # arguments that are tensors; they follow the batch among the inputs
    # names of the weights of the network that need gradients; the weights follow the arguments
    weights: tuple[str, ...] = ()
    tiles: Tiles | None = None  # tiles that results are trimmed for; without them, results are not trimmed
    draw: Draw | None = None  # random numbers of the call
    # `fixed`: layers of batch norm take their statistics from the inputs after the weights; `measured`: the result is
    # a measurement of the next layer; None: they normalise by the batch of the call
    normalises: Literal["fixed", "measured"] | None = None

    def for_batch(self, number: int) -> ProcessorCall:
        """Return the same call with random numbers for the batch that begins with this tile."""
        return replace(self, draw=self.draw and self.draw.for_number(number))

    def __call__(self, batch: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
        changes = bool(self.weights or self.normalises)
        sources = (self.processor, self.constants)
        with load_for_call(self.draw, (), *sources, is_alone=changes) as (_, processor, constants):
            given, named = constants or ([], {})
            args, kwargs = list(given), dict(named)
            for argument, tensor in zip(self.arguments, tensors, strict=False):
                if isinstance(argument.place, int):
                    args[argument.place] = tensor
                else:
                    kwargs[argument.place] = tensor
            values = tensors[len(self.arguments) :]
            weights = dict(zip(self.weights, values, strict=False))
            statistics = (
                fixed_statistics(processor, values[len(weights) :]) if self.normalises else nullcontext()
            )
            try:
                with statistics:
                    if weights:
                        result = torch.func.functional_call(processor, weights, (batch, *args), kwargs)
                    else:
                        result = processor(batch, *args, **kwargs)
            except UnmeasuredLayer as reached:
                return (measure(reached),)
        if self.normalises == "measured":
            return (measure(None),)
        check_tensor("the processor", result)
        if self.tiles is None:
            return (result,)
        self.tiles.check_result(result, batch)
        return (self.tiles.trim(result),)


@dataclass(frozen=True)
class ImageCall:
    """A processor call on some tiles of an image, of which only their windows are read."""

    call: ProcessorCall  # call on the batch
    tiles: Tiles  # tiles of the images
    numbers: tuple[int, ...]  # tiles of the batch
    images: Images  # images of the batch

    def __call__(self, image: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
        return self.call(*self.inputs(image, *tensors))

    def inputs(self, image: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return the batch, and the parts of the arguments that go with it."""
        count = len(image)
        image = image[slice(*self.images)]
        tiles = replace(self.tiles, shape=tuple(image.shape))
        batch = torch.cat([tiles.window(image, number) for number in self.numbers])
        parts = (
            argument.for_tiles(argument.select_images(tensor, self.images, count), tiles, self.numbers)
            for argument, tensor in zip(self.call.arguments, tensors, strict=True)
        )
        return [batch, *parts]
