"""Probes of a denoiser: its receptive field, its stride, and whether it keeps state.

The probed window is long on one axis and narrow on the others. One of its pixels is set to
NaN, which passes through every sum whatever the weights are (those of 0 included); or it is changed by a lot,
for code that drops NaN; or, if the model can be differentiated, the gradient of an output pixel is computed. The
largest distance that any of the three reaches is the receptive field.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from halotile.errors import ConfigError
from halotile.tasks.denoisers.base import NARROW, ROUNDING, Denoiser, Model
from halotile.tasks.denoisers.function import ArrayDenoiser
from halotile.tasks.devices.device import is_out_of_memory
from halotile.tasks.lazy import torch
from halotile.tasks.trials.trial import Trial, check_stateless, model_on_trial, sides_as_channels

# Total strides to try.
ALIGNMENTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 24, 27, 28, 32, 36, 40, 48, 54, 56, 64)
COMPARED = 48  # least number of pixels compared between an image and its shifted copy
# Difference of a shifted result in single precision, relative to the largest pixel, that rounding cannot explain.
CLEAR = 1e-3


def alignment_along(trial: Trial, axis: int, reach: int, likely: int) -> int:
    """The likely shift, if the result shifts with the window by it, else the least shift for which it does."""
    rough = Shifting(trial, axis, reach)
    exact: Shifting | None = None
    for shift in dict.fromkeys((likely, *ALIGNMENTS)):
        change = rough.change(shift)
        if change and change <= CLEAR:
            # Double precision takes ten times as long: it decides only where bits of single precision differ.
            exact = exact or Shifting.in_double(trial, axis, reach)
            change = 0.0 if exact.follows(shift) else math.inf
        if not change:
            return shift
    raise ConfigError(
        f"the result of {trial.name} does not shift with the image by any usual stride of up to {ALIGNMENTS[-1]} "
        "pixels: it depends on the position of the tile. A position encoding does that, and upsampling "
        "with align_corners=True. Write a network without them; or, if its total stride is another number, receptive_field and alignment."
    )


@dataclass
class Shifting:
    """Comparison of a model's result for a window with that for the window shifted along an axis."""

    trial: Trial
    axis: int
    reach: int
    tolerance: float = ROUNDING  # difference, relative to the largest pixel; contributions below it are hidden
    is_double: bool = False
    # Results of windows that are not shifted, by their length.
    before: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def in_double(cls, trial: Trial, axis: int, reach: int) -> Shifting:
        """With a copy of the model in double precision; in single precision if the model cannot be converted."""
        single = cls(trial, axis, reach)
        if not isinstance(trial.model, torch.nn.Module):
            return single
        try:
            double = replace(trial, model=copy.deepcopy(trial.model).double())
            with torch.inference_mode():
                double.run(double.noise(double.shape(0, NARROW[trial.dims])).double())
        except Exception as error:  # it creates tensors in single precision, or cannot be copied
            if is_out_of_memory(error):
                raise
            return single
        return cls(double, axis, reach, 1e-9, is_double=True)

    def follows(self, shift: int) -> bool:
        """Return whether shifting the window shifts the result."""
        return self.change(shift) <= self.tolerance

    def change(self, shift: int) -> float:
        """The largest change, relative to the largest pixel, away from the ends of the window."""
        # With a stride of the shift, other pixels may look as much farther.
        margin = self.reach + shift
        length = -(-(2 * margin + shift + COMPARED) // 64) * 64
        scale, kept = self.trial.scale, length - 2 * margin
        if length not in self.before:
            self.before[length] = self._result(length, 0)
        before = self.before[length].narrow(2 + self.axis, (margin + shift) * scale, (kept - shift) * scale)
        after = self._result(length, shift).narrow(2 + self.axis, margin * scale, (kept - shift) * scale)
        return float((before - after).abs().max()) / (float(before.abs().max()) or 1.0)

    def _result(self, length: int, start: int) -> torch.Tensor:

        image = self.trial.noise(self.trial.shape(self.axis, length + ALIGNMENTS[-1]))
        window = image.narrow(2 + self.axis, start, length)
        with torch.inference_mode():
            return self.trial.run(window.double() if self.is_double else window)


# Window lengths, tried until the ends are out of reach.
LENGTHS = {1: (128, 256, 512, 1024, 2048), 2: (64, 128, 256, 512, 1024), 3: (32, 64, 128, 256)}
# Least length of a window with a ragged end: a network may pad by reflection, up to the length of the window.
RAGGED = 64
# Changes of a pixel: by much, and beyond the range of counts, for code that asks for the brightest pixel.
CHANGES = (37.0, 1e6)
# Change of a pixel of a dark window, for code that asks for the least pixel, or whether there is anything at all.
DARK_CHANGE = -37.0
BATCH_PIXELS = 8 * 128 * 64  # pixels of windows computed at once, beyond one window: a gradient keeps all activations

# Returned instead of a stride: the model looks at the whole image, or its result depends on the position of the tile.
FAR, PLACED = 0, -1

# Takes a trial, an axis, windows and a place in each; returns the pixels along the axis that each place affects.
Probe = Callable[[Trial, int, "torch.Tensor", list[int]], "torch.Tensor"]


def probe(denoiser: Denoiser, dims: int) -> tuple[int, int]:
    """Probe the receptive field and alignment of a denoiser, in pixels.

    ``denoiser``: is built, which may run a user's code; ``dims``: number of spatial axes.

    Returns
    -------
    (int, int)
        The receptive field, and the alignment: tile origins must be multiples of it.

    Examples
    --------
    >>> from halotile.tasks.denoisers.median import Median
    >>> probe(Median(size=7), 2)
    (3, 1)
    """
    trial = Trial.for_denoiser(denoiser, dims)
    found: list[tuple[int, int]] = []
    for axis in range(dims):
        found.append(_probe_axis(trial, axis, found[-1] if found else None))
    return max(reach for reach, _ in found), math.lcm(*(alignment for _, alignment in found))


def check_purity(
    denoiser: Denoiser, dims: int, model: Model | None = None, sides: Collection[str] = (), dtype: str = "float32"
) -> None:
    """Refuse a denoiser with memory: its results for a tile before and after another tile must agree in every bit.

    ``denoiser``: declares the shape of the result; ``dims``: number of tiled axes; ``model``: its model, if it is built already; ``sides``: names of
    the side inputs that it is given; ``dtype``: that of its tiles.
    """
    on_trial = sides_as_channels(denoiser, sides)
    if model is not None and on_trial is not denoiser:
        model = model_on_trial(on_trial, model)
    trial = Trial.for_denoiser(on_trial, dims, model, dtype)
    tile, other = trial.noise(trial.smallest(on_trial), 2).split(1)
    original = tile.clone()
    with torch.inference_mode():
        first = trial.run(tile).clone()
        trial.run(other)
        again = trial.run(tile)
        in_batch = trial.run(torch.cat([tile, other]))[:1]
    if not torch.equal(tile, original):
        raise ConfigError(
            f"{trial.name} changes its input. Write a function that leaves its input alone: clone() it at the start."
        )
    if not _same(first, again):
        change = float(_apart(first, again).max())
        raise ConfigError(
            f"{trial.name} returned two results for one tile, {change:.3g} apart, with another tile in between: "
            "it keeps state or draws random numbers, so the result would depend on the order of tiles. "
            "Write a function whose result depends on its input alone."
        )
    largest = float(first.abs().masked_fill(~first.isfinite(), 0).max()) or 1.0
    if not float(_apart(first, in_batch).max()) <= ROUNDING * largest:
        raise ConfigError(
            f"{trial.name} gives a tile another result where it is computed in one batch with another tile, and a batch holds any "
            "tiles. Write a network that computes each entry of a batch by itself (attention takes batch_first=True, and batch normalisation its running statistics)."
        )


def check_user_code(denoiser: Denoiser, dims: int) -> None:
    """Refuse a user's code that is not pure, or differs each time it is built."""
    if isinstance(denoiser, ArrayDenoiser):
        check_stateless(denoiser, dims)
        return

    trial, again = Trial.for_denoiser(denoiser, dims), Trial.for_denoiser(denoiser, dims)
    check_purity(denoiser, dims, trial.model)
    window = trial.noise(trial.smallest(denoiser))
    with torch.inference_mode():
        first, second = trial.run(window.clone()), again.run(window.clone())
    if not _same(first, second):
        raise ConfigError(
            f"{trial.name} gives another result each time it is built, so workers would disagree. "
            "Draw no random numbers in it, or seed them."
        )


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two results agree in every bit, counting NaN as equal to NaN."""
    return not _apart(first, second).any()


def _apart(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The differences of two results: 0 where both have the same infinity, or NaN."""
    return (first - second).abs().masked_fill((first == second) | (first.isnan() & second.isnan()), 0)


def check_ragged(denoiser: Denoiser, image: tuple[int, ...]) -> None:
    """Refuse a strided network that cannot process the ragged far edge of the image.

    ``denoiser``: its alignment must be known; ``image``: lengths of the tiled axes, in pixels.
    """
    stride = denoiser.alignment
    rest = [n % stride for n in image]
    if not any(rest):
        return
    trial = Trial.for_denoiser(denoiser, len(image))
    try:
        trial.run(trial.noise(tuple(max(4, -(-RAGGED // stride)) * stride + r for r in rest)))
    except ConfigError as error:
        raise ConfigError(
            f"{denoiser.title} has a total stride of {stride}, and the image's sides {list(image)} are not multiples of "
            f"it: {error} Let forward pad to a multiple of {stride} and crop its result, or pad the image."
        ) from error


def _probe_axis(trial: Trial, axis: int, likely: tuple[int, int] | None) -> tuple[int, int]:
    """Probe receptive field and alignment along one axis; ``likely`` are those along another one."""
    reach, shift = likely or (0, 1)
    lengths = [n for n in LENGTHS[trial.dims] if n > 2 * reach + 2] or LENGTHS[trial.dims][-1:]
    _check_finite(trial, trial.noise(trial.shape(axis, LENGTHS[trial.dims][0])))
    exceeded = 0
    for length in lengths:
        start = length // 2
        pair = [start, start + 1]
        try:
            by_nan = otherwise = _reach(trial, axis, length, pair, [_affected_by_nan])
            if by_nan is not None:
                otherwise = _reach(trial, axis, length, pair, [_affected_by_change, _with_gradient])
        except Exception as error:
            # It depends on all of a shorter window, and needs more than twice the memory for one twice as long.
            if exceeded and is_out_of_memory(error):
                raise trial.reach_error(exceeded) from None
            raise
        if by_nan is None or otherwise is None:
            exceeded = length
            continue
        reach = max(by_nan, otherwise)
        alignment = alignment_along(trial, axis, reach, shift)
        if start + alignment > length:  # a longer window decides
            exceeded = length
            continue
        # If NaN passes from two places, it passes from the others.
        probes = PROBES if otherwise > by_nan else [_affected_by_nan]
        rest = _reach(trial, axis, length, list(range(start + 2, start + alignment)), probes)
        if rest is not None:
            return max(reach, rest), alignment
    raise trial.reach_error(lengths[-1])


def stride_along(trial: Trial, axis: int) -> int:
    """Alignment of tile origins along an axis; :data:`FAR` or :data:`PLACED` if tiles are impossible.

    For a model that may draw random numbers or keep state; for such a model only :data:`FAR` is detected.
    """
    reach = _reach_at_most(trial, axis)
    if reach is None:
        return FAR
    window = trial.noise(trial.shape(axis, LENGTHS[trial.dims][0]))
    first = trial.run(window)
    if not _same(first, trial.run(window)):
        return 1

    shifting = Shifting(trial, axis, reach)
    if first.dtype in (torch.float16, torch.bfloat16):
        shifting.tolerance = 16 * torch.finfo(first.dtype).eps
    return next((shift for shift in ALIGNMENTS if shifting.follows(shift)), PLACED)


def _reach_at_most(trial: Trial, axis: int) -> int | None:
    """An upper bound of the receptive field; None if a pixel affects the ends of every window."""
    lengths = LENGTHS[trial.dims]
    for length in lengths:
        try:
            # Not by a change: with random numbers or state, everything changes.
            if _reach(trial, axis, length, [length // 2], (_affected_by_nan, _with_gradient)) is not None:
                return length // 2
        except Exception as error:
            if length > lengths[0] and is_out_of_memory(error):
                return None
            raise
    return None


def _reach(trial: Trial, axis: int, length: int, positions: list[int], probes: Iterable[Probe]) -> int | None:
    """Largest distance to a pixel that these positions affect; None if that may be beyond the window."""
    reach = 0
    window = trial.noise(trial.shape(axis, length))
    at_once = max(1, BATCH_PIXELS // window[0, 0].numel())
    for first in range(0, len(positions), at_once):
        group = positions[first : first + at_once]
        windows = window.repeat(len(group), *[1] * (trial.dims + 1))
        for find in probes:
            affected = find(trial, axis, windows, group)
            for place, line in zip(group, affected, strict=True):
                cells = line.nonzero().flatten().tolist()
                if cells and (cells[0] == 0 or cells[-1] == length - 1):
                    return None
                reach = max([reach, *(abs(cell - place) for cell in cells)])
    return reach


def _check_finite(trial: Trial, windows: torch.Tensor) -> None:
    """Refuse a model that returns NaN or infinity for ordinary windows, from which marks could not be distinguished."""
    with torch.inference_mode():
        result = trial.run(windows)
    if not result.isfinite().all():
        raise ConfigError(
            f"{trial.name} returns NaN or infinity for pixels between 0 and 1. Check its weights and options."
        )


def _affected_by_nan(trial: Trial, axis: int, windows: torch.Tensor, places: list[int]) -> torch.Tensor:
    """The pixels along the axis where each window's result is NaN when one of its pixels is."""
    with torch.inference_mode():
        return _along(trial, axis, trial.run(_marked(windows, axis, places, math.nan)).isnan())


def _affected_by_change(trial: Trial, axis: int, windows: torch.Tensor, places: list[int]) -> torch.Tensor:
    """The pixels along the axis where each window's result changes when one of its pixels does; a dark window's as well."""
    dark = torch.zeros_like(windows)
    with torch.inference_mode():
        plain, plain_dark = trial.run(windows), trial.run(dark)
        touched = trial.run(_marked(dark, axis, places, DARK_CHANGE)) != plain_dark
        for change in CHANGES:
            touched |= trial.run(_marked(windows, axis, places, change)) != plain
        return _along(trial, axis, touched)


def _with_gradient(trial: Trial, axis: int, windows: torch.Tensor, places: list[int]) -> torch.Tensor:
    """The pixels along the axis where the gradient of one output pixel of each window is not zero."""
    nowhere = torch.zeros(len(places), windows.shape[2 + axis])
    with torch.inference_mode(False), torch.enable_grad():
        windows = windows.clone().requires_grad_()
        try:
            result = trial.model(windows)
            picked = [result[i].narrow(1 + axis, place * trial.scale, trial.scale) for i, place in enumerate(places)]
            (gradient,) = torch.autograd.grad(sum((p * p).sum() for p in picked), windows, allow_unused=True)
        except Exception as error:  # a layer of the user's own may raise anything
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
    """Reduce affected pixels to the axis: one flag for each window and each input pixel."""
    lines = touched.movedim(2 + axis, -1).flatten(1, -2).any(1)
    return lines.unflatten(1, (-1, scale or trial.scale)).any(2)


PROBES: tuple[Probe, ...] = (_affected_by_nan, _affected_by_change, _with_gradient)
