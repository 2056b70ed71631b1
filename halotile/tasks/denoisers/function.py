"""A NumPy function of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.tasks.denoisers.base import Model, Pixelwise
from halotile.tasks.options import STRICT, check_reference, check_whole, import_reference

if TYPE_CHECKING:
    import torch

Picture = NDArray[Any]
PictureFunction = Callable[..., Picture]
"""A 2-D or 3-D picture in, one of the same shape out."""


@dataclass(frozen=True, kw_only=True)
class _PictureDenoiser(Pixelwise):
    """A function on pictures that looks ``depth`` pixels far."""

    name: ClassVar[str] = "function"
    dims: ClassVar[tuple[int, ...]] = (2, 3)
    boundary: ClassVar[str] = "cut"
    convolutional: ClassVar[bool] = False

    depth: int
    """How far, in pixels, an output pixel of the function looks."""

    def __post_init__(self) -> None:
        check_whole("depth", self.depth, 0)

    def receptive_field(self) -> int:
        """The depth that was written down."""
        return self.depth

    def bytes_per_pixel(self) -> float:
        """Input and result, and as much again in double precision for the function itself."""
        return 32.0


@dataclass(frozen=True, kw_only=True)
class Function(_PictureDenoiser):
    """The function ``import`` on one picture at a time, called as ``function(picture, **options)``.

    Examples
    --------
    >>> Function(import_="scipy.ndimage:uniform_filter", options={"size": 3}, depth=1).receptive_field()
    1
    """

    __pydantic_config__ = STRICT

    import_: str
    """The function: "package.module:name"."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What it is called with, besides the picture."""
    depth: int
    """How far, in pixels, an output pixel of the function looks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_reference(self.import_)

    def build(self) -> Model:
        """Import the function. Runs the user's code."""
        return partial(each_picture, call=partial(import_reference(self.import_), **self.options))


@dataclass(frozen=True, kw_only=True)
class GivenFunction(_PictureDenoiser):
    """A function that a script hands over; it has no place in a job file.

    Examples
    --------
    >>> GivenFunction(call=lambda picture: picture - picture.mean(), depth=0).receptive_field()
    0
    """

    call: PictureFunction
    """The function itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.call):
            raise ConfigError(f"call is {self.call!r}: hand over a function from picture to picture.")

    def build(self) -> Model:
        """The function on every picture of a batch."""
        return partial(each_picture, call=self.call)


def each_picture(batch: torch.Tensor, *, call: PictureFunction) -> torch.Tensor:
    """Apply a NumPy function to every channel of every tile.

    Each call gets a copy of its own, so that a function that works in place changes nothing else.
    """
    import torch

    pictures = batch.detach().cpu().numpy().reshape(-1, *batch.shape[2:])
    results = [_checked(call(picture.copy()), picture) for picture in pictures]
    return torch.from_numpy(np.stack(results).reshape(batch.shape)).to(batch.device)


def _checked(result: Any, picture: Picture) -> Picture:
    """The result in the type of the picture; another shape is refused."""
    if not isinstance(result, np.ndarray) or result.shape != picture.shape:
        shape = getattr(result, "shape", type(result).__name__)
        raise ConfigError(
            f"the function made {shape} of a picture of shape {picture.shape}. "
            "Write one that returns an array of the shape it was given."
        )
    return result.astype(picture.dtype, copy=False)


DENOISER = Function
