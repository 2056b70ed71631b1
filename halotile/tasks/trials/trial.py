"""A denoiser on trial: its model beside what it declares, and random windows to try it on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from halotile.errors import ConfigError
from halotile.tasks.denoisers.base import Denoiser, Model
from halotile.tasks.devices.device import is_out_of_memory

if TYPE_CHECKING:
    import torch

NARROW = {1: 1, 2: 64, 3: 16}
"""Width of a window on its narrow axes, by the number of axes."""
CHANNELS = (1, 3, 2, 4, 6, 8, 12)
"""Numbers of channels that a network which fails is tried with."""


@contextmanager
def failing_as(what: str, kind: type[ConfigError] = ConfigError) -> Iterator[None]:
    """Whatever code of somebody else's raises within the context comes as an error with these words, but for want of memory.

    Examples
    --------
    >>> with failing_as("this division failed"):
    ...     1 / 0
    Traceback (most recent call last):
      ...
    halotile.errors.ConfigError: this division failed: ZeroDivisionError: division by zero.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError) or is_out_of_memory(error):
            raise
        raise kind(f"{what}: {type(error).__name__}: {error}.") from error


@dataclass(frozen=True)
class Trial:
    """A model with what it declares about its results."""

    model: Model
    name: str
    channels: tuple[int, int]
    scale: int
    dims: int

    @classmethod
    def of(cls, denoiser: Denoiser, dims: int, model: Model | None = None) -> Self:
        """A denoiser with the model it built, or built here with some noise level where it would be estimated."""
        if model is None:
            told = denoiser.with_noise_level(0.1) if denoiser.wants_noise_level else denoiser
            model = told.build()
        return cls(model, denoiser.title, denoiser.channels, denoiser.scale, dims)

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
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise
            raise ConfigError(
                f"{self.name} failed on a window of shape {tuple(windows.shape)}: {type(error).__name__}: {error}. "
                f"{self._channels_that_do(windows)}"
            ) from error
        shape = tuple(getattr(result, "shape", ()))
        expected = (len(windows), self.channels[1], *(n * self.scale for n in windows.shape[2:]))
        if shape != expected:
            raise ConfigError(
                f"{self.name} made {shape or type(result).__name__} of a window of shape {tuple(windows.shape)}, where "
                f"{expected} was declared. {self._declaration(tuple(windows.shape), shape)}"
            )
        found: torch.Tensor = result
        return found

    def _channels_that_do(self, windows: torch.Tensor) -> str:
        """What to write about a model that fails: other channels, if it takes those."""
        import torch

        if self.dims < 3 and self._takes(windows[:1, :, None].repeat(1, 1, NARROW[3], *[1] * self.dims)):
            return f"It takes {self.dims + 1} axes: write tile: {{axes: {'zyx'[-self.dims - 1 :]}}}, if the image has them."
        for count in CHANNELS:
            window = windows[:1, :1].repeat(1, count, *[1] * self.dims)
            with suppress(Exception, SystemExit), torch.inference_mode():
                made: Any = self.model(window)
                if made.dim() != window.dim() or len(made) != 1:
                    continue
                return f"It takes {count} channel{'s' if count > 1 else ''}: write channels: [{count}, {made.shape[1]}]."
        return "Check it; or, if it cannot do with such a window, write receptive_field and alignment."

    def _takes(self, window: torch.Tensor) -> bool:
        """Whether the model makes something of the same axes of a window."""
        import torch

        with suppress(Exception, SystemExit), torch.inference_mode():
            made: Any = self.model(window)
            return bool(made.dim() == window.dim() and len(made) == 1)
        return False

    def _declaration(self, given: tuple[int, ...], made: tuple[int, ...]) -> str:
        """What to declare of a model that makes this shape of that one."""
        if len(made) != len(given) or made[0] != given[0]:
            return "Return a tensor of shape (tiles, channels, *spatial)."
        lines = []
        factors = {m / n for m, n in zip(made[2:], given[2:], strict=True)}
        whole = factors.pop() if len(factors) == 1 else 0.0
        if made[1] != self.channels[1]:
            lines.append(f"write channels: [{given[1]}, {made[1]}]")
        if whole >= 1 and whole.is_integer():
            if whole != self.scale:
                lines.append(f"write scale: {whole:.0f}")
        elif all(m < n * self.scale for m, n in zip(made[2:], given[2:], strict=True)):
            lines.append("a network that loses pixels at its edges has to pad them")
        else:
            lines.append("every spatial axis has to grow by the same whole number")
        return f"{', and '.join(lines).capitalize()}."

    def too_far(self, length: int) -> ConfigError:
        """What to say of a model that reaches both ends of every window."""
        return ConfigError(
            f"{self.name} looks at the whole image, or at least {length // 2 - 1} pixels far: no tile can give its "
            "result. A normalisation, attention or Fourier transform over all pixels does that. "
            "Write a local network; or receptive_field and alignment by hand, if you know better."
        )
