"""A U-Net that was trained on one's own images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from halotile.errors import WeightsError
from halotile.tasks.denoisers.base import Model, Pixelwise
from halotile.tasks.denoisers.common.weights import (
    Shapes,
    TrainedPixels,
    load_weights,
    shape_mismatches,
    shapes_of,
    summarize,
    trained_pixels,
    trained_range,
    weight_shapes,
)
from halotile.tasks.options import OwnPath, check_weights, with_description


class Architecture(NamedTuple):
    """Numbers of channels of the image and of the first convolutions, and of reductions by 2."""

    channels: int
    width: int
    levels: int

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> Architecture:
        """The architecture that weights of these shapes belong to."""
        channels, width, _, _ = shapes["last.weight"]
        levels = sum(name.startswith("up.") and name.endswith(".0.weight") for name in shapes)
        if not levels:
            raise KeyError("up.0.0.weight")
        return cls(channels, width, levels)

    def receptive_field(self) -> int:
        """Receptive field in pixels, in the direction in which it is larger: two convolutions on each level, down and up again.

        >>> Architecture(1, 32, 2).receptive_field()
        23
        """
        farthest = 0
        for place in range(2**self.levels):
            low, high = place - 2, place + 2
            for _ in range(self.levels):
                low, high = low // 2 - 2, high // 2 + 2
            for _ in range(self.levels):
                low, high = 2 * low - 2, 2 * high + 1 + 2
            farthest = max(farthest, place - low, high - place)
        return farthest


@dataclass(frozen=True, kw_only=True)
class UNet(Pixelwise):
    """The network in a weights file, which says by itself how wide and deep it is, and how pixels are normalised.

    A job ``train`` trains one on noisy images alone.

    References
    ----------
    O. Ronneberger, P. Fischer, T. Brox, U-Net: convolutional networks for biomedical image segmentation, MICCAI (2015).
    """

    name: ClassVar[str] = "unet"
    dims: ClassVar[tuple[int, ...]] = (2,)
    boundary: ClassVar[str] = "reflect"
    convolutional: ClassVar[bool] = True

    weights: OwnPath = field(
        metadata=with_description("the path of a weights file, which a job `train` writes: see docs/training.md")
    )
    """Weights file of a U-Net that was trained on images like this one."""
    sha256: str | None = None
    """Checksum that the weights file must have."""

    def __post_init__(self) -> None:
        check_weights(self.weights, self.sha256)

    @cached_property
    def architecture(self) -> Architecture:
        """Width and depth by the shapes in the file."""
        return self._architecture_in(weight_shapes(self.weights, self.sha256))

    @property
    def channels(self) -> tuple[int, int]:
        """Values of the images that it was trained on."""
        return (self.architecture.channels, self.architecture.channels)

    @property
    def alignment(self) -> int:
        return 1 << self.architecture.levels

    def receptive_field(self) -> int:
        """As far as the convolutions of all levels see."""
        return self.architecture.receptive_field()

    @property
    def trained_range(self) -> tuple[float, float] | None:
        return trained_range(self.weights)

    @property
    def trained_pixels(self) -> TrainedPixels | None:
        """As the weights normalise them."""
        return trained_pixels(self.weights)

    def files(self) -> tuple[Path, ...]:
        return (Path(self.weights),)

    def bytes_per_pixel(self) -> float:
        """Activations of successive layers with their temporaries, as for a stack of convolutions of three times the width."""
        return 4.0 * (12 * self.architecture.width + 3 * self.architecture.channels)

    def check(self) -> Mapping[str, str]:
        """Compare the weights file with the checksum and the network, as far as its header shows."""
        _ = self.architecture
        return {}

    def build(self) -> Model:
        from halotile.tasks.convolution.activations import SteadyNetwork
        from halotile.tasks.convolution.stable import make_steady

        network = self._network()
        make_steady(network)
        model: Model = SteadyNetwork(network)
        return model

    def reference(self) -> Model:
        """The network as plain torch computes it with several threads."""
        from halotile.tasks.convolution.stable import spread

        model: Model = spread(self._network())
        return model

    def _network(self) -> Any:
        from halotile.tasks.denoisers.common.layers import BlindUNet

        tensors = load_weights(self.weights, self.sha256)
        network = BlindUNet(*self._architecture_in(shapes_of(tensors)))
        if problems := shape_mismatches(shapes_of(network.state_dict()), shapes_of(tensors)):
            raise self._foreign(summarize(problems))
        network.load_state_dict(tensors)
        return network.float().eval().requires_grad_(False)

    def _architecture_in(self, shapes: Shapes) -> Architecture:
        try:
            return Architecture.from_shapes(shapes)
        except KeyError as error:
            raise self._foreign(f"it has no {error}") from error
        except ValueError as error:
            raise self._foreign(f"last.weight is {shapes['last.weight']}") from error

    def _foreign(self, why: str) -> WeightsError:
        return WeightsError(
            f"{self.weights!r} does not fit unet: {why}. Write the weights of a job train with network: {{name: unet}}, or name: torch for a network of your own."
        )


DENOISER = UNet
