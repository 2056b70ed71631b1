"""deepinv: a linear physics of the package of that name as an operator."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.tasks.operators.base import Kind, Operator, Shape, read_all, working_dtype
from halotile.tasks.operators.common.locality import SIDES, agrees, find_reach, widened
from halotile.tasks.operators.common.physics import REFUSALS, Physics, build
from halotile.tasks.operators.common.translation import channel_counts, stated_size, translated
from halotile.tasks.options import check_whole

COPIES = 3
"""So many images and measurements a physics is taken to hold at once: what goes in, what comes out, one between."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Near:
    """A map that looks ``margin`` pixels far, on one window for each region."""

    source: Readable
    shape: Shape
    margin: int
    apply: Callable[[Array], Array]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of one pixel."""
        return working_dtype(self.source.dtype)

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
        window = widened(region, self.margin, self.shape)
        return self.apply(self.source.read(window))[region.relative_to(window).slices]


@dataclass(eq=False)
class Computed:
    """A map of all of its source, computed when it is first read and then held."""

    source: Readable
    shape: Shape
    apply: Callable[[Array], Array]
    _held: list[Array] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of one pixel."""
        return working_dtype(self.source.dtype)

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
        with self._lock:
            if not self._held:
                self._held.append(self.apply(read_all(self.source)))
        return self._held[0][region.slices]

    def __reduce__(self) -> tuple[Any, ...]:
        return Computed, (self.source, self.shape, self.apply)


@dataclass(frozen=True, kw_only=True, eq=False)
class DeepInv:
    """``y = A x`` for a ``deepinv.physics.LinearPhysics``, in NumPy arrays.

    A physics that is one of halotile's operators becomes that (``Blur``, ``BlurFFT``, ``Downsampling``, ``Inpainting``, when
    both measure the same of a random image). Of the others one whose ``reach`` is told runs on windows, any region within
    1e-6 of the whole; one whose reach is not told is taken to see all of the image, is computed whole once, then held. Where
    deepinv's adjoint is not the transpose, the derivative of A takes its place. Noise is not applied.

    Images have the axes (..., C, H, W), or (H, W) for one channel.

    Parameters
    ----------
    physics : str or deepinv.physics.LinearPhysics
        Name of a class in ``deepinv.physics``, or an object.
    options : mapping
        For that class. Arrays, paths of ``.npy`` files and nested lists become tensors, ``rng: 3`` a generator with
        that seed. What is drawn when it is made is the same in every process.
    reach_ : int or "auto", optional
        How far, in pixels, it looks; ``auto`` finds out by trying it on small images. Either says that the physics is the same
        everywhere in the image, which no trial on small ones can tell.

    Raises
    ------
    MissingPackage, ConfigError
        When it is first used: without deepinv, with options that it refuses, with a reach that is too short.

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

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @cached_property
    def calls(self) -> Physics:
        """The physics itself."""
        return Physics(build(self.physics, self.options))

    @cached_property
    def ours(self) -> Operator | None:
        """The operator of halotile that it is, if there is one."""
        counts = channel_counts(self.calls.module)
        return next(filter(None, (translated(self.calls, count) for count in counts)), None)

    @property
    def told(self) -> Shape | None:
        """The shape (C, H, W) that its images are told to have, where its adjoint gives no other."""
        return stated_size(self.calls.module)

    @cached_property
    def _near(self) -> int | None:
        """How far it looks, told and held against windows, or found out; None where it is not told."""
        if self.reach_ is None:
            return None
        for channels in channel_counts(self.calls.module):
            forward, adjoint = self.calls.forward, partial(self._transposed, channels)
            if self.reach_ == "auto":
                reach = find_reach(forward, adjoint, channels)
            else:
                reach = self._checked(self.reach_, forward, adjoint, channels)
            if reach is not None:
                return reach
        return None if self.reach_ == "auto" else self.reach_

    def _transposed(self, channels: int, measurement: Array) -> Array:
        return self.calls.adjoint(measurement, (channels, *measurement.shape[-2:]))

    def _checked(
        self,
        declared: int,
        forward: Callable[[Array], Array],
        adjoint: Callable[[Array], Array],
        channels: int,
    ) -> int | None:
        """The declared reach, held against windows; None when the physics takes no such image."""
        side = max(SIDES[0], 6 * declared)
        shape = (channels, side, side)
        try:
            forward(np.zeros(shape, np.float32))
        except REFUSALS:
            return None
        if not agrees(forward, adjoint, declared, shape):
            raise ConfigError(
                f"reach is {declared}, but {type(self.calls.module).__name__} looks farther or is not the same everywhere: "
                "seams would show. Write a larger reach, or leave it out."
            )
        return declared

    @property
    def kind(self) -> Kind:
        """``local`` where it can run on windows, else ``whole``. A declared reach is believed without deepinv."""
        is_local = isinstance(self.reach_, int) or self.ours is not None or self._near is not None
        return "local" if is_local else "whole"

    @property
    def reach(self) -> int:
        """How far it looks; 0 where it sees everything."""
        if isinstance(self.reach_, int):
            return self.reach_
        return self.ours.reach if self.ours is not None else self._near or 0

    def memory_bytes(self, image: Shape) -> int:
        """About what it takes to measure an image of this shape, or a window of it, in single precision."""
        return 4 * COPIES * (math.prod(image) + math.prod(self.measured(image)))

    def measured(self, image: Shape) -> Shape:
        """Shape of the measurement."""
        if self.ours is not None:
            return self.ours.measured(image)
        return image if self._near is not None else self.calls.measured(image)

    def forward(self, image: Readable) -> Readable:
        """``A x``."""
        if self.ours is not None:
            return self.ours.forward(image)
        measured = self.measured(image.shape)
        if self._near is not None:
            return Near(image, measured, self._near, self._measure)
        return Computed(image, measured, self._measure)

    def adjoint(self, measurement: Readable, image: Shape) -> Readable:
        """``A^T y``."""
        if self.ours is not None:
            return self.ours.adjoint(measurement, image)
        if self._near is not None:
            return Near(measurement, image, 2 * self._near, self._spread)
        return Computed(measurement, image, partial(self._spread, image=image))

    def _measure(self, image: Array) -> Array:
        return self.calls.forward(image)

    def _spread(self, measurement: Array, image: Shape | None = None) -> Array:
        return self.calls.adjoint(measurement, image or measurement.shape)


def is_physics(thing: object) -> bool:
    """Whether it is a physics object of deepinv's. Where deepinv is not imported yet, nothing is."""
    kinds = sys.modules.get("deepinv.physics")
    return kinds is not None and isinstance(thing, kinds.Physics)


OPERATOR = DeepInv
