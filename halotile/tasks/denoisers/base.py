"""Declarations of a denoiser that make sure that tiling does not change its result.

A denoiser is a frozen dataclass of its options. Its declarations need no torch: a plan is made
from them. ``build`` turns it into a function on tensors, on the worker.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.tasks.denoisers.common.weights import TrainedPixels
from halotile.tasks.lazy import torch
from halotile.tasks.options import check_above_zero, check_level, check_sizes

# `model(batch, **sides) -> batch`: float tensors of shape (tiles, channels, *spatial), in the units of the image;
# each side input has shape (tiles, 1, *spatial). The result has the spatial shape times the denoiser's `scale`. A
# model neither keeps nor changes state between calls.
Model = Callable[..., "torch.Tensor"]

# `filter_plane(plane, out) -> done`: contiguous float32 arrays of two axes; False for a plane that only the model can
# take.
PlaneFilter = Callable[[NDArray[Any], NDArray[Any]], bool]

Margin = tuple[tuple[int, int], ...]  # pixels before and after on every spatial axis that are context only

TINY = 1e-30  # keeps a strength of 0, which leaves the pixel as it is, from dividing by 0

ROUNDING = 1e-5  # difference of two results that rounding explains, after many layers, relative to the largest pixel

# Exponents of two: of strengths that need no other unit, and of numbers whose squares can be summed.
MODERATE, LARGEST_SQUARED = 20, 60

NARROW = {1: 1, 2: 64, 3: 16}  # width of a window on its narrow axes, by number of axes


class CoreModel(ABC):
    """A model that can leave out the margin of its windows, and computes less then."""

    @abstractmethod
    def core(self, batch: torch.Tensor, margin: Margin) -> torch.Tensor:
        """``self(batch)`` without its margin, bit for bit."""


class Denoiser(Protocol):
    """The options of a denoiser and its declarations, most with defaults for subclasses."""

    name: ClassVar[str]
    """The name in a job file."""
    dims: ClassVar[tuple[int, ...]]
    """Numbers of spatial axes that it supports, the preferred one first: ``(2,)``, or ``(3, 2)`` for a filter that
    takes a volume if there is one."""
    boundary: ClassVar[str]
    """The rim rule under which the tiled result equals the result on the whole image."""
    convolutional: ClassVar[bool]
    """True if it is faster in ``channels_last`` memory."""
    takes_valid: ClassVar[bool] = False
    """True if the model leaves out the holes of an image by itself: it takes ``valid``, 1 where a pixel was measured and 0 elsewhere,
    of the shape of the batch, in which holes are 0. Others get an image whose holes are filled."""
    keeps_mean: ClassVar[bool] = False
    """True if the mean of the result is that of the image, also where the noise level differs from pixel to pixel."""
    keeps_values: ClassVar[bool] = False
    """True if every value of the result is one of the image, so that integers need no rounding."""
    tried_apart: ClassVar[bool] = False
    """Checked and tried in a separate process: a user's own code may take any amount of memory."""

    @property
    def title(self) -> str:
        """Name in messages: that of the user's own network or function, if it is one."""
        return self.name

    @property
    def inner(self) -> Denoiser:
        """The denoiser that it applies, if it is one around another; else itself."""
        return self

    @property
    def alignment(self) -> int:
        """Alignment: tile origins must be multiples of it (the total stride of a strided network)."""
        return 1

    @property
    def scale(self) -> int:
        """Output pixels for each input pixel, on every spatial axis."""
        return 1

    @property
    def channels(self) -> tuple[int, int]:
        """Channels in and out. ``(1, 1)``: each channel of the image is denoised by itself."""
        return (1, 1)

    @property
    def side_inputs(self) -> tuple[str, ...]:
        """Names of the per-pixel side inputs that it accepts."""
        return ()

    @property
    def wants_noise_level(self) -> bool:
        """True if the noise level still has to be estimated (``sigma: auto``)."""
        return False

    @property
    def trained_range(self) -> tuple[float, float] | None:
        """Values of pixels that were 0 and 1 while the network was trained, where its weights tell."""
        return None

    @property
    def trained_pixels(self) -> TrainedPixels | None:
        """Mean and deviation of the pixels that the network was trained on, where its weights tell."""
        return None

    def files(self) -> tuple[Path, ...]:
        """Files that determine the result (weights); their contents are part of the job's fingerprint."""
        return ()

    def probed(self, receptive_field: int, alignment: int) -> Self:
        """The denoiser with the values found by a probe in place of ``auto``."""
        return self

    def with_noise_level(self, sigma: float) -> Self:
        """The denoiser with the noise level that was estimated for an image of one plane."""
        return self

    def with_spacing(self, spacing: tuple[float, ...]) -> Self:
        """The denoiser for voxels of this shape, if it takes account of it: sizes along the tiled axes, the smallest is 1."""
        return self

    def check(self) -> Mapping[str, str]:
        """Refuse what ``build`` would refuse on a worker, while the job is planned.

        Returns
        -------
        mapping of str to str
            Digests of the user's own code, by its name. They are part of the job's fingerprint. A
            denoiser with any is tried before the job begins.
        """
        return {}

    def reference(self) -> Model:
        """Build the model as its own library computes it, without the measures that make the bits of tiles agree."""
        return self.build()

    @abstractmethod
    def receptive_field(self) -> int | None:
        """Receptive field in pixels, the least depth; None if it has to be probed."""

    @abstractmethod
    def bytes_per_pixel(self) -> float:
        """Working memory to plan for each pixel of a tile in flight, in bytes."""

    @abstractmethod
    def build(self) -> Model:
        """Build the model, on the CPU in float32. May read files; imports torch."""


@dataclass(frozen=True)
class Around(ABC):
    """A denoiser around another one; declarations that it has not itself are those of the other."""

    inner: Denoiser

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # such as pickle asks for, before there is a denoiser
            raise AttributeError(name)
        return getattr(self.inner, name)

    def build(self) -> Model:
        return self.around(self.inner.build())

    def reference(self) -> Model:
        return self.around(self.inner.reference())

    @abstractmethod
    def around(self, model: Model) -> Model:
        """The model of this denoiser around that of the other."""


class Pixelwise(Denoiser, ABC):
    """A denoiser with one output pixel for each input pixel, of each channel by itself, unless it declares otherwise."""

    def plane_filter(self) -> PlaneFilter | None:
        """The model as a filter of planes on the CPU, with the same bits; None where there is none."""
        return None


@dataclass(frozen=True, kw_only=True)
class Spaced(Pixelwise):
    """Declarations of a denoiser that measures distances in space, not in pixels."""

    spacing: tuple[float, ...] | None = None
    """Size of a pixel along each tiled axis, in one unit. Denoisers redeclare it with their own description."""

    def __post_init__(self) -> None:
        if self.spacing is not None:
            check_sizes("spacing", self.spacing)

    def with_spacing(self, spacing: tuple[float, ...]) -> Self:
        """The denoiser for voxels of this shape, where none is given."""
        return self if self.spacing or max(spacing) == 1 else replace(self, spacing=spacing)

    def spacing_along(self, axes: int) -> tuple[float, ...]:
        """The size of a pixel along each of so many spatial axes, the smallest as 1."""
        if self.spacing is None:
            return (1.0,) * axes
        if len(self.spacing) != axes:
            raise ConfigError(
                f"spacing is {list(self.spacing)}, and {axes} axes are tiled. Write a size for each of them, or leave it out."
            )
        return tuple(size / min(self.spacing) for size in self.spacing)


@dataclass(frozen=True, kw_only=True)
class Leveled(Pixelwise):
    """Declarations of a denoiser whose strength is in noise levels if the noise level is known."""

    sigma: float | Literal["auto"] | None = None
    """The noise level: one number, to be estimated, or unknown. Denoisers redeclare it with their own description."""

    def __post_init__(self) -> None:
        check_level(self.sigma)

    @property
    def side_inputs(self) -> tuple[str, ...]:
        return ("sigma",)

    @property
    def wants_noise_level(self) -> bool:
        return self.sigma == "auto"

    def with_noise_level(self, sigma: float) -> Self:
        """The denoiser with a noise level in place of ``auto``."""
        return replace(self, sigma=sigma)

    def strength_at(self, strength: float, sigma: torch.Tensor | None, dtype: torch.dtype) -> float | torch.Tensor:
        """The strength in the units of the image: one number, or one for each pixel of a noise map.

        The number is rounded to ``dtype``, the type of the image, as a noise map would be: both give the same bits.
        """
        if sigma is not None:
            return sigma * strength
        if self.sigma == "auto":
            raise ConfigError(
                "sigma is auto, but the noise level of the image was not estimated. "
                "Call with_noise_level(...), or write a number."
            )
        if self.sigma is None:
            return strength

        return float(torch.tensor(self.sigma, dtype=dtype) * strength)


@dataclass(frozen=True, kw_only=True)
class LeveledFilter(Leveled, Spaced):
    """A filter with a strength; on a CPU it is applied to one tile at a time, whose arrays may stay in the cache."""

    takes_valid: ClassVar[bool] = True

    strength: float

    def __post_init__(self) -> None:
        Leveled.__post_init__(self)
        Spaced.__post_init__(self)
        check_above_zero("strength", self.strength)

    def build(self) -> Model:
        return self.denoise

    def denoise(
        self, batch: torch.Tensor, sigma: torch.Tensor | None = None, valid: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Filter every tile of a batch; ``sigma`` is a noise level for each pixel, ``valid`` is 0 in holes."""
        if batch.is_cuda:
            return self._in_safe_units(batch, sigma, holed(valid))
        levels, valids = (side.split(1) if side is not None else itertools.repeat(None) for side in (sigma, valid))
        return torch.cat(
            [
                self._in_safe_units(tile, level, holed(measured))
                for tile, level, measured in zip(batch.split(1), levels, valids, strict=False)
            ]
        )

    def _in_safe_units(
        self, image: torch.Tensor, sigma: torch.Tensor | None, valid: torch.Tensor | None
    ) -> torch.Tensor:
        """Filter tiles all at once; where squares of the pixels may overflow or vanish, in other units, which a power of two leaves exact."""
        unit = _unit_of(self.strength_at(self.strength, sigma, image.dtype), image)
        if unit is None:
            return self.apply(image, sigma, valid)
        if sigma is not None:
            return self.apply(image / unit, sigma / unit, valid).mul_(unit)
        if isinstance(self.sigma, float | int):
            own = replace(self, sigma=self.sigma / unit)
        else:
            own = replace(self, strength=self.strength / unit)
        return own.apply(image / unit, None, valid).mul_(unit)

    @abstractmethod
    def apply(self, image: torch.Tensor, sigma: torch.Tensor | None, valid: torch.Tensor | None) -> torch.Tensor:
        """Filter tiles all at once; ``valid`` is None where there are no holes."""


def _unit_of(strength: float | torch.Tensor, image: torch.Tensor) -> Any:
    """A power of two near a strength; None for one that needs no other unit, and for a map of several, whose least and largest may be far apart.

    A GPU is not waited for: it gets a tensor. Squares of the image in that unit do not overflow.
    """
    largest = 1022 if image.dtype == torch.float64 else 126
    if isinstance(strength, torch.Tensor):
        low, high = strength.detach().aminmax()
        if strength.device.type != "cpu":
            exponent, most = (v.double().abs().clamp_min(2.0**-1022).log2().round() for v in (high, image.abs().max()))
            unit = exponent.maximum(most - LARGEST_SQUARED).clamp(-largest, largest).exp2()
            return torch.where(low == high, unit, 1.0).to(strength.dtype)
        if low != high:
            return None
        strength = float(high)
    exponent = math.frexp(strength)[1]
    if abs(exponent) <= MODERATE:
        return None
    exponent = max(exponent, math.frexp(float(image.detach().abs().max()))[1] - LARGEST_SQUARED)
    return 2.0 ** max(-largest, min(exponent, largest))


def holed(valid: torch.Tensor | None) -> torch.Tensor | None:
    """``valid`` itself; None where it has no holes."""
    return None if valid is None or bool(valid.all()) else valid


def number_like(value: float | torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """A number, or one for each pixel, with the dtype and on the device of an image.

    A GPU fills in the number itself, without a wait for a copy.
    """
    if isinstance(value, torch.Tensor):
        return value.to(image.dtype)
    return torch.full((), value, dtype=image.dtype, device=image.device)
