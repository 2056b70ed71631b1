"""The job ``reconstruct`` as plain frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from halotile.graphs.jobs.sections import STRICT, Auto, DenoiserChoice, NamedChoice, ReadPath, TiledJob


@dataclass(frozen=True, kw_only=True)
class OperatorChoice(NamedChoice):
    """An operator by name, with its options, and what it measured."""

    registry: ClassVar[str] = "operators"
    attribute: ClassVar[str] = "OPERATOR"
    hidden: ClassVar[tuple[str, ...]] = ("normal",)

    name: str
    """Name of a file in halotile.tasks.operators or of a plug-in."""
    data: str
    """The measurement: anything that can be the input of a denoising job."""
    noise_sigma: float = 1.0
    """Standard deviation of the noise of the measurement: it counts by 1 / noise_sigma²."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that operator; an operator itself, from Python, stands under ``operator``."""

    @classmethod
    def written(cls, declared: type) -> type:
        """Return an operator's options, with paths in place of arrays, and its measurement beside them."""
        from halotile.graphs.rules.operator_options import as_written

        return as_written(declared, cls)  # type: ignore[arg-type]  # a class is hashable


@dataclass(frozen=True, kw_only=True)
class FidelityChoice:
    """How the misfit to a measurement counts."""

    __pydantic_config__ = STRICT

    name: Literal["l2", "poisson"] = "l2"
    """l2: squares, for Gaussian noise; poisson: counts."""
    background: float = 0.0
    """poisson: counts that are there without the image."""


@dataclass(frozen=True, kw_only=True)
class PriorChoice:
    """What is known of the image."""

    __pydantic_config__ = STRICT

    name: Literal["none", "pnp", "tv", "l1"] = "none"
    """pnp: a denoiser (with solver gd: RED); tv: total variation; l1: sparse."""
    denoiser: DenoiserChoice | Any = None
    """pnp: a denoiser as a denoising job has it."""
    sigma: float | None = None
    """pnp: the noise level that the denoiser is told."""
    weight: float = 1.0
    """How much the prior counts, against 1 / noise_sigma² for a measurement; not for pnp with a prox."""
    iterations: int = 40
    """tv: dual steps of one prox."""


@dataclass(frozen=True, kw_only=True)
class SolverChoice:
    """How the image is found."""

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
    """Iterations between two checkpoints, up to 4. More than 1: a sweep makes so many, and the images between are not stored."""
    keep_state: bool = False
    """Keep the solver's images after the last iteration, so that more can follow."""


@dataclass(frozen=True, kw_only=True)
class Reconstruction(TiledJob):
    """A whole reconstruction job."""

    kind: ClassVar[str] = "reconstruct"

    operators: tuple[OperatorChoice, ...]
    fidelity: FidelityChoice = field(default_factory=FidelityChoice)
    prior: PriorChoice = field(default_factory=PriorChoice)
    solver: SolverChoice = field(default_factory=SolverChoice)
    shape: tuple[int, ...] | Auto = "auto"
    """Shape of the image in pixels; auto: that of the measurements."""
    start: ReadPath | None = None
    """An image to begin with; left out: zeros."""
    reference: ReadPath | None = None
    """The true image, to tell the PSNR of every iteration."""
    exact: bool = False
    """Keep to the plain form and to direct convolutions."""
    fuse: bool | Auto = "auto"
    """Operators and denoiser in one pass over the image; auto: where little is computed twice for it."""
