"""An array in a file that opens itself once in every process that reads from it."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from halotile.errors import DamagedData, HalotileError, InputError, InputUnreadable
from halotile.storage.disk.durable import GONE
from halotile.storage.formats.base import Header, Reader
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels
from halotile.storage.sharded.ome_metadata import OmeImage

Opener = Callable[..., Reader]
"""``opener(path, **options) -> Reader``: importable by name, so that it can be pickled."""


class StoredArray:
    """A :class:`Source` that opens itself once in every process that reads from it.

    Parameters
    ----------
    path : str
        Path or URL; a path is made absolute, because a worker may have another working directory.
    kind : str
        Name of the format.
    opener : callable
        Opens the file.
    **options
        What ``opener`` takes besides the path.

    Raises
    ------
    InputError
        Whatever ``opener`` refuses, with the path in front, and whatever the library beneath stumbles over.
    """

    def __init__(self, path: str, kind: str, opener: Opener, **options: Any) -> None:
        self.path = path if "://" in path else os.path.abspath(path)
        self.format = kind
        self._opener = opener
        self._options = options
        reader = _opened(opener, self.path, options)
        self._reader: tuple[int, Reader] | None = (os.getpid(), reader)
        self._header = reader.header

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in pixels."""
        return self._header.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Type of one pixel, in native byte order."""
        return self._header.dtype

    @property
    def axes(self) -> tuple[str, ...]:
        """One lower-case letter for each axis."""
        return self._header.axes

    @property
    def chunks(self) -> tuple[int, ...]:
        """How the pixels are stored, in pixels."""
        return self._header.chunks

    @property
    def shards(self) -> tuple[int, ...] | None:
        """How the pixels are divided into files, in pixels; None where they are all in one."""
        return self._header.shards

    @property
    def mapped(self) -> bool:
        """Whether a part of a chunk is read without decoding the rest."""
        return self._header.mapped

    @property
    def scale(self) -> tuple[float, ...]:
        """Physical size of a pixel along each axis."""
        return self._header.scale

    @property
    def units(self) -> tuple[str | None, ...]:
        """Unit of ``scale`` for each axis."""
        return self._header.units

    @property
    def ome(self) -> OmeImage | None:
        """What OME metadata say besides axes, scale and units; None where there are no such metadata."""
        return self._header.ome

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``, C-contiguous and in native byte order.

        Raises
        ------
        InputError
            When the region reaches outside the array.
        DamagedData
            When what is stored there does not decode, or fails its checksum.
        InputUnreadable
            When the system does not give what is stored there.
        """
        if not region.inside(Region.whole(self.shape)):
            raise InputError(
                f"{self.path}: {region} reaches outside the array of shape {self.shape}. Clip it to the array."
            )
        try:
            pixels = self.reader().read(region)
        except Exception as error:
            if isinstance(error, (HalotileError, MemoryError)) and not isinstance(error, DamagedData):
                raise
            what = f"{self.path}: the pixels from {region.start} to {region.stop} cannot be read"
            raise refusal(what, error) from error
        return np.ascontiguousarray(pixels, dtype=self.dtype)

    def __getitem__(self, index: Any) -> Pixels:
        """The pixels at integers and slices of step 1, as in NumPy: ``source[0, :512, 256:512]``.

        Raises
        ------
        IndexError
            For any other index, one too many, or an integer outside the array.
        """
        entries = _for_each_axis(index, self.shape)
        ranges = [_range(entry, n) for entry, n in zip(entries, self.shape, strict=True)]
        pixels = self.read(Region(tuple(a for a, _ in ranges), tuple(b for _, b in ranges)))
        return pixels[tuple(slice(None) if isinstance(entry, slice) else 0 for entry in entries)]

    def reader(self) -> Reader:
        """The open file of this process."""
        pid = os.getpid()
        # A forked child shares file offsets with its parent, so it must not use the parent's reader.
        if self._reader is None or self._reader[0] != pid:
            options = tuple(sorted(self._options.items()))
            stamp = json.dumps(self.fingerprint(), sort_keys=True)
            self._reader = (pid, _reopened(pid, self._opener, self.path, options, stamp))
            self._refuse_change(self._reader[1].header)
        return self._reader[1]

    def _refuse_change(self, now: Header) -> None:
        """Raise when the file is no longer the one that was opened at first."""
        if (now.shape, now.dtype) != (self.shape, self.dtype):
            raise InputError(
                f"{self.path} was {self.dtype} of shape {self.shape} when it was opened, and is now {now.dtype} "
                f"of shape {now.shape}. Leave the input alone during a run; start the job again."
            )

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data, as JSON values: cheap, never reads pixels."""
        return {
            "path": self.path,
            "format": self.format,
            "shape": list(self.shape),
            "dtype": self.dtype.name,
            "axes": "".join(self.axes),
            **self._header.identity,
        }

    def change(self) -> str:
        """What has become of it since it was opened, in words; empty where nothing has. Cheap, never reads pixels.

        Raises
        ------
        InputUnreadable
            When the system does not tell: another look may.
        """
        try:
            now = _opened(self._opener, self.path, self._options).header
        except InputError as error:
            if isinstance(error, InputUnreadable) and not isinstance(error.__cause__, GONE):
                raise
            return "can no longer be opened"
        was = self._header
        same = (now.identity, now.shape, now.dtype) == (was.identity, was.shape, was.dtype)
        return "" if same else "was written to"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def __repr__(self) -> str:
        return f"<{self.format} {self.path} {self.dtype} {''.join(self.axes)} {self.shape}>"


def _opened(opener: Opener, path: str, options: Mapping[str, Any]) -> Reader:
    """The open file; a refusal names the path."""
    try:
        return opener(path, **options)
    except InputError as error:
        raise type(error)(f"{path}: {error}") from error
    except (HalotileError, MemoryError):
        raise
    except Exception as error:
        raise refusal(f"{path}: it cannot be opened", error) from error


@lru_cache(maxsize=16)
def _reopened(
    pid: int, opener: Opener, path: str, options: tuple[tuple[str, Any], ...], stamp: str
) -> Reader:
    """The open file of a source that came from another process: the many copies share it."""
    return _opened(opener, path, dict(options))


def _for_each_axis(index: Any, shape: tuple[int, ...]) -> list[Any]:
    """An entry of the index for each axis."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if not any(entry is Ellipsis for entry in entries):
        entries.append(Ellipsis)
    at = next(number for number, entry in enumerate(entries) if entry is Ellipsis)
    missing = len(shape) - (len(entries) - 1)
    if missing < 0:
        raise IndexError(f"{index!r} has {len(entries) - 1} entries, but the array's shape is {shape}.")
    return [*entries[:at], *(slice(None),) * missing, *entries[at + 1 :]]


def _range(entry: Any, length: int) -> tuple[int, int]:
    """Where one entry of an index starts and stops."""
    if isinstance(entry, slice) and entry.step in (None, 1):
        start, stop, _ = entry.indices(length)
        return start, max(start, stop)
    try:
        place = operator.index(entry)
    except TypeError:
        raise IndexError(
            f"{entry!r} is no index here: write integers and slices of step 1, or index what was read."
        ) from None
    if not -length <= place < length:
        raise IndexError(f"index {place} is outside an axis of {length} pixels.")
    return place % length, place % length + 1


def refusal(what: str, error: Exception) -> InputError:
    """The error that stands for whatever a format's library raised, or Python over what is stored.

    Raise it ``from error``: a fault of halotile's own then shows with ``--debug``, and to the test that changes files at random.

    Parameters
    ----------
    what : str
        What cannot be done, with the path.
    error : Exception
        Why.

    Returns
    -------
    InputUnreadable or DamagedData
        The first for errors of the operating system, but for a directory in place of a file.
    """
    words = f"{what}: {_words(error)}"
    # A directory where a file belongs will be one at another look, too.
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, IsADirectoryError):
        return unreadable(words)
    return DamagedData(f"{words}. The stored data are damaged: restore this file from its origin.")


def unreadable(words: str) -> InputUnreadable:
    """The error for what the system does not give, with what to do."""
    return InputUnreadable(f"{words}. Look after its disk, network or permissions, then run again.")


def _words(error: Exception) -> str:
    """An error in a line of words, also when its message is empty."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
