"""Operators of deepinv as the operators of this package that they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.tasks.operators.base import InMemory, Operator, Shape, read_all
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.common.physics import REFUSALS, Physics
from halotile.tasks.operators.mask import Mask

NEAR = 5e-6
"""How near, relative to the largest value, ours has to come to theirs in single precision."""


def translated(physics: Physics, channels: int) -> Operator | None:
    """The operator of ours that measures what a physics measures; None where there is none.

    It is held against the physics on a random image. Only the forward operator is: it determines the adjoint, and
    deepinv's is not the transpose for some boundaries and kernels.
    """
    kind = type(physics.module)
    make = TRANSLATIONS.get(kind.__name__) if kind.__module__.startswith("deepinv.") else None
    if make is None:
        return None
    try:
        operator = make(physics.module)
        return operator if operator is not None and _measure_alike(operator, physics, channels) else None
    except (*REFUSALS, AttributeError):  # unlike those that are known
        return None


def _measure_alike(operator: Operator, physics: Physics, channels: int) -> bool:
    image = np.random.default_rng(0).standard_normal(_image_shape(operator, physics.module, channels))
    image = image.astype(np.float32)
    here, there = np.asarray(read_all(operator.forward(InMemory(image)))), physics.forward(image)
    return here.shape == there.shape and bool(np.abs(here - there).max() <= NEAR * np.abs(there).max())


def _image_shape(operator: Operator, module: Any, channels: int) -> Shape:
    """Of the physics' own size where it has one, else a small one."""
    if isinstance(operator, Mask):
        return (1, *operator.mask.shape)[-3:]
    size = getattr(module, "img_size", None)
    if size is not None and len(size) == 3:
        return tuple(size)
    factor = getattr(operator, "factor", 1)
    side = factor * (2 * operator.reach + 8)
    return channels, side, side + factor


def _blur(module: Any) -> Operator | None:
    return Blur(kernel=_kernel(module.filter), boundary=_boundary(module.padding))


def _blur_fft(module: Any) -> Operator | None:
    return Blur(kernel=_kernel(module.filter), boundary="circular")


def _downsampling(module: Any) -> Operator | None:
    kernel = np.ones((1, 1)) if module.filter is None else _kernel(module.filter)
    blur = Blur(kernel=kernel, boundary=_boundary(module.padding), factor=int(module.factor))
    if size := stated_size(module):
        blur.measured(size)  # which refuses sizes that deepinv alone takes
    return blur


def _denoising(module: Any) -> Operator | None:
    return Blur(kernel=np.ones((1, 1)), boundary="zero")


def _inpainting(module: Any) -> Operator | None:
    mask: NDArray[Any] = module.mask.cpu().numpy()
    if mask.ndim == 4 and len(mask) == 1:
        mask = mask[0]
    if mask.ndim == 3 and len(mask) == 1:
        mask = mask[0]
    return Mask(mask=InMemory(mask)) if mask.ndim <= 3 else None


def _kernel(filter_: Any) -> NDArray[Any]:
    """A filter (1, C, rows, columns) as kernels for the planes, or as one for all of them."""
    one, channels, rows, columns = filter_.shape
    if one != 1:
        raise ValueError("a filter for each image of a batch")
    kernel: NDArray[Any] = filter_.cpu().numpy().reshape(channels, rows, columns)
    return kernel[0] if channels == 1 else kernel


def _boundary(padding: str) -> str:
    return "zero" if padding == "constant" else padding


TRANSLATIONS: dict[str, Callable[[Any], Operator | None]] = {
    "Blur": _blur,
    "BlurFFT": _blur_fft,
    "Downsampling": _downsampling,
    "Denoising": _denoising,
    "Inpainting": _inpainting,
}
"""By the name of the class."""


def stated_size(module: Any) -> Shape | None:
    """The shape (C, H, W) of the images that a ``Downsampling`` is told to have: its adjoint gives no other."""
    size = getattr(module, "imsize", None)
    return tuple(size) if size is not None and len(size) == 3 else None


def channel_counts(module: Any) -> Iterator[int]:
    """How many channels its images may have: as it says, or those that are usual."""
    size = getattr(module, "img_size", None)
    if size is not None and len(size) == 3:
        yield int(size[0])
    shape = tuple(getattr(getattr(module, "filter", None), "shape", ()))
    if len(shape) == 4 and shape[1] > 1:
        yield int(shape[1])
    yield from (1, 3, 2)
