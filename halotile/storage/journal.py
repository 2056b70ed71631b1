"""The journal: which blocks of a run are done, in a file that only grows.

Every line is ``<crc32c of the rest> <rest>``. The first says whose journal it is; each other one adds
(``+0-31,40``) or takes out (``-7``) a few blocks. A million blocks marked in batches take about 100 kB.

A block may be marked only when its shards are durable. Marks are not fsynced one by one: a mark lost in a
power cut repeats a block, nothing more. A line that is cut short at the end is one that never
happened. A damaged line further up makes every mark after it doubtful: those blocks are done again.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from halotile.errors import DamagedData, ResumeRefused
from halotile.storage.disk import DISK, Disk
from halotile.storage.lines import opened, sealed
from halotile.storage.runs import Runs

VERSION = 1
_MODE = 0o600


class Journal:
    """The blocks of one run that are done. Make one with :meth:`create` or :meth:`open`.

    Attributes
    ----------
    done : Runs
        Numbers of the blocks that are done.
    warning : str
        What was wrong with the file when it was opened; empty when nothing was.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "journal"
    >>> with Journal.create(path, "a1b2", total=9) as journal:
    ...     journal.mark([0, 1, 2, 5])
    ...     journal.strike([1])
    >>> with Journal.open(path, "a1b2", total=9) as journal:
    ...     journal.done.complement(9)
    Runs('1,3-4,6-8')
    """

    def __init__(self, path: Path, header: bytes, total: int, disk: Disk, *, read_only: bool) -> None:
        self.path = path
        self.done = Runs()
        self.warning = ""
        self._header = header
        self._total = total
        self._disk = disk
        self._read_only = read_only
        self._size = len(header)
        self._dirty = False
        self._torn = False

    @classmethod
    def create(
        cls, path: Path, fingerprint: str, total: int, disk: Disk = DISK, *, sync: bool = True
    ) -> Journal:
        """Start an empty journal, in place of one that may stand there.

        Parameters
        ----------
        path : Path
            Where the file goes; its directory exists.
        fingerprint : str
            Digest of the plan that it belongs to.
        total : int
            Number of blocks in the plan.
        disk : Disk
            What writes it.
        sync : bool
            Whether it is durable on return.
        """
        journal = cls(path, _header(fingerprint, total), total, disk, read_only=False)
        disk.write_file(path, [journal._header], mode=_MODE, sync=sync)
        return journal

    @classmethod
    def open(
        cls, path: Path, fingerprint: str, total: int, disk: Disk = DISK, *, read_only: bool = False
    ) -> Journal:
        """Go on with a journal. With ``read_only`` nothing is written: another process may be adding to it.

        Raises
        ------
        ResumeRefused
            When it belongs to another plan.
        DamagedData
            When its first line cannot be read.
        """
        data = path.read_bytes()
        header = data[: data.find(b"\n") + 1]
        _check_owner(path, header, fingerprint, total)
        journal = cls(path, header, total, disk, read_only=read_only)
        journal._replay(data)
        if not read_only:
            journal._mend(len(data))
        return journal

    @classmethod
    def look(cls, path: Path) -> Journal:
        """A journal that is only read, whosever it is: its :attr:`fingerprint` and :attr:`total` tell.

        Raises
        ------
        DamagedData
            When its first line cannot be read.
        """
        with path.open("rb") as file:
            owner = _owner(path, file.readline())
        return cls.open(path, owner.get("fingerprint", ""), owner.get("total", 0), read_only=True)

    @property
    def fingerprint(self) -> str:
        """Digest of the plan that it belongs to."""
        return str(_owner(self.path, self._header)["fingerprint"])

    @property
    def total(self) -> int:
        """Number of blocks in that plan."""
        return self._total

    def mark(self, numbers: Iterable[int]) -> None:
        """Note these blocks as done: one line, durable after :meth:`sync`."""
        self._note(b"+", numbers)

    def strike(self, numbers: Iterable[int]) -> None:
        """Note these blocks as still to do; durable on return."""
        self._note(b"-", numbers)
        self.sync()

    def sync(self) -> None:
        """Make every line durable."""
        if self._dirty:
            self._disk.sync(self.path)
            self._dirty = False

    def close(self) -> None:
        """Make every line durable; the journal may be used again."""
        self.sync()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note(self, sign: bytes, numbers: Iterable[int]) -> None:
        if self._read_only:
            raise io.UnsupportedOperation(f"{self.path} was opened to be read only")
        changed = Runs(numbers)
        if not changed:
            return
        beyond = [run for run in changed.ranges() if run.stop > self._total]
        if beyond:
            raise IndexError(f"block {beyond[0].stop - 1} of a journal of {self._total} blocks")
        self._append(sealed(sign + changed.to_text().encode()))
        self._apply(sign, changed)

    def _append(self, line: bytes) -> None:
        """Add a line. One that the disk took in part is cut off again, at the latest before the next."""
        if self._torn:
            self._disk.truncate(self.path, self._size)
            self._torn = False
        self._dirty = True
        try:
            self._disk.append(self.path, line)
        except BaseException:
            self._torn = True
            raise
        self._size += len(line)

    def _apply(self, sign: bytes, numbers: Runs) -> None:
        if sign == b"+":
            self.done.add(numbers)
        else:
            self.done.discard(numbers)

    def _replay(self, data: bytes) -> None:
        """Take over the lines of the file; the last one may be torn."""
        lines = io.BytesIO(data[len(self._header) :]).readlines()
        broken = None
        for place, line in enumerate(lines):
            entry = _parse(line)
            if entry is None and broken is None:
                broken = place
            if entry is not None and (broken is None or entry[0] == b"-"):
                self._apply(*entry)
            if broken is None:
                self._size += len(line)
        if broken is not None and broken < len(lines) - 1:
            self.warning = (
                f"{self.path}: line {broken + 2} is damaged. Blocks marked after it are done again; "
                "`recon-cli verify` checks the others."
            )

    def _mend(self, size: int) -> None:
        """Bring the file into a state that can be added to."""
        if self.warning:
            lines = [self._header, sealed(b"+" + self.done.to_text().encode())]
            self._size = self._disk.write_file(self.path, lines if self.done else lines[:1], mode=_MODE)
        elif size > self._size:
            self._disk.truncate(self.path, self._size)


def _header(fingerprint: str, total: int) -> bytes:
    return sealed(json.dumps({"journal": VERSION, "fingerprint": fingerprint, "total": total}).encode())


def _check_owner(path: Path, header: bytes, fingerprint: str, total: int) -> None:
    owner = _owner(path, header)
    expected = {"journal": VERSION, "fingerprint": fingerprint, "total": total}
    if owner != expected:
        listed = ", ".join(f"{key} {owner.get(key)} (here {expected[key]})" for key in expected)
        raise ResumeRefused(
            f"{path} belongs to another job: {listed}. "
            "Run the job that it belongs to, or run with --fresh to start over."
        )


def _owner(path: Path, header: bytes) -> dict[str, Any]:
    content = opened(header)
    if content is None:
        raise DamagedData(f"{path}: its first line is damaged. Run with --fresh to start over.")
    owner: dict[str, Any] = json.loads(content)
    return owner


def _parse(line: bytes) -> tuple[bytes, Runs] | None:
    """Sign and numbers of a line; None when it is damaged."""
    content = opened(line)
    if content is None or content[:1] not in (b"+", b"-"):
        return None
    return content[:1], Runs.from_text(content[1:].decode("ascii"))
