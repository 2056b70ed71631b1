"""Translation of deepinv physics to the equivalent operators of this package."""

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
"""Allowed difference between both in single precision, relative to the largest value."""


def translate(physics: Physics, channels: int) -> Operator | None:
    """The operator of this package that is equivalent to a physics, if there is one.

    The two are compared on a random image. Only forward is compared: it determines the adjoint, and
    deepinv's adjoint is not the transpose for some boundaries and kernels.
    """
    kind = type(physics.module)
    make = TRANSLATIONS.get(kind.__name__) if kind.__module__.startswith("deepinv.") else None
    if make is None:
        return None
    try:
        operator = make(physics.module)
        return operator if operator is not None and _measure_alike(operator, physics, channels) else None
    except (*REFUSALS, AttributeError):  # an unknown variant
        return None


def _measure_alike(operator: Operator, physics: Physics, channels: int) -> bool:
    image = np.random.default_rng(0).standard_normal(_image_shape(operator, physics.module, channels))
    image = image.astype(np.float32)
    here, there = np.asarray(read_all(operator.forward(InMemory(image)))), physics.forward(image)
    return here.shape == there.shape and bool(np.abs(here - there).max() <= NEAR * np.abs(there).max())


def _image_shape(operator: Operator, module: Any, channels: int) -> Shape:
    """The size of the physics if it has one, else a small one."""
    if isinstance(operator, Mask):
        return (1, *operator.mask.shape)[-3:]
    size = getattr(module, "img_size", None)
    if size is not None and len(size) == 3:
        return tuple(size)
    factor = getattr(operator, "factor", 1)
    side = factor * (2 * operator.reach + 8)
    return channels, side, side + factor


def _downsampling(module: Any) -> Operator | None:
    kernel = np.ones((1, 1)) if module.filter is None else _kernel(module.filter)
    blur = Blur(kernel=kernel, boundary=_boundary(module.padding), factor=int(module.factor))
    if size := stated_size(module):
        blur.measured(size)  # refuses sizes that only deepinv accepts
    return blur


def _inpainting(module: Any) -> Operator | None:
    mask: NDArray[Any] = module.mask.cpu().numpy()
    for axes in (4, 3):
        if mask.ndim == axes and len(mask) == 1:
            mask = mask[0]
    return Mask(mask=InMemory(mask)) if mask.ndim <= 3 else None


def _kernel(filter_: Any) -> NDArray[Any]:
    """The kernels of the planes from a filter (1, C, rows, columns), or one kernel for all planes."""
    one, channels, rows, columns = filter_.shape
    if one != 1:
        raise ValueError("a filter for each image of a batch")
    kernel: NDArray[Any] = filter_.cpu().numpy().reshape(channels, rows, columns)
    return kernel[0] if channels == 1 else kernel


def _boundary(padding: str) -> str:
    return "zero" if padding == "constant" else padding


TRANSLATIONS: dict[str, Callable[[Any], Operator | None]] = {
    "Blur": lambda module: Blur(kernel=_kernel(module.filter), boundary=_boundary(module.padding)),
    "BlurFFT": lambda module: Blur(kernel=_kernel(module.filter), boundary="circular"),
    "Downsampling": _downsampling,
    "Denoising": lambda module: Blur(kernel=np.ones((1, 1)), boundary="zero"),
    "Inpainting": _inpainting,
}
"""Functions that build the operator, by class name."""


def stated_size(module: Any) -> Shape | None:
    """The image shape (C, H, W) in the options of a ``Downsampling``, the only one that its adjoint returns."""
    size = getattr(module, "imsize", None)
    return tuple(size) if size is not None and len(size) == 3 else None


def channel_counts(module: Any) -> Iterator[int]:
    """Yield possible numbers of channels: as declared, then the usual ones."""
    size = getattr(module, "img_size", None)
    if size is not None and len(size) == 3:
        yield int(size[0])
    shape = tuple(getattr(getattr(module, "filter", None), "shape", ()))
    if len(shape) == 4 and shape[1] > 1:
        yield int(shape[1])
    yield from (1, 3, 2)
