"""A denoiser on trial: its model with random windows, and images whose tiles must give the whole; of NumPy functions without torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.storage.grid import Depth, Region, valid_part
from halotile.storage.rim import Pixels, Readable
from halotile.storage.views import readable_parts
from halotile.tasks.denoisers.base import NARROW, ROUNDING, Around, Denoiser, Model
from halotile.tasks.denoisers.function import ArrayDenoiser, Image, checked_result
from halotile.tasks.devices.device import is_out_of_memory
from halotile.tasks.inner_tiles import Roles, respanned, spanned
from halotile.tasks.lazy import torch
from halotile.tasks.noise.estimate import sample_regions

CANDIDATES = 16  # places that are tried
LARGEST = 1 << 22  # most pixels of a sample
EDGE = {1: 4096, 2: 128, 3: 32}  # least edge of a place, in pixels

Sample = NDArray[np.float32]  # pixels of shape (channels, *spatial), in the units that the denoiser computes in


@dataclass(frozen=True)
class TrialImage:
    """An image that is computed as a whole and in parts, which must have the same pixels; by a function of NumPy."""

    denoiser: Denoiser
    depth: Depth
    pixels: NDArray[Any]  # its last axes are tiled
    is_cut: bool  # whether the image ends where windows are cut; else pixels near its ends are not compared

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.pixels.shape[-len(self.depth) :]

    @cached_property
    def whole(self) -> NDArray[Any]:
        """The image computed as a whole."""
        return self.denoised(Region.whole(self.lengths))

    @cached_property
    def largest(self) -> float:
        """The largest pixel of the whole."""
        return float(np.abs(self.whole[np.isfinite(self.whole)]).max(initial=0)) or 1.0

    @property
    def compared(self) -> Region:
        """The part of the image whose pixels are the same in tiles."""
        known = Region.whole(self.lengths)
        if self.is_cut:
            return known
        befores, afters = zip(*self.depth, strict=True)
        return known.clip(Region(befores, tuple(np.subtract(self.lengths, afters).tolist())))

    def denoised(self, window: Region, core: Region | None = None, alignment: int = 1) -> NDArray[Any]:
        """Compute a part of the image as if it were the whole: one tile of it, or all at once."""
        assert isinstance(self.denoiser, ArrayDenoiser)
        reach = window if core is None else core.grow(self.depth).clip(window)
        result = _call(self.denoiser, self.pixels[reach.slices].copy())
        return result if core is None else result[core.relative_to(reach).slices]

    def tile_difference(self, core: Region, alignment: int) -> float:
        """The largest difference of a tile, whose origin is a multiple of the alignment."""
        return self.difference_in(core, Region.whole(self.lengths), core, alignment)

    def difference_in(self, part: Region, window: Region, *tile: Any) -> float:
        """The largest difference between a window, or a tile of it, and the whole, relative to the largest pixel of the whole."""
        whole = self.whole  # first: code with state computes its parts in another way then
        alone, extent = self.denoised(window, *tile), tile[0] if tile else window
        part = part.clip(self.compared)
        if not part.size:
            return 0.0
        images = (alone, extent), (whole, Region.whole(self.lengths))
        return compare(part, *images, self.denoiser.scale) / self.largest


def compare(part: Region, one: tuple[NDArray[Any], Region], other: tuple[NDArray[Any], Region], scale: int) -> float:
    """The largest difference of two images on a part of both, each given with its region; ``scale`` of their pixels are in one of the region.

    Both may have the same infinity, or NaN.

    >>> line = np.array([1.0, np.inf, 3.0])
    >>> compare(Region((5,), (7,)), (line, Region((4,), (7,))), (np.array([np.inf, 5.0]), Region((5,), (7,))), 1)
    2.0
    """
    found = []
    for pixels, region in (one, other):
        inside: tuple[Any, ...] = (..., *part.relative_to(region).scale((scale,) * len(part.start)).slices)
        found.append(pixels[inside].astype(float))
    mine, there = found
    differ = (mine != there) & ~(np.isnan(mine) & np.isnan(there))
    with np.errstate(invalid="ignore"):  # of infinities
        return float(np.abs(mine[differ] - there[differ]).max(initial=0))


def choose_samples(
    source: Readable, roles: Roles, values: tuple[float, float] | None, depth: Depth, align: int
) -> list[Sample]:
    """Read samples of twice the edge of a tile with its halo or, on a short axis, of all of it.

    The places are a dark, a bright and a varied one. Code that depends on a property of its whole input, such as its mean, gives other pixels in
    tiles only where tiles differ in it.

    ``source``: image; ``roles``: its axes; ``values``: values that are mapped to 0 and 1; ``depth``: halo on each tiled axis; ``align``: number of
    the alignment of tile origins in pixels.
    """
    dims = len(roles.spatial)
    edge = _multiple(max(EDGE[dims], max(map(max, depth)) + EDGE[dims] // 2), align)
    if (2 * edge) ** dims * (source.shape[roles.channel] if roles.channel is not None else 1) > LARGEST:
        return []

    def read(regions: Iterable[Region]) -> Iterator[tuple[Region, Sample]]:
        for region in regions:
            whole = {} if roles.channel is None else {roles.channel: (0, source.shape[roles.channel])}
            for _, pixels in readable_parts(source, [respanned(region, whole)]):
                yield region, _sample(pixels, roles, values)

    candidates = sample_regions(source.shape, CANDIDATES, roles.spatial, edge)
    places = [(float(pixels.mean()), float(pixels.std()), region) for region, pixels in read(candidates)]
    if not places:
        return []
    by_mean = [region for *_, region in sorted(places, key=lambda place: place[0])]
    varied = max(places, key=lambda place: place[1])[2]
    chosen = dict.fromkeys([by_mean[0], by_mean[-1], varied])
    around = [pixels for _, pixels in read(_grown(region, source.shape, roles, edge) for region in chosen)]
    if any(source.shape[axis] < edge for axis in roles.spatial) or len(places) == 1:
        return around
    between = [varied, *[by_mean[len(by_mean) // 2]] * (2**dims - 3)]
    corners = [pixels for _, pixels in read([by_mean[0], *between, by_mean[-1]])]
    return [*around, _side_by_side(corners, dims)] if dims > 1 else around


def quarters(lengths: tuple[int, ...], align: int) -> list[Region]:
    """The halves of a sample on each axis, combined: its tiles.

    >>> [region.shape for region in quarters((256, 100), 16)]
    [(128, 48), (128, 52), (128, 48), (128, 52)]
    """
    cuts = [sorted({0, n // 2 // align * align, n}) for n in lengths]
    return [spanned(pairs) for pairs in itertools.product(*map(itertools.pairwise, cuts))]


def _multiple(edge: int, align: int) -> int:
    unit = math.lcm(16, align)
    return -(-edge // unit) * unit


def _grown(region: Region, shape: tuple[int, ...], roles: Roles, edge: int) -> Region:
    """The region with as much again of the image around it, on the tiled axes."""
    spans = {}
    for axis in roles.spatial:
        length = min(2 * edge, shape[axis])
        start = min(max(0, region.start[axis] - edge // 2), shape[axis] - length)
        spans[axis] = start, start + length
    return respanned(region, spans)


def _sample(read: Pixels, roles: Roles, values: tuple[float, float] | None) -> Sample:
    """Pixels as a sample, with the mean of the finite pixels in place of the others."""
    low, high = values or (0.0, 1.0)
    arranged = roles.arrange(read).astype(np.float64)
    pixels = ((arranged.reshape(arranged.shape[len(roles.looped) :]) - low) / (high - low)).astype(np.float32)
    finite = np.isfinite(pixels)
    if not finite.all():
        pixels[~finite] = pixels[finite].mean() if finite.any() else 0.0
    return pixels


def _side_by_side(places: list[Sample], dims: int) -> Sample:
    """One sample of places at its corners, the first and the last diagonally opposite."""
    rows = places
    for axis in range(dims, 0, -1):
        rows = [np.concatenate(pair, axis=axis) for pair in zip(rows[::2], rows[1::2], strict=True)]
    return rows[0]


ODD = 5  # added to the pixels before a window to make their number odd: a stride of two does not begin with it
LONG_PIXELS = 2**18  # pixels of a long image


def check_stateless(denoiser: ArrayDenoiser, dims: int) -> None:
    """Refuse a function with memory, by calling it on an image, another one, and the first again. Needs no torch."""
    image, other = np.random.default_rng(20_26).random((2, *(NARROW[dims],) * dims), np.float32)
    first, _, again = (_call(denoiser, given.copy()) for given in (image, other, image))
    if not np.array_equal(first, again, equal_nan=True):
        raise ConfigError(
            f"{denoiser.title} returned two results for one image, with another image in between: it keeps state or draws "
            "random numbers, so the result would depend on the order of tiles. Write a function whose result depends on "
            "its input alone."
        )


def check_depth(denoiser: ArrayDenoiser, depth: Depth, image: tuple[int, ...], *, is_cut: bool = True) -> None:
    """Refuse a function that looks farther than this, or cuts its image into parts. Needs no torch.

    The function is tried on windows by themselves, and on an image with one window in the middle of pixels of another
    kind, one at its first corner and one at its last: on a small image, and for each axis on one that is long on it.

    ``depth``: halo on each axis; ``image``: lengths of the real image; ``is_cut``: whether windows end with the image, as the function's own rule has
    it. Else a boundary rule continues the image, and the function never sees its ends.
    """
    frame = NARROW[len(depth)] // 2

    def check(sides: tuple[int, ...], tile: tuple[int, ...] | None = None) -> None:
        """Check windows of an image that is longer by this frame, and a tile of its longest: in its middle, and at two corners."""
        middle = tuple(frame + ODD for _ in sides)
        last = tuple(n + frame for n in middle)
        for is_bright in (False, True):
            image = _trial_image(denoiser, sides, middle, frame, is_bright=is_bright)
            trial = TrialImage(denoiser, depth, image, is_cut)
            if tile is not None:
                _compare(trial, Region.whole(tile).shift(middle))
            for start in (middle, (0,) * len(sides), last) if is_cut else (middle,):
                _compare(trial, Region.whole(sides).shift(start))

    sides = tuple(max(2 * frame, -(-(a + b + frame // 2) // frame) * frame) for a, b in depth)
    check(sides)
    frames = 2 * frame + ODD
    for axis, length in enumerate(image):
        across = math.prod(n + frames for i, n in enumerate(sides) if i != axis)
        long = min(length, LONG_PIXELS // across) - frames
        if long > sides[axis]:
            check((*sides[:axis], long, *sides[axis + 1 :]), sides)


def _trial_image(
    denoiser: ArrayDenoiser, sides: tuple[int, ...], start: tuple[int, ...], frame: int, *, is_bright: bool
) -> Image:
    """Random pixels with a window of another kind: darker or, if asked for, brighter ones."""
    inside = tuple(slice(a, a + n) for a, n in zip(start, sides, strict=True))
    draw = np.random.default_rng(20_26)
    try:
        image = draw.uniform(0.5, 1, [place.stop + frame for place in inside]).astype(np.float32)
        # Few of its pixels stand out, as in real images: a threshold at a multiple of the noise keeps some.
        image[inside] = 0.5 * draw.random(sides) ** 4
        image = 1 - image if is_bright else image
    except MemoryError:
        raise ConfigError(
            f"{denoiser.title} has a depth of {denoiser.depth}: an image to check that on, of {list(sides)} pixels, needs more memory than a worker has. "
            "Write a smaller depth, nearer to what the function needs."
        ) from None
    return image


def _compare(trial: TrialImage, window: Region) -> None:
    """Refuse a function whose result for a window by itself is another than that for the image."""
    difference = trial.difference_in(valid_part(window, trial.depth, trial.lengths), window)
    denoiser = trial.denoiser
    assert isinstance(denoiser, ArrayDenoiser)
    if difference <= ROUNDING:
        return
    if any(window.start) and window.stop != trial.lengths:
        raise ConfigError(
            f"{denoiser.title} looks farther than its depth of {denoiser.depth}, or at the whole image: tiles differed from the whole by "
            f"{difference:.2g} in a trial. Write a larger depth, or a function that needs only the pixels near each pixel; or, if "
            "you want each tile by itself, tile.seams: allow (in Python, halotile.map_overlap)."
        )
    raise ConfigError(
        f"{denoiser.title} gives pixels at the edge of an image that depend on its other side: tiles differed from the whole by "
        f"{difference:.2g} in a trial. If it wraps round, write tile.boundary: periodic; else a function that repeats or mirrors "
        "the pixels at an edge."
    )


def _call(denoiser: ArrayDenoiser, image: Image) -> Image:
    try:
        return checked_result(denoiser.function(image), image)
    except (ConfigError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{denoiser.title} failed on an image of shape {image.shape}: {type(error).__name__}: {error}. "
            f"Write a function that takes a {image.ndim}-D image of any size."
        ) from error


def sides_as_channels(denoiser: Denoiser, names: Collection[str]) -> Denoiser:
    """The denoiser with those of the named side inputs that it takes as its last channels; itself, if it takes none."""
    taken = tuple(name for name in denoiser.side_inputs if name in names)
    return cast(Denoiser, _SidesAsChannels(denoiser, taken)) if taken else denoiser


def model_on_trial(denoiser: Denoiser, model: Model) -> Model:
    """A model that a denoiser built, as the denoiser on trial would have built it."""
    return denoiser.around(model) if isinstance(denoiser, _SidesAsChannels) else model


@dataclass(frozen=True)
class _SidesAsChannels(Around):
    """The denoiser with side inputs as channels."""

    names: tuple[str, ...]

    @property
    def channels(self) -> tuple[int, int]:
        taken, returned = self.inner.channels
        return taken + len(self.names), returned

    def probed(self, receptive_field: int, alignment: int) -> Self:
        return replace(self, inner=self.inner.probed(receptive_field, alignment))

    def with_noise_level(self, sigma: float) -> Self:
        return replace(self, inner=self.inner.with_noise_level(sigma))

    def around(self, model: Model) -> Model:
        """A model of the denoiser that takes its side inputs as channels."""
        count, names = self.inner.channels[0], self.names

        class TakingChannels(torch.nn.Module):  # type: ignore[misc]  # torch has no types
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, windows: torch.Tensor) -> torch.Tensor:
                sides = {name: windows[:, count + i, None] for i, name in enumerate(names)}
                return self.model(windows[:, :count], **sides)

        return TakingChannels()


CHANNELS = (1, 3, 2, 4, 6, 8, 12)  # numbers of channels to try with a network that fails


@contextmanager
def failing_as(message: str, kind: type[ConfigError] = ConfigError) -> Iterator[None]:
    """Raise exceptions of foreign code inside the context as errors with this message, except when memory runs out.

    >>> with failing_as("this division failed"):
    ...     1 / 0
    Traceback (most recent call last):
      ...
    halotile.errors.ConfigError: this division failed: ZeroDivisionError: division by zero.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError) or is_out_of_memory(error):
            raise
        raise kind(f"{message}: {described(error)}") from error


def described(error: BaseException) -> str:
    """Kind and message of an exception of foreign code, with one full stop.

    >>> described(ValueError("too small")), described(ValueError("Too small."))
    ('ValueError: too small.', 'ValueError: Too small.')
    """
    return f"{type(error).__name__}: {error}".removesuffix(".") + "."


@dataclass(frozen=True)
class Trial:
    """A model with the declarations of its denoiser."""

    model: Model
    name: str
    channels: tuple[int, int]
    scale: int
    dims: int
    dtype: str = "float32"  # of the windows

    @classmethod
    def for_denoiser(cls, denoiser: Denoiser, dims: int, model: Model | None = None, dtype: str = "float32") -> Self:
        """The trial of a denoiser; without a model it is built, with an arbitrary noise level in place of ``auto``."""
        if model is None:
            leveled = denoiser.with_noise_level(0.1) if denoiser.wants_noise_level else denoiser
            model = leveled.build()
        return cls(model, denoiser.title, denoiser.channels, denoiser.scale, dims, dtype)

    def noise(self, shape: tuple[int, ...], count: int = 1) -> torch.Tensor:
        """Windows of random pixels, the same every time."""
        generator = torch.Generator().manual_seed(20_26)
        windows = torch.rand((count, self.channels[0], *shape), generator=generator)
        return windows.to(getattr(torch, self.dtype))

    def shape(self, axis: int, length: int) -> tuple[int, ...]:
        """Shape of a window that is long on one axis."""
        return tuple(length if i == axis else NARROW[self.dims] for i in range(self.dims))

    def smallest(self, denoiser: Denoiser) -> tuple[int, ...]:
        """Shape of a small window that the model can process: larger than usual where the denoiser declares that it looks far."""
        edge = NARROW[self.dims]
        reach, stride = denoiser.receptive_field(), denoiser.alignment
        most = -(-(2 * reach + stride) // stride) * stride if reach is not None else 0
        while edge < most:
            with suppress(ConfigError), torch.inference_mode():
                self.run(self.noise((edge,) * self.dims))
                break
            edge = min(2 * edge, most)
        return (edge,) * self.dims

    def run(self, windows: torch.Tensor) -> torch.Tensor:
        """Run the model, and check the shape of the result."""
        try:
            result: Any = self.model(windows)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise
            raise ConfigError(
                f"{self.name} failed on a window of shape {tuple(windows.shape)}: {described(error)} "
                f"{self._advice(windows)}"
            ) from error
        shape = tuple(getattr(result, "shape", ()))
        expected = (len(windows), self.channels[1], *(n * self.scale for n in windows.shape[2:]))
        if shape != expected:
            raise ConfigError(
                f"{self.name} returned {shape or type(result).__name__} for a window of shape {tuple(windows.shape)}, where "
                f"{expected} was declared. {self._advise_declaration(tuple(windows.shape), shape)}"
            )
        checked: torch.Tensor = result
        return checked

    def _advice(self, windows: torch.Tensor) -> str:
        """Advice on a model that fails: other channels, if it accepts them."""
        if self.dims < 3 and self._try(windows[:1, :, None].repeat(1, 1, NARROW[3], *[1] * self.dims)):
            return f"It takes {self.dims + 1} axes: write tile: {{axes: {'zyx'[-self.dims - 1 :]}}}, and input: {{axes: ...}} where the file does not name them."
        for count in CHANNELS:
            window = windows[:1, :1].repeat(1, count, *[1] * self.dims)
            if channels := self._try(window):
                return f"It takes {count} channel{'s' if count > 1 else ''}: write channels: [{count}, {channels}]."
        return "Check it; or, if it cannot process such a window, write receptive_field and alignment."

    def _try(self, window: torch.Tensor) -> int:
        """Number of channels of the model's result for a window; 0 if it fails or returns other axes."""
        with suppress(Exception, SystemExit), torch.inference_mode():
            result: Any = self.model(window)
            if result.dim() == window.dim() and len(result) == 1:
                return int(result.shape[1])
        return 0

    def _advise_declaration(self, given: tuple[int, ...], made: tuple[int, ...]) -> str:
        """Advice on the declarations of a model that returns the shape ``made`` for the shape ``given``."""
        if len(made) != len(given) or made[0] != given[0]:
            return "Return a tensor of shape (tiles, channels, *spatial)."
        lines = []
        factors = {m / n for m, n in zip(made[2:], given[2:], strict=True)}
        whole = factors.pop() if len(factors) == 1 else 0.0
        if made[1] != self.channels[1]:
            lines.append(f"write channels: [{given[1]}, {made[1]}]")
        if whole >= 1 and whole.is_integer():
            if whole != self.scale:
                lines.append(f"write scale: {whole:.0f}")
        elif all(m < n * self.scale for m, n in zip(made[2:], given[2:], strict=True)):
            lines.append("a network that loses pixels at its edges has to pad them")
        else:
            lines.append("every spatial axis has to grow by the same whole number")
        return f"{', and '.join(lines).capitalize()}."

    def reach_error(self, length: int) -> ConfigError:
        """The error for a model whose receptive field exceeds every window."""
        return ConfigError(
            f"{self.name} looks at the whole image, or at least {length // 2 - 1} pixels far: tiles cannot reproduce its "
            "result. A normalisation, pooling, attention or Fourier transform over all pixels does that. "
            "Write a local network; or, if you know them, receptive_field and alignment."
        )
