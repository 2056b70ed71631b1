"""Going on with a run: in another way, from any journal, after a full disk."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from halotile.errors import BlockFailed, DamagedData, DiskRefused, OutputRefused, ResumeRefused
from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.graphs.watching.progress import Progress
from halotile.storage.run_directory.journal import Journal
from tests.cases import thorough
from tests.faults import BLOCKS, Scene, flip_bit

Check = Callable[[], None]

pytestmark = pytest.mark.cluster


LEFT = range(20, 24)


@pytest.fixture
def half_done(scene: Scene, cluster: RunningCluster) -> Scene:
    """A run that ended with some of its blocks missing."""
    causes = [scene.make_trouble("raise", block) for block in LEFT]
    with pytest.raises(BlockFailed):
        scene.run(cluster, retries=0)
    for cause in causes:
        cause.unlink()
    assert scene.journalled() == {*range(BLOCKS)} - {*LEFT}
    scene.forget()
    return scene


@pytest.mark.parametrize(
    "change",
    [
        {"workers": 1, "parts": {"output": {"overwrite": True}}},
        thorough({"workers": 7, "retries": 0, "on_bad_block": "quarantine", "parts": {"tile": {"size": 16}}}),
        thorough({"parts": {"tile": {"size": "auto", "block": "auto", "batch": 3}}}),
    ],
    ids=str,
)
def test_other_ways_give_the_same_bits(
    half_done: Scene, cluster: RunningCluster, check_whole: Check, change: dict[str, Any]
) -> None:
    outcome = half_done.run(cluster, **change)
    assert (outcome.done, outcome.resumed) == (BLOCKS, 60)
    assert set(half_done.seen()) == set(LEFT)
    check_whole()


def test_a_run_that_is_done_does_nothing_and_starts_no_cluster(
    half_done: Scene, cluster: RunningCluster, check_whole: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done.run(cluster)
    half_done.forget()
    monkeypatch.setattr(local, "start", lambda **_: pytest.fail("a cluster was started"))
    before, status = {p: p.stat().st_mtime_ns for p in half_done.output.rglob("*")}, half_done.status()
    assert status["peak_memory_bytes"] > 0
    seen: list[Progress] = []
    outcome = half_done.run(observer=seen.append)
    assert (outcome.done, outcome.resumed, outcome.seconds, half_done.seen()) == (BLOCKS, BLOCKS, 0.0, [])
    assert {p: p.stat().st_mtime_ns for p in half_done.output.rglob("*")} == before
    said = "".join(moment.message for moment in seen)
    assert "nothing left to do: all 64 blocks are done; checking every byte" in said
    assert (seen[-1].done, half_done.status()) == (BLOCKS, status)
    check_whole()


@pytest.mark.parametrize("cut", [1, 12, None])
def test_a_torn_journal_goes_on_before_the_tear_and_leftovers_are_swept(
    half_done: Scene, check_resumes: Check, cut: int | None
) -> None:
    leftovers = [half_done.output / "c" / "0" / "0.0a1b2c3d.partial", half_done.output / "zarr.json.0a1b2c3d.partial"]
    leftovers += [half_done.directory.path / "status.json.0a1b2c3d.partial"]
    for file in leftovers:
        file.write_bytes(b"half of it")
    before, journal = half_done.journalled(), half_done.directory.journal_path
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) > 3
    if cut is None:
        lines[2] = lines[2].replace(b"+", b"*")
    journal.write_bytes(b"".join(lines)[: cut and -cut])
    assert half_done.journalled() < before
    check_resumes()
    assert any("line 3 is damaged" in event["text"] for event in half_done.events("message")) is (cut is None)
    assert not any(file.exists() for file in leftovers)


def test_a_run_without_its_journal_starts_over(half_done: Scene, cluster: RunningCluster, check_whole: Check) -> None:
    journal = half_done.directory.journal_path
    journal.write_bytes(journal.read_bytes()[20:])
    with pytest.raises(DamagedData, match=r"first line is damaged\. Run with --fresh"):
        half_done.run(cluster)
    assert half_done.run(cluster, fresh=True).resumed == 0
    assert sorted(half_done.seen()) == list(range(BLOCKS))
    journal.unlink()
    assert half_done.run(cluster).resumed == 0
    check_whole()


@pytest.mark.parametrize(
    ("names", "how"),
    [(["job.json", "plan.json"], "half"), thorough(["plan.json"], "gone"), thorough(["job.json"], "gone")],
    ids=str,
)
def test_a_run_that_has_its_journal_goes_on_and_restores_the_other_files(
    half_done: Scene, cluster: RunningCluster, check_whole: Check, names: list[str], how: str
) -> None:
    files = [half_done.directory.path / name for name in names]
    kept = [json.loads(file.read_bytes()) for file in files]
    for file in files:
        file.write_bytes(file.read_bytes()[:100]) if how == "half" else file.unlink()
    assert half_done.run(cluster).resumed == 60
    assert set(half_done.seen()) == set(LEFT)
    for file, content in zip(files, kept, strict=True):
        restored = json.loads(file.read_bytes())
        assert restored.get("fingerprint") == content.get("fingerprint")
        assert restored.keys() == content.keys()
    check_whole()


def test_a_journal_of_another_job_without_its_plan_is_refused(half_done: Scene, cluster: RunningCluster) -> None:
    half_done.directory.plan_path.unlink()
    with pytest.raises(ResumeRefused, match=r"60 blocks of another job.*recon-cli resume .*--fresh"):
        half_done.run(cluster, parts={"output": {"codec": "zstd"}})
    assert half_done.run(cluster).resumed == 60


def told_of_damage(scene: Scene) -> list[str]:
    return [event["text"] for event in scene.events("message") if "damaged" in event["text"]]


def test_blocks_of_damaged_files_are_done_again(half_done: Scene, cluster: RunningCluster, check_whole: Check) -> None:
    shards = half_done.output / "c" / "0"
    (shards / "1").unlink()
    (shards / "3").write_bytes((shards / "3").read_bytes()[:-1])
    (shards / "4").write_bytes(b"")
    (shards / "6").write_bytes((shards / "6").read_bytes()[20:])
    shutil.copyfile(shards / "0", shards / "7")
    flip_bit(shards / "5", 100)
    assert half_done.run(cluster).resumed == 54
    assert set(half_done.seen()) == {1, 3, 4, 5, 6, 7, *LEFT}
    one = "1 block of the earlier run is damaged and done again"  # its bits alone
    assert told_of_damage(half_done) == ["5 blocks of the earlier run are damaged and done again", one]
    half_done.forget()
    flip_bit(shards / "3", 100)  # of a finished run
    assert half_done.run(cluster).resumed == BLOCKS - 1
    assert half_done.seen() == [3]
    assert told_of_damage(half_done)[2:] == [one]
    check_whole()


def test_a_finished_run_whose_damage_is_not_mended_is_told_as_failed(half_done: Scene, cluster: RunningCluster) -> None:
    half_done.run(cluster)
    flip_bit(half_done.output / "c" / "0" / "3", 100)
    half_done.make_trouble("raise", 3)
    with pytest.raises(BlockFailed, match="1 of 64 blocks failed"):
        half_done.run(cluster)
    told = {key: half_done.status()[key] for key in ("state", "done", "resumed", "failed")}
    assert told == {"state": "failed", "done": BLOCKS - 1, "resumed": BLOCKS - 1, "failed": 1}


def test_an_output_that_is_gone_is_not_replaced_unasked(
    half_done: Scene, cluster: RunningCluster, check_whole: Check
) -> None:
    aside = half_done.output.rename(half_done.folder / "aside")
    for parts in ({}, {"output": {"overwrite": True}}):
        with pytest.raises(OutputRefused, match=r"is not there, .* 60 blocks of it .* Put it back .*--fresh"):
            half_done.run(cluster, parts=parts)
    assert len(half_done.journalled()) == 60
    aside.rename(half_done.output)
    assert half_done.run(cluster).resumed == 60
    shutil.rmtree(half_done.output)
    assert half_done.run(cluster, fresh=True).resumed == 0
    check_whole()


def test_what_a_solver_has_done_outlives_its_output(half_done: Scene, cluster: RunningCluster) -> None:
    with Journal.open(half_done.directory.journal_path, half_done.fingerprint(), BLOCKS) as journal:
        journal.unmark(range(BLOCKS))
    half_done.directory.state_path.mkdir()
    shutil.rmtree(half_done.output)
    with pytest.raises(OutputRefused, match=r"is not there, .* intermediate results .*--fresh"):
        half_done.run(cluster)
    half_done.directory.state_path.rmdir()
    assert half_done.run(cluster).resumed == 0


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = Path(tempfile.mkdtemp())
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
    folder.rmdir()


@pytest.mark.parametrize("room_kib", [40, thorough(16), 0])
def test_a_full_disk_stops_the_run_and_more_room_lets_it_go_on(
    cluster: RunningCluster, tmp_path: Path, small_disk: Path, undisturbed: dict[str, bytes], room_kib: int
) -> None:
    scene = Scene.create(tmp_path, small_disk)
    plan = make_plan(scene.job())
    free = shutil.disk_usage(small_disk).free
    (small_disk / "filler").write_bytes(bytes(free - room_kib * 1024))
    with pytest.raises(DiskRefused, match=r"the disk ran full.*No space left on device.*run again") as full:
        run(plan, cluster=cluster)
    done = scene.journalled()
    assert room_kib // 4 - 16 <= len(done) <= room_kib // 4
    if room_kib > 20:
        full.match(
            rf"{len(done)} of 64 blocks are safe; the others take up to [\d.]+ KiB, and .* has [\d.]+ (KiB|B) free"
        )
    subprocess.run(["mount", "-o", "remount,size=3m", str(small_disk)], check=True)
    scene.forget()
    assert scene.run(cluster).resumed == len(done)
    assert sorted(scene.seen()) == sorted(set(range(BLOCKS)) - done)
    assert scene.files() == undisturbed
