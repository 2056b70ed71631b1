"""Forms of the gradient and several iterations in a pass: the image of the plain form, the bytes of a plan; and numbers that grow without bound."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from halotile.errors import Diverged
from halotile.graphs.jobs.reconstruct.costs import Backprojection, choose_form, computed_twice, pixels_read
from halotile.graphs.jobs.reconstruct.job import PriorChoice, SolverChoice
from halotile.graphs.kinds.sections import DenoiserChoice, Tile
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.runs.claim import kept_of
from halotile.graphs.solvers.base import CHANGE, Problem, Solver, State
from halotile.storage.arrays import open_source
from halotile.storage.grid import Grid, Region
from halotile.storage.views import Constant
from halotile.tasks.block import BlockRunner
from halotile.tasks.fidelities.poisson import Poisson
from halotile.tasks.image_task import Scope, Shared, View
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.composition import Composition
from halotile.tasks.operators.mask import Mask
from halotile.tasks.priors.base import Prior, denoised_in
from halotile.tasks.priors.l1 import Sparse
from halotile.tasks.priors.none import NoPrior
from halotile.tasks.terms import MISFIT, Gradient, Term
from tests.cases import all_of, thorough
from tests.graphs import solving
from tests.graphs.inline import InlineIterations
from tests.graphs.solving import Pixels, blurs, finished, iterations_of, prior_of, problem_of, solver_of, terms_of
from tests.graphs.trials import deblurring
from tests.support import work_of

pytestmark = pytest.mark.usefixtures("as_in_a_worker", "without_fsync")

IMAGE = solving.scene((91, 77))
SINGLE = np.dtype("float32")
SOLVERS: dict[str, Solver] = {"gd": solver_of("gd"), "pgd": solver_of("pgd")}
BOUNDARIES = ["circular", "reflect", "replicate", "zero", "valid"]


def plain_in(terms: tuple[Term, ...], per_pass: int, prior: Prior | None = None) -> Problem:
    """A problem with so many iterations in a pass, operators one by one."""
    problem = problem_of(IMAGE, terms, prior, step=0.4)
    return replace(problem, per_pass=per_pass, plain_gradient=lambda x: Gradient(x, terms, records_misfit=False))


def folded_in(
    terms: tuple[Term, ...], per_pass: int, folder: Path, engine: Any = "fft", **parts: Any
) -> tuple[Problem, dict[str, Any]]:
    """A problem in the normal form, whose backprojection is stored; and what its passes have to know."""
    plain: Problem = parts.get("plain") or problem_of(IMAGE, terms, prior_of("gaussian", IMAGE), step=0.4)
    form = choose_form(terms, plain.dtype, exact=False, per_pass=per_pass)
    assert form.folded is not None
    form = replace(form, folded=replace(form.folded, engine=engine))
    zeros = Constant(plain.shape, plain.dtype)
    run = iterations_of(Backprojection(), plain.beginning_at(zeros), folder / f"back-{per_pass}")
    back = finished(run, 1).image("b")
    problem = replace(
        plain,
        gradient=form.map("gradient", back),
        normal=form.normal,
        misfit_of_zero=run.state.numbers["misfit"],
        per_pass=per_pass,
        plain_gradient=form.map("gradient", back, records_misfit=False),
        reach=form.reach,
    )
    return problem, {"by_shard": form.by_shard}


def pixels_of(run: InlineIterations, iterations: int = 6) -> Pixels:
    return read_all(finished(run, iterations).image())


# --- the normal form ------------------------------------------------------------------------------


def test_a_perfect_fit_of_large_numbers_is_no_divergence(tmp_path: Path) -> None:
    # The normal form tells the misfit as a difference of large numbers: near 0 it is all rounding.
    image = (1000 + 200 * solving.scene((91, 77))).astype("float32")
    terms = terms_of(image, (blurs("circular")[0],), noise=0.0)
    problem, _ = folded_in(terms, 1, tmp_path, plain=problem_of(image, terms, step=1.0))
    run = iterations_of(solver_of("fista"), problem, tmp_path / "x", block=160)
    assert np.abs(pixels_of(run, 40) - image).mean() < 1
    assert min(row["misfit"] for row in run.rows) >= 0


def test_a_form_folds_where_it_can_says_so_and_travels() -> None:
    terms, stack = terms_of(IMAGE, blurs("reflect", (3, 31))), blurs("reflect")
    exact, fast = (choose_form(terms, SINGLE, exact=exact) for exact in (True, False))
    assert exact.describe() == "plain, 2 operators there and back; direct convolutions"
    assert fast.describe() == "normal, all operators in one kernel of 61 × 61; Fourier transforms"
    assert fast.reach > exact.reach
    again = pickle.loads(pickle.dumps(fast))
    assert np.array_equal(read_all(again.normal(InMemory(IMAGE))), read_all(fast.normal(InMemory(IMAGE))))
    mask = Mask(mask=InMemory(np.ones_like(IMAGE)))
    counts = tuple(replace(term, fidelity=Poisson()) for term in terms_of(IMAGE, stack))
    for unfolded in (terms_of(IMAGE, (*stack, mask)), counts):
        assert choose_form(unfolded, SINGLE, exact=False).folded is None
    inside = Composition((mask, *blurs("reflect", (31,))))
    alone, within = (choose_form(terms_of(IMAGE, (each,)), SINGLE, exact=False) for each in (mask, inside))
    assert (alone.describe(), alone.is_fft) == ("plain, 1 operator there and back", False)
    assert within.describe() == "plain, 1 operator there and back; Fourier transforms where kernels are large"
    assert within.is_fft


# --- several iterations in a pass: images between are stored nowhere, and nothing else is different ---


SEVERAL: list[Any] = [
    ("pgd", "none", "circular", 2), ("pgd", "none", "reflect", 2), ("pgd", "gaussian", "circular", 2), ("gd", "gaussian", "reflect", 3),
    *(thorough("pgd", prior, rule, 2) for prior in ("none", "tv", "gaussian") for rule in BOUNDARIES[2:]),
    *(thorough("gd", prior, "reflect", 2) for prior in ("none", "tv", "l1")),
    thorough("pgd", "l1", "circular", 2), thorough("pgd", "none", "circular", 3),
]  # fmt: skip


@pytest.mark.parametrize(("solver", "prior", "boundary", "per_pass"), SEVERAL)
def test_passes_of_several_iterations_have_the_bits_and_figures_of_passes_of_one(
    tmp_path: Path, solver: str, prior: str, boundary: str, per_pass: int
) -> None:
    terms = terms_of(IMAGE, blurs(boundary))
    whole, _ = solving.in_memory(SOLVERS[solver], plain_in(terms, 1, prior_of(prior, IMAGE)), 2 * per_pass)
    alone, several = (
        iterations_of(SOLVERS[solver], plain_in(terms, each, prior_of(prior, IMAGE)), tmp_path / str(each))
        for each in (1, per_pass)
    )
    finished(several, per_pass)  # and goes on
    several = iterations_of(SOLVERS[solver], several.problem, tmp_path / str(per_pass))
    for run in (alone, several):
        finished(run, 2 * per_pass)
    assert np.array_equal(read_all(several.image()), whole)
    assert [row["iteration"] for row in several.rows] == [per_pass, 2 * per_pass]
    assert [row[MISFIT] for row in several.rows] == [row[MISFIT] for row in alone.rows[::per_pass]]
    assert all(row[CHANGE] > 0 for row in several.rows)


@pytest.mark.parametrize("boundary", all_of(BOUNDARIES, thorough=["replicate", "zero", "valid"]))
def test_direct_convolutions_of_the_normal_form_have_the_same_bits(tmp_path: Path, boundary: str) -> None:
    terms, found = terms_of(IMAGE, blurs(boundary)), []
    for per_pass in (1, 2, 3):
        problem, options = folded_in(terms, per_pass, tmp_path, "direct")
        found.append(pixels_of(iterations_of(SOLVERS["pgd"], problem, tmp_path / str(per_pass), **options)))
    assert all(np.array_equal(found[0], other) for other in found[1:])


SHARDS: list[Any] = [
    ("reflect", 1, 32), ("circular", 3, 32), thorough("reflect", 2, 32), thorough("reflect", 3, 32),
    *(thorough(rule, each, 32) for rule in BOUNDARIES[2:] for each in (1, 3)),
    thorough("reflect", 3, 16),  # tiny shards do not share what one of them computed
]  # fmt: skip


@pytest.mark.parametrize(("boundary", "per_pass", "shard"), SHARDS)
def test_transforms_are_near_it_whatever_the_blocks(tmp_path: Path, boundary: str, per_pass: int, shard: int) -> None:
    terms = terms_of(IMAGE, blurs(boundary, (9, 13) if shard == 16 else (5, 9, 13)))
    plain = iterations_of(SOLVERS["pgd"], plain_in(terms, 1, prior_of("gaussian", IMAGE)), tmp_path / "plain")
    truth = pixels_of(plain)
    problem, options = folded_in(terms, per_pass, tmp_path)
    assert options["by_shard"] == (per_pass > 1)
    found, told = [], []
    for block in (shard, 64, 96):
        at = tmp_path / str(block)
        run = iterations_of(SOLVERS["pgd"], problem, at, block=block, shard=shard, **options)
        found.append(pixels_of(run))
        told.append(solving.figures_of(run))
    assert all(np.array_equal(found[0], other) for other in found[1:])
    assert told[0] == told[1] == told[2]
    assert np.abs(found[0] - truth).max() < 2e-6
    for ours, theirs in zip(told[0], plain.rows[::per_pass], strict=True):
        assert ours["misfit"] == pytest.approx(theirs["misfit"], rel=1e-3)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_parts_of_a_pass_grow_with_its_iterations_and_no_faster(solver: Solver) -> None:
    problem = plain_in(terms_of(IMAGE, blurs("reflect")), 40, prior_of("gaussian", IMAGE))
    image = solver.step(problem, State(), lambda name, age: InMemory(IMAGE)).images["x"]
    assert (image.shape, image.dtype) == (IMAGE.shape, IMAGE.dtype)
    assert len(list(denoised_in(image))) == 40


# --- bytes that a plan says an iteration moves ----------------------------------------------------

EDGES = (3, 5, 5)
"""Small enough for direct sums, also when they are folded: transforms read whole cells, which are larger than these blocks."""
PRIORS = {
    "none": PriorChoice(),
    "tv": PriorChoice(name="tv", options={"weight": 2.0, "iterations": 8}),
    "pnp": PriorChoice(name="pnp", options={"denoiser": DenoiserChoice(name="gaussian", options={"sigma": 3.0})}),
}


def plan_of(folder: Path, prior: str, solver: str, exact: bool, *, every: int = 1, fuse: Any = True) -> Plan:
    """A plan for three blurs."""
    step: Any = "auto" if solver == "cg" else 0.1
    chosen = SolverChoice(name=solver, step=step, iterations=6, checkpoint_every=every)
    given = deblurring(folder, "cpu", PRIORS[prior], size=512, solver=chosen, exact=exact, fuse=fuse, tile=Tile())
    options = [{"kernel": solving.kernel(edge), "boundary": "reflect"} for edge in EDGES]
    return make_plan(replace(given, operators=tuple(replace(given.operators[0], options=each) for each in options)))


def moved(plan: Plan) -> int:
    """Bytes that an iteration of the third pass reads and writes, in all of its passes."""
    receipts: list[Any] = []

    def run_pass(task: Any, iteration: int, journal: Any, ledger: Any) -> None:
        receipts.append(BlockRunner(task).run(range(len(task.grid))))
        assert not receipts[-1].bad, receipts[-1].bad[0].traceback
        ledger.enter(receipts[-1].sums)
        journal.mark(receipts[-1].digests)

    run, work = solving.iterations_of_plan(plan, run_pass), work_of(plan)
    each = work.form.per_pass
    assert len(list(run.run(3 * each, lambda *_: False))) == work.solver.traits.passes_before + 3
    last = receipts[-2:] if work.form.apart else receipts[-1:]
    return int(sum(receipt.read_bytes + receipt.written_bytes for receipt in last) // each)


MOVED: list[Any] = [
    *((*parts, True, 1, True) for parts in (("none", "pgd"), ("tv", "fista"), ("pnp", "pgd"), ("none", "cg"))),
    *((*parts, False, 2, "auto") for parts in (("none", "gd"), ("pnp", "pgd"))),
    ("pnp", "pgd", True, 2, "auto"), ("pnp", "pgd", False, 1, False), thorough("pnp", "pgd", True, 1, False),
    *(thorough(*parts, False, 1, True) for parts in (("none", "pgd"), ("tv", "fista"), ("pnp", "gd"))),
    *(thorough("pnp", "pgd", exact, 3, "auto") for exact in (True, False)),
]  # fmt: skip


@pytest.mark.parametrize(("prior", "solver", "exact", "every", "fuse"), MOVED)
def test_a_plan_tells_how_much_moves(
    tmp_path: Path, prior: str, solver: str, exact: bool, every: int, fuse: Any
) -> None:
    plan = plan_of(tmp_path, prior, solver, exact, every=every, fuse=fuse)
    figures = plan.summary()
    assert figures["iteration_bytes"] == pytest.approx(moved(plan), rel=0.15)
    if every > 1:
        alone = plan_of(tmp_path, prior, solver, exact, fuse=fuse).summary()
        assert figures["iteration_bytes"] < alone["iteration_bytes"]
        assert figures["iteration_bytes_unfused"] == alone["iteration_bytes_unfused"]
        assert figures["computed_twice"] > alone["computed_twice"]
    elif prior == "none":
        assert figures["iteration_bytes_unfused"] is None
    elif not fuse:
        assert figures["iteration_bytes"] == figures["iteration_bytes_unfused"]
    elif prior == "pnp":
        assert figures["iteration_bytes"] < 0.8 * figures["iteration_bytes_unfused"]
    for tree in (plan.documents.asked, plan.documents.resolved, kept_of(plan)):
        json.dumps(tree)  # arrays and all
    assert plan.documents.asked["operators"][0]["kernel"]["shape"] == [3, 3]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("halo", [0, 20, 40, 100])
def test_reading_ahead_reads_all_that_a_block_reads(halo: int, exact: bool) -> None:
    shape = (3072, 2100)
    zeros = Constant(shape, SINGLE)
    terms = tuple(Term(Blur(kernel=solving.kernel(edge), boundary="circular"), zeros) for edge in (13, 15))
    form = choose_form(terms, SINGLE, exact=exact)
    assert form.is_fft is not exact
    image, core = Shared(zeros, form.fused_reach), Region((1024, 1024), (2048, 1536))
    with Scope([]) as scope:
        image.hold(form.view(halo).window(core, shape))
        ahead = scope.read_bytes
        form.gradient(image, zeros).read(core.grow(((halo, halo),) * 2))
    assert scope.read_bytes == ahead


def test_separate_shards_compute_more_twice_and_transforms_read_whole_cells() -> None:
    shape = (256, 256)
    term = Term(Blur(kernel=solving.kernel(13), boundary="circular"), Constant(shape, SINGLE))
    whole = Grid(shape, shape, ((0, 0), (0, 0)))
    direct, transforms = (choose_form((term,), SINGLE, exact=exact, per_pass=2) for exact in (True, False))
    assert computed_twice(whole, (64, 64), direct, NoPrior()) == 0
    assert computed_twice(whole, (64, 64), transforms, NoPrior()) > 0.1
    grid = Grid((4096, 4096), (1024, 4096), ((0, 0), (0, 0)))
    assert pixels_read(grid, View(20, 8, cells=True)) == pixels_read(grid, View(32 + 8))
    assert pixels_read(grid, View(40, 8, cells=True)) > 1.4 * pixels_read(grid, View(40 + 8)), "into the cell after"


# --- numbers that grow without bound: the run ends, and the image from before they grew is there


CALM, WILD = 0.3, 10.0
"""Steps that get somewhere, and that do not."""
TO_GO_BACK = {"x": 3}
SMALL = solving.scene((64, 80))


def diverging(folder: Path, solver: Solver, calm: int) -> tuple[InlineIterations, list[Pixels]]:
    """Iterations that went well for a while, and are about to take steps that are too long; and their images."""
    problem = problem_of(SMALL, terms_of(SMALL, blurs("circular")), step=CALM)
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
    steepest = sum(term.weight for term in terms_of(SMALL, blurs("circular")))
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


OBJECTIVES: dict[str, Any] = {"l1": lambda x: 0.02 * float(np.abs(x).sum()), "tv": total_variation}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_objective_has_the_value_of_the_prior_and_falls(tmp_path: Path, name: str) -> None:
    """What the rows tell, beside the misfit, is what numpy makes of the image that the iteration began with."""
    problem = problem_of(SMALL, terms_of(SMALL, blurs("reflect", (3,))), prior_of(name, SMALL, 32, 32), CALM)
    run = iterations_of(solver_of("pgd"), problem, tmp_path, block=32)
    images = [read_all(run.image()).astype(float) for _ in run.run(4, lambda *_: False)]
    for before, row in zip(images, run.rows[1:], strict=False):
        assert row["objective"] - row["misfit"] == pytest.approx(OBJECTIVES[name](before), rel=1e-6)
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
    terms = terms_of(SMALL, blurs("circular"))
    problem = problem_of(SMALL, terms, step=3 * WILD)
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
    prior = prior_of("gaussian", SMALL, 32, 32, weight=1.0)
    problem = problem_of(SMALL, terms_of(SMALL, blurs("circular"), noise=0), prior, step=0.02)
    given = finished(iterations_of(solver_of("pgd"), problem.beginning_at(InMemory(SMALL)), tmp_path / "given"), 40)
    assert given.judged()
    misfits = [row["misfit"] for row in given.rows]
    assert sorted(misfits) == misfits
    assert misfits[-1] > 50 * misfits[1]
    zeros = iterations_of(solver_of("pgd"), replace(problem, step_size=WILD), tmp_path / "zeros")
    with pytest.raises(Diverged, match="its image has a misfit"):
        finished(zeros, 1).judged()
