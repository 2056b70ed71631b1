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
from halotile.graphs.solvers.base import Problem
from halotile.storage.rim import Readable
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.json_files import Ledger
from halotile.storage.views import Constant
from halotile.tasks.denoisers.gaussian import Gaussian
from halotile.tasks.fidelities.poisson import Poisson
from halotile.tasks.image_task import ImageTask, View
from halotile.tasks.operators.base import InMemory, OperatorKind, Shape, read_all
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.crop import Crop
from halotile.tasks.priors.none import NoPrior
from tests.cases import thorough
from tests.graphs.inline import inline
from tests.graphs.solving import (
    Interrupted,
    blurs,
    denoised_by,
    figures_of,
    finished,
    iterations_of,
    kernel,
    plugged,
    problem_of,
    scene,
    solver_of,
    terms_of,
)
from tests.support import read_zarr, work_of, write_zarr

pytestmark = pytest.mark.usefixtures("as_in_a_worker", "without_fsync")

SUBSETS = {name: solver_of(name, subsets=2) for name in ("sgd", "svrg", "osem")}
SOLVERS: dict[str, Any] = {**{name: solver_of(name) for name in ("pgd", "fista", "admm", "cg")}, **SUBSETS}
IMAGE = scene((100, 90)) + np.float32(0.1)


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
def test_operators_with_a_pass_of_their_own_give_the_image_and_figures_of_one_pass(tmp_path: Path, solver: str) -> None:
    """To the bit where they are near; operators that see everything are added up beside the others."""
    terms = terms_of(IMAGE, blurs("circular"))
    if solver == "osem":
        terms = tuple(replace(term, fidelity=Poisson()) for term in terms)
    near, *far = terms
    whole = tuple(replace(t, operator=WholeBlur(blur=cast(Blur, t.operator))) for t in far)
    plain = NoPrior() if solver in ("cg", "osem") else plugged(denoised_by(Gaussian(sigma=0.7), IMAGE, 64, 40))
    problem = problem_of(IMAGE, terms, plain, 0.5).beginning_at(Constant(IMAGE.shape, IMAGE.dtype, 1.0))
    forms = {"two": Form(terms, apart=True), "mixed": Form((near, *whole))}
    problems = {"one": problem, **{name: staged(problem, form) for name, form in forms.items()}}
    runs, parts = {}, tmp_path / "parts"
    for name, each in problems.items():
        run = iterations_of(
            SOLVERS[solver], each, tmp_path / name, own_view=View(reach=16), gather=gathered(parts), parts=parts
        )
        runs[name] = finished(run, 3)
        assert (tmp_path / name / "stage.0").exists() == (name != "one")
    images: list[Any] = [read_all(run.image()) for run in runs.values()]
    one, two, mixed = images
    assert np.array_equal(one, two)
    assert figures_of(runs["one"]) == figures_of(runs["two"])
    assert np.abs(one - mixed).max() <= 5e-6 * np.abs(one).max()
    for ours, theirs in zip(runs["mixed"].rows, runs["one"].rows, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours.get("misfit", 0) == pytest.approx(theirs.get("misfit", 0), rel=1e-4)


def shards(array: Path) -> dict[Path, int]:
    """When each was written."""
    found = {path: path.stat().st_mtime_ns for path in (array / "c").rglob("*") if path.is_file()}
    assert found
    return found


def test_a_gradient_that_was_stored_before_its_pass_is_not_computed_again(tmp_path: Path) -> None:
    terms = terms_of(IMAGE, blurs("zero"))
    problem = staged(problem_of(IMAGE, terms, step=0.5), Form(terms, apart=True))
    iterated = []

    def cut_short(task: ImageTask, iteration: int, journal: Journal, ledger: Ledger) -> None:
        iterated.append(str(task.images[0][0].path))
        if "stage" not in iterated[-1] and iteration == 1 and iterated.count(iterated[-1]) == 1:
            raise Interrupted
        inline(task, iteration, journal, ledger)

    with pytest.raises(Interrupted):
        finished(iterations_of(solver_of("pgd"), problem, tmp_path / "a", run_pass=cut_short), 3)
    written = shards(tmp_path / "a" / "stage.0")
    assert sorted(path.name for path in (tmp_path / "a").glob("journal*")) == ["journal.1", "journal.1.0"]
    again, whole = (finished(iterations_of(solver_of("pgd"), problem, tmp_path / name), 2) for name in "ab")
    assert shards(tmp_path / "a" / "stage.0") == written
    assert np.array_equal(read_all(again.image()), read_all(whole.image()))
    assert not list((tmp_path / "a").glob("journal*"))


def test_a_window_is_read_by_its_own_blocks_alone(tmp_path: Path) -> None:
    crops = tuple(Crop(origin=origin, size=(20, 30)) for origin in ((0, 0), (60, 10), (75, 55)))
    seen: list[Any] = []

    class Watched(InMemory):
        def read(self, region: Any) -> Any:
            seen.append((self, region))
            return super().read(region)

    terms = tuple(replace(t, measurement=Watched(read_all(t.measurement))) for t in terms_of(IMAGE, crops))
    problem = problem_of(IMAGE, terms, step=0.2)
    run = finished(iterations_of(solver_of("pgd"), problem, tmp_path, block=32), 1)
    for term in terms:
        parts = [region for who, region in seen if who is term.measurement]
        assert sum(region.size for region in parts) <= 2 * 20 * 30  # slope and misfit
    gradient: Any = read_all(problem.gradient(InMemory(np.zeros_like(IMAGE))))
    assert np.array_equal(read_all(run.image()), np.float32(-0.2) * gradient)


# --- as a job -------------------------------------------------------------------------------------


def job_of(folder: Path, operators: tuple[Any, ...], **options: Any) -> Reconstruction:
    """A job for these operators, with what blurs of the same number measure of the scene."""
    choices = []
    for number, term in enumerate(terms_of(IMAGE, tree(len(operators)))):
        path = folder / f"y{number}.zarr"
        if not path.exists():
            write_zarr(path, read_all(term.measurement))
        choices.append(OperatorChoice(name="given", data=str(path), options={"operator": operators[number]}))
    return Reconstruction(
        output=Output(path=str(folder / "x.zarr"), shard=64, chunk=32),
        operators=tuple(choices),
        solver=SolverChoice(name="fista", iterations=3),
        run=Run(workers=2, memory_per_worker="3GiB"),
        **options,
    )


def tree(count: int) -> tuple[Any, ...]:
    return tuple(WholeBlur(blur=Blur(kernel=kernel(3 + 2 * (n % 3)))) for n in range(count))


@pytest.mark.cluster
@pytest.mark.thorough
def test_whole_operators_on_a_cluster_give_what_local_ones_give(cluster: RunningCluster, tmp_path: Path) -> None:
    found = []
    for name, operators in (("whole", tree(9)), ("local", tuple(each.blur for each in tree(9)))):
        (tmp_path / name).mkdir()
        plan = make_plan(job_of(tmp_path / name, operators, exact=True))
        misfit = reconstruct(plan, cluster=cluster).figures["misfit"]
        found.append((read_zarr(tmp_path / name / "x.zarr"), misfit))
        assert not (plan.run_directory / "state").exists()
    (whole, ours), (near, theirs) = found
    assert np.abs(whole - near).max() <= 1e-5 * np.abs(near).max()
    assert ours == pytest.approx(theirs, rel=1e-4)


@dataclass(frozen=True, kw_only=True, eq=False)
class Broken(WholeBlur):
    """One that fails, or ends its worker some times, once it is planned and there is a log."""

    name: ClassVar[str] = "broken"
    log: Path
    deaths: int = 0

    def forward(self, image: Readable) -> Readable:
        if self.log.exists():
            if not self.deaths:
                raise ValueError("no such thing")
            if len(before := self.log.read_text()) < self.deaths:
                self.log.write_text(before + "x")
                os._exit(3)
        return super().forward(image)


@pytest.mark.cluster
@pytest.mark.parametrize(("is_first_whole", "deaths"), [(True, 0), (False, 0), thorough(True, 2), thorough(True, 99)])
def test_an_operator_that_fails_ends_the_run_with_its_number_and_sums_begin_anew_when_a_worker_dies(
    cluster: RunningCluster, tmp_path: Path, is_first_whole: bool, deaths: int
) -> None:
    first, second = tree(2)
    broken = Broken(blur=Blur(kernel=kernel(3)), log=tmp_path / "log", deaths=deaths)
    plan = make_plan(job_of(tmp_path, (first if is_first_whole else first.blur, second, broken)))
    broken.log.touch()
    if deaths == 2:
        assert reconstruct(plan, cluster=cluster).figures["iteration"] == 3
        assert broken.log.read_text() == "xx"
        return
    error, words = TaskFailed, r"operator 2 \(broken\) failed.*no such thing"
    if deaths:
        error, words = WorkerDied, r"the worker that had task .* memory_per_worker each"
    with pytest.raises(error, match=words):
        reconstruct(plan, cluster=cluster)


@dataclass(frozen=True, kw_only=True, eq=False)
class Greedy(WholeBlur):
    """One that needs much memory."""

    name: ClassVar[str] = "greedy"

    def memory_bytes(self, image: Shape) -> int:
        return 10 * 2**30


def test_an_operator_that_sees_everything_has_to_fit(tmp_path: Path) -> None:
    told = r"operators\[1\] \(greedy\) sees the whole image of \[100, 90\].*needs 10.7 GiB.*Write run.memory_per_worker: 10"
    with pytest.raises(MemoryRefused, match=told):
        make_plan(job_of(tmp_path, (*tree(1), Greedy(blur=Blur(kernel=kernel(3))))))


def test_a_wide_prior_takes_the_operators_apart_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    near = tuple(each.blur for each in tree(2))
    for requested, wide, apart in (("auto", 12, True), (True, 12, False), (False, 12, True), ("auto", 1, False)):
        prior = PriorChoice(name="tv", options={"weight": 1.0, "iterations": wide})
        plan = make_plan(job_of(tmp_path, near, prior=prior, fuse=requested))
        assert work_of(plan).form.apart == apart
        assert plan.summary()["passes"] == 1 + apart
