"""What is moved, removed or changed under a run: it does not end well, and says what to do."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zarr

from halotile.errors import DamagedData, HalotileError, InputError, InputUnreadable, OutputRefused, Stopped
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs import held_output, signals
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.verify import verify
from halotile.graphs.watching.progress import Progress
from halotile.storage.disk.durable import PARTIAL
from halotile.storage.formats.zarr import ZarrReader
from halotile.storage.sharded import output, ownership
from tests.cases import all_of, thorough
from tests.faults import BLOCK, BLOCKS, Scene, flip_bit, image, truth
from tests.support import write_zarr

pytestmark = pytest.mark.cluster

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
    scene.output.rename(scene.folder / "elsewhere")
    # A worker may be putting a shard into it.
    shutil.copytree(
        scene.folder / "elsewhere",
        scene.output,
        ignore=lambda _, names: [n for n in names if n.endswith(PARTIAL)],
        dirs_exist_ok=True,
    )


def swap(scene: Scene) -> None:
    one, other = sorted((scene.output / "c").glob("0/[0-9]"))[:2]
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


OUTPUT: dict[str, tuple[Change, type[HalotileError], str]] = {
    "moved": (
        lambda scene: scene.output.rename(scene.folder / "elsewhere"),
        OutputRefused,
        r"was moved or removed.*Put it back and run again",
    ),
    "removed": (remove, OutputRefused, "was moved or removed.*--fresh"),
    "replaced": (replace, OutputRefused, "no longer the directory that the run began to write"),
    "without metadata": (
        lambda scene: (scene.output / "zarr.json").unlink(),
        OutputRefused,
        "metadata of .* were changed or removed.*verify .* --repair",
    ),
    "without a shard": (
        lambda scene: next((scene.output / "c").glob("0/[0-9]")).unlink(),
        DamagedData,
        "shards of 1 block were changed or removed.*run again",
    ),
    "with two shards swapped": (swap, DamagedData, "shards of 2 blocks were changed or removed.*run again"),
}


@pytest.mark.parametrize("name", all_of(OUTPUT, thorough=OUTPUT.keys() - {"moved", "with two shards swapped"}))
def test_a_run_whose_output_is_changed_does_not_finish(
    scene: Scene, cluster: RunningCluster, check_whole: Callable[[], None], name: str
) -> None:
    change, kind, words = OUTPUT[name]
    scene.set_pace(0.05)
    with pytest.raises(kind, match=words):
        scene.run(cluster, observer=after(8, scene, change))
    assert scene.status()["state"] == "failed"
    assert scene.output.exists() == (name not in ("moved", "removed")), "nobody makes it again"
    scene.set_pace(0)
    aside = scene.folder / "elsewhere"
    if aside.exists():
        shutil.rmtree(scene.output, ignore_errors=True)
        aside.rename(scene.output)
    if name == "without metadata":
        with pytest.raises(OutputRefused, match=r"verify .*clean\.zarr --repair --allow-import"):
            scene.run(cluster)
        verify(scene.output, job=scene.job(), repair=True)
    else:
        scene.run(cluster, fresh=name == "removed")
    check_whole()


def test_a_journal_that_is_overwritten_is_whole_again_when_the_run_ends(
    scene: Scene, cluster: RunningCluster, check_whole: Callable[[], None]
) -> None:
    scene.set_pace(0.02)
    scene.run(cluster, observer=after(8, scene, lambda _: scene.directory.journal_path.write_text("garbage\n")))
    check_whole()
    assert scene.run(cluster).resumed == BLOCKS


def rewrite(scene: Scene) -> None:
    zarr.open_array(scene.source, mode="r+")[...] = image() + np.float32(0.25)


def write_in_place(scene: Scene) -> None:
    for chunk in (scene.source / "c").glob("*/*"):
        with chunk.open("r+b") as file:
            file.write(b"other bytes")


@pytest.mark.parametrize("looks", [False, thorough(True)], ids=["at the end", "on the way"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rewrite, "was written to"),
        thorough(write_in_place, "was written to"),
        thorough(lambda scene: shutil.rmtree(scene.source), "was moved, removed or damaged"),
    ],
    ids=["rewritten", "in place", "removed"],
)
def test_a_run_whose_input_is_changed_keeps_only_blocks_of_the_old_one(
    scene: Scene,
    cluster: RunningCluster,
    check_whole: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    change: Change,
    words: str,
    looks: bool,
) -> None:
    if looks:
        monkeypatch.setattr(held_output, "LOOK_SECONDS", 0.1)
        monkeypatch.setattr(held_output, "LOOK_SHARE", 0.5)
    shutil.copytree(scene.source, scene.folder / "backup")
    scene.set_pace(0.05)
    with pytest.raises(InputError, match=rf"noisy\.zarr {words} while the run read it.*--fresh") as ended:
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
        with pytest.raises(HalotileError):
            scene.run(cluster)
        shutil.rmtree(scene.source)
    (scene.folder / "backup").rename(scene.source)
    assert scene.run(cluster).resumed == len(kept)
    check_whole()


@pytest.mark.parametrize("done", [0, 2])
def test_blocks_that_may_be_of_either_input_are_told_where_there_are_any(scene: Scene, done: int) -> None:
    plan = make_plan(scene.job())
    with claim(plan) as held:
        held.held[0].journal.mark(dict.fromkeys(range(done), b"some"))
        rewrite(scene)
        with pytest.raises(InputError, match=r"No block was done before that.* Put it back") as ended:
            held.check()
    assert ("2 blocks (0-1) were done since" in str(ended.value)) == (done == 2)
    assert ("may be of either" in str(ended.value)) == (done == 2)


def test_a_side_input_is_looked_after_as_well(scene: Scene, cluster: RunningCluster) -> None:
    mask = write_zarr(scene.folder / "mask.zarr", np.ones(image().shape, "uint8"))
    scene.set_pace(0.02)
    parts, touch = {"input": {"sides": {"mask": str(mask)}}}, lambda _: os.utime(mask / "c" / "0" / "0")
    with pytest.raises(InputError, match=r"mask\.zarr was written to"):
        scene.run(cluster, parts=parts, observer=after(8, scene, touch))


ASKING: dict[str, tuple[Any, str]] = {
    "input": (ZarrReader, "__init__"),
    "directory": (os.path, "samestat"),
    "metadata": (ownership, "_read_bytes"),
    "shards": (output, "inspect_index"),
}
"""What asks the system in the driver, as a run looks after its input and its output."""


class Hiccup:
    """Has the system not give something: so many times, once it has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, times: float) -> None:
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
def test_what_the_system_does_not_tell_for_a_while_ends_no_run_and_what_it_never_tells_ends_it_in_its_own_words(
    scene: Scene, cluster: RunningCluster, check_whole: Callable[[], None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    scene.set_pace(0.02)
    with monkeypatch.context() as patched:
        patched.setattr(held_output, "SILENT_SECONDS", 0.0)
        hiccup = Hiccup(patched, name, times=math.inf)
        with pytest.raises(InputUnreadable, match=r"\.zarr.*Stale file handle.*network.*run again"):
            scene.run(cluster, observer=after(8, scene, hiccup.begin))
    assert scene.status()["state"] == "failed"
    done = scene.journalled()
    assert len(done) >= 8, "nothing is known against what is done"
    monkeypatch.setattr(held_output, "LOOK_SECONDS", 0.1)
    hiccup = Hiccup(monkeypatch, name, times=5)
    scene.forget()
    scene.run(cluster, observer=after(len(done), scene, hiccup.begin))
    assert not hiccup.left
    assert sorted(scene.seen()) == sorted(set(range(BLOCKS)) - done), "no block is done again"
    check_whole()


def test_looks_that_take_long_are_seldom(
    scene: Scene, cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def look(_: held_output.HeldOutputs) -> None:
        looks.append(time.monotonic())
        time.sleep(0.1)

    monkeypatch.setattr(held_output.HeldOutputs, "_check_input", look)
    monkeypatch.setattr(held_output, "LOOK_SECONDS", 0.0)
    scene.set_pace(0.05)
    scene.run(cluster)
    # The first, and the one that is always taken, after the pass.
    assert len(looks) == 2 or looks[-1] - looks[0] > 9


@pytest.mark.thorough
@pytest.mark.parametrize("checks", ["when it goes on", "at its end"])
def test_a_run_that_is_stopped_while_it_checks_has_not_finished(
    scene: Scene, cluster: RunningCluster, check_whole: Callable[[], None], monkeypatch: pytest.MonkeyPatch, checks: str
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
    with pytest.raises(Stopped, match="stopped on SIGTERM while the blocks that are done were checked"):
        scene.run(cluster, observer=after(due, scene, press))
    assert scene.status()["state"] == ("finished" if checks == "when it goes on" else "stopped")
    assert scene.run(cluster).done == BLOCKS
    check_whole()
