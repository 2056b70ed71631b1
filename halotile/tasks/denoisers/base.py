"""What a denoiser declares, so that tiling it cannot change its result.

A denoiser is a frozen dataclass of its options. Its declarations need no torch: a plan is made
from them. ``build`` turns it into a function on tensors, on the worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Self

from halotile.errors import ConfigError
from halotile.tasks.options import check_level

if TYPE_CHECKING:
    import torch

Model = Callable[..., "torch.Tensor"]
"""``model(batch, **sides) -> batch``: float tensors of shape (tiles, channels, *spatial), in the
units of the image; each side input has shape (tiles, 1, *spatial). The result has the spatial
shape times the denoiser's ``scale``. A model neither keeps nor changes state between calls."""


Margin = tuple[tuple[int, int], ...]
"""Pixels before and after on every spatial axis that are context only."""


class CoreModel(ABC):
    """A model that computes less where the margin of its windows is not wanted."""

    @abstractmethod
    def core(self, batch: torch.Tensor, margin: Margin) -> torch.Tensor:
        """``self(batch)`` less its margin, bit for bit."""


class Denoiser(Protocol):
    """A denoiser's options and what it promises."""

    name: ClassVar[str]
    """The word that a job file uses."""
    dims: ClassVar[tuple[int, ...]]
    """Numbers of spatial axes it can work on, the usual one first: ``(2,)``, or ``(3, 2)`` for a filter that
    takes a volume where there is one."""
    boundary: ClassVar[str]
    """The rim rule under which the tiled result is the result on the whole image."""
    convolutional: ClassVar[bool]
    """Whether ``channels_last`` memory suits it."""
    tried_apart: ClassVar[bool]
    """Whether it is checked and tried in a process of its own: a network of the user's own may take any amount of memory."""

    @property
    def title(self) -> str:
        """What messages call it: the user's own network or function by its own name."""
        ...

    @property
    def alignment(self) -> int:
        """Tile origins must fall on multiples of this many pixels (a strided network's total stride)."""
        ...

    @property
    def scale(self) -> int:
        """Output pixels for each input pixel, on every spatial axis."""
        ...

    @property
    def channels(self) -> tuple[int, int]:
        """Channels in and out. ``(1, 1)``: each channel of the image is denoised by itself."""
        ...

    @property
    def side_inputs(self) -> tuple[str, ...]:
        """Names of the per-pixel side inputs it understands."""
        ...

    def receptive_field(self) -> int | None:
        """How far, in pixels, an output pixel looks: the least depth. None: it has to be probed."""
        ...

    def files(self) -> tuple[Path, ...]:
        """Files that determine the result (weights): their contents belong to the job's fingerprint."""
        ...

    def probed(self, receptive_field: int, alignment: int) -> Denoiser:
        """The same denoiser told what a probe found, for what it left at ``auto``."""
        ...

    def with_noise_level(self, sigma: float) -> Denoiser:
        """The same denoiser told the noise level that was estimated for the whole image."""
        ...

    @property
    def wants_noise_level(self) -> bool:
        """Whether the noise level still has to be estimated (``sigma: auto``)."""
        ...

    def bytes_per_pixel(self) -> float:
        """Working memory for each pixel of a tile in flight, in bytes, to plan with."""
        ...

    def check(self) -> Mapping[str, str]:
        """Refuse what ``build`` would refuse on a worker: a plan is made before anything is touched.

        Returns
        -------
        mapping of str to str
            Digests of the user's own code, by its name. They belong to the job's fingerprint. A
            denoiser that has some is tried before the job begins.
        """
        ...

    def build(self) -> Model:
        """The function itself, on the CPU in float32. May read files; imports torch."""
        ...

    def reference(self) -> Model:
        """The function as its own library computes it on a whole image, with nothing done for the bits of tiles."""
        ...


class Pixelwise(ABC):
    """The declarations of a denoiser that gives one pixel for each pixel, of each channel by itself."""

    name: ClassVar[str]
    tried_apart: ClassVar[bool] = False

    @property
    def title(self) -> str:
        """The word that a job file uses."""
        return self.name

    @property
    def alignment(self) -> int:
        """Any tile origin will do."""
        return 1

    @property
    def scale(self) -> int:
        """One pixel out for each pixel in."""
        return 1

    @property
    def channels(self) -> tuple[int, int]:
        """Each channel by itself."""
        return (1, 1)

    @property
    def side_inputs(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def wants_noise_level(self) -> bool:
        """It does not use the noise level."""
        return False

    def files(self) -> tuple[Path, ...]:
        """Only its options determine the result."""
        return ()

    def probed(self, receptive_field: int, alignment: int) -> Self:
        """Itself: nothing was left to a probe."""
        return self

    def check(self) -> Mapping[str, str]:
        """Nothing that its options do not tell."""
        return {}

    def with_noise_level(self, sigma: float) -> Self:
        """Itself: it does not use the noise level."""
        return self

    @abstractmethod
    def build(self) -> Model:
        """The function itself."""

    def reference(self) -> Model:
        """What it is in tiles."""
        return self.build()


@dataclass(frozen=True, kw_only=True)
class Leveled(Pixelwise):
    """The declarations of a denoiser whose strength counts in noise levels where one is known."""

    sigma: float | Literal["auto"] | None = None
    """The noise level, as one number, estimated, or left out. A denoiser says so again in its own words."""

    def __post_init__(self) -> None:
        check_level(self.sigma)

    @property
    def side_inputs(self) -> tuple[str, ...]:
        """The noise level of each pixel, instead of one number."""
        return ("sigma",)

    @property
    def wants_noise_level(self) -> bool:
        """Whether the noise level was left at ``auto``."""
        return self.sigma == "auto"

    def with_noise_level(self, sigma: float) -> Self:
        """The same with a noise level in place of ``auto``."""
        return replace(self, sigma=sigma)

    def strength_at(
        self, strength: float, sigma: torch.Tensor | None, dtype: torch.dtype
    ) -> float | torch.Tensor:
        """The strength in the units of the image: one number, or one for each pixel of a noise map.

        The number is rounded to ``dtype``, the type of the image, as a map of it would be: both give the same bits.

        Raises
        ------
        ConfigError
            When the noise level is still to be estimated and there is no map of it.
        """
        if sigma is not None:
            return sigma * strength
        if self.sigma == "auto":
            raise ConfigError(
                "sigma is auto, but nobody estimated the noise level of the image. "
                "Call with_noise_level(estimate_noise_level(...)), or write a number."
            )
        if self.sigma is None:
            return strength
        import torch

        return float(torch.tensor(self.sigma, dtype=dtype) * strength)


def number_like(value: float | torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """A number, or one for each pixel, of an image's type and on its device: a GPU fills in the number itself, and nobody waits for it."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(image.dtype)
    return torch.full((), value, dtype=image.dtype, device=image.device)
