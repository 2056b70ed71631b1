"""The denoiser of a prior on a GPU: tried, planned, kept and gone on with as that of a denoising job is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from halotile.cli.main import app
from halotile.errors import ConfigError
from halotile.graphs.jobs.reconstruct.costs import footprint_of_operator
from halotile.graphs.jobs.reconstruct.inversion import CutImage, denoising_of
from halotile.graphs.jobs.reconstruct.job import PriorChoice, SolverChoice
from halotile.graphs.kinds.sections import Cluster, Output, Run, Tile
from halotile.graphs.plans.needs import MIB, PROCESS, TILES
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.plans.trials.gpu_trials import NotTried
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.driver import run as reconstruct
from halotile.storage.grid import Region
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.views import Constant
from halotile.tasks.denoisers.function import GivenFunction
from halotile.tasks.image_task import Denoised
from halotile.tasks.noise.simulated import RandomImage
from tests.cases import thorough
from tests.graphs.inline import inline
from tests.graphs.solving import iterations_of_plan, kernel
from tests.graphs.trials import FOUND, TWO, answering, deblurring, finding, out_of_memory_once
from tests.support import dncnn_weights, noisy_image, work_of, write_zarr


def cut_of(plan: Plan) -> CutImage:
    """How its image is cut."""
    return CutImage(work_of(plan).prior, plan.grid, work_of(plan).form)


def denoised(plan: Plan) -> Denoised:
    """What its prior is made of."""
    found: Denoised = work_of(plan).prior.denoised
    return found


def test_a_plan_takes_what_was_found(requested: list[Any], tmp_path: Path) -> None:
    plan = make_plan(deblurring(tmp_path))
    made = denoised(plan)
    assert (made.tiling.tile, made.tiling.batch) == ((32, 48), 6)
    assert (made.channels_last, made.records) == (True, True)
    named = {key: plan.identity[key] for key in ("device", "tile", "batch", "channels_last")}
    assert named == {"device": "cuda", "tile": [32, 48], "batch": 6, "channels_last": True}
    assert plan.summary()["device_memory_bytes"] == 5_000_000
    written = plan.documents.resolved["tile"]
    assert (written["size"], written["batch"], written["channels_last"]) == ([32, 48], 6, True)
    assert work_of(plan).step_footprint()[PROCESS] == 800 * 2**20, "as it was measured"
    assert (requested[0].tiles, requested[0].batch, requested[0].compare) == (((128, 128),), None, False)


def test_what_is_written_is_what_is_tried(requested: list[Any], tmp_path: Path) -> None:
    make_plan(deblurring(tmp_path, tile=Tile(block=128, size=64, batch=3)))
    assert (requested[0].tiles, requested[0].batch) == (((64, 64),), 3)


def test_nothing_is_tried_for_processors(requested: list[Any], tmp_path: Path) -> None:
    plan = make_plan(deblurring(tmp_path, "cpu"))
    assert (requested, work_of(plan).tuned) == ([], None)
    plan = make_plan(deblurring(tmp_path, "cpu"), probe=True)
    assert requested[0].compare
    assert denoised(plan).tiling.tile != FOUND.tile, "a processor's tile is by rule"
    assert "tile" not in plan.identity, "it decides about no bit there"


def test_a_run_goes_on_with_what_it_has(requested: list[Any], tmp_path: Path) -> None:
    plan = make_plan(deblurring(tmp_path))
    directory = RunDirectory(plan.run_directory)
    with claim(plan):
        pass
    directory.update_plan(batch=3)
    again = make_plan(deblurring(tmp_path))
    assert len(requested) == 1
    assert again.resumes, again.earlier.differs
    assert (denoised(again).tiling.batch, again.identity["batch"]) == (3, 6), "memory ran out, and it is the same job"


def test_a_trial_that_breaks_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finding(monkeypatch, NotTried("a trial broke: it fell over"))
    assert "tile and batch are by rule: a trial broke: it fell over" in make_plan(deblurring(tmp_path)).notes


@pytest.mark.parametrize("name", ["none", "l1"])
def test_there_has_to_be_something_to_try(requested: list[Any], tmp_path: Path, name: Any) -> None:
    plan = make_plan(deblurring(tmp_path, prior=PriorChoice(name=name)))
    assert (requested, work_of(plan).tuned, plan.identity.get("device")) == ([], None, None)
    with pytest.raises(ConfigError, match=f"--probe tries a denoiser, and prior.name is {name}"):
        make_plan(deblurring(tmp_path, prior=PriorChoice(name=name)), probe=True)


def test_functions_of_arrays_stay_on_processors(requested: list[Any], tmp_path: Path) -> None:
    given = PriorChoice(name="pnp", options={"denoiser": GivenFunction(call=lambda image: image, depth=1)})
    plan = make_plan(deblurring(tmp_path, prior=given))
    assert (requested, denoised(plan).device) == ([], "cpu")
    assert any("function of arrays and computes on CPUs" in note for note in plan.notes)


def asked_at_once(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> list[Region]:
    """The regions that an iteration asks of the denoised image."""
    regions: list[Region] = []
    read = Denoised.read

    def noted(image: Denoised, region: Region) -> Any:
        regions.append(region)
        return read(image, region)

    monkeypatch.setattr(Denoised, "read", noted)
    list(iterations_of_plan(plan, inline).run(work_of(plan).form.per_pass, lambda *_: False))
    return regions


@pytest.mark.parametrize(
    ("every", "exact", "edge"), [(1, True, 5), (2, True, 5), (2, False, 5), thorough(2, False, 31)]
)
@pytest.mark.usefixtures("as_in_a_worker")
def test_a_trial_denoises_the_largest_region_that_is_asked_for_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, every: int, exact: bool, edge: int
) -> None:
    solver = SolverChoice(name="pgd", step=0.1, iterations=4, checkpoint_every=every)
    given = deblurring(tmp_path, "cpu", edge=edge, size=1500 if edge == 31 else 512, solver=solver, exact=exact)
    given = replace(given, output=replace(given.output, shard=64))
    plan = make_plan(given)
    assert work_of(plan).form.by_shard == (edge == 31), "bits of transforms depend on where they are laid"
    task = denoising_of(cut_of(plan), work_of(plan).state_layout, (), plan.output)
    assert task is not None
    tried = task.grid.middle.core.shape
    largest = max(region.size for region in asked_at_once(plan, monkeypatch))
    assert largest <= np.prod(tried)
    if edge == 5:
        assert largest == np.prod(tried)


def test_an_image_that_could_be_an_iterate_is_denoised_in_a_trial(tmp_path: Path) -> None:
    plan = make_plan(deblurring(tmp_path, "cpu"))
    floats, bytes_ = Constant((256, 256), np.dtype("float32")), Constant((256, 256), np.dtype("uint8"))

    def source(*images: Constant) -> Any:
        task = denoising_of(cut_of(plan), work_of(plan).state_layout, images, plan.output)
        assert task is not None
        return task.source

    assert source(bytes_, floats) is floats
    assert isinstance(source(bytes_), RandomImage)


def probed(folder: Path, *prior: str, options: Sequence[str] = ()) -> str:
    """What `plan --probe` shows of a prior, on this CPU."""
    write_zarr(folder / "y.zarr", noisy_image((128, 128), "float32"), 64)
    np.save(folder / "k.npy", kernel(3))
    lines = [
        "version: 1",
        "job: reconstruct",
        f"output: {{path: {folder / 'x.zarr'}, shard: 64, chunk: 64}}",
        f"operators: [{{name: blur, data: {folder / 'y.zarr'}, kernel: {folder / 'k.npy'}}}]",
        *prior,
        "solver: {name: pgd, step: 0.5, iterations: 2}",
        "run: {workers: 1}",
    ]
    (folder / "job.yaml").write_text("\n".join(lines))
    result = CliRunner().invoke(app, ["plan", str(folder / "job.yaml"), "--probe", *options])
    return result.output


@pytest.mark.thorough
def test_the_precisions_of_a_prior_can_be_tried(tmp_path: Path) -> None:
    weights = dncnn_weights(tmp_path / "w.safetensors", 3, 8)
    choice = f"{{name: dncnn, weights: {weights}, depth: 3, width: 8}}"
    said = probed(tmp_path, f"prior: {{name: pnp, denoiser: {choice}}}")
    assert "pnp with dncnn, on CPUs in float32" in said
    assert "tried on" in said
    assert "bfloat16" in said
    assert "on GPUs only" in said, "tf32"


def test_a_prior_without_a_denoiser_is_refused_in_words(tmp_path: Path) -> None:
    said = probed(tmp_path, "prior: {name: l1, weight: 0.1}")
    assert "--probe tries a denoiser, and prior.name is l1: leave it out." in said
    assert "Traceback" not in said


@pytest.mark.cluster
@pytest.mark.parametrize("fuse", [True, False])
def test_memory_that_runs_out_in_a_prior_halves_its_batch_and_nothing_else(tmp_path: Path, fuse: bool) -> None:
    """Sweeps that denoise nothing, of which there is one at least, know no batch."""
    prior = PriorChoice(name="pnp", options={"denoiser": out_of_memory_once(tmp_path)})
    given = deblurring(tmp_path, "cpu", prior, tile=Tile(block=128, size=32, batch=4), fuse=fuse)
    said: list[str] = []
    plan = make_plan(given)
    outcome = reconstruct(plan, observer=lambda progress: said.append(progress.message))
    assert outcome.done == outcome.total
    assert [line for line in said if "memory ran out" in line] == [
        "memory ran out on a worker: 2 tiles at once there, in place of 4"
    ]
    kept = RunDirectory(plan.run_directory).read_valid_plan()
    assert kept is not None
    assert kept["batch"] == 2


def test_a_run_may_go_on_with_a_smaller_batch_and_nothing_else(requested: list[Any], tmp_path: Path) -> None:
    plan = make_plan(deblurring(tmp_path))
    with claim(plan):
        pass
    fewer = make_plan(deblurring(tmp_path, tile=Tile(block=128, batch=2)))
    assert (fewer.resumes, denoised(fewer).tiling.batch, denoised(fewer).tiling.tile) == (True, 2, (32, 48))
    more = make_plan(deblurring(tmp_path, tile=Tile(block=128, batch=8)))
    assert more.earlier.differs == ("tile.batch was 6, is 8",)
    other = make_plan(deblurring(tmp_path, tile=Tile(block=128, size=64)))
    assert other.earlier.differs == ("tile.size was [32, 48], is [64, 64]",)


def test_blocks_are_smaller_where_libraries_of_a_card_keep_much(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    large = replace(FOUND, host_bytes=2960 * MIB)
    run = Run(device="cuda", workers=1, memory_per_worker="3000MiB")
    given = deblurring(tmp_path, size=2048, run=run, tile=Tile())
    blocks = []
    for found in (FOUND, large):
        requested = finding(monkeypatch, found, TWO)
        plan = make_plan(given)
        assert plan.memory_bytes <= 3000 * MIB
        blocks.append(np.prod(plan.grid.block))
    assert len(requested) == 2, "the smaller block is tried too"
    assert blocks[1] < blocks[0]


def test_workers_with_a_card_read_and_write_with_several_threads(requested: list[Any], tmp_path: Path) -> None:
    where = Cluster(kind="slurm", gpus=1, cores=6)
    assert work_of(make_plan(deblurring(tmp_path, cluster=where))).io_threads == 6
    assert work_of(make_plan(deblurring(tmp_path, "cpu", cluster=where))).io_threads == 1


@pytest.mark.parametrize(
    ("every", "tile"),
    [
        (1, Tile(block=512, size=512)),
        (2, Tile(block=128, size=512)),
        (1, Tile(block=128, channels_last=True)),
        (1, Tile(block=128, size=64, batch=3, channels_last=False)),
    ],
)
def test_a_job_that_is_as_it_was_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, every: int, tile: Tile
) -> None:
    answering(monkeypatch, TWO)
    solver = SolverChoice(name="pgd", step=0.1, iterations=4, checkpoint_every=every)
    plan = make_plan(deblurring(tmp_path, tile=tile, solver=solver))
    with claim(plan):
        pass
    assert make_plan(deblurring(tmp_path, tile=tile, solver=solver)).earlier.differs == ()
    written = plan.documents.resolved["tile"].items()
    sizes: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in written}
    assert make_plan(deblurring(tmp_path, tile=Tile(**sizes), solver=solver)).earlier.differs == ()


def test_a_small_image_goes_on_by_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finding(monkeypatch, NotTried("a trial broke"), TWO)
    given = deblurring(tmp_path, size=300, tile=Tile())
    given = replace(given, output=Output(path=given.output.path))
    plan = make_plan(given)
    with claim(plan):
        pass
    assert make_plan(given).earlier.differs == ()


def test_an_operator_of_the_whole_image_has_a_card_beside_it(requested: list[Any], tmp_path: Path) -> None:
    plan = make_plan(deblurring(tmp_path))
    plain = make_plan(deblurring(tmp_path, "cpu"))
    needed = [
        footprint_of_operator(
            work_of(each).form.terms[0],
            (256, 256),
            np.dtype("float32"),
            work_of(each).step_footprint(),
            on_gpu=each is plan,
        )
        for each in (plain, plan)
    ]
    assert needed[1][PROCESS] - needed[0][PROCESS] == 100 * MIB
    assert needed[0][TILES] == 0 < needed[1][TILES]
