"""The normal form of a stack: chosen where it can be, the same image and misfit, whatever the number of operators."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halotile.graphs.jobs.reconstruct.costs import Backprojection, Form, choose_form
from halotile.graphs.solvers.base import Problem
from halotile.graphs.solvers.cg import ConjugateGradients
from halotile.graphs.solvers.fista import Fista
from halotile.graphs.solvers.pgd import ProximalGradient
from halotile.storage.views import Constant
from halotile.tasks.denoisers.gaussian import Gaussian
from halotile.tasks.fidelities.poisson import Poisson
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.operators.composition import Composition
from halotile.tasks.operators.mask import Mask
from tests.cases import all_of
from tests.graphs.inline import InlineIterations
from tests.graphs.solving import Pixels, blurs, denoised_by, iterations_of, plugged, problem_of, scene, terms_of

pytestmark = pytest.mark.usefixtures("as_in_a_worker")

BOUNDARIES = ("circular", "reflect", "zero", "replicate")


def in_form(form: Form, plain: Problem, folder: Path, block: int) -> Problem:
    """A problem in the normal form, its backprojection stored."""
    zeros = Constant(plain.shape, plain.dtype)
    run = iterations_of(Backprojection(), plain.beginning_at(zeros), folder, block=block)
    assert len(list(run.run(1, lambda *_: False))) == 1
    back = run.image("b")
    return replace(
        plain, gradient=lambda x: form.gradient(x, back), normal=form.normal, misfit_of_zero=run.state.numbers["misfit"]
    )


def image_of(run: InlineIterations, iterations: int) -> Pixels:
    for _ in run.run(iterations, lambda *_: False):
        pass
    return read_all(run.image())


@pytest.mark.parametrize("boundary", all_of(BOUNDARIES, thorough=["zero", "replicate"]))
def test_the_normal_form_finds_the_image_of_the_plain_one(tmp_path: Path, boundary: str) -> None:
    image = scene()
    terms = terms_of(image, blurs(boundary))
    prior = plugged(denoised_by(Gaussian(sigma=0.7), image, 64, 64))
    plain = problem_of(image, terms, prior, 0.5)
    form = choose_form(terms, image.dtype, exact=False)
    assert form.folded is not None
    first = iterations_of(ProximalGradient(), plain, tmp_path / "plain")
    second = iterations_of(ProximalGradient(), in_form(form, plain, tmp_path / "b", 64), tmp_path / "normal")
    assert np.abs(image_of(first, 4) - image_of(second, 4)).max() < 2e-6
    for ours, theirs in zip(second.rows, first.rows, strict=True):
        assert ours["misfit"] == pytest.approx(theirs["misfit"], rel=1e-3)


@pytest.mark.parametrize("boundary", all_of(BOUNDARIES, thorough=["zero", "replicate"]))
def test_the_normal_form_has_the_same_bits_for_any_block(tmp_path: Path, boundary: str) -> None:
    image = scene()
    terms = terms_of(image, blurs(boundary))
    form = choose_form(terms, image.dtype, exact=False)
    images = []
    for block in (32, 96, 160):
        problem = in_form(form, problem_of(image, terms, step=0.5), tmp_path / f"b{block}", block)
        images.append(image_of(iterations_of(ProximalGradient(), problem, tmp_path / f"x{block}", block=block), 3))
    assert np.array_equal(images[0], images[1])
    assert np.array_equal(images[0], images[2])


def test_a_perfect_fit_of_large_numbers_is_no_divergence(tmp_path: Path) -> None:
    # The normal form tells the misfit as a difference of large numbers: near 0 it is all rounding.
    image = (1000 + 200 * scene()).astype("float32")
    terms = terms_of(image, (blurs("circular")[0],), noise=0.0)
    form = choose_form(terms, image.dtype, exact=False)
    problem = in_form(form, problem_of(image, terms, step=1.0), tmp_path / "b", 64)
    run = iterations_of(Fista(), problem, tmp_path / "x", block=160)
    found = image_of(run, 40)
    assert len(run.rows) == 40
    assert min(row["misfit"] for row in run.rows) >= 0
    assert np.abs(found - image).mean() < 1


def test_cg_works_in_the_normal_form(tmp_path: Path) -> None:
    image = scene().astype("float64")
    terms = terms_of(image, blurs("reflect"))
    plain = problem_of(image, terms)
    form = choose_form(terms, image.dtype, exact=False)
    first = image_of(iterations_of(ConjugateGradients(), plain, tmp_path / "plain"), 6)
    second = in_form(form, plain, tmp_path / "b", 64)
    assert np.allclose(first, image_of(iterations_of(ConjugateGradients(), second, tmp_path / "n"), 6), atol=1e-9)


def test_what_does_not_fold_stays_plain() -> None:
    image = scene()
    stack = blurs("reflect")
    mask = Mask(mask=InMemory(np.ones_like(image)))
    assert choose_form(terms_of(image, stack), image.dtype, exact=True).folded is None
    assert choose_form(terms_of(image, (*stack, mask)), image.dtype, exact=False).folded is None
    counts = tuple(replace(term, fidelity=Poisson()) for term in terms_of(image, stack))
    assert choose_form(counts, image.dtype, exact=False).folded is None


def test_exact_means_direct_convolutions() -> None:
    image = scene()
    terms = terms_of(image, blurs("reflect", (3, 31)))
    exact, fast = (choose_form(terms, image.dtype, exact=exact) for exact in (True, False))
    assert "plain, 3 operators" not in exact.describe()
    assert exact.describe() == "plain, 2 operators there and back; direct convolutions"
    assert fast.describe() == "normal, all operators in one kernel of 61 × 61; Fourier transforms"
    assert fast.reach > exact.reach


def test_a_plan_tells_of_convolutions_where_there_are_some() -> None:
    image = scene()
    mask = Mask(mask=InMemory(np.ones_like(image)))
    inside = Composition((mask, *blurs("reflect", (31,))))
    alone, within = (choose_form(terms_of(image, (o,)), image.dtype, exact=False) for o in (mask, inside))
    assert (alone.describe(), alone.is_fft) == ("plain, 1 operator there and back", False)
    assert within.describe() == "plain, 1 operator there and back; Fourier transforms where kernels are large"
    assert within.is_fft


def test_a_form_travels() -> None:
    image = scene((40, 40))
    terms = terms_of(image, blurs("reflect"))
    form = choose_form(terms, image.dtype, exact=False)
    again = pickle.loads(pickle.dumps(form))
    assert np.array_equal(read_all(again.normal(InMemory(image))), read_all(form.normal(InMemory(image))))
