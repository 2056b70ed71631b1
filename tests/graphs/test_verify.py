"""Checking an output, and doing damaged blocks again: these and no others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from halotile.errors import BlockFailed, DamagedData, OutputRefused, ResumeRefused
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.graphs.runs.verify import verify
from halotile.storage.run_directory.json_files import with_checksum
from tests.cases import all_of, thorough
from tests.faults import BLOCKS, Scene, flip_bit, until
from tests.support import job_of, noisy_image, work_of, write_zarr

pytestmark = pytest.mark.cluster


@pytest.fixture
def finished(scene: Scene, cluster: RunningCluster) -> Scene:
    """A run that is done."""
    scene.run(cluster)
    scene.forget()
    return scene


def cut_short(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flip": flip_bit,
    "flip the first byte": lambda file: flip_bit(file, 0),
    "flip in the index": lambda file: flip_bit(file, -3),
    "cut": cut_short,
    "empty": empty,
    "delete": Path.unlink,
    "of another place": lambda file: shutil.copyfile(file.with_name("7"), file),
}


@pytest.mark.parametrize("name", all_of(DAMAGE, thorough=["flip the first byte", "flip in the index", "cut", "empty"]))
def test_a_damaged_shard_is_named(finished: Scene, name: str) -> None:
    DAMAGE[name](finished.output / "c" / "2" / "3")
    verdict = verify(finished.output)
    assert (verdict.blocks, verdict.checked, verdict.repaired) == (BLOCKS, BLOCKS, 0)
    assert verdict.problems
    assert all(line.startswith(f"block 19: {finished.output}/c/2/3: ") for line in verdict.problems)
    assert verify(finished.output) == verdict


def test_a_repair_does_exactly_the_damaged_blocks_again(finished: Scene, check_whole: Callable[[], None]) -> None:
    for column, damage in enumerate(DAMAGE.values()):
        damage(finished.output / "c" / "2" / str(column))
    (finished.output / "zarr.json").unlink()
    verdict = verify(finished.output, job=finished.job(), repair=True)
    assert verdict.repaired == len(verdict.problems) > len(DAMAGE)
    assert not verdict.undone
    assert sorted(finished.seen()) == list(range(16, 16 + len(DAMAGE)))
    check_whole()


@pytest.mark.parametrize("damage", [flip_bit, thorough(cut_short), thorough(empty), Path.unlink])
def test_damaged_metadata_is_named_and_restored(
    finished: Scene, check_whole: Callable[[], None], damage: Callable[[Path], None]
) -> None:
    damage(finished.output / "zarr.json")
    verdict = verify(finished.output)
    (problem,) = verdict.problems
    assert problem.startswith(f"metadata: {finished.output}/zarr.json is ")
    with pytest.raises(OutputRefused, match=r"verify .*clean\.zarr --repair --allow-import"):
        finished.run()
    verdict = verify(finished.output, job=finished.job(), repair=True)
    assert (verdict.problems, verdict.repaired) == ((problem,), 1)
    assert finished.seen() == []
    check_whole()


@pytest.mark.thorough
def test_a_repair_that_fails_is_not_called_one(finished: Scene) -> None:
    (finished.output / "c" / "2" / "3").unlink()
    finished.make_trouble("raise", 19)
    with pytest.raises(BlockFailed, match="block 19"):
        verify(finished.output, job=finished.job(retries=0), repair=True)
    (finished.output / "c" / "2" / "4").unlink()
    job = finished.job(retries=0, on_bad_block="quarantine")
    verdict = verify(finished.output, job=job, repair=True)
    assert [line.split(":")[0] for line in verdict.problems] == ["block 20"]
    assert verdict.repaired == 1
    verdict = verify(finished.output)
    assert (verdict.checked, list(verdict.undone), verdict.sound) == (BLOCKS - 1, [19], True)


@pytest.mark.parametrize("also_damaged", [thorough(False), True])
def test_a_repair_that_was_killed_is_finished_by_the_next(
    finished: Scene, check_whole: Callable[[], None], monkeypatch: pytest.MonkeyPatch, also_damaged: bool
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (finished.output / "c" / "2" / "3").unlink()
    monkeypatch.setattr("halotile.graphs.runs.verify.run", killed)
    with pytest.raises(KeyboardInterrupt):
        verify(finished.output, job=finished.job(), repair=True)
    monkeypatch.undo()
    assert finished.journalled() == set(range(BLOCKS)) - {19}
    if also_damaged:
        flip_bit(finished.output / "c" / "0" / "0")
    verdict = verify(finished.output, job=finished.job(), repair=True)
    assert (verdict.sound, verdict.checked, list(verdict.undone)) == (True, BLOCKS, [])
    assert set(finished.seen()) == {19} | ({0} if also_damaged else set())
    check_whole()


def test_a_quarantined_repair_counts_only_what_it_mended(finished: Scene) -> None:
    for column in "34":
        (finished.output / "c" / "2" / column).unlink()
    finished.make_trouble("raise", 19)
    job = finished.job(retries=0, on_bad_block="quarantine")
    verdict = verify(finished.output, job=job, repair=True)
    assert (len(verdict.problems), verdict.repaired) == (2, 1)


def test_a_repair_for_another_job_strikes_nothing(finished: Scene) -> None:
    (finished.output / "c" / "2" / "3").unlink()
    with pytest.raises(ResumeRefused, match=r"output\.codec was"):
        verify(finished.output, job=finished.job(parts={"output": {"codec": "zstd"}}), repair=True)
    with pytest.raises(OutputRefused, match="without its job"):
        verify(finished.output, repair=True)
    assert finished.journalled() == set(range(BLOCKS))


def test_a_run_of_another_version_is_told_as_that(finished: Scene) -> None:
    old = b'{"journal": 1, "fingerprint": "print", "total": 64}'
    finished.directory.journal_path.write_bytes(with_checksum(old))
    plan = finished.directory.plan_path
    plan.write_text(json.dumps(finished.directory.read_plan()))  # without a seal
    with pytest.raises(ResumeRefused, match=r"another version of halotile.*--fresh.*output\.overwrite: true"):
        verify(finished.output)
    finished.directory.journal_path.unlink()
    with pytest.raises(DamagedData, match=r"plan\.json is damaged"):
        verify(finished.output)


@pytest.mark.parametrize("repair", [False, True])
def test_a_path_where_nothing_stands_is_refused(scene: Scene, repair: bool) -> None:
    with pytest.raises(OutputRefused, match=r"clean\.zarr: nothing is there\. Give the output\.path"):
        verify(scene.output, repair=repair)


def test_an_output_that_was_deleted_beside_its_run_directory_is_damaged(finished: Scene) -> None:
    shutil.rmtree(finished.output)
    assert len(verify(finished.output).problems) > BLOCKS


def test_an_output_is_checked_without_its_run_directory_and_its_input(finished: Scene) -> None:
    finished.directory.path.rename(finished.folder / "elsewhere")
    finished.source.rename(finished.folder / "gone.zarr")
    assert verify(finished.output).problems == ()
    flip_bit(finished.output / "c" / "0" / "1")
    verdict = verify(finished.output)
    (problem,) = verdict.problems
    assert problem.startswith(f"shard 1: {finished.output}/c/0/1: ")
    assert not verdict.repairable
    with pytest.raises(OutputRefused, match="no run directory"):
        verify(finished.output, job=finished.job(), repair=True)
    (finished.output / "zarr.json").write_text("{")
    with pytest.raises(DamagedData, match=r"zarr\.json is damaged: .*Restore it from a copy"):
        verify(finished.output)


@pytest.mark.thorough
def test_a_running_job_is_checked_as_far_as_it_is_and_not_repaired(scene: Scene) -> None:
    scene.set_pace(0.05)
    driver = scene.start()
    try:
        until(lambda: len(scene.journalled()) > 5 or driver.poll() is not None)
        verdict = verify(scene.output)
        assert verdict.problems == ()
        assert 5 < verdict.checked < verdict.blocks
        (scene.output / "c" / "0" / "0").unlink()
        metadata = (scene.output / "zarr.json").stat()
        with pytest.raises(OutputRefused, match=f"in use: process {driver.pid} on"):
            verify(scene.output, job=scene.job(), repair=True)
        assert (scene.output / "zarr.json").stat().st_mtime_ns == metadata.st_mtime_ns
    finally:
        said, _ = driver.communicate(timeout=60)
    assert driver.returncode == 4, said
    assert "shards of 1 block were changed or removed" in said
    assert scene.journalled() == set(range(1, BLOCKS))


@pytest.mark.parametrize(
    ("network", "channels", "shape"), [("doubler", [1, 1], (256, 320)), thorough("colouring", [1, 3], (3, 128, 160))]
)
def test_blocks_of_an_output_of_another_shape_are_told_by_their_own_numbers(
    cluster: RunningCluster, tmp_path: Path, network: str, channels: list[int], shape: tuple[int, ...]
) -> None:
    source = write_zarr(tmp_path / "noisy.zarr", noisy_image((128, 160)))
    options = {"import": f"tests.networks:{network}", "scale": 2 if network == "doubler" else 1, "channels": channels}
    job = job_of(source, tmp_path / "clean.zarr", "torch", options, shard=64, chunk=32, tile={"block": 64})
    plan = make_plan(job)
    assert plan.layout.shape == shape
    run(plan, cluster=cluster)
    assert verify(job.output.path).problems == ()
    number = len(plan.grid) - 1
    task = work_of(plan).task
    region = task.roles.output_region(plan.grid.block_at(number).core, task.tiling.scale, task.channels_out)
    finest = plan.layout.arrays[0]
    *_, (last, _) = finest.shards(region)
    Path(job.output.path, finest.name, last).unlink()
    (problem,) = verify(job.output.path).problems
    assert problem.startswith(f"block {number}: ")
    verdict = verify(job.output.path, job=job, repair=True)
    assert verdict.repaired == 1
    assert verify(job.output.path).problems == ()
