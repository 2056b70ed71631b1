"""The journal of a run: an append-only file of the finished blocks, with digests of the written shards.

Every line is ``<crc32c of the rest> <rest>``. The first identifies the plan; each of the others adds
(``+0-31,40 <digests>``) or removes (``-7``) a few blocks. The digests are those of the blocks in ascending order, in
base64. A million blocks marked in batches take 5.5 MB.

A block may be marked only when its shards are durable. Marks are not fsynced individually: if a power cut loses a mark, its
block is repeated. A truncated last line is ignored. A damaged line before the end makes every later mark unreliable:
those blocks are repeated.
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
from halotile.storage.run_directory.json_files import with_checksum, without_checksum
from halotile.storage.run_directory.number_ranges import RangeSet
from halotile.storage.sharded.shards import DIGEST_BYTES, digest_of

VERSION = 2
# Maximum number of blocks times images. Each block is at least one file, so no run has more, and a line with more is
# damaged. It limits the memory for digests to a gigabyte.
MOST_DIGESTS = 2**28
_MODE = 0o600


class _Entry(NamedTuple):
    """The content of a line after the first."""

    sign: bytes
    numbers: RangeSet
    digests: bytes = b""

    def to_line(self) -> bytes:
        digests = b" " + base64.b64encode(self.digests) if self.digests else b""
        return with_checksum(self.sign + self.numbers.to_text().encode() + digests)


class Journal:
    """The finished blocks of one run. Use :meth:`create` or :meth:`open` to get one.

    Attributes
    ----------
    done : RangeSet
        Numbers of the finished blocks.
    warning : str
        Description of the damage found when the file was opened; empty when there was none.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "journal"
    >>> with Journal.create(path, "a1b2", total=9) as journal:
    ...     journal.mark({0: b"wave", 1: b"edge", 5: b"dark"})
    ...     journal.unmark([1])
    >>> with Journal.open(path, "a1b2", total=9) as journal:
    ...     journal.done.complement(9), journal.digest(5)
    (RangeSet('1-4,6-8'), b'dark')
    """

    def __init__(self, path: Path, header: bytes, total: int, images: int, disk: Disk, *, read_only: bool) -> None:
        self.path = path
        self.total = total
        """Number of blocks in the plan."""
        self.done = RangeSet()
        self.warning = ""
        self._header = header
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
        path: Path,  # path of the file; its directory exists
        fingerprint: str,  # digest of the plan
        total: int,  # number of blocks in the plan
        disk: Disk = DISK,  # disk to write with
        *,
        images: int = 1,  # number of images that a block is written to, each with a digest
        sync: bool = True,  # true: the file is durable on return
    ) -> Journal:
        """Create an empty journal, replacing an existing one."""
        if total * images > MOST_DIGESTS:
            raise ConfigError(
                f"the plan has {total:,} blocks, and a run of more than {MOST_DIGESTS // images:,} is refused. "
                "Write a larger output.shard and tile.block."
            )
        header = with_checksum(json.dumps(_header_values(fingerprint, total, images)).encode())
        journal = cls(path, header, total, images, disk, read_only=False)
        journal._rewrite(sync=sync)
        return journal

    @classmethod
    def open(
        cls, path: Path, fingerprint: str, total: int, disk: Disk = DISK, *, images: int = 1, read_only: bool = False
    ) -> Journal:
        """Open an existing journal. With ``read_only`` nothing is written: another process may be appending to it."""
        data = path.read_bytes()
        header = data[: data.find(b"\n") + 1]
        _check_header(path, header, _header_values(fingerprint, total, images))
        journal = cls(path, header, total, images, disk, read_only=read_only)
        journal._inode = path.stat().st_ino
        journal._replay(data)
        if not read_only:
            journal._repair(len(data))
        return journal

    @classmethod
    def open_any(cls, path: Path) -> Journal:
        """Open the journal of any plan for reading: see its :attr:`fingerprint` and :attr:`total`."""
        with path.open("rb") as file:
            values = _parse_header(path, file.readline())
        del values["journal"]
        return cls.open(path, **values, read_only=True)

    @property
    def fingerprint(self) -> str:
        """Digest of the plan."""
        return str(_parse_header(self.path, self._header)["fingerprint"])

    def digest(self, number: int, image: int = 0) -> bytes:
        """Digest of a finished block in one of the images."""
        return bytes(self._of_image(image)[number])

    def image_digest(self, image: int) -> bytes:
        """Digest of an image whose blocks are all finished."""
        return digest_of([self._of_image(image).tobytes()])

    def _of_image(self, image: int) -> NDArray[np.uint8]:
        return self._digests[:, image * DIGEST_BYTES : (image + 1) * DIGEST_BYTES]

    def mark(self, digests: Mapping[int, bytes]) -> None:
        """Record blocks as done: one line, durable after :meth:`sync`.

        ``digests`` has the digest of each block; those of several images are concatenated.
        """
        self._record(_Entry(b"+", RangeSet(digests), b"".join(digests[number] for number in sorted(digests))))

    def unmark(self, numbers: Iterable[int]) -> None:
        """Record these blocks as not done; durable on return."""
        self._record(_Entry(b"-", RangeSet(numbers)))
        self.sync()

    def sync(self) -> None:
        """Make every line durable."""
        if self._dirty:
            self.ensure_durable()

    def ensure_durable(self) -> None:
        """Make every line durable; rewrite the file if another process has changed or removed it."""
        if self._is_unchanged():
            self._disk.sync(self.path)
        else:
            self._rewrite()
        self._dirty = False

    def close(self) -> None:
        """Make every line durable; the journal may be used again."""
        self.sync()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sync()

    def _record(self, entry: _Entry) -> None:
        if self._read_only:
            raise io.UnsupportedOperation(f"{self.path} was opened read-only")
        if not entry.numbers:
            return
        if not self._is_valid(entry):
            blocks, size = entry.numbers.to_text(), len(entry.digests)
            raise IndexError(f"blocks {blocks} with {size} bytes of digests, in a journal of {self.total} blocks")
        self._append(entry.to_line())
        self._apply(entry)

    def _is_valid(self, entry: _Entry) -> bool:
        """Return True when every block is in the plan, with its digests where it is marked."""
        # Ranges are checked first, because a damaged line may contain more numbers than len() can return.
        if any(numbers.stop > self.total for numbers in entry.numbers.ranges()) or not entry.numbers:
            return False
        expected = len(entry.numbers) * self._digests.shape[1] if entry.sign == b"+" else 0
        return len(entry.digests) == expected

    def _append(self, line: bytes) -> None:
        """Append a line. A partly written line is truncated before the next one."""
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
        """Apply the lines of the file; the last one may be incomplete."""
        lines = io.BytesIO(data[len(self._header) :]).readlines()
        first_damaged = None
        for position, line in enumerate(lines):
            entry = _parse_entry(line)
            if entry is None or not self._is_valid(entry):
                first_damaged = position if first_damaged is None else first_damaged
            elif first_damaged is None or entry.sign == b"-":
                self._apply(entry)
            if first_damaged is None:
                self._size += len(line)
        if first_damaged is not None and first_damaged < len(lines) - 1:
            self.warning = (
                f"{self.path}: line {first_damaged + 2} is damaged. Blocks marked after it are done again; "
                "`recon-cli verify` checks the others."
            )

    def _repair(self, size: int) -> None:
        """Remove damaged lines, so that lines can be appended."""
        if self.warning:
            self._rewrite()
        elif size > self._size:
            self._disk.truncate(self.path, self._size)

    def _rewrite(self, *, sync: bool = True) -> None:
        """Replace the file by one with the present state."""
        digests = self._digests[np.fromiter(self.done, int, len(self.done))].tobytes()
        lines = [self._header, _Entry(b"+", self.done, digests).to_line()]
        self._size = self._disk.write_file(self.path, lines if self.done else lines[:1], mode=_MODE, sync=sync)
        self._inode = self.path.stat().st_ino
        self._torn = False

    def _is_unchanged(self) -> bool:
        with suppress(FileNotFoundError):
            status = self.path.stat()
            return (status.st_ino, status.st_size) == (self._inode, self._size)
        return False


def _header_values(fingerprint: str, total: int, images: int) -> dict[str, Any]:
    return {"journal": VERSION, "fingerprint": fingerprint, "total": total, "images": images}


def _check_header(path: Path, header: bytes, expected: Mapping[str, Any]) -> None:
    values = _parse_header(path, header)
    if values != expected:
        listed = ", ".join(f"{key} {values.get(key)} (here {expected[key]})" for key in expected)
        raise ResumeRefused(
            f"{path} belongs to another job: {listed}. "
            "Run the job that it belongs to, or start over with --fresh and output.overwrite: true."
        )


def _parse_header(path: Path, header: bytes) -> dict[str, Any]:
    """The values in the first line."""
    try:
        values = dict(json.loads(without_checksum(header) or b"{}"))
    except (ValueError, TypeError, RecursionError):
        values = {}
    if values.get("journal", VERSION) != VERSION:
        raise ResumeRefused(
            f"{path} was written by another version of halotile (journal {values['journal']}, here {VERSION}). "
            "Continue with that version, or start over with --fresh (and output.overwrite: true if it belongs to another job)."
        )
    types = {key: type(value) for key, value in values.items()}
    expected = {"journal": int, "fingerprint": str, "total": int, "images": int}
    valid = types == expected and values["total"] >= 0 and values["images"] >= 1
    if not valid or values["total"] * values["images"] > MOST_DIGESTS:
        raise DamagedData(f"{path}: its first line is damaged. Run with --fresh to start over.")
    return values


def _parse_entry(line: bytes) -> _Entry | None:
    """The content of a line; None when it is damaged."""
    content = without_checksum(line) or b""
    sign, (numbers, _, digests) = content[:1], content[1:].partition(b" ")
    if sign not in (b"+", b"-"):
        return None
    try:
        return _Entry(sign, RangeSet.from_text(numbers.decode()), base64.b64decode(digests, validate=True))
    except ValueError:  # also binascii.Error and UnicodeDecodeError
        return None
