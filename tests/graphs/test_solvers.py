"""Solvers on disk: the bits of the same iterations in memory, however the image is cut, and after any interruption."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halotile.errors import DamagedData, ResumeRefused
from halotile.graphs.iterations.iterate import Target
from halotile.graphs.jobs.reconstruct.costs import Form
from halotile.graphs.solvers.base import State
from halotile.registry import names
from halotile.storage.views import Constant
from halotile.tasks.block import BlockRunner
from halotile.tasks.fidelities.poisson import Poisson
from halotile.tasks.image_task import View
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.priors.base import Prior
from tests.cases import thorough
from tests.graphs.inline import InlineIterations, inline
from tests.graphs.solving import (
    Interrupted,
    blurs,
    figures_of,
    finished,
    in_memory,
    iterations_of,
    prior_of,
    problem_of,
    scene,
    solver_of,
    terms_of,
)

pytestmark = pytest.mark.usefixtures("as_in_a_worker", "without_fsync")

OPTIONS: dict[str, dict[str, Any]] = {"sgd": {"subsets": 2, "decay": 0.1}, "osem": {"subsets": 3, "order": "random"}}
SOLVERS = {name: solver_of(name, **OPTIONS.get(name, {})) for name in names("solvers") if name != "lanczos"}
PRIORLESS = [name for name, solver in SOLVERS.items() if solver.traits.prior_by is None]
STEP = 0.5


def problem_for(solver: str, image: Any, boundary: str, prior: Prior | None = None) -> Any:
    """Blurs of an image, with counts where the solver is for counts."""
    terms = terms_of(image, blurs(boundary))
    if solver != "osem":
        return problem_of(image, terms, prior, STEP)
    counts = tuple(replace(term, fidelity=Poisson()) for term in terms)
    return problem_of(image, counts, prior, STEP).beginning_at(Constant(image.shape, image.dtype, 1.0))


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
def test_passes_have_the_bits_of_whole_images_and_sums_do_not_depend_on_blocks(
    tmp_path: Path, solver: str, prior: str, boundary: str
) -> None:
    image = scene((100, 90) if prior != "dncnn" else (150, 133))
    found, told = [], []
    for block, tile in [(32, 32), (64, 64), (128, 40)]:
        problem = problem_for(solver, image, boundary, prior_of(prior, image, block, tile, tmp_path))
        run = iterations_of(
            SOLVERS[solver], problem, tmp_path / f"{block}", block=block, target=Target(InMemory(image))
        )
        found.append(read_all(finished(run, 3).image()))
        told.append(figures_of(run))
    assert told[0] == told[1] == told[2]
    assert len(told[0]) == 3 + (solver == "cg")
    assert {"iteration", "change", "psnr"} <= told[0][0].keys()
    if solver != "cg":  # whose coefficients follow from sums, exact on disk alone
        whole = problem_for(solver, image, boundary, prior_of(prior, image, 1000, 1000, tmp_path))
        found.append(in_memory(SOLVERS[solver], whole, 3)[0])
    assert all(np.array_equal(found[0], other) for other in found[1:])
    assert found[0].any()


@pytest.mark.parametrize(
    ("tile", "boundary"),
    [
        (24, "reflect"),
        (50, "circular"),
        *(thorough(50, rule) for rule in ("reflect", "zero")),
        *(thorough(512, rule) for rule in ("circular", "reflect", "zero")),
    ],
)
def test_tiles_in_one_pass_or_two_have_the_bits_of_whole_images(tmp_path: Path, tile: int, boundary: str) -> None:
    # For very small tiles torch takes another routine: their windows are drawn out to what is safe.
    image = scene((220, 190))
    terms = terms_of(image, blurs(boundary))
    whole = problem_of(image, terms, prior_of("dncnn", image, 1000, 1000, tmp_path), STEP)
    expected, _ = in_memory(solver_of("pgd"), whole, 2)
    problem = problem_of(image, terms, prior_of("dncnn", image, 128, tile, tmp_path), STEP)
    form = Form(terms, apart=True)
    apart = replace(problem, gradient=form.map("gradient"), normal=form.map("normal"))
    for name, each in (("one", problem), ("two", apart)):
        run = iterations_of(solver_of("pgd"), each, tmp_path / name, block=128, shard=128, own_view=View(reach=16))
        assert np.array_equal(read_all(finished(run, 2).image()), expected)


def test_iterations_end_when_the_image_is_at_rest(tmp_path: Path) -> None:
    run = iterations_of(solver_of("pgd"), problem_for("pgd", scene((64, 60)), "reflect"), tmp_path)
    rows = list(run.run(50, lambda _, row: row["change"] < 0.01))
    assert 1 < len(rows) < 50
    assert rows[-1]["change"] < 0.01 <= rows[-2]["change"]


def test_stored_images_are_read_once_a_block(tmp_path: Path) -> None:
    """By every operator, the prior and the sums together: with its halo, no more."""
    read: list[int] = []

    def counted(task: Any, iteration: int, journal: Any, ledger: Any) -> None:
        receipt = BlockRunner(task).run(range(len(task.grid)))
        read.append(receipt.read_bytes)
        ledger.enter(receipt.sums)
        journal.mark(receipt.digests)

    problem = problem_for("pgd", scene((256, 256)), "reflect")
    finished(iterations_of(solver_of("pgd"), problem, tmp_path, run_pass=counted, halo=18, shard=64), 2)
    assert read[1] < 4 * 256 * 256 * (1 + 2 * 18 / 64) ** 2


# --- the state between iterations and in the middle of one ----------------------------------------


def cut_short(solver: str, folder: Path) -> tuple[Callable[[], InlineIterations], InlineIterations]:
    """Iterations that broke off inside of the third, to go on with, and the same iterations undisturbed."""
    image = scene((90, 60))
    problem = problem_for(solver, image, "zero").beginning_at(Constant(image.shape, image.dtype, 1.0))

    def cut(task: Any, iteration: int, journal: Any, ledger: Any) -> None:
        if iteration < 2 or journal.done:
            return inline(task, iteration, journal, ledger)
        receipt = BlockRunner(task).run([0, 2, 5])
        ledger.enter({number: receipt.sums[number] for number in receipt.done[:2]})
        journal.mark(receipt.digests)
        raise Interrupted

    start = partial(iterations_of, SOLVERS[solver], problem, block=32)
    with pytest.raises(Interrupted):
        finished(start(folder / "b", run_pass=cut), 4)
    return lambda: start(folder / "b"), finished(start(folder / "a"), 4)


def break_nothing(folder: Path) -> None:
    """Leave the half pass as it is."""


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
def test_a_pass_that_was_cut_short_goes_on_with_the_same_bits_whatever_happened_to_it(
    tmp_path: Path, solver: str, damage: Callable[[Path], None]
) -> None:
    go_on, undisturbed = cut_short(solver, tmp_path)
    damage(tmp_path / "b")
    again = go_on()
    assert again.state.passes == 2
    finished(again, 4)
    assert np.array_equal(read_all(again.image()), read_all(undisturbed.image()))
    assert figures_of(again) == figures_of(undisturbed)
    assert not list((tmp_path / "b").glob("journal*"))


ELSEWHERE = r"x\.0: it contains a shard of another place or time: .* --fresh"


@pytest.mark.parametrize("iterations", [3, 4])
def test_a_state_that_is_not_the_one_that_was_written_is_refused(tmp_path: Path, iterations: int) -> None:
    """Of the image, or of the one before, which fista needs as well."""
    start = partial(
        iterations_of, solver_of("fista"), problem_for("fista", scene((90, 60)), "zero"), tmp_path, block=32
    )
    run = finished(start(), iterations)
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


def test_a_state_is_a_value() -> None:
    state = State(3, {"t": 2.0})
    assert solver_of("fista").next(None, state, {}).passes == 4
    assert state.numbers == {"t": 2.0}
