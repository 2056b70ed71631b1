"""Calls of a processor on a batch of tiles, with the parts of its arguments that go with each tile.

Batch norm takes the statistics of the whole batch, whose images are on several workers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from halotile.errors import ConfigError
from halotile.tasks.denoisers.base import NARROW
from halotile.tasks.devices.device import is_out_of_memory, size_limited
from halotile.tasks.distributed.tiling.tiles import Tiles
from halotile.tasks.distributed.transport.calls import Tensors
from halotile.tasks.distributed.transport.objects import Packed, load_for_call
from halotile.tasks.distributed.transport.tensors import Draw, check_tensor
from halotile.tasks.trials.probe import FAR, LENGTHS, stride_along
from halotile.tasks.trials.trial import Trial


class UnmeasuredLayer(Exception):
    """The call has come to a layer whose statistics are not known yet."""

    def __init__(self, number: int, x: torch.Tensor) -> None:
        self.number = number
        self.x = x


def batch_norms(network: Any) -> list[torch.nn.Module]:
    """List the layers of a network that normalise by the statistics of their batch.

    >>> layer = torch.nn.BatchNorm2d(1)
    >>> len(batch_norms(torch.nn.Sequential(layer))), len(batch_norms(layer.eval()))
    (1, 0)
    """
    if not isinstance(network, torch.nn.Module):
        return []
    kind = torch.nn.modules.batchnorm._BatchNorm
    layers = (layer for layer in network.modules() if isinstance(layer, kind))
    return [layer for layer in layers if layer.training or layer.running_mean is None]


@contextmanager
def fixed_statistics(network: Any, statistics: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let layers normalise by given statistics: a mean and a variance for each, in the order in which they are used."""
    layers = batch_norms(network)
    used: list[int] = []

    def forward(number: int, layer: Any, x: torch.Tensor) -> torch.Tensor:
        if number in used:
            raise ValueError(
                "a layer of batch norm is used twice in a call: its statistics would be those of both. Write two layers, or eval()"
            )
        place = 2 * len(used)
        used.append(number)
        if place >= len(statistics):
            raise UnmeasuredLayer(number, x)
        shape = (1, -1) + (1,) * (x.dim() - 2)
        mean, variance = (each.to(x.dtype).reshape(shape) for each in statistics[place : place + 2])
        y = (x - mean) * torch.rsqrt(variance + layer.eps)
        return y if layer.weight is None else y * layer.weight.reshape(shape) + layer.bias.reshape(shape)

    for number, layer in enumerate(layers):
        layer.forward = partial(forward, number, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def measure(reached: UnmeasuredLayer | None) -> torch.Tensor:
    """Return the number of the layer that a call reached, its pixels, and of each channel the mean and the squares around it.

    The number is -1, and alone, if the call came to its end.
    """
    if reached is None:
        return torch.full((1,), -1, dtype=torch.float64)
    x = reached.x.transpose(0, 1).flatten(1).double()
    mean = x.mean(1)
    squares = (x - mean[:, None]).square().sum(1)
    return torch.cat([x.new_tensor([reached.number, x.shape[1]]), mean, squares])


def pool(measured: Sequence[torch.Tensor]) -> tuple[int, torch.Tensor, torch.Tensor, float] | None:
    """Return the number of the layer that the calls reached, with the mean, variance and pixels of all; None at the end.

    Squares around the mean of each call keep the digits that sums of squares lose where an image is far from 0.

    >>> pool([measure(UnmeasuredLayer(4, torch.full((1, 1, 1), value))) for value in (1.0, 3.0)])
    (4, tensor([2.], dtype=torch.float64), tensor([1.], dtype=torch.float64), 2.0)
    """
    layers = {int(each[0]) for each in measured}
    if len(layers) > 1:
        raise ConfigError(
            "the images of a batch go through different layers of batch norm, which have no statistics of all of them then. "
            "Write eval(), or leave images_per_task out."
        )
    if layers == {-1}:
        return None
    table = torch.stack(list(measured))
    counts, (means, squares) = table[:, 1:2], table[:, 2:].chunk(2, 1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    variance = (squares + counts * (means - mean).square()).sum(0) / count
    return layers.pop(), mean, variance, float(count.detach())


def update_running(layer: Any, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
    """Move the running statistics of a layer towards those of a batch, as the layer itself does."""
    if count <= 1:
        raise ConfigError(
            "a batch of a single pixel has no statistics to train batch norm with. Write eval(), or more images."
        )
    if layer.running_mean is None:
        return
    with torch.no_grad():
        layer.num_batches_tracked += 1
        part = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
        layer.running_mean.lerp_(mean.to(layer.running_mean), part)
        layer.running_var.lerp_((variance * count / (count - 1)).to(layer.running_var), part)


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
    return ConfigError(f"{name} {reason}; or distribute(..., unsafe=True), if each tile by itself is what you want.")


Images = tuple[int, int]  # numbers of some images of a batch: the first, and the one after the last
# Role of an argument: cut like the image, repeated for the images of each tile, or passed on as it is.
Role = Literal["image", "sample", "constant"]


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
            statistics = fixed_statistics(processor, values[len(weights) :]) if self.normalises else nullcontext()
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
    """A processor call on some tiles of an image; only their windows are read."""

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
