"""deepinv: a linear physics of the package deepinv as an operator."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import numpy as np

from halotile.errors import ConfigError
from halotile.storage.grid import Region
from halotile.storage.rim import Array, Pixels, Readable
from halotile.tasks.operators.base import Computed, Operator, OperatorKind, PickledByFields, Shape, read_all
from halotile.tasks.operators.common.locality import SIDES, agrees, find_reach, widened
from halotile.tasks.operators.common.physics import REFUSALS, Physics, build
from halotile.tasks.operators.common.translation import channel_counts, stated_size, translate
from halotile.tasks.options import check_whole

COPIES = 3
"""Assumed number of images and measurements in memory at once: input, output, and one in between."""


@dataclass(frozen=True)
class WindowedMap(Computed):
    """The result of a map with a reach of ``margin`` pixels, computed from one window for each region."""

    shape: Shape
    margin: int
    apply: Callable[[Array], Array]

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
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
        """The pixels of ``region``."""
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
        """The physics."""
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
        self,
        declared: int,
        forward: Callable[[Array], Array],
        adjoint: Callable[[Array], Array],
        channels: int,
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
        """Shape of the measurement."""
        if self.replacement is not None:
            return self.replacement.measured(image)
        return image if self._reach is not None else self.calls.measured(image)

    def forward(self, image: Readable) -> Readable:
        """``A x``."""
        if self.replacement is not None:
            return self.replacement.forward(image)
        measured = self.measured(image.shape)
        if self._reach is not None:
            return WindowedMap(image, measured, self._reach, self._measure)
        return Whole(image, measured, self._measure)

    def adjoint(self, measurement: Readable, image: Shape) -> Readable:
        """``A^T y``."""
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
