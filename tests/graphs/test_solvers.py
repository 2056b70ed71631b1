"""Solvers on disk: the bits of the same iterations in memory, however the image is cut; and what they converge to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halotile.graphs.iterations.iterate import Target
from halotile.graphs.jobs.reconstruct.costs import Form
from halotile.graphs.solvers.admm import Admm
from halotile.graphs.solvers.base import State
from halotile.graphs.solvers.cg import ConjugateGradients
from halotile.graphs.solvers.fista import Fista
from halotile.graphs.solvers.gd import GradientDescent
from halotile.graphs.solvers.pgd import ProximalGradient
from halotile.graphs.solvers.sgd import SubsetDescent
from halotile.graphs.solvers.svrg import ReducedVariance
from halotile.registry import names
from halotile.storage.grid import Region
from halotile.tasks.block import BlockRunner
from halotile.tasks.denoisers.dncnn import DnCNN
from halotile.tasks.denoisers.gaussian import Gaussian
from halotile.tasks.denoisers.tv import TotalVariation
from halotile.tasks.fidelities.poisson import Poisson
from halotile.tasks.image_task import View
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.operators.downsample import Downsample
from halotile.tasks.operators.mask import Mask
from halotile.tasks.priors.base import Prior
from halotile.tasks.priors.l1 import Sparse
from halotile.tasks.priors.none import NoPrior
from halotile.tasks.priors.tv import Variation
from halotile.tasks.terms import Term
from tests.cases import all_of, thorough
from tests.graphs.solving import (
    blurs,
    denoised_by,
    in_memory,
    iterations_of,
    norm_of,
    plugged,
    problem_of,
    scene,
    terms_of,
)
from tests.support import dncnn_weights

pytestmark = pytest.mark.usefixtures("as_in_a_worker")

SOLVERS: dict[str, Any] = {
    "gd": GradientDescent(),
    "pgd": ProximalGradient(),
    "fista": Fista(),
    "admm": Admm(),
    "cg": ConjugateGradients(),
    "sgd": SubsetDescent(subsets=2, decay=0.1),
    "svrg": ReducedVariance(),
}
STEP = 0.5


def prior_of(name: str, image: Any, block: int, tile: int, folder: Path) -> Prior:
    if name == "none":
        return NoPrior()
    if name == "l1":
        return Sparse(weight=0.02)
    if name == "tv":
        return Variation(
            denoised=denoised_by(TotalVariation(strength=1.0, iterations=6), image, block, tile), weight=0.05
        )
    if name == "gaussian":
        return plugged(denoised_by(Gaussian(sigma=0.7), image, block, tile), 0.3)
    weights = dncnn_weights(folder / "w.safetensors")
    return plugged(denoised_by(DnCNN(depth=5, width=8, weights=str(weights)), image, block, tile), 0.3)


def test_every_solver_is_tried() -> None:
    assert {*SOLVERS, "osem", "lanczos"} == set(names("solvers"))  # osem in test_ordered_subsets.py


@pytest.mark.parametrize("boundary", ["circular", thorough("reflect"), thorough("zero")])
@pytest.mark.parametrize("prior", ["none", thorough("l1"), thorough("tv"), thorough("gaussian"), "dncnn"])
@pytest.mark.parametrize("solver", [thorough("gd"), "pgd", "fista", "admm", thorough("sgd"), "svrg"])
def test_fused_passes_have_the_bits_of_whole_images(tmp_path: Path, solver: str, prior: str, boundary: str) -> None:
    image = scene()
    terms = terms_of(image, blurs(boundary))
    whole = problem_of(image, terms, prior_of(prior, image, 1000, 1000, tmp_path), STEP)
    expected, _ = in_memory(SOLVERS[solver], whole, 3)
    for block, tile in [(64, 64), (128, 40)]:
        problem = problem_of(image, terms, prior_of(prior, image, block, tile, tmp_path), STEP)
        run = iterations_of(SOLVERS[solver], problem, tmp_path / f"{block}", block=block, shard=64)
        assert len(list(run.run(3, lambda *_: False))) == 3
        assert np.array_equal(read_all(run.image()), expected)
    assert not np.array_equal(expected, 0 * expected)


@pytest.mark.parametrize(
    ("tile", "boundary"),
    [
        (24, "reflect"),
        (50, "circular"),
        *(thorough(50, rule) for rule in ("reflect", "zero")),
        *(thorough(512, rule) for rule in ("circular", "reflect", "zero")),
    ],
)
def test_tiles_of_any_size_in_one_pass_or_two_have_the_bits_of_whole_images(
    tmp_path: Path, tile: int, boundary: str
) -> None:
    # For very small tiles torch takes another routine: their windows are drawn out to what is safe.
    image = scene((300, 270))
    terms = terms_of(image, blurs(boundary))
    whole = problem_of(image, terms, prior_of("dncnn", image, 1000, 1000, tmp_path), STEP)
    expected, _ = in_memory(ProximalGradient(), whole, 2)
    problem = problem_of(image, terms, prior_of("dncnn", image, 128, tile, tmp_path), STEP)
    form = Form(terms, apart=True)
    apart = replace(problem, gradient=form.map("gradient"), normal=form.map("normal"))
    for name, each in (("one", problem), ("two", apart)):
        folder, view = tmp_path / name, View(reach=16)
        run = iterations_of(ProximalGradient(), each, folder, block=128, shard=128, own_view=view)
        assert len(list(run.run(2, lambda *_: False))) == 2
        assert np.array_equal(read_all(run.image()), expected)


@pytest.mark.parametrize("solver", all_of(SOLVERS, thorough=["gd", "pgd", "sgd", "fista", "svrg"]))
def test_sums_do_not_depend_on_how_shards_are_grouped(tmp_path: Path, solver: str) -> None:
    image = scene()
    problem = problem_of(image, terms_of(image, blurs("reflect")), step=STEP)
    told, images = [], []
    for block in (32, 64, 160):
        run = iterations_of(
            SOLVERS[solver], problem, tmp_path / str(block), block=block, target=Target(InMemory(image))
        )
        told.append([{k: v for k, v in row.items() if k != "seconds"} for row in run.run(4, lambda *_: False)])
        images.append(read_all(run.image()))
    assert told[0] == told[1] == told[2]
    assert np.array_equal(images[0], images[1])
    assert np.array_equal(images[0], images[2])
    assert {"iteration", "change", "psnr"} <= told[0][0].keys()


def dense(problem: Any) -> tuple[Any, Any]:
    """The normal operator and what it is to give, as a matrix and a vector."""
    shape = problem.shape
    unit = np.eye(int(np.prod(shape)), dtype=problem.dtype).reshape(-1, *shape)
    matrix = np.array([read_all(problem.normal(InMemory(u))).ravel() for u in unit]).T
    return matrix, -1 * read_all(problem.gradient(problem.start)).ravel()


def small_problem(dtype: str) -> Any:
    image = scene((14, 12)).astype(dtype)
    mask = (np.random.default_rng(3).random(image.shape) > 0.3).astype(dtype)
    operators = (*blurs("reflect", (3, 5)), Mask(mask=InMemory(mask)), Downsample(factor=2, boundary="reflect"))
    return problem_of(image, terms_of(image, operators))


def test_cg_finds_the_least_misfit(tmp_path: Path) -> None:
    problem = small_problem("float64")
    matrix, right = dense(problem)
    run = iterations_of(ConjugateGradients(), problem, tmp_path, block=32)
    for _ in run.run(200, lambda state, _: state.numbers["rr"] < 1e-24):
        pass
    assert np.allclose(read_all(run.image()).ravel(), np.linalg.solve(matrix, right), atol=1e-9)
    assert run.state.passes < 190


@pytest.mark.parametrize("iterations", [1, 3])
def test_iterations_of_cg_are_its_steps(tmp_path: Path, iterations: int) -> None:
    problem = small_problem("float64")
    matrix, right = dense(problem)
    x, r = np.zeros_like(right), right
    p = r
    for _ in range(iterations):
        step = (r @ r) / (p @ matrix @ p)
        x, r, before = x + step * p, r - step * (matrix @ p), r
        p = r + (r @ r) / (before @ before) * p
    run = iterations_of(ConjugateGradients(), problem, tmp_path, block=32)
    rows = list(run.run(iterations, lambda *_: False))
    assert [row["iteration"] for row in rows] == list(range(iterations + 1)), "0 is the start"
    assert np.allclose(read_all(run.image()).ravel(), x, atol=1e-10)


def test_solvers_with_a_prior_find_the_same_minimum() -> None:
    image = scene((14, 12)).astype("float64")
    weights = 0.6 + 0.4 * np.random.default_rng(3).random(image.shape)  # no pixel goes unseen
    operators = (*blurs("reflect", (3,)), Mask(mask=InMemory(weights)))
    problem = replace(problem_of(image, terms_of(image, operators)), prior=Sparse(weight=0.05))
    largest = float(np.linalg.eigvalsh(dense(problem)[0])[-1])
    problem = replace(problem, step_size=1 / largest)
    images = {name: in_memory(SOLVERS[name], problem, 200)[0] for name in ("pgd", "fista", "admm")}
    step = read_all(ProximalGradient().step(problem, State(), lambda *_: InMemory(images["fista"])).images["x"])
    assert np.abs(step - images["fista"]).max() < 1e-9, "it does not move any more"
    assert np.abs(images["pgd"] - images["fista"]).max() < 1e-8
    assert np.abs(images["admm"] - images["fista"]).max() < 1e-8


def test_the_step_for_counts_follows_the_curvature_where_it_begins(tmp_path: Path) -> None:
    image = scene((96, 80))
    counts = InMemory(np.random.default_rng(0).poisson(image * 100).astype("float32") / 100)
    terms = tuple(Term(operator, counts, 1.0, Poisson(), InMemory(image)) for operator in blurs("reflect", (3,)))
    problem = problem_of(image, terms, prior_of("tv", image, 96, 96, tmp_path))
    square = norm_of(problem, tmp_path / "norm")
    assert square > 3  # of a blur alone it is 1: with that the steps would be too long
    run = iterations_of(Fista(), replace(problem, start=InMemory(image), step_size=0.5 / square), tmp_path / "x")
    assert len(list(run.run(25, lambda *_: False))) == 25
    misfits = [row["misfit"] for row in run.rows]
    assert max(misfits) < 1.2 * misfits[0]


@pytest.mark.parametrize("weight", [0.5, 40.0])
def test_gradient_descent_goes_as_slowly_as_its_prior_is_steep(tmp_path: Path, weight: float) -> None:
    image = scene((96, 80))
    denoiser_prior = plugged(denoised_by(Gaussian(sigma=0.7), image, 96, 96), weight)
    problem = problem_of(image, terms_of(image, blurs("reflect", (3,))), denoiser_prior)
    step = 1 / (norm_of(problem, tmp_path / "norm") + denoiser_prior.steepness())
    run = iterations_of(GradientDescent(), replace(problem, step_size=step), tmp_path / "x")
    assert len(list(run.run(12, lambda *_: False))) == 12
    changes = [row["change"] for row in run.rows]
    assert changes[-1] < 0.2 * changes[0]


def test_cg_tells_its_residual_and_computes_it_anew_before_it_ends(tmp_path: Path) -> None:
    image = scene((96, 80))
    terms = terms_of(image, (Mask(mask=InMemory(0.5 + image)),))
    problem = replace(problem_of(image, terms), tol=1e-3)
    run = iterations_of(ConjugateGradients(), problem, tmp_path)
    rows = list(run.run(40, lambda _, row: run.solver.is_done(1e-3, row)))
    assert len(rows) < 40
    assert [row["recomputed"] for row in rows[:2]] == [1.0, 0.0]
    assert rows[-1]["recomputed"] == 1.0
    assert rows[-1]["residual"] <= 1e-3 < rows[-3]["residual"]
    slope, first = (np.asarray(read_all(problem.gradient(at)), float) for at in (run.image(), problem.start))
    assert np.linalg.norm(slope) / np.linalg.norm(first) == pytest.approx(rows[-1]["residual"], rel=1e-3)
    (term,) = terms
    misfit = (
        np.square(
            np.asarray(read_all(term.operator.forward(run.image())), float)
            - term.measurement.read(Region.whole(image.shape))
        ).sum()
        / 2
    )
    assert rows[-1]["misfit"] == pytest.approx(misfit, rel=1e-4)
    assert all(row["misfit"] >= 0 for row in rows)


def test_cg_ends_where_rounding_keeps_its_residual(tmp_path: Path) -> None:
    image = scene((96, 80))
    seen = np.random.default_rng(0).random(image.shape) > 0.4
    weights = (1 + 1e-4 * seen).astype("float32")
    problem = problem_of(image, terms_of(image, (Mask(mask=InMemory(weights)),)))
    run = iterations_of(ConjugateGradients(), problem, tmp_path)
    rows = list(run.run(40, lambda _, row: run.solver.is_done(0.0, row)))
    assert 4 < len(rows) < 12
    assert rows[-1]["spent"] == rows[-1]["recomputed"] == 1.0
    slope, first = (np.asarray(read_all(problem.gradient(at)), float) for at in (run.image(), problem.start))
    assert np.linalg.norm(slope) / np.linalg.norm(first) == pytest.approx(rows[-1]["residual"], rel=1e-3)
    assert rows[-1]["residual"] < 1e-6
    assert all(row["misfit"] >= 0 for row in rows)


@pytest.mark.parametrize("solver", ["gd", "pgd", "fista", "admm"])
def test_to_begin_with_a_perfect_fit_is_no_divergence(tmp_path: Path, solver: str) -> None:
    image = scene((64, 64))
    terms = terms_of(image, (Mask(mask=InMemory(0 * image + 1)),))
    (term,) = terms
    problem = problem_of(image, terms, prior_of("tv", image, 64, 64, tmp_path), STEP)
    run = iterations_of(SOLVERS[solver], problem.beginning_at(term.measurement), tmp_path / "x")
    assert len(list(run.run(8, lambda *_: False))) == 8
    assert run.rows[0]["misfit"] == 0


def test_iterations_end_when_the_image_is_at_rest(tmp_path: Path) -> None:
    image = scene()
    problem = problem_of(image, terms_of(image, blurs("reflect")), step=STEP)
    run = iterations_of(ProximalGradient(), problem, tmp_path)
    rows = list(run.run(50, lambda _, row: row["change"] < 0.01))
    assert 1 < len(rows) < 50
    assert rows[-1]["change"] < 0.01 <= rows[-2]["change"]


def test_a_state_is_a_value() -> None:
    state = State(3, {"t": 2.0})
    assert Fista().next(None, state, {}).passes == 4  # type: ignore[arg-type]
    assert state.numbers == {"t": 2.0}


def test_stored_images_are_read_once_a_block(tmp_path: Path) -> None:
    """By every operator, the prior and the sums together: with its halo, no more."""
    image = scene((256, 256))
    problem = problem_of(image, terms_of(image, blurs("reflect")), step=STEP)
    read: list[int] = []

    def counted(task: Any, iteration: int, journal: Any, ledger: Any) -> None:

        receipt = BlockRunner(task).run(range(len(task.grid)))
        read.append(receipt.read_bytes)
        ledger.enter(receipt.sums)
        journal.mark(receipt.digests)

    list(iterations_of(ProximalGradient(), problem, tmp_path, run_pass=counted, halo=18).run(2, lambda *_: False))
    assert read[1] < 4 * 256 * 256 * (1 + 2 * 18 / 64) ** 2
