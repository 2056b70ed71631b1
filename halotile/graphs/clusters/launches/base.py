"""What a piece is, and how it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

LOG_LINES = 8


@dataclass(frozen=True, slots=True)
class State:
    """How a piece stands that has no worker.

    Parameters
    ----------
    over : bool
        Whether it has ended, and brings none.
    words : str
        As whoever runs it says it, such as ``PENDING (Resources)``.
    """

    over: bool
    words: str


def with_reason(name: str, reason: str) -> str:
    """A state in words, with its reason where there is one.

    Examples
    --------
    >>> with_reason("PENDING", "Resources"), with_reason("RUNNING", "None")
    ('PENDING (Resources)', 'RUNNING')
    """
    return name if reason in ("", "None", "(null)", "undefined") else f"{name} ({reason})"


class Piece(Protocol):
    """A job or a step that brings one worker."""

    @property
    def title(self) -> str:
        """What it is called, such as ``job 17``; nothing before it has been taken."""
        ...

    @property
    def read_error(self) -> str | None:
        """Why it was not even taken."""
        ...

    def log_tail(self) -> str:
        """The last lines of what it printed."""
        ...


Look = Callable[[Sequence[Piece]], Mapping[Piece, State]]
"""How pieces stand, all of them asked for at once. One that is left out is not known to be over."""


def tail_of(paths: Sequence[Path], lines: int = LOG_LINES) -> str:
    """The last lines of the newest log that says anything.

    Examples
    --------
    >>> tail_of([Path("no-such.log")])
    ''
    """
    for path in sorted(filter(Path.is_file, paths), key=lambda each: each.stat().st_mtime, reverse=True):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            said = file.read().decode(errors="replace").strip().splitlines()
        if said:
            return "\n".join(said[-lines:])
    return ""
