"""Terms of a misfit, each a measurement with its operator: their gradients on any region, and contributions of operators of the kind ``whole``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from halotile.errors import InputError, TaskFailed
from halotile.storage.disk.durable import is_full
from halotile.storage.disk.stored import Stored, store
from halotile.storage.grid import Region
from halotile.storage.rim import Array, Pixels, Readable
from halotile.storage.sharded.output import ShardWriter
from halotile.storage.views import Constant
from halotile.tasks.block import peak_memory_bytes
from halotile.tasks.exact_sums import add_exactly, total_of
from halotile.tasks.fidelities.base import Fidelity
from halotile.tasks.fidelities.l2 import L2
from halotile.tasks.image_task import Scope
from halotile.tasks.operators.base import Derived, InMemory, Operator, Shape, read_all, window_of
from halotile.tasks.operators.normal import Normal
from halotile.tasks.options import import_from

Wants = Literal["gradient", "normal", "sensitivity"]
PART = "part"  # prefix of the files of partial sums


@dataclass(frozen=True)
class Contribution:
    """The contribution of one operator."""

    number: int
    term: Term
    slots: ClassVar[tuple[int, ...]] = (0,)  # all contributions are added to the same image


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
    alive: int  # largest number of partial sums that were seen at once
    sums: dict[str, dict[int, float]]
    peak_memory_bytes: int
    digest: bytes = b""  # digest of the total, once it is written to the output


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

    def _compute_one(self, contribution: Contribution, image: InMemory) -> tuple[NDArray[Any], dict[str, float]]:
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


MISFIT = "misfit"  # name of the sum under which a gradient notes the misfit of its image


@dataclass(frozen=True)
class Term:
    """A measurement with its operator and its weight: 1 / sigma² of its noise."""

    operator: Operator
    measurement: Readable
    weight: float = 1.0
    fidelity: Fidelity = field(default_factory=L2)
    # The image at which the normal operator evaluates the curvature of the fidelity; None for squares, whose curvature
    # is 1.
    at: Readable | None = None

    def seen(self, image: Readable) -> Readable:
        """``A x``, each pixel times the curvature: the argument of the adjoint in the normal operator."""
        seen = self.operator.forward(image)
        if self.at is None:
            return seen
        return Curved(seen, self.operator.forward(self.at), self.measurement, self.fidelity)

    def add_adjoint(self, measurement: Readable, image: Shape, region: Region, total: NDArray[Any]) -> None:
        """Add ``weight A^T y`` to ``region`` of an image, as far as the window of the operator extends."""
        seen = region.clip(window_of(self.operator, image))
        if not seen.size:
            return
        pixels = self.operator.adjoint(measurement, image).read(seen)
        part = total[seen.relative_to(region).slices]
        part += pixels if self.weight == 1 else pixels * total.dtype.type(self.weight)

    def share(self, part: Region, image: Shape) -> Region:
        """The part of the measurement that corresponds to a part of the image."""
        window = window_of(self.operator, image)
        seen = part.clip(window)
        return share_of(seen.relative_to(window), window.shape, self.measurement.shape)


@dataclass(frozen=True)
class Curved(Derived):
    """``c(A x_0, y) A x`` with the curvature ``c`` of a fidelity; its image is ``A x``."""

    at: Readable
    measurement: Readable
    fidelity: Fidelity

    def read(self, region: Region) -> Pixels:
        curvature = self.fidelity.curvature(np.asarray(self.at.read(region)), self.measurement.read(region))
        curved: Pixels = self.image.read(region) * curvature.astype(self.dtype, copy=False)
        return curved


@dataclass
class Slope:
    """The slope of a term at ``A x``, which keeps what it read: the misfit is computed from the same pixels."""

    seen: Readable
    measurement: Readable
    fidelity: Fidelity
    _parts: list[tuple[Region, NDArray[Any], NDArray[Any]]] = field(default_factory=list)

    @property
    def shape(self) -> Shape:
        return self.measurement.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.seen.dtype

    def read(self, region: Region) -> Pixels:
        seen, measured = self._read(region)
        return self.fidelity.slope(seen, measured)

    def misfit(self, region: Region) -> float:
        """The misfit summed over ``region``."""
        for there, seen, measured in self._parts:
            if region.inside(there):
                inner = region.relative_to(there).slices
                return float(np.sum(self.fidelity.value(seen[inner], measured[inner])))
        return float(np.sum(self.fidelity.value(*self._read(region))))

    def _read(self, region: Region) -> tuple[NDArray[Any], NDArray[Any]]:
        part = self.seen.read(region), self.measurement.read(region)
        self._parts.append((region, *part))
        return part


@dataclass(frozen=True)
class Gradient(Derived):
    """``sum_i weight_i A_i^T slope_i(A_i x)``; of squares, ``sum_i weight_i A_i^T (A_i x - y_i)``.

    The terms are added in their order, so any region has the bits of the whole. Inside a
    :class:`~halotile.tasks.image_task.Scope` the misfit of ``x`` is noted as well.

    ``image``: ``x``; ``terms``: the stack; ``records_misfit``: whether the misfit is noted.

    >>> from halotile.tasks.operators.base import InMemory, read_all
    >>> from halotile.tasks.operators.blur import Blur
    >>> halve = Blur(kernel=np.full((1, 1), 0.5))
    >>> x, y = InMemory(np.full((1, 2), 4.0)), InMemory(np.ones((1, 2)))
    >>> read_all(Gradient(x, (Term(halve, y, weight=2.0),))).tolist()
    [[1.0, 1.0]]
    """

    terms: tuple[Term, ...]
    records_misfit: bool = True

    def read(self, region: Region) -> Pixels:
        gradient = np.zeros(region.shape, self.dtype)
        for number, term in enumerate(self.terms):
            slope = Slope(term.operator.forward(self.image), term.measurement, term.fidelity)
            term.add_adjoint(slope, self.shape, region, gradient)
            if self.records_misfit:
                self._note_misfit(number, term, slope)
        return gradient

    def _note_misfit(self, number: int, term: Term, slope: Slope) -> None:
        scope = Scope.current()
        for cell, core in enumerate(scope.cells if scope else ()):
            share = term.share(core, self.shape)
            assert scope is not None
            scope.note(MISFIT, cell, number, term.weight * slope.misfit(share) if share.size else 0.0)


@dataclass(frozen=True)
class NormalImage(Derived):
    """``sum_i weight_i A_i^T A_i x``; with curvatures ``c_i`` other than 1, ``sum_i weight_i A_i^T c_i A_i x``.

    ``image``: ``x``; ``terms``: the stack.

    >>> from halotile.tasks.operators.base import InMemory, read_all
    >>> from halotile.tasks.operators.blur import Blur
    >>> halve, y = Blur(kernel=np.full((1, 1), 0.5)), InMemory(np.zeros((1, 2)))
    >>> read_all(NormalImage(InMemory(np.full((1, 2), 4.0)), (Term(halve, y, weight=2.0),))).tolist()
    [[2.0, 2.0]]
    """

    terms: tuple[Term, ...]

    def read(self, region: Region) -> Pixels:
        total = np.zeros(region.shape, self.dtype)
        for term in self.terms:
            term.add_adjoint(term.seen(self.image), self.shape, region, total)
        return total


@dataclass(frozen=True)
class Sensitivity(Derived):
    """``sum_i weight_i A_i^T 1``, for an image that only gives shape and type.

    ``image``: the image; ``terms``: the stack.
    """

    terms: tuple[Term, ...]

    def read(self, region: Region) -> Pixels:
        total = np.zeros(region.shape, self.dtype)
        for term in self.terms:
            ones = Constant(term.measurement.shape, self.dtype, 1.0)
            term.add_adjoint(ones, self.shape, region, total)
        return total


@dataclass(frozen=True)
class FoldedGradient(Derived):
    """``N x - b``: the gradient of squares, with ``N = sum_i weight_i A_i^T A_i`` and ``b = sum_i weight_i A_i^T y_i``.

    Inside a :class:`~halotile.tasks.image_task.Scope` the misfit of ``x`` is noted as well, less that of 0:
    ``x^T N x / 2 - b^T x``; not if ``records_misfit`` is False.
    """

    normal: Normal
    backprojection: Readable
    records_misfit: bool = True

    def read(self, region: Region) -> Pixels:
        # The normal operator first: for a computed image it reads b as well, in a wider region.
        gradient: NDArray[Any] = np.asarray(self.normal(self.image).read(region))
        back = self.backprojection.read(region)
        gradient -= back
        scope = Scope.current() if self.records_misfit else None
        for cell, core in enumerate(scope.cells if scope else ()):
            assert scope is not None
            if not core.inside(region):
                continue  # a strip that is folded at the rim: its cells are noted by the read that contains them
            inner = core.relative_to(region).slices
            value = total_of(_energy, gradient[inner], back[inner], self.image.read(core)) / 2
            scope.note(MISFIT, cell, 0, value)
        return gradient


def _energy(slope: NDArray[Any], back: NDArray[Any], image: NDArray[Any]) -> NDArray[Any]:
    """``(slope - b) x``."""
    slope -= back
    slope *= image
    return slope


def share_of(core: Region, image: Shape, measurement: Shape) -> Region:
    """The part of a measurement that corresponds to a part of the image: parts that cover the image cover the measurement.

    A measurement with other axes than the image is a single part.

    >>> share_of(Region((0, 2), (4, 7)), (4, 7), (2, 3))
    Region(start=(0, 0), stop=(2, 3))
    """
    if core == Region.whole(image):
        return Region.whole(measurement)
    return Region(
        tuple(a * m // n for a, n, m in zip(core.start, image, measurement, strict=True)),
        tuple(b * m // n for b, n, m in zip(core.stop, image, measurement, strict=True)),
    )


@dataclass(frozen=True)
class Measurement:
    """``y = A x + n`` with noise of variance ``1 / weight`` in each pixel; a weight of 0 stands for no measurement."""

    operator: Operator
    data: Readable  # finite
    weight: Readable
    number: int = 0


# Standard deviation in pixels of the Gaussian that counts are smoothed by for their noise: see docs/design/041.
SMOOTHING = 2.0


@dataclass(frozen=True)
class Weights(Derived):
    """``1 / σ²`` in each pixel of a measurement; 0 where it, or σ, is no number, or σ is 0."""

    sigma: Readable

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float64)  # in units of a flux, 1 / σ² may be no number of single precision

    def read(self, region: Region) -> Pixels:
        sigma = self.sigma.read(region).astype(np.float64)
        if (sigma < 0).any():
            raise InputError(
                f"the map of the noise has {float(np.nanmin(sigma)):.4g} among its pixels, and a standard deviation is not below 0. Write 0 or NaN where nothing "
                "was measured."
            )
        is_known = np.isfinite(self.image.read(region)) & np.isfinite(sigma) & (sigma > 0)
        weights: Array = np.divide(1, np.square(sigma), where=is_known, out=np.zeros(sigma.shape))
        return weights


@dataclass(frozen=True)
class CountNoise(Derived):
    """Standard deviation of counts: the root of their mean in a Gaussian of :data:`SMOOTHING` pixels, and of ``least`` counts at least."""

    least: float
    path: str  # of the counts, for messages

    def read(self, region: Region) -> Pixels:
        from scipy.ndimage import gaussian_filter  # late: plans of other jobs need none of it

        window = region.widen(math.ceil(4 * SMOOTHING)).clip(Region.whole(self.shape))
        counts = self.image.read(window).astype(np.float64)
        if (counts < 0).any():
            at = tuple(int(i) for i in window.start + np.argwhere(counts < 0)[0])
            raise InputError(
                f"{self.path} is below 0 at {at}, and fidelity: poisson is for counts. Subtract no background from them: write fidelity.background."
            )
        known = np.isfinite(counts)
        total, share = (
            gaussian_filter(part, SMOOTHING, mode="constant", truncate=4.0, axes=(-2, -1))
            for part in (np.where(known, counts, 0.0), known.astype(np.float64))
        )
        rate = np.maximum(np.divide(total, share, out=np.zeros(total.shape), where=share > 0), self.least)
        sigma: Array = np.sqrt(rate)[region.relative_to(window).slices]
        return sigma


@dataclass(frozen=True)
class Filled(Derived):
    """A measurement without its background, and with 0 where it is no number."""

    background: float = 0.0

    def read(self, region: Region) -> Pixels:
        pixels = self.image.read(region).astype(self.dtype) - self.dtype.type(self.background)
        filled: Array = np.nan_to_num(pixels, nan=0.0, posinf=0.0, neginf=0.0)
        return filled


@dataclass(frozen=True)
class Root(Derived):
    """``w^½``."""

    def read(self, region: Region) -> Pixels:
        root: Array = np.sqrt(self.image.read(region))
        return root
