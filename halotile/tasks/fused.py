"""Shorter ways through a stack of convolutions, with the same bits.

A convolution and the ReLU after it are one call of oneDNN, one pass over memory less. A last
convolution to one channel, which leaves seven eighths of a vector unit idle, computes patches of neighbouring
pixels as channels (see :mod:`halotile.tasks.correlate`).

Both differ from the long way where a sum is not finite: torch's ReLU keeps a NaN, oneDNN's makes it zero, and the
zeros beside a shifted kernel make NaN of infinity. So they are taken only where a bound on the weights and on the
pixels at hand says that no sum can overflow; and only where a trial on this machine gave the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from halotile.tasks.correlate import shifted
from halotile.tasks.steady import convolve, is_few, steadily

if TYPE_CHECKING:
    import torch

LIMIT = 1e37
"""Sums that stay below this cannot overflow in single precision, in whatever order they run."""
PATCH = 8
"""Pixels of a patch, in one row: the numbers in a vector of the narrowest machine."""


class ShortWay:
    """The shorter way through a stack of convolutions with padding 1 and a ReLU after each but the last.

    Parameters
    ----------
    layers : sequence of Conv2d
        The stack, in the order in which they are applied.

    Examples
    --------
    >>> import torch
    >>> way = ShortWay([torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.Conv2d(8, 1, 3, padding=1)])
    >>> ramp = torch.linspace(0, 1, 200 * 200).reshape(1, 1, 200, 200)
    >>> way.allows(ramp * torch.nan), way.allows(ramp * 1e38)
    (False, False)
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        import torch

        self.layers = layers
        weight = layers[-1].weight
        self.patch: tuple[torch.Tensor, torch.Tensor | None] | None = None
        if len(weight) == 1:
            kernels = shifted(weight.detach()[0], 1, PATCH, 1).contiguous(memory_format=torch.channels_last)
            bias = layers[-1].bias
            self.patch = kernels, None if bias is None else bias.detach().repeat(PATCH)
        self.usable = (
            torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_convolution_pointwise")
            and weight.device.type == "cpu"
            and weight.dtype == torch.float32
        )
        self.bounds: list[tuple[float, float]] = []
        if self.usable:
            self.bounds = [_gain_and_shift(layer) for layer in layers]
            with torch.inference_mode():
                self._try()

    def allows(self, image: torch.Tensor) -> bool:
        """Whether no sum over these pixels can overflow, and this is what oneDNN computes."""
        import torch

        plain = image.device.type != "cpu" or image.dtype != torch.float32 or torch.is_autocast_enabled("cpu")
        if not self.usable or plain or torch.is_grad_enabled() or is_few(image):
            return False
        largest = float(image.abs().max())  # NaN if there is one
        for gain, shift in self.bounds:
            largest = gain * largest + shift
            if not largest < LIMIT:
                return False
        return True

    def convolve_relu(self, layer: Any, image: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
        """``relu(layer(image))`` with another padding, by oneDNN's convolution with a ReLU at its end."""
        import torch

        result: torch.Tensor = torch.ops.mkldnn._convolution_pointwise(
            image, layer.weight, layer.bias, padding, (1, 1), (1, 1), 1, "relu", [], ""
        )
        return result

    def last(self, image: torch.Tensor, padding: tuple[int, int], columns: int) -> torch.Tensor:
        """The last convolution: ``columns`` of the result at least, all of them if whole patches do not reach so far."""
        whole = (image.shape[3] + 2 * padding[1] - 2) // PATCH * PATCH
        if self.patch is None or columns > whole:
            return convolve(self.layers[-1], image, padding)
        return self._patches(image, padding)

    def _patches(self, image: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
        import torch

        assert self.patch is not None
        kernels, bias = self.patch
        convolution = partial(
            torch.nn.functional.conv2d, weight=kernels, bias=bias, stride=(1, PATCH), padding=padding
        )
        patches = steadily(convolution, image)
        laid_out = patches.permute(0, 2, 3, 1)
        return laid_out.reshape(len(patches), 1, laid_out.shape[1], -1)

    def _try(self) -> None:
        """See whether this machine gives the same bits; do without what does not."""
        import torch

        generator = torch.Generator().manual_seed(20_26)
        for layer in self.layers:
            image = torch.rand((2, layer.in_channels, 12, 3 * PATCH + 2), generator=generator)
            image = image.contiguous(memory_format=torch.channels_last)
            if layer is not self.layers[-1]:
                plain = torch.relu_(convolve(layer, image, (1, 1)))
                self.usable &= torch.equal(plain, self.convolve_relu(layer, image, (1, 1)))
            elif self.patch is not None:
                plain = convolve(layer, image, (0, 0))
                if not torch.equal(plain, self._patches(image, (0, 0))):
                    self.patch = None


def _gain_and_shift(layer: Any) -> tuple[float, float]:
    """A bound on a convolution: no sum exceeds the gain times the largest pixel, plus the shift."""
    gain = float(layer.weight.detach().double().abs().flatten(1).sum(1).max())
    return gain, 0.0 if layer.bias is None else float(layer.bias.detach().double().abs().max())
