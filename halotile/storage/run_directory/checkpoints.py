"""What an iteration leaves besides its images: the state it ends in, and the sums of the blocks of the next."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halotile.errors import DamagedData
from halotile.storage.disk.durable import DISK, Disk
from halotile.storage.run_directory.checksummed_lines import opened, sealed

_MODE = 0o600

BlockSums = Mapping[str, list[float]]
"""The sums over one block: for each name, one number for each of its shards."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a solver, replaced in one step.

    Parameters
    ----------
    path : Path
        Where it is kept; the directory exists.
    disk : Disk
        What writes it.

    Examples
    --------
    >>> import tempfile
    >>> checkpoint = Checkpoint(Path(tempfile.mkdtemp(), "checkpoint.json"))
    >>> checkpoint.read() is None
    True
    >>> checkpoint.write({"iteration": 3, "step": 0.1})
    >>> checkpoint.read()
    {'iteration': 3, 'step': 0.1}
    """

    path: Path
    disk: Disk = DISK

    def write(self, state: Mapping[str, Any]) -> None:
        """Keep a state in place of the one before; durable on return."""
        self.disk.write_file(self.path, [sealed(json.dumps(state).encode())], mode=_MODE)

    def read(self) -> dict[str, Any] | None:
        """The state, or None when there is none.

        Raises
        ------
        DamagedData
            When it cannot be read.
        """
        try:
            content = opened(self.path.read_bytes())
        except FileNotFoundError:
            return None
        if content is None:
            raise DamagedData(f"{self.path} is damaged. Run with --fresh to start over.")
        state: dict[str, Any] = json.loads(content)
        return state


class Ledger:
    """The sums of the blocks of one sweep, in a file that only grows.

    A line is one block's. A line that is damaged never happened: a block that is marked as done and has no line here
    is done again. What is entered is durable after :meth:`sync`; a new file is not, before its directory is: without it all is done
    again.

    Parameters
    ----------
    path : Path
        The file; it is made when it is not there.
    disk : Disk
        What writes it.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "sums")
    >>> ledger = Ledger(path)
    >>> ledger.enter({4: {"misfit": [0.5, 2.0]}, 1: {"misfit": [0.25]}})
    >>> Ledger(path).sums
    {4: {'misfit': [0.5, 2.0]}, 1: {'misfit': [0.25]}}
    """

    def __init__(self, path: Path, disk: Disk = DISK) -> None:
        self.path = path
        self.disk = disk
        self.sums: dict[int, BlockSums] = {}
        self._dirty = False
        self._torn = False
        self._replay()

    def enter(self, sums: Mapping[int, BlockSums]) -> None:
        """Note the sums of some blocks."""
        lines = [sealed(json.dumps([number, dict(values)]).encode()) for number, values in sums.items()]
        if not lines:
            return
        # What a full disk took of a line stays apart from the next.
        start, self._torn, self._dirty = b"\n" if self._torn else b"", True, True
        self.disk.append(self.path, start + b"".join(lines))
        self._torn = False
        self.sums.update(sums)

    def sync(self) -> None:
        """Make every line durable."""
        if self._dirty:
            self.disk.sync(self.path)
            self._dirty = False

    def _replay(self) -> None:
        data = b""
        with contextlib.suppress(FileNotFoundError):
            data = self.path.read_bytes()
        lines = io.BytesIO(data).readlines()
        contents = [opened(line) for line in lines]
        for content in contents:
            if content is not None:
                number, sums = json.loads(content)
                self.sums[number] = sums
        if None in contents or not self.path.exists():
            whole = [line for line, content in zip(lines, contents, strict=True) if content is not None]
            self.disk.write_file(self.path, whole, mode=_MODE, sync=False)
