"""A trial of a processor on small windows: one that depends on the whole image cannot be tiled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from halotile.errors import ConfigError
from halotile.tasks.denoisers.base import NARROW
from halotile.tasks.devices.device import is_out_of_memory
from halotile.tasks.devices.memory_limits import size_limited
from halotile.tasks.distributed.tiling.processor_call import Argument, ProcessorCall
from halotile.tasks.distributed.transport.calls import Tensors
from halotile.tasks.trials.probe import FAR, LENGTHS, stride_along
from halotile.tasks.trials.trial import Trial


@dataclass(frozen=True)
class StrideTrial:
    """The multiple on which tiles of a processor have to begin, found by calling it on windows."""

    call: ProcessorCall  # call on windows, without tiles
    channels: int  # channels, dims: number of channels of the images, and of axes after that of the channels
    dims: int
    axes: tuple[int, ...]  # axes in question, counted from the one after the channels
    limit_bytes: int | None  # largest size of the process

    def __call__(self, like: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
        """Return the multiple for windows of the dtype of ``like``, or ``FAR`` or ``PLACED``.

        It is NaN if the processor fails, and infinite if it runs out of memory.
        """

        def model(windows: torch.Tensor) -> torch.Tensor:
            arguments = zip(self.call.arguments, tensors, strict=True)
            parts = (_expand(argument, tensor, windows) for argument, tensor in arguments)
            (result,) = self.call(windows.to(like), *parts)
            assert result is not None
            return result.cpu()

        with size_limited(self.limit_bytes):
            try:
                window = torch.zeros(1, self.channels, *[NARROW[self.dims]] * self.dims)
                with torch.no_grad():
                    result = model(window)
                scale = max(1, result.shape[2] // window.shape[2])
                trial = Trial(model, "the processor", (self.channels, result.shape[1]), scale, self.dims)
                strides = [stride_along(trial, axis) for axis in self.axes]
            except Exception as error:
                return (torch.tensor([float("inf" if is_out_of_memory(error) else "nan")]),)
        # FAR and PLACED are both below any stride.
        return (torch.tensor([float(min(strides) if min(strides) <= 0 else math.lcm(*strides))]),)


def has_trial(image: torch.Tensor, axes: Sequence[int]) -> bool:
    """Return True for images that are cut along spatial axes, and whose dtype has NaN."""
    dtype = image.dtype if isinstance(image.dtype, torch.dtype) else None
    is_float = dtype is None or dtype.is_floating_point or dtype.is_complex
    return is_float and len(image.shape) - 2 in LENGTHS and min(axes, default=0) >= 2


def shrink_argument(argument: Argument, tensor: torch.Tensor) -> torch.Tensor:
    """Reduce an argument to the part that can be expanded for windows of any size."""
    if argument.role == "image":
        return tensor[(slice(1), slice(None), *[slice(1)] * (tensor.dim() - 2))]
    return tensor[:1] if argument.role == "sample" else tensor


def _expand(argument: Argument, tensor: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
    if argument.role == "image":
        return tensor.expand(len(windows), tensor.shape[1], *windows.shape[2:])
    return argument.repeat(tensor, len(windows))


def tiling_error(name: str, stride: float) -> ConfigError:
    """Return the error for a processor that cannot be tiled."""
    reason = (
        f"looks at the whole image, or at least {max(LENGTHS[2]) // 2 - 1} pixels far: tiles cannot give its result. A "
        "normalisation, attention or Fourier transform over all pixels does that. Write a local network"
        if stride == FAR
        else "gives other pixels where a window begins elsewhere: its result depends on the position of the tile. A position encoding "
        "does that. Write a network without one"
    )
    return ConfigError(
        f"{name} {reason}; or distribute(..., unsafe=True), if each tile by itself is what you want."
    )
