"""A processor tried on small windows before images are cut for it: one that looks at all of an image has no tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halotile.errors import ConfigError
from halotile.tasks.devices.device import is_out_of_memory
from halotile.tasks.devices.memory_limits import size_limited
from halotile.tasks.distributed.tiling.processed import Processed
from halotile.tasks.distributed.transport.arguments import Argument
from halotile.tasks.distributed.transport.calls import Tensors
from halotile.tasks.trials.probe import FAR, LENGTHS, stride_along
from halotile.tasks.trials.trial import NARROW, Trial


@dataclass(frozen=True)
class Looking:
    """The multiple on which tiles of a processor have to begin, found by trying it on windows.

    Parameters
    ----------
    processed : Processed
        What is called on windows, without tiles.
    channels, dims : int
        Of the images, and how many axes follow that of the channels.
    axes : tuple of int
        The axes in question, counted from behind that of the channels.
    limit_bytes : int, optional
        How large its process may become.
    """

    processed: Processed
    channels: int
    dims: int
    axes: tuple[int, ...]
    limit_bytes: int | None

    def __call__(self, like: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
        """For windows of the type of ``like``: the multiple, or ``FAR`` or ``PLACED``; NaN where it fails, infinity without memory."""

        def model(windows: torch.Tensor) -> torch.Tensor:
            beside = (
                _beside(argument, tensor, windows)
                for argument, tensor in zip(self.processed.arguments, tensors, strict=True)
            )
            (result,) = self.processed(windows.to(like), *beside)
            assert result is not None
            return result.cpu()

        with size_limited(self.limit_bytes):
            try:
                trial = self._trial(model)
                strides = [stride_along(trial, axis) for axis in self.axes]
            except Exception as error:
                return (torch.tensor([float("inf" if is_out_of_memory(error) else "nan")]),)
        # Both of what no tile can do are below any stride.
        return (torch.tensor([float(min(strides) if min(strides) <= 0 else math.lcm(*strides))]),)

    def _trial(self, model: Any) -> Trial:
        """The model with what it makes of a window."""
        window = torch.zeros(1, self.channels, *[NARROW[self.dims]] * self.dims)
        with torch.no_grad():
            made = model(window)
        scale = max(1, made.shape[2] // window.shape[2])
        return Trial(model, "the processor", (self.channels, made.shape[1]), scale, self.dims)


def is_triable(image: torch.Tensor, axes: Sequence[int]) -> bool:
    """Whether there are windows for such images: those that are cut along axes of space, and hold numbers that can be NaN."""
    kind = image.dtype if isinstance(image.dtype, torch.dtype) else None
    is_float = kind is None or kind.is_floating_point or kind.is_complex
    return is_float and len(image.shape) - 2 in LENGTHS and min(axes, default=0) >= 2


def lent_to_windows(argument: Argument, tensor: torch.Tensor) -> torch.Tensor:
    """As much of a tensor beside the image as windows of another size can have."""
    if argument.role == "image":
        return tensor[(slice(1), slice(None), *[slice(1)] * (tensor.dim() - 2))]
    return tensor[:1] if argument.role == "sample" else tensor


def _beside(argument: Argument, tensor: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
    if argument.role == "image":
        return tensor.expand(len(windows), tensor.shape[1], *windows.shape[2:])
    return argument.repeated(tensor, len(windows))


def refusal(name: str, stride: float) -> ConfigError:
    """What to say of a processor that no tiles can do."""
    how = (
        f"looks at the whole image, or at least {max(LENGTHS[2]) // 2 - 1} pixels far: tiles cannot give its result. A "
        "normalisation, attention or Fourier transform over all pixels does that. Write a local network"
        if stride == FAR
        else "gives other pixels where a window begins elsewhere: its result depends on where the tile lies. A position encoding "
        "does that. Write a network without one"
    )
    return ConfigError(
        f"{name} {how}; or distribute(..., unsafe=True), if each tile by itself is what you want."
    )
