"""Where results and progress go: stdout for results, stderr for everything else."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Row = tuple[str, str]
"""A label and a value; an empty label goes on with the row before, an empty row parts groups."""


def result_console() -> Console:
    """The console for results. rich itself heeds NO_COLOR, and writes plain text into files and pipes."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def progress_console() -> Console:
    """The console for progress and remarks."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """Write a value for programs."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")
    sys.stdout.flush()


def print_rows(title: str, rows: Iterable[Row]) -> None:
    """Write a titled list of labels and values, one a line; long values are left to the terminal."""
    from rich.text import Text

    console = result_console()
    console.print(Text(title, style="bold"))
    rows = list(rows)
    width = max((len(label) for label, _ in rows), default=0)
    for label, value in rows:
        # As Text: brackets in paths and messages are not taken for markup.
        line = Text.assemble("  ", (label.ljust(width), "cyan"), "  ", value)
        line.rstrip()
        console.print(line)


def complain(message: str) -> None:
    """Write a message to stderr, as it is."""
    sys.stderr.write(message.rstrip() + "\n")
    sys.stderr.flush()
