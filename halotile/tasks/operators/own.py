"""Own: a user's own operator, imported by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np

from halotile.errors import ConfigError
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.tasks.operators.base import Operator, OperatorKind, PickledByFields, Shape, Windowed
from halotile.tasks.options import check_reference, import_reference
from halotile.tasks.user_code import imported_digest

NEEDED = ("kind", "reach", "measured", "forward", "adjoint")


@dataclass(frozen=True, eq=False)
class Applied(PickledByFields):
    """The result of a user's own operator; its code runs when it is read, and is not pickled with it."""

    operator: Own
    source: Readable
    image: Shape | None = None
    """For the adjoint: the shape of the result."""

    @cached_property
    def _result(self) -> Readable:
        operator = self.operator.built
        if self.image is None:
            return operator.forward(self.source)
        return operator.adjoint(self.source, self.image)

    @property
    def shape(self) -> Shape:
        return self._result.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._result.dtype

    def read(self, region: Region) -> Pixels:
        return self._result.read(region)


@dataclass(frozen=True, kw_only=True, eq=False)
class Own(PickledByFields):
    """The operator that the object named by ``import`` returns for the options; see ``halotile.tasks.operators.base.Operator``.

    A plan compares its forward with its adjoint before the job, and the digest of its code is part of the job's fingerprint.

    Parameters
    ----------
    import_ : str
        The class, or a function that returns an operator: "package.module:Name".
    options : mapping
        Keyword arguments for it.

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
    def built(self) -> Operator:
        """The user's operator. Runs the user's code."""
        build = import_reference(self.import_)
        try:
            operator = build(**self.options)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{self.import_} with the options {dict(self.options)} failed: {type(error).__name__}: {error}. "
                "Write the options that it takes."
            ) from error
        if missing := [name for name in NEEDED if not hasattr(operator, name)]:
            raise ConfigError(
                f"{self.import_} returned a {type(operator).__name__} without {' and '.join(missing)}. Write a class with "
                f"{', '.join(NEEDED)}: see 'Add an operator' in CONTRIBUTING.md."
            )
        return cast(Operator, operator)

    @property
    def code(self) -> str:
        """Digest of the user's code."""
        return imported_digest(self.import_, import_reference(self.import_))

    @property
    def kind(self) -> OperatorKind:
        return self.built.kind

    @property
    def reach(self) -> int:
        return self.built.reach

    @property
    def factor(self) -> int:
        """Its downsampling factor, 1 if not declared."""
        return getattr(self.built, "factor", 1)

    @property
    def memory_bytes(self) -> Callable[[Shape], int] | None:
        """Its function for the memory that an image of a shape takes, if declared; for the kind ``whole``."""
        return getattr(self.built, "memory_bytes", None)

    def window(self, image: Shape) -> Region:
        return cast(Windowed, self.built).window(image)

    def measured(self, image: Shape) -> Shape:
        return self.built.measured(image)

    def forward(self, image: Readable) -> Applied:
        return Applied(self, image)

    def adjoint(self, measurement: Readable, image: Shape) -> Applied:
        return Applied(self, measurement, image)


OPERATOR = Own
