"""Networks over an image whose rows are cut among ranks: halos are exchanged where a layer looks at other rows, statistics are those of all rows.

The calls of a network to torch are intercepted, so layers and functions are treated alike. Those that only look at a row's own numbers run as
they are; what mixes rows in a way that is not known is refused, and so is what reaches torch's kernels without such a call.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from types import CodeType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from halotile.errors import ConfigError
from halotile.tasks.groups.cut_tensors.transfers import all_reduce, even_sizes, halo_exchange, wide_type
from halotile.tasks.groups.group import TorchGroup

ROWS = -2


def row_counts(x: torch.Tensor, group: TorchGroup) -> list[int]:
    """Numbers of rows of all ranks."""
    own = torch.zeros(group.world_size, dtype=torch.int64, device=x.device)
    own[group.rank] = x.shape[ROWS]
    return [int(n) for n in group.all_reduce(own)]


def check_counts(sizes: Sequence[int]) -> None:
    """Refuse an image that leaves a rank without rows.

    Raises
    ------
    ConfigError
        When one has none.
    """
    if not all(sizes):
        raise ConfigError(
            f"a rank has no rows of an image of {sum(sizes)} rows here ({list(sizes)}). Take fewer ranks, or a larger image."
        )


def _window(x: torch.Tensor, group: TorchGroup, kernel: int, stride: int, dilation: int, padding: int) -> torch.Tensor:
    """The rows from which this rank's rows of the result are computed; a row of the result belongs to the rank of its central row."""
    sizes = row_counts(x, group)
    bounds = [*itertools.accumulate(sizes, initial=0)]
    reach = (kernel - 1) * dilation
    rows_out = (bounds[-1] + 2 * padding - reach - 1) // stride + 1
    centre = reach // 2 - padding
    firsts = [min(max(0, -(-(bound - centre) // stride)), rows_out) for bound in bounds]
    firsts[0], firsts[-1] = 0, rows_out
    needs = [(a * stride - padding, (b - 1) * stride - padding + reach + 1) for a, b in itertools.pairwise(firsts)]
    before = max(0, *(bounds[r] - needs[r][0] for r in range(len(sizes)) if sizes[r]))
    after = max(0, *(needs[r][1] - bounds[r + 1] for r in range(len(sizes)) if sizes[r]))
    check_counts(sizes)
    check_counts([b - a for a, b in itertools.pairwise(firsts)])  # for all ranks alike
    wide = halo_exchange(x, group, sizes, ROWS, before, after, "zero")
    start = needs[group.rank][0] - (bounds[group.rank] - before)
    return wide.narrow(ROWS, start, needs[group.rank][1] - needs[group.rank][0])


def _pair(value: Any) -> tuple[int, int]:
    rows, columns = (value, value) if isinstance(value, int) else (value * 2)[:2] if len(value) == 1 else value
    return int(rows), int(columns)


def _conv2d(
    group: TorchGroup,
    input: torch.Tensor,  # noqa: A002 - torch's own name
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> torch.Tensor:
    steps, spread = _pair(stride), _pair(dilation)
    if padding == "same":
        if any((k - 1) * d % 2 for k, d in zip(weight.shape[2:], spread, strict=True)):
            raise ConfigError(
                "the network has a convolution of an even kernel with padding='same', and its rows are cut among ranks. Pad it by numbers."
            )
        padding = [(k - 1) * d // 2 for k, d in zip(weight.shape[2:], spread, strict=True)]
    edges = _pair(0 if padding == "valid" else padding)
    window = _window(input, group, weight.shape[2], steps[0], spread[0], edges[0])
    return torch.conv2d(window, weight, bias, steps, (0, edges[1]), spread, groups)


def _conv_transpose2d(
    group: TorchGroup,
    input: torch.Tensor,  # noqa: A002 - torch's own name
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> torch.Tensor:
    (step, wide), (edge, side), (more, right) = _pair(stride), _pair(padding), _pair(output_padding)
    spread = _pair(dilation)
    overlap = (weight.shape[2] - 1) * spread[0] + 1 + more - step - 2 * edge
    if overlap:
        raise ConfigError(
            "the network calls conv_transpose2d, and its result has not stride times the rows of its input. Choose padding and output_padding so "
            "that it has, or cut the image among fewer axes."
        )
    sizes = row_counts(input, group)
    halo = -(-max((weight.shape[2] - 1) * spread[0], edge) // step)
    rows, start = input.shape[ROWS], sum(sizes[: group.rank])
    wider = halo_exchange(input, group, sizes, ROWS, halo, halo)
    full = torch.conv_transpose2d(wider, weight, bias, (step, wide), (0, side), (0, right), groups, spread)
    first = min(halo, start) * step + edge
    if (missing := first + rows * step - full.shape[ROWS]) > 0:  # rows that no weight reaches hold the bias
        below = full.new_zeros(*full.shape[:ROWS], missing, full.shape[-1])
        full = torch.cat([full, _affine(below, None, bias)], ROWS)
    return full.narrow(ROWS, first, rows * step)


def _max_pool2d(
    group: TorchGroup,
    input: torch.Tensor,  # noqa: A002 - torch's own name
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> torch.Tensor:
    _check_pool(
        rows_of_padding=_pair(padding)[0],
        dilation=_pair(dilation) != (1, 1),
        ceil_mode=ceil_mode,
        return_indices=return_indices,
    )
    window, kernel, steps = _pooled_window(group, input, kernel_size, stride)
    return F.max_pool2d(window, kernel, steps, (0, _pair(padding)[1]))


def _avg_pool2d(
    group: TorchGroup,
    input: torch.Tensor,  # noqa: A002 - torch's own name
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    _check_pool(rows_of_padding=_pair(padding)[0], ceil_mode=ceil_mode)
    window, kernel, steps = _pooled_window(group, input, kernel_size, stride)
    sides = (0, _pair(padding)[1])
    return F.avg_pool2d(window, kernel, steps, sides, False, count_include_pad, divisor_override)


def _check_pool(**asked: Any) -> None:
    """Refuse what pools rows beyond the image, or that are not beside each other."""
    if wrong := [name for name, value in asked.items() if value]:
        raise ConfigError(
            f"the network pools with {' and '.join(wrong)}, and its rows are cut among ranks. Leave it out."
        )


def _pooled_window(
    group: TorchGroup, x: torch.Tensor, kernel_size: Any, stride: Any
) -> tuple[torch.Tensor, tuple[int, int], tuple[int, int]]:
    """The rows that are pooled, kernel and stride."""
    kernel = _pair(kernel_size)
    steps = _pair(kernel_size if stride in (None, [], ()) else stride)
    return _window(x, group, kernel[0], steps[0], 1, 0), kernel, steps


def _interpolate(
    group: TorchGroup,
    input: torch.Tensor,  # noqa: A002 - torch's own name
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    **options: Any,
) -> torch.Tensor:
    factors = scale_factor if isinstance(scale_factor, tuple | list) else (scale_factor, scale_factor)
    if (
        size is not None
        or align_corners
        or any(f is None or f != int(f) or f < 1 for f in factors)
        or mode not in _HALO_OF_MODE
    ):
        raise ConfigError(
            "the network interpolates to a size, by a fraction, or with align_corners, and its rows are cut among ranks. Write a scale_factor of "
            "whole numbers, with mode nearest, bilinear or bicubic."
        )
    sizes, halo = row_counts(input, group), _HALO_OF_MODE[mode]
    rows, start, factor = input.shape[ROWS], sum(sizes[: group.rank]), int(factors[0])
    wide = halo_exchange(input, group, sizes, ROWS, halo, halo)
    full = F.interpolate(wide, None, scale_factor, mode, align_corners, **options)
    return full.narrow(ROWS, min(halo, start) * factor, rows * factor)


def _pad(
    group: TorchGroup,
    input: torch.Tensor,  # noqa: A002 - torch's own name
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> torch.Tensor:
    if len(pad) <= 2 or not any(pad[2:4]):
        return F.pad(input, pad, mode, value)
    left, right, top, bottom = pad[:4]
    if mode == "circular":
        sizes = row_counts(input, group)
        input = _wrapped(input, group, sizes, top, bottom)  # noqa: A001 - torch's own name
        return F.pad(input, (left, right, 0, 0), mode)
    if mode == "reflect" and ((sizes := row_counts(input, group))[0] <= top or sizes[-1] <= bottom):
        raise ConfigError(
            f"the network reflects {max(top, bottom)} rows at the edge of an image of {sum(sizes)}, and the ranks there have too few ({sizes}). "
            "Take fewer ranks, or a larger image."
        )
    first, last = group.rank == 0, group.rank == group.world_size - 1
    return F.pad(input, (left, right, top if first else 0, bottom if last else 0, *pad[4:]), mode, value)


def _wrapped(x: torch.Tensor, group: TorchGroup, sizes: Sequence[int], top: int, bottom: int) -> torch.Tensor:
    """Rows of the other end on the first and the last rank."""
    wide = halo_exchange(x, group, sizes, ROWS, top, bottom, "circular")
    start = 0 if group.rank == 0 else top
    stop = wide.shape[ROWS] - (0 if group.rank == group.world_size - 1 else bottom)
    return wide.narrow(ROWS, start, stop - start)


def _channel_dropout(
    name: str,
    _: TorchGroup,
    input: torch.Tensor,  # noqa: A002 - torch's own name
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool = True,
) -> torch.Tensor:
    if training and train:
        raise ConfigError(
            f"the network calls {name} in training. Its rows are cut among ranks, and each rank would leave out other channels. Write dropout, "
            "which leaves out single numbers."
        )
    return input


def _group_norm(
    group: TorchGroup,
    input: torch.Tensor,  # noqa: A002 - torch's own name
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> torch.Tensor:
    x = input.reshape(input.shape[0], num_groups, -1, *input.shape[2:])
    normal = _normalised(x, group, (2, 3, 4), eps)[0].reshape(input.shape)
    return _affine(normal, weight, bias)


def _instance_norm(
    group: TorchGroup,
    input: torch.Tensor,  # noqa: A002 - torch's own name
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if not use_input_stats or running_mean is not None:
        raise ConfigError("the network has an instance norm with running statistics. Write track_running_stats=False.")
    return _affine(_normalised(input, group, (2, 3), eps)[0], weight, bias)


def _batch_norm(
    group: TorchGroup,
    input: torch.Tensor,  # noqa: A002 - torch's own name
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    normal, mean, variance, count = _normalised(input, group, (0, 2, 3), eps)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.flatten().to(running_mean.dtype), momentum)
            running_var.lerp_((variance * count / (count - 1)).flatten().to(running_var.dtype), momentum)
    return _affine(normal, weight, bias)


def _normalised(
    x: torch.Tensor, group: TorchGroup, axes: tuple[int, ...], eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """A tensor with mean 0 and variance 1 over axes of all ranks, its mean and variance, and the number of its values in each."""
    wide = x.to(wide_type(x))
    total = wide.sum(axes, keepdim=True)
    count = int(group.all_reduce(torch.tensor(x.numel() // total.numel(), device=x.device)))
    mean = all_reduce(total, group) / count
    variance = all_reduce((wide - mean).square().sum(axes, keepdim=True), group) / count
    return ((wide - mean) * (variance + eps).rsqrt()).to(x.dtype), mean, variance, count


def _affine(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    x = x if weight is None else x * weight.view(1, -1, 1, 1)
    return x if bias is None else x + bias.view(1, -1, 1, 1)


_HALO_OF_MODE = {"nearest": 0, "nearest-exact": 0, "bilinear": 1, "bicubic": 2}
# Layers by the name of torch's function.
LAYERS: dict[str, Callable[..., Any]] = {
    "conv2d": _conv2d,
    "conv_transpose2d": _conv_transpose2d,
    "max_pool2d": _max_pool2d,
    "avg_pool2d": _avg_pool2d,
    "interpolate": _interpolate,
    "pad": _pad,
    **{name: partial(_channel_dropout, name) for name in ("dropout1d", "dropout2d", "feature_dropout")},
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "batch_norm": _batch_norm,
}


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
            raise ConfigError("the network calls spatial with another group than its own. Write the same for both.")
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
    """Refuse, on all ranks alike, an image that leaves a rank without rows: layers and norms would fail there in words of torch."""
    images = (each for each in values if isinstance(each, torch.Tensor) and each.ndim == 4)
    if (image := next(images, None)) is not None:
        check_counts(row_counts(image, group))


# The ranks among which the rows are cut that a network is applied to now.
_CUT: ContextVar[TorchGroup | None] = ContextVar("cut", default=None)


class _CutRows(TorchFunctionMode):  # type: ignore[misc]
    """Calls of torch on tensors whose rows are cut among ranks."""

    def __init__(self, group: TorchGroup) -> None:
        super().__init__()
        self.group = group
        self.own = _own_functions(torch.autograd.Function)
        self.depth = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
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
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
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
    """Refuse tensors whose second axis need not be the channels."""
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
        is_whole = (start, step) == (0, 1) and (group.rank == group.world_size - 1 or stop == image.shape[axis])
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
