"""Own: an operator of the user's own, imported by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np

from halotile.errors import ConfigError
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.tasks.operators.base import Kind, Operator, Shape, Windowed
from halotile.tasks.options import check_reference, import_reference
from halotile.tasks.trials.user_code import imported_digest

NEEDED = ("kind", "reach", "measured", "forward", "adjoint")


@dataclass(frozen=True, eq=False)
class Applied:
    """What code of the user's own makes of an image; it is run where the image is read, and pickles without it."""

    operator: Own
    source: Readable
    image: Shape | None = None
    """Of the adjoint: the shape of what it gives."""

    @cached_property
    def _made(self) -> Readable:
        made = self.operator.made
        return made.forward(self.source) if self.image is None else made.adjoint(self.source, self.image)

    @property
    def shape(self) -> Shape:
        """Shape in pixels."""
        return self._made.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of one pixel."""
        return self._made.dtype

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
        return self._made.read(region)

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Own:
    """The operator that ``import`` makes of its options: what ``halotile.tasks.operators.base.Operator`` asks for.

    A plan compares its forward with its adjoint before the job, and the digest of its code belongs to the job.

    Parameters
    ----------
    import_ : str
        The class, or a function that gives an operator: "package.module:Name".
    options : mapping
        What it is called with.

    Examples
    --------
    >>> own = Own(import_="halotile.tasks.operators.crop:Crop", options={"origin": (0, 1), "size": (2, 2)})
    >>> own.kind, own.measured((4, 4))
    ('windowed', (2, 2))
    """

    name: ClassVar[str] = "own"

    import_: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_reference(self.import_)

    @cached_property
    def made(self) -> Operator:
        """The operator itself. RangeSet the user's code.

        Raises
        ------
        ConfigError
            When there is none of that name, it refuses its options, or is no operator.
        """
        make = import_reference(self.import_)
        try:
            made = make(**self.options)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{self.import_} with the options {dict(self.options)} failed: {type(error).__name__}: {error}. "
                "Write the options that it takes."
            ) from error
        if missing := [name for name in NEEDED if not hasattr(made, name)]:
            raise ConfigError(
                f"{self.import_} made a {type(made).__name__} without {' and '.join(missing)}. Write a class with "
                f"{', '.join(NEEDED)}: see 'Add an operator' in CONTRIBUTING.md."
            )
        return cast(Operator, made)

    @property
    def code(self) -> str:
        """Digest of the user's code."""
        return imported_digest(self.import_, import_reference(self.import_))

    @property
    def kind(self) -> Kind:
        """What of the image it has to see."""
        return self.made.kind

    @property
    def reach(self) -> int:
        """How far, in pixels, it looks."""
        return self.made.reach

    @property
    def factor(self) -> int:
        """By how much measurements are smaller, where it says so."""
        return getattr(self.made, "factor", 1)

    @property
    def memory_bytes(self) -> Callable[[Shape], int] | None:
        """What it needs for an image of a shape, where the kind is ``whole`` and it says so."""
        return getattr(self.made, "memory_bytes", None)

    def window(self, image: Shape) -> Region:
        """The pixels that it sees, where the kind is ``windowed``."""
        return cast(Windowed, self.made).window(image)

    def measured(self, image: Shape) -> Shape:
        """Shape of the measurement."""
        return self.made.measured(image)

    def forward(self, image: Readable) -> Applied:
        """``A x``."""
        return Applied(self, image)

    def adjoint(self, measurement: Readable, image: Shape) -> Applied:
        """``A^T y``."""
        return Applied(self, measurement, image)

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


OPERATOR = Own
