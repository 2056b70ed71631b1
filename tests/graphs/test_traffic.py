"""What a plan says that an iteration moves is what it moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halotile.graphs.jobs.reconstruct.costs import choose_form, computed_twice, pixels_read
from halotile.graphs.jobs.reconstruct.job import OperatorChoice, PriorChoice, Reconstruction, SolverChoice
from halotile.graphs.kinds.sections import DenoiserChoice, Output
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.runs.claim import kept_of
from halotile.storage.grid import Grid, Region
from halotile.storage.views import Constant
from halotile.tasks.block import BlockRunner
from halotile.tasks.image_task import Scope, Shared, View
from halotile.tasks.operators.blur import Blur
from halotile.tasks.options import Auto
from halotile.tasks.priors.none import NoPrior
from halotile.tasks.terms import Term
from tests.cases import thorough
from tests.graphs.solving import iterations_of_plan, kernel
from tests.support import work_of, write_zarr

pytestmark = pytest.mark.usefixtures("as_in_a_worker")

SHAPE = (512, 448)
EDGES = (3, 5, 5)
"""Small enough for direct sums, also when they are folded: transforms read whole cells, which are larger than these blocks."""
PRIORS = {
    "none": PriorChoice(),
    "tv": PriorChoice(name="tv", options={"weight": 2.0, "iterations": 8}),
    "pnp": PriorChoice(name="pnp", options={"denoiser": DenoiserChoice(name="gaussian", options={"sigma": 3.0})}),
}


def plan_of(
    folder: Path,
    *,
    prior: str,
    solver: str,
    exact: bool,
    boundary: str = "reflect",
    fuse: bool | Auto = True,
    every: int = 1,
) -> Plan:
    """A plan for three blurs."""
    rng = np.random.default_rng(0)
    operators = []
    for number, edge in enumerate(EDGES):
        pixels = rng.random(SHAPE, np.float32)
        path = folder / f"y{number}.zarr"
        if not path.exists():
            write_zarr(path, pixels, 64)
        options = {"kernel": kernel(edge), "boundary": boundary}
        operators.append(OperatorChoice(name="blur", data=str(path), options=options))
    return make_plan(
        Reconstruction(
            output=Output(path=str(folder / "x.zarr"), shard=128, chunk=64, codec="none"),
            operators=tuple(operators),
            prior=PRIORS[prior],
            solver=SolverChoice(
                name=solver, step="auto" if solver == "cg" else 0.1, iterations=6, checkpoint_every=every
            ),
            exact=exact,
            fuse=fuse,
        )
    )


def moved(plan: Plan) -> int:
    """Bytes that an iteration of the third pass reads and writes, in all of its passes."""
    receipts: list[Any] = []

    def run_pass(task: Any, iteration: int, journal: Any, ledger: Any) -> None:
        receipts.append(BlockRunner(task).run(range(len(task.grid))))
        assert not receipts[-1].bad, receipts[-1].bad[0].traceback
        ledger.enter(receipts[-1].sums)
        journal.mark(receipts[-1].digests)

    run = iterations_of_plan(plan, run_pass)
    each = work_of(plan).form.per_pass
    assert len(list(run.run(3 * each, lambda *_: False))) == work_of(plan).solver.traits.passes_before + 3
    last = receipts[-2:] if work_of(plan).form.apart else receipts[-1:]
    return int(sum(receipt.read_bytes + receipt.written_bytes for receipt in last) // each)


@pytest.mark.parametrize("exact", [thorough(False), True])
@pytest.mark.parametrize(
    ("prior", "solver"), [("none", "pgd"), ("tv", "fista"), ("pnp", "pgd"), thorough("pnp", "gd"), ("none", "cg")]
)
def test_a_plan_tells_what_an_iteration_moves(tmp_path: Path, prior: str, solver: str, exact: bool) -> None:
    plan = plan_of(tmp_path, prior=prior, solver=solver, exact=exact)
    told = plan.summary()["iteration_bytes"]
    assert told == pytest.approx(moved(plan), rel=0.15)


@pytest.mark.parametrize("every", [2, thorough(3)])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("prior", "solver"), [("none", "gd"), ("pnp", "pgd")])
def test_a_plan_tells_what_an_iteration_of_several_in_a_pass_moves(
    tmp_path: Path, prior: str, solver: str, exact: bool, every: int
) -> None:
    plan = plan_of(tmp_path, prior=prior, solver=solver, exact=exact, fuse="auto", every=every)
    figures = plan.summary()
    alone = plan_of(tmp_path, prior=prior, solver=solver, exact=exact, fuse="auto").summary()
    assert figures["iteration_bytes"] == pytest.approx(moved(plan), rel=0.15)
    assert figures["iteration_bytes"] < alone["iteration_bytes"]
    assert figures["iteration_bytes_unfused"] == alone["iteration_bytes_unfused"]
    assert figures["computed_twice"] > alone["computed_twice"]


@pytest.mark.parametrize("exact", [False, True])
def test_a_plan_tells_what_two_passes_move(tmp_path: Path, exact: bool) -> None:
    plan = plan_of(tmp_path, prior="pnp", solver="pgd", exact=exact, fuse=False)
    figures = plan.summary()
    assert figures["iteration_bytes"] == figures["iteration_bytes_unfused"]
    assert figures["iteration_bytes"] == pytest.approx(moved(plan), rel=0.15)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("halo", [0, 20, 40, 100])
def test_what_is_read_ahead_is_all_that_a_block_reads(halo: int, exact: bool) -> None:
    shape, single = (3072, 2100), np.dtype("float32")
    zeros = Constant(shape, single)
    terms = tuple(Term(Blur(kernel=kernel(edge), boundary="circular"), zeros) for edge in (13, 15))
    form = choose_form(terms, single, exact=exact)
    assert form.is_fft is not exact
    image, core = Shared(zeros, form.fused_reach), Region((1024, 1024), (2048, 1536))
    with Scope([]) as scope:
        image.hold(form.view(halo).window(core, shape))
        ahead = scope.read_bytes
        form.gradient(image, zeros).read(core.grow(((halo, halo),) * 2))
    assert scope.read_bytes == ahead


@pytest.mark.parametrize("exact", [False, True])
def test_one_pass_moves_less_than_two(tmp_path: Path, exact: bool) -> None:
    figures = plan_of(tmp_path, prior="pnp", solver="pgd", exact=exact).summary()
    assert figures["iteration_bytes"] < 0.8 * figures["iteration_bytes_unfused"]
    alone = plan_of(tmp_path, prior="none", solver="pgd", exact=exact).summary()
    assert alone["iteration_bytes_unfused"] is None


def test_shards_that_are_computed_each_for_itself_compute_more_twice() -> None:
    shape, single = (256, 256), np.dtype("float32")
    term = Term(Blur(kernel=kernel(13), boundary="circular"), Constant(shape, single))
    whole = Grid(shape, shape, ((0, 0), (0, 0)))
    direct, transforms = (choose_form((term,), single, exact=exact, per_pass=2) for exact in (True, False))
    assert computed_twice(whole, (64, 64), direct, NoPrior()) == 0
    assert computed_twice(whole, (64, 64), transforms, NoPrior()) > 0.1


def test_transforms_read_whole_cells() -> None:
    grid = Grid((4096, 4096), (1024, 4096), ((0, 0), (0, 0)))
    assert pixels_read(grid, View(20, 8, cells=True)) == pixels_read(grid, View(32 + 8))
    assert pixels_read(grid, View(40, 8, cells=True)) > 1.4 * pixels_read(grid, View(40 + 8)), "into the cell after"


def test_a_job_of_arrays_is_written_down_all_the_same(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, prior="pnp", solver="pgd", exact=False)
    for tree in (plan.documents.asked, plan.documents.resolved, kept_of(plan)):
        json.dumps(tree)
    assert plan.documents.asked["operators"][0]["kernel"]["shape"] == [3, 3]
