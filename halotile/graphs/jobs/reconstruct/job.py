"""The job ``reconstruct`` as plain frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from halotile.graphs.kinds.sections import STRICT, Auto, DenoiserChoice, NamedChoice, ReadPath, TiledJob


@dataclass(frozen=True, kw_only=True)
class OperatorChoice(NamedChoice):
    """An operator by name, with its options and its measurement."""

    registry: ClassVar[str] = "operators"
    attribute: ClassVar[str] = "OPERATOR"
    hidden: ClassVar[tuple[str, ...]] = ("normal",)

    name: str
    """Name of a file in halotile.tasks.operators or of a plug-in."""
    data: str
    """The measurement: anything that can be the input of a denoising job."""
    noise_sigma: float = 1.0
    """Standard deviation of the noise of the measurement, which is weighted by 1 / noise_sigma²."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that operator; an operator object from a script is under ``operator``."""

    @classmethod
    def written(cls, declared: type) -> type:
        """Return the dataclass of an operator's options, with paths in place of arrays, and of its measurement."""
        from halotile.graphs.rules.operator_options import as_written

        return as_written(declared, cls)  # type: ignore[arg-type]  # a class is hashable


@dataclass(frozen=True, kw_only=True)
class FidelityChoice:
    """The data fidelity of the measurements."""

    __pydantic_config__ = STRICT

    name: Literal["l2", "poisson"] = "l2"
    """l2: least squares, for Gaussian noise; poisson: counts."""
    background: float = 0.0
    """poisson: counts without the image."""


@dataclass(frozen=True, kw_only=True)
class PriorChoice:
    """The prior of the image."""

    __pydantic_config__ = STRICT

    name: Literal["none", "pnp", "tv", "l1"] = "none"
    """pnp: a denoiser (with solver gd: RED); tv: total variation; l1: sparse."""
    denoiser: DenoiserChoice | Any = None
    """pnp: a denoiser as in a denoising job."""
    sigma: float | None = None
    """pnp: the noise level that the denoiser is given."""
    weight: float = 1.0
    """Weight of the prior, against 1 / noise_sigma² for a measurement; not for pnp with a prox."""
    iterations: int = 40
    """tv: dual steps of one prox."""


@dataclass(frozen=True, kw_only=True)
class SolverChoice:
    """The solver, and its iterations."""

    __pydantic_config__ = STRICT

    name: str = "pgd"
    """Name of a file in halotile.graphs.solvers."""
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
    """The true image, to report the PSNR of every iteration."""
    exact: bool = False
    """Use the plain form of the gradient and direct convolutions only."""
    fuse: bool | Auto = "auto"
    """Compute operators and denoiser in one pass over the image; auto: where this computes little twice."""
