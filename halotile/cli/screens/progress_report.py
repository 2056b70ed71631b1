"""Progress display: redrawn in place on a terminal, one line every ten seconds elsewhere.

A report is an observer of :func:`halotile.graphs.runs.driver.run`: it is called with a
:class:`halotile.graphs.watching.progress.Progress` about twice a second. It writes to stderr only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from halotile.cli.screens.screen import complain, progress_console
from halotile.graphs.words import bytes_text, counted, percent, rate_text, seconds_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from halotile.graphs.watching.progress import Progress

LINE_SECONDS = 10.0
_BAR_WIDTH = 40


class ProgressReport:
    """Shows progress for the duration of a ``with`` block; this one shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __call__(self, progress: Progress) -> None:
        """Update the display with the current progress."""


def make_report(*, quiet: bool) -> ProgressReport:
    """Return the report that suits the destination of stderr."""
    if quiet:
        return ProgressReport()
    if not sys.stderr.isatty():
        return Lines(complain)
    console = progress_console()
    # TERM=dumb: the cursor cannot be moved.
    return Lines(complain) if console.is_dumb_terminal else Live(console)


class Lines(ProgressReport):
    """One plain line every ten seconds where there is news, one for each change of phase, and each message."""

    def __init__(self, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self.write = write
        self.clock = clock
        self.next_line = -1.0
        self.phase = ""
        self.written = ""

    def __call__(self, progress: Progress) -> None:
        if progress.message:
            self.write(progress.message)
        now = self.clock()
        if now >= self.next_line or progress.phase != self.phase:
            self.phase = progress.phase
            self.next_line = now + LINE_SECONDS
            # A slow start may have no news for a minute.
            if (text := line(progress)) != self.written:
                self.written = text
                self.write(text)


class Live(ProgressReport):
    """A bar and its figures, redrawn in place; messages scroll past above them."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live as Screen

        self.console = console
        self.screen = Screen(console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        self.screen.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.screen.stop()

    def __call__(self, progress: Progress) -> None:
        from rich.text import Text

        if progress.message:
            self.console.print(Text(progress.message, style="dim"), soft_wrap=True)
        self.screen.update(image(progress, self.console.width))


def line(progress: Progress) -> str:
    """Describe the progress of a run in one line of text.

    >>> from halotile.graphs.watching.progress import Progress
    >>> line(Progress(phase="denoise", done=30, resumed=10, total=100, pixels_done=20_000_000, pixels_total=100_000_000,
    ...               seconds=4.0, workers=2, peak_memory_bytes=2**29))
    'denoise  30 of 100 blocks (10 resumed)  30 %  5 Mpix/s  0 MB/s  14 s left  2 workers  512 MiB peak'
    """
    return "  ".join([phase_word(progress), counts(progress), *figures(progress)])


def phase_word(progress: Progress) -> str:
    """Return the current phase. The engine's last phase is "stop", however the run ended."""
    complete = progress.phase == "stop" and progress.done >= progress.total
    return "done" if complete else progress.phase


def counts(progress: Progress) -> str:
    """Return the number of blocks or steps done, with those of an earlier run, and those that failed, shown separately."""
    extras = [f"{progress.resumed:,} resumed"] if progress.resumed else []
    extras += [f"{progress.retried:,} retried"] if progress.retried else []
    extras += [f"{progress.failed:,} failed"] if progress.failed else []
    return f"{progress.done:,} of {counted(progress.total, progress.counted)}" + (
        f" ({', '.join(extras)})" if extras else ""
    )


def figures(progress: Progress) -> list[str]:
    """Return progress and speed; values that are not known yet are left out."""
    parts = [f"{percent(progress.done, progress.total):.0f} %"]
    if progress.done > progress.resumed and progress.seconds > 0:
        if progress.pixels_done:
            parts += [rate_text(progress.megapixels_per_second), f"{progress.megabytes_per_second:.0f} MB/s"]
        if progress.done < progress.total:
            parts.append(f"{seconds_text(progress.eta_seconds)} left")
    parts.append(counted(progress.workers, "worker"))
    if progress.peak_memory_bytes:
        parts.append(f"{bytes_text(progress.peak_memory_bytes)} peak")
    return parts


def image(progress: Progress, width: int) -> RenderableType:
    """Return the progress of a run as two lines for a terminal: the bar, and the figures below it."""
    from rich.console import Group
    from rich.text import Text

    head = Text.assemble((f"{phase_word(progress):<8} ", "bold"))
    tail = Text(f"  {counts(progress)}")
    room = max(10, min(_BAR_WIDTH, width - len(head) - len(tail) - 1))
    first = head + bar(progress, room) + tail
    second = Text("  " + " · ".join(figures(progress)), style="dim")
    for text in (first, second):
        text.no_wrap, text.overflow = True, "ellipsis"
    return Group(first, second)


def bar(progress: Progress, width: int) -> Text:
    """Return a bar with the parts done by an earlier run, done by this run, and left."""
    from rich.text import Text

    total = max(1, progress.total)
    resumed = min(progress.resumed, progress.done) * width // total
    done = progress.done * width // total
    return Text.assemble(
        ("━" * resumed, "blue"), ("━" * (done - resumed), "green"), ("╌" * (width - done), "bright_black")
    )
