"""Files that are opened while code is tried."""

from __future__ import annotations

from pathlib import Path

from halotile.tasks.trials.provenance import opened_files


def test_files_that_are_only_written_do_not_count(tmp_path: Path) -> None:
    seen = opened_files()
    (tmp_path / "log.txt").write_text("tried")
    assert str(tmp_path / "log.txt") not in seen
    (tmp_path / "log.txt").read_text()
    assert str(tmp_path / "log.txt") in seen
