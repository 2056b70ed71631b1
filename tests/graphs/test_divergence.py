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
from halotile.graphs.solvers.base import Solver
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
from tests.graphs import solving
from tests.graphs.inline import InlineIterations
from tests.graphs.solving import blurs, denoised_by, finished, iterations_of, problem_of, solver_of, terms_of

pytestmark = pytest.mark.usefixtures("without_fsync")

CALM, WILD = 0.3, 10.0
"""Steps that get somewhere, and that do not."""
TO_GO_BACK = {"x": 3}
IMAGE = solving.scene((64, 80))


def diverging(folder: Path, solver: Solver, calm: int) -> tuple[InlineIterations, list[Pixels]]:
    """Iterations that went well for a while, and are about to take steps that are too long; and their images."""
    problem = problem_of(IMAGE, terms_of(IMAGE, blurs("circular")), step=CALM)
    run = iterations_of(solver, problem, folder, copies=TO_GO_BACK)
    images = [read_all(run.image()) for _ in run.run(calm, lambda *_: False)]
    run.problem = replace(problem, step_size=WILD)
    return run, images


def run_wild(run: InlineIterations, words: str) -> None:
    with pytest.raises(Diverged, match=words):
        list(run.run(60, lambda *_: False))


@pytest.mark.parametrize("solver", ["gd", "pgd", "fista"])
def test_the_image_from_before_it_grew_is_kept(tmp_path: Path, solver: str) -> None:
    run, images = diverging(tmp_path, solver_of(solver), 4)
    run_wild(run, r"misfit grew from .* image of iteration \d, before it grew, .* smaller solver\.step")
    assert run.aside in (3, 4)  # with momentum it may grow a little before the steps do
    np.testing.assert_array_equal(read_all(open_source(run.vectors.aside("x"))), images[run.aside - 1])


def test_slow_growth_is_found_where_it_goes_on(tmp_path: Path) -> None:
    run, _ = diverging(tmp_path, solver_of("gd"), 4)
    # For images that are the same everywhere.
    steepest = sum(term.weight for term in terms_of(IMAGE, blurs("circular")))
    run.problem = replace(run.problem, step_size=2.2 / steepest)  # such a mistake is multiplied by -1.2 each time
    run_wild(run, r"in \d+ iterations the misfit grew")
    assert 1.3 < run.rows[-1]["misfit"] / run.rows[-2]["misfit"] < 1.5
    assert run.aside is not None
    assert run.aside < run.state.passes - 5


def test_it_is_kept_over_a_stop_and_not_for_long_where_it_grew_once(tmp_path: Path) -> None:
    run, images = diverging(tmp_path, solver_of("gd"), 4)
    finished(run, 6)
    assert run.aside == 4
    shutil.copytree(tmp_path, calm := tmp_path.with_name("calm"))
    shutil.rmtree(run.vectors.path("x", 4))
    run.vectors.aside("x").rename(run.vectors.path("x", 4))  # as if killed after the checkpoint and before the move
    again = iterations_of(solver_of("gd"), run.problem, tmp_path, copies=TO_GO_BACK)
    run_wild(again, "image of iteration 4, before it grew")
    np.testing.assert_array_equal(read_all(open_source(again.vectors.aside("x"))), images[3])
    problem = replace(run.problem, step_size=CALM)
    run = iterations_of(solver_of("gd"), problem, calm, copies=TO_GO_BACK)
    assert run.vectors.aside("x").exists()
    finished(run, 9)
    assert run.aside is None
    assert not run.vectors.aside("x").exists()


def test_growth_from_the_start_is_told_to_be_worse_than_that(tmp_path: Path) -> None:
    run, _ = diverging(tmp_path, solver_of("gd"), 0)
    run_wild(run, rf"grew from the first iteration: the start image is better than that of iteration \d in {tmp_path}")
    assert run.state.passes > 0
    assert np.isfinite(read_all(run.image())).all()


def total_variation(x: Pixels) -> float:
    down, right = (np.diff(x, axis=axis, append=x.take([-1], axis=axis)) for axis in (0, 1))
    return 0.05 * float(np.hypot(down, right).sum())


OBJECTIVES: dict[str, tuple[Callable[[], Prior], Callable[[Pixels], float]]] = {
    "l1": (lambda: Sparse(weight=0.02), lambda x: 0.02 * float(np.abs(x).sum())),
    "tv": (lambda: Variation(denoised=denoised_by(TotalVariation(strength=1.0, iterations=20), IMAGE, 32, 32), weight=0.05), total_variation),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_objective_has_the_value_of_the_prior_and_falls(tmp_path: Path, name: str) -> None:
    """What the rows tell, beside the misfit, is what numpy makes of the image that the iteration began with."""
    make, value = OBJECTIVES[name]
    problem = problem_of(IMAGE, terms_of(IMAGE, blurs("reflect", (3,))), make(), CALM)
    run = iterations_of(solver_of("pgd"), problem, tmp_path, block=32)
    images = [read_all(run.image()).astype(float) for _ in run.run(4, lambda *_: False)]
    for before, row in zip(images, run.rows[1:], strict=False):
        assert row["objective"] - row["misfit"] == pytest.approx(value(before), rel=1e-6)
    check_falls(run.rows, "objective")


def check_falls(rows: list[dict[str, float]], name: str) -> list[float]:
    values = [row[name] for row in rows]
    assert values == sorted(values, reverse=True)
    return values


# --- counts, whose steps are taken back where they are too long -----------------------------------

BLUR = blurs("circular", (3,))[0]


def counts(shape: tuple[int, int] = (40, 48)) -> tuple[NDArray[Any], NDArray[Any]]:
    """Counts of a few points behind a blur, 0 in most pixels, and an even start."""
    points, rng = np.zeros(shape, "float32"), np.random.default_rng(5)
    points[rng.integers(0, shape[0], 5), rng.integers(0, shape[1], 5)] = 100
    seen = rng.poisson(np.asarray(read_all(BLUR.forward(InMemory(points))), float)).astype("float32")
    return seen, np.full(shape, seen.mean(), "float32")


def of_counts(solver: Solver, folder: Path, block: int = 48, prior: Prior | None = None) -> InlineIterations:
    seen, start = counts()
    terms = (Term(BLUR, InMemory(seen), 1.0, Poisson(), InMemory(start)),)
    problem = problem_of(start, terms, prior).beginning_at(InMemory(start))
    problem = replace(problem, bounds=(0.0, None), adapts=True)
    copies = {"x": solver.vectors["x"] + 1}
    return iterations_of(solver, problem, folder, block=block, shard=48 if block == 48 else 16, copies=copies)


def rate(image: Any) -> NDArray[Any]:
    return np.maximum(read_all(BLUR.forward(InMemory(image))), 1e-6)


def richardson_lucy(seen: NDArray[Any], image: NDArray[Any], iterations: int) -> NDArray[Any]:
    x = image.astype(float)
    for _ in range(iterations):
        x *= read_all(BLUR.adjoint(InMemory(seen / rate(x)), x.shape))
    return x


def divergence_from(seen: NDArray[Any], image: NDArray[Any]) -> float:
    """Kullback and Leibler's divergence of the counts from what the blur makes of an image."""
    expected = rate(image.astype(float))
    logs = np.where(seen > 0, seen * np.log(np.maximum(seen, 1) / expected), 0)
    return float((logs - seen + expected).sum())


@pytest.mark.parametrize("solver", ["pgd", thorough("gd"), "fista"])
def test_counts_that_are_mostly_0_give_what_richardson_and_lucy_make_of_them(tmp_path: Path, solver: str) -> None:
    seen, start = counts()
    assert np.mean(seen == 0) > 0.93
    run = of_counts(solver_of(solver), tmp_path)
    told = list(run.run(40, lambda *_: False))
    assert run.judged()
    assert len(told) > len(check_falls(run.rows, "misfit")) == 40  # some steps were taken back
    image = read_all(run.image())
    assert image.min() >= 0
    assert image.sum() == pytest.approx(seen.sum(), rel=1e-2)
    best = divergence_from(seen, richardson_lucy(seen, start, 40))
    assert divergence_from(seen, image) < 1.05 * best < 0.05 * divergence_from(seen, start)


def test_counts_in_blocks_or_with_stops_have_the_bits_of_whole_images(tmp_path: Path) -> None:
    images = []
    for block in (16, 32, 48):
        run = of_counts(solver_of("fista"), tmp_path / f"{block}", block)
        assert len(list(run.run(8, lambda *_: False))) > 8  # some steps were taken back
        images.append(read_all(run.image()))
    while (parts := of_counts(solver_of("fista"), tmp_path / "parts")).done < 8:
        next(iter(parts.run(8, lambda *_: False)))
    images.append(read_all(parts.image()))
    assert all(np.array_equal(images[0], other) for other in images[1:])


def test_counts_with_a_prior_keep_their_objective_falling(tmp_path: Path) -> None:
    run = finished(of_counts(solver_of("fista"), tmp_path, prior=Sparse(weight=0.5)), 12)
    values = check_falls(run.rows, "objective")
    assert values[-1] < 0.5 * values[0]


# --- images that are worse than the start ---------------------------------------------------------

SUBSETS = {name: solver_of(name, subsets=1) for name in ("sgd", "svrg")}
ONE_LEAP: dict[str, Solver] = {**{name: solver_of(name) for name in ("gd", "pgd", "fista", "admm")}, **SUBSETS}


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
    prior = solving.plugged(denoised_by(Gaussian(sigma=0.7), IMAGE, 32, 32))
    problem = problem_of(IMAGE, terms_of(IMAGE, blurs("circular"), noise=0), prior, step=0.02)
    given = finished(iterations_of(solver_of("pgd"), problem.beginning_at(InMemory(IMAGE)), tmp_path / "given"), 40)
    assert given.judged()
    misfits = [row["misfit"] for row in given.rows]
    assert sorted(misfits) == misfits
    assert misfits[-1] > 50 * misfits[1]
    zeros = iterations_of(solver_of("pgd"), replace(problem, step_size=WILD), tmp_path / "zeros")
    with pytest.raises(Diverged, match="its image has a misfit"):
        finished(zeros, 1).judged()
