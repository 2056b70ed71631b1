"""Conjugate gradients end where only rounding is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from halotile.graphs.solvers.base import Problem, State
from halotile.graphs.solvers.cg import ConjugateGradients
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.normal import Normal, weighted_adjoint
from halotile.tasks.terms import FoldedGradient, Term
from tests.graphs.solving import blurs, iterations_of, problem_of, scene, terms_of

pytestmark = pytest.mark.usefixtures("as_in_a_worker")

Pixels = NDArray[Any]


@pytest.mark.parametrize(("carried", "spent"), [(9.9e-4, 0.0), (1e-8, 1.0)])
def test_a_residual_that_just_misses_its_goal_is_not_spent(carried: float, spent: float) -> None:
    """It is where what was carried of it was rounding."""
    sums = dict.fromkeys(("rr", "pq", "rq", "qq", "misfit"), 1.01e-3**2)
    known = {**sums, "first": 1.0, "residual": carried, "recomputed": 0.0, "computed": 1.05e-3}
    image = scene((8, 8))
    problem = problem_of(image, terms_of(image, blurs("zero")))
    assert ConjugateGradients().next(problem, State(9, known), sums).numbers["spent"] == spent


@pytest.mark.parametrize(("off", "spent"), [(0.0, 1.0), (1e-3, 0.0)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_start_that_explains_everything_leaves_nothing_to_do(
    tmp_path: Path, dtype: str, off: float, spent: float
) -> None:
    image = scene().astype(dtype)
    terms = terms_of(image, blurs("circular"), noise=0)
    start = InMemory(image + np.asarray(off, dtype) * noise_like(image))
    problem = folded(problem_of(image, terms).beginning_at(start), terms)
    run = iterations_of(ConjugateGradients(), problem, tmp_path)
    list(run.run(1, lambda *_: True))  # the pass before the first iteration tells it
    assert run.state.numbers["spent"] == spent


def noise_like(image: Pixels) -> Pixels:
    """Numbers of mean 0 and deviation 1."""
    return np.random.default_rng(3).standard_normal(image.shape).astype(image.dtype)


def folded(problem: Problem, terms: tuple[Term, ...]) -> Problem:
    """The same in the normal form."""
    operators = tuple(term.operator for term in terms if isinstance(term.operator, Blur))
    weights = tuple(term.weight for term in terms)
    normal = Normal(operators=operators, weights=weights).with_engine(problem.dtype, exact=False)
    seen = [term.measurement for term in terms]
    back = InMemory(read_all(weighted_adjoint(operators, seen, weights, problem.shape)))
    squares = [np.square(read_all(term.measurement).astype(np.float64)).sum() for term in terms]
    return replace(
        problem,
        gradient=lambda x: FoldedGradient(x, normal, back),
        normal=normal,
        misfit_of_zero=float(np.dot(weights, squares)) / 2,
    )
