"""DnCNN, a plain stack of 3x3 convolutions that predicts the noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from halotile.tasks.lazy import torch
from halotile.tasks.options import check_whole


@dataclass(frozen=True, kw_only=True)
class DnCNNNetwork:
    """``y = x - f(x)``, f a stack of convolutions with ReLU between them.

    >>> DnCNNNetwork(depth=7).denoiser(1)
    {'name': 'dncnn', 'depth': 7, 'width': 32, 'channels': [1, 1], 'residual': 'subtract'}
    """

    name: ClassVar[str] = "dncnn"
    begins_as_identity: ClassVar[bool] = True

    depth: int = 9
    """Number of convolutions."""
    width: int = 32
    """Channels between the convolutions."""

    def __post_init__(self) -> None:
        check_whole("depth", self.depth, 2)
        check_whole("width", self.width, 1)

    @property
    def alignment(self) -> int:
        """Patches of any size."""
        return 1

    def bytes_per_pixel(self) -> float:
        """Activations that are kept for the gradients, with their gradients."""
        return 4.0 * 3 * self.depth * self.width

    def weight_bytes(self, channels: int) -> int:
        """Convolutions of 3 x 3 pixels."""
        return 4 * 9 * self.width * (self.width * self.depth + 2 * channels) + 2**16

    def denoiser(self, channels: int) -> Mapping[str, Any]:
        """Depth, width and channels."""
        sizes = {"depth": self.depth, "width": self.width, "channels": [channels, channels]}
        return {"name": "dncnn", **sizes, "residual": "subtract"}

    def build(self, channels: int, mean: torch.Tensor, deviation: torch.Tensor) -> torch.nn.Module:
        from halotile.tasks.denoisers.common.layers import NormalizedStack

        return NormalizedStack([channels, *[self.width] * (self.depth - 1), channels], mean, deviation)

    def weights(self, module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """Weights and biases of the stack, with mean and deviation in those of the first and the last convolution."""
        state: Mapping[str, torch.Tensor] = {name: tensor.detach() for name, tensor in module.for_pixels().items()}
        return state


NETWORK = DnCNNNetwork
