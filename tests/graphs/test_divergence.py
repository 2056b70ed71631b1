"""Numbers that grow without bound: the run ends, and the image from before they grew is there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halotile.errors import Diverged
from halotile.graphs.solvers.base import Solver
from halotile.graphs.solvers.fista import Fista
from halotile.graphs.solvers.gd import GradientDescent
from halotile.graphs.solvers.pgd import ProximalGradient
from halotile.storage.arrays import open_source
from halotile.storage.rim import Pixels
from halotile.tasks.denoisers.gaussian import Gaussian
from halotile.tasks.denoisers.tv import TotalVariation
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.priors.base import Prior
from halotile.tasks.priors.l1 import Sparse
from halotile.tasks.priors.tv import Variation
from tests.graphs.inline import InlineIterations
from tests.graphs.solving import blurs, denoised_by, iterations_of, plugged, problem_of, scene, terms_of

CALM, WILD = 0.3, 10.0
"""Steps that get somewhere, and that do not."""
TO_GO_BACK = {"x": 3}
IMAGE = scene((64, 80))


def diverging(folder: Path, solver: Solver, calm: int) -> tuple[InlineIterations, list[Pixels]]:
    """Iterations that went well for a while, and are about to take steps that are too long; and their images."""
    problem = problem_of(IMAGE, terms_of(IMAGE, blurs("circular")), step=CALM)
    run = iterations_of(solver, problem, folder, copies=TO_GO_BACK)
    images = [read_all(run.image()) for _ in run.run(calm, lambda *_: False)]
    run.problem = replace(problem, step_size=WILD)
    return run, images


@pytest.mark.parametrize(
    "solver", [GradientDescent(), ProximalGradient(), Fista()], ids=["gd", "pgd", "fista"]
)
def test_the_image_from_before_it_grew_is_kept(tmp_path: Path, solver: Solver) -> None:
    run, images = diverging(tmp_path, solver, 4)
    with pytest.raises(
        Diverged, match=r"misfit grew from .* image of iteration \d, before it grew, .* smaller solver\.step"
    ):
        list(run.run(60, lambda *_: False))
    assert run.aside in (3, 4)  # with momentum it may grow a little before the steps do
    np.testing.assert_array_equal(read_all(open_source(run.vectors.aside("x"))), images[run.aside - 1])


def test_slow_growth_is_found_where_it_goes_on(tmp_path: Path) -> None:
    run, _ = diverging(tmp_path, GradientDescent(), 4)
    steepest = sum(
        term.weight for term in terms_of(IMAGE, blurs("circular"))
    )  # for images that are the same everywhere
    run.problem = replace(
        run.problem, step_size=2.2 / steepest
    )  # such a mistake is multiplied by -1.2 each time
    with pytest.raises(Diverged, match=r"in \d+ iterations the misfit grew"):
        list(run.run(60, lambda *_: False))
    ratio = run.rows[-1]["misfit"] / run.rows[-2]["misfit"]
    assert 1.3 < ratio < 1.5
    assert run.aside is not None
    assert run.aside < run.state.passes - 5


def test_an_image_may_leave_a_perfect_start_for_what_its_denoiser_likes_better(tmp_path: Path) -> None:
    terms = terms_of(IMAGE, blurs("circular"), noise=0)
    prior = plugged(denoised_by(Gaussian(sigma=0.7), IMAGE, 32, 32))
    problem = problem_of(IMAGE, terms, prior, step=0.02).beginning_at(InMemory(IMAGE))
    rows = list(iterations_of(ProximalGradient(), problem, tmp_path).run(40, lambda *_: False))
    misfits = [row["misfit"] for row in rows]
    assert len(misfits) == 40
    assert sorted(misfits) == misfits
    assert misfits[-1] > 50 * misfits[1]


def test_it_is_kept_over_a_stop(tmp_path: Path) -> None:
    run, images = diverging(tmp_path, GradientDescent(), 4)
    list(run.run(6, lambda *_: False))
    assert run.aside == 4
    shutil.rmtree(run.vectors.path("x", 4))
    run.vectors.aside("x").rename(
        run.vectors.path("x", 4)
    )  # as if killed after the checkpoint and before the move
    again = iterations_of(GradientDescent(), run.problem, tmp_path, copies=TO_GO_BACK)
    with pytest.raises(Diverged, match="image of iteration 4, before it grew"):
        list(again.run(60, lambda *_: False))
    np.testing.assert_array_equal(read_all(open_source(again.vectors.aside("x"))), images[3])


def test_what_grows_once_is_not_kept_for_long(tmp_path: Path) -> None:
    run, _ = diverging(tmp_path, GradientDescent(), 3)
    list(run.run(5, lambda *_: False))
    assert run.vectors.aside("x").exists()
    run.problem = replace(run.problem, step_size=CALM)
    list(run.run(8, lambda *_: False))
    assert run.aside is None
    assert not run.vectors.aside("x").exists()


def test_what_grows_from_the_start_is_told_to_be_worse_than_that(tmp_path: Path) -> None:
    run, _ = diverging(tmp_path, GradientDescent(), 0)
    words = (
        rf"It grew from the start: the image it began with is better than that of iteration \d in {tmp_path}"
    )
    with pytest.raises(Diverged, match=words):
        list(run.run(60, lambda *_: False))
    assert run.state.passes > 0
    assert np.isfinite(read_all(run.image())).all()


def test_the_objective_has_the_length_of_every_pixel(tmp_path: Path) -> None:
    check_objective(Sparse(weight=0.02), lambda x: 0.02 * float(np.abs(x).sum()), tmp_path)


def test_the_objective_has_the_total_variation(tmp_path: Path) -> None:
    def value(x: Pixels) -> float:
        down, right = (np.diff(x, axis=axis, append=x.take([-1], axis=axis)) for axis in (0, 1))
        return 0.05 * float(np.hypot(down, right).sum())

    denoised = denoised_by(TotalVariation(strength=1.0, iterations=20), IMAGE, 32, 32)
    check_objective(Variation(denoised=denoised, weight=0.05), value, tmp_path)


def check_objective(prior: Prior, value: Callable[[Pixels], float], folder: Path) -> None:
    """What the rows tell, beside the misfit, is what numpy makes of the image that the iteration began with."""
    problem = problem_of(IMAGE, terms_of(IMAGE, blurs("reflect", (3,))), prior, CALM)
    run = iterations_of(ProximalGradient(), problem, folder, block=32)
    images = [read_all(run.image()).astype(float) for _ in run.run(4, lambda *_: False)]
    for before, row in zip(images, run.rows[1:], strict=False):
        assert row["objective"] - row["misfit"] == pytest.approx(value(before), rel=1e-6)
    objectives = [row["objective"] for row in run.rows]
    assert objectives == sorted(objectives, reverse=True)
