"""Activations with the same bits for a pixel at any place in its window.

torch computes an elementwise function on whole vectors of the CPU, and the remainder at the end of a
tensor one by one, by another formula: a sigmoid, or anything made of exponentials, may differ there in its last bit.
The end of a window may be part of the result. So the remainder is computed once more, as part of a whole vector.
Where the layouts of operands differ, as those of an image and of a number for each channel, each row would have a remainder: such operands are
first laid out alike, but for functions whose results are rounded correctly by any formula.
This is for one thread, as in a worker: several threads would each have a remainder.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

VECTORS = 64  # a multiple of the vector length of torch on any CPU

_EXACT = frozenset({
    "add", "sub", "rsub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "equal", "where", "masked_fill", "copy", "copysign",
    "max", "min", "maximum", "minimum", "fmax", "fmin", "clamp", "clamp_min", "clamp_max", "prelu_kernel",
})  # fmt: skip
"""Functions that any formula rounds alike, without the underscores around their names, unless they get further arguments by name, such as alpha."""


_ALONG_AXIS = frozenset({
    torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default, torch.ops.aten.mean.dim, torch.ops.aten.sum.dim_IntList,
})  # fmt: skip
"""Functions of all numbers along an axis, of several images at once."""
_SOFTMAX = frozenset({torch.ops.aten.softmax.int, torch.ops.aten.log_softmax.int})


class SteadyElementwise(TorchDispatchMode):  # type: ignore[misc]
    """A mode in which elementwise functions on the CPU compute the end of a tensor like the rest.

    >>> numbers = torch.linspace(-3, 3, 1000)
    >>> with SteadyElementwise():
    ...     bool((torch.sigmoid(numbers[:7]) == torch.sigmoid(numbers)[:7]).all())
    True
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler at the first operation, which takes a second in each process."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one torch operation."""
        kwargs = kwargs or {}
        if func in _SOFTMAX:  # as it is in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        if func in _ALONG_AXIS and args[0].device.type == "cpu":
            return _along_last_axis(func, args, kwargs)
        if torch.Tag.pointwise not in func.tags or "memory_format" in kwargs:  # which only copies have
            return func(*args, **kwargs)
        if "out" in kwargs:
            return self._into(kwargs["out"], func, args, {k: kwargs[k] for k in kwargs if k != "out"})
        tensors = [arg for arg in args if _is_image(arg)]
        if len(tensors) == 1 and _has_gaps(tensors[0]):
            return self._without_gaps(func, args, kwargs, tensors[0])
        layouts = {_layout(tensor) for tensor in tensors}
        is_exact = not kwargs and func.overloadpacket.__name__.strip("_") in _EXACT
        if not is_exact and _differ(tensors, layouts):
            return self._laid_out_alike(func, args, kwargs, tensors)
        ends = [_end(tensor) for tensor in tensors]  # before one of them may be overwritten
        result = func(*args, **kwargs)
        into = _flat(result) if isinstance(result, torch.Tensor) else None
        if into is None or layouts != {_layout(result)}:
            return result
        if all(end is not None for end in ends):
            queue = iter(ends)
            again = [next(queue) if _is_image(arg) else arg for arg in args]
            left = len(into) % VECTORS
            into[len(into) - left :] = func(*again, **kwargs).as_strided((left,), (1,))
        return result

    def _into(self, out: torch.Tensor, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Run the operation without ``out``, whose remainder would be left as it is; put the result there."""
        with self:
            result = func.overloadpacket(*args, **kwargs)
        if not torch.can_cast(result.dtype, out.dtype):
            return func(*args, out=out, **kwargs)  # torch says why not
        if out.shape != result.shape:  # it has what layout the result has, as in torch
            out.resize_(result.shape).as_strided_(result.shape, result.stride())
        return out.copy_(result)

    def _without_gaps(self, func: Any, args: Any, kwargs: Any, tensor: torch.Tensor) -> Any:
        """Run the operation on a copy: torch computes a tensor with gaps row by row, each row with its own end."""
        dense = tensor.contiguous(memory_format=_format_of(tensor))
        again = [dense if arg is tensor else arg for arg in args]
        with self:
            result = func(*again, **kwargs)
        return tensor.copy_(result) if func._schema.is_mutable else result

    def _laid_out_alike(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Run the operation on copies of the shape and the layout of the result."""
        shape = torch.broadcast_shapes(*[tensor.shape for tensor in tensors])
        like = next((tensor for tensor in tensors if tensor.shape == shape), torch.empty(shape))
        again = [torch.empty_like(like, dtype=arg.dtype).copy_(arg) if _is_image(arg) else arg for arg in args]
        with self:
            result = func(*again, **kwargs)
        return args[0].copy_(result) if func._schema.is_mutable else result


def _along_last_axis(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function along channels, or another axis, that are the last axis in memory: along others it has a remainder of pixels."""
    image, axes = args[0], args[1]
    if image.dim() < 2:
        return func(*args, **kwargs)
    axis = axes if isinstance(axes, int) else axes[0] if axes and len(axes) == 1 else -1
    if axis % image.dim() == image.dim() - 1:
        return func(*args, **kwargs)
    moved = image.movedim(axis, -1).contiguous()
    result = func(moved, -1 if isinstance(axes, int) else [-1], *args[2:], **kwargs)
    keeps_axis = isinstance(axes, int) or (len(args) > 2 and args[2])
    if keeps_axis:
        result = result.movedim(-1, axis)
    # Laid out as torch does it: what comes next may ask for a view.
    plain = func(
        torch.empty_strided(image.shape, image.stride(), dtype=image.dtype, device="meta"), *args[1:], **kwargs
    )
    if _layout(result) == _layout(plain):
        return result
    return torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype).copy_(result)


def _is_image(arg: Any) -> bool:
    """Return whether an argument is a tensor with axes; torch takes one without as a number."""
    return isinstance(arg, torch.Tensor) and arg.dim() > 0


def _differ(tensors: list[torch.Tensor], layouts: set[Any]) -> bool:
    """Return whether float tensors on the CPU are laid out each in its own way, or all with gaps."""
    if len(tensors) < 2 or any(t.device.type != "cpu" or not t.is_floating_point() for t in tensors):
        return False
    return len(layouts) > 1 or _has_gaps(tensors[0])


def _has_gaps(tensor: torch.Tensor) -> bool:
    """Return whether a float tensor on the CPU has gaps in memory, such as a part of an image."""
    if tensor.device.type != "cpu" or not tensor.is_floating_point() or not tensor.numel():
        return False
    return not torch.ops.aten.is_non_overlapping_and_dense(tensor)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape and strides, without the strides of axes of length 1."""
    strides = (stride if n > 1 else 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.shape, *strides)


def _format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Memory format of a tensor with gaps: channels last if the channels of a pixel are adjacent."""
    if tensor.dim() == 4 and tensor.stride(1) == 1 and tensor.shape[1] > 1:
        return torch.channels_last
    return torch.contiguous_format


def _flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """The elements of a tensor in memory order; None if it has gaps, or is not a float tensor on the CPU."""
    if tensor.device.type != "cpu" or not tensor.is_floating_point() or tensor.is_neg():
        return None
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return tensor.as_strided((tensor.numel(),), (1,)) if dense else None


def _end(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of the remainder at the end of a tensor, padded to whole vectors.

    If the tensor is not contiguous (channels last, say), neither is the copy: another library may compute contiguous ones.
    """
    flat = _flat(tensor)
    if flat is None:
        return None
    end = flat[len(flat) - len(flat) % VECTORS :]
    padded = torch.cat([end, end.new_ones(VECTORS - len(end))])
    return padded if tensor.is_contiguous() else padded.view(1, VECTORS // 2, 1, 2).permute(0, 3, 1, 2)


class SteadyNetwork(torch.nn.Module):  # type: ignore[misc]
    """A network that runs in :class:`SteadyElementwise` on the CPU."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: torch.Tensor, *more: Any) -> Any:
        """Return the network's result."""
        if batch.device.type != "cpu":
            return self.network(batch, *more)
        # Compiled parts of a network run uncompiled: the mode sees no operations inside a compiled kernel.
        has_compiler = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
        with torch.compiler.set_stance("force_eager") if has_compiler else nullcontext(), SteadyElementwise():
            return self.network(batch, *more)
