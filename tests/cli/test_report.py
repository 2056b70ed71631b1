"""Progress is one bar on a terminal, plain lines elsewhere, nothing when asked to be quiet."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from halotile.cli.screens.progress_report import LINE_SECONDS, Lines, Live, ProgressReport, image, line, make_report
from halotile.graphs.watching.progress import Progress


def moment(**changed: Any) -> Progress:
    usual: dict[str, Any] = {
        "phase": "denoise", "done": 150, "resumed": 100, "total": 400, "seconds": 10.0, "workers": 4,
        "pixels_done": 50_000_000, "pixels_total": 400_000_000, "read_bytes": 3 * 10**8, "written_bytes": 2 * 10**8,
        "peak_memory_bytes": 3 * 2**28,
    }  # fmt: skip
    return Progress(**usual | changed)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "denoise  150 of 400 blocks (100 resumed)  38 %  5 Mpix/s  50 MB/s  50 s left  4 workers  768 MiB peak"),
        ({"done": 100, "seconds": 0.0, "peak_memory_bytes": 0}, "denoise  100 of 400 blocks (100 resumed)  25 %  4 workers"),
        ({"resumed": 0, "seconds": 0.0, "peak_memory_bytes": 0}, "denoise  150 of 400 blocks  38 %  4 workers"),
        ({"done": 0, "resumed": 0, "total": 1, "workers": 1, "peak_memory_bytes": 0}, "denoise  0 of 1 block  0 %  1 worker"),
    ],
    ids=["only blocks of this run", "no rate before the first", "no rate before time has passed", "one block is a block"],
)  # fmt: skip
def test_a_line_has_what_is_known(changed: dict[str, Any], text: str) -> None:
    assert line(moment(**changed)) == text


def test_retried_and_failed_blocks_are_set_apart() -> None:
    assert "(100 resumed, 2 retried, 1 failed)" in line(moment(retried=2, failed=1))


@pytest.mark.parametrize(("done", "word"), [(400, "done"), (399, "stop")])
def test_the_last_phase_is_called_done_only_when_all_is_done(done: int, word: str) -> None:
    assert line(moment(phase="stop", done=done)).startswith(f"{word}  ")


def test_lines_come_every_ten_seconds_and_at_each_change_of_phase() -> None:
    now = [0.0]
    written: list[str] = []
    report = Lines(written.append, clock=lambda: now[0])
    with report:
        for now[0], done in [(0.0, 0), (1.0, 0), (2.0, 1), (9.0, 2), (12.0, 3)]:
            report(moment(phase="denoise" if done else "start", done=done))
    assert LINE_SECONDS == 10.0
    assert [text.split()[0:2] for text in written] == [["start", "0"], ["denoise", "1"], ["denoise", "3"]]


def test_a_start_that_takes_a_minute_is_told_once() -> None:
    now = [0.0]
    written: list[str] = []
    report = Lines(written.append, clock=lambda: now[0])
    for now[0] in range(60):
        report(moment(phase="start", done=0, total=1))
    assert len(written) == 1


def test_a_message_is_shown_at_once() -> None:
    written: list[str] = []
    report = Lines(written.append, clock=lambda: 1.0)
    report(moment())
    report(moment(message="dashboard: http://127.0.0.1:1/status"))
    assert written[1:] == ["dashboard: http://127.0.0.1:1/status"]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("done", [0, 100, 150, 399, 400])
def test_the_picture_is_two_lines_at_any_width(width: int, done: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True, record=True)
    console.print(image(moment(done=done, resumed=min(done, 100), total=400), width))
    lines = console.export_text().splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= width


def test_an_80_column_terminal_shows_every_figure() -> None:
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(image(moment(retried=1), 80))
    text = console.export_text()
    assert "150 of 400 blocks (100 resumed, 1 retried)" in text
    assert "38 % · 5 Mpix/s · 50 MB/s · 50 s left · 4 workers · 768 MiB peak" in text


def test_the_terminal_is_left_as_it_was_when_a_run_fails() -> None:
    console = Console(file=(written := io.StringIO()), width=80, force_terminal=True)

    def fail() -> None:
        with Live(console) as report:
            report(moment(message="[bold]a path[/bold]"))
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        fail()
    assert written.getvalue().rstrip().endswith("\x1b[2K")
    assert "\x1b[?25h" in written.getvalue()
    assert "[bold]a path[/bold]" in written.getvalue()


def test_quiet_shows_nothing_and_a_pipe_gets_lines() -> None:
    assert type(make_report(quiet=True)) is ProgressReport
    assert isinstance(make_report(quiet=False), Lines)
