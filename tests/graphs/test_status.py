"""What a run says of itself: in its directory, in a progress bar, and of workers whose last bits may differ."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import describe_bad_blocks
from halotile.graphs.runs.status import Status
from halotile.graphs.watching.progress import Progress, progress_shown
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.block import BadBlock, Receipt
from halotile.tasks.devices import device as module
from halotile.tasks.devices.device import cpu_kind
from tests.faults import Scene
from tests.support import job_of, noisy_image, write_zarr

MonkeyPatch = pytest.MonkeyPatch


@pytest.fixture
def status(tmp_path: Path) -> Status:
    """The status of a run of one block that has not begun."""
    return status_of(tmp_path, blocks=1)


def status_of(folder: Path, *, blocks: int) -> Status:
    """The status of a run of so many blocks that has not begun."""
    source = write_zarr(folder / "in.zarr", noisy_image((128 * blocks, 30)))
    job = job_of(source, folder / "out.zarr", "gaussian", {"sigma": 1}, tile={"block": 128})
    plan = make_plan(job)
    assert plan.blocks == blocks
    directory = RunDirectory(plan.run_directory)
    directory.create()
    return Status(directory, plan, None)


def go_through(status: Status, *, begin: int, end: int) -> dict[str, object]:
    """A run from its first word to its last, and what is recorded of it then."""
    again = Status(status.directory, status.plan, None)
    again.begin(begin)
    moment = again.progress("stop", done=end, failed=0)
    if begin != end:
        moment = replace(moment, peak_memory_bytes=2**29 * end, seconds=7.0)
    again.end("finished", moment, "")
    return status.directory.read_status() or {}


def test_a_run_speaks_for_itself_unless_nothing_was_left_to_do(status: Status) -> None:
    first = go_through(status, begin=0, end=1)
    assert (first["state"], first["peak_memory_bytes"], first["seconds"]) == ("finished", 2**29, 7.0)
    assert go_through(status, begin=1, end=1) == first
    assert go_through(status, begin=0, end=1) != first


def test_the_time_of_all_attempts_is_kept_and_what_was_done_is_known_from_the_first_word(tmp_path: Path) -> None:
    status = status_of(tmp_path, blocks=3)
    spans = ((0, 1), (1, 2), (2, 3), (0, 3))
    assert [go_through(status, begin=begin, end=end)["all_seconds"] for begin, end in spans] == [7, 14, 21, 7]
    status.begin(1)
    recorded = status.directory.read_status() or {}
    assert (recorded["done"], recorded["resumed"], recorded["seconds"]) == (1, 1, 0.0)
    cut_off = Status(status.directory, status.plan, None)
    cut_off.begin(0)
    assert go_through(status, begin=3, end=3)["state"] == "finished"


def test_of_a_long_message_one_line_is_shown_and_all_is_kept(status: Status) -> None:
    shown: list[str] = []
    status = Status(status.directory, status.plan, lambda progress: shown.append(progress.message))
    message = "block 7 failed: ValueError: poisoned\nby hand"
    status.report(message)
    status.notify(status.progress("denoise", done=0, failed=0))
    assert shown == ["block 7 failed: ValueError: poisoned"]
    assert [event["text"] for event in status.directory.read_events()] == [message]


def test_a_line_that_is_reported_while_an_observer_is_notified_is_shown_next(status: Status) -> None:
    shown: list[str] = []

    def observe(progress: Progress) -> None:
        if not shown:
            watched.report("third")
        shown.append(progress.message)

    watched = Status(status.directory, status.plan, observe)
    watched.report("first")
    before = watched.progress("denoise", done=0, failed=0)
    watched.report("second")
    for progress in (before, before, watched.progress("denoise", done=0, failed=0)):
        watched.notify_now(progress)
    assert shown == ["first\nsecond", "third", ""]


def test_a_bad_block_takes_one_line_of_the_message(status: Status) -> None:
    block = status.plan.grid.block_at(0)
    bad = BadBlock(0, block.index, block.core, "ValueError: poisoned\nby hand", "", "task")
    first, line, last = describe_bad_blocks(status.plan, status.plan.grid, (bad,)).splitlines()
    assert len(status.plan.grid) == 1
    assert first.startswith("1 of 1 block failed after 3 retries")
    assert line.endswith("): ValueError: poisoned")
    assert last.startswith("Tracebacks are in ")


def test_bits_of_a_gpu_that_change_are_reported_once(status: Status) -> None:
    shown: list[str] = []
    status.directory.write_plan({"fingerprint": status.fingerprint})
    status = Status(status.directory, status.plan, lambda progress: shown.append(progress.message))
    first, later = ({"4×1×64×64": digest, "4×1×8×8": "c"} for digest in "ab")
    for bits in (first, {}, first, later, later):
        status.note_arithmetic(Receipt(worker="tcp://w", host="node7", cpu_kind="an H200", bits=bits))
    status.notify(status.progress("stop", done=1, failed=0))
    assert "".join(shown).count("rounds differently") == 1
    assert "tcp://w on node7" in "".join(shown)
    again = Status(status.directory, status.plan, lambda progress: shown.append(progress.message))
    again.note_arithmetic(Receipt(cpu_kind="an H200", bits=first))
    again.note_arithmetic(Receipt(cpu_kind="another", bits=later))
    again.notify(status.progress("stop", done=1, failed=0))
    assert "2 kinds of CPUs or GPUs" in "".join(shown)
    assert "".join(shown).count("rounds differently") == 1


MOMENTS = [
    Progress("start", 2, 2, 8, 0, 800, 0.1),
    Progress("denoise", 6, 2, 8, 4_000_000, 8_000_000, 2.0, message="block 3 is tried again"),
]


class Screen(io.StringIO):
    is_terminal = True

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize("where", ["terminal", "notebook", "log", "observer"])
def test_a_bar_is_shown_at_a_terminal_or_in_a_notebook(where: str, monkeypatch: MonkeyPatch) -> None:
    screen, observed = Screen(), list[Progress]()
    screen.is_terminal = where in ("terminal", "observer")
    monkeypatch.setattr(sys, "stderr", screen)
    if where == "notebook":  # without widgets the bar is of text, without a warning
        shell = type("ZMQInteractiveShell", (), {})()
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with progress_shown(observed.append if where == "observer" else None) as observe:
        for moment in MOMENTS:
            if observe is not None:
                observe(moment)
    text = screen.getvalue()
    assert observed == (MOMENTS if where == "observer" else [])
    if where in ("log", "observer"):
        assert text == ""
        return
    assert ("6/8" in text, "IProgress" in text) == (True, False)
    if where == "terminal":
        assert all(words in text for words in ("denoise", "2 Mpix/s", "block 3 is tried again\n"))


CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: A name with its clock @ 2.10GHz
flags\t\t: fpu sse4_2 avx avx2 {more}

processor\t: 1
vendor_id\t: none
"""


def warnings(scene: Scene) -> list[str]:
    return [event["text"] for event in scene.events("message") if "kinds of CPUs or GPUs" in event["text"]]


@pytest.mark.cluster
def test_blocks_of_another_kind_of_processor_are_reported_once(scene: Scene, cluster: RunningCluster) -> None:
    scene.run(cluster)
    assert scene.directory.read_valid_plan()["processors"] == [cpu_kind()]  # type: ignore[index]
    assert not warnings(scene)
    scene.directory.update_plan(processors=["another kind"])
    for shard in list((scene.output / "c").rglob("*/0"))[:2]:
        shard.unlink()
    scene.run(cluster)
    (said,) = warnings(scene)
    assert said.endswith(f"{cpu_kind()}; before: another kind")
    assert scene.directory.read_valid_plan()["processors"] == ["another kind", cpu_kind()]  # type: ignore[index]


def test_a_processor_is_named_by_what_libraries_choose_by(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CPUS", tmp_path / "cpuinfo")
    monkeypatch.setattr(module, "_CACHE", tmp_path / "size")
    names = set()
    for flag, limit, cache in [("", "", "1M"), ("avx512f", "", "1M"), ("avx512f", "AVX2", "1M"), ("", "", "2M")]:
        (tmp_path / "cpuinfo").write_text(CPUINFO.format(more=flag))
        (tmp_path / "size").write_text(f"{cache}\n")
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        names.add(cpu_kind.__wrapped__())
    assert len(names) == 4
    assert all(name.startswith("GenuineIntel 6 143, AVX") and "clock" not in name for name in names)
