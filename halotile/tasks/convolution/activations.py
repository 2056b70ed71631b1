"""Activations that give a pixel the same bits wherever it lies in its window.

torch computes an elementwise function on whole vectors of the CPU, and what is left over at the end of a
tensor one by one, by another formula: a sigmoid, or anything made of exponentials, may differ there in its last bit.
In a window, that end is a pixel that may be kept. So what is left over is computed once more, as part of a whole vector.
This is for one thread, which is what a worker has: several would each have an end of their own.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

VECTORS = 64
"""A multiple of the numbers that torch takes at once on any processor."""

_PLACED = ("out", "memory_format")
"""Arguments that say how the result lies in memory: copies, which need no care."""


class SteadyElementwise(TorchDispatchMode):  # type: ignore[misc]
    """While this is on, elementwise functions on the CPU compute the end of a tensor as its rest.

    Examples
    --------
    >>> numbers = torch.linspace(-3, 3, 1000)
    >>> with SteadyElementwise():
    ...     bool((torch.sigmoid(numbers[:7]) == torch.sigmoid(numbers)[:7]).all())
    True
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler at the first operation, which takes each process a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation of torch."""
        kwargs = kwargs or {}
        if torch.Tag.pointwise not in func.tags or not kwargs.keys().isdisjoint(_PLACED):
            return func(*args, **kwargs)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if len(tensors) == 1 and _has_gaps(tensors[0]):
            return self._without_gaps(func, args, kwargs, tensors[0])
        layouts = {_layout(tensor) for tensor in tensors}
        ends = [_end(tensor) for tensor in tensors]  # before one of them may be written over
        result = func(*args, **kwargs)
        into = _flat(result) if isinstance(result, torch.Tensor) else None
        if into is None or layouts != {_layout(result)}:
            return result
        if all(end is not None for end in ends):
            queue = iter(ends)
            again = [next(queue) if isinstance(arg, torch.Tensor) else arg for arg in args]
            left = len(into) % VECTORS
            into[len(into) - left :] = func(*again, **kwargs).as_strided((left,), (1,))
        return result

    def _without_gaps(self, func: Any, args: Any, kwargs: Any, tensor: torch.Tensor) -> Any:
        """The same on a copy: torch computes a tensor with gaps row by row, each with an end of its own."""
        dense = tensor.contiguous(memory_format=_format_of(tensor))
        again = [dense if arg is tensor else arg for arg in args]
        with self:
            result = func(*again, **kwargs)
        return tensor.copy_(result) if func._schema.is_mutable else result


def _has_gaps(tensor: torch.Tensor) -> bool:
    """Whether floats of the CPU lie in memory with others between them: a part of an image, say."""
    if tensor.device.type != "cpu" or not tensor.is_floating_point() or not tensor.numel():
        return False
    return not torch.ops.aten.is_non_overlapping_and_dense(tensor)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape and steps in memory; along an axis of one number there is no step."""
    steps = (step if n > 1 else 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.shape, *steps)


def _format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Channels last where the channels of a pixel lie together, as in the image that it is a part of."""
    if tensor.dim() == 4 and tensor.stride(1) == 1 and tensor.shape[1] > 1:
        return torch.channels_last
    return torch.contiguous_format


def _flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """The numbers of a tensor in the order of memory; None where they have gaps, or are no floats of the CPU."""
    if tensor.device.type != "cpu" or not tensor.is_floating_point():
        return None
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return tensor.as_strided((tensor.numel(),), (1,)) if dense else None


def _end(tensor: torch.Tensor) -> torch.Tensor | None:
    """What may be left over at the end of a tensor, copied and filled up to whole vectors.

    Where the tensor is not contiguous (channels last, say), neither is the copy: another library may take those that are.
    """
    flat = _flat(tensor)
    if flat is None:
        return None
    end = flat[len(flat) - len(flat) % VECTORS :]
    filled = torch.cat([end, end.new_ones(VECTORS - len(end))])
    return filled if tensor.is_contiguous() else filled.view(1, VECTORS // 2, 1, 2).permute(0, 3, 1, 2)


class SteadyNetwork(torch.nn.Module):  # type: ignore[misc]
    """A network whose activations are computed so, on the CPU."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: torch.Tensor, *more: Any) -> Any:
        """The network's result."""
        if batch.device.type != "cpu":
            return self.network(batch, *more)
        # What a network compiles of itself runs as it is written: in a kernel of its own no operation is seen.
        has_compiler = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
        with torch.compiler.set_stance("force_eager") if has_compiler else nullcontext(), SteadyElementwise():
            return self.network(batch, *more)
