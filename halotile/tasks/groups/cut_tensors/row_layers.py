"""Layers on rows that are cut among ranks: each takes the rows that it looks at from their owners, and statistics are those of all rows.

The functions have the arguments of torch's own, after the group of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from halotile.errors import ConfigError
from halotile.tasks.groups.cut_tensors.halo import halo_exchange
from halotile.tasks.groups.cut_tensors.transfers import all_reduce, wide_type
from halotile.tasks.groups.group import TorchGroup

ROWS = -2


def row_counts(x: torch.Tensor, group: TorchGroup) -> list[int]:
    """Numbers of rows of all ranks."""
    own = torch.zeros(group.world_size, dtype=torch.int64, device=x.device)
    own[group.rank] = x.shape[ROWS]
    return [int(n) for n in group.all_reduce(own)]


def check_counts(sizes: Sequence[int]) -> None:
    """Refuse an image of which a rank has no rows.

    Raises
    ------
    ConfigError
        When one has none.
    """
    if not all(sizes):
        raise ConfigError(
            f"a rank has no rows of an image of {sum(sizes)} rows here ({list(sizes)}). Take fewer ranks, or a larger image."
        )


def _window(
    x: torch.Tensor, group: TorchGroup, kernel: int, stride: int, dilation: int, padding: int
) -> torch.Tensor:
    """The rows from which this rank's rows of the result are computed; a row of the result belongs to the rank of its central row."""
    sizes = row_counts(x, group)
    bounds = [*itertools.accumulate(sizes, initial=0)]
    reach = (kernel - 1) * dilation
    rows_out = (bounds[-1] + 2 * padding - reach - 1) // stride + 1
    centre = reach // 2 - padding
    firsts = [min(max(0, -(-(bound - centre) // stride)), rows_out) for bound in bounds]
    firsts[0], firsts[-1] = 0, rows_out
    needs = [
        (a * stride - padding, (b - 1) * stride - padding + reach + 1) for a, b in itertools.pairwise(firsts)
    ]
    before = max(0, *(bounds[r] - needs[r][0] for r in range(len(sizes)) if sizes[r]))
    after = max(0, *(needs[r][1] - bounds[r + 1] for r in range(len(sizes)) if sizes[r]))
    check_counts(sizes)
    check_counts([b - a for a, b in itertools.pairwise(firsts)])  # for all ranks alike
    wide = halo_exchange(x, group, sizes, ROWS, before, after, "zero")
    start = needs[group.rank][0] - (bounds[group.rank] - before)
    return wide.narrow(ROWS, start, needs[group.rank][1] - needs[group.rank][0])


def _pair(value: Any) -> tuple[int, int]:
    rows, columns = (
        (value, value) if isinstance(value, int) else (value * 2)[:2] if len(value) == 1 else value
    )
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
            f"the network calls {name} in training, and its rows are cut among ranks, each of which would leave out other channels. Write dropout, "
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
        raise ConfigError(
            "the network has an instance norm with running statistics. Write track_running_stats=False."
        )
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
"""Layers by the name of torch's function."""
