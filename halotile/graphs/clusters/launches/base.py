"""A launch and its state."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

LOG_LINES = 8


class LaunchState(NamedTuple):
    """State of a launch that has no worker.

    Parameters
    ----------
    over : bool
        True when it has ended, and brings none.
    text : str
        The state in the words of the batch system, such as ``PENDING (Resources)``.
    """

    over: bool
    text: str


def number_of(job: str) -> str:
    """The number of a job, without its server.

    >>> number_of("1234.pbs-server"), number_of("17")
    ('1234', '17')
    """
    found = re.match(r"\d+", job)
    return found[0] if found else job


class Launch(Protocol):
    """A batch job or a job step that brings one worker."""

    @property
    def title(self) -> str:
        """Its name, such as ``job 17``; empty before it has been accepted."""

    @property
    def refusal(self) -> str | None:
        """Reason why it was not accepted."""

    def log_tail(self) -> str:
        """The last lines that it printed."""


# States of launches, queried for all of them at once. One that is left out is not known to be over.
QueryStates = Callable[[Sequence[Launch]], Mapping[Launch, LaunchState]]


def tail_of(paths: Sequence[Path], lines: int = LOG_LINES) -> str:
    """The last lines of the newest log that is not empty.

    >>> tail_of([Path("no-such.log")])
    ''
    """
    for path in sorted(filter(Path.is_file, paths), key=lambda path: path.stat().st_mtime, reverse=True):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            tail = file.read().decode(errors="replace").strip().splitlines()
        if tail:
            return "\n".join(tail[-lines:])
    return ""
