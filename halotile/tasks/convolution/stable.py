"""Convolutions that compute a small tile as they compute a large one.

For a single image of few numbers torch turns from oneDNN to a routine of its own, whose sums run
in another order: the last bits of a tile would depend on its size and on how many tiles are
computed at once. Two images at once are never sent there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FEW = 20480
"""Up to this product of the first four lengths, one image is treated differently (aten/native/Convolution.cpp)."""


def is_few(image: torch.Tensor) -> bool:
    """Whether torch treats a convolution over this image differently."""
    return bool(image.shape[0] == 1 and math.prod(image.shape[:4]) <= FEW)


def make_steady(module: Any) -> None:
    """Let every convolution layer of a module compute a small single image twice, and keep one."""
    from torch.nn import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d

    kinds = (Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)
    for layer in module.modules():
        if isinstance(layer, kinds):
            layer.forward = partial(steadily, layer.forward)


def convolve(layer: Any, image: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
    """``layer(image)`` for a Conv2d without stride, with another padding of zeros."""
    from torch.nn.functional import conv2d

    result: torch.Tensor = steadily(
        partial(conv2d, weight=layer.weight, bias=layer.bias, padding=padding), image
    )
    return result


def steadily(forward: Callable[..., Any], image: torch.Tensor, *more: Any, **options: Any) -> Any:
    """``forward(image)``, of two copies where one would be treated differently."""
    if not is_few(image) or image.is_cuda:
        return forward(image, *more, **options)
    return forward(image.repeat(2, *[1] * (image.dim() - 1)), *more, **options)[:1]
