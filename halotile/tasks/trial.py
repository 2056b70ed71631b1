"""A denoiser on trial: its model beside what it declares, and random windows to try it on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from halotile.errors import ConfigError
from halotile.tasks.denoisers.base import Denoiser, Model

if TYPE_CHECKING:
    import torch

NARROW = {1: 1, 2: 64, 3: 16}
"""Width of a window on its narrow axes, by the number of axes."""


@dataclass(frozen=True)
class Trial:
    """A model with what it declares about its results."""

    model: Model
    name: str
    channels: tuple[int, int]
    scale: int
    dims: int

    @classmethod
    def of(cls, denoiser: Denoiser, dims: int) -> Self:
        """Build a denoiser, with some noise level where it would be estimated."""
        told = denoiser.with_noise_level(0.1) if denoiser.wants_noise_level else denoiser
        return cls(told.build(), denoiser.name, denoiser.channels, denoiser.scale, dims)

    def noise(self, shape: tuple[int, ...], count: int = 1) -> torch.Tensor:
        """Windows of random pixels, the same every time."""
        import torch

        generator = torch.Generator().manual_seed(20_26)
        return torch.rand((count, self.channels[0], *shape), generator=generator)

    def shape(self, axis: int, length: int) -> tuple[int, ...]:
        """A window that is long on one axis."""
        return tuple(length if i == axis else NARROW[self.dims] for i in range(self.dims))

    def run(self, windows: torch.Tensor) -> torch.Tensor:
        """The model's result, of the shape it declares."""
        try:
            result: Any = self.model(windows)
        except Exception as error:
            raise ConfigError(
                f"{self.name} failed on a window of shape {tuple(windows.shape)}: {type(error).__name__}: {error}. "
                "Check its channels; or, if it cannot do with such a window, write receptive_field and alignment."
            ) from error
        expected = (len(windows), self.channels[1], *(n * self.scale for n in windows.shape[2:]))
        if tuple(getattr(result, "shape", ())) != expected:
            raise ConfigError(
                f"{self.name} made {tuple(getattr(result, 'shape', ())) or type(result).__name__} of a window of "
                f"shape {tuple(windows.shape)}, where {expected} was declared. Declare its scale and channels as they "
                "are; a network that loses pixels at its edges has to pad them."
            )
        found: torch.Tensor = result
        return found

    def too_far(self, length: int) -> ConfigError:
        """What to say of a model that reaches both ends of every window."""
        return ConfigError(
            f"{self.name} looks at the whole picture, or at least {length // 2 - 1} pixels far: no tile can give its "
            "result. A normalisation, attention or Fourier transform over all pixels does that. "
            "Write a local network; or receptive_field and alignment by hand, if you know better."
        )
