"""Several outputs of one run: none is lost, taken by another run, or checked at another place."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from halotile.cli.config.loading import saved_job
from halotile.cli.status import blocks_given_up, find_run, output_of
from halotile.errors import ConfigError, OutputInUse, OutputRefused, ResumeRefused
from halotile.graphs.jobs.reconstruct.job import OperatorChoice
from halotile.graphs.jobs.simulate.job import NoiseChoice, Simulation, Storage
from halotile.graphs.kinds.base import OutputArray
from halotile.graphs.kinds.sections import Cluster, Job, Run
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs import claim as claiming
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.status import Status
from halotile.graphs.runs.verify import verify
from halotile.storage.grid import Region
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.locks import WorkerLock
from halotile.storage.sharded.output import ShardWriter
from halotile.tasks.block import BadBlock

A, B = "a.zarr", "b.zarr"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a true image and a kernel."""
    np.save(tmp_path / "truth.npy", np.random.default_rng(0).random((256, 256), np.float32))
    np.save(tmp_path / "k.npy", np.ones((3, 3), np.float32) / 9)
    return tmp_path


def simulation(folder: Path, *names: str, **options: Any) -> Simulation:
    """A simulation of measurements of these names, of four blocks each."""
    workers = options.pop("workers", 1)
    reference = options.pop("reference", "truth.npy")
    seed = options.pop("seed", 0)
    blur = partial(OperatorChoice, name="blur", noise_sigma=0.01, options={"kernel": str(folder / "k.npy")})
    return Simulation(
        operators=tuple(blur(data=str(folder / name)) for name in names),
        noise=NoiseChoice(seed=seed),
        output=Storage(shard=128, chunk=64, **options),
        reference=str(folder / reference),
        run=Run(workers=workers, memory_per_worker="2GiB"),
        cluster=Cluster(dashboard=False, tls=False),
    )


def fill(job: Job, blocks: int = 100, *, fresh: bool = False) -> None:
    """Write so many blocks, as a run does."""
    with claim(make_plan(job, fresh=fresh)) as outputs:
        for output in outputs.plan.outputs:
            assert isinstance(output, OutputArray)
            writer = ShardWriter(output.path, output.layout)
            for block in output.grid:
                if (blocks := blocks - 1) < 0:
                    return
                pixels = np.full(block.core.shape, block.number, output.layout.dtype)
                outputs.journal_of(output).mark({block.number: writer.write(block.core, pixels).digest})


def claimed(job: Job, *, fresh: bool = False) -> int:
    """The number of blocks that a run finds done."""
    with claim(make_plan(job, fresh=fresh)) as outputs:
        return outputs.done


def move(folder: Path, *names: str) -> Path:
    """Move outputs with their run directories into another folder."""
    (folder / "new").mkdir()
    for name in names:
        for part in (name, f"{name}.run"):
            shutil.move(folder / part, folder / "new" / part)
    return folder / "new"


def test_fresh_discards_no_output_of_another_run(folder: Path) -> None:
    fill(simulation(folder, B))
    fill(simulation(folder, A, B, overwrite=True), fresh=True)
    with pytest.raises(OutputRefused, match="another job"):
        claimed(simulation(folder, B), fresh=True)
    with pytest.raises(OutputRefused, match="another job"):
        claimed(simulation(folder, B))
    assert claimed(simulation(folder, A, B)) == 8
    assert find_run(folder / B) == folder / f"{A}.run"
    fill(simulation(folder, A, B, overwrite=True, seed=1), 3, fresh=True)
    with pytest.raises(OutputRefused, match="another job"):
        claimed(simulation(folder, B))
    assert claimed(simulation(folder, A, B, seed=1)) == 3, "an unfinished run keeps its empty outputs"


def hold(run_directory: Path, held: Any, ends: Any) -> None:
    """Be a worker of a run."""
    WorkerLock(run_directory).hold()
    held.set()
    ends.wait(60)


def test_workers_of_an_earlier_run_are_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "ORPHAN_SECONDS", 0.5)
    fill(simulation(folder, A, B), 2)
    context = multiprocessing.get_context("spawn")
    held, ends = context.Event(), context.Event()
    worker = context.Process(target=hold, args=(folder / f"{A}.run", held, ends))
    worker.start()
    try:
        assert held.wait(60)
        with pytest.raises(OutputInUse):
            claimed(simulation(folder, B, overwrite=True), fresh=True)
    finally:
        ends.set()
        worker.join()
    assert claimed(simulation(folder, B, overwrite=True), fresh=True) == 0


def test_a_stored_job_discards_nothing_that_it_did(folder: Path) -> None:
    fill(simulation(folder, A, B, overwrite=True))
    os.utime(folder / "truth.npy")
    with pytest.raises(ResumeRefused, match="reference"):
        claimed(saved_job(find_run(folder / A)))
    assert verify(folder / A).sound


def test_an_image_that_is_read_is_not_removed(folder: Path) -> None:
    group = zarr.open_group(folder / "truth.zarr", mode="w", zarr_format=3)
    group.create_array("0", shape=(256, 256), chunks=(64, 64), dtype="float32")[...] = 1
    with pytest.raises(OutputRefused, match="the job reads"):
        claimed(simulation(folder, "truth.zarr", reference="truth.zarr/0", overwrite=True))
    assert (folder / "truth.zarr/0/zarr.json").exists()


def test_an_output_is_checked_where_it_is(folder: Path) -> None:
    fill(simulation(folder, A, B))
    for part in (A, f"{A}.run", B, f"{B}.run"):
        shutil.copytree(folder / part, folder / "copy" / part)
    shard = folder / "copy" / B / "c/0/0"
    shard.write_bytes(shard.read_bytes()[:-9])
    assert verify(folder / B).sound
    for name in (A, B):
        (problem,) = verify(folder / "copy" / name).problems
        assert str(folder / "copy") in problem or "block 0" in problem


def test_an_output_of_a_run_that_is_gone_is_checked_by_itself(folder: Path) -> None:
    fill(simulation(folder, A, B))
    fill(simulation(folder, A, overwrite=True), fresh=True)
    shard = folder / B / "c/0/0"
    shard.write_bytes(shard.read_bytes()[:-9])
    verdict = verify(folder / B)
    assert not verdict.sound
    assert not verdict.repairable


def test_a_journal_that_is_missing_is_named(folder: Path) -> None:
    fill(simulation(folder, A, B))
    move(folder, B)
    with pytest.raises(OutputRefused, match=r"b\.zarr\.run/journal is not there"):
        verify(folder / A)
    with pytest.raises(OutputRefused, match=r"b\.zarr\.run/journal is not there, and 4 blocks"):
        claimed(simulation(folder, A, B))


@pytest.mark.parametrize("step", ["create_output", "Journal.create"])
def test_a_start_that_was_killed_can_be_repeated(folder: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(simulation(folder, A, B))

    def until_the_second(call: Callable[..., Any]) -> Callable[..., Any]:
        def killed(path: Path, *arguments: Any, **options: Any) -> Any:
            if B in str(path):
                raise KeyboardInterrupt
            return call(path, *arguments, **options)

        return killed

    owner, _, name = step.rpartition(".")
    place = getattr(claiming, owner) if owner else claiming
    with monkeypatch.context() as patch:
        patch.setattr(place, name, until_the_second(getattr(place, name)))
        with pytest.raises(KeyboardInterrupt):
            claimed(simulation(folder, A, B), fresh=True)
    assert claimed(simulation(folder, A, B)) == 0
    fill(simulation(folder, A, B))
    assert verify(folder / B).sound


def test_an_output_or_a_plan_that_is_lost_costs_no_blocks(folder: Path) -> None:
    fill(simulation(folder, A, B), 4)
    (folder / f"{A}.run/plan.json").write_text("x")
    assert claimed(simulation(folder, A, B, workers=4)) == 4
    shutil.rmtree(folder / B)
    with pytest.raises(OutputRefused, match="4 blocks"):
        claimed(simulation(folder, A, B))


def test_the_directory_of_an_output_that_was_moved_away_stays(folder: Path) -> None:
    fill(simulation(folder, B))
    shutil.move(folder / B, folder / "away.zarr")
    with pytest.raises(OutputRefused, match="another job"):
        claimed(simulation(folder, A, B))
    shutil.move(folder / "away.zarr", folder / B)
    assert claimed(simulation(folder, B)) == 4


def test_outputs_that_were_moved_together_are_whole(folder: Path) -> None:
    fill(simulation(folder, A, B))
    new = move(folder, A, B)
    assert verify(new / A).sound
    assert verify(new / B).sound
    assert output_of(new / f"{B}.run") == new / B


def test_outputs_in_one_another_are_refused(folder: Path) -> None:
    with pytest.raises((ConfigError, OutputRefused), match=r"operators\[1\]\.data"):
        make_plan(simulation(folder, A, f"{A}/b.zarr"))


def test_blocks_given_up_are_told_by_their_outputs(folder: Path) -> None:
    plan = make_plan(simulation(folder, A, B))
    with claim(plan):
        status = Status(RunDirectory(folder / f"{A}.run"), plan, None)
        for output, number in ((plan.outputs[1], 2), (plan.outputs[0], 2), (plan.outputs[0], 1)):
            whole = Region((0, 0), (128, 128))
            status.give_up(BadBlock(number, (0, number), whole, "broken", "trace", "task"), output)
    bad = blocks_given_up(RunDirectory(folder / f"{A}.run"))
    assert [(block.name, block.to_json().get("output")) for block in bad] == [
        ("block 1 of a.zarr", str(folder / A)),
        ("block 2 of a.zarr", str(folder / A)),
        ("block 2 of b.zarr", str(folder / B)),
    ]
