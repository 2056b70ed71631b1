"""Small JSON files of a run directory, which a power cut may have damaged; some with checksums."""

import contextlib
import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c

from halotile.errors import DamagedData
from halotile.storage.disk.durable import DISK, GONE, Disk

FILE_MODE = 0o600  # mode of the files of a run directory


def digest(document: Any) -> str:
    """A short checksum of a JSON value."""
    text = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_checksum(content: bytes) -> bytes:
    """A line with a checksum of the content, which contains no line break.

    >>> with_checksum(b"+0-31")
    b'b9645eac +0-31\\n'
    >>> without_checksum(with_checksum(b"+0-31")), without_checksum(with_checksum(b"+0-31")[:-3])
    (b'+0-31', None)
    """
    return b"%08x %s\n" % (google_crc32c.value(content), content)


def without_checksum(line: bytes) -> bytes | None:
    """The content of a line; None when its checksum does not match."""
    content = line[9:-1]
    return content if line == with_checksum(content) else None


def read_object(path: Path, advice: str) -> dict[str, Any] | None:
    """Read a file with a JSON object; None when there is no such file."""
    try:
        value = json.loads(path.read_bytes())
    except GONE:
        return None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise DamagedData(f"{path} is damaged. {advice}")
    return value


BlockSums = Mapping[str, list[float]]  # the sums over one block: for each name, one value for each of its shards


@dataclass(frozen=True)
class Checkpoint:
    """The file with the state of a solver, replaced atomically.

    >>> import tempfile
    >>> checkpoint = Checkpoint(Path(tempfile.mkdtemp(), "checkpoint.json"))
    >>> checkpoint.read() is None
    True
    >>> checkpoint.write({"iteration": 3, "step": 0.1})
    >>> checkpoint.read()
    {'iteration': 3, 'step': 0.1}
    """

    path: Path  # path of the file; its directory exists
    disk: Disk = DISK  # disk to write with

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace the state; durable on return."""
        self.disk.write_file(self.path, [with_checksum(json.dumps(state).encode())], mode=FILE_MODE)

    def read(self) -> dict[str, Any] | None:
        """The state, or None when there is none."""
        try:
            content = without_checksum(self.path.read_bytes())
        except FileNotFoundError:
            return None
        if content is None:
            raise DamagedData(f"{self.path} is damaged. Run with --fresh to start over.")
        state: dict[str, Any] = json.loads(content)
        return state


class Ledger:
    """The sums over the blocks of one pass, in an append-only file with one line for each block.

    A damaged line is ignored: a block that is marked as done and has no line here is repeated.
    Entries are durable after :meth:`sync`, but a new file only after its directory is synced; without it all blocks are repeated.

    Parameters
    ----------
    path : Path
        The file, which is created if it does not exist.
    disk : Disk
        Disk to write with.

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
        """Add the sums of some blocks."""
        lines = [with_checksum(json.dumps([n, dict(values)]).encode()) for n, values in sums.items()]
        if not lines:
            return
        # A line break separates the next line from one that a full disk took in part.
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
        valid = [line for line in lines if without_checksum(line) is not None]
        self.sums.update(json.loads(without_checksum(line) or b"") for line in valid)
        if len(valid) < len(lines) or not self.path.exists():
            self.disk.write_file(self.path, valid, mode=FILE_MODE, sync=False)
