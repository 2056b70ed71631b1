"""Operators with a pass of their own: what is stored between gives the bits of one pass, and sums over whole images hold."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from halotile.errors import MemoryRefused, TaskFailed, WorkerDied
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.reconstruct.costs import Form
from halotile.graphs.jobs.reconstruct.job import OperatorChoice, PriorChoice, Reconstruction, SolverChoice
from halotile.graphs.kinds.base import Gather
from halotile.graphs.kinds.sections import Output, Run
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run as reconstruct
from halotile.graphs.solvers.admm import Admm
from halotile.graphs.solvers.base import Problem
from halotile.graphs.solvers.cg import ConjugateGradients
from halotile.graphs.solvers.fista import Fista
from halotile.graphs.solvers.pgd import ProximalGradient
from halotile.graphs.solvers.sgd import SubsetDescent
from halotile.graphs.solvers.svrg import ReducedVariance
from halotile.storage.arrays import open_source
from halotile.storage.rim import Readable
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.json_files import Ledger
from halotile.tasks.denoisers.gaussian import Gaussian
from halotile.tasks.image_task import ImageTask, View
from halotile.tasks.operators.base import InMemory, OperatorKind, Shape, read_all
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.crop import Crop
from halotile.tasks.priors.none import NoPrior
from tests.cases import thorough
from tests.graphs.inline import inline
from tests.graphs.solving import Interrupted, blurs, denoised_by, iterations_of, kernel, plugged, problem_of, terms_of
from tests.support import work_of, write_zarr

pytestmark = pytest.mark.usefixtures("as_in_a_worker")

SOLVERS: dict[str, Any] = {
    "pgd": ProximalGradient(),
    "fista": Fista(),
    "admm": Admm(),
    "cg": ConjugateGradients(),
    "sgd": SubsetDescent(subsets=2),
    "svrg": ReducedVariance(subsets=2),
}


def scene(shape: tuple[int, int] = (100, 90)) -> Any:
    y, x = np.mgrid[: shape[0], : shape[1]]
    return (np.sin(y / 9) * np.cos(x / 7) / 3 + 0.5).astype("float32")


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeBlur:
    """A blur that says it has to see the whole image."""

    name: ClassVar[str] = "whole blur"
    kind: ClassVar[OperatorKind] = "whole"
    reach: ClassVar[int] = 0

    blur: Blur

    def measured(self, image: Shape) -> Shape:
        return self.blur.measured(image)

    def forward(self, image: Readable) -> Readable:
        return self.blur.forward(InMemory(read_all(image)))

    def adjoint(self, measurement: Readable, image: Shape) -> Readable:
        return self.blur.adjoint(InMemory(read_all(measurement)), image)


def staged(problem: Problem, form: Form) -> Problem:
    """The same problem with its operators as a form has them."""
    maps: dict[str, Any] = {name: form.map(name) for name in ("gradient", "normal", "sensitivity")}
    return replace(problem, **maps, parts=lambda numbers: staged(problem, form.of(numbers)))


def gathered(folder: Path) -> Any:
    """Contributions added up in this process."""

    def gather(wanted: Gather, iteration: int, journal: Journal, ledger: Ledger) -> None:
        assert wanted.folder == folder
        folder.mkdir(exist_ok=True)
        parts = [wanted.work.compute([each]) for each in wanted.terms]
        part = wanted.work.keep(wanted.work.add(parts))
        assert not list(folder.iterdir())
        ledger.enter({0: {name: [sum(values.values())] for name, values in part.sums.items()}})
        journal.mark({0: part.digest})

    return gather


@pytest.mark.parametrize("solver", SOLVERS)
def test_two_passes_have_the_bits_of_one(tmp_path: Path, solver: str) -> None:
    image = scene()
    terms = terms_of(image, blurs("reflect"))
    plain = NoPrior() if solver == "cg" else plugged(denoised_by(Gaussian(sigma=0.7), image, 64, 40))
    problem = problem_of(image, terms, plain, 0.5)
    told = []
    for name, each in (("one", problem), ("two", staged(problem, Form(terms, apart=True)))):
        run = iterations_of(SOLVERS[solver], each, tmp_path / name, own_view=View(reach=16))
        rows = [{k: v for k, v in row.items() if k != "seconds"} for row in run.run(3, lambda *_: False)]
        told.append((rows, read_all(run.image())))
    assert told[0][0] == told[1][0]
    assert np.array_equal(told[0][1], told[1][1])
    assert (tmp_path / "two" / "stage.0").exists()
    assert not (tmp_path / "one" / "stage.0").exists()


@pytest.mark.parametrize("solver", SOLVERS)
def test_operators_that_see_everything_are_added_up_beside_the_others(tmp_path: Path, solver: str) -> None:
    image = scene()
    near, *far = terms_of(image, blurs("circular"))
    whole = tuple(replace(t, operator=WholeBlur(blur=cast(Blur, t.operator))) for t in far)
    problem = problem_of(image, (near, *far), step=0.5)
    images, rows = list[Any](), []
    for name, each in (("near", problem), ("mixed", staged(problem, Form((near, *whole))))):
        parts = tmp_path / "parts"
        run = iterations_of(SOLVERS[solver], each, tmp_path / name, gather=gathered(parts), parts=parts)
        rows.append(list(run.run(3, lambda *_: False)))
        images.append(read_all(run.image()))
    assert np.abs(images[0] - images[1]).max() <= 2e-6 * np.abs(images[0]).max()
    for one, other in zip(*rows, strict=True):
        assert one.keys() == other.keys()
        assert one.get("misfit", 0) == pytest.approx(other.get("misfit", 0), rel=1e-4)


def shards(array: Path) -> dict[Path, int]:
    """When each was written."""
    found = {path: path.stat().st_mtime_ns for path in (array / "c").rglob("*") if path.is_file()}
    assert found
    return found


def test_what_was_stored_before_the_pass_is_not_computed_again(tmp_path: Path) -> None:
    image = scene()
    terms = terms_of(image, blurs("zero"))
    problem = staged(problem_of(image, terms, step=0.5), Form(terms, apart=True))
    iterated = []

    def cut_short(task: ImageTask, iteration: int, journal: Journal, ledger: Ledger) -> None:
        iterated.append(str(task.images[0][0].path))
        if "stage" not in iterated[-1] and iteration == 1 and iterated.count(iterated[-1]) == 1:
            raise Interrupted
        inline(task, iteration, journal, ledger)

    first = iterations_of(ProximalGradient(), problem, tmp_path / "a", run_pass=cut_short)
    with pytest.raises(Interrupted):
        list(first.run(3, lambda *_: False))
    written = shards(tmp_path / "a" / "stage.0")
    books = sorted(path.name for path in (tmp_path / "a").glob("journal*"))
    assert books == ["journal.1", "journal.1.0"]
    again = iterations_of(ProximalGradient(), problem, tmp_path / "a")
    list(again.run(2, lambda *_: False))
    assert shards(tmp_path / "a" / "stage.0") == written
    whole = iterations_of(ProximalGradient(), problem, tmp_path / "b")
    list(whole.run(2, lambda *_: False))
    assert np.array_equal(read_all(again.image()), read_all(whole.image()))
    assert not list((tmp_path / "a").glob("journal*"))


def test_a_window_is_read_by_its_own_blocks_alone(tmp_path: Path) -> None:
    image = scene()
    crops = tuple(Crop(origin=origin, size=(20, 30)) for origin in ((0, 0), (60, 10), (75, 55)))
    terms = terms_of(image, crops)
    seen: list[Any] = []

    class Watched(InMemory):
        def read(self, region: Any) -> Any:
            seen.append((self, region))
            return super().read(region)

    watched = tuple(replace(t, measurement=Watched(read_all(t.measurement))) for t in terms)
    run = iterations_of(ProximalGradient(), problem_of(image, watched, step=0.2), tmp_path, block=32)
    list(run.run(1, lambda *_: False))
    for term in watched:
        parts = [region for who, region in seen if who is term.measurement]
        assert sum(region.size for region in parts) <= 2 * 20 * 30  # slope and misfit
    gradient: Any = read_all(problem_of(image, terms).gradient(InMemory(np.zeros_like(image))))
    assert np.array_equal(read_all(run.image()), np.float32(-0.2) * gradient)


# --- as a job -------------------------------------------------------------------------------------


def job_of(folder: Path, operators: tuple[Any, ...], **options: Any) -> Reconstruction:
    """A job for these operators, with what they measure of the scene."""
    image = scene()
    choices = []
    for number, term in enumerate(terms_of(image, operators)):
        path = folder / f"y{number}.zarr"
        if not path.exists():
            write_zarr(path, read_all(term.measurement))
        choices.append(OperatorChoice(name="given", data=str(path), options={"operator": term.operator}))
    return Reconstruction(
        output=Output(path=str(folder / "x.zarr"), shard=64, chunk=32),
        operators=tuple(choices),
        solver=SolverChoice(name="fista", iterations=3),
        run=options.pop("run", Run(workers=2, memory_per_worker="3GiB")),
        **options,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Broken(WholeBlur):
    """One that fails once it is planned."""

    name: ClassVar[str] = "broken"
    planned: Path

    def forward(self, image: Readable) -> Readable:
        if self.planned.exists():
            raise ValueError("no such thing")
        return super().forward(image)


def tree(count: int) -> tuple[Any, ...]:
    return tuple(WholeBlur(blur=Blur(kernel=kernel(3 + 2 * (n % 3)))) for n in range(count))


@pytest.mark.cluster
@pytest.mark.thorough
def test_whole_operators_on_a_cluster_give_what_one_pass_over_local_ones_gives(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    results = []
    for name, operators in (("whole", tree(9)), ("local", tuple(each.blur for each in tree(9)))):
        folder = tmp_path / name
        folder.mkdir()
        plan = make_plan(job_of(folder, operators, exact=True))
        outcome = reconstruct(plan, cluster=cluster)
        results.append((open_source(folder / "x.zarr"), outcome.figures))
        assert not (plan.run_directory / "state").exists()
    whole: Any
    local: Any
    whole, local = (read_all(image) for image, _ in results)
    assert np.abs(whole - local).max() <= 1e-5 * np.abs(local).max()
    assert results[0][1]["misfit"] == pytest.approx(results[1][1]["misfit"], rel=1e-4)


@pytest.mark.cluster
@pytest.mark.parametrize("is_first_whole", [True, False])
def test_a_whole_operator_that_fails_ends_the_run_with_its_number(
    cluster: RunningCluster, tmp_path: Path, is_first_whole: bool
) -> None:
    first, second = tree(2)
    broken = Broken(blur=Blur(kernel=kernel(3)), planned=tmp_path / "planned")
    operators = (first if is_first_whole else first.blur, second, broken)
    job = job_of(tmp_path, tree(3))
    job = replace(
        job,
        operators=tuple(
            replace(choice, options={"operator": operator})
            for choice, operator in zip(job.operators, operators, strict=True)
        ),
    )
    plan = make_plan(job)
    broken.planned.touch()
    with pytest.raises(TaskFailed, match=r"operator 2 \(broken\) failed.*no such thing"):
        reconstruct(plan, cluster=cluster)


@dataclass(frozen=True, kw_only=True, eq=False)
class Deadly(WholeBlur):
    """One that ends its worker the first times after it was planned, when there is a log."""

    name: ClassVar[str] = "deadly"
    log: Path
    deaths: int

    def forward(self, image: Readable) -> Readable:
        if self.log.exists() and len(before := self.log.read_text()) < self.deaths:
            self.log.write_text(before + "x")
            os._exit(3)
        return super().forward(image)


@pytest.mark.thorough
@pytest.mark.cluster
@pytest.mark.parametrize(("deaths", "ends"), [(2, False), thorough(99, True)])
def test_sums_over_whole_images_begin_anew_when_a_worker_dies(
    cluster: RunningCluster, tmp_path: Path, deaths: int, ends: bool
) -> None:
    job = job_of(tmp_path, tree(2))
    deadly = Deadly(blur=Blur(kernel=kernel(3)), log=tmp_path / "log", deaths=deaths)
    first, second = job.operators
    plan = make_plan(replace(job, operators=(first, replace(second, options={"operator": deadly}))))
    deadly.log.touch()
    if ends:
        with pytest.raises(WorkerDied, match=r"the worker that had task .* memory_per_worker each"):
            reconstruct(plan, cluster=cluster)
    else:
        assert reconstruct(plan, cluster=cluster).figures["iteration"] == 3
        assert deadly.log.read_text() == "x" * deaths


@dataclass(frozen=True, kw_only=True, eq=False)
class Greedy(WholeBlur):
    """One that needs much memory."""

    name: ClassVar[str] = "greedy"

    def memory_bytes(self, image: Shape) -> int:
        return 10 * 2**30


def test_an_operator_that_sees_everything_has_to_fit(tmp_path: Path) -> None:
    job = job_of(tmp_path, (*tree(1), Greedy(blur=Blur(kernel=kernel(3)))))
    told = r"operators\[1\] \(greedy\) sees the whole image of \[100, 90\].*needs 10.7 GiB.*Write run.memory_per_worker: 10"
    with pytest.raises(MemoryRefused, match=told):
        make_plan(job)


def test_a_wide_prior_takes_the_operators_apart_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    local = tuple(each.blur for each in tree(2))
    far = PriorChoice(name="tv", options={"weight": 1.0, "iterations": 12})
    for requested, apart in (("auto", True), (True, False), (False, True)):
        plan = make_plan(job_of(tmp_path, local, prior=far, fuse=requested))
        assert work_of(plan).form.apart == apart
        assert plan.summary()["passes"] == 1 + apart
    near = PriorChoice(name="tv", options={"weight": 1.0, "iterations": 1})
    assert not work_of(make_plan(job_of(tmp_path, local, prior=near))).form.apart
