"""What is moved, removed or changed under a run, and blocks that cannot be computed: a run says what to do, and the other blocks are done."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import stat
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import zarr

from halotile import errors
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.denoise import image as job_image
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs import held_output, signals
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.verify import verify
from halotile.graphs.watching.progress import Progress
from halotile.storage.disk.durable import PARTIAL
from halotile.storage.formats.zarr import ZarrReader
from halotile.storage.grid import Region
from halotile.storage.sharded import ownership, shards
from halotile.storage.sharded.ownership import is_marked
from tests.cases import all_of, thorough
from tests.faults import ACROSS, BLOCK, BLOCKS, LEFT, Scene, flip_bit, image, truth
from tests.support import write_zarr

Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.cluster
Check = Callable[[], None]

Change = Callable[[Scene], object]


def after(count: int, scene: Scene, change: Change) -> Callable[[Progress], None]:
    """An observer that changes something, once so many blocks are done."""
    due = [change]

    def watch(progress: Progress) -> None:
        if progress.done >= count and due:
            due.pop()(scene)

    return watch


def remove(scene: Scene) -> None:
    while scene.output.exists():  # a worker may be putting a shard into it
        shutil.rmtree(scene.output, ignore_errors=True)


def replace(scene: Scene) -> None:
    aside = scene.output.rename(scene.folder / "elsewhere")  # a worker may be putting a shard into it
    shutil.copytree(aside, scene.output, ignore=shutil.ignore_patterns(f"*{PARTIAL}"), dirs_exist_ok=True)


def swap(scene: Scene) -> None:
    files = sorted((scene.output / "c").glob("0/[0-9]"))[:2]
    for file, content in zip(files, [file.read_bytes() for file in reversed(files)], strict=True):
        file.write_bytes(content)


Refused, Damaged = errors.OutputRefused, errors.DamagedData
OUTPUT: dict[str, tuple[Change, type[errors.HalotileError], str]] = {
    "moved": (lambda scene: scene.output.rename(scene.folder / "elsewhere"), Refused, "was moved or removed.*Put it back and run again"),
    "removed": (remove, Refused, "was moved or removed.*--fresh"),
    "replaced": (replace, Refused, "no longer the directory that the run began to write"),
    "without metadata": (lambda scene: (scene.output / "zarr.json").unlink(), Refused, "metadata of .* were changed or removed.*verify .* --repair"),
    "without a shard": (lambda scene: next((scene.output / "c").glob("0/[0-9]")).unlink(), Damaged, "shards of 1 block were changed or removed.*run again"),
    "with two shards swapped": (swap, Damaged, "shards of 2 blocks were changed or removed.*run again"),
}  # fmt: skip


@pytest.mark.parametrize("name", all_of(OUTPUT, thorough=OUTPUT.keys() - {"moved", "with two shards swapped"}))
def test_a_changed_output_ends_no_run(scene: Scene, cluster: RunningCluster, check_whole: Check, name: str) -> None:
    change, kind, words = OUTPUT[name]
    scene.set_pace(0.05)
    with pytest.raises(kind, match=words):
        scene.run(cluster, observer=after(8, scene, change))
    assert scene.status()["state"] == "failed"
    assert scene.output.exists() == (name not in ("moved", "removed")), "nobody makes it again"
    assert kind is Refused or len(scene.journalled()) < BLOCKS, "what is damaged is to be done again"
    scene.set_pace(0)
    aside = scene.folder / "elsewhere"
    if aside.exists():
        shutil.rmtree(scene.output, ignore_errors=True)
        aside.rename(scene.output)
    if name == "without metadata":
        with pytest.raises(errors.OutputRefused, match=r"verify .*clean\.zarr --repair --allow-import"):
            scene.run(cluster)
        verify(scene.output, job=scene.job(), repair=True)
    else:
        scene.run(cluster, fresh=name == "removed")
    check_whole()


def test_an_overwritten_journal_is_whole_in_the_end(half_done: Scene, cluster: Any, check_whole: Check) -> None:
    half_done.set_pace(0.02)
    overwrite = after(61, half_done, lambda scene: scene.directory.journal_path.write_text("garbage\n"))
    half_done.run(cluster, observer=overwrite)
    check_whole()
    assert half_done.run(cluster).resumed == BLOCKS


def rewrite(scene: Scene) -> None:
    zarr.open_array(scene.source, mode="r+")[...] = image() + np.float32(0.25)


REMOVED = thorough(lambda scene: shutil.rmtree(scene.source), "was moved, removed or damaged")


@pytest.mark.parametrize("looks", [False, thorough(True)], ids=["at the end", "on the way"])
@pytest.mark.parametrize(("change", "words"), [(rewrite, "was written to"), REMOVED], ids=["rewritten", "removed"])
def test_a_changed_input_keeps_only_blocks_of_the_old_one(
    scene: Scene, cluster: RunningCluster, check_whole: Check, monkeypatch: Patch, change: Any, words: str, looks: bool
) -> None:
    if looks:
        monkeypatch.setattr(held_output, "LOOK_SECONDS", 0.1)
        monkeypatch.setattr(held_output, "LOOK_SHARE", 0.5)
    shutil.copytree(scene.source, scene.folder / "backup")
    scene.set_pace(0.05)
    with pytest.raises(errors.InputError, match=rf"noisy\.zarr {words} while the run read it.*--fresh") as ended:
        scene.run(cluster, observer=after(24, scene, change), on_bad_block="quarantine", retries=0)
    kept = scene.journalled()
    assert len(kept) >= (8 if looks else 0)
    assert ("No block was done before that" in str(ended.value)) == (not kept)
    pixels = zarr.open_array(scene.output, mode="r")[...]
    for block in kept:
        y, x = (BLOCK * place for place in divmod(block, BLOCKS // 8))
        here = np.s_[y : y + BLOCK, x : x + BLOCK]
        assert np.array_equal(pixels[here], truth(image())[here])
    scene.set_pace(0)
    if scene.source.exists():
        with pytest.raises(errors.HalotileError):
            scene.run(cluster)
        shutil.rmtree(scene.source)
    (scene.folder / "backup").rename(scene.source)
    assert scene.run(cluster).resumed == len(kept)
    check_whole()


@pytest.mark.parametrize("done", [0, 2])
def test_blocks_that_may_be_of_either_input_are_told_where_there_are_any(scene: Scene, done: int) -> None:
    with claim(make_plan(scene.job())) as held:
        held.held[0].journal.mark(dict.fromkeys(range(done), b"some"))
        rewrite(scene)
        with pytest.raises(errors.InputError, match=r"No block was done before that.* Restore the file") as ended:
            held.check()
        assert not held.held[0].journal.done
    assert ("2 blocks (0-1) were done since" in str(ended.value)) == (done == 2)
    assert ("may come from either version" in str(ended.value)) == (done == 2)


def test_a_side_input_is_looked_after_as_well(scene: Scene, cluster: RunningCluster) -> None:
    mask = write_zarr(scene.folder / "mask.zarr", np.ones(image().shape, "uint8"))
    scene.set_pace(0.02)
    parts, touch = {"input": {"sides": {"mask": str(mask)}}}, lambda _: os.utime(mask / "c" / "0" / "0")
    with pytest.raises(errors.InputError, match=r"mask\.zarr was written to"):
        scene.run(cluster, parts=parts, observer=after(8, scene, touch))


ASKING: dict[str, tuple[Any, str]] = {
    "input": (ZarrReader, "__init__"),
    "directory": (os.path, "samestat"),
    "metadata": (ownership, "_read_bytes"),
    "shards": (shards, "inspect_index"),
}
"""What asks the system in the driver, as a run looks after its input and its output."""


class Hiccup:
    """Has the system not give something: so many times, once it has begun."""

    def __init__(self, monkeypatch: Patch, name: str, times: float) -> None:
        self.left, self.begun = times, False
        self._asked = getattr(*ASKING[name])
        monkeypatch.setattr(*ASKING[name], lambda *given, **named: self._answer(*given, **named))

    def begin(self, _: Scene) -> None:
        self.begun = True

    def _answer(self, *given: Any, **named: Any) -> Any:
        if self.begun and self.left > 0:
            self.left -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return self._asked(*given, **named)


@pytest.mark.parametrize("name", all_of(ASKING, thorough=["directory", "metadata"]))
def test_what_the_system_does_not_tell_for_a_while_ends_no_run_and_for_ever_ends_it(
    scene: Scene, cluster: RunningCluster, check_whole: Check, check_resumes: Check, monkeypatch: Patch, name: str
) -> None:
    scene.set_pace(0.02)
    with monkeypatch.context() as patched:
        patched.setattr(held_output, "LOOK_SECONDS", 0.1)
        hiccup = Hiccup(patched, name, times=5)
        scene.run(cluster, observer=after(8, scene, hiccup.begin))
    assert not hiccup.left
    assert sorted(scene.seen()) == list(range(BLOCKS)), "no block is done again"
    check_whole()
    with monkeypatch.context() as patched:
        patched.setattr(held_output, "SILENT_SECONDS", 0.0)
        hiccup = Hiccup(patched, name, times=math.inf)
        with pytest.raises(errors.InputUnreadable, match=r"\.zarr.*Stale file handle.*network.*run again"):
            scene.run(cluster, fresh=True, observer=after(8, scene, hiccup.begin))
    assert scene.status()["state"] == "failed"
    assert len(scene.journalled()) >= 8, "nothing is known against what is done"
    check_resumes()


def test_slow_looks_are_seldom(scene: Scene, monkeypatch: Patch) -> None:
    look = Mock(side_effect=lambda: time.sleep(0.05))
    monkeypatch.setattr(held_output.HeldOutputs, "_check_input", look)
    monkeypatch.setattr(held_output, "LOOK_SECONDS", 0.0)
    with claim(make_plan(scene.job())) as held:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            held.check_in_time()
    look.assert_called_once()


@pytest.mark.thorough
@pytest.mark.parametrize("checks", ["when it goes on", "at its end"])
def test_a_run_that_is_stopped_while_it_checks_has_not_finished(
    scene: Scene, cluster: RunningCluster, check_whole: Check, monkeypatch: Patch, checks: str
) -> None:
    """A pixel is damaged beneath a checksum that is read alone by any check but that of every byte."""
    due = BLOCKS
    if checks == "when it goes on":
        scene.run(cluster)
        flip_bit(next((scene.output / "c").glob("0/[0-9]")), 16)
        due = 0

    def press(_: Scene) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(signals, "TWICE_SECONDS", -1.0)
    with pytest.raises(errors.Stopped, match="stopped on SIGTERM while the blocks that are done were checked"):
        scene.run(cluster, observer=after(due, scene, press))
    assert scene.status()["state"] == ("finished" if checks == "when it goes on" else "stopped")
    assert scene.run(cluster).done == BLOCKS
    check_whole()


def put_nan(scene: Scene, block: int) -> None:
    """A NaN in the input, in the middle of a block."""
    pixels = zarr.open_array(scene.source, mode="r+")
    row, column = divmod(block, ACROSS)
    pixels[row * BLOCK + 5, column * BLOCK + 7] = np.nan


def others(*bad: int) -> set[int]:
    return set(range(BLOCKS)) - set(bad)


BAD = [
    ("raise", "ValueError: poisoned by raise-20"),
    ("nan", r"returned NaN or infinity for finite pixels at .*64.*128"),
    thorough("shape", r"the function returned \(31, 32\) for an image of shape \(32, 32\)"),
    ("die", "every worker that computed it died"),
    thorough("missing", r"FileNotFoundError: .*calibration\.npy"),
]


@pytest.mark.parametrize(("kind", "words"), BAD)
def test_a_bad_block_is_named(half_done: Scene, cluster: Any, check_resumes: Check, kind: str, words: str) -> None:
    cause = half_done.make_trouble(kind, 20)
    earlier = {name: len(half_done.events(name)) for name in ("bad block", "retry")}
    with pytest.raises(errors.BlockFailed, match="1 of 64 blocks failed after 1 retry;") as failed:
        half_done.run(cluster, retries=1)
    assert r"block 20 (index (2, 4), region (64, 128)–(96, 160))" in str(failed.value)
    assert "distributed" not in str(failed.value)
    failed.match(words)
    assert half_done.journalled() == others(20)
    status = half_done.status()
    assert (status["state"], status["done"], status["failed"], status["retried"]) == ("failed", 63, 1, 1)
    bad, retries = (half_done.events(name)[count:] for name, count in earlier.items())
    assert [(event["block"], event["index"]) for event in bad] == [(20, [2, 4])]
    assert len(retries) == 1
    if kind == "raise":
        assert Counter(half_done.seen())[20] == 2
        assert 'raise ValueError(f"poisoned by {file.name}")' in bad[0]["traceback"]
    cause.unlink()
    check_resumes()


@pytest.mark.parametrize("trouble", ["raise", "die"])
def test_quarantined_blocks_are_named_take_no_other_down_and_flaky_ones_are_tried_again(
    half_done: Scene, cluster: RunningCluster, check_whole: Check, trouble: str
) -> None:
    causes = [half_done.make_trouble(trouble, block) for block in (23, 20)]
    outcome = half_done.run(cluster, retries=0, on_bad_block="quarantine")
    assert [(bad.number, bad.index) for bad in outcome.quarantined] == [(20, (2, 4)), (23, (2, 7))]
    assert (outcome.done, half_done.journalled()) == (BLOCKS - 2, others(20, 23))
    assert (half_done.status()["state"], half_done.events("retry")) == ("finished", [])
    assert trouble == "die" or sorted(half_done.seen()) == list(LEFT), "without retries"
    assert not is_marked(half_done.output)
    assert np.isnan(zarr.open_array(half_done.output, mode="r")[...][2 * BLOCK : 3 * BLOCK, 7 * BLOCK :]).all()
    for cause in causes:
        cause.unlink()
    half_done.forget()
    half_done.make_trouble("flaky", 23, "2")
    assert (half_done.run(cluster, retries=2).done, Counter(half_done.seen())) == (BLOCKS, {20: 1, 23: 3})
    assert half_done.status()["retried"] == 2
    assert is_marked(half_done.output)
    check_whole()


def test_a_nan_of_the_input_fails_its_block_or_stays(scene: Scene, cluster: RunningCluster) -> None:
    put_nan(scene, 19)
    where = r"rows 64–95, columns 96–127; the first is at row 69, column 103"
    with pytest.raises(errors.BlockInputFailed, match=rf"block 19 .*holds NaN or infinity in {where}") as failed:
        scene.run(cluster, on_nan="fail")
    failed.match("1 of 64 blocks failed for its input")
    failed.match("Run again with run.on_nan: propagate to do only these. Once the image is repaired.*--same-input")
    assert (scene.events("retry"), scene.journalled()) == ([], others(19))
    assert scene.run(cluster).resumed == BLOCKS - 1
    expected = image()
    expected[2 * BLOCK + 5, 3 * BLOCK + 7] = np.nan
    np.testing.assert_array_equal(zarr.open_array(scene.output, mode="r")[...], truth(expected))


def test_a_bad_side_input_is_told_once_and_is_what_has_to_be_mended(scene: Scene, cluster: RunningCluster) -> None:
    values = np.ones(image().shape, "float32")
    values[:, :BLOCK] = np.nan
    mask = write_zarr(scene.folder / "mask.zarr", values)
    parts = {"input": {"sides": {"mask": str(mask)}}}
    with pytest.raises(errors.BlockInputFailed, match="8 of 64 blocks failed for their input") as failed:
        scene.run(cluster, parts=parts)
    assert str(failed.value).count("the side input mask holds NaN or infinity in rows ") == 1
    failed.match(r"\nand 7 more for input\.sides\.mask\n.*Once input\.sides\.mask is repaired, run with --same-input")
    zarr.open_array(mask, mode="r+")[...] = 1
    assert scene.run(cluster, parts=parts, same_input=True).resumed == BLOCKS - 8


def test_a_damaged_input_names_the_block_and_the_file(scene: Scene, cluster: RunningCluster) -> None:
    chunk = scene.source / "c" / "1" / "1"
    content = chunk.read_bytes()
    chunk.write_bytes(content[: len(content) // 2])
    with pytest.raises(errors.BlockInputFailed, match=r"4 of 64 blocks failed after 0 retries") as failed:
        scene.run(cluster, retries=0)
    failed.match("Once the image is repaired, run with --same-input: only these are redone")
    failed.match(r"DamagedData: .*noisy\.zarr.*restore this file from its origin")
    chunk.write_bytes(content)
    with pytest.raises(errors.ResumeRefused, match=r"input\.[\s\S]*same images, repaired .*run with --same-input"):
        scene.run(cluster)
    done = scene.run(cluster, same_input=True)
    assert (done.done, done.resumed) == (BLOCKS, BLOCKS - 4)
    assert scene.run(cluster).resumed == BLOCKS, "it is remembered"


def test_input_that_the_system_does_not_give_is_tried_again_and_named(scene: Scene, cluster: RunningCluster) -> None:
    chunk = scene.source / "c" / "1" / "1"
    chunk.unlink()
    os.mknod(chunk, stat.S_IFSOCK)  # not opened as a file: the system refuses, as for a broken disk
    with pytest.raises(errors.BlockInputFailed, match=r"InputUnreadable: .*noisy\.zarr.*No such device"):
        scene.run(cluster, retries=1)
    assert {event["block"] for event in scene.events("retry")} == set(range(BLOCKS)) - scene.journalled()


def test_a_nan_becomes_no_integer(scene: Scene, cluster: RunningCluster, monkeypatch: Patch) -> None:
    put_nan(scene, 19)
    parts = {"output": {"dtype": "uint16"}}
    with pytest.raises(errors.ConfigError, match=r"output\.dtype is uint16, which cannot hold the NaN"):
        scene.run(cluster, parts=parts)
    monkeypatch.setattr(job_image, "_squares", lambda *_: [Region((0, 0), (BLOCK, BLOCK))])
    with pytest.raises(errors.BlockFailed, match=r"block 19 .*a pixel is NaN, and the output is uint16"):
        scene.run(cluster, parts=parts)
    assert scene.journalled() == others(19)
