"""The interface of networks that jobs train, for the denoisers that use their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from halotile.tasks.lazy import torch


class Network(Protocol):
    """The architecture of a network that is trained. Declaring one imports nothing heavy."""

    name: ClassVar[str]
    begins_as_identity: ClassVar[bool]
    """It returns its input where it has learned nothing, such as one that predicts the noise."""

    @property
    def alignment(self) -> int:
        """Number that the edge of a patch has to be a multiple of."""

    def bytes_per_pixel(self) -> float:
        """Memory of one step for each pixel of the patches, an estimate."""

    def weight_bytes(self, channels: int) -> int:
        """Size of the weights."""

    def denoiser(self, channels: int) -> Mapping[str, Any]:
        """The keys of the denoiser that uses the weights, besides their path."""

    def build(self, channels: int, mean: torch.Tensor, deviation: torch.Tensor) -> torch.nn.Module:
        """Build the network with its first weights, for images with this mean and deviation of each channel."""

    def weights(self, module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """The weights as the denoiser reads them, for pixels that are not normalised."""
