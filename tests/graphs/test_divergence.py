"""Numbers that grow without bound: the run ends, and the image from before they grew is there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from halotile.errors import Diverged
from halotile.graphs.solvers.admm import Admm
from halotile.graphs.solvers.base import Problem, Solver
from halotile.graphs.solvers.fista import Fista
from halotile.graphs.solvers.gd import GradientDescent
from halotile.graphs.solvers.pgd import ProximalGradient
from halotile.graphs.solvers.sgd import SubsetDescent
from halotile.graphs.solvers.svrg import ReducedVariance
from halotile.storage.arrays import open_source
from halotile.storage.rim import Pixels
from halotile.tasks.denoisers.gaussian import Gaussian
from halotile.tasks.denoisers.tv import TotalVariation
from halotile.tasks.fidelities.poisson import Poisson
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.priors.base import Prior
from halotile.tasks.priors.l1 import Sparse
from halotile.tasks.priors.tv import Variation
from halotile.tasks.terms import Term
from tests.cases import all_of, thorough
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


@pytest.mark.parametrize("solver", [GradientDescent(), ProximalGradient(), Fista()], ids=["gd", "pgd", "fista"])
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
    run.problem = replace(run.problem, step_size=2.2 / steepest)  # such a mistake is multiplied by -1.2 each time
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
    run.vectors.aside("x").rename(run.vectors.path("x", 4))  # as if killed after the checkpoint and before the move
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
    words = rf"It grew from the start: the image it began with is better than that of iteration \d in {tmp_path}"
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


def counts(shape: tuple[int, int] = (40, 48)) -> tuple[NDArray[Any], NDArray[Any]]:
    """Counts of a few points behind a blur, 0 in most pixels, and an even start."""
    points, rng = np.zeros(shape, "float32"), np.random.default_rng(5)
    points[rng.integers(0, shape[0], 5), rng.integers(0, shape[1], 5)] = 100
    (blur,) = blurs("circular", (3,))
    seen = rng.poisson(np.asarray(read_all(blur.forward(InMemory(points))), float)).astype("float32")
    return seen, np.full(shape, seen.mean(), "float32")


def problem_of_counts(seen: NDArray[Any], start: NDArray[Any], prior: Prior | None = None) -> Problem:
    terms = (Term(blurs("circular", (3,))[0], InMemory(seen), 1.0, Poisson(), InMemory(start)),)
    problem = problem_of(start, terms, prior).beginning_at(InMemory(start))
    return replace(problem, bounds=(0.0, None), adapts=True)


def richardson_lucy(seen: NDArray[Any], image: NDArray[Any], iterations: int) -> NDArray[Any]:
    (blur,) = blurs("circular", (3,))
    x = image.astype(float)
    for _ in range(iterations):
        ratio = seen / np.maximum(read_all(blur.forward(InMemory(x))), 1e-6)
        x *= read_all(blur.adjoint(InMemory(ratio), x.shape))
    return x


def divergence_from(seen: NDArray[Any], image: NDArray[Any]) -> float:
    """Kullback and Leibler's divergence of the counts from what the blur makes of an image."""
    rate = np.maximum(read_all(blurs("circular", (3,))[0].forward(InMemory(image.astype(float)))), 1e-6)
    logs = np.where(seen > 0, seen * np.log(np.maximum(seen, 1) / rate), 0)
    return float((logs - seen + rate).sum())


@pytest.mark.parametrize(
    "solver", [ProximalGradient(), thorough(GradientDescent()), Fista()], ids=["pgd", "gd", "fista"]
)
def test_counts_that_are_mostly_0_give_what_richardson_and_lucy_make_of_them(tmp_path: Path, solver: Solver) -> None:
    seen, start = counts()
    assert np.mean(seen == 0) > 0.93
    run = of_counts(solver, seen, start, tmp_path, 48)
    told = list(run.run(40, lambda *_: False))
    assert run.judged()
    objectives = [row["misfit"] for row in run.rows]
    assert len(told) > len(objectives) == 40  # some steps were taken back
    assert objectives == sorted(objectives, reverse=True)
    image = read_all(run.image())
    assert image.min() >= 0
    assert image.sum() == pytest.approx(seen.sum(), rel=1e-2)
    best = divergence_from(seen, richardson_lucy(seen, start, 40))
    assert divergence_from(seen, image) < 1.05 * best < 0.05 * divergence_from(seen, start)


def of_counts(solver: Solver, seen: NDArray[Any], start: NDArray[Any], folder: Path, block: int) -> InlineIterations:
    copies = {"x": solver.vectors["x"] + 1}
    problem = problem_of_counts(seen, start)
    return iterations_of(solver, problem, folder, block=block, shard=48 if block == 48 else 16, copies=copies)


def test_counts_in_blocks_have_the_bits_of_whole_images(tmp_path: Path) -> None:
    seen, start = counts()
    images = []
    for block in (16, 32):
        run = of_counts(Fista(), seen, start, tmp_path / f"{block}", block)
        assert len(list(run.run(8, lambda *_: False))) > 8  # some steps were taken back
        images.append(read_all(run.image()))
    assert np.array_equal(images[0], images[1])


def test_counts_with_a_prior_keep_their_objective_falling(tmp_path: Path) -> None:
    seen, start = counts()
    problem = problem_of_counts(seen, start, Sparse(weight=0.5))
    run = iterations_of(Fista(), problem, tmp_path, shard=48, copies={"x": 4})
    list(run.run(12, lambda *_: False))
    objectives = [row["objective"] for row in run.rows]
    assert objectives == sorted(objectives, reverse=True)
    assert objectives[-1] < 0.5 * objectives[0]


def test_a_step_that_was_taken_back_stays_so_over_a_stop(tmp_path: Path) -> None:
    seen, start = counts()
    whole = of_counts(Fista(), seen, start, tmp_path / "whole", 48)
    assert len(list(whole.run(8, lambda *_: False))) > 8
    while (parts := of_counts(Fista(), seen, start, tmp_path / "parts", 48)).done < 8:
        next(iter(parts.run(8, lambda *_: False)))
    np.testing.assert_array_equal(read_all(parts.image()), read_all(whole.image()))


ONE_LEAP: dict[str, Solver] = {
    "gd": GradientDescent(), "pgd": ProximalGradient(), "fista": Fista(), "admm": Admm(), "sgd": SubsetDescent(subsets=1),
    "svrg": ReducedVariance(subsets=1),
}  # fmt: skip


@pytest.mark.parametrize("per_pass", [1, thorough(2)])
@pytest.mark.parametrize("solver", all_of(ONE_LEAP, thorough=["gd", "svrg"]))
def test_an_image_that_is_worse_than_the_start_is_no_result(tmp_path: Path, solver: str, per_pass: int) -> None:
    is_memoryless = ONE_LEAP[solver].traits.is_memoryless
    terms = terms_of(IMAGE, blurs("circular"))
    problem = problem_of(IMAGE, terms, step=3 * WILD)
    if is_memoryless and per_pass > 1:
        problem = replace(problem, per_pass=per_pass, plain_gradient=problem.gradient)
    run = iterations_of(ONE_LEAP[solver], problem, tmp_path, halo=80)
    list(run.run(per_pass, lambda *_: False))  # it has one row, and nothing that grew
    with pytest.raises(Diverged, match=r"its image has a misfit of .*, and the start has one of .* smaller"):
        run.judged()
    run.problem = replace(problem, step_size=CALM / 3)
    calm = iterations_of(ONE_LEAP[solver], run.problem, tmp_path / "calm", halo=80)
    list(calm.run(per_pass, lambda *_: False))
    assert calm.judged()


def test_a_denoiser_may_leave_a_perfect_start_and_not_zeros(tmp_path: Path) -> None:
    prior = plugged(denoised_by(Gaussian(sigma=0.7), IMAGE, 32, 32))
    problem = problem_of(IMAGE, terms_of(IMAGE, blurs("circular"), noise=0), prior, step=0.02)
    given = iterations_of(ProximalGradient(), problem.beginning_at(InMemory(IMAGE)), tmp_path / "given")
    list(given.run(3, lambda *_: False))
    assert given.judged()
    zeros = iterations_of(ProximalGradient(), replace(problem, step_size=WILD), tmp_path / "zeros")
    list(zeros.run(1, lambda *_: False))
    with pytest.raises(Diverged, match="its image has a misfit"):
        zeros.judged()
