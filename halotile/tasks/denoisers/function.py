"""A user's own NumPy function as a denoiser."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.tasks.denoisers.base import Model, Pixelwise
from halotile.tasks.lazy import torch
from halotile.tasks.options import check_reference, check_whole, import_reference
from halotile.tasks.user_code import imported_digest, qualified_name, value_digest

Image = NDArray[Any]
ArrayFunction = Callable[..., Image]  # takes a 2-D or 3-D image and returns one of the same shape


@dataclass(frozen=True, kw_only=True)
class ArrayDenoiser(Pixelwise, ABC):
    """A function on images with a receptive field of ``depth`` pixels."""

    name: ClassVar[str] = "function"
    dims: ClassVar[tuple[int, ...]] = (2, 3)
    boundary: ClassVar[str] = "cut"
    convolutional: ClassVar[bool] = False
    tried_apart: ClassVar[bool] = True

    depth: int
    """Receptive field of the function, in pixels."""

    def __post_init__(self) -> None:
        check_whole("depth", self.depth, 0)

    @property
    @abstractmethod
    def function(self) -> ArrayFunction:
        """The function, with its options."""

    def build(self) -> Model:
        """Apply the function to every image of a batch."""
        return partial(each_image, call=self.function)

    def receptive_field(self) -> int:
        return self.depth

    def bytes_per_pixel(self) -> float:
        """Input and result, and as much again in double precision for the function."""
        return 32.0


@dataclass(frozen=True, kw_only=True)
class Function(ArrayDenoiser):
    """The function named by ``import``, called on one image at a time as ``function(image, **options)``.

    >>> Function(import_="scipy.ndimage:uniform_filter", options={"size": 3}, depth=1).receptive_field()
    1
    """

    import_: str
    """The function: "package.module:name"."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for the function."""
    depth: int
    """Receptive field of the function, in pixels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_reference(self.import_)

    @property
    def title(self) -> str:
        return self.import_

    def check(self) -> Mapping[str, str]:
        """Import the function, and return the digest of its code."""
        return {self.import_: imported_digest(self.import_, import_reference(self.import_))}

    @property
    def function(self) -> ArrayFunction:
        """The function, with its options. Runs the user's code."""
        return partial(import_reference(self.import_), **self.options)


@dataclass(frozen=True, kw_only=True)
class GivenFunction(ArrayDenoiser):
    """A function object from a script; not available in a job file.

    >>> GivenFunction(call=lambda image: image - image.mean(), depth=0).receptive_field()
    0
    """

    call: ArrayFunction
    """The function."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.call):
            raise ConfigError(f"call is {self.call!r}: pass a function that takes an image and returns one.")

    @property
    def title(self) -> str:
        return qualified_name(self.call)

    def check(self) -> Mapping[str, str]:
        """Return the digest of the function's code, and of everything that it uses."""
        return {self.title: value_digest(self.call)}

    @property
    def function(self) -> ArrayFunction:
        return self.call


def each_image(batch: torch.Tensor, *, call: ArrayFunction) -> torch.Tensor:
    """Apply a NumPy function to every channel of every tile.

    Each call gets its own copy, so that a function that works in place changes nothing else.
    """
    images = batch.detach().cpu().numpy().reshape(-1, *batch.shape[2:])
    try:
        results = [checked_result(call(image.copy()), image) for image in images]
    except SystemExit as error:  # it would end the worker
        raise ConfigError("the function exits the program. Write one that returns an image.") from error
    return torch.from_numpy(np.stack(results).reshape(batch.shape)).to(batch.device)


def checked_result(result: Any, image: Image) -> Image:
    """The result in the dtype of the image; another shape is refused."""
    if not isinstance(result, np.ndarray) or result.shape != image.shape:
        shape = getattr(result, "shape", type(result).__name__)
        raise ConfigError(
            f"the function returned {shape} for an image of shape {image.shape}. "
            "Write one that returns an array of the shape of its input."
        )
    if np.iscomplexobj(result):
        raise ConfigError(
            f"the function returned complex numbers ({result.dtype}) for a real image. Write one that returns their real part or modulus."
        )
    return result.astype(image.dtype, copy=False)


DENOISER = Function
