"""A denoiser on trial: its model and declarations, and random windows to try it on."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from halotile.errors import ConfigError
from halotile.tasks.denoisers.base import NARROW, Around, Denoiser, Model
from halotile.tasks.devices.device import is_out_of_memory
from halotile.tasks.lazy import torch


def sides_as_channels(denoiser: Denoiser, names: Collection[str]) -> Denoiser:
    """The denoiser with those of the named side inputs that it takes as its last channels; itself, if it takes none."""
    taken = tuple(name for name in denoiser.side_inputs if name in names)
    return cast(Denoiser, _SidesAsChannels(denoiser, taken)) if taken else denoiser


def model_on_trial(denoiser: Denoiser, model: Model) -> Model:
    """A model that a denoiser built, as the denoiser on trial would have built it."""
    return denoiser.around(model) if isinstance(denoiser, _SidesAsChannels) else model


@dataclass(frozen=True)
class _SidesAsChannels(Around):
    """The denoiser with side inputs as channels."""

    names: tuple[str, ...]

    @property
    def channels(self) -> tuple[int, int]:
        taken, returned = self.inner.channels
        return taken + len(self.names), returned

    def probed(self, receptive_field: int, alignment: int) -> Self:
        return replace(self, inner=self.inner.probed(receptive_field, alignment))

    def with_noise_level(self, sigma: float) -> Self:
        return replace(self, inner=self.inner.with_noise_level(sigma))

    def around(self, model: Model) -> Model:
        """A model of the denoiser that takes its side inputs as channels."""
        count, names = self.inner.channels[0], self.names

        class TakingChannels(torch.nn.Module):  # type: ignore[misc]  # torch has no types
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, windows: torch.Tensor) -> torch.Tensor:
                sides = {name: windows[:, count + i, None] for i, name in enumerate(names)}
                return self.model(windows[:, :count], **sides)

        return TakingChannels()


CHANNELS = (1, 3, 2, 4, 6, 8, 12)
"""Numbers of channels to try with a network that fails."""


@contextmanager
def failing_as(message: str, kind: type[ConfigError] = ConfigError) -> Iterator[None]:
    """Raise exceptions of foreign code inside the context as errors with this message, except when memory runs out.

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
        raise kind(f"{message}: {described(error)}") from error


def described(error: BaseException) -> str:
    """Kind and message of an exception of foreign code, with one full stop.

    Examples
    --------
    >>> described(ValueError("too small")), described(ValueError("Too small."))
    ('ValueError: too small.', 'ValueError: Too small.')
    """
    return f"{type(error).__name__}: {error}".removesuffix(".") + "."


@dataclass(frozen=True)
class Trial:
    """A model with the declarations of its denoiser."""

    model: Model
    name: str
    channels: tuple[int, int]
    scale: int
    dims: int
    dtype: str = "float32"  # of the windows

    @classmethod
    def of(cls, denoiser: Denoiser, dims: int, model: Model | None = None, dtype: str = "float32") -> Self:
        """The trial of a denoiser; without a model it is built, with an arbitrary noise level in place of ``auto``."""
        if model is None:
            leveled = denoiser.with_noise_level(0.1) if denoiser.wants_noise_level else denoiser
            model = leveled.build()
        return cls(model, denoiser.title, denoiser.channels, denoiser.scale, dims, dtype)

    def noise(self, shape: tuple[int, ...], count: int = 1) -> torch.Tensor:
        """Windows of random pixels, the same every time."""
        generator = torch.Generator().manual_seed(20_26)
        windows = torch.rand((count, self.channels[0], *shape), generator=generator)
        return windows.to(getattr(torch, self.dtype))

    def shape(self, axis: int, length: int) -> tuple[int, ...]:
        """Shape of a window that is long on one axis."""
        return tuple(length if i == axis else NARROW[self.dims] for i in range(self.dims))

    def smallest(self, denoiser: Denoiser) -> tuple[int, ...]:
        """Shape of a small window that the model can process: larger than usual where the denoiser declares that it looks far."""
        edge = NARROW[self.dims]
        reach, stride = denoiser.receptive_field(), denoiser.alignment
        most = -(-(2 * reach + stride) // stride) * stride if reach is not None else 0
        while edge < most:
            with suppress(ConfigError), torch.inference_mode():
                self.run(self.noise((edge,) * self.dims))
                break
            edge = min(2 * edge, most)
        return (edge,) * self.dims

    def run(self, windows: torch.Tensor) -> torch.Tensor:
        """Run the model, and check the shape of the result."""
        try:
            result: Any = self.model(windows)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise
            raise ConfigError(
                f"{self.name} failed on a window of shape {tuple(windows.shape)}: {described(error)} "
                f"{self._advice(windows)}"
            ) from error
        shape = tuple(getattr(result, "shape", ()))
        expected = (len(windows), self.channels[1], *(n * self.scale for n in windows.shape[2:]))
        if shape != expected:
            raise ConfigError(
                f"{self.name} returned {shape or type(result).__name__} for a window of shape {tuple(windows.shape)}, where "
                f"{expected} was declared. {self._advise_declaration(tuple(windows.shape), shape)}"
            )
        checked: torch.Tensor = result
        return checked

    def _advice(self, windows: torch.Tensor) -> str:
        """Advice on a model that fails: other channels, if it accepts them."""
        if self.dims < 3 and self._try(windows[:1, :, None].repeat(1, 1, NARROW[3], *[1] * self.dims)):
            return f"It takes {self.dims + 1} axes: write tile: {{axes: {'zyx'[-self.dims - 1 :]}}}, and input: {{axes: ...}} where the file does not name them."
        for count in CHANNELS:
            window = windows[:1, :1].repeat(1, count, *[1] * self.dims)
            if channels := self._try(window):
                return f"It takes {count} channel{'s' if count > 1 else ''}: write channels: [{count}, {channels}]."
        return "Check it; or, if it cannot process such a window, write receptive_field and alignment."

    def _try(self, window: torch.Tensor) -> int:
        """Number of channels of the model's result for a window; 0 if it fails or returns other axes."""
        with suppress(Exception, SystemExit), torch.inference_mode():
            result: Any = self.model(window)
            if result.dim() == window.dim() and len(result) == 1:
                return int(result.shape[1])
        return 0

    def _advise_declaration(self, given: tuple[int, ...], made: tuple[int, ...]) -> str:
        """Advice on the declarations of a model that returns the shape ``made`` for the shape ``given``."""
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

    def reach_error(self, length: int) -> ConfigError:
        """The error for a model whose receptive field exceeds every window."""
        return ConfigError(
            f"{self.name} looks at the whole image, or at least {length // 2 - 1} pixels far: tiles cannot reproduce its "
            "result. A normalisation, pooling, attention or Fourier transform over all pixels does that. "
            "Write a local network; or, if you know them, receptive_field and alignment."
        )
