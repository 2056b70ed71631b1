"""A plain stack of 3x3 convolutions with ReLU between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from halotile.tasks.convolution.stable import convolve
from halotile.tasks.denoisers.base import CoreModel, Margin

NO_MARGIN: Margin = ((0, 0), (0, 0))


class ConvolutionStack(torch.nn.Module, CoreModel):  # type: ignore[misc]
    """A stack of convolutions that pad with zeros, added to the image, subtracted from it, or alone.

    Parameters
    ----------
    sizes : sequence of int
        Channels before the first convolution, after each, and after the last.
    bias : bool
        Whether the convolutions have a bias.
    sign : {-1, 0, 1}
        1 adds the result of the stack to the image, -1 subtracts it, 0 returns it alone.
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

    Parameters
    ----------
    sizes : sequence of int
        As of :class:`ConvolutionStack`.
    mean, deviation : Tensor
        Mean and standard deviation of each channel of the image.
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
