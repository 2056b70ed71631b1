"""Forward and adjoint of a kernel on any region, with the image continued by the rim rule."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable, Rim, read_window, source_positions
from halotile.tasks.convolution.correlate import correlate
from halotile.tasks.convolution.overlap_save import EngineName, correlate_cells, snapped
from halotile.tasks.lazy import torch
from halotile.tasks.operators.base import Computed, Shape

# Rim rules under which the adjoint folds values outside the image back into it.
FOLDING = ("reflect", "mirror", "nearest")


@dataclass(frozen=True, slots=True)
class Frame:
    """Positions along one axis: measurement pixel i depends on the image pixels ``step i - before`` to ``step i - before + taps - 1``.

    >>> frame = Frame(length=10, count=10, taps=3, step=1, before=1, rule="mirror")
    >>> frame.seen(0, 4)
    (-1, 5)
    >>> frame.touching(2, 3)
    (1, 4)
    """

    length: int
    """Pixels of the image."""
    count: int
    """Pixels of the measurement."""
    taps: int
    step: int
    before: int
    rule: str
    """Rim rule for pixels outside the image."""

    def seen(self, start: int, stop: int) -> tuple[int, int]:
        """The image pixels that these measurement pixels depend on; some may be outside."""
        return self.step * start - self.before, self.step * (stop - 1) - self.before + self.taps

    def touching(self, start: int, stop: int) -> tuple[int, int]:
        """The measurement pixels that depend on any of these image pixels; some may be outside."""
        first = -(-(start + self.before - self.taps + 1) // self.step)
        return first, (stop - 1 + self.before) // self.step + 1

    def unfolded(self, start: int, stop: int) -> tuple[int, int]:
        """The span that the adjoint needs for these image pixels before the rim is folded back.

        A span that ends within the fold is extended to the edge.
        """
        low, high = self.seen(0, self.count)
        before, after = max(0, -low), max(0, high - self.length)
        if self.rule not in FOLDING:
            return start, stop
        return (
            -before if before and start <= before else start,
            self.length + after if after and stop >= self.length - after - 1 else stop,
        )

    def targets(self, start: int, stop: int) -> NDArray[np.intp]:
        """The image pixel to which each position of an unfolded span is added, for a rule that folds."""
        return source_positions(start, stop, self.length, self.rule)


Frames = tuple[Frame, Frame]


@dataclass(frozen=True)
class Seen(Computed):
    """``y[i] = sum_m kernel[m] x[step i - before + m]``, x outside the image by the rim rule."""

    kernels: NDArray[Any]
    """Shape (1, rows, columns), or one kernel for each plane along the axis before y."""
    frames: Frames
    engine: EngineName = "direct"
    """``fft`` only with a step of 1."""
    fixed_cells: bool = True
    """True if the cells of ``fft`` have fixed places. If not, the region that is read is cut into cells: less is computed, and
    the bits depend on the region."""

    @property
    def shape(self) -> Shape:
        return (*self.image.shape[:-2], *(frame.count for frame in self.frames))

    def read(self, region: Region) -> Pixels:
        if self.engine != "fft":
            return _correlated(self._window(region), self.kernels, region, self.dtype, self.frames[0].step)
        if not self.fixed_cells:
            return _transformed(self._window(region), self.kernels, region, self.dtype, fixed_cells=False)
        cells = _in_cells(region, [(0, f.count) for f in self.frames])
        return _part(_transformed(self._window(cells), self.kernels, cells, self.dtype), region, cells)

    def _window(self, region: Region) -> Pixels:
        """Read the pixels of the image that ``region`` depends on."""
        window = _over(region, [f.seen(a, b) for f, a, b in _spans(self.frames, region)])
        return read_window(self.image, window, _rim(self.image, [f.rule for f in self.frames]))


@dataclass(frozen=True)
class Spread(Computed):
    """``x[p] = sum_i y[i] kernel[p - step i + before]``, values outside the image folded back by the rim rule; ``image`` is y."""

    kernels: NDArray[Any]
    frames: Frames
    engine: EngineName = "direct"

    @property
    def shape(self) -> Shape:
        return (*self.image.shape[:-2], *(frame.length for frame in self.frames))

    def read(self, region: Region) -> Pixels:
        wide = _over(region, [f.unfolded(a, b) for f, a, b in _spans(self.frames, region)])
        pixels = self._unfolded(wide)
        for axis, (frame, start, stop) in enumerate(_spans(self.frames, region), start=-2):
            pixels = _folded(pixels, axis, frame, wide, start, stop)
        return pixels

    def _unfolded(self, wide: Region) -> NDArray[Any]:
        """The adjoint before values outside the image are folded back."""
        kernels = self.kernels[:, ::-1, ::-1]
        if self.engine != "fft":
            return _correlated(self._around(wide), kernels, wide, self.dtype, 1)
        cells = _in_cells(wide, [f.unfolded(0, f.length) for f in self.frames])
        return _part(_transformed(self._around(cells), kernels, cells, self.dtype), wide, cells)

    def _around(self, wide: Region) -> Pixels:
        """The measurement on the image's grid, with zeros between its pixels, as far as the kernel reaches from ``wide``."""
        spans = [f.touching(a, b) for f, a, b in _spans(self.frames, wide)]
        rules = ["periodic" if f.rule == "periodic" else "constant" for f in self.frames]
        pixels = read_window(self.image, _over(wide, spans), _rim(self.image, rules))
        room = [(a - f.taps + 1 + f.before, b + f.before) for f, a, b in _spans(self.frames, wide)]
        if all(f.step == 1 for f in self.frames):
            return pixels
        spaced = np.zeros((*pixels.shape[:-2], *(b - a for a, b in room)), pixels.dtype)
        places = tuple(
            slice(f.step * first - a, None, f.step)
            for f, (first, _), (a, _) in zip(self.frames, spans, room, strict=True)
        )
        index: tuple[Any, ...] = (..., *places)
        spaced[index] = pixels
        return spaced


def _spans(frames: Frames, region: Region) -> list[tuple[Frame, int, int]]:
    """Each frame with the start and stop of its axis."""
    return list(zip(frames, region.start[-2:], region.stop[-2:], strict=True))


def _over(region: Region, spans: list[tuple[int, int]]) -> Region:
    """The region with other spans on its last two axes."""
    return Region((*region.start[:-2], *(a for a, _ in spans)), (*region.stop[:-2], *(b for _, b in spans)))


def _in_cells(region: Region, ends: list[tuple[int, int]]) -> Region:
    """The region extended to the cells that it touches, within the ends of its last two axes."""
    spans = zip(region.start[-2:], region.stop[-2:], ends, strict=True)
    return _over(region, [snapped(a, b, low, high) for a, b, (low, high) in spans])


def _part(pixels: NDArray[Any], region: Region, of: Region) -> NDArray[Any]:
    """The pixels of ``region`` out of those of a larger region."""
    index: tuple[Any, ...] = (..., *region.relative_to(of).slices[-2:])
    part: NDArray[Any] = pixels[index]
    return part


def _rim(source: Readable, rules: list[str]) -> Rim:
    return Rim(("cut",) * (len(source.shape) - 2) + tuple(rules))


def _correlated(pixels: Pixels, kernels: NDArray[Any], region: Region, dtype: np.dtype[Any], step: int) -> NDArray[Any]:
    """Correlate each plane with its kernel, in the working dtype."""
    planes = torch.from_numpy(np.ascontiguousarray(pixels, dtype)).reshape(-1, 1, *pixels.shape[-2:])
    weights = torch.from_numpy(np.array(kernels, dtype))
    with torch.inference_mode():
        if len(weights) == 1:
            result = correlate(planes, weights, step)
        else:
            chosen = weights[_of_planes(len(planes), region)]
            result = torch.cat(
                [correlate(plane[None], kernel[None], step) for plane, kernel in zip(planes, chosen, strict=True)]
            )
    correlated: NDArray[Any] = result.reshape(*pixels.shape[:-2], *result.shape[-2:]).numpy()
    return correlated


def _transformed(
    pixels: Pixels, kernels: NDArray[Any], region: Region, dtype: np.dtype[Any], *, fixed_cells: bool = True
) -> NDArray[Any]:
    """Correlate by Fourier transforms, for a region of whole cells if their places are fixed."""
    planes = np.asarray(pixels, dtype).reshape(-1, *pixels.shape[-2:])
    weights = np.ascontiguousarray(kernels, dtype)
    of_planes = [0] * len(planes) if len(weights) == 1 else _of_planes(len(planes), region)
    y, x = region.start[-2:]
    origin = (y, x) if fixed_cells else None
    result = correlate_cells(planes, weights[of_planes], origin, torch.get_num_threads())
    return result.reshape(*pixels.shape[:-2], *result.shape[-2:])


def _of_planes(count: int, region: Region) -> list[int]:
    """The number of the kernel for each plane of a region."""
    first, kinds = region.start[-3], region.stop[-3] - region.start[-3]
    return [first + number % kinds for number in range(count)]


def _folded(pixels: NDArray[Any], axis: int, frame: Frame, wide: Region, start: int, stop: int) -> NDArray[Any]:
    """Add values outside the image along an axis to the pixels that the rim rule read, and cut to ``start..stop``."""
    first, last = wide.start[axis], wide.stop[axis]
    inside = np.moveaxis(pixels, axis, 0)[start - first : stop - first]
    if frame.rule not in FOLDING or (first >= 0 and last <= frame.length):
        return np.moveaxis(inside, 0, axis)
    folded = inside.copy()
    outside = [*range(min(0, last) - 1, first - 1, -1), *range(max(first, frame.length), last)]
    targets = frame.targets(first, last)
    for position in outside:
        target = int(targets[position - first])
        if start <= target < stop:
            folded[target - start] += np.moveaxis(pixels, axis, 0)[position - first]
    return np.moveaxis(folded, 0, axis)
