"""A script that hangs prints the line where it is, when it is asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from halotile.errors import RankFailed
from halotile.tasks.groups import script as scripts
from halotile.tasks.groups.opening import Rendezvous

LONGEST = 60.0


def test_a_script_prints_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import time\nprint('begun')\ntime.sleep(600)\n")
    lines: list[str] = []
    failures: list[RankFailed] = []

    def run() -> None:
        try:
            scripts.run_script(str(path), (), Rendezvous(rank=0, world_size=1), lines.append)
        except RankFailed as error:
            failures.append(error)

    assert scripts.print_place() == ""
    thread = threading.Thread(target=run)
    thread.start()
    await_line(lines, lambda line: line == "begun")
    assert scripts.print_place() == "see the lines that it printed last\n"
    await_line(lines, lambda line: f'"{path}", line 3' in line)
    (process,) = scripts._running
    process.kill()
    thread.join(LONGEST)
    assert "SIGKILL" in str(failures[0])
    assert scripts.print_place() == ""


def await_line(lines: list[str], wanted: Callable[[str], bool]) -> None:
    """Wait for a line."""
    end = time.monotonic() + LONGEST
    while not any(map(wanted, lines)):
        assert time.monotonic() < end, lines
        time.sleep(0.05)
