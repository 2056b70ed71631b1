"""DnCNN, a plain stack of 3x3 convolutions."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from halotile.errors import WeightsError
from halotile.tasks.denoisers.base import Model, Pixelwise
from halotile.tasks.denoisers.common.weights import (
    Shapes,
    load_weights,
    shape_mismatches,
    shapes_of,
    summarize,
    trained_range,
    weight_shapes,
)
from halotile.tasks.options import OwnPath, check_channels, check_weights, check_whole, check_word, with_description


@dataclass(frozen=True, kw_only=True)
class DnCNN(Pixelwise):
    """``y = x + f(x)`` or ``y = x - f(x)``, f a stack of ``depth`` convolutions with ReLU between them.

    The convolutions pad with zeros, so the image is cut at its edge (boundary: cut) and the
    network pads there as it would on the whole image. The layers of a weights file are taken in order,
    whatever their names: ``in_conv``, ``conv_list.N``, ``out_conv`` or ``model.N``.

    References
    ----------
    K. Zhang et al., Beyond a Gaussian denoiser: residual learning of deep CNN for image denoising,
    IEEE Trans. Image Process. 26 (2017) 3142-3155.

    Examples
    --------
    >>> DnCNN(depth=17, weights="dncnn.safetensors").receptive_field()
    17
    """

    name: ClassVar[str] = "dncnn"
    dims: ClassVar[tuple[int, ...]] = (2,)
    boundary: ClassVar[str] = "cut"
    convolutional: ClassVar[bool] = True

    weights: OwnPath = field(
        metadata=with_description(
            "the path of a weights file: .safetensors, or .pth with nothing but tensors; none comes with halotile, and "
            "`python examples/train_dncnn.py dncnn.safetensors` trains a small network in a minute or two"
        )
    )
    """Weights file: .safetensors, or .pth with nothing but tensors in it."""
    sha256: str | None = None
    """Checksum that the weights file must have."""
    depth: int = 20
    """Number of convolutions."""
    width: int = 64
    """Channels between the convolutions."""
    channels: tuple[int, int] = (1, 1)
    """Numbers of channels in and out: [1, 1] denoises each channel by itself, [3, 3] colours together."""
    bias: bool = True
    """True if the convolutions have a bias."""
    residual: Literal["auto", "add", "subtract", "none"] = "auto"
    """Meaning of the stack's result: the noise to subtract from the image, a correction to add, or the image
    itself. auto: add if the layers are named in_conv and out_conv, else subtract."""

    def __post_init__(self) -> None:
        check_whole("depth", self.depth, 2)
        check_whole("width", self.width, 1)
        check_channels(self.channels, same=True)
        check_weights(self.weights, self.sha256)
        check_word("residual", self.residual, ("auto", "add", "subtract", "none"))

    def receptive_field(self) -> int:
        """One pixel for each convolution."""
        return self.depth

    @property
    def trained_range(self) -> tuple[float, float] | None:
        return trained_range(self.weights)

    def files(self) -> tuple[Path, ...]:
        return (Path(self.weights),)

    def bytes_per_pixel(self) -> float:
        """Activations of two successive layers, four times: the heap keeps gaps between layers and remains of
        windows of other shapes. Measured in a worker: one to two and a half times the two layers."""
        return 4.0 * (8 * self.width + 3 * self.channels[0])

    def check(self) -> Mapping[str, str]:
        """Compare the weights file with the checksum and the options, as far as its header shows."""
        self._check(weight_shapes(self.weights, self.sha256))
        return {}

    def build(self) -> Model:
        from halotile.tasks.denoisers.common.layers import ConvolutionStack

        tensors = load_weights(self.weights, self.sha256)
        layers = ordered_layers(tensors)
        self._check(shapes_of(tensors))
        sign = {"add": 1, "subtract": -1, "none": 0}.get(self.residual, 1 if "in_conv" in layers[0] else -1)
        sizes = [self.channels[0], *[self.width] * (self.depth - 1), self.channels[1]]
        network = ConvolutionStack(sizes, bias=self.bias, sign=sign)
        state = {
            f"layers.{place}.{kind}": tensors[f"{layer}.{kind}"]
            for place, layer in enumerate(layers)
            for kind in self._kinds
        }
        network.load_state_dict(state)
        model: Model = network.eval().requires_grad_(False)
        return model

    @property
    def _kinds(self) -> tuple[str, ...]:
        return ("weight", "bias") if self.bias else ("weight",)

    def _check(self, found: Shapes) -> None:
        """Refuse weights that do not fit the network exactly."""
        layers = ordered_layers(found)
        wanted: dict[str, tuple[int, ...]] = {}
        for place, layer in enumerate(layers):
            into = self.channels[0] if place == 0 else self.width
            out = self.channels[1] if place == self.depth - 1 else self.width
            wanted[f"{layer}.weight"] = (out, into, 3, 3)
            if self.bias:
                wanted[f"{layer}.bias"] = (out,)
        problems = shape_mismatches(wanted, found)
        if len(layers) != self.depth:
            problems.insert(0, f"{len(layers)} convolutions instead of {self.depth}")
        if problems:
            raise WeightsError(
                f"{self.weights!r} does not fit dncnn with depth {self.depth}, width {self.width}, channels "
                f"{list(self.channels)}, bias {self.bias}: {summarize(problems)}. "
                "Write the depth, width, channels and bias that the weights were trained with."
            )


def ordered_layers(tensors: Iterable[str]) -> list[str]:
    """Names of the convolutions in the order in which they are applied.

    >>> ordered_layers(["model.10.weight", "model.2.weight", "model.0.weight"])
    ['model.0', 'model.2', 'model.10']
    """
    layers = {key.removesuffix(".weight") for key in tensors if key.endswith(".weight")}
    return sorted(layers, key=_place)


def _place(layer: str) -> tuple[int, list[Any]]:
    """Sort key: first and last layers by their names, those between by their numbers."""
    rank = 0 if "in_conv" in layer else 2 if "out_conv" in layer else 1
    return rank, [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", layer)]


DENOISER = DnCNN
