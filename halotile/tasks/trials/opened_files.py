"""Files that code opens while it is tried: a result that follows from their content is not kept."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_INSTALLED = tuple(
    {*(f"{Path(each).resolve()}/" for each in (sys.prefix, sys.base_prefix)), "/proc/", "/sys/", "/dev/"}
)
"""Places whose files belong to the installed packages or to the machine, which a key has by itself."""
_watching: list[set[str]] = []
_is_heard = False


@contextmanager
def opened_files() -> Iterator[set[str]]:
    """Collect the paths that Python code opens to read in a ``with`` block, in any thread of this process.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file, opened_files() as seen:
    ...     _ = Path(file.name).read_text("utf-8")
    >>> len(seen)
    1
    """
    global _is_heard
    if not _is_heard:
        sys.addaudithook(_hear)  # for ever: Python removes none
        _is_heard = True
    seen: set[str] = set()
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching[:] = [each for each in _watching if each is not seen]  # another may be equal


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _watching or not isinstance(arguments[0], str | bytes | os.PathLike):
        return
    if arguments[2] & os.O_ACCMODE == os.O_WRONLY:  # no result follows from that
        return
    path = os.path.realpath(os.fsdecode(arguments[0]))
    if not path.startswith(_INSTALLED):
        for seen in _watching:
            seen.add(path)
