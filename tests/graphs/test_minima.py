"""Images and norms that solvers come to: those of dense systems, of spectra, and of a program of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halotile.graphs.solvers.base import Problem, State
from halotile.graphs.solvers.lanczos import Lanczos, begun, is_spent
from halotile.storage.grid import Region
from halotile.tasks.denoisers.gaussian import Gaussian
from halotile.tasks.fidelities.poisson import Poisson
from halotile.tasks.operators.base import InMemory, Operator, read_all
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.composition import Composition
from halotile.tasks.operators.downsample import Downsample
from halotile.tasks.operators.mask import Mask
from halotile.tasks.operators.normal import Normal, weighted_adjoint
from halotile.tasks.priors.l1 import Sparse
from halotile.tasks.terms import FoldedGradient, Term
from tests.cases import all_of
from tests.graphs import solving
from tests.graphs.inline import InlineIterations

pytestmark = pytest.mark.usefixtures("as_in_a_worker", "without_fsync")

# --- conjugate gradients --------------------------------------------------------------------------


def masked(pixels: Any) -> Mask:
    return Mask(mask=InMemory(pixels))


def dense(problem: Problem) -> Any:
    """The normal operator as a matrix."""
    unit = np.eye(math.prod(problem.shape), dtype=problem.dtype).reshape(-1, *problem.shape)
    return np.array([read_all(problem.normal(InMemory(u))).ravel() for u in unit]).T


def test_iterations_of_cg_are_its_steps_and_end_at_the_least_misfit(tmp_path: Path) -> None:
    image = solving.scene((14, 12)).astype("float64")
    seen = (np.random.default_rng(3).random(image.shape) > 0.3).astype("float64")
    operators = (*solving.blurs("reflect", (3, 5)), masked(seen), Downsample(factor=2, boundary="reflect"))
    problem = solving.problem_of(image, solving.terms_of(image, operators))
    matrix: Any = dense(problem)
    right: Any = -1 * read_all(problem.gradient(problem.start)).ravel()
    x, r = np.zeros_like(right), right
    p = r
    run = solving.iterations_of(solving.solver_of("cg"), problem, tmp_path, block=32)
    for iteration in (1, 2, 3):
        step = (r @ r) / (p @ matrix @ p)
        x, r, before = x + step * p, r - step * (matrix @ p), r
        p = r + (r @ r) / (before @ before) * p
        solving.finished(run, iteration)
        assert np.allclose(read_all(run.image()).ravel(), x, atol=1e-10)
    assert [row["iteration"] for row in run.rows] == [0, 1, 2, 3], "0 is the start"
    list(run.run(200, lambda state, _: state.numbers["rr"] < 1e-24))
    assert np.allclose(read_all(run.image()).ravel(), np.linalg.solve(matrix, right), atol=1e-9)
    assert run.state.passes < 190


def run_cg(folder: Path, mask: Any, tol: float) -> tuple[InlineIterations, float]:
    """Iterations until they are done, and their last residual by numpy."""
    image = solving.scene((96, 80))
    problem = replace(solving.problem_of(image, solving.terms_of(image, (masked(mask(image)),))), tol=tol)
    run = solving.iterations_of(solving.solver_of("cg"), problem, folder)
    list(run.run(40, lambda _, row: run.solver.is_done(tol, row)))
    slope, first = (np.asarray(read_all(problem.gradient(at)), float) for at in (run.image(), problem.start))
    (term,) = solving.terms_of(image, (masked(mask(image)),))
    seen = np.asarray(read_all(term.operator.forward(run.image())), float)
    misfit = np.square(seen - term.measurement.read(Region.whole(image.shape))).sum() / 2
    assert all(row["misfit"] >= 0 for row in run.rows)
    if tol:
        assert run.rows[-1]["misfit"] == pytest.approx(misfit, rel=1e-4)
    return run, float(np.linalg.norm(slope) / np.linalg.norm(first))


def test_cg_tells_its_residual_and_computes_it_anew_before_it_ends(tmp_path: Path) -> None:
    run, residual = run_cg(tmp_path, lambda image: 0.5 + image, 1e-3)
    rows = run.rows
    assert len(rows) < 40
    assert [row["recomputed"] for row in rows[:2]] == [1.0, 0.0]
    assert rows[-1]["recomputed"] == 1.0
    assert rows[-1]["residual"] <= 1e-3 < rows[-3]["residual"]
    assert residual == pytest.approx(rows[-1]["residual"], rel=1e-3)


def test_cg_ends_where_rounding_keeps_its_residual(tmp_path: Path) -> None:
    seen = np.random.default_rng(0).random((96, 80)) > 0.4
    run, residual = run_cg(tmp_path, lambda image: (1 + 1e-4 * seen).astype("float32"), 0.0)
    assert 4 < len(run.rows) < 12
    assert run.rows[-1]["spent"] == run.rows[-1]["recomputed"] == 1.0
    assert residual == pytest.approx(run.rows[-1]["residual"], rel=1e-3)
    assert residual < 1e-6


@pytest.mark.parametrize(("carried", "spent"), [(9.9e-4, 0.0), (1e-8, 1.0)])
def test_a_residual_that_just_misses_its_goal_is_not_spent(carried: float, spent: float) -> None:
    """It is where what was carried of it was rounding."""
    sums = dict.fromkeys(("rr", "pq", "rq", "qq", "misfit"), 1.01e-3**2)
    known = {**sums, "first": 1.0, "residual": carried, "recomputed": 0.0, "computed": 1.05e-3}
    image = solving.scene((8, 8))
    problem = solving.problem_of(image, solving.terms_of(image, solving.blurs("zero")))
    assert solving.solver_of("cg").next(problem, State(9, known), sums).numbers["spent"] == spent


@pytest.mark.parametrize(("off", "spent"), [(0.0, 1.0), (1e-3, 0.0)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_start_that_explains_everything_is_the_end(tmp_path: Path, dtype: str, off: float, spent: float) -> None:
    image = solving.scene().astype(dtype)
    operators, terms = solving.blurs("circular"), solving.terms_of(image, solving.blurs("circular"), noise=0)
    noise = np.random.default_rng(3).standard_normal(image.shape).astype(dtype)
    seen, weights = [term.measurement for term in terms], tuple(term.weight for term in terms)
    normal = Normal(operators=operators, weights=weights).with_engine(image.dtype, exact=False)  # type: ignore[arg-type]
    back = InMemory(read_all(weighted_adjoint(operators, seen, weights, image.shape)))
    squares = [np.square(read_all(each).astype(np.float64)).sum() for each in seen]
    problem = replace(
        solving.problem_of(image, terms).beginning_at(InMemory(image + np.asarray(off, dtype) * noise)),
        gradient=lambda x: FoldedGradient(x, normal, back),
        normal=normal,
        misfit_of_zero=float(np.dot(weights, squares)) / 2,
    )
    run = solving.iterations_of(solving.solver_of("cg"), problem, tmp_path)
    list(run.run(1, lambda *_: True))  # the pass before the first iteration tells it
    assert run.state.numbers["spent"] == spent


# --- solvers with a prior -------------------------------------------------------------------------


def test_solvers_with_a_prior_find_the_same_minimum_and_fista_takes_its_steps() -> None:
    image = solving.scene((14, 12)).astype("float64")
    weights = 0.6 + 0.4 * np.random.default_rng(3).random(image.shape)  # no pixel goes unseen
    operators = (*solving.blurs("reflect", (3,)), masked(weights))
    problem = replace(solving.problem_of(image, solving.terms_of(image, operators)), prior=Sparse(weight=0.05))
    matrix, right = dense(problem), -1 * read_all(problem.gradient(problem.start)).ravel()
    problem = replace(problem, step_size=(step_size := 1 / float(np.linalg.eigvalsh(matrix)[-1])))
    x = z = np.zeros(image.size)
    t = 1.0
    for _ in range(5):
        ahead = z - step_size * (matrix @ z - right)
        before, x = x, np.sign(ahead) * np.maximum(np.abs(ahead) - 0.05 * step_size, 0)
        last, t = t, (1 + math.sqrt(1 + 4 * t * t)) / 2
        z = x + (last - 1) / t * (x - before)
    assert np.allclose(solving.in_memory(solving.solver_of("fista"), problem, 5)[0].ravel(), x, atol=1e-12)
    pgd, fista, admm = (
        solving.in_memory(each, problem, 200)[0] for each in map(solving.solver_of, ("pgd", "fista", "admm"))
    )
    step = read_all(solving.solver_of("pgd").step(problem, State(), lambda *_: InMemory(fista)).images["x"])
    assert np.abs(step - fista).max() < 1e-9, "it does not move any more"
    assert max(np.abs(pgd - fista).max(), np.abs(admm - fista).max()) < 1e-8


def test_the_step_for_counts_follows_the_curvature_where_it_begins(tmp_path: Path) -> None:
    image = solving.scene((96, 80))
    counts = InMemory(np.random.default_rng(0).poisson(image * 100).astype("float32") / 100)
    terms = tuple(
        Term(operator, counts, 1.0, Poisson(), InMemory(image)) for operator in solving.blurs("reflect", (3,))
    )
    problem = solving.problem_of(image, terms, solving.prior_of("tv", image, 96, 96))
    square = solving.norm_of(problem, tmp_path / "norm")
    assert square > 3  # of a blur alone it is 1: with that the steps would be too long
    problem = replace(problem, start=InMemory(image), step_size=0.5 / square)
    misfits = [
        row["misfit"]
        for row in solving.finished(solving.iterations_of(solving.solver_of("fista"), problem, tmp_path / "x"), 25).rows
    ]
    assert max(misfits) < 1.2 * misfits[0]


@pytest.mark.parametrize("weight", [0.5, 40.0])
def test_gradient_descent_goes_as_slowly_as_its_prior_is_steep(tmp_path: Path, weight: float) -> None:
    image = solving.scene((96, 80))
    prior = solving.plugged(solving.denoised_by(Gaussian(sigma=0.7), image, 96, 96), weight)
    problem = solving.problem_of(image, solving.terms_of(image, solving.blurs("reflect", (3,))), prior)
    problem = replace(problem, step_size=1 / (solving.norm_of(problem, tmp_path / "norm") + prior.steepness()))
    changes = [
        row["change"]
        for row in solving.finished(solving.iterations_of(solving.solver_of("gd"), problem, tmp_path / "x"), 12).rows
    ]
    assert changes[-1] < 0.2 * changes[0]


@pytest.mark.parametrize("solver", ["gd", "pgd", "fista", "admm"])
def test_to_begin_with_a_perfect_fit_is_no_divergence(tmp_path: Path, solver: str) -> None:
    image = solving.scene((64, 64))
    terms = solving.terms_of(image, (masked(0 * image + 1),))
    problem = solving.problem_of(image, terms, solving.prior_of("tv", image, 96, 96), 0.5).beginning_at(
        terms[0].measurement
    )
    assert (
        solving.finished(solving.iterations_of(solving.solver_of(solver), problem, tmp_path), 8).rows[0]["misfit"] == 0
    )


# --- the norm, which steps follow from ------------------------------------------------------------

SHAPE = (96, 80)


def stack(*operators: Operator, shape: tuple[int, int] = SHAPE) -> Problem:
    image = solving.scene(shape)
    return solving.problem_of(image, solving.terms_of(image, operators))


def circular(*kernels: solving.Pixels) -> tuple[Problem, float]:
    """Convolutions have their spectrum."""
    power = sum(abs(np.fft.fft2(each, SHAPE)) ** 2 / (number + 1) for number, each in enumerate(kernels))
    return stack(*(Blur(kernel=each) for each in kernels)), float(np.max(power))


def along_the_rim(boundary: str) -> tuple[Problem, float]:
    """Operators without a spectrum, as a matrix."""
    seen = masked((np.random.default_rng(3).random((20, 16)) > 0.3).astype("float64"))
    parts = Composition((seen, Blur(kernel=np.ones((9, 9)) / 81, boundary=boundary)))
    small = stack(*solving.blurs(boundary, (3, 5)), parts, shape=(20, 16))
    matrix = dense(replace(small, dtype=np.dtype("float64")))
    return small, float(np.linalg.eigvalsh((matrix + matrix.T) / 2)[-1])


def weights() -> tuple[Problem, float]:
    numbers = np.random.default_rng(5).random(SHAPE).astype("float32")
    return stack(masked(numbers)), float(numbers.max()) ** 2


NORMS: dict[str, Callable[[], tuple[Problem, float]]] = {
    "gaussians": lambda: circular(solving.kernel(5), solving.kernel(9)),
    "no light": lambda: circular(np.random.default_rng(5).standard_normal((9, 7))),
    "an edge": lambda: circular(np.array([[-1.0, 0.0, 1.0]])),
    "weights": weights,
    **{rule: partial(along_the_rim, rule) for rule in ("reflect", "replicate", "zero")},
}


@pytest.mark.parametrize("name", all_of(NORMS, thorough=["replicate", "zero"]))
def test_the_norm_is_bounded_from_above_and_not_by_much(tmp_path: Path, name: str) -> None:
    """So that a step size is safe, and hardly too small."""
    given, largest = NORMS[name]()
    assert largest <= solving.norm_of(given, tmp_path) <= 1.02 * largest


def test_it_ends_where_nothing_new_is_left(tmp_path: Path) -> None:
    given = stack(masked(np.full((32, 32), 2, "float32")), shape=(32, 32))
    run = solving.iterations_of(Lanczos(), begun(given), tmp_path, block=32)
    assert len(list(run.run(15, lambda state, _: is_spent(state)))) <= 3
    assert 4 <= solving.norm_of(given, tmp_path / "again") <= 4.01
