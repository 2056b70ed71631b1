"""Side inputs on trial: a denoiser that takes them as further channels of its windows, so that every trial covers them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, cast

from halotile.tasks.denoisers.base import Denoiser, Model

if TYPE_CHECKING:
    import torch


def sides_as_channels(denoiser: Denoiser, names: Collection[str]) -> Denoiser:
    """The denoiser with those of the named side inputs that it takes as its last channels; itself, if it takes none."""
    taken = tuple(name for name in denoiser.side_inputs if name in names)
    return cast(Denoiser, _SidesAsChannels(denoiser, taken)) if taken else denoiser


def model_on_trial(denoiser: Denoiser, model: Model) -> Model:
    """A model that a denoiser built, as the denoiser on trial would have built it."""
    return denoiser.taking_channels(model) if isinstance(denoiser, _SidesAsChannels) else model


@dataclass(frozen=True)
class _SidesAsChannels:
    """All other declarations are those of the denoiser itself."""

    denoiser: Denoiser
    names: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # such as pickle asks for, before there is a denoiser
            raise AttributeError(name)
        return getattr(self.denoiser, name)

    @property
    def channels(self) -> tuple[int, int]:
        taken, returned = self.denoiser.channels
        return taken + len(self.names), returned

    def probed(self, receptive_field: int, alignment: int) -> Self:
        return replace(self, denoiser=self.denoiser.probed(receptive_field, alignment))

    def with_noise_level(self, sigma: float) -> Self:
        return replace(self, denoiser=self.denoiser.with_noise_level(sigma))

    def build(self) -> Model:
        return self.taking_channels(self.denoiser.build())

    def reference(self) -> Model:
        return self.taking_channels(self.denoiser.reference())

    def taking_channels(self, model: Model) -> Model:
        """A model of the denoiser that takes its side inputs as channels."""
        import torch

        count, names = self.denoiser.channels[0], self.names

        class TakingChannels(torch.nn.Module):  # type: ignore[misc]  # torch has no types
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, windows: torch.Tensor) -> torch.Tensor:
                sides = {name: windows[:, count + i, None] for i, name in enumerate(names)}
                return self.model(windows[:, :count], **sides)

        return TakingChannels()
