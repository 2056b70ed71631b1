"""What a run says of itself in its directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import describe_bad_blocks
from halotile.graphs.runs.status import Status
from halotile.graphs.watching.progress import Progress
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.block import BadBlock, Receipt
from tests.support import job_of, noisy_image, write_zarr


@pytest.fixture
def status(tmp_path: Path) -> Status:
    """The status of a run that has not begun."""
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


def moment(status: Status, done: int) -> Progress:
    return replace(status.progress("stop", done=done, failed=0), peak_memory_bytes=2**29 * done, seconds=7.0)


def go_through(status: Status, *, begin: int, end: int) -> dict[str, object]:
    """A run from its first word to its last, and what is recorded of it then."""
    again = Status(status.directory, status.plan, None)
    again.begin(begin)
    again.end("finished", moment(again, end) if begin != end else again.progress("stop", done=end, failed=0), "")
    return status.directory.read_status() or {}


def test_a_run_with_nothing_left_to_do_leaves_what_the_earlier_one_said(status: Status) -> None:
    first = go_through(status, begin=0, end=1)
    assert (first["state"], first["peak_memory_bytes"], first["seconds"]) == ("finished", 2**29, 7.0)
    assert go_through(status, begin=1, end=1) == first


def test_a_run_that_does_blocks_again_speaks_for_itself(status: Status) -> None:
    first = go_through(status, begin=0, end=1)
    assert go_through(status, begin=0, end=1) != first


def test_the_time_of_all_attempts_is_kept(tmp_path: Path) -> None:
    status = status_of(tmp_path, blocks=3)
    attempts = [
        go_through(status, begin=begin, end=end)["all_seconds"] for begin, end in ((0, 1), (1, 2), (2, 3), (0, 3))
    ]
    assert attempts == [7, 14, 21, 7]


def test_a_run_cut_off_after_its_last_block_is_called_finished_by_the_next(status: Status) -> None:
    status.begin(0)
    assert go_through(status, begin=1, end=1)["state"] == "finished"


def test_what_was_done_already_is_known_from_the_first_word(status: Status) -> None:
    status.begin(1)
    recorded = status.directory.read_status() or {}
    assert (recorded["done"], recorded["resumed"], recorded["seconds"]) == (1, 1, 0.0)


@pytest.mark.parametrize(
    ("total", "done", "said"),
    [
        (1, 1, "nothing left to do: the one block is done; "),
        (2, 1, "1 of 2 blocks is done already"),
        (3, 2, "2 of 3 blocks are done already"),
        (3, 3, "nothing left to do: all 3 blocks are done; "),
    ],
)
def test_blocks_that_are_there_are_told_in_good_english(tmp_path: Path, total: int, done: int, said: str) -> None:
    status = status_of(tmp_path, blocks=total)
    status.begin(done)
    (text,) = [event["text"] for event in status.directory.read_events() if event["event"] == "message"]
    assert text.startswith(said)


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
