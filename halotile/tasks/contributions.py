"""Contributions of operators of the kind ``whole`` to an image: computed one operator after the other, added up as files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from halotile.errors import TaskFailed
from halotile.storage.disk.durable import is_full
from halotile.storage.disk.stored import Stored, store
from halotile.storage.grid import Region
from halotile.storage.rim import Readable
from halotile.storage.sharded.output import ShardWriter
from halotile.tasks.block import peak_memory_bytes
from halotile.tasks.exact_sums import add_exactly
from halotile.tasks.operators.base import InMemory, Shape, read_all
from halotile.tasks.options import import_from
from halotile.tasks.shared import Scope
from halotile.tasks.terms import Gradient, NormalImage, Sensitivity, Term

Wants = Literal["gradient", "normal", "sensitivity"]
PART = "part"
"""Prefix of the files of partial sums."""


@dataclass(frozen=True)
class Contribution:
    """The contribution of one operator."""

    number: int
    term: Term
    slots: ClassVar[tuple[int, ...]] = (0,)
    """All contributions are added to the same image."""


@dataclass(frozen=True)
class Contributions:
    """``sum_i w_i A_i^T slope_i(A_i x)``, ``sum_i w_i A_i^T A_i x`` or ``sum_i w_i A_i^T 1`` of operators of the kind ``whole``."""

    image: Readable  # `x`: each task reads it whole
    # all operators of the stack, which give each its number; those of another kind contribute nothing
    terms: tuple[Term, ...]
    wants: Wants  # `gradient`, `normal` or `sensitivity`
    chosen: tuple[int, ...] | None = None  # numbers of the operators that contribute; None for all

    @property
    def shape(self) -> Shape:
        """Shape in pixels."""
        return self.image.shape

    def numbered(self) -> list[Contribution]:
        """The contributions of the operators that see the whole image, in their order."""
        return [
            Contribution(number, term)
            for number, term in enumerate(self.terms)
            if term.operator.kind == "whole" and (self.chosen is None or number in self.chosen)
        ]


@dataclass(frozen=True, slots=True)
class Part:
    """A partial sum in a file, with the sums that were noted while it was computed."""

    stored: Stored
    alive: int
    """Largest number of partial sums that were seen at once."""
    sums: dict[str, dict[int, float]]
    peak_memory_bytes: int
    digest: bytes = b""
    """Digest of the total, once it is written to the output."""


@dataclass(frozen=True)
class Adding:
    """The tasks of workers that add contributions up; pickles to a few kilobytes."""

    what: ClassVar[str] = "operator"

    phase: str  # name of the contributions on the dashboard
    folder: str  # folder of the partial sums
    image: Readable  # `x`
    wants: Wants  # `gradient`, `normal` or `sensitivity`
    writer: ShardWriter  # writer of the total
    import_folder: str | None = None  # folder from which the user's own code is imported

    def compute(self, group: Sequence[Contribution], after: Part | None = None) -> Part:
        """Add a few contributions. ``after`` only has to be computed before; it is not used."""
        import_from(self.import_folder)
        image = InMemory(read_all(self.image))
        total: NDArray[Any] | None = None
        sums: dict[str, dict[int, float]] = {}
        for contribution in group:
            pixels, noted = self._compute_one(contribution, image)
            total = pixels if total is None else np.add(total, pixels, out=total)
            for name, value in noted.items():
                sums.setdefault(name, {})[contribution.number] = value
        assert total is not None
        return self._store(total, sums)

    def add(self, parts: Sequence[Part]) -> Part:
        """Add partial sums, in their order."""
        total = np.array(parts[0].stored.load())
        for part in parts[1:]:
            total += part.stored.load()
        sums: dict[str, dict[int, float]] = {}
        for part in parts:
            for name, values in part.sums.items():
                sums.setdefault(name, {}).update(values)
        total_part = self._store(total, sums, max(part.alive for part in parts))
        for part in parts:
            part.stored.delete()
        return total_part

    def keep(self, part: Part) -> Part:
        """Write the total to the output; durable on return."""
        written = self.writer.write(Region.whole(self.writer.layout.shape), part.stored.load())
        part.stored.delete()
        return replace(part, digest=written.digest)

    def _compute_one(
        self, contribution: Contribution, image: InMemory
    ) -> tuple[NDArray[Any], dict[str, float]]:
        whole = Region.whole(image.shape)
        make = {"gradient": Gradient, "normal": NormalImage, "sensitivity": Sensitivity}[self.wants]
        try:
            with Scope([whole]) as scope:
                pixels = np.array(make(image, (contribution.term,)).read(whole))
        except Exception as error:
            if isinstance(error, OSError) and is_full(error):
                raise
            name = contribution.term.operator.name
            raise TaskFailed(
                f"operator {contribution.number} ({name}) failed on a worker: {type(error).__name__}: {error}"
            ) from error
        return pixels, {name: add_exactly(values) for name, values in scope.sums().items()}

    def _store(self, total: NDArray[Any], sums: dict[str, dict[int, float]], alive: int = 0) -> Part:
        stored = store(total, self.folder, stem=PART)
        present = len(list(Path(self.folder).glob(f"{PART}-*")))
        return Part(stored, max(alive, present), sums, peak_memory_bytes())
