"""Images and norms that solvers come to, on the stack or on subsets of its operators: those of dense systems, spectra and programs in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

from halotile.errors import ConfigError, HalotileError, InputError
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.reconstruct import job as choices
from halotile.graphs.kinds.sections import Output, Run, Tile
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run as reconstruct
from halotile.graphs.solvers._subsets import PASSES_EACH, SubsetNorms
from halotile.graphs.solvers.base import Problem, State
from halotile.graphs.solvers.lanczos import Lanczos, begun, is_spent
from halotile.graphs.subsets import ORDERS, ordered_subset
from halotile.storage.grid import Region
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.fidelities.poisson import Poisson
from halotile.tasks.operators.base import InMemory, Operator, read_all
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.composition import Composition
from halotile.tasks.operators.downsample import Downsample
from halotile.tasks.operators.mask import Mask
from halotile.tasks.operators.normal import Normal, weighted_adjoint
from halotile.tasks.operators.sum import Multiplied
from halotile.tasks.priors.l1 import Sparse
from halotile.tasks.terms import FoldedGradient, Term
from tests.cases import all_of, thorough
from tests.graphs import solving
from tests.support import IN_THREADS, read_zarr, write_zarr

pytestmark = pytest.mark.usefixtures("as_in_a_worker", "without_fsync")

# --- conjugate gradients --------------------------------------------------------------------------


def masked(pixels: Any) -> Mask:
    return Mask(mask=InMemory(pixels))


def dense(problem: Problem) -> Any:
    """The normal operator as a matrix."""
    unit = np.eye(math.prod(problem.shape), dtype=problem.dtype).reshape(-1, *problem.shape)
    return np.array([read_all(problem.normal(InMemory(u))).ravel() for u in unit]).T


def test_iterations_of_cg_are_its_steps_and_end_at_the_least_misfit(tmp_path: Path) -> None:
    image = solving.scene((12, 10)).astype("float64")
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


def run_cg(folder: Path, mask: Any, tol: float) -> tuple[Any, float]:
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
    solvers = map(solving.solver_of, ("pgd", "fista", "admm"))
    pgd, fista, admm = (solving.in_memory(each, problem, 200)[0] for each in solvers)
    step = read_all(solving.solver_of("pgd").step(problem, State(), lambda *_: InMemory(fista)).images["x"])
    assert np.abs(step - fista).max() < 1e-9, "it does not move any more"
    assert max(np.abs(pgd - fista).max(), np.abs(admm - fista).max()) < 1e-8


def test_the_step_for_counts_follows_the_curvature_where_it_begins(tmp_path: Path) -> None:
    image = solving.scene((96, 80))
    counts = InMemory(np.random.default_rng(0).poisson(image * 100).astype("float32") / 100)
    (blur,) = solving.blurs("reflect", (3,))
    terms = (Term(blur, counts, 1.0, Poisson(), InMemory(image)),)
    problem = solving.problem_of(image, terms, solving.prior_of("tv", image, 96, 96))
    square = solving.norm_of(problem, tmp_path / "norm")
    assert square > 3  # of a blur alone it is 1: with that the steps would be too long
    problem = replace(problem, start=InMemory(image), step_size=0.5 / square)
    run = solving.iterations_of(solving.solver_of("fista"), problem, tmp_path / "x")
    misfits = [row["misfit"] for row in solving.finished(run, 25).rows]
    assert max(misfits) < 1.2 * misfits[0]


@pytest.mark.parametrize("weight", [0.5, 40.0])
def test_gradient_descent_goes_as_slowly_as_its_prior_is_steep(tmp_path: Path, weight: float) -> None:
    image = solving.scene((96, 80))
    prior: Any = solving.prior_of("gaussian", image, 96, 96, weight=weight)
    problem = solving.problem_of(image, solving.terms_of(image, solving.blurs("reflect", (3,))), prior)
    problem = replace(problem, step_size=1 / (solving.norm_of(problem, tmp_path / "norm") + prior.steepness()))
    run = solving.iterations_of(solving.solver_of("gd"), problem, tmp_path / "x")
    changes = [row["change"] for row in solving.finished(run, 12).rows]
    assert changes[-1] < 0.2 * changes[0]


@pytest.mark.parametrize("solver", ["gd", "pgd", "fista", "admm"])
def test_to_begin_with_a_perfect_fit_is_no_divergence(tmp_path: Path, solver: str) -> None:
    image = solving.scene((64, 64))
    terms = solving.terms_of(image, (masked(0 * image + 1),))
    problem = solving.problem_of(image, terms, solving.prior_of("tv", image, 96, 96), 0.5)
    run = solving.iterations_of(solving.solver_of(solver), problem.beginning_at(terms[0].measurement), tmp_path)
    assert solving.finished(run, 8).rows[0]["misfit"] == 0


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


Pixels = solving.Pixels
EDGES = (3, 5, 3, 7, 5)
NEAR = {"float32": 1e-5, "float64": 1e-10}
STEP, BACKGROUND, WEIGHT = 0.6, 0.5, 0.02


def convolved(image: Pixels, taps: Pixels) -> Pixels:
    """Periodic convolution, tap by tap; kernels here are symmetric, so it is its own adjoint."""
    half = len(taps) // 2
    moved = (taps[y, x] * np.roll(image, (y - half, x - half), (0, 1)) for y, x in np.ndindex(*taps.shape))
    return sum(moved, np.zeros_like(image))


class Program:
    """The same solvers in one process, on whole arrays."""

    def __init__(self, y: list[Pixels], order: str, subsets: int) -> None:
        self.y, self.order, self.subsets = y, order, subsets
        self.taps = [solving.kernel(edge).astype(y[0].dtype) for edge in EDGES]
        self.weights = [1 / (number + 1) ** 2 for number in range(len(EDGES))]

    def subset(self, iteration: int) -> range:
        place = iteration % self.subsets
        if self.order == "random":
            epoch = iteration // self.subsets
            place = int(np.random.default_rng((4, epoch)).permutation(self.subsets)[place])
        return range(place, len(EDGES), self.subsets)

    def slope(self, x: Pixels, numbers: range) -> Pixels:
        slopes = (convolved(convolved(x, self.taps[n]) - self.y[n], self.taps[n]) * self.weights[n] for n in numbers)
        return sum(slopes, np.zeros_like(x))

    def soft(self, x: Pixels, size: float) -> Pixels:
        return np.asarray(np.sign(x) * np.maximum(np.abs(x) - WEIGHT * size, 0), x.dtype)

    def sgd(self, x: Pixels, iterations: int) -> Pixels:
        for k in range(iterations):
            size = STEP / (1 + 0.3 * (k // self.subsets))
            x = self.soft(x - size * self.slope(x, self.subset(k)), size / self.subsets)
        return x

    def svrg(self, x: Pixels, iterations: int) -> Pixels:
        size, anchors = STEP / 3, 0
        for k in range(iterations):
            if k % (1 + 2 * self.subsets) == 0:
                anchor, full, anchors = x, self.slope(x, range(len(EDGES))), anchors + 1
                ahead = x - size / self.subsets * full
            else:
                part = self.subset(k - anchors)
                ahead = x - size * (self.slope(x, part) - self.slope(anchor, part) + full / self.subsets)
            x = self.soft(ahead, size / self.subsets)
        return x

    def osem(self, x: Pixels, iterations: int) -> Pixels:
        for k in range(iterations):
            above, below = np.zeros_like(x), np.zeros_like(x)
            for n in self.subset(k):
                ratio = self.y[n] / (convolved(x, self.taps[n]) + x.dtype.type(BACKGROUND))
                above += self.weights[n] * convolved(ratio, self.taps[n])
                below += self.weights[n] * convolved(np.ones_like(x), self.taps[n])
            x = x * above / below
        return x


OPTIONS: dict[str, dict[str, Any]] = {"sgd": {"decay": 0.3}, "svrg": {"epochs": 2}, "osem": {}}


def measured(dtype: str) -> tuple[list[Pixels], Pixels]:
    """Counts of five blurred images, and an image to start from."""
    image = (4 * solving.scene((70, 60))).astype(dtype)
    rng = np.random.default_rng(2)
    seen = [convolved(image, solving.kernel(edge).astype(dtype)) + BACKGROUND for edge in EDGES]
    return [rng.poisson(20 * each).astype(dtype) / np.dtype(dtype).type(20) for each in seen], np.full_like(image, 2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the measurements and starts of every type."""
    folder = tmp_path_factory.mktemp("data")
    for dtype in NEAR:
        y, start = measured(dtype)
        write_zarr(folder / dtype / "start.zarr", start)
        for number, pixels in enumerate(y):
            write_zarr(folder / dtype / f"y{number}.zarr", pixels)
    return folder


POISSON = choices.FidelityChoice(name="poisson", options={"background": BACKGROUND})
L1 = choices.PriorChoice(name="l1", options={"weight": WEIGHT})
TAKEN = ("step", "iterations", "checkpoint_every")


def reconstruction(data: Path, solver: str, output: Path, block: int = 32, **given: Any) -> choices.Reconstruction:
    """A job whose other keywords are parts of it, or options of its solver."""
    kernels = [{"kernel": solving.kernel(edge), "boundary": "circular"} for edge in EDGES]
    operators = tuple(
        choices.OperatorChoice(name="blur", data=str(data / f"y{n}.zarr"), noise_sigma=n + 1.0, options=options)
        for n, options in enumerate(kernels)
    )
    is_osem = solver == "osem"
    parts = {name: given.pop(name) for name in ("fidelity", "prior") if name in given}
    named: dict[str, Any] = {"step": "auto" if is_osem else STEP, "iterations": 7, "keep_state": True}
    named |= {name: given.pop(name) for name in TAKEN if name in given}
    job = choices.Reconstruction(
        operators=operators,
        fidelity=POISSON if is_osem else choices.FidelityChoice(),
        prior=choices.PriorChoice() if is_osem else L1,
        start=str(data / "start.zarr"),
        solver=choices.SolverChoice(name=solver, options={**OPTIONS[solver], **given}, **named),
        output=Output(path=str(output), shard=32, chunk=16),
        exact=True,
        tile=Tile(block=block),
        run=Run(workers=2, memory_per_worker="3GiB"),
    )
    return replace(job, **parts)


@pytest.fixture(scope="module")
def alone() -> Iterator[RunningCluster]:
    """A cluster of one worker, in this process."""
    with LocalCluster(n_workers=1, **IN_THREADS) as started, Client(started, set_as_default=False) as client:
        yield RunningCluster(client, 1)


@pytest.mark.cluster
@pytest.mark.parametrize("order", [thorough("cyclic"), "random"])
@pytest.mark.parametrize("dtype", all_of(NEAR, thorough=["float64"]))
@pytest.mark.parametrize("solver", OPTIONS)
def test_a_job_gives_the_numbers_of_a_program_and_the_same_bits_on_any_workers_and_after_a_stop(
    tmp_path: Path, data: Path, cluster: RunningCluster, alone: RunningCluster, solver: str, dtype: str, order: str
) -> None:
    """More iterations go on in the middle of an epoch, with other workers."""
    y, start = measured(dtype)
    expected = getattr(Program(y, order, 2), solver)(start, 7)
    found = []
    for output, each, iterations, block in (("a", cluster, 7, 32), ("b", alone, 3, 64), ("b", cluster, 7, 64)):
        options = {"subsets": 2, "order": order, "seed": 4}
        job = reconstruction(data / dtype, solver, tmp_path / f"{output}.zarr", block, iterations=iterations, **options)
        reconstruct(make_plan(job), cluster=each)
        found.append(read_zarr(tmp_path / f"{output}.zarr"))
    assert found[0].dtype == dtype
    assert np.array_equal(found[0], found[2])
    assert not np.array_equal(found[0], found[1])
    assert np.abs(found[0] - expected).max() < NEAR[dtype] * np.abs(expected).max()
    assert np.abs(expected - start).max() > 0.1


@pytest.mark.cluster
def test_the_step_is_found_for_the_subsets_and_not_for_the_stack(tmp_path: Path, cluster: RunningCluster) -> None:
    """Complementary masks: every subset has the norm of the whole, and a step for the mean of them would diverge."""
    image = solving.scene((64, 64))
    strips = np.arange(64)[None] // 4 % 4 * np.ones((64, 1))
    for number in range(4):
        write_zarr(tmp_path / f"m{number}.zarr", (3.0 * (strips == number)).astype("float32"))
        write_zarr(tmp_path / f"y{number}.zarr", np.where(strips == number, 3 * image, 0).astype("float32"))
    operators = tuple(
        choices.OperatorChoice(
            name="mask", data=str(tmp_path / f"y{n}.zarr"), options={"mask": str(tmp_path / f"m{n}.zarr")}
        )
        for n in range(4)
    )
    job = choices.Reconstruction(
        output=Output(path=str(tmp_path / "x.zarr"), shard=64, chunk=32),
        operators=operators,
        solver=choices.SolverChoice(name="sgd", iterations=40, tol=1e-3),
        run=Run(workers=2, memory_per_worker="3GiB"),
    )
    outcome = reconstruct(make_plan(job), cluster=cluster)
    directory = RunDirectory(tmp_path / "x.zarr.run")
    assert any("|A|² of a subset is at most 9.0" in str(event) for event in directory.read_events())
    assert np.abs(read_zarr(tmp_path / "x.zarr") - image).max() < 1e-2 * image.max()
    assert outcome.figures["iteration"] == 8  # the second epoch has little left to change
    rows = directory.read_output_iterations()
    assert ["misfit" in row for row in rows[:8]] == [False, False, False, True] * 2
    assert ["epoch_change" in row for row in rows[:8]] == ["misfit" in row for row in rows[:8]]


@pytest.mark.usefixtures("as_in_a_worker")
def test_the_norm_is_that_of_the_subset_that_has_the_largest(tmp_path: Path) -> None:
    image = solving.scene((60, 50))
    first, second, third = solving.terms_of(image, solving.blurs("circular"))
    problem = solving.problem_of(image, (second, first, third))
    norms = SubsetNorms(solving.solver_of("sgd"))
    run = solving.iterations_of(norms, begun(problem), tmp_path / "norms")
    list(run.run(norms.passes(3), lambda *_: False))
    assert norms.bound(run.state) == pytest.approx(1, rel=0.02)  # the weight of the first; the others have less
    assert norms.bound(run.state) >= 1


def test_every_epoch_takes_every_operator_once() -> None:
    for order in ("cyclic", "random"):
        subsets = [ordered_subset(7, 3, number, order=order, seed=1) for number in range(18)]
        epochs = [subsets[first : first + 3] for first in range(0, 18, 3)]
        assert all(sorted(sum(epoch, ())) == list(range(7)) for epoch in epochs)
        assert (len({tuple(epoch) for epoch in epochs}) > 1) == (order == "random")
    places = [ordered_subset(7, 3, 1, order="random", seed=seed)[0] for seed in range(300)]
    assert all(80 < places.count(place) < 120 for place in range(3))  # its gradient is a third of the whole, on average
    wrong: list[tuple[Any, int, str]] = [(2, -1, "iteration is -1"), (4, 0, "subsets is 4, and there are 3 operators")]
    for count, number, words in [*wrong, (1.5, 0, r"subsets is 1\.5: write a whole number")]:
        with pytest.raises(ConfigError, match=words):
            ordered_subset(3, count, number)


# --- jobs that cannot be run as they are ----------------------------------------------------------

REFUSED: list[tuple[str, Any, str]] = [
    ("osem", {"fidelity": choices.FidelityChoice()}, r"fidelity\.name: l2 with solver osem.*write poisson"),
    (
        "osem",
        {"prior": choices.PriorChoice(name="l1", options={"weight": 1.0})},
        r"l1 with solver osem, which knows no prior",
    ),
    ("sgd", {"subsets": 6}, r"solver\.subsets: 6, and there are 5 operators"),
    ("sgd", {"subsets": 0}, r"subsets is 0: write a whole number of at least 1"),
    ("sgd", {"subsets": 2.5}, r"subsets is 2\.5: write a whole number"),
    ("svrg", {"order": "backwards"}, r"order is 'backwards': write one of cyclic, random"),
    ("svrg", {"seed": -1}, r"seed is -1"),
    ("sgd", {"decay": -0.5}, r"decay is -0\.5"),
    ("svrg", {"epochs": 0}, r"epochs is 0"),
    ("svrg", {"epochs": 1.5}, r"epochs is 1\.5"),
    ("osem", {"step": 0.5}, r"osem finds its own"),
    ("sgd", {"checkpoint_every": 7}, r"checkpoint_every"),
]


def test_a_job_that_does_not_fit_its_solver_is_refused_before_a_run(tmp_path: Path, data: Path) -> None:
    for solver, changes, words in REFUSED:
        with pytest.raises(ConfigError, match=words):
            make_plan(reconstruction(data / "float32", solver, tmp_path / "x.zarr", **changes))


def test_a_plan_notes_the_order_of_svrg_and_refuses_a_kernel_below_zero_for_osem(tmp_path: Path, data: Path) -> None:
    for order in ORDERS:
        notes = make_plan(reconstruction(data / "float32", "svrg", tmp_path / "x.zarr", order=order)).notes
        assert any("solver.order: cyclic makes svrg diverge" in note for note in notes) == (order == "cyclic")
    job = reconstruction(data / "float32", "osem", tmp_path / "x.zarr")
    sharp = np.array([[-0.5, 2.0, -0.5]], dtype="float32")
    operators = (*job.operators[:4], replace(job.operators[4], options={"kernel": sharp, "boundary": "circular"}))
    with pytest.raises(ConfigError, match=r"operators\[4\] \(blur\) has numbers below 0.*fista"):
        make_plan(replace(job, operators=operators))


NAN = "gave .* nan: some pixel of the data, of start, or of what an operator reads"


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("solver", "where", "words"),
    [
        ("osem", "low", r"operators\[3\]\.data has pixels below 0"),
        ("osem", "start", r"the first image is 0 everywhere.*Write a start above 0"),
        ("sgd", "nan", f"pass 4 {NAN}"),
        thorough("sgd", "mask", f"pass {3 * PASSES_EACH + 1} {NAN}"),
    ],
)
def test_a_pixel_that_cannot_be_is_found_whichever_subset_has_it(
    tmp_path: Path, data: Path, cluster: RunningCluster, solver: str, where: str, words: str
) -> None:
    """NaN is no divergence, of which a shorter step would be the end."""
    job = reconstruction(data / "float32", solver, tmp_path / "x.zarr", order="cyclic")
    pixels, changed, fourth = measured("float32")[0][3], str(tmp_path / "changed.zarr"), job.operators[3]
    if where in ("low", "nan"):
        pixels[40, 50] = -1 if where == "low" else np.nan
        fourth = replace(fourth, data=changed)
    elif where == "mask":
        pixels[:] = np.nan
        fourth = replace(fourth, name="mask", options={"mask": changed})
        job = replace(job, solver=replace(job.solver, step="auto"))
    else:
        pixels[:] = 0
        job = replace(job, start=changed)
    write_zarr(Path(changed), pixels)
    job = replace(job, operators=(*job.operators[:3], fourth, job.operators[4]))
    with pytest.raises(InputError if where != "low" else HalotileError, match=words):
        reconstruct(make_plan(job), cluster=cluster)


def test_a_start_or_an_adjoint_below_zero_is_refused_when_it_shows() -> None:
    x, zeros, mixed = (InMemory(np.array(pixels)) for pixels in ([1.0, 1.0], [0.0, 0.0], [1.0, -1.0]))
    high, wrong = InMemory(np.full(2, 1.5)), "corrections.*below 0"
    for images, words in (((x, high, x), wrong), ((x, zeros, mixed), wrong), ((mixed, zeros, x), "a start without")):
        with pytest.raises(InputError, match=words):
            read_all(Multiplied(*images))
    assert np.array_equal(read_all(Multiplied(x, zeros, x)), [1, 1])
