"""Output streams of commands: stdout for results, stderr for everything else."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TextIO

from halotile.errors import ConfigError
from halotile.graphs.kinds.base import Row

if TYPE_CHECKING:
    from rich.console import Console


def result_console() -> Console:
    """Return the console for results. rich itself obeys NO_COLOR, and writes plain text into files and pipes."""
    from rich.console import Console

    class Results(Console):
        def on_broken_pipe(self) -> None:
            _close(sys.stdout)  # rich would exit with 1

    return Results(highlight=False, soft_wrap=True)


def progress_console() -> Console:
    """Return the console for progress and remarks."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def echo(text: str) -> None:
    """Write a result as it is, a line or several."""
    _write(sys.stdout, text)


def print_json(value: Any) -> None:
    """Write a value for programs."""
    echo(json.dumps(value, indent=2, default=str))


def print_rows(title: str, rows: Iterable[Row]) -> None:
    """Print a titled list of labels and values, one per line; the terminal wraps long values."""
    from rich.text import Text

    console = result_console()
    console.print(Text(title, style="bold"))
    rows = list(rows)
    width = max((len(label) for label, _ in rows), default=0)
    for label, value in rows:
        # As Text: brackets in paths and messages are not interpreted as markup.
        line = Text.assemble("  ", (label.ljust(width), "cyan"), "  ", value)
        line.rstrip()
        console.print(line)


def is_terminal() -> bool:
    """Return True where results go to a terminal itself, not into a file, tmux or screen."""
    return sys.stdout.isatty() and not os.environ.keys() & {"TMUX", "STY"}


def drawing_here() -> Callable[[bytes], str]:
    """Return what makes of a PNG the text by which this terminal draws it."""
    if not is_terminal():
        raise ConfigError(
            "--inline draws in a terminal, not into a file, tmux or screen. Leave it out, and open the PNG."
        )
    names = {os.environ.get(key, "").lower() for key in ("TERM", "TERM_PROGRAM", "LC_TERMINAL")}
    if names & {"xterm-kitty", "xterm-ghostty", "ghostty"}:
        return _for_kitty
    if names & {"iterm.app", "iterm2", "wezterm"}:
        return lambda png: f"\x1b]1337;File=inline=1;size={len(png)}:{base64.b64encode(png).decode()}\a"
    raise ConfigError(
        "--inline: kitty, Ghostty, iTerm2 and WezTerm draw images, and neither TERM nor TERM_PROGRAM names one of them. "
        "Leave --inline out, and open the PNG."
    )


def _for_kitty(png: bytes) -> str:
    text = base64.b64encode(png).decode()
    parts = [text[start : start + 4096] for start in range(0, len(text), 4096)]  # the longest part that it takes
    heads = ["a=T,f=100,", *[""] * (len(parts) - 1)]
    more = [1] * (len(parts) - 1) + [0]
    return "".join(f"\x1b_G{head}m={m};{part}\x1b\\" for head, m, part in zip(heads, more, parts, strict=True))


def complain(message: str) -> None:
    """Write a message to stderr, as it is."""
    _write(sys.stderr, message.rstrip())


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text + "\n")
        stream.flush()
    except BrokenPipeError:
        _close(stream)


def _close(stream: TextIO) -> None:
    """Discard further output to a stream whose reader, such as `head`, has closed it; the command continues."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
