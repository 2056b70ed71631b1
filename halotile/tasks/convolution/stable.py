"""Convolutions with the same bits for small tiles as for large ones.

For a single small image torch switches from oneDNN to its own routine, whose sums run
in another order: the last bits of a tile would depend on its size and on how many tiles are
computed at once. Two images at once never go to that routine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FEW = 20480
"""Largest product of the first four lengths for which one image goes to that routine (aten/native/Convolution.cpp)."""


def is_few(image: torch.Tensor) -> bool:
    """Return whether torch sends a convolution of this image to its own routine."""
    return bool(image.shape[0] == 1 and math.prod(image.shape[:4]) <= FEW)


def make_steady(module: Any) -> None:
    """Make every convolution layer of a module compute two copies of a small single image, and keep one."""
    from torch.nn import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d

    kinds = (Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)
    for layer in module.modules():
        if isinstance(layer, kinds):
            layer.forward = partial(_steady_layer, layer.forward, layer.weight.dim())


def convolve(layer: Any, image: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
    """``layer(image)`` for a Conv2d without stride, with another padding of zeros."""
    from torch.nn.functional import conv2d

    result: torch.Tensor = steadily(
        partial(conv2d, weight=layer.weight, bias=layer.bias, padding=padding), image
    )
    return result


def _steady_layer(
    forward: Callable[..., Any], axes: int, image: torch.Tensor, *more: Any, **options: Any
) -> Any:
    """The forward of a layer that also takes an image without the axis of batches."""
    if image.dim() == axes - 1:
        return steadily(forward, image[None], *more, **options)[0]
    return steadily(forward, image, *more, **options)


def steadily(forward: Callable[..., Any], image: torch.Tensor, *more: Any, **options: Any) -> Any:
    """``forward(image, *more)``, computed on two copies of each image where the first is small and single."""
    if not is_few(image) or image.is_cuda:
        return forward(image, *more, **options)
    from torch import Tensor

    twice = [
        part.repeat(2, *[1] * (part.dim() - 1)) if isinstance(part, Tensor) else part
        for part in (image, *more)
    ]
    return forward(*twice, **options)[:1]
