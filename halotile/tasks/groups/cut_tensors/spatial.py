"""Networks over an image whose rows are cut among ranks: halos are exchanged where a layer looks at other rows, statistics are those of all rows.

The calls of a network to torch are intercepted, so layers and functions are treated alike. Those that only look at a row's own numbers run as
they are; what mixes rows in a way that is not known is refused, and so is what reaches torch's kernels without such a call.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import CodeType
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from halotile.errors import ConfigError
from halotile.tasks.groups.cut_tensors.row_layers import LAYERS, check_counts, row_counts
from halotile.tasks.groups.cut_tensors.transfers import even_sizes
from halotile.tasks.groups.group import TorchGroup

_ALONG_AXES = (
    "cat", "concat", "chunk", "split", "softmax", "log_softmax", "stack", "unbind", "mean", "sum", "amax", "amin",
)  # fmt: skip
"""Functions that leave rows alone where they work along the channels."""
_BY_ITSELF = {
    "abs", "add", "addcmul", "alpha_dropout", "bfloat16", "celu", "channel_shuffle", "clamp", "clamp_max",
    "clamp_min", "clone", "contiguous", "cos", "data", "detach", "device", "dim", "div", "double", "dropout",
    "dtype", "elu", "exp", "expand_as", "fill", "float", "floor",
    "gelu", "half", "hardsigmoid", "hardswish", "hardtanh", "iadd", "imul", "is_complex", "is_contiguous",
    "is_floating_point", "isfinite", "isub", "itruediv", "layout", "leaky_relu", "lerp", "log", "log1p",
    "logsigmoid", "masked_fill", "maximum", "minimum", "mish", "mul", "multiply", "nan_to_num", "neg", "numel",
    "ones_like", "pixel_shuffle", "pow", "prelu", "radd", "reciprocal", "relu", "relu6", "requires_grad_",
    "rmul", "rsqrt", "rsub", "rtruediv", "selu", "set_grad_enabled", "sigmoid", "sign", "silu", "sin", "size", "softplus",
    "softsign", "sqrt", "square", "sub", "subtract", "tanh", "threshold", "to", "true_divide", "type", "where",
    "zeros_like",
}  # fmt: skip
"""Functions of single numbers, or of a row and the channels of its pixels; in place too."""
_OF_NO_IMAGE = {
    "_set_grad_enabled", "arange", "empty", "full", "linspace", "ones", "tensor", "transposed_kernel", "zeros",
}  # fmt: skip
"""Functions that make a tensor of one value, or of one axis, which is that of the columns beside an image; no_grad; and that of halotile's
own U-Net which makes weights of weights."""


_PROPERTIES = {
    "data", "device", "dtype", "grad_fn", "is_cuda", "is_leaf", "layout", "ndim", "requires_grad", "shape",
}  # fmt: skip
"""Properties of a tensor that are those of its rows; the shape is that of this rank's part."""


def aligned_sizes(rows: int, ranks: int, stride: int) -> list[int]:
    """Numbers of rows of the ranks, multiples of a network's total stride but for the last one's.

    Raises
    ------
    ConfigError
        When a rank would have no rows.

    Examples
    --------
    >>> aligned_sizes(100, 3, 8)
    [40, 32, 28]
    """
    parts = -(-rows // stride)
    if parts < ranks:
        raise ConfigError(
            f"a rank has no rows of an image of {rows} rows that is cut at multiples of {stride} among {ranks} ranks. "
            f"Take {max(1, parts)} at most, or a larger image."
        )
    sizes = [stride * part for part in even_sizes(parts, ranks)]
    sizes[-1] -= sum(sizes) - rows
    return sizes


def spatial(module: Callable[..., Any], group: TorchGroup) -> Callable[..., Any]:
    """Apply a network to the rows of this rank as if it saw the whole image, with the gradients of the whole image.

    Gradients of parameters are those of this rank's rows: sum them with :func:`halotile.collectives.mark_shared`. Dropout is drawn by each rank
    for its rows: seed the ranks differently.

    Parameters
    ----------
    module : callable
        A network on tensors (batch, channels, rows, columns): convolutions, pooling, upsampling, padding and taking it off again, group,
        instance and batch norm, and whatever treats each number, or the channels of a pixel, by themselves.
    group : TorchGroup
        The ranks. Cut the rows with :func:`aligned_sizes`.

    Raises
    ------
    ConfigError
        When the network calls a function that mixes rows in another way, or a rank has no rows; the latter on all ranks.

    Examples
    --------
    >>> blur = torch.nn.Conv2d(1, 1, 3, padding=1)
    >>> x = torch.ones(1, 1, 6, 5)
    >>> torch.equal(spatial(blur, TorchGroup())(x), blur(x))
    True
    """

    def apply(*args: Any, **kwargs: Any) -> Any:
        if group.world_size == 1 or _CUT.get() is group:
            return module(*args, **kwargs)
        if _CUT.get() is not None:
            raise ConfigError(
                "the network calls spatial with another group than its own. Write the same for both."
            )
        _check_parts(group, [*args, *kwargs.values()])
        token = _CUT.set(group)
        try:
            rows = _CutRows(group)
            with (unseen := _Unseen(rows)), rows:
                return module(*args, **kwargs)
        except RuntimeError:
            if unseen.refusal:  # torch.jit wraps it
                raise unseen.refusal from None
            raise
        finally:
            _CUT.reset(token)

    return apply


def _check_parts(group: TorchGroup, values: Sequence[Any]) -> None:
    """Refuse, on all ranks alike, an image of which a rank has no rows: layers and norms would fail there in words of torch."""
    images = (each for each in values if isinstance(each, torch.Tensor) and each.ndim == 4)
    if (image := next(images, None)) is not None:
        check_counts(row_counts(image, group))


_CUT: ContextVar[TorchGroup | None] = ContextVar("cut", default=None)
"""The ranks among which the rows are cut that a network is applied to now."""


class _CutRows(TorchFunctionMode):  # type: ignore[misc]
    """Calls of torch on tensors whose rows are cut among ranks."""

    def __init__(self, group: TorchGroup) -> None:
        super().__init__()
        self.group = group
        self.own = _own_functions(torch.autograd.Function)
        self.depth = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.depth += 1
        try:
            return self._call(func, args, dict(kwargs or {}))
        finally:
            self.depth -= 1

    def _call(self, func: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", str(func))
        if special := LAYERS.get(name):
            _check_callers(name, self.own)
            return special(self.group, *args, **options)
        if name == "__get__":
            property_name = getattr(getattr(func, "__self__", None), "__name__", "")
            if property_name not in _PROPERTIES:
                _refuse(f"the property {property_name}")
        elif name == "__getitem__":
            _check_image(name, args[0])
            _check_index(args[0], args[1], self.group)
        elif not {name, name.strip("_")} & (_BY_ITSELF | _OF_NO_IMAGE):
            _check_axes(name, args, options)
        return func(*args, **options)


class _Unseen(TorchDispatchMode):  # type: ignore[misc]
    """Kernels that run without a call of torch's functions: those of torch.jit, and of extensions."""

    def __init__(self, rows: _CutRows) -> None:
        super().__init__()
        self.rows = rows
        self.refusal: ConfigError | None = None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not self.rows.depth:
            self.refusal = ConfigError(
                f"the network runs {func} where its call cannot be seen, as in a module of torch.jit.script or torch.jit.trace, or in an "
                "extension, and its rows are cut among ranks. Write the module itself, of torch's functions."
            )
            raise self.refusal
        return func(*args, **(kwargs or {}))


def _check_callers(name: str, own: Mapping[CodeType, str]) -> None:
    """Refuse a layer whose gradient would be computed where its calls are not intercepted, without the rows of other ranks."""
    frame = sys._getframe(1)
    while frame.f_code is not _APPLY and frame.f_back:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            raise ConfigError(
                f"the network calls {name} within torch.utils.checkpoint, which would compute it again without the rows of other ranks. Write "
                "checkpoint(torch_group.spatial(block, group), x) for checkpoint(block, x)."
            )
        if function := own.get(frame.f_code):
            raise ConfigError(
                f"the network calls {name} within the torch.autograd.Function {function}, whose gradient would leave the rows of other ranks "
                "out. Call torch's function itself."
            )
        frame = frame.f_back


_APPLY = next(code for code in spatial.__code__.co_consts if getattr(code, "co_name", "") == "apply")


def _own_functions(base: type) -> dict[CodeType, str]:
    """Names of functions with a gradient of their own, by the code of their forward."""
    found: dict[CodeType, str] = {}
    each: Any
    for each in base.__subclasses__():
        code = getattr(inspect.unwrap(each.forward), "__code__", None)
        found |= _own_functions(each) | ({code: each.__name__} if code else {})
    return found


def _check_image(name: str, value: Any) -> None:
    """Refuse tensors of which the second axis need not be that of the channels."""
    tensors = value if isinstance(value, tuple | list) else [value]
    if any(not isinstance(tensor, torch.Tensor) or tensor.ndim != 4 for tensor in tensors):
        _refuse(f"{name} on a tensor without the axes batch, channels, rows, columns")


def _check_index(image: torch.Tensor, index: Any, group: TorchGroup) -> None:
    """Refuse an index that picks rows, but for the last rows of the image, which may be left out: those that were padded."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is None or isinstance(part, torch.Tensor) for part in parts):
        _refuse("an index")
    if places := [place for place, part in enumerate(parts) if part is Ellipsis]:
        parts[places[0] : places[0] + 1] = [slice(None)] * (image.ndim - len(parts) + 1)
    for axis, part in enumerate(parts[2:], 2):
        if not isinstance(part, slice):
            _refuse("an index")
        start, stop, step = part.indices(image.shape[axis])
        is_whole = (start, step) == (0, 1) and (
            group.rank == group.world_size - 1 or stop == image.shape[axis]
        )
        if axis == 2 and not is_whole:
            _refuse("an index")


def _check_axes(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Accept functions along the channels alone; refuse those that are not known to leave rows alone."""
    if name not in _ALONG_AXES:
        _refuse(name)
    _check_image(name, args[0] if args else options.get("input", options.get("tensors")))
    place = 2 if name in ("chunk", "split") else 1
    axes = options.get("dim", args[place] if len(args) > place else None)
    if axes not in (1, (1,), [1]):
        _refuse(name)


def _refuse(name: str) -> NoReturn:
    raise ConfigError(
        f"the network calls {name}, which may mix rows of the image, and they are cut among ranks. Write it with convolutions, pooling, "
        "upsampling, norms, and functions of single pixels."
    )
