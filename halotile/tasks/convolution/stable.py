"""Convolutions with the same bits for small tiles as for large ones.

For a single small image torch switches from oneDNN to its own routine, whose sums run
in another order: the last bits of a tile would depend on its size and on how many tiles are
computed at once. Two images at once never go to that routine.

Kernels of 1x1 go there too, unless there are 16 images or several threads; those with a stride or a dilation never do. A dilation
means nothing to such a kernel, so the layer is given one.

oneDNN itself sums many channels (257, say) in other groups where a contiguous image is smaller than about 30x30. Images of a network are in
channels last on the CPU, where it does not; volumes are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Largest product of the first four lengths for which one image goes to that routine (aten/native/Convolution.cpp).
FEW = 20480


def is_few(image: torch.Tensor) -> bool:
    """Return whether torch sends a convolution of this image to its own routine."""
    return bool(image.shape[0] == 1 and math.prod(image.shape[:4]) <= FEW)


def make_steady(module: Any) -> None:
    """Make every convolution layer of a module go to oneDNN, with two copies of a small single image, and keep one result."""
    for layer in _layers(module):
        dilations = tuple(layer.dilation), _spread(layer)
        layer.forward = partial(_steady_layer, layer, layer.forward, dilations)


def spread(module: Any) -> Any:
    """The module, with kernels of 1x1 that round as torch does with several threads, for any number of them."""
    for layer in _layers(module):
        layer.dilation = _spread(layer)
    return module


def _layers(module: Any) -> list[Any]:
    """The convolution layers of a module."""
    from torch.nn import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d

    kinds = (Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)
    return [layer for layer in module.modules() if isinstance(layer, kinds)]


def convolve(layer: Any, image: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
    """``layer(image)`` for a Conv2d without stride and with more than 1x1 weights, with another padding of zeros."""
    from torch.nn.functional import conv2d

    result: torch.Tensor = steadily(partial(conv2d, weight=layer.weight, bias=layer.bias, padding=padding), image)
    return result


def _spread(layer: Any) -> tuple[int, ...]:
    """A dilation with which the layer computes the same, and goes to oneDNN if its kernel is 1x1."""
    if max(layer.kernel_size[-2:]) > 1 or max(layer.stride) > 1:
        return tuple(layer.dilation)
    return tuple(2 if length == 1 else step for length, step in zip(layer.kernel_size, layer.dilation, strict=True))


def _steady_layer(
    layer: Any,
    forward: Callable[..., Any],
    dilations: tuple[tuple[int, ...], tuple[int, ...]],
    image: torch.Tensor,
    *more: Any,
    **options: Any,
) -> Any:
    """The forward of a layer that also takes an image without the axis of batches."""
    from torch import float32

    # With the dilation, other types and other devices may go to a slower routine.
    layer.dilation = dilations[image.device.type == "cpu" and image.dtype == float32]
    if image.dim() == layer.weight.dim() - 1:
        return steadily(forward, image[None], *more, **options)[0]
    return steadily(forward, image, *more, **options)


def steadily(forward: Callable[..., Any], image: torch.Tensor, *more: Any, **options: Any) -> Any:
    """``forward(image, *more)``, computed on two copies of each image where the first is small and single."""
    if not is_few(image) or image.is_cuda:
        return forward(image, *more, **options)
    from torch import Tensor, cat

    # Joined, not repeated: the copies keep the layout of the image, on which the routine depends.
    twice = [cat([part, part]) if isinstance(part, Tensor) else part for part in (image, *more)]
    return forward(*twice, **options)[:1]
