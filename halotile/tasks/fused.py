"""A convolution and the ReLU after it as one call of oneDNN: the same bits, one pass over memory less.

The two differ where a NaN arrives at the ReLU: torch keeps it, oneDNN makes it zero. So a stack of such
layers takes the short way only where a bound on its weights and on the pixels at hand says that no sum can overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from halotile.tasks.steady import is_few

if TYPE_CHECKING:
    import torch

LIMIT = 1e37
"""Sums that stay below this cannot overflow in single precision, in whatever order they run."""


def convolve_relu(layer: Any, image: torch.Tensor) -> torch.Tensor:
    """``relu(layer(image))`` for a Conv2d, by oneDNN's convolution with a ReLU at its end."""
    import torch

    result: torch.Tensor = torch.ops.mkldnn._convolution_pointwise(
        image,
        layer.weight,
        layer.bias,
        layer.padding,
        layer.stride,
        layer.dilation,
        layer.groups,
        "relu",
        [],
        "",
    )
    return result


class Guard:
    """Says whether a stack of convolutions may take the short way on the pixels at hand.

    Parameters
    ----------
    layers : sequence of Conv2d
        The stack, in the order in which they are applied, with a ReLU after each.

    Examples
    --------
    >>> import torch
    >>> guard = Guard([torch.nn.Conv2d(1, 8, 3, padding=1)])
    >>> ramp = torch.linspace(0, 1, 200 * 200).reshape(1, 1, 200, 200)
    >>> guard.allows(ramp * torch.nan), guard.allows(ramp * 1e38)
    (False, False)
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        import torch

        self.usable = torch.backends.mkldnn.is_available() and hasattr(
            torch.ops.mkldnn, "_convolution_pointwise"
        )
        self.bounds = [_gain_and_shift(layer) for layer in layers]

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


def _gain_and_shift(layer: Any) -> tuple[float, float]:
    """A bound on a convolution: no sum exceeds the gain times the largest pixel, plus the shift."""
    gain = float(layer.weight.detach().double().abs().flatten(1).sum(1).max())
    return gain, 0.0 if layer.bias is None else float(layer.bias.detach().double().abs().max())
