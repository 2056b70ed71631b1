"""The state between iterations and in the middle of one: gone on with to the same bits, or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halotile.errors import DamagedData, ResumeRefused
from halotile.graphs.solvers.fista import Fista
from halotile.graphs.solvers.gd import GradientDescent
from halotile.graphs.solvers.osem import OrderedSubsetsEM
from halotile.storage.views import Constant
from halotile.tasks.block import BlockRunner
from halotile.tasks.fidelities.poisson import Poisson
from halotile.tasks.operators.base import read_all
from tests.cases import all_of, thorough
from tests.graphs.inline import InlineIterations, inline
from tests.graphs.solving import Interrupted, blurs, iterations_of, problem_of, scene, terms_of
from tests.graphs.test_solvers import SOLVERS as OF_SQUARES
from tests.graphs.test_solvers import STEP

SOLVERS = {**OF_SQUARES, "osem": OrderedSubsetsEM(subsets=3, order="random")}
pytestmark = pytest.mark.usefixtures("as_in_a_worker")


def cut_short(solver: str, folder: Path) -> tuple[Callable[[], InlineIterations], InlineIterations]:
    """What goes on with iterations that broke off inside of the third, and the same iterations undisturbed."""
    image = scene()
    terms = terms_of(image, blurs("zero"))
    if solver == "osem":
        terms = tuple(replace(term, fidelity=Poisson()) for term in terms)
    ones = Constant(image.shape, image.dtype, 1.0)
    problem = problem_of(image, terms, step=STEP).beginning_at(ones)

    def cut(task: Any, iteration: int, journal: Any, ledger: Any) -> None:
        if iteration < 2 or journal.done:
            return inline(task, iteration, journal, ledger)
        receipt = BlockRunner(task).run([0, 2, 5])
        ledger.enter({number: receipt.sums[number] for number in receipt.done[:2]})
        journal.mark(receipt.digests)
        raise Interrupted

    with pytest.raises(Interrupted):
        list(iterations_of(SOLVERS[solver], problem, folder / "b", run_pass=cut).run(4, lambda *_: False))
    undisturbed = iterations_of(SOLVERS[solver], problem, folder / "a")
    list(undisturbed.run(4, lambda *_: False))
    return lambda: iterations_of(SOLVERS[solver], problem, folder / "b"), undisturbed


@pytest.mark.parametrize("solver", all_of(SOLVERS, thorough=["gd", "sgd", "pgd"]))
def test_a_pass_that_was_cut_short_goes_on_with_the_same_bits(tmp_path: Path, solver: str) -> None:
    go_on, undisturbed = cut_short(solver, tmp_path)
    again = go_on()
    assert again.state.passes == 2
    list(again.run(4, lambda *_: False))
    assert np.array_equal(read_all(again.image()), read_all(undisturbed.image()))
    for ours, theirs in zip(again.rows, undisturbed.rows, strict=True):
        assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}
    assert sorted(path.name for path in (tmp_path / "b").glob("journal*")) == []


@pytest.mark.parametrize("solver", all_of(SOLVERS, thorough=["gd", "pgd", "fista", "sgd"]))
def test_a_shard_of_another_place_in_half_a_pass_is_written_again(tmp_path: Path, solver: str) -> None:
    go_on, undisturbed = cut_short(solver, tmp_path)
    names = [path.name for path in (tmp_path / "b").glob("*.*/") if "stage" not in path.name]
    made = [name for name in names if int(name[-1]) == 3 % sum(n[0] == name[0] for n in names)]
    assert made
    for name in made:
        shards = tmp_path / "b" / name / "c" / "0"
        shutil.copyfile(shards / "0", shards / "1")
    again = go_on()
    list(again.run(4, lambda *_: False))
    assert np.array_equal(read_all(again.image()), read_all(undisturbed.image()))


@pytest.mark.parametrize("book", ["journal.2", "sums.2"])
@pytest.mark.parametrize("left", [None, b"", thorough(b"\0" * 90)], ids=["nothing", "an empty file", "zeros"])
def test_books_that_a_power_cut_took_cost_a_pass_and_no_bit(tmp_path: Path, book: str, left: bytes | None) -> None:
    go_on, undisturbed = cut_short("pgd", tmp_path)
    path = tmp_path / "b" / book
    assert path.exists()
    path.unlink() if left is None else path.write_bytes(left)
    again = go_on()
    list(again.run(4, lambda *_: False))
    assert np.array_equal(read_all(again.image()), read_all(undisturbed.image()))


def test_a_state_of_another_job_is_refused(tmp_path: Path) -> None:
    image = scene()
    problem = problem_of(image, terms_of(image, blurs("zero")), step=STEP)
    list(iterations_of(GradientDescent(), problem, tmp_path).run(1, lambda *_: False))
    run = iterations_of(GradientDescent(), problem, tmp_path)
    run.fingerprint = "another job"
    with pytest.raises(ResumeRefused):
        run._resumed()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (Path.unlink, r"x\.0/c/1/1: the shard is missing: .* --fresh"),
        (
            lambda shard: shutil.copyfile(shard.with_name("2"), shard),
            r"x\.0: it contains a shard of another place or time: .* --fresh",
        ),
        (
            lambda shard: shutil.copyfile(str(shard).replace("x.0", "x.2"), shard),
            r"x\.0: it contains a shard of another place or time: .* --fresh",
        ),
    ],
    ids=["gone", "of another place", "of another time"],
)
@pytest.mark.parametrize("iterations", [3, 4])
def test_a_state_whose_shards_are_not_those_that_were_written_is_refused(
    tmp_path: Path, damage: Callable[[Path], object], words: str, iterations: int
) -> None:
    """Of the image, or of the one before, which fista needs as well."""
    image = scene()
    problem = problem_of(image, terms_of(image, blurs("zero")), step=STEP)
    list(iterations_of(Fista(), problem, tmp_path).run(iterations, lambda *_: False))
    iterations_of(Fista(), problem, tmp_path)
    damage(tmp_path / "x.0" / "c" / "1" / "1")
    with pytest.raises(DamagedData, match=words):
        iterations_of(Fista(), problem, tmp_path)
