"""Checking and repairing an output: damaged blocks and no others; what somebody else put there, or a user added, is left alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import zarr

from halotile.errors import BlockFailed, DamagedData, InputError, OutputInUse, OutputRefused, ResumeRefused
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.graphs.runs.verify import verify
from halotile.storage.arrays import open_source
from halotile.storage.images.added_levels import add_levels
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.json_files import with_checksum
from halotile.storage.sharded.output import ShardWriter
from tests.cases import all_of, thorough
from tests.faults import BLOCKS, Scene, flip_bit
from tests.graphs.test_claimed import after
from tests.graphs.test_resume import refused
from tests.support import job_of, noisy_image, work_of, write_zarr

Check = Callable[[], None]

pytestmark = pytest.mark.cluster

Change = Callable[[Scene], object]


DAMAGE: list[Callable[[Path], object]] = [
    flip_bit,
    lambda file: flip_bit(file, 0),
    lambda file: flip_bit(file, -3),  # in the index
    lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    lambda file: file.write_bytes(b""),
    Path.unlink,
    lambda file: shutil.copyfile(file.with_name("7"), file),  # a shard of another place
]


def test_damaged_shards_are_named_and_their_blocks_alone_done_again(finished: Scene, check_whole: Check) -> None:
    for column, damage in enumerate(DAMAGE):
        damage(finished.output / "c" / "2" / str(column))
    verdict = verify(finished.output)
    assert (verdict.blocks, verdict.checked, verdict.repaired) == (BLOCKS, BLOCKS, 0)
    named = [f"block {16 + n}: {finished.output}/c/2/{n}" for n in range(len(DAMAGE))]
    assert list(dict.fromkeys(": ".join(line.split(": ")[:2]) for line in verdict.problems)) == named
    assert verify(finished.output) == verdict
    (finished.output / "zarr.json").unlink()
    repaired = verify(finished.output, job=finished.job(), repair=True)
    assert repaired.repaired == len(repaired.problems) == len(verdict.problems) + 1
    assert not repaired.undone
    assert sorted(finished.seen()) == list(range(16, 16 + len(DAMAGE)))
    check_whole()


def test_damaged_metadata_are_named_and_restored(finished: Scene, check_whole: Check) -> None:
    file = finished.output / "zarr.json"
    changes: list[Any] = [flip_bit, Path.unlink, ("shape", [250, 256]), ("shape", [300, 256]), ("data_type", "int32")]
    for change in changes:
        words = "is "
        if isinstance(change, tuple):  # they describe another array
            (key, value) = change
            file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
            words = f"has {key} {json.dumps(value)}, and the run wrote "
        else:
            change(file)
        (problem,) = verify(finished.output).problems
        assert problem.startswith(f"metadata: {file} {words}")
        with pytest.raises(OutputRefused, match=r"verify .*clean\.zarr --repair --allow-import.* restores it"):
            finished.run()
        verdict = verify(finished.output, job=finished.job(), repair=True)
        assert (verdict.problems, verdict.repaired) == ((problem,), 1)
    assert finished.seen() == []
    check_whole()


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
    for column in "45":
        (finished.output / "c" / "2" / column).unlink()
    finished.make_trouble("raise", 20)
    verdict = verify(finished.output, job=job, repair=True)
    assert (len(verdict.problems), verdict.repaired) == (2, 1), "it counts only what it has repaired"


def test_a_killed_repair_is_finished_by_the_next(
    finished: Scene, check_whole: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finished.output / "c" / "2" / "3").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("halotile.graphs.runs.verify.run", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            verify(finished.output, job=finished.job(), repair=True)
    assert finished.journalled() == set(range(BLOCKS)) - {19}
    flip_bit(finished.output / "c" / "0" / "0")
    verdict = verify(finished.output, job=finished.job(), repair=True)
    assert (verdict.sound, verdict.checked, list(verdict.undone)) == (True, BLOCKS, [])
    assert set(finished.seen()) == {0, 19}
    check_whole()


def test_a_repair_without_the_job_strikes_nothing_and_another_version_is_told_as_that(finished: Scene) -> None:
    (finished.output / "c" / "2" / "3").unlink()
    with pytest.raises(ResumeRefused, match=r"output\.codec was"):
        verify(finished.output, job=finished.job(parts={"output": {"codec": "zstd"}}), repair=True)
    with pytest.raises(OutputRefused, match="without its job"):
        verify(finished.output, repair=True)
    assert finished.journalled() == set(range(BLOCKS))
    old = b'{"journal": 1, "fingerprint": "print", "total": 64}'
    finished.directory.journal_path.write_bytes(with_checksum(old))
    finished.directory.plan_path.write_text(json.dumps(finished.directory.read_plan()))  # without a seal
    with pytest.raises(ResumeRefused, match=r"another version of halotile.*--fresh.*output\.overwrite: true"):
        verify(finished.output)
    finished.directory.journal_path.unlink()
    with pytest.raises(DamagedData, match=r"plan\.json is damaged"):
        verify(finished.output)


def test_an_output_that_is_not_there_is_damaged_where_a_run_wrote_one(finished: Scene, tmp_path: Path) -> None:
    for repair in (False, True):
        with pytest.raises(OutputRefused, match=r"clean\.zarr: nothing is there\. Give the output\.path"):
            verify(tmp_path / "clean.zarr", repair=repair)
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
    number, task, finest = len(plan.grid) - 1, work_of(plan).task, plan.layout.arrays[0]
    region = task.roles.output_region(plan.grid.block_at(number).core, task.tiling.scale, task.channels_out)
    *_, (last, _) = finest.shards(region)
    Path(job.output.path, finest.name, last).unlink()
    (problem,) = verify(job.output.path).problems
    assert problem.startswith(f"block {number}: ")
    assert verify(job.output.path, job=job, repair=True).repaired == 1
    assert verify(job.output.path).problems == ()


def write_others(scene: Scene, count: int = BLOCKS) -> None:
    """Have so many blocks be those of another job of the same layout."""
    layout = make_plan(scene.job()).layout
    for number in range(count):
        region = layout.grid.block_at(number).core
        ShardWriter(scene.output, layout).write(region, np.zeros(region.shape, "float32"))


def test_the_result_of_another_job_that_was_moved_here_stays_and_a_few_of_its_blocks_are_done_again(
    finished: Scene, cluster: RunningCluster, check_whole: Check
) -> None:
    write_others(finished, BLOCKS // 2)
    assert finished.run(cluster).resumed == BLOCKS // 2
    check_whole()
    write_others(finished, BLOCKS // 2 + 1)
    with refused(finished.output, OutputRefused, r"33 of the 64 blocks .* other pixels.*Move it away.*--repair"):
        finished.run(cluster)
    assert finished.journalled() == set(range(BLOCKS))
    assert verify(finished.output, job=finished.job(), repair=True).repaired == BLOCKS // 2 + 1
    check_whole()


def test_an_output_that_a_user_appended_to_is_not_damage(finished: Scene) -> None:
    array = zarr.open_array(finished.output, mode="r+")
    array.resize((300, 256))
    array[256:] = 1.0
    with pytest.raises(OutputRefused, match=r"has shape \[300, 256\], and the run wrote .*Move it away"):
        verify(finished.output, job=finished.job(), repair=True)


def add_attributes(scene: Scene) -> None:
    attributes = zarr.open_array(scene.output, mode="r+").attrs
    attributes["who"] = "me"
    attributes["scale"] = [2, 2]


def test_attributes_of_the_user_are_no_damage_and_outlive_a_repair(scene: Scene, cluster: RunningCluster) -> None:
    scene.run(cluster, observer=after(8, scene, add_attributes))
    assert verify(scene.output).problems == ()
    assert scene.run(cluster).resumed == BLOCKS
    del zarr.open_array(scene.output, mode="r+").attrs["halotile"]
    assert verify(scene.output, job=scene.job(), repair=True).repaired == 1
    kept = {"scale": [1.0, 1.0], "units": [None, None], "complete": [256, 256]}
    attributes = zarr.open_array(scene.output, mode="r").attrs.asdict()
    assert attributes == {"halotile": kept, "who": "me", "scale": [2, 2]}
    assert verify(scene.output).problems == ()


def put(scene: Scene, version: Any = None) -> None:
    """An array of a version of Zarr, or a group, in place of the output."""
    shutil.rmtree(scene.output)
    if version:
        zarr.create_array(scene.output, data=np.ones((60, 50)), zarr_format=version)
    else:
        zarr.create_group(scene.output).create_array("other", data=np.ones(9))


STRANGERS: dict[str, tuple[Change, str]] = {
    "array": (lambda scene: put(scene, 3), "zarr.json has shape .60, 50., and the run wrote .256, 256."),
    "old array": (lambda scene: put(scene, 2), "zarray is of another Zarr"),
    "group": (put, 'zarr.json has node_type "group"'),
    "result": (write_others, "64 of the 64 blocks that are done are whole there, with other pixels"),
    "notes": (lambda scene: (scene.output / "c/notes.txt").write_text("mine"), "no run wrote .*/c/notes.txt"),
    "labels": (lambda scene: write_zarr(scene.output / "labels/seg", np.ones((9, 9))), "no run wrote .*labels/seg"),
    "attributes": (add_attributes, "attributes that no run wrote .who, scale."),
}


@pytest.mark.parametrize("name", all_of(STRANGERS, thorough=["old array", "group", "labels"]))
def test_fresh_discards_nothing_that_no_run_wrote(
    finished: Scene, cluster: RunningCluster, check_whole: Check, name: str
) -> None:
    change, words = STRANGERS[name]
    change(finished)
    if name in ("array", "old array", "group"):  # another Zarr is not damage
        for repair in (None, False, True):
            with refused(finished.output, OutputRefused, "is not what the run wrote there: .*Move it away") as told:
                finished.run() if repair is None else verify(finished.output, job=finished.job(), repair=repair)
            assert "--repair" not in str(told.value)
    with refused(finished.output, OutputRefused, rf"{words}.*output\.overwrite: true"):
        finished.run(cluster, fresh=True)
    assert finished.journalled() == set(range(BLOCKS))
    assert finished.run(cluster, fresh=True, parts={"output": {"overwrite": True}}).resumed == 0
    check_whole()


@pytest.mark.parametrize(("metadata", "plan"), [("gone", "lost"), thorough("half", "there")])
def test_starting_over_needs_no_metadata_where_all_else_is_the_runs(
    finished: Scene, cluster: RunningCluster, check_whole: Check, metadata: str, plan: str
) -> None:
    file = finished.output / "zarr.json"
    file.write_bytes(file.read_bytes()[:100]) if metadata == "half" else file.unlink()
    if plan == "lost":
        finished.directory.plan_path.unlink()
    assert finished.run(cluster, fresh=True).resumed == 0
    check_whole()


@pytest.mark.parametrize("levels", [1, 2])
def test_a_finished_run_to_which_levels_are_added_stays_sound_and_finished_and_no_other_gets_any(
    tmp_path: Path, cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, levels: int
) -> None:
    monkeypatch.setattr("halotile.storage.sharded.layout.LARGEST_TOP", 30)
    source, output = write_zarr(tmp_path / "noisy.zarr", noisy_image((250, 180))), tmp_path / "clean.zarr"
    job = job_of(source, output, "none", shard=64, chunk=32, tile={"block": 64})
    job = replace(job, output=replace(job.output, levels=levels))
    with pytest.raises(KeyboardInterrupt):
        run(make_plan(job), observer=Mock(side_effect=KeyboardInterrupt), cluster=cluster)
    with pytest.raises(InputError, match=r"has 12 of 12 blocks left to do\. `recon-cli resume .*clean\.zarr` finishes"):
        add_levels(output)
    run(make_plan(job), cluster=cluster)
    with RunDirectory.beside(output).lock(), pytest.raises(OutputInUse, match="is writing this output"):
        add_levels(output)
    count, shapes = add_levels(output)
    assert (count, len(shapes)) == (5, 6 - levels)
    kept = [open_source(output, level=level)[...].tobytes() for level in range(count)]
    verdict = verify(output)
    assert verdict.problems == ()
    assert not verdict.undone
    assert verdict.repairable
    again = run(make_plan(job), cluster=cluster)
    assert again.resumed == again.total
    flip_bit(output / "0" / "c" / "1" / "1")
    assert len(verify(output).problems) == 1
    assert verify(output, job=job, repair=True).sound
    assert [open_source(output, level=level)[...].tobytes() for level in range(count)] == kept
    (output.parent / "clean.zarr.run").rename(tmp_path / "elsewhere")
    assert verify(output).problems == ()
    assert not verify(output).repairable
