"""What a denoiser shows of itself when it is tried: how far it looks, its stride, whether it keeps state.

A window is probed that is long on one axis and narrow on the others. One of its pixels is made
NaN, which passes through every sum it enters whatever the weights are; or it is changed by a lot, for
code that swallows NaN; or, where the model can be differentiated, an output pixel is traced back. The
farthest pixel that any of the three reaches is the receptive field. It is never overestimated.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from halotile.errors import ConfigError
from halotile.tasks.denoisers.base import Denoiser, Model
from halotile.tasks.denoisers.function import ArrayDenoiser
from halotile.tasks.devices.device import is_out_of_memory
from halotile.tasks.trials.trial import NARROW, Trial

if TYPE_CHECKING:
    import torch

LENGTHS = {1: (128, 256, 512, 1024, 2048), 2: (64, 128, 256, 512, 1024), 3: (32, 64, 128, 256)}
"""Lengths that are tried until the window's ends are out of reach."""
ALIGNMENTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
"""Total strides that are tried."""
COMPARED = 48
"""Pixels compared between an image and its shifted copy, at least."""
RAGGED = 64
"""Length, at least, of a window whose ragged end is tried: a network may pad by reflection, up to its own length."""
BATCH_PIXELS = 8 * 128 * 64
"""Pixels of windows that are computed at once, if it is more than one: a gradient keeps all activations."""
CLEAR = 1e-3
"""What a shifted result differs by in single precision, of the largest pixel, where no rounding could explain it."""

FAR, PLACED = 0, -1
"""Instead of a stride: the model looks at the whole image, or its result depends on where the tile lies."""

Exact = tuple[Trial, float, "torch.dtype"]
"""A model, how well its results agree, and its type of pixel."""
Look = Callable[[Trial, int, "torch.Tensor", list[int]], "torch.Tensor"]
"""Of a trial, an axis, windows and a place in each: which pixels along the axis each place touches."""


def probe(denoiser: Denoiser, dims: int) -> tuple[int, int]:
    """Receptive field and alignment of a denoiser, in pixels, found by trying it.

    Parameters
    ----------
    denoiser : Denoiser
        It is built, which may run a user's code.
    dims : int
        Number of spatial axes.

    Returns
    -------
    (int, int)
        How far an output pixel looks, and the multiple on which tile origins must fall.

    Raises
    ------
    ConfigError
        When it looks at the whole image, depends on where a tile lies, fails on a small window,
        or makes another shape than it declares.

    Examples
    --------
    >>> from halotile.tasks.denoisers.median import Median
    >>> probe(Median(size=7), 2)
    (3, 1)
    """
    trial = Trial.of(denoiser, dims)
    exact = _in_double(trial)
    found: list[tuple[int, int]] = []
    for axis in range(dims):
        found.append(_probe_axis(trial, exact, axis, found[-1][1] if found else 1))
    return max(reach for reach, _ in found), math.lcm(*(alignment for _, alignment in found))


def check_purity(denoiser: Denoiser, dims: int, model: Model | None = None) -> None:
    """Refuse a denoiser that remembers: a tile, another tile, and the first again must agree in every bit.

    Parameters
    ----------
    denoiser : Denoiser
        What declares the shape of the result.
    dims : int
        Number of tiled axes.
    model : callable, optional
        What it built, where that was done already.

    Raises
    ------
    ConfigError
        When the first tile comes out differently the second time, or when the denoiser changes the
        pixels it was given.
    """
    _check_pure(Trial.of(denoiser, dims, model))


def check_own_code(denoiser: Denoiser, dims: int) -> None:
    """Refuse a user's code that is not pure, or is not the same each time it is built.

    Raises
    ------
    ConfigError
        As :func:`check_purity`; and when two that were built from the same options differ in a bit.
    """
    if isinstance(denoiser, ArrayDenoiser):
        denoiser.try_out(dims)
        return
    import torch

    trial, again = Trial.of(denoiser, dims), Trial.of(denoiser, dims)
    _check_pure(trial)
    window = trial.noise(trial.shape(0, NARROW[dims]))
    with torch.inference_mode():
        first, second = trial.run(window.clone()), again.run(window.clone())
    if not _same(first, second):
        raise ConfigError(
            f"{trial.name} gives another result each time it is built: each worker would have its own. "
            "Draw no random numbers in it, or seed them."
        )


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two results agree in every bit; NaN agrees with NaN."""
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _check_pure(trial: Trial) -> None:
    """A tile, another tile, and the first again."""
    import torch

    tile, other = trial.noise(trial.shape(0, NARROW[trial.dims]), 2).split(1)
    given = tile.clone()
    with torch.inference_mode():
        first = trial.run(tile).clone()
        trial.run(other)
        again = trial.run(tile)
    if not torch.equal(tile, given):
        raise ConfigError(
            f"{trial.name} changes the pixels it is given. Write one that leaves its input alone: a clone() at "
            "its start will do."
        )
    if not _same(first, again):
        change = float((first - again).abs().max())
        raise ConfigError(
            f"{trial.name} gave one tile two results, {change:.3g} apart, after it had seen another tile between: "
            "it keeps state or draws random numbers, so the result would depend on the order of tiles. "
            "Write one whose result depends on its input alone."
        )


def check_ragged(denoiser: Denoiser, image: tuple[int, ...]) -> None:
    """Refuse a strided network that cannot take the image's ragged far edge.

    Parameters
    ----------
    denoiser : Denoiser
        With its alignment known.
    image : tuple of int
        Lengths of the tiled axes, in pixels.

    Raises
    ------
    ConfigError
        When the network loses pixels, or fails, on a side that is no multiple of its total stride.
    """
    stride = denoiser.alignment
    rest = [n % stride for n in image]
    if not any(rest):
        return
    trial = Trial.of(denoiser, len(image))
    try:
        trial.run(trial.noise(tuple(max(4, -(-RAGGED // stride)) * stride + r for r in rest)))
    except ConfigError as error:
        raise ConfigError(
            f"{denoiser.title} has a total stride of {stride}, and the image's sides {list(image)} are no multiples of "
            f"it: {error} Let forward pad to a multiple of {stride} and crop its result, or pad the image."
        ) from error


def _probe_axis(trial: Trial, exact: Exact, axis: int, likely: int) -> tuple[int, int]:
    """Receptive field and alignment along one axis; ``likely`` is the alignment along another one."""
    lengths = LENGTHS[trial.dims]
    _check_finite(trial, trial.noise(trial.shape(axis, lengths[0])))
    passed = 0
    for length in lengths:
        start = length // 2
        pair = [start, start + 1]
        try:
            by_nan = _reach(trial, axis, length, pair, [_touched_by_nan])
            otherwise = (
                None
                if by_nan is None
                else _reach(trial, axis, length, pair, [_touched_by_change, _traced_back])
            )
        except Exception as error:
            # It saw the whole of a window, and of one twice as long it needs more than twice the memory.
            if passed and is_out_of_memory(error):
                raise trial.too_far(passed) from None
            raise
        if by_nan is None or otherwise is None:
            passed = length
            continue
        reach = max(by_nan, otherwise)
        alignment = _alignment(trial, exact, axis, reach, likely)
        # What lets NaN through from two places does so from the others.
        looks = LOOKS if otherwise > by_nan else [_touched_by_nan]
        rest = _reach(trial, axis, length, list(range(start + 2, start + alignment)), looks)
        if rest is not None:
            return max(reach, rest), alignment
    raise trial.too_far(lengths[-1])


def stride_along(trial: Trial, axis: int) -> int:
    """Multiple on which tile origins must fall along an axis; :data:`FAR` or :data:`PLACED` where tiles cannot do.

    For a model that may draw random numbers or update_plan, of which no more is asked than whether it looks at everything.
    """
    reach = _reach_at_most(trial, axis)
    if reach is None:
        return FAR
    window = trial.noise(trial.shape(axis, LENGTHS[trial.dims][0]))
    first = trial.run(window)
    if not _same(first, trial.run(window)):
        return 1
    import torch

    is_coarse = first.dtype in (torch.float16, torch.bfloat16)
    by: Exact = trial, 16 * torch.finfo(first.dtype).eps if is_coarse else 1e-5, torch.float32
    return next((shift for shift in ALIGNMENTS if _follows(by, axis, shift, reach)), PLACED)


def _reach_at_most(trial: Trial, axis: int) -> int | None:
    """No less than the receptive field; None where a pixel reaches the ends of every window."""
    lengths = LENGTHS[trial.dims]
    for length in lengths:
        try:
            if not _reaches_ends(trial, axis, length):
                return length // 2
        except Exception as error:
            if length > lengths[0] and is_out_of_memory(error):
                return None
            raise
    return None


def _reaches_ends(trial: Trial, axis: int, length: int) -> bool:
    window = trial.noise(trial.shape(axis, length))
    # Not by a change: where something is drawn or remembered, everything changes.
    touched = (look(trial, axis, window, [length // 2])[0] for look in (_touched_by_nan, _traced_back))
    return any(bool(line[0] or line[-1]) for line in touched)


def _reach(trial: Trial, axis: int, length: int, positions: list[int], looks: Iterable[Look]) -> int | None:
    """Farthest pixel that these positions touch; None where that may lie beyond the window."""
    reach = 0
    window = trial.noise(trial.shape(axis, length))
    at_once = max(1, BATCH_PIXELS // window[0, 0].numel())
    for first in range(0, len(positions), at_once):
        group = positions[first : first + at_once]
        windows = window.repeat(len(group), *[1] * (trial.dims + 1))
        for look in looks:
            touched = look(trial, axis, windows, group)
            for place, line in zip(group, touched, strict=True):
                cells = line.nonzero().flatten().tolist()
                if cells and (cells[0] == 0 or cells[-1] == length - 1):
                    return None
                reach = max([reach, *(abs(cell - place) for cell in cells)])
    return reach


def _check_finite(trial: Trial, windows: torch.Tensor) -> None:
    """Refuse a model that makes of windows in which nothing is marked what marks are told by."""
    import torch

    with torch.inference_mode():
        result = trial.run(windows)
    if not result.isfinite().all():
        raise ConfigError(
            f"{trial.name} makes NaN or infinity of pixels between 0 and 1. Check its weights and options."
        )


def _touched_by_nan(trial: Trial, axis: int, windows: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Where along the axis each window's result is NaN when one of its pixels is."""
    import torch

    with torch.inference_mode():
        return _along(trial, axis, trial.run(_marked(windows, axis, places, math.nan)).isnan())


def _touched_by_change(trial: Trial, axis: int, windows: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Where along the axis each window's result changes when one of its pixels does."""
    import torch

    with torch.inference_mode():
        plain = trial.run(windows)
        return _along(trial, axis, trial.run(_marked(windows, axis, places, 37.0)) != plain)


def _traced_back(trial: Trial, axis: int, windows: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Where along the axis the gradient of each window's one output pixel is not zero."""
    import torch

    nowhere = torch.zeros(len(places), windows.shape[2 + axis])
    with torch.inference_mode(False), torch.enable_grad():
        windows = windows.clone().requires_grad_()
        try:
            result = trial.model(windows)
            picked = [
                result[i].narrow(1 + axis, place * trial.scale, trial.scale) for i, place in enumerate(places)
            ]
            (gradient,) = torch.autograd.grad(sum((p * p).sum() for p in picked), windows, allow_unused=True)
        except (RuntimeError, NotImplementedError) as error:
            if is_out_of_memory(error):
                raise
            return nowhere  # it cannot be differentiated
    return nowhere if gradient is None else _along(trial, axis, gradient != 0, scale=1)


def _marked(windows: torch.Tensor, axis: int, places: list[int], value: float) -> torch.Tensor:
    """Windows with one pixel set, in the middle of the narrow axes."""
    windows = windows.clone()
    for i, place in enumerate(places):
        at = [n // 2 for n in windows.shape[2:]]
        at[axis] = place
        windows[(i, slice(None), *at)] = value
    return windows


def _along(trial: Trial, axis: int, touched: torch.Tensor, scale: int | None = None) -> torch.Tensor:
    """For each window and each input pixel of the axis: whether anything there is touched."""
    lines = touched.movedim(2 + axis, -1).flatten(1, -2).any(1)
    return lines.unflatten(1, (-1, scale or trial.scale)).any(2)


LOOKS: tuple[Look, ...] = (_touched_by_nan, _touched_by_change, _traced_back)


def _alignment(trial: Trial, exact: Exact, axis: int, reach: int, likely: int) -> int:
    """The shift that is likely, if the result follows it, or else the least one that it follows."""
    import torch

    rough: Exact = trial, CLEAR, torch.float32
    for shift in dict.fromkeys((likely, *ALIGNMENTS)):
        # Double precision takes ten times as long: it is left what single precision cannot tell.
        if _follows(rough, axis, shift, reach) and _follows(exact, axis, shift, reach):
            return shift
    raise ConfigError(
        f"{trial.name} does not follow when the image is shifted by any of {ALIGNMENTS[0]} to {ALIGNMENTS[-1]} "
        "pixels: its result depends on where the tile lies. A position encoding does that. "
        "Write a network without one; or receptive_field and alignment by hand, if you know better."
    )


def _in_double(trial: Trial) -> Exact:
    """A copy of the model in double precision, how well its results agree, and its type of pixel.

    Single precision, where the model cannot be converted, hides paths that add less than its tolerance.
    """
    import torch

    single = trial, 1e-5, torch.float32
    if not isinstance(trial.model, torch.nn.Module):
        return single
    try:
        double = replace(trial, model=copy.deepcopy(trial.model).double())
        with torch.inference_mode():
            double.run(double.noise(double.shape(0, NARROW[trial.dims])).double())
    except Exception as error:  # it makes tensors in single precision, or cannot be copied
        if is_out_of_memory(error):
            raise
        return single
    return double, 1e-9, torch.float64


def _follows(by: Exact, axis: int, shift: int, reach: int) -> bool:
    """Whether shifting the window shifts the result, away from the window's ends."""
    import torch

    trial, tolerance, kind = by
    # With a stride of that much, other pixels may look that much further.
    margin = reach + shift
    length = -(-(2 * margin + shift + COMPARED) // 64) * 64
    image = trial.noise(trial.shape(axis, length + shift)).to(kind)
    scale, kept = trial.scale, length - 2 * margin
    with torch.inference_mode():
        before = trial.run(image.narrow(2 + axis, 0, length))
        after = trial.run(image.narrow(2 + axis, shift, length))
    before = before.narrow(2 + axis, (margin + shift) * scale, (kept - shift) * scale)
    after = after.narrow(2 + axis, margin * scale, (kept - shift) * scale)
    return float((before - after).abs().max()) <= tolerance * float(before.abs().max())
