"""Checks and rules for the values and parts of a reconstruction job."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from halotile.errors import HalotileError
from halotile.graphs.jobs.reconstruct.job import Bounds, FidelityChoice, OperatorChoice, PriorChoice, SolverChoice
from halotile.graphs.kinds.base import Check
from halotile.graphs.kinds.sections import Output, Run, Tile
from halotile.graphs.plans.choices import make_chosen
from halotile.graphs.rules.values import Above, AtLeast, Faults, Named, check_depth, check_sizes, filled
from halotile.graphs.words import shown
from halotile.registry import find, names
from halotile.tasks.fidelities.base import Fidelity
from halotile.tasks.options import Auto

if TYPE_CHECKING:
    from halotile.graphs.solvers.base import SolverTraits


def _shape(value: Any) -> str | None:
    if value != "auto" and len(value) < 2:
        return f"{shown(value)} is no image; write its length along each axis, such as [4096, 4096]"
    return AtLeast(1)(value)


def _tolerance(value: float) -> str | None:
    if value >= 1:
        return (
            f"{shown(value)} would end the solver at once: it is relative to the norm of the image; write less than 1, such as "
            "1.0e-4, or 0 to do all iterations"
        )
    return AtLeast(0)(value)


def _checkpoint_interval(value: int) -> str | None:
    if value > MOST_PER_PASS:
        return (
            f"{value} is too large: so many iterations reach far beyond each block, and cost more computation than they save; "
            f"write at most {MOST_PER_PASS}"
        )
    return AtLeast(1)(value)


# Most iterations of a solver in one pass. At a periodic rim each reads results of the one before across the edge.
MOST_PER_PASS = 4

SIGMAS = (1e-15, 1e15)  # noise levels whose inverse square can be used in single precision


@dataclass(frozen=True)
class NoiseLevel(Above):
    """A check that the inverse square of a number can be used in computations."""

    def __call__(self, value: float | str) -> str | None:
        """Return the fault of the value, if it has one."""
        low, high = SIGMAS
        if isinstance(value, str) or value <= 0 or not math.isfinite(value) or low <= value <= high:
            return super().__call__(value)
        return (
            f"{value:g} counts by 1 / noise_sigma², which single precision cannot compute with; write a number from {low:g} to "
            f"{high:g}, and give the data in units that suit it"
        )


CHECKS: Mapping[tuple[str, str], Check] = {
    ("operators", "data"): filled,
    ("operators", "noise_sigma"): NoiseLevel(0),
    ("fidelity", "name"): Named("fidelity", "fidelities"),
    ("prior", "name"): Named("prior", "priors"),
    ("solver", "name"): Named("solver", "solvers", without=SolverChoice.hidden),
    ("solver", "iterations"): AtLeast(1),
    ("solver", "step"): Above(0),
    ("solver", "tol"): _tolerance,
    ("solver", "checkpoint_every"): _checkpoint_interval,
    ("", "shape"): _shape,
    ("", "start"): filled,
    ("", "reference"): filled,
}


def _some_operator(operators: tuple[OperatorChoice, ...]) -> Faults:
    if not operators:
        yield (("operators",), "is empty; write what was measured: - {name: blur, kernel: psf.npy, data: y.zarr}")


def _sizes_of_image(output: Output, tile: Tile) -> Faults:
    yield from check_sizes(output, tile, 1)


def _depth_of_prior(tile: Tile, prior: PriorChoice) -> Faults:
    try:
        denoiser = make_chosen(prior).computed_by()
    except (HalotileError, AttributeError):
        return  # reported where the prior is checked
    if denoiser is not None:
        yield from check_depth(tile, denoiser)


def _traits(name: str) -> SolverTraits | None:
    """Return the declared traits of a solver; None for a name that no job may write, which the check of names reports."""
    if name not in names("solvers"):
        return None
    traits: SolverTraits = find("solvers", name).SOLVER.traits
    return traits if traits.for_jobs else None


def _solvers(fits: Callable[[SolverTraits], bool]) -> str:
    """Return the names of solvers that fit, as text."""
    fitting = [name for name in names("solvers") if (traits := _traits(name)) and fits(traits)]
    return " or ".join(filter(None, [", ".join(fitting[:-1]), *fitting[-1:]]))


def _prior_of_solver(prior: PriorChoice, solver: SolverChoice) -> Faults:
    traits = _traits(solver.name)
    if traits is None:
        return
    prior_by, kind = traits.prior_by, cast(Any, PriorChoice.declared(prior.name))
    if prior.name == "matern":
        yield (
            ("prior", "name"),
            "matern, which is for job: samples; write that, and posterior.count: 0 for its mean alone",
        )
    elif prior_by is None and kind.is_there:
        yield (
            ("prior", "name"),
            f"{prior.name} with solver {solver.name}, which knows no prior; write none, or solver.name: "
            f"{_solvers(lambda traits: traits.prior_by is not None)}",
        )
    elif not kind.weighs_prox and prior.options.get("weight", kind.weight) != kind.weight and prior_by == "prox":
        yield (
            ("prior", "weight"),
            f"a denoiser in the place of a prox has no weight, and solver {solver.name} has a prox; leave it out, or "
            f"write solver.name: {_solvers(lambda traits: traits.prior_by == 'slope')}",
        )


def _step_of_solver(solver: SolverChoice) -> Faults:
    traits = _traits(solver.name)
    if traits is not None and solver.step != "auto" and not traits.takes_steps:
        yield (("solver", "step"), f"{solver.step:g}, and {solver.name} finds its own; write auto, or leave it out")


def _checkpoints_of_solver(solver: SolverChoice, fuse: bool | Auto) -> Faults:
    every, remainder = solver.checkpoint_every, solver.iterations % max(1, solver.checkpoint_every)
    traits = _traits(solver.name)
    if traits is None or not 1 < every <= MOST_PER_PASS:
        return
    position = ("solver", "checkpoint_every")
    if not traits.is_memoryless:
        yield (
            position,
            f"{every} with solver {solver.name}, which has to know more of an iteration than its image; write 1, or "
            f"solver.name: {_solvers(lambda traits: traits.is_memoryless)}",
        )
    elif fuse is False:
        yield (
            position,
            f"{every} with fuse: false, and a gradient that is stored needs a stored image; write 1, or fuse: auto",
        )
    elif remainder:
        yield (
            ("solver", "iterations"),
            f"{solver.iterations} is no multiple of solver.checkpoint_every {every}: the image of the last one would not "
            f"be stored; write {solver.iterations + every - remainder}",
        )


def _fidelity_of_solver(fidelity: FidelityChoice, solver: SolverChoice) -> Faults:
    traits = _traits(solver.name)
    if traits is None or not traits.needs_squares or _kind_of(fidelity.name).is_square:
        return
    squares = [name for name in FidelityChoice.accepted() if _kind_of(name).is_square]
    yield (
        ("fidelity", "name"),
        f"{fidelity.name} with solver {solver.name}, which works on {' and '.join(squares)} alone; write "
        f"{squares[0]}, or solver.name: {_solvers(lambda traits: not traits.needs_squares)}",
    )


def _counts_of_solver(fidelity: FidelityChoice, solver: SolverChoice) -> Faults:
    traits = _traits(solver.name)
    if traits is not None and traits.multiplies and not _kind_of(fidelity.name).is_of_counts:
        counts = [name for name in FidelityChoice.accepted() if _kind_of(name).is_of_counts]
        yield (
            ("fidelity", "name"),
            f"{fidelity.name} with solver {solver.name}, which needs a fidelity of counts; write {counts[0]}, or "
            f"solver.name: {_solvers(lambda traits: not traits.multiplies)}",
        )


def _subsets_of_solver(operators: tuple[OperatorChoice, ...], solver: SolverChoice) -> Faults:
    traits, subsets = _traits(solver.name), solver.options.get("subsets")
    if traits is not None and traits.by_subsets and isinstance(subsets, int) and subsets > len(operators) > 0:
        yield (
            ("solver", "subsets"),
            f"{subsets}, and there are {len(operators)} operators; write at most as many, or leave it out for one each",
        )


def _start_of_fidelity(fidelity: FidelityChoice, start: str | None) -> Faults:
    if _kind_of(fidelity.name).needs_start and start is None:
        yield (
            ("fidelity", "name"),
            f"{fidelity.name} divides by what the image gives, and zeros give nothing; write start: FILE, an image above 0, such as "
            "one with the mean of the measurements everywhere",
        )


def _bounds_of_image(fidelity: FidelityChoice, solver: SolverChoice, bounds: Bounds | Auto) -> Faults:
    traits = _traits(solver.name)
    if traits is None or bounds == "auto":
        return
    low, high = bounds
    if not traits.takes_steps:
        fitting = _solvers(lambda traits: traits.takes_steps)
        yield (
            ("bounds",),
            f"{shown(bounds)}, but {solver.name} takes no bounds; write auto, or solver.name: {fitting}",
        )
    elif _kind_of(fidelity.name).is_of_counts and (low is None or low < 0):
        yield ("bounds",), f"{shown(bounds)}, and counts come from images of 0 or more; write [0, null]"
    elif low is not None and high is not None and low >= high:
        yield ("bounds",), f"{shown(bounds)} leaves no value; write the smaller number first, such as [0, 1]"


def _kind_of(name: str) -> type[Fidelity]:
    """Return the class of a data fidelity, whose declarations are read."""
    return FidelityChoice.declared(name)


def _maps_of_noise(operators: tuple[OperatorChoice, ...], fidelity: FidelityChoice) -> Faults:
    for number, level in enumerate(choice.noise_sigma for choice in operators):
        if isinstance(level, str) and (level == "auto" or not _kind_of(fidelity.name).is_square):
            why = "is for job: samples" if level == "auto" else f"is a map, and fidelity {fidelity.name} has none"
            yield ("operators", number, "noise_sigma"), f"{level} {why}; write a number"


def _exact_engines(operators: tuple[OperatorChoice, ...], exact: bool) -> Faults:
    for number, choice in enumerate(operators):
        if exact and choice.options.get("engine") == "fft":
            yield (
                ("operators", number, "engine"),
                "fft with exact: true, which wants direct sums; leave one of them out",
            )


def _every_block(run: Run) -> Faults:
    """Yield settings of a run that have no meaning for a solver."""
    if run.on_bad_block != "fail":
        yield (
            ("run", "on_bad_block"),
            f"{run.on_bad_block}, and an iteration needs every block of the one before; write fail, or leave it out",
        )
    if run.on_nan != "propagate":
        yield (
            ("run", "on_nan"),
            f"{run.on_nan}, and a solver stops by itself at numbers that are not finite; leave it out",
        )


def _planes(tile: Tile) -> Faults:
    if tile.axes != "auto" and tile.axes.lower() != "yx":
        yield ("tile", "axes"), f"{shown(tile.axes)}, and operators work on planes; write yx, or leave it out"


OPERATOR_RULES = (_some_operator, _exact_engines)

RULES = (
    *OPERATOR_RULES,
    _sizes_of_image,
    _depth_of_prior,
    _prior_of_solver,
    _step_of_solver,
    _checkpoints_of_solver,
    _fidelity_of_solver,
    _counts_of_solver,
    _subsets_of_solver,
    _start_of_fidelity,
    _bounds_of_image,
    _maps_of_noise,
    _every_block,
    _planes,
)
