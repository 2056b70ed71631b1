"""The U-Net of Noise2Void 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from halotile.tasks.lazy import torch
from halotile.tasks.options import check_whole


@dataclass(frozen=True, kw_only=True)
class UNetNetwork:
    """A U-Net that averages before each reduction and has no connection at full resolution.

    >>> UNetNetwork(levels=3).alignment
    8
    """

    name: ClassVar[str] = "unet"
    begins_as_identity: ClassVar[bool] = False

    width: int = 32
    """Channels of the first convolutions; each reduction doubles them."""
    levels: int = 2
    """Number of reductions by 2."""

    def __post_init__(self) -> None:
        check_whole("width", self.width, 1)
        check_whole("levels", self.levels, 1)

    @property
    def alignment(self) -> int:
        return 1 << self.levels

    def bytes_per_pixel(self) -> float:
        """Activations that are kept for the gradients, with their gradients."""
        return 4.0 * 24 * self.width

    def weight_bytes(self, channels: int) -> int:
        """Convolutions of 3 x 3 pixels, most of them on the coarsest level."""
        return 4 * 9 * 4 * (self.width << self.levels) ** 2 + 2**16 * channels

    def denoiser(self, channels: int) -> Mapping[str, Any]:
        """Nothing else: the weights tell their shape."""
        return {"name": "unet"}

    def build(self, channels: int, mean: torch.Tensor, deviation: torch.Tensor) -> torch.nn.Module:
        from halotile.tasks.denoisers.common.layers import BlindUNet

        network = BlindUNet(channels, self.width, self.levels)
        network.mean.copy_(mean.view(-1, 1, 1))
        network.deviation.copy_(deviation.view(-1, 1, 1))
        return network

    def weights(self, module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """All of its tensors, with mean and deviation."""
        state: Mapping[str, torch.Tensor] = module.state_dict()
        return state


NETWORK = UNetNetwork
