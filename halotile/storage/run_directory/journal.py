"""The journal: which blocks of a run are done, with digests of what was written, in a file that only grows.

Every line is ``<crc32c of the rest> <rest>``. The first says whose journal it is; each other one adds
(``+0-31,40 <digests>``) or takes out (``-7``) a few blocks. The digests are those of the blocks in ascending order, in
base64. A million blocks marked in batches take 5.5 MB.

A block may be marked only when its shards are durable. Marks are not fsynced one by one: a mark lost in a
power cut repeats a block, nothing more. A line that is cut short at the end is one that never
happened. A damaged line further up makes every mark after it doubtful: those blocks are done again.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, DamagedData, ResumeRefused
from halotile.storage.disk.durable import DISK, Disk
from halotile.storage.run_directory.checksummed_lines import opened, sealed
from halotile.storage.run_directory.number_ranges import Runs
from halotile.storage.sharded.shards import DIGEST_BYTES, digest_of

VERSION = 2
MOST_DIGESTS = 2**28
"""Blocks times images. Each block is a file at least: no run gets through so many, so a line that tells of more is damaged.
What is set aside for their digests, a gigabyte at most, is then to be had."""
_MODE = 0o600


class _Entry(NamedTuple):
    """A line after the first."""

    sign: bytes
    numbers: Runs
    digests: bytes = b""

    def to_line(self) -> bytes:
        digests = b" " + base64.b64encode(self.digests) if self.digests else b""
        return sealed(self.sign + self.numbers.to_text().encode() + digests)


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
    ...     journal.mark({0: b"wave", 1: b"edge", 5: b"dark"})
    ...     journal.strike([1])
    >>> with Journal.open(path, "a1b2", total=9) as journal:
    ...     journal.done.complement(9), journal.digest(5)
    (Runs('1-4,6-8'), b'dark')
    """

    def __init__(
        self, path: Path, header: bytes, total: int, images: int, disk: Disk, *, read_only: bool
    ) -> None:
        self.path = path
        self.done = Runs()
        self.warning = ""
        self._header = header
        self._total = total
        self._digests = np.zeros((total, images * DIGEST_BYTES), np.uint8)
        self._disk = disk
        self._read_only = read_only
        self._size = len(header)
        self._inode = 0
        self._dirty = False
        self._torn = False

    @classmethod
    def create(
        cls,
        path: Path,
        fingerprint: str,
        total: int,
        disk: Disk = DISK,
        *,
        images: int = 1,
        sync: bool = True,
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
        images : int
            Number of images that a block is written to, each with a digest.
        sync : bool
            Whether it is durable on return.

        Raises
        ------
        ConfigError
            For more than :data:`MOST_DIGESTS`.
        """
        if total * images > MOST_DIGESTS:
            raise ConfigError(
                f"the plan has {total:,} blocks, and a run of more than {MOST_DIGESTS // images:,} is refused. "
                "Write a larger output.shard and tile.block."
            )
        header = sealed(json.dumps(_owner_of(fingerprint, total, images)).encode())
        journal = cls(path, header, total, images, disk, read_only=False)
        journal._write_anew(sync=sync)
        return journal

    @classmethod
    def open(
        cls,
        path: Path,
        fingerprint: str,
        total: int,
        disk: Disk = DISK,
        *,
        images: int = 1,
        read_only: bool = False,
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
        _check_owner(path, header, _owner_of(fingerprint, total, images))
        journal = cls(path, header, total, images, disk, read_only=read_only)
        journal._inode = path.stat().st_ino
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
        del owner["journal"]
        return cls.open(path, **owner, read_only=True)

    @property
    def fingerprint(self) -> str:
        """Digest of the plan that it belongs to."""
        return str(_owner(self.path, self._header)["fingerprint"])

    @property
    def total(self) -> int:
        """Number of blocks in that plan."""
        return self._total

    def digest(self, number: int, image: int = 0) -> bytes:
        """Digest of a block that is done, as it was written to one of the images."""
        return bytes(self._of_image(image)[number])

    def image_digest(self, image: int) -> bytes:
        """Digest of an image of which every block is done."""
        return digest_of([self._of_image(image).tobytes()])

    def _of_image(self, image: int) -> NDArray[np.uint8]:
        return self._digests[:, image * DIGEST_BYTES : (image + 1) * DIGEST_BYTES]

    def mark(self, digests: Mapping[int, bytes]) -> None:
        """Note blocks as done: one line, durable after :meth:`sync`.

        Each has the digest of what was written of it; of several images those, one after the other.
        """
        self._note(_Entry(b"+", Runs(digests), b"".join(digests[number] for number in sorted(digests))))

    def strike(self, numbers: Iterable[int]) -> None:
        """Note these blocks as still to do; durable on return."""
        self._note(_Entry(b"-", Runs(numbers)))
        self.sync()

    def sync(self) -> None:
        """Make every line durable."""
        if self._dirty:
            self.secure()

    def secure(self) -> None:
        """Make every line durable, also where somebody else wrote to the file or removed it since: then it is written anew."""
        if self._is_as_written():
            self._disk.sync(self.path)
        else:
            self._write_anew()
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

    def _note(self, entry: _Entry) -> None:
        if self._read_only:
            raise io.UnsupportedOperation(f"{self.path} was opened to be read only")
        if not entry.numbers:
            return
        if not self._fits(entry):
            blocks, size = entry.numbers.to_text(), len(entry.digests)
            raise IndexError(
                f"blocks {blocks} with {size} bytes of digests, in a journal of {self._total} blocks"
            )
        self._append(entry.to_line())
        self._apply(entry)

    def _fits(self, entry: _Entry) -> bool:
        """Whether every block is one of the plan's, with its digests where it is marked."""
        # The ranges first: a damaged line may tell of more numbers than len() can count.
        if any(run.stop > self._total for run in entry.numbers.ranges()) or not entry.numbers:
            return False
        wanted = len(entry.numbers) * self._digests.shape[1] if entry.sign == b"+" else 0
        return len(entry.digests) == wanted

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

    def _apply(self, entry: _Entry) -> None:
        if entry.sign == b"-":
            self.done.discard(entry.numbers)
            return
        self.done.add(entry.numbers)
        rows = np.frombuffer(entry.digests, np.uint8).reshape(len(entry.numbers), -1)
        self._digests[np.fromiter(entry.numbers, int, len(entry.numbers))] = rows

    def _replay(self, data: bytes) -> None:
        """Take over the lines of the file; the last one may be torn."""
        lines = io.BytesIO(data[len(self._header) :]).readlines()
        broken = None
        for place, line in enumerate(lines):
            entry = _parse(line)
            if entry is not None and not self._fits(entry):
                entry = None
            if entry is None and broken is None:
                broken = place
            if entry is not None and (broken is None or entry.sign == b"-"):
                self._apply(entry)
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
            self._write_anew()
        elif size > self._size:
            self._disk.truncate(self.path, self._size)

    def _write_anew(self, *, sync: bool = True) -> None:
        """Put a file with what is known in place of whatever stands there."""
        digests = self._digests[np.fromiter(self.done, int, len(self.done))].tobytes()
        lines = [self._header, _Entry(b"+", self.done, digests).to_line()]
        self._size = self._disk.write_file(
            self.path, lines if self.done else lines[:1], mode=_MODE, sync=sync
        )
        self._inode = self.path.stat().st_ino
        self._torn = False

    def _is_as_written(self) -> bool:
        with suppress(FileNotFoundError):
            now = self.path.stat()
            return (now.st_ino, now.st_size) == (self._inode, self._size)
        return False


def _owner_of(fingerprint: str, total: int, images: int) -> dict[str, Any]:
    return {"journal": VERSION, "fingerprint": fingerprint, "total": total, "images": images}


def _check_owner(path: Path, header: bytes, expected: Mapping[str, Any]) -> None:
    owner = _owner(path, header)
    if owner != expected:
        listed = ", ".join(f"{key} {owner.get(key)} (here {expected[key]})" for key in expected)
        raise ResumeRefused(
            f"{path} belongs to another job: {listed}. "
            "Run the job that it belongs to, or start over with --fresh and output.overwrite: true."
        )


def _owner(path: Path, header: bytes) -> dict[str, Any]:
    """What the first line says."""
    try:
        owner = dict(json.loads(opened(header) or b"{}"))
    except (ValueError, TypeError, RecursionError):
        owner = {}
    if owner.get("journal", VERSION) != VERSION:
        raise ResumeRefused(
            f"{path} was written by another version of halotile (journal {owner['journal']}, here {VERSION}). "
            "Go on with that version, or start over with --fresh (and output.overwrite: true where that says that it is another job's)."
        )
    kinds = {key: type(value) for key, value in owner.items()}
    expected = {"journal": int, "fingerprint": str, "total": int, "images": int}
    sound = kinds == expected and owner["total"] >= 0 and owner["images"] >= 1
    if not sound or owner["total"] * owner["images"] > MOST_DIGESTS:
        raise DamagedData(f"{path}: its first line is damaged. Run with --fresh to start over.")
    return owner


def _parse(line: bytes) -> _Entry | None:
    """What a line notes; None when it is damaged."""
    content = opened(line) or b""
    sign, (numbers, _, digests) = content[:1], content[1:].partition(b" ")
    if sign not in (b"+", b"-"):
        return None
    try:
        return _Entry(sign, Runs.from_text(numbers.decode()), base64.b64decode(digests, validate=True))
    except ValueError:  # also binascii.Error and UnicodeDecodeError
        return None
