"""What a run says of itself in its directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from halotile.graphs.planner import make_plan
from halotile.graphs.progress import Progress
from halotile.graphs.status import StatusFile
from halotile.storage.rundir import RunDirectory
from tests.support import job_of, noisy_picture, write_zarr


@pytest.fixture
def status(tmp_path: Path) -> StatusFile:
    """The status of a run that has not begun."""
    source = write_zarr(tmp_path / "in.zarr", noisy_picture((40, 30)))
    plan = make_plan(job_of(source, tmp_path / "out.zarr", "tv", {"strength": 0.1}))
    directory = RunDirectory(plan.run_directory)
    directory.create()
    return StatusFile(directory, plan, None)


def moment(status: StatusFile, done: int) -> Progress:
    return replace(status.progress("stop", done=done, failed=0), peak_memory_bytes=2**29 * done, seconds=7.0)


def go_through(status: StatusFile, *, begin: int, end: int) -> dict[str, object]:
    """A run from its first word to its last, and what is recorded of it then."""
    again = StatusFile(status.directory, status.plan, None)
    again.begin(moment(again, begin))
    again.end(
        "finished", moment(again, end) if begin != end else again.progress("stop", done=end, failed=0), ""
    )
    return status.directory.read_status() or {}


def test_a_run_with_nothing_left_to_do_leaves_what_the_earlier_one_said(status: StatusFile) -> None:
    first = go_through(status, begin=0, end=1)
    assert (first["state"], first["peak_memory_bytes"], first["seconds"]) == ("finished", 2**29, 7.0)
    assert go_through(status, begin=1, end=1) == first


def test_a_run_that_does_blocks_again_speaks_for_itself(status: StatusFile) -> None:
    first = go_through(status, begin=0, end=1)
    assert go_through(status, begin=0, end=1) != first


def test_a_run_cut_off_after_its_last_block_is_called_finished_by_the_next(status: StatusFile) -> None:
    status.begin(moment(status, 0))
    assert go_through(status, begin=1, end=1)["state"] == "finished"
