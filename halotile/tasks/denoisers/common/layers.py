"""Networks of 3x3 convolutions: a plain stack, and a U-Net for training without clean images."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.nn.functional import avg_pool2d, conv2d, conv_transpose2d, interpolate, pad
from torch.overrides import handle_torch_function, has_torch_function_unary

from halotile.tasks.convolution.stable import convolve
from halotile.tasks.denoisers.base import CoreModel, Margin

SLOPE = 0.1  # slope of the activations below 0


class BlindUNet(torch.nn.Module):  # type: ignore[misc]  # torch has no types
    """A U-Net of 3x3 convolutions on normalised pixels, without a connection at full resolution.

    It averages before each reduction, and connects no first convolutions to the last ones: training with masked pixels would leave
    a checkerboard otherwise.

    ``channels``: channels of the image; ``width``: channels of the first convolutions; each reduction doubles them; ``levels``: number of
    reductions by 2.

    References
    ----------
    E. Höck, T.-O. Buchholz, A. Brachmann, F. Jug, A. Freytag, N2V2: fixing Noise2Void checkerboard artifacts with modified sampling
    strategies and a tweaked network architecture, ECCV Workshops (2022).
    """

    def __init__(self, channels: int, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = torch.nn.ModuleList(
            _pair(into, out) for into, out in zip([channels, *widths], widths, strict=False)
        )
        self.up = torch.nn.ModuleList(
            _pair(widths[level + 1] + (widths[level] if level else 0), widths[level], UpConvolution)
            for level in reversed(range(levels))
        )
        self.last = torch.nn.Conv2d(width, channels, 1)
        self.register_buffer("mean", torch.zeros(channels, 1, 1))
        self.register_buffer("deviation", torch.ones(channels, 1, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Denoise windows of any size, in the units of the image."""
        rows, columns = batch.shape[2:]
        stride = 2 ** len(self.up)
        signal = pad((batch - self.mean) / self.deviation, (0, -columns % stride, 0, -rows % stride))
        signal, connections = avg_pool2d(self.down[0](signal), 2), []
        for layers in self.down[1:-1]:
            connections.append(layers(signal))
            signal = avg_pool2d(connections[-1], 2)
        signal = self.down[-1](signal)
        for enlarge, *layers in self.up:
            signal = enlarge(signal, connections.pop() if connections else None)
            for layer in layers:
                signal = layer(signal)
        return self.last(signal)[:, :, :rows, :columns] * self.deviation + self.mean


class UpConvolution(torch.nn.Conv2d):  # type: ignore[misc]
    """A 3x3 convolution of an image whose pixels are repeated twice along rows and columns, and of a connection of that size.

    In training the repeated image is never made: a transposed convolution with sums of the weights gives the same with 4 instead of
    9 products. In use, tiles must have the bits of the whole image, and those of transposed convolutions depend on the tile.
    """

    def forward(self, coarse: torch.Tensor, connection: torch.Tensor | None = None) -> torch.Tensor:
        """Convolve the channels of both, those of the coarse image first."""
        if not self.training:
            repeated = interpolate(coarse, scale_factor=2.0)
            both = repeated if connection is None else torch.cat([repeated, connection], 1)
            return super().forward(both)
        channels = coarse.shape[1]
        kernel = transposed_kernel(self.weight[:, :channels])
        result = conv_transpose2d(coarse, kernel, self.bias, stride=2, padding=1)
        if connection is None:
            return result
        return result + conv2d(connection, self.weight[:, channels:], padding=1)


def transposed_kernel(weights: torch.Tensor) -> torch.Tensor:
    """The weights of a transposed convolution of stride 2 that are those of a 3x3 convolution of an image with each pixel repeated."""
    if has_torch_function_unary(weights):  # a function to torch's modes, as its own are
        return handle_torch_function(transposed_kernel, (weights,), weights)
    for axis in (2, 3):
        before, here, after = weights.unbind(axis)
        weights = torch.stack([after, here + after, before + here, before], axis)
    return weights.transpose(0, 1)


def _pair(into: int, out: int, first: type[torch.nn.Conv2d] = torch.nn.Conv2d) -> torch.nn.Sequential:
    """Two convolutions."""
    return torch.nn.Sequential(
        first(into, out, 3, padding=1), torch.nn.LeakyReLU(SLOPE, inplace=True),
        torch.nn.Conv2d(out, out, 3, padding=1), torch.nn.LeakyReLU(SLOPE, inplace=True),
    )  # fmt: skip


NO_MARGIN: Margin = ((0, 0), (0, 0))


class ConvolutionStack(torch.nn.Module, CoreModel):  # type: ignore[misc]
    """A stack of convolutions that pad with zeros, added to the image, subtracted from it, or alone.

    ``sizes``: channels before the first convolution, after each, and after the last; ``bias``: whether the convolutions have a bias; ``sign``: 1
    adds the result of the stack to the image, -1 subtracts it, 0 returns it alone.
    """

    def __init__(self, sizes: Sequence[int], *, bias: bool, sign: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Conv2d(into, out, 3, padding=1, bias=bias) for into, out in itertools.pairwise(sizes)
        )
        self.sign = sign

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Apply the stack to whole windows."""
        return self.core(batch, NO_MARGIN)

    def core(self, batch: torch.Tensor, margin: Margin) -> torch.Tensor:
        """Apply the stack to windows without their margins: along an axis whose margin is as wide as the stack is deep,
        nothing is padded, and every convolution computes two pixels less than the one before."""
        rows, columns = (min(pair) >= len(self.layers) for pair in margin)
        padding = (int(not rows), int(not columns))
        signal = batch
        for layer in self.layers[:-1]:
            signal = torch.relu_(convolve(layer, signal, padding))
        signal = convolve(self.layers[-1], signal, padding)
        lost = len(self.layers) * rows, len(self.layers) * columns
        core = [
            slice(before - n, size - after - n)
            for (before, after), n, size in zip(margin, lost, batch.shape[2:], strict=True)
        ]
        signal = signal[:, :, *core]
        if self.sign == 0:
            return signal
        (top, _), (left, _) = margin
        image = batch[:, :, top : top + signal.shape[2], left : left + signal.shape[3]]
        return image + signal if self.sign > 0 else image - signal


class NormalizedStack(torch.nn.Module):  # type: ignore[misc]
    """A stack of convolutions that is subtracted from the image and computes in normalised pixels: for training.

    ``sizes``: as of :class:`ConvolutionStack`; ``mean, deviation``: mean and standard deviation of each channel of the image.
    """

    def __init__(self, sizes: Sequence[int], mean: torch.Tensor, deviation: torch.Tensor) -> None:
        super().__init__()
        self.stack = ConvolutionStack(sizes, bias=True, sign=-1)
        self.register_buffer("mean", mean.clone())
        self.register_buffer("scale", deviation.mean())

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Apply the stack to whole windows."""
        return torch.func.functional_call(self.stack, self.for_pixels(), (batch,))

    def for_pixels(self) -> dict[str, torch.Tensor]:
        """Weights and biases of the stack for pixels that are not normalised."""
        state, last = dict(self.stack.named_parameters()), f"layers.{len(self.stack.layers) - 1}"
        weight = state["layers.0.weight"] / self.scale
        return state | {
            "layers.0.weight": weight,
            "layers.0.bias": state["layers.0.bias"] - weight.sum((2, 3)) @ self.mean,
            f"{last}.weight": state[f"{last}.weight"] * self.scale,
            f"{last}.bias": state[f"{last}.bias"] * self.scale,
        }
