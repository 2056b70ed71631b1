"""A user's own NumPy function as a denoiser."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, MemoryRefused
from halotile.storage.grid import Depth, Region, valid_part
from halotile.tasks.denoisers.base import NARROW, ROUNDING, Model, Pixelwise
from halotile.tasks.options import STRICT, check_reference, check_whole, import_reference
from halotile.tasks.user_code import imported_digest, qualified_name, value_digest

if TYPE_CHECKING:
    import torch

ODD = 5
"""Added to the pixels before a window, of which there are an odd number then: a stride of two does not begin with it."""
LONG_PIXELS = 2**18
"""Pixels of a long image."""
Image = NDArray[Any]
ArrayFunction = Callable[..., Image]
"""Takes a 2-D or 3-D image and returns one of the same shape."""


@dataclass(frozen=True, kw_only=True)
class ArrayDenoiser(Pixelwise, ABC):
    """A function on images with a receptive field of ``depth`` pixels."""

    name: ClassVar[str] = "function"
    dims: ClassVar[tuple[int, ...]] = (2, 3)
    boundary: ClassVar[str] = "cut"
    convolutional: ClassVar[bool] = False

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

    def check_stateless(self, dims: int) -> None:
        """Refuse a function with memory, by calling it on an image, another one, and the first again. Needs no torch.

        Raises
        ------
        ConfigError
            When the two results for the first image differ, or the function fails.
        """
        image, other = np.random.default_rng(20_26).random((2, *(NARROW[dims],) * dims), np.float32)
        first, _, again = (self._call(given.copy()) for given in (image, other, image))
        if not np.array_equal(first, again, equal_nan=True):
            raise ConfigError(
                f"{self.title} returned two results for one image, with another image in between: it keeps state or draws "
                "random numbers, so the result would depend on the order of tiles. Write a function whose result depends on "
                "its input alone."
            )

    def check_depth(self, depth: Depth, image: tuple[int, ...], *, is_cut: bool = True) -> None:
        """Refuse a function that looks farther than this, or cuts its image into parts. Needs no torch.

        The function is tried on windows by themselves, and on an image with one window in the middle of pixels of another
        kind, one at its first corner and one at its last: on a small image, and for each axis on one that is long on it.

        Parameters
        ----------
        depth : tuple of (int, int)
            The halo on each axis.
        image : tuple of int
            Lengths of the real image.
        is_cut : bool
            Whether windows end with the image, as the function's own rule has it. Else a boundary rule continues the image, and
            the function never sees its ends.

        Raises
        ------
        ConfigError
            When results differ at this depth in a window, or the function fails.
        MemoryRefused
            When there is not enough memory for such an image.
        """
        frame = NARROW[len(depth)] // 2
        sides = tuple(max(2 * frame, -(-(a + b + frame // 2) // frame) * frame) for a, b in depth)
        self._check_windows(sides, depth, frame, is_cut=is_cut)
        frames = 2 * frame + ODD
        for axis, length in enumerate(image):
            across = math.prod(n + frames for i, n in enumerate(sides) if i != axis)
            long = min(length, LONG_PIXELS // across) - frames
            if long > sides[axis]:
                self._check_windows((*sides[:axis], long, *sides[axis + 1 :]), depth, frame, is_cut=is_cut)

    def _check_windows(self, sides: tuple[int, ...], depth: Depth, frame: int, *, is_cut: bool) -> None:
        """Check windows of an image that is longer by this frame: in its middle, and at its first and last corners."""
        middle = tuple(frame + ODD for _ in sides)
        image = self._trial_image(sides, middle, frame)
        whole = self._call(image.copy())
        last = tuple(n + frame for n in middle)
        for start in (middle, (0,) * len(sides), last) if is_cut else (middle,):
            self._compare(image, whole, Region.whole(sides).shift(start), depth)

    def _trial_image(self, sides: tuple[int, ...], start: tuple[int, ...], frame: int) -> Image:
        """Random pixels with a window of another kind."""
        inside = tuple(slice(a, a + n) for a, n in zip(start, sides, strict=True))
        draw = np.random.default_rng(20_26)
        try:
            image = draw.uniform(0.5, 1, [place.stop + frame for place in inside]).astype(np.float32)
            # Few of its pixels stand out, as in real images: a threshold at a multiple of the noise keeps some.
            image[inside] = 0.5 * draw.random(sides) ** 4
        except MemoryError as error:
            raise MemoryRefused(
                f"{self.title} has a depth of {self.depth}: an image to check that on, of {list(sides)} pixels, needs more memory than is free. "
                "Write a smaller depth, nearer to what the function needs."
            ) from error
        return image

    def _compare(self, image: Image, whole: Image, window: Region, depth: Depth) -> None:
        """Refuse a function whose result for a window by itself is another than that for the image."""
        part = valid_part(window, depth, image.shape)
        expected = whole[part.slices].astype(float)
        alone = self._call(image[window.slices].copy())[part.relative_to(window).slices].astype(float)
        differ = (alone != expected) & ~(np.isnan(alone) & np.isnan(expected))
        with np.errstate(invalid="ignore"):  # of infinities
            difference = float(np.abs(alone[differ] - expected[differ]).max(initial=0))
        largest = float(np.abs(expected[np.isfinite(expected)]).max(initial=0))
        if difference <= ROUNDING * (largest or 1.0):
            return
        if window.start != (0,) * len(depth) and window.stop != image.shape:
            raise ConfigError(
                f"{self.title} looks farther than its depth of {self.depth}, or at the whole image: tiles differed from the whole by "
                f"{difference:.2g} in a trial. Write a larger depth, or a function that needs only the pixels near each pixel; or, if "
                "you want each tile by itself, tile.seams: allow (in Python, halotile.map_overlap)."
            )
        raise ConfigError(
            f"{self.title} gives pixels at the edge of an image that depend on its other side: tiles differed from the whole by "
            f"{difference:.2g} in a trial. If it wraps round, write tile.boundary: periodic; else a function that repeats or mirrors "
            "the pixels at an edge."
        )

    def _call(self, image: Image) -> Image:
        try:
            return _checked(self.function(image), image)
        except ConfigError:
            raise
        except MemoryError as error:
            raise MemoryRefused(
                f"{self.title} needs more memory than is free for an image of shape {image.shape}: {error}. Write a function "
                "that needs less, or close other programs."
            ) from error
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{self.title} failed on an image of shape {image.shape}: {type(error).__name__}: {error}. "
                f"Write a function that takes a {image.ndim}-D image of any size."
            ) from error

    def receptive_field(self) -> int:
        """The declared depth."""
        return self.depth

    def bytes_per_pixel(self) -> float:
        """Input and result, and as much again in double precision for the function."""
        return 32.0


@dataclass(frozen=True, kw_only=True)
class Function(ArrayDenoiser):
    """The function named by ``import``, called on one image at a time as ``function(image, **options)``.

    Examples
    --------
    >>> Function(import_="scipy.ndimage:uniform_filter", options={"size": 3}, depth=1).receptive_field()
    1
    """

    __pydantic_config__ = STRICT

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
        """The function's name."""
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

    Examples
    --------
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
        """The function's name."""
        return qualified_name(self.call)

    def check(self) -> Mapping[str, str]:
        """Return the digest of the function's code, and of everything that it uses."""
        return {self.title: value_digest(self.call)}

    @property
    def function(self) -> ArrayFunction:
        """The function."""
        return self.call


def each_image(batch: torch.Tensor, *, call: ArrayFunction) -> torch.Tensor:
    """Apply a NumPy function to every channel of every tile.

    Each call gets its own copy, so that a function that works in place changes nothing else.
    """
    import torch

    images = batch.detach().cpu().numpy().reshape(-1, *batch.shape[2:])
    try:
        results = [_checked(call(image.copy()), image) for image in images]
    except SystemExit as error:  # it would end the worker
        raise ConfigError("the function exits the program. Write one that returns an image.") from error
    return torch.from_numpy(np.stack(results).reshape(batch.shape)).to(batch.device)


def _checked(result: Any, image: Image) -> Image:
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
