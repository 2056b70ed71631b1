"""Files that are opened while code is tried."""

from __future__ import annotations

from pathlib import Path

from halotile.tasks.trials.provenance import opened_files


def test_a_watch_goes_on_when_one_inside_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "depth.txt"
    file.write_text("2")
    with opened_files() as outer:
        with opened_files() as inner:
            pass
        file.read_text()
    file.read_text()
    assert (outer, inner) == ({str(file)}, set())


def test_files_that_are_only_written_do_not_count(tmp_path: Path) -> None:
    with opened_files() as seen:
        (tmp_path / "log.txt").write_text("tried")
    assert not seen
