"""Solvers on subsets of the operators: the numbers of a program in NumPy, on any number of workers, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.jobs.reconstruct.costs import Form
from halotile.graphs.jobs.reconstruct.job import (
    FidelityChoice,
    OperatorChoice,
    PriorChoice,
    Reconstruction,
    SolverChoice,
)
from halotile.graphs.kinds.sections import Output, Run, Tile
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run as reconstruct
from halotile.graphs.solvers._subsets import SubsetNorms
from halotile.graphs.solvers.lanczos import begun
from halotile.graphs.solvers.osem import OrderedSubsetsEM
from halotile.graphs.solvers.sgd import SubsetDescent
from halotile.graphs.solvers.svrg import ReducedVariance
from halotile.graphs.subsets import ORDERS, ordered_subset
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.fidelities.poisson import Poisson
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.mask import Mask
from halotile.tasks.terms import Term
from tests.cases import all_of, thorough
from tests.graphs.solving import blurs, in_memory, iterations_of, kernel, problem_of, scene, terms_of
from tests.graphs.test_stages import WholeBlur, gathered, staged
from tests.support import read_zarr, write_zarr

Pixels = NDArray[Any]
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
        self.taps = [kernel(edge).astype(y[0].dtype) for edge in EDGES]
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
    image = (4 * scene((70, 90))).astype(dtype)
    rng = np.random.default_rng(2)
    seen = [convolved(image, kernel(edge).astype(dtype)) + BACKGROUND for edge in EDGES]
    return [rng.poisson(20 * each).astype(dtype) / np.dtype(dtype).type(20) for each in seen], np.full_like(image, 2)


def reconstruction(
    folder: Path, solver: str, dtype: str, iterations: int, output: str = "x", block: int = 32, **options: Any
) -> Reconstruction:
    y, start = measured(dtype)
    if not (folder / "start.zarr").exists():
        write_zarr(folder / "start.zarr", start)
        for number, pixels in enumerate(y):
            write_zarr(folder / f"y{number}.zarr", pixels)
    return Reconstruction(
        output=Output(path=str(folder / f"{output}.zarr"), shard=32, chunk=16),
        operators=tuple(
            OperatorChoice(
                name="blur",
                data=str(folder / f"y{number}.zarr"),
                noise_sigma=number + 1.0,
                options={"kernel": kernel(edge), "boundary": "circular"},
            )
            for number, edge in enumerate(EDGES)
        ),
        fidelity=FidelityChoice(name="poisson", options={"background": BACKGROUND})
        if solver == "osem"
        else FidelityChoice(),
        prior=PriorChoice() if solver == "osem" else PriorChoice(name="l1", options={"weight": WEIGHT}),
        solver=SolverChoice(
            name=solver,
            iterations=iterations,
            step="auto" if solver == "osem" else STEP,
            options={**OPTIONS[solver], **options},
        ),
        start=str(folder / "start.zarr"),
        exact=True,
        tile=Tile(block=block),
        run=Run(workers=2, memory_per_worker="3GiB"),
    )


@pytest.fixture(scope="module")
def alone() -> Iterator[RunningCluster]:
    with local.start(Order(workers=1, memory_bytes=4 * 2**30)) as running:
        yield running


@pytest.mark.cluster
@pytest.mark.parametrize("order", [thorough("cyclic"), "random"])
@pytest.mark.parametrize("dtype", all_of(NEAR, thorough=["float64"]))
@pytest.mark.parametrize("solver", OPTIONS)
def test_a_job_gives_the_numbers_of_a_program_and_the_same_bits_on_any_workers(
    tmp_path: Path, cluster: RunningCluster, alone: RunningCluster, solver: str, dtype: str, order: str
) -> None:
    y, start = measured(dtype)
    expected = getattr(Program(y, order, 2), solver)(start, 7)
    options = {"subsets": 2, "order": order, "seed": 4}
    found = []
    for number, (each, block) in enumerate(((cluster, 32), (alone, 64))):
        plan = make_plan(reconstruction(tmp_path, solver, dtype, 7, f"x{number}", block, **options))
        reconstruct(plan, cluster=each)
        found.append(read_zarr(tmp_path / f"x{number}.zarr"))
    assert found[0].dtype == dtype
    assert np.array_equal(found[0], found[1])
    assert np.abs(found[0] - expected).max() < NEAR[dtype] * np.abs(expected).max()
    assert np.abs(expected - start).max() > 0.1


@pytest.mark.cluster
@pytest.mark.parametrize("solver", all_of(OPTIONS, thorough=["sgd", "svrg"]))
def test_more_iterations_go_on_in_the_middle_of_an_epoch_with_other_workers(
    tmp_path: Path, cluster: RunningCluster, alone: RunningCluster, solver: str
) -> None:
    def after(iterations: int, output: str, on: RunningCluster) -> Pixels:
        job = reconstruction(tmp_path, solver, "float32", iterations, output, subsets=3, order="random")
        job = replace(job, solver=replace(job.solver, keep_state=True))
        reconstruct(make_plan(job), cluster=on)
        return read_zarr(tmp_path / f"{output}.zarr")

    after(5, "a", cluster)
    assert np.array_equal(after(9, "a", alone), after(9, "b", cluster))


@pytest.mark.cluster
def test_the_step_is_found_for_the_subsets_and_not_for_the_stack(tmp_path: Path, cluster: RunningCluster) -> None:
    """Complementary masks: every subset has the norm of the whole, and a step for the mean of them would diverge."""
    image = scene((64, 64))
    strips = np.arange(64)[None] // 4 % 4 * np.ones((64, 1))
    for number in range(4):
        write_zarr(tmp_path / f"m{number}.zarr", (3.0 * (strips == number)).astype("float32"))
        write_zarr(tmp_path / f"y{number}.zarr", np.where(strips == number, 3 * image, 0).astype("float32"))
    operators = tuple(
        OperatorChoice(name="mask", data=str(tmp_path / f"y{n}.zarr"), options={"mask": str(tmp_path / f"m{n}.zarr")})
        for n in range(4)
    )
    job = Reconstruction(
        output=Output(path=str(tmp_path / "x.zarr"), shard=32, chunk=16),
        operators=operators,
        solver=SolverChoice(name="sgd", iterations=40, tol=1e-3),
        run=Run(workers=2, memory_per_worker="3GiB"),
    )
    outcome = reconstruct(make_plan(job), cluster=cluster)
    told = [str(event) for event in RunDirectory(tmp_path / "x.zarr.run").read_events()]
    assert any("|A|² of a subset is at most 9.0" in line for line in told)
    assert np.abs(read_zarr(tmp_path / "x.zarr") - image).max() < 1e-2 * image.max()
    assert outcome.figures["iteration"] == 8  # the second epoch has little left to change
    rows = RunDirectory(tmp_path / "x.zarr.run").read_output_iterations()
    assert ["misfit" in row for row in rows[:8]] == [False, False, False, True] * 2
    assert ["epoch_change" in row for row in rows[:8]] == ["misfit" in row for row in rows[:8]]


@pytest.mark.usefixtures("as_in_a_worker")
def test_the_norm_is_that_of_the_subset_that_has_the_largest(tmp_path: Path) -> None:
    image = scene((60, 50))
    first, second, third = terms_of(image, blurs("circular"))
    problem = problem_of(image, (second, first, third))
    norms = SubsetNorms(SubsetDescent())
    run = iterations_of(norms, begun(problem), tmp_path / "norms")
    list(run.run(norms.passes(3), lambda *_: False))
    assert norms.bound(run.state) == pytest.approx(1, rel=0.02)  # the weight of the first; the others have less
    assert norms.bound(run.state) >= 1


def test_reduced_variance_ends_at_the_minimum_and_constant_steps_near_it() -> None:
    """Of measurements that contradict one another, no image pleases all subsets: the best is their weighted mean."""
    image = scene((12, 14))
    terms = tuple(
        replace(term, measurement=InMemory((1 + 0.3 * number) * image))
        for number, term in enumerate(terms_of(image, blurs("circular", (1, 1, 1))))
    )
    weights = [term.weight for term in terms]
    least = sum(w * (1 + 0.3 * number) for number, w in enumerate(weights)) / sum(weights) * image
    problem = problem_of(image, terms, step=0.4)

    def distance(solver: Any, iterations: int) -> float:
        found, _ = in_memory(solver, problem, iterations)
        return float(np.linalg.norm(found - least) / np.linalg.norm(least))

    constant, decaying = (distance(SubsetDescent(order="cyclic", decay=decay), 60) for decay in (0.0, 0.5))
    assert 0.02 < constant < 0.04
    assert decaying < 0.012
    assert distance(ReducedVariance(), 150) < 1e-4


def test_a_plan_notes_that_reduced_variance_wants_a_random_order(tmp_path: Path) -> None:
    """Where half of the operators see one half of the image, one after the other, corrections of the others add up."""
    image = scene((6, 8))
    halves = np.arange(8) // 4 * np.ones((6, 1))

    def term(number: int) -> Term:
        mask = (halves == number // 20).astype("float32")
        return Term(Mask(mask=InMemory(mask)), InMemory(mask * image))

    problem = problem_of(image, tuple(map(term, range(40))))
    for order in ORDERS:
        is_noted = order == "cyclic"
        found, _ = in_memory(ReducedVariance(order=order), problem, 123)  # three epochs
        distance = float(np.linalg.norm(found - image) / np.linalg.norm(image))
        assert distance > 3 if is_noted else distance < 0.1
        notes = make_plan(reconstruction(tmp_path, "svrg", "float32", 7, order=order)).notes
        assert any("solver.order: cyclic makes svrg diverge" in note for note in notes) == is_noted


@pytest.mark.usefixtures("as_in_a_worker")
def test_operators_that_see_everything_take_their_turns_in_osem(tmp_path: Path) -> None:
    image = scene((100, 90)) + 1
    near, *far = (replace(term, fidelity=Poisson()) for term in terms_of(image, blurs("circular")))
    whole = tuple(replace(t, operator=WholeBlur(blur=cast(Blur, t.operator))) for t in far)
    problem = problem_of(image, (near, *far)).beginning_at(InMemory(np.ones_like(image)))
    images: list[Pixels] = []
    folder = tmp_path / "parts"
    for name, form in (("near", Form((near, *far))), ("mixed", Form((near, *whole)))):
        each = staged(problem, form)
        run = iterations_of(OrderedSubsetsEM(subsets=2), each, tmp_path / name, gather=gathered(folder), parts=folder)
        assert ["misfit" in row for row in run.run(5, lambda *_: False)] == [False, True, False, True, False]
        images.append(read_all(run.image()))
    assert np.abs(images[0] - images[1]).max() <= 5e-6 * np.abs(images[0]).max()


def test_every_epoch_takes_every_operator_once() -> None:
    for order in ("cyclic", "random"):
        epochs = [
            [ordered_subset(7, 3, 3 * epoch + place, order=order, seed=1) for place in range(3)] for epoch in range(6)
        ]
        assert all(sorted(sum(epoch, ())) == list(range(7)) for epoch in epochs)
        assert (len({tuple(epoch) for epoch in epochs}) > 1) == (order == "random")
    places = [ordered_subset(7, 3, 1, order="random", seed=seed)[0] for seed in range(300)]
    assert all(80 < places.count(place) < 120 for place in range(3))  # its gradient is a third of the whole, on average
    with pytest.raises(ConfigError, match=r"iteration is -1"):
        ordered_subset(3, 2, -1)
    with pytest.raises(ConfigError, match=r"subsets is 4, and there are 3 operators"):
        ordered_subset(3, 4, 0)
    with pytest.raises(ConfigError, match=r"subsets is 1\.5: write a whole number"):
        ordered_subset(3, 1.5, 0)  # type: ignore[arg-type]
