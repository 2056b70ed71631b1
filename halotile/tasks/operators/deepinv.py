"""deepinv: a linear physics of the package deepinv as an operator."""

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.storage.grid import Region
from halotile.storage.rim import Array, Pixels, Readable
from halotile.tasks.inner_tiles import respanned
from halotile.tasks.operators.base import Computed, InMemory, Operator, OperatorKind, PickledByFields, Shape, read_all
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.common.physics import REFUSALS, Physics, build
from halotile.tasks.operators.mask import Mask
from halotile.tasks.options import check_whole

SIDES = (48, 160)  # edges of the trial images; the reach must be less than a quarter of them
FAINT = 1e-6  # values below this fraction of the largest are ignored: the rounding of a Fourier transform
SAME = 1e-5  # allowed difference between a window and the whole, relative to the largest value

ArrayMap = Callable[[Array], Array]  # takes an image and returns a measurement of the same shape


def find_reach(forward: ArrayMap, adjoint: ArrayMap, channels: int) -> int | None:
    """The reach of forward and adjoint; None for a map that needs the whole image, or varies over the image.

    Impulses in the middle, at edges and in corners give the reach; then windows computed by themselves are compared with
    the whole. A map that wraps around, changes the shape or works on one size only cannot
    run on windows.

    >>> smooth = lambda image: image + np.pad(image, ((0, 0), (0, 0), (2, 0)))[..., :-2]
    >>> back = lambda image: image + np.pad(image, ((0, 0), (0, 0), (0, 2)))[..., 2:]
    >>> find_reach(smooth, back, channels=1), find_reach(lambda x: x * x.mean(), back, channels=1)
    (2, None)
    """
    for side in SIDES:
        shape = (channels, side, side)
        try:
            reach = max(_spread(operation, shape) for operation in (forward, adjoint))
            if 4 * reach < side:
                return reach if agrees(forward, adjoint, reach, shape) else None
        except REFUSALS:
            return None
    return None


def agrees(forward: ArrayMap, adjoint: ArrayMap, reach: int, shape: Shape) -> bool:
    """Return whether windows with a margin of the reach have the values of the whole image."""
    image = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for operation, margin in ((forward, reach), (adjoint, 2 * reach)):
        whole = operation(image)
        for region in _regions(shape):
            window = widened(region, margin, shape)
            part = operation(image[window.slices])[region.relative_to(window).slices]
            if np.abs(part - whole[region.slices]).max() > SAME * np.abs(whole).max():
                return False
    return True


def widened(region: Region, margin: int, shape: Shape) -> Region:
    """The region with a margin along y and x and all of its channels, within the image."""
    grown = region.widen(margin).clip(Region.whole(shape))
    return grown if len(shape) < 3 else respanned(grown, {len(shape) - 3: (0, shape[-3])})


def _spread(operation: ArrayMap, shape: Shape) -> int:
    """The largest distance to which an impulse spreads; the search ends at one that is too large."""
    far = 0
    for place in _places(shape[-1]):
        impulse = np.zeros(shape, np.float32)
        impulse[(slice(None), *place)] = 1
        answer = np.abs(operation(impulse))
        if answer.shape != shape:
            raise ValueError(f"{answer.shape} of {shape}")
        seen = np.argwhere(answer > FAINT * answer.max())[:, -2:]
        far = max(far, int(np.abs(seen - np.array(place)).max(initial=0)))
        if 4 * far >= shape[-1]:
            break
    return far


def _places(side: int) -> Iterator[tuple[int, int]]:
    """Yield the middle, an odd place, edges and corners."""
    yield from ((side // 2, side // 2), (side // 3, side // 2 + 3))
    ends = (0, 1, side - 1)
    yield from ((y, x) for y in ends for x in ends)
    yield from ((0, side // 2), (side // 2, side - 1))


def _regions(shape: Shape) -> Iterator[Region]:
    """Yield regions inside the image and at its rim."""
    n = shape[-1]
    spans = ((0, n // 4), (n // 3, n // 2 + 1), (n - 5, n))
    for top, bottom in spans:
        for left, right in spans:
            yield Region((0, top, left), (shape[0], bottom, right))


NEAR = 5e-6  # allowed difference between both in single precision, relative to the largest value


def translate(physics: Physics, channels: int) -> Operator | None:
    """The operator of this package that is equivalent to a physics, if there is one.

    The two are compared on a random image. Only forward is compared: it determines the adjoint, and
    deepinv's adjoint is not the transpose for some boundaries and kernels.
    """
    kind = type(physics.module)
    make = TRANSLATIONS.get(kind.__name__) if kind.__module__.startswith("deepinv.") else None
    if make is None:
        return None
    try:
        operator = make(physics.module)
        return operator if operator is not None and _measure_alike(operator, physics, channels) else None
    except (*REFUSALS, AttributeError):  # an unknown variant
        return None


def _measure_alike(operator: Operator, physics: Physics, channels: int) -> bool:
    image = np.random.default_rng(0).standard_normal(_image_shape(operator, physics.module, channels))
    image = image.astype(np.float32)
    here, there = np.asarray(read_all(operator.forward(InMemory(image)))), physics.forward(image)
    return here.shape == there.shape and bool(np.abs(here - there).max() <= NEAR * np.abs(there).max())


def _image_shape(operator: Operator, module: Any, channels: int) -> Shape:
    """The size of the physics if it has one, else a small one."""
    if isinstance(operator, Mask):
        return (1, *operator.mask.shape)[-3:]
    size = getattr(module, "img_size", None)
    if size is not None and len(size) == 3:
        return tuple(size)
    factor = getattr(operator, "factor", 1)
    side = factor * (2 * operator.reach + 8)
    return channels, side, side + factor


def _downsampling(module: Any) -> Operator | None:
    kernel = np.ones((1, 1)) if module.filter is None else _kernel(module.filter)
    blur = Blur(kernel=kernel, boundary=_boundary(module.padding), factor=int(module.factor))
    if size := stated_size(module):
        blur.measured(size)  # refuses sizes that only deepinv accepts
    return blur


def _inpainting(module: Any) -> Operator | None:
    mask: NDArray[Any] = module.mask.cpu().numpy()
    for axes in (4, 3):
        if mask.ndim == axes and len(mask) == 1:
            mask = mask[0]
    return Mask(mask=InMemory(mask)) if mask.ndim <= 3 else None


def _kernel(filter_: Any) -> NDArray[Any]:
    """The kernels of the planes from a filter (1, C, rows, columns), or one kernel for all planes."""
    one, channels, rows, columns = filter_.shape
    if one != 1:
        raise ValueError("a filter for each image of a batch")
    kernel: NDArray[Any] = filter_.cpu().numpy().reshape(channels, rows, columns)
    return kernel[0] if channels == 1 else kernel


def _boundary(padding: str) -> str:
    return "zero" if padding == "constant" else padding


# Functions that build the operator, by class name.
TRANSLATIONS: dict[str, Callable[[Any], Operator | None]] = {
    "Blur": lambda module: Blur(kernel=_kernel(module.filter), boundary=_boundary(module.padding)),
    "BlurFFT": lambda module: Blur(kernel=_kernel(module.filter), boundary="circular"),
    "Downsampling": _downsampling,
    "Denoising": lambda module: Blur(kernel=np.ones((1, 1)), boundary="zero"),
    "Inpainting": _inpainting,
}


def stated_size(module: Any) -> Shape | None:
    """The image shape (C, H, W) in the options of a ``Downsampling``, the only one that its adjoint returns."""
    size = getattr(module, "imsize", None)
    return tuple(size) if size is not None and len(size) == 3 else None


def channel_counts(module: Any) -> Iterator[int]:
    """Yield possible numbers of channels: as declared, then the usual ones."""
    size = getattr(module, "img_size", None)
    if size is not None and len(size) == 3:
        yield int(size[0])
    shape = tuple(getattr(getattr(module, "filter", None), "shape", ()))
    if len(shape) == 4 and shape[1] > 1:
        yield int(shape[1])
    yield from (1, 3, 2)


COPIES = 3  # assumed number of images and measurements in memory at once: input, output, and one in between


@dataclass(frozen=True)
class WindowedMap(Computed):
    """The result of a map with a reach of ``margin`` pixels, computed from one window for each region."""

    shape: Shape
    margin: int
    apply: Callable[[Array], Array]

    def read(self, region: Region) -> Pixels:
        window = widened(region, self.margin, self.shape)
        return self.apply(self.image.read(window))[region.relative_to(window).slices]


@dataclass(frozen=True, eq=False)
class Whole(Computed):
    """The result of a map on the whole image, computed when it is first read and then kept."""

    shape: Shape
    apply: Callable[[Array], Array]
    _results: list[Array] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, region: Region) -> Pixels:
        with self._lock:
            if not self._results:
                self._results.append(self.apply(read_all(self.image)))
        return self._results[0][region.slices]

    def __reduce__(self) -> tuple[Any, ...]:
        return Whole, (self.image, self.shape, self.apply)


@dataclass(frozen=True, kw_only=True, eq=False)
class DeepInv(PickledByFields):
    """``y = A x`` for a ``deepinv.physics.LinearPhysics``, in NumPy arrays.

    A physics that equals one of halotile's operators is replaced by it (``Blur``, ``BlurFFT``, ``Downsampling``, ``Inpainting``,
    if both give the same measurement of a random image). Another one runs on windows if its ``reach`` is given, any region within
    1e-6 of the whole; without a reach it is assumed to need the whole image, and is computed once as a whole, then kept. If
    deepinv's adjoint is not the transpose, the derivative of A is used instead. Noise is not applied.

    Images have the axes (..., C, H, W), or (H, W) for one channel.

    Parameters
    ----------
    physics : str or deepinv.physics.LinearPhysics
        Name of a class in ``deepinv.physics``, or an object.
    options : mapping
        Arguments of that class. Arrays, paths of ``.npy`` files and nested lists become tensors, ``rng: 3`` a generator with
        that seed. Random numbers of the constructor are the same in every process.
    reach_ : int or "auto", optional
        Reach in pixels; ``auto`` finds it by trials on small images. Either asserts that the physics is the same
        everywhere in the image, which trials on small images cannot show.

    Raises
    ------
    MissingPackage, ConfigError
        On first use: without deepinv, with options that it refuses, or with a reach that is too short.

    Examples
    --------
    >>> from halotile.tasks.operators.base import InMemory
    >>> blur = DeepInv(physics="Blur", options={"filter": np.ones((3, 3)) / 9, "padding": "circular"})
    >>> blur.kind, blur.forward(InMemory(np.ones((16, 16)))).shape
    ('local', (16, 16))
    """

    name: ClassVar[str] = "deepinv"

    physics: str | Any
    options: Mapping[str, Any] = field(default_factory=dict)
    reach_: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        if self.reach_ not in (None, "auto"):
            check_whole("reach", self.reach_, 0)

    @cached_property
    def calls(self) -> Physics:
        return Physics(build(self.physics, self.options))

    @cached_property
    def replacement(self) -> Operator | None:
        """The operator of halotile that it equals, if there is one."""
        counts = channel_counts(self.calls.module)
        return next(filter(None, (translate(self.calls, count) for count in counts)), None)

    @property
    def fixed_shape(self) -> Shape | None:
        """The only shape (C, H, W) of images that its adjoint returns, if its options fix it."""
        return stated_size(self.calls.module)

    @cached_property
    def _reach(self) -> int | None:
        """The reach, given and checked on windows, or found by trials; None if it is not given."""
        if self.reach_ is None:
            return None
        for channels in channel_counts(self.calls.module):
            forward, adjoint = self.calls.forward, partial(self._transposed, channels)
            if self.reach_ == "auto":
                reach = find_reach(forward, adjoint, channels)
            else:
                reach = self._check_reach(self.reach_, forward, adjoint, channels)
            if reach is not None:
                return reach
        return None if self.reach_ == "auto" else self.reach_

    def _transposed(self, channels: int, measurement: Array) -> Array:
        return self.calls.adjoint(measurement, (channels, *measurement.shape[-2:]))

    def _check_reach(
        self, declared: int, forward: Callable[[Array], Array], adjoint: Callable[[Array], Array], channels: int
    ) -> int | None:
        """Check the declared reach on windows; None if the physics does not take such an image."""
        side = max(SIDES[0], 6 * declared)
        shape = (channels, side, side)
        try:
            forward(np.zeros(shape, np.float32))
        except REFUSALS:
            return None
        if not agrees(forward, adjoint, declared, shape):
            raise ConfigError(
                f"reach is {declared}, but {type(self.calls.module).__name__} looks farther or is not the same everywhere: "
                "seams would be visible. Write a larger reach, or omit it."
            )
        return declared

    @property
    def kind(self) -> OperatorKind:
        """``local`` if it can run on windows, else ``whole``. A declared reach is accepted without deepinv."""
        is_local = isinstance(self.reach_, int) or self.replacement is not None or self._reach is not None
        return "local" if is_local else "whole"

    @property
    def reach(self) -> int:
        """The reach in pixels; 0 if it needs the whole image."""
        if isinstance(self.reach_, int):
            return self.reach_
        return self.replacement.reach if self.replacement is not None else self._reach or 0

    def memory_bytes(self, image: Shape) -> int:
        """Approximate memory to measure an image or window of this shape, in single precision."""
        return 4 * COPIES * (math.prod(image) + math.prod(self.measured(image)))

    def measured(self, image: Shape) -> Shape:
        if self.replacement is not None:
            return self.replacement.measured(image)
        return image if self._reach is not None else self.calls.measured(image)

    def forward(self, image: Readable) -> Readable:
        if self.replacement is not None:
            return self.replacement.forward(image)
        measured = self.measured(image.shape)
        if self._reach is not None:
            return WindowedMap(image, measured, self._reach, self._measure)
        return Whole(image, measured, self._measure)

    def adjoint(self, measurement: Readable, image: Shape) -> Readable:
        if self.replacement is not None:
            return self.replacement.adjoint(measurement, image)
        if self._reach is not None:
            return WindowedMap(measurement, image, 2 * self._reach, self._spread)
        return Whole(measurement, image, partial(self._spread, image=image))

    def _measure(self, image: Array) -> Array:
        return self.calls.forward(image)

    def _spread(self, measurement: Array, image: Shape | None = None) -> Array:
        return self.calls.adjoint(measurement, image or measurement.shape)


def is_physics(thing: object) -> bool:
    """Return whether an object is a deepinv physics; False as long as deepinv is not imported."""
    kinds = sys.modules.get("deepinv.physics")
    return kinds is not None and isinstance(thing, kinds.Physics)


OPERATOR = DeepInv
