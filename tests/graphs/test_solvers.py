"""Solvers on disk: the bits of the same iterations in memory, however the image is cut, after any interruption, with operators that have a pass of their own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest.mock import Mock

import numpy as np
import pytest

from halotile.errors import DamagedData, MemoryRefused, ResumeRefused, TaskFailed, WorkerDied
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.iterations.iterate import Target
from halotile.graphs.jobs.reconstruct.costs import Form
from halotile.graphs.jobs.reconstruct.job import OperatorChoice, PriorChoice, Reconstruction, SolverChoice
from halotile.graphs.kinds.sections import Output, Run
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run as reconstruct
from halotile.graphs.solvers.base import Problem
from halotile.registry import names
from halotile.storage.rim import Readable
from halotile.storage.views import Constant
from halotile.tasks.block import BlockRunner
from halotile.tasks.fidelities.poisson import Poisson
from halotile.tasks.image_task import View
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.crop import Crop
from tests.cases import thorough
from tests.graphs import solving
from tests.graphs.inline import InlineIterations, inline
from tests.support import work_of, write_zarr

pytestmark = pytest.mark.usefixtures("as_in_a_worker", "without_fsync")

OPTIONS: dict[str, dict[str, Any]] = {"sgd": {"subsets": 2, "decay": 0.1}, "osem": {"subsets": 3, "order": "random"}}
SOLVERS = {name: solving.solver_of(name, **OPTIONS.get(name, {})) for name in names("solvers") if name != "lanczos"}
PRIORLESS = [name for name, solver in SOLVERS.items() if solver.traits.prior_by is None]
STEP = 0.5


def problem_for(solver: str, image: Any, boundary: str, prior: Any = None) -> Any:
    """Blurs of an image, with counts where the solver is for counts."""
    terms = solving.terms_of(image, solving.blurs(boundary))
    if solver != "osem":
        return solving.problem_of(image, terms, prior, STEP)
    counts = tuple(replace(term, fidelity=Poisson()) for term in terms)
    return solving.problem_of(image, counts, prior, STEP).beginning_at(Constant(image.shape, image.dtype, 1.0))


@pytest.mark.parametrize(
    ("solver", "prior", "boundary"),
    [
        *((solver, "none" if solver in PRIORLESS else "gaussian", "circular") for solver in SOLVERS),
        *(("fista", prior, "reflect") for prior in ("none", "l1", "tv")),
        *(
            thorough(solver, prior, boundary)
            for solver in SOLVERS
            for prior in ("none", "l1", "tv", "gaussian", "dncnn")
            for boundary in ("reflect", "zero")
            if solver not in PRIORLESS and (solver, boundary) != ("fista", "reflect")
        ),
    ],
)
def test_passes_have_bits_and_sums_of_whole_images(tmp_path: Path, solver: str, prior: str, boundary: str) -> None:
    image = solving.scene((100, 90) if prior != "dncnn" else (150, 133))
    found, told = [], []
    for block, tile in [(32, 32), (64, 64), (128, 40)]:
        problem = problem_for(solver, image, boundary, solving.prior_of(prior, image, block, tile, tmp_path))
        options: dict[str, Any] = {"block": block, "target": Target(InMemory(image))}
        run = solving.iterations_of(SOLVERS[solver], problem, tmp_path / f"{block}", **options)
        found.append(read_all(solving.finished(run, 3).image()))
        told.append(solving.figures_of(run))
    assert told[0] == told[1] == told[2]
    assert len(told[0]) == 3 + (solver == "cg")
    assert {"iteration", "change", "psnr"} <= told[0][0].keys()
    if solver != "cg":  # whose coefficients follow from sums, exact on disk alone
        whole = problem_for(solver, image, boundary, solving.prior_of(prior, image, 1000, 1000, tmp_path))
        found.append(solving.in_memory(SOLVERS[solver], whole, 3)[0])
    assert all(np.array_equal(found[0], other) for other in found[1:])
    assert found[0].any()


@pytest.mark.parametrize(("tile", "boundary"), [(24, "reflect"), (50, "circular"), thorough(512, "zero")])
def test_tiles_in_one_pass_or_two_have_the_bits_of_whole_images(tmp_path: Path, tile: int, boundary: str) -> None:
    # For very small tiles torch takes another routine: their windows are drawn out to what is safe.
    image = solving.scene((220, 190))
    terms = solving.terms_of(image, solving.blurs(boundary))
    whole = solving.problem_of(image, terms, solving.prior_of("dncnn", image, 1000, 1000, tmp_path), STEP)
    expected, _ = solving.in_memory(solving.solver_of("pgd"), whole, 2)
    problem = solving.problem_of(image, terms, solving.prior_of("dncnn", image, 128, tile, tmp_path), STEP)
    form = Form(terms, apart=True)
    apart = replace(problem, gradient=form.map("gradient"), normal=form.map("normal"))
    for name, each in (("one", problem), ("two", apart)):
        run = solving.iterations_of(
            solving.solver_of("pgd"), each, tmp_path / name, block=128, shard=128, own_view=View(reach=16)
        )
        assert np.array_equal(read_all(solving.finished(run, 2).image()), expected)


# --- the state between iterations and in the middle of one ----------------------------------------


def cut_short(solver: str, folder: Path) -> tuple[Callable[[], InlineIterations], InlineIterations]:
    """Iterations that broke off inside of the third, to go on with, and the same iterations undisturbed."""
    image = solving.scene((90, 60))
    problem = problem_for(solver, image, "zero").beginning_at(Constant(image.shape, image.dtype, 1.0))

    def cut(task: Any, iteration: int, journal: Any, ledger: Any) -> None:
        if iteration < 2 or journal.done:
            return inline(task, iteration, journal, ledger)
        receipt = BlockRunner(task).run([0, 2, 5])
        ledger.enter({number: receipt.sums[number] for number in receipt.done[:2]})
        journal.mark(receipt.digests)
        raise solving.Interrupted

    start = partial(solving.iterations_of, SOLVERS[solver], problem, block=32)
    with pytest.raises(solving.Interrupted):
        solving.finished(start(folder / "b", run_pass=cut), 4)
    return lambda: start(folder / "b"), solving.finished(start(folder / "a"), 4)


break_nothing: Callable[[Path], None] = Mock()


def swap_shards(folder: Path) -> None:
    """Write a shard of another place over one of the half pass, in every image."""
    names = [path.name for path in folder.glob("*.*/") if "stage" not in path.name]
    made = [name for name in names if int(name[-1]) == 3 % sum(n[0] == name[0] for n in names)]
    assert made
    for name in made:
        shutil.copyfile(folder / name / "c" / "0" / "0", folder / name / "c" / "0" / "1")


def lose_book(folder: Path, book: str, left: bytes | None) -> None:
    """Leave a book as a power cut may: not at all, empty, or zeros."""
    assert (folder / book).exists()
    (folder / book).unlink() if left is None else (folder / book).write_bytes(left)


POWER_CUTS = [partial(lose_book, book=b, left=left) for b in ("journal.2", "sums.2") for left in (None, b"", bytes(90))]


@pytest.mark.parametrize(
    ("solver", "damage"),
    [
        *((solver, break_nothing) for solver in ("fista", "admm", "cg", "svrg", "osem")),
        *((solver, swap_shards) for solver in ("admm", "cg", "svrg", "osem")),
        *(("pgd", cut) for cut in POWER_CUTS),
        *(thorough(solver, damage) for solver in ("gd", "pgd", "sgd") for damage in (break_nothing, swap_shards)),
    ],
)
def test_a_pass_that_was_cut_short_goes_on_with_the_same_bits(tmp_path: Path, solver: str, damage: Any) -> None:
    go_on, undisturbed = cut_short(solver, tmp_path)
    damage(tmp_path / "b")
    again = go_on()
    assert again.state.passes == 2
    solving.finished(again, 4)
    assert np.array_equal(read_all(again.image()), read_all(undisturbed.image()))
    assert solving.figures_of(again) == solving.figures_of(undisturbed)
    assert not list((tmp_path / "b").glob("journal*"))


ELSEWHERE = r"x\.0: it contains a shard of another place or time: .* --fresh"


@pytest.mark.parametrize("iterations", [3, 4])
def test_a_state_that_is_not_the_one_that_was_written_is_refused(tmp_path: Path, iterations: int) -> None:
    """Of the image, or of the one before, which fista needs as well."""
    problem = problem_for("fista", solving.scene((90, 60)), "zero")
    start = partial(solving.iterations_of, solving.solver_of("fista"), problem, tmp_path, block=32)
    run = solving.finished(start(), iterations)
    start()
    shard = tmp_path / "x.0" / "c" / "1" / "1"
    whole = shard.read_bytes()
    damages: list[tuple[Callable[[], object], str]] = [
        (shard.unlink, r"x\.0/c/1/1: the shard is missing: .* --fresh"),
        (lambda: shutil.copyfile(shard.with_name("0"), shard), ELSEWHERE),
        (lambda: shutil.copyfile(str(shard).replace("x.0", "x.2"), shard), ELSEWHERE),
    ]
    for damage, words in damages:
        damage()
        with pytest.raises(DamagedData, match=words):
            start()
        shard.write_bytes(whole)
    run.fingerprint = "another job"
    with pytest.raises(ResumeRefused):
        run._resumed()


SUBSETS = {name: solving.solver_of(name, subsets=2) for name in ("sgd", "svrg", "osem")}
STAGED: dict[str, Any] = {**{name: solving.solver_of(name) for name in ("pgd", "fista", "admm", "cg")}, **SUBSETS}
IMAGE = solving.scene((100, 90)) + np.float32(0.1)


def staged(problem: Problem, form: Form) -> Problem:
    """The same problem with its operators as a form has them."""
    maps: dict[str, Any] = {name: form.map(name) for name in ("gradient", "normal", "sensitivity")}
    return replace(problem, **maps, parts=lambda numbers: staged(problem, form.subset(numbers)))


@pytest.mark.parametrize("solver", STAGED)
def test_operators_with_a_pass_of_their_own_give_the_image_and_figures_of_one_pass(tmp_path: Path, solver: str) -> None:
    """To the bit where they are near; operators that see everything are added up beside the others."""
    terms = solving.terms_of(IMAGE, solving.blurs("circular"))
    if solver == "osem":
        terms = tuple(replace(term, fidelity=Poisson()) for term in terms)
    near, *far = terms
    whole = tuple(replace(t, operator=solving.WholeBlur(blur=cast(Blur, t.operator))) for t in far)
    prior = solving.prior_of("none" if solver in PRIORLESS else "gaussian", IMAGE, 64, 40)
    problem = solving.problem_of(IMAGE, terms, prior, 0.5).beginning_at(Constant(IMAGE.shape, IMAGE.dtype, 1.0))
    forms = {"two": Form(terms, apart=True), "mixed": Form((near, *whole))}
    problems = {"one": problem, **{name: staged(problem, form) for name, form in forms.items()}}
    runs, parts = {}, tmp_path / "parts"
    for name, each in problems.items():
        run = solving.iterations_of(
            STAGED[solver], each, tmp_path / name, own_view=View(reach=16), gather=solving.gathered(parts), parts=parts
        )
        runs[name] = solving.finished(run, 3)
        assert (tmp_path / name / "stage.0").exists() == (name != "one")
    images: list[Any] = [read_all(run.image()) for run in runs.values()]
    one, two, mixed = images
    assert np.array_equal(one, two)
    assert solving.figures_of(runs["one"]) == solving.figures_of(runs["two"])
    assert np.abs(one - mixed).max() <= 5e-6 * np.abs(one).max()
    for ours, theirs in zip(runs["mixed"].rows, runs["one"].rows, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours.get("misfit", 0) == pytest.approx(theirs.get("misfit", 0), rel=1e-4)


def shards(array: Path) -> dict[Path, int]:
    """When each was written."""
    return {path: path.stat().st_mtime_ns for path in (array / "c").rglob("*") if path.is_file()}


def test_a_gradient_that_was_stored_before_its_pass_is_not_computed_again(tmp_path: Path) -> None:
    terms = solving.terms_of(IMAGE, solving.blurs("zero"))
    problem = staged(solving.problem_of(IMAGE, terms, step=0.5), Form(terms, apart=True))
    iterated = []

    def cut_short(task: Any, iteration: int, journal: Any, ledger: Any) -> None:
        iterated.append(str(task.images[0][0].path))
        if "stage" not in iterated[-1] and iteration == 1 and iterated.count(iterated[-1]) == 1:
            raise solving.Interrupted
        inline(task, iteration, journal, ledger)

    start = partial(solving.iterations_of, solving.solver_of("pgd"), problem)
    with pytest.raises(solving.Interrupted):
        solving.finished(start(tmp_path / "a", run_pass=cut_short), 3)
    written = shards(tmp_path / "a" / "stage.0")
    assert sorted(path.name for path in (tmp_path / "a").glob("journal*")) == ["journal.1", "journal.1.0"]
    again, whole = (solving.finished(start(tmp_path / name), 2) for name in "ab")
    assert shards(tmp_path / "a" / "stage.0") == written != {}
    assert np.array_equal(read_all(again.image()), read_all(whole.image()))
    assert not list((tmp_path / "a").glob("journal*"))


def test_a_window_is_read_by_its_own_blocks_alone(tmp_path: Path) -> None:
    crops = tuple(Crop(origin=origin, size=(20, 30)) for origin in ((0, 0), (60, 10), (75, 55)))
    seen: list[Any] = []

    class Watched(InMemory):
        def read(self, region: Any) -> Any:
            seen.append((self, region))
            return super().read(region)

    terms = tuple(replace(t, measurement=Watched(read_all(t.measurement))) for t in solving.terms_of(IMAGE, crops))
    problem = solving.problem_of(IMAGE, terms, step=0.2)
    run = solving.finished(solving.iterations_of(solving.solver_of("pgd"), problem, tmp_path, block=32), 1)
    for term in terms:
        parts = [region for who, region in seen if who is term.measurement]
        assert sum(region.size for region in parts) <= 2 * 20 * 30  # slope and misfit
    gradient: Any = read_all(problem.gradient(InMemory(np.zeros_like(IMAGE))))
    assert np.array_equal(read_all(run.image()), np.float32(-0.2) * gradient)


# --- as a job -------------------------------------------------------------------------------------


def job_of(folder: Path, operators: tuple[Any, ...], **options: Any) -> Reconstruction:
    """A job for these operators, with what blurs of the same number measure of the scene."""
    choices = []
    for number, term in enumerate(solving.terms_of(IMAGE, tree(len(operators)))):
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
    return tuple(solving.WholeBlur(blur=Blur(kernel=solving.kernel(3 + 2 * (n % 3)))) for n in range(count))


@dataclass(frozen=True, kw_only=True, eq=False)
class Broken(solving.WholeBlur):
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
    broken = Broken(blur=Blur(kernel=solving.kernel(3)), log=tmp_path / "log", deaths=deaths)
    plan = make_plan(job_of(tmp_path, (first if is_first_whole else first.blur, second, broken)))
    broken.log.touch()
    if deaths == 2:
        assert reconstruct(plan, cluster=cluster).figures["iteration"] == 3
        assert broken.log.read_text() == "xx"
        return
    failed, died = r"operator 2 \(broken\) failed.*no such thing", r"the worker that had task .* memory_per_worker each"
    with pytest.raises(WorkerDied if deaths else TaskFailed, match=died if deaths else failed):
        reconstruct(plan, cluster=cluster)


class Greedy(solving.WholeBlur):
    """One that needs much memory."""

    name: ClassVar[str] = "greedy"
    memory_bytes = Mock(return_value=10 * 2**30)


def test_an_operator_that_sees_everything_has_to_fit(tmp_path: Path) -> None:
    told = r"operators\[1\] \(greedy\) sees the whole image of \[100, 90\].*needs 10.7 GiB.*Write run.memory_per_worker: 10"
    with pytest.raises(MemoryRefused, match=told):
        make_plan(job_of(tmp_path, (*tree(1), Greedy(blur=Blur(kernel=solving.kernel(3))))))


def test_a_wide_prior_takes_the_operators_apart_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    near = tuple(each.blur for each in tree(2))
    for requested, wide, apart in (("auto", 12, True), (True, 12, False), (False, 12, True), ("auto", 1, False)):
        prior = PriorChoice(name="tv", options={"weight": 1.0, "iterations": wide})
        plan = make_plan(job_of(tmp_path, near, prior=prior, fuse=requested))
        assert work_of(plan).form.apart == apart
        assert plan.summary()["passes"] == 1 + apart
