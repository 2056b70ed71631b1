"""The job ``reconstruct`` as plain frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from halotile.graphs.kinds.sections import NamedChoice, TiledJob
from halotile.tasks.options import Auto, ReadPath

Bounds = tuple[float | None, float | None]
"""Least and greatest value of a pixel; None for none."""


@dataclass(frozen=True, kw_only=True)
class OperatorChoice(NamedChoice):
    """An operator by name, with its options and its measurement."""

    registry: ClassVar[str] = "operators"
    attribute: ClassVar[str] = "OPERATOR"
    hidden: ClassVar[tuple[str, ...]] = ("normal",)

    name: str
    """Name of a file in halotile.tasks.operators or of a plug-in."""
    data: ReadPath
    """The measurement: anything that can be the input of a denoising job."""
    noise_sigma: float = 1.0
    """Standard deviation of the noise of the measurement, which is weighted by 1 / noise_sigma²."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that operator; an operator object from a script is under ``operator``."""

    @classmethod
    def nested(cls, written: Mapping[str, Any]) -> Self:
        """Return an operator inside another one, which has no measurement of its own."""
        return cls.of({"data": "", **written})


@dataclass(frozen=True, kw_only=True)
class FidelityChoice(NamedChoice):
    """The data fidelity of the measurements by name, with its options."""

    registry: ClassVar[str] = "fidelities"
    attribute: ClassVar[str] = "FIDELITY"

    name: str = "l2"
    """Name of a file in halotile.tasks.fidelities or of a plug-in."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that fidelity."""


@dataclass(frozen=True, kw_only=True)
class PriorChoice(NamedChoice):
    """The prior of the image by name, with its options."""

    registry: ClassVar[str] = "priors"
    attribute: ClassVar[str] = "PRIOR"

    name: str = "none"
    """Name of a file in halotile.tasks.priors or of a plug-in."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that prior."""


@dataclass(frozen=True, kw_only=True)
class SolverChoice(NamedChoice):
    """The solver by name, its iterations, and its options."""

    registry: ClassVar[str] = "solvers"
    attribute: ClassVar[str] = "SOLVER"
    hidden: ClassVar[tuple[str, ...]] = ("lanczos",)

    name: str = "pgd"
    """Name of a file in halotile.graphs.solvers or of a plug-in."""
    iterations: int = 20
    """Iterations at most."""
    step: float | Auto = "auto"
    """Step size; auto: 1 / |A|²."""
    tol: float = 0.0
    """Stop when the image changes by less than this, relative to its length."""
    checkpoint_every: int = 1
    """Iterations between two checkpoints, up to 4. More than 1: one pass makes so many, and the images between are not stored."""
    keep_state: bool = False
    """Keep the solver's images after the last iteration, so that more can follow."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that solver."""


@dataclass(frozen=True, kw_only=True)
class Reconstruction(TiledJob):
    """A reconstruction job."""

    kind: ClassVar[str] = "reconstruct"

    operators: tuple[OperatorChoice, ...]
    fidelity: FidelityChoice = field(default_factory=FidelityChoice)
    prior: PriorChoice = field(default_factory=PriorChoice)
    solver: SolverChoice = field(default_factory=SolverChoice)
    shape: tuple[int, ...] | Auto = "auto"
    """Shape of the image in pixels; auto: that of the measurements."""
    start: ReadPath | None = None
    """An image to start from; zeros if left out."""
    reference: ReadPath | None = None
    """The true image, to report the PSNR of every iteration: with a peak of 1 for floats, of the range for integer types."""
    bounds: Bounds | Auto = "auto"
    """Least and greatest value of a pixel, null for none; auto: 0 and none for counts, otherwise none."""
    exact: bool = False
    """Use the plain form of the gradient and direct convolutions only."""
    fuse: bool | Auto = "auto"
    """Compute operators and denoiser in one pass over the image; auto: where this computes little twice."""


def shortened(job: Reconstruction, rows: int) -> Reconstruction:
    """Return a job that ends after at most so many rows of figures, one for each pass of the solver."""
    iterations = min(job.solver.iterations, rows * job.solver.checkpoint_every)
    return replace(job, solver=replace(job.solver, iterations=iterations))
