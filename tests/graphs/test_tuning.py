"""Trials of a GPU for denoisers and for priors: what they decide for a run is kept, gone on with, and told where there was none."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halotile.errors import ConfigError, MemoryRefused
from halotile.graphs.clusters.common.machine import Gpus
from halotile.graphs.jobs.reconstruct.costs import footprint_of_operator
from halotile.graphs.jobs.reconstruct.inversion import CutImage, denoising_of
from halotile.graphs.jobs.reconstruct.job import PriorChoice, SolverChoice
from halotile.graphs.kinds.sections import Cluster, Output, Run, Tile
from halotile.graphs.plans.needs import MIB, PROCESS, TILES, gpu_bytes
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.plans.trials import gpu_trials
from halotile.graphs.plans.trials.gpu_trials import NotTried, tuned_for
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.driver import run
from halotile.storage.grid import Region
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.views import Constant
from halotile.tasks.denoisers.function import GivenFunction
from halotile.tasks.image_task import Denoised
from halotile.tasks.noise.simulated import RandomImage
from halotile.tasks.trials.gpu_trial import Tuned
from tests.cases import in_folders, thorough
from tests.graphs.inline import inline
from tests.graphs.solving import iterations_of_plan
from tests.graphs.trials import FOUND, TWO, answering, deblurring, finding, out_of_memory_once
from tests.support import dncnn_weights, footprint_of, job_of, noisy_image, work_of, write_zarr

Patch = pytest.MonkeyPatch

NO_CHOICE: Any = None
"""What tiles of a CPU would have to heed, if there were any to choose from."""
BROKE = NotTried("a trial broke: it fell over")
LARGE_HOST = replace(FOUND, host_bytes=2960 * MIB)


def denoising(folder: Path, device: Any = "cuda", *, size: Any = 256, name: str = "gaussian", **parts: Any) -> Any:
    """A denoising job of an image of a few blocks."""
    source, shape = folder / "in.zarr", (size, size) if isinstance(size, int) else size
    if not source.exists():
        write_zarr(source, np.zeros(shape, "uint8") if min(shape) > 4096 else noisy_image(shape), 512)
    options: dict[str, Any] = {"sigma": 1}
    if name == "dncnn":
        weights = folder / "w.safetensors"
        options = {"weights": str(dncnn_weights(weights, 3, 8)), "depth": 3, "width": 8}
    usual: dict[str, Any] = {"tile": Tile(block=128), "run": Run(device=device, workers=1)}
    usual["cluster"] = Cluster(kind="local")
    return replace(job_of(source, folder / "out.zarr", name, options), **usual | parts)


Make = Callable[..., Any]
of_both_kinds = pytest.mark.parametrize("make", [denoising, deblurring], ids=["denoiser", "prior"])


def tiled(plan: Plan) -> Any:
    """The tiles of a plan: those of its task, or of its prior."""
    work = work_of(plan)
    return work.task if hasattr(work, "task") else work.prior.denoised


def tiles_of(plan: Plan) -> tuple[Any, int]:
    return tiled(plan).tiling.tile, tiled(plan).tiling.batch


def host_bytes(plan: Plan) -> int:
    work = work_of(plan)
    return int((footprint_of(plan) if hasattr(work, "task") else work.step_footprint())[PROCESS])


def begun(plan: Plan) -> RunDirectory:
    """The directory of a run of the plan that is just begun."""
    with claim(plan):
        pass
    return RunDirectory(plan.run_directory)


@pytest.fixture
def found(monkeypatch: Patch) -> Callable[..., list[Any]]:
    """Have trials end with what is given; returns what they are asked for."""
    return lambda result=FOUND, here=TWO: finding(monkeypatch, result, here)


@of_both_kinds
def test_a_plan_takes_a_finding_and_a_run_goes_on_with_it(requested: list[Any], tmp_path: Path, make: Make) -> None:
    plan = make_plan(make(tmp_path))
    assert tiles_of(plan) == ((32, 48), 6)
    assert (tiled(plan).channels_last, tiled(plan).records) == (True, True)
    named = {key: plan.identity[key] for key in ("device", "tile", "batch", "channels_last")}
    assert named == {"device": "cuda", "tile": [32, 48], "batch": 6, "channels_last": True}
    assert plan.summary()["device_memory_bytes"] == 5_000_000
    written = plan.documents.resolved["tile"]
    assert (written["size"], written["batch"], written["channels_last"]) == ([32, 48], 6, True)
    assert host_bytes(plan) == 800 * MIB, "as it was measured"
    assert (requested[0].tiles, requested[0].batch, requested[0].compare) == (((128, 128),), None, False)
    directory = begun(plan)
    again = make_plan(make(tmp_path))
    assert len(requested) == 1
    assert (again.resumes, work_of(again).tuned, tiles_of(again)) == (True, FOUND, ((32, 48), 6))
    make_plan(make(tmp_path), probe=True)
    assert (requested[1].tiles, requested[1].batch) == (((32, 48),), 6), "a probe of a begun run changes nothing"
    make_plan(make(tmp_path), fresh=True)
    assert requested[2].tiles == ((128, 128),)
    directory.update_plan(batch=3)
    again = make_plan(make(tmp_path))
    assert again.resumes, again.earlier.differs
    assert (tiles_of(again)[1], again.identity["batch"]) == (3, 6), "memory ran out, and it is the same job"


@of_both_kinds
def test_a_run_may_go_on_with_a_smaller_batch_alone(requested: list[Any], tmp_path: Path, make: Make) -> None:
    begun(make_plan(make(tmp_path)))
    fewer = make_plan(make(tmp_path, tile=Tile(block=128, batch=2)))
    assert (fewer.resumes, tiles_of(fewer)) == (True, ((32, 48), 2))
    more = make_plan(make(tmp_path, tile=Tile(block=128, batch=8)))
    assert more.earlier.differs == ("tile.batch was 6, is 8",)
    other = make_plan(make(tmp_path, tile=Tile(block=128, size=64)))
    assert other.earlier.differs == ("tile.size was [32, 48], is [64, 64]",)


@of_both_kinds
def test_what_is_written_is_what_is_tried(requested: list[Any], tmp_path: Path, make: Make) -> None:
    make_plan(make(tmp_path, tile=Tile(block=128, size=64, batch=3)))
    make_plan(make(tmp_path, run=Run(device="cuda", workers=3)))
    first, second = requested
    assert (first.tiles, first.batch, first.layouts) == (((64, 64),), 3, False)
    assert (first.sharing, second.sharing) == (1, 3), "three workers of this machine use one card"


@of_both_kinds
def test_nothing_is_tried_for_processors(requested: list[Any], tmp_path: Path, make: Make) -> None:
    plan = make_plan(make(tmp_path, "cpu"))
    assert (requested, work_of(plan).tuned, plan.summary()["tuned"]) == ([], None, None)
    plan = make_plan(make(tmp_path, "cpu"), probe=True)
    assert ((requested[0].tiles[0], requested[0].batch), requested[0].compare) == (tiles_of(plan), True)
    assert tiles_of(plan)[0] != FOUND.tile, "a processor's tile is by rule"
    assert "tile" not in plan.identity, "it decides about no bit there"
    begun(make_plan(make(tmp_path)))
    assert work_of(make_plan(make(tmp_path, "cpu"))).tuned is None
    assert tiles_of(probed := make_plan(make(tmp_path, "cpu"), probe=True))[0] != FOUND.tile
    assert probed.earlier.differs == ('run.device was "cuda", is "cpu"',)


@of_both_kinds
def test_a_run_begun_by_rule_goes_on_so(monkeypatch: Patch, found: Any, tmp_path: Path, make: Make) -> None:
    found(BROKE)
    plan = make_plan(make(tmp_path))
    assert "tile and batch are by rule: a trial broke: it fell over" in plan.notes
    begun(plan)
    requested = found()
    assert make_plan(make(tmp_path)).resumes
    assert requested == []
    probed = make_plan(make(tmp_path), probe=True)
    assert (probed.earlier.differs, tiles_of(probed)) == ((), tiles_of(plan)), "a probe changes nothing"
    assert (requested[0].tiles[0], requested[0].batch) == tiles_of(plan)
    found()
    begun(make_plan(make(tmp_path), fresh=True))
    found(BROKE)
    (note,) = (note for note in make_plan(make(tmp_path), probe=True).notes if "trial" in note)
    assert note == "tile and batch are as they were found, and not tried again: a trial broke: it fell over"
    found(MemoryRefused("no room"))
    with pytest.raises(MemoryRefused, match="no room"):
        make_plan(make(tmp_path), fresh=True)
    monkeypatch.setattr(gpu_trials, "gpus_here", lambda: Gpus(why_none="NVML finds none"))
    plan = make_plan(make(tmp_path, cluster=Cluster(kind="slurm", gpus=1)), fresh=True)
    assert work_of(plan).tuned is None
    assert host_bytes(plan) == host_bytes(make_plan(make(tmp_path, "cpu"), fresh=True)) + gpu_bytes(None)
    assert "tile and batch are by rule: there is no GPU here to try them on (NVML finds none)" in plan.notes


def test_a_job_that_is_as_it_was_goes_on(monkeypatch: Patch, tmp_path: Path) -> None:
    twice = SolverChoice(name="pgd", step=0.1, iterations=4, checkpoint_every=2)
    written_sizes: tuple[dict[str, Any], ...] = ({}, {"size": 512}, {"channels_last": True}, {"size": 64, "batch": 3})
    makers: list[tuple[Make, int]] = [(denoising, 256), (partial(denoising, name="dncnn"), 512), (deblurring, 128)]
    rows: list[tuple[Make, dict[str, Any]]]
    rows = [(make, {"tile": Tile(block=edge, **given)}) for make, edge in makers for given in written_sizes]
    rows += [(deblurring, {"tile": Tile(block=512, size=512)})]
    rows += [(deblurring, {"tile": Tile(block=128, size=512), "solver": twice})]
    for folder, (make, parts) in in_folders(tmp_path, rows):
        answering(monkeypatch, TWO)
        plan = make_plan(make(folder, **parts))
        begun(plan)
        assert make_plan(make(folder, **parts)).earlier.differs == ()
        written = plan.documents.resolved["tile"].items()
        sizes: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in written}
        assert make_plan(make(folder, **parts | {"tile": Tile(**sizes)})).earlier.differs == ()


def test_a_small_image_goes_on_by_rule(found: Any, tmp_path: Path) -> None:
    rows: list[tuple[Make, Any, dict[str, Any]]] = [
        *((denoising, size, tile) for size in ((300, 300), (300, 1500)) for tile in ({}, {"size": 512})),
        (partial(denoising, name="dncnn"), (100, 90), {"size": 64, "batch": 3}),  # a batch that the rule does not grant
        (deblurring, 300, {}),
    ]
    for folder, (make, size, tile) in in_folders(tmp_path, rows):
        found(BROKE)
        given = make(folder, size=size, tile=Tile(**tile))
        given = replace(given, output=Output(path=given.output.path))
        plan = make_plan(given)
        assert tiles_of(plan)[1] == 1 or not tile.get("batch")
        begun(plan)
        assert make_plan(given).earlier.differs == ()


@of_both_kinds
def test_blocks_are_smaller_where_libraries_of_a_card_keep_much(found: Any, tmp_path: Path, make: Make) -> None:
    limit = Run(device="cuda", workers=1, memory_per_worker="3000MiB")
    parts: dict[str, Any] = {"size": 8192 if make is denoising else 2048, "run": limit, "tile": Tile()}
    given, blocks = make(tmp_path, **parts), []
    if make is denoising:
        given = replace(given, output=replace(given.output, shard=512, chunk=256))
    for result in (FOUND, LARGE_HOST):
        requested = found(result)
        plan = make_plan(given)
        assert plan.memory_bytes <= 3000 * MIB
        blocks.append(np.prod(plan.grid.block))
    assert len(requested) == 2, "the smaller block is tried too"
    assert blocks[1] < blocks[0]


@pytest.mark.parametrize(("first", "second", "breaks"), [(2950, 2955, False), (2955, 2950, False), (2950, 2955, True)])
def test_blocks_fit_by_the_larger_of_two_trials(
    monkeypatch: Patch, found: Any, tmp_path: Path, first: int, second: int, breaks: bool
) -> None:
    found()
    told = [first, second]

    def again(*_: Any) -> Tuned:
        if breaks and len(told) == 1:
            raise NotTried("a trial broke")
        return replace(FOUND, host_bytes=told.pop(0) * MIB)

    monkeypatch.setattr(gpu_trials, "_in_a_process_of_its_own", again)
    limit = Run(device="cuda", workers=1, memory_per_worker="3000MiB")
    given = denoising(tmp_path, size=8192, run=limit, tile=Tile())
    plan = make_plan(replace(given, output=replace(given.output, shard=512, chunk=256)), refuse=False)
    assert len(told) == breaks
    assert host_bytes(plan) == (first if breaks else max(first, second)) * MIB
    assert tiles_of(plan)[0] == FOUND.tile
    assert not any("by rule" in note for note in plan.notes)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("make", "parts"), [(denoising, {}), (deblurring, {"fuse": True}), (deblurring, {"fuse": False})]
)
def test_memory_that_runs_out_halves_a_batch_for_good(tmp_path: Path, make: Make, parts: dict[str, Any]) -> None:
    """In passes that denoise nothing, as one of a reconstruction at least, there is no batch."""
    hungry, said = out_of_memory_once(tmp_path), list[str]()
    own: Any = {"prior": PriorChoice(name="pnp", options={"denoiser": hungry})}
    own = own if make is deblurring else {"denoiser": hungry}
    plan = make_plan(make(tmp_path, "cpu", tile=Tile(block=128, size=32, batch=4), **own, **parts))
    outcome = run(plan, observer=lambda progress: said.append(progress.message))
    assert outcome.done == outcome.total
    told = "memory ran out on a worker: 2 tiles at once there, in place of 4"
    assert [line for line in said if "memory ran out" in line] == [told]
    assert (RunDirectory(plan.run_directory).read_valid_plan() or {})["batch"] == 2


# --- trials ---------------------------------------------------------------------------------------


def test_the_driver_does_not_begin_with_cuda(monkeypatch: Patch, requested: Any, tmp_path: Path) -> None:
    def begun_with() -> None:
        raise AssertionError("a process that has begun with CUDA holds some of the GPU, and cannot be forked")

    monkeypatch.setattr(torch.cuda, "_lazy_init", begun_with)
    monkeypatch.setattr(torch._C, "_cuda_init", begun_with, raising=False)
    make_plan(denoising(tmp_path), probe=True)
    assert requested


def trial_of(folder: Path, call: Callable[[Any], Any], *, compare: bool = False) -> Tuned:
    """What is found for a function, in a process of its own."""
    asked = denoising(folder, "cpu")
    task = replace(work_of(make_plan(asked)).task, denoiser=GivenFunction(call=call, depth=1))
    return tuned_for(asked, task, NO_CHOICE, compare=compare)


def test_a_trial_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The model is a script's own, and the process is told where its imports are."""
    here = os.getpid()

    def told(image: Any) -> Any:
        assert os.getpid() != here
        return image * 2

    made = trial_of(tmp_path, told, compare=True)
    assert made.device == "this CPU"
    assert [each.name for each in made.precisions] == ["float32", "tf32", "float16", "bfloat16"]
    assert made.precisions[0].error == 0
    assert made.host_bytes > 2**27


@pytest.mark.parametrize(
    ("broken", "limit", "kind", "said"),
    [
        thorough(lambda image: os._exit(7), 60.0, NotTried, "a trial ended its process with exit code 7"),
        thorough(lambda image: 1 / 0, 60.0, NotTried, "a trial broke: ZeroDivisionError: division by zero"),
        (lambda image: time.sleep(60), 1.0, NotTried, "a trial took longer than 1 s"),
        (lambda image: image[1:], 60.0, ConfigError, "returns an array of the shape of its input"),
    ],
)
def test_a_trial_that_breaks_says_how_and_a_fault_of_the_job_is_said_as_a_run_says_it(
    monkeypatch: Patch, tmp_path: Path, broken: Any, limit: float, kind: Any, said: str
) -> None:
    monkeypatch.setattr(gpu_trials, "LIMIT_SECONDS", limit)
    with pytest.raises(kind, match=said):
        trial_of(tmp_path, broken)


# --- priors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "l1"])
def test_there_has_to_be_a_denoiser_to_try(requested: list[Any], tmp_path: Path, name: Any) -> None:
    plan = make_plan(deblurring(tmp_path, prior=PriorChoice(name=name)))
    assert (requested, work_of(plan).tuned, plan.identity.get("device")) == ([], None, None)
    with pytest.raises(ConfigError, match=f"--probe tries a denoiser, and prior.name is {name}: leave it out"):
        make_plan(deblurring(tmp_path, prior=PriorChoice(name=name)), probe=True)


def trial_task(plan: Plan, *images: Any) -> Any:
    """The denoising that a trial of a plan would try."""
    work = work_of(plan)
    return denoising_of(CutImage(work.prior, plan.grid, work.form), work.state_layout, images, plan.output)


REGIONS = [(1, True, 5), (2, True, 5), (2, False, 5), thorough(2, False, 31)]


@pytest.mark.parametrize(("every", "exact", "edge"), REGIONS)
@pytest.mark.usefixtures("as_in_a_worker")
def test_a_trial_denoises_the_largest_region_that_is_asked_for_at_once(
    monkeypatch: Patch, tmp_path: Path, every: int, exact: bool, edge: int
) -> None:
    solver = SolverChoice(name="pgd", step=0.1, iterations=4, checkpoint_every=every)
    given = deblurring(tmp_path, "cpu", edge=edge, size=1500 if edge == 31 else 512, solver=solver, exact=exact)
    plan = make_plan(replace(given, output=replace(given.output, shard=64)))
    assert work_of(plan).form.by_shard == (edge == 31), "bits of transforms depend on where they are laid"
    regions: list[Region] = []
    read = Denoised.read

    def noted(image: Denoised, region: Region) -> Any:
        regions.append(region)
        return read(image, region)

    monkeypatch.setattr(Denoised, "read", noted)
    list(iterations_of_plan(plan, inline).run(work_of(plan).form.per_pass, lambda *_: False))
    tried, largest = np.prod(trial_task(plan).grid.middle.core.shape), max(region.size for region in regions)
    assert largest == tried if edge == 5 else largest <= tried


def test_an_image_that_could_be_an_iterate_is_denoised_in_a_trial(tmp_path: Path) -> None:
    plan = make_plan(deblurring(tmp_path, "cpu"))
    floats, bytes_ = Constant((256, 256), np.dtype("float32")), Constant((256, 256), np.dtype("uint8"))
    assert trial_task(plan, bytes_, floats).source is floats
    assert isinstance(trial_task(plan, bytes_).source, RandomImage)


def test_a_card_is_beside_operators_of_the_whole_image_and_io_threads(requested: list[Any], tmp_path: Path) -> None:
    where = Cluster(kind="slurm", gpus=1, cores=6)
    assert work_of(make_plan(deblurring(tmp_path, cluster=where))).io_threads == 6
    assert work_of(make_plan(deblurring(tmp_path, "cpu", cluster=where))).io_threads == 1
    works = [work_of(make_plan(deblurring(tmp_path, device))) for device in ("cpu", "cuda")]
    shape, kind = (256, 256), np.dtype("float32")
    plain, gpu = (
        footprint_of_operator(work.form.terms[0], shape, kind, work.step_footprint(), on_gpu=on_gpu)
        for work, on_gpu in zip(works, (False, True), strict=True)
    )
    assert gpu[PROCESS] - plain[PROCESS] == 100 * MIB
    assert plain[TILES] == 0 < gpu[TILES]
