"""An array in a file that is opened once in every process that reads from it."""

import copy
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, Self

import numpy as np

from halotile.errors import DamagedData, HalotileError, InputError, InputUnreadable
from halotile.storage.disk.durable import GONE
from halotile.storage.formats.base import Header, Reader
from halotile.storage.formats.parts.tiff_tags import METADATA, band_metadata, planes_of_channels
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, read_into
from halotile.storage.sharded.ome_metadata import Channels
from halotile.storage.spacing import with_sizes

Opener = Callable[..., Reader]  # `opener(path, **options) -> Reader`: importable by name, so that it can be pickled
# Readers that the copies of sources in a process share, at most; those of StoredArray.one_of_many have no
# others.
MOST_SHARED = 16


class StoredArray:
    """A :class:`Source` that is opened once in every process that reads from it.

    Parameters
    ----------
    path : str
        Path or URL; a path is made absolute, because a worker may have another working directory.
    kind : str
        Name of the format.
    opener : callable
        Opens the file.
    **options
        Arguments of ``opener`` besides the path.
    """

    def __init__(self, path: str, kind: str, opener: Opener, **options: Any) -> None:
        self.path = path if "://" in path else os.path.abspath(path)
        self.format = kind
        self._opener = opener
        self._options = options
        reader = _open(opener, self.path, options)
        self._reader: tuple[int, Any] | None = None
        self._keep(reader)
        # reads in other processes, while the file is the one that was opened
        self._portable: Any = getattr(reader, "portable", None)
        self._keeps_reader = True
        self._header = header = reader.header
        self.shape, self.ndim, self.dtype = header.shape, len(header.shape), header.dtype
        self.chunks, self.shards, self.mapped = header.chunks, header.shards, header.mapped
        self.keeps_chunk = header.keeps_chunk
        self.axes, self.scale, self.units, self.ome = header.axes, header.scale, header.units, header.ome
        self.remarks, self.nodata, self.channels = header.remarks, header.nodata, header.channels
        self.georeference, self.mask = header.georeference, header.mask
        self.attributes = header.attributes
        self.order = tuple(range(self.ndim))
        # axis of the file with channels, and their indices along it; None: all
        self.selected: tuple[int, tuple[int, ...]] | None = None

    def with_sizes(self, sizes: Mapping[str, float | str]) -> Self:
        """The same array with the user's pixel sizes of some axes, such as ``{"z": "0.3 um"}``."""
        if missing := [axis for axis in sizes if axis not in self.axes]:
            raise InputError(
                f"{self.path}: spacing is given along {', '.join(missing)}, and the axes are {''.join(self.axes)}. Write some of these."
            )
        array = self._copy()
        array.scale, array.units = with_sizes(self.axes, self.scale, self.units, sizes)
        return array

    def in_order(self, order: Sequence[int]) -> Self:
        """The same array with its axes in another order: axis ``i`` is axis ``order[i]`` of this one.

        >>> import tempfile
        >>> from halotile.storage.arrays import open_source
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(f"{folder}/rgb.npy", np.zeros((40, 50, 3)))
        ...     image = open_source(f"{folder}/rgb.npy").in_order((2, 0, 1))
        ...     image.axes, image.shape, image[:, 0, 0].shape
        (('c', 'y', 'x'), (3, 40, 50), (3,))
        """

        def moved(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(values[axis] for axis in order)

        array = self._copy()
        array.order, array.shape, array.axes = moved(self.order), moved(self.shape), moved(self.axes)
        array.scale, array.units, array.chunks = moved(self.scale), moved(self.units), moved(self.chunks)
        array.shards = moved(self.shards) if self.shards else None
        if self.ome is not None and self.ome.translation:
            array.ome = replace(self.ome, translation=moved(self.ome.translation))
        return array

    def with_channels(self, numbers: Sequence[int], axis: int | None = None) -> Self:
        """The same array with some of its channels, in this order; ``axis``: that of the channels, where the file does not name it.

        >>> import tempfile
        >>> from halotile.storage.arrays import open_source
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(f"{folder}/rgb.npy", np.arange(3) + np.zeros((4, 5, 3)))
        ...     image = open_source(f"{folder}/rgb.npy", axes="yxc").with_channels((2, 0))
        ...     image.shape, image[0, 0].tolist()
        ((4, 5, 2), [2.0, 0.0])
        """
        axis, array = self.axes.index("c") if axis is None else axis, self._copy()
        count, before = self.shape[axis], self.selected[1] if self.selected else range(self.shape[axis])
        array.selected = self.order[axis], tuple(before[number] for number in numbers)
        array.shape = (*self.shape[:axis], len(numbers), *self.shape[axis + 1 :])

        def kept(described: Channels) -> Channels:
            return tuple(described[number] for number in numbers) if len(described) == count else ()

        array.channels = kept(self.channels)
        array.attributes = planes_of_channels(self.attributes, numbers)
        if self.georeference:
            keys, bands = self.georeference.geokeys, str(METADATA)
            metadata = {bands: band_metadata(keys[bands], numbers)} if bands in keys else {}
            array.georeference = replace(self.georeference, geokeys={**keys, **metadata})
        if self.ome is not None and self.ome.omero:
            shown = list(kept(tuple(self.ome.omero["channels"])))
            array.ome = replace(self.ome, omero={**self.ome.omero, "channels": shown} if shown else None)
        return array

    def arranged_as(self, image: Self) -> Self:
        """The same array in the order, and with the channels, of an image whose file has the same shape; itself beside another one."""
        if self._header.shape != image._header.shape or self.order != tuple(range(self.ndim)):
            return self
        array = self.in_order(image.order)
        array.selected, array.shape = image.selected, image.shape
        return array

    def one_of_many(self) -> Self:
        """The same array, whose file is closed once :data:`MOST_SHARED` others were read."""
        array = copy.copy(self)
        array._reader, array._keeps_reader = None, False
        return array

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``, C-contiguous and in native byte order."""
        with self._reading(region) as reader:
            stored = [self.order.index(axis) for axis in range(self.ndim)]
            bounds = (tuple(ends[axis] for axis in stored) for ends in (region.start, region.stop))
            parts = [reader.read(part) for part in self._in_file(Region(*bounds))]
            pixels = parts[0] if self.selected is None else np.concatenate(parts, self.selected[0])
            pixels = pixels.transpose(self.order)
        return np.ascontiguousarray(pixels, dtype=self.dtype)

    def read_into(self, region: Region, pixels: Pixels) -> None:
        """Read the pixels of ``region`` into an array of its shape: at once from the files of a Zarr."""
        if self.selected is None and self.order == tuple(range(self.ndim)):
            with self._reading(region) as reader:
                read_into(reader, region, pixels)
        else:
            pixels[...] = self.read(region)

    @contextmanager
    def _reading(self, region: Region) -> Iterator[Any]:
        """The reader, with errors that name the file and the region."""
        if not region.inside(Region.whole(self.shape)):
            raise InputError(
                f"{self.path}: {region} reaches outside the array of shape {self.shape}. Clip it to the array."
            )
        try:
            yield self.reader()
        except Exception as error:
            if isinstance(error, (HalotileError, MemoryError)) and not isinstance(error, DamagedData):
                raise
            what = f"{self.path}: the pixels from {region.start} to {region.stop} cannot be read"
            raise read_error(what, error) from error

    def _in_file(self, region: Region) -> Iterator[Region]:
        """Yield the regions of the file, in its order, that make up one of the channels that are kept."""
        if self.selected is None:
            yield region
            return
        axis, numbers = self.selected
        wanted = enumerate(numbers[region.start[axis] : region.stop[axis]])
        for _, run in itertools.groupby(wanted, lambda pair: pair[1] - pair[0]):
            _, along = zip(*run, strict=True)
            start, stop = list(region.start), list(region.stop)
            start[axis], stop[axis] = along[0], along[-1] + 1
            yield Region(tuple(start), tuple(stop))

    def __getitem__(self, index: Any) -> Pixels:
        """The pixels at integers and slices of step 1, as in NumPy: ``source[0, :512, 256:512]``."""
        entries = _expand_ellipsis(index, self.shape)
        ranges = [_bounds(entry, n) for entry, n in zip(entries, self.shape, strict=True)]
        pixels = self.read(Region(tuple(a for a, _ in ranges), tuple(b for _, b in ranges)))
        return pixels[tuple(slice(None) if isinstance(entry, slice) else 0 for entry in entries)]

    def reader(self) -> Any:
        """The reader of this process, opened on first use."""
        pid = os.getpid()
        # A forked child shares file offsets with its parent, so it must not use the parent's reader.
        if self._reader is not None and self._reader[0] == pid:
            return self._reader[1]
        if self._portable is not None and self._portable.is_current:
            return self._keep(self._portable)
        options = tuple(sorted(self._options.items()))
        fingerprint = json.dumps(self.fingerprint(), sort_keys=True)
        reader = _reopen(pid, self._opener, self.path, options, fingerprint)
        self._refuse_change(reader.header)
        return self._keep(reader) if self._keeps_reader else reader

    def _keep(self, reader: Any) -> Any:
        """Read by ``reader`` from now on, in this process."""
        self._reader = (os.getpid(), reader)
        if _closes_files:
            _keepers.append(self)
        return reader

    def _copy(self) -> Self:
        """A copy that reads by the same reader, which ``copy`` leaves out as pickle does."""
        array = copy.copy(self)
        if self._reader is not None and self._reader[0] == os.getpid():
            array._keep(self._reader[1])
        return array

    def _refuse_change(self, now: Header) -> None:
        """Raise when shape or type differ from those of the file that was opened first."""
        if (now.shape, now.dtype) != (self._header.shape, self.dtype):
            raise InputError(
                f"{self.path} was {self.dtype} of shape {self._header.shape} when it was opened, and is now {now.dtype} "
                f"of shape {now.shape}. Leave the input alone during a run; start the job again."
            )

    def fingerprint(self) -> dict[str, Any]:
        """JSON values that identify the data: cheap, never reads pixels."""
        return {
            "path": self.path,
            "format": self.format,
            "shape": list(self.shape),
            "dtype": self.dtype.name,
            "axes": "".join(self.axes),
            **({"channels": list(self.selected[1])} if self.selected else {}),
            **self._header.identity,
        }

    def change(self) -> str:
        """Describe the change of the file since it was opened; empty when there is none. Cheap, never reads pixels."""
        try:
            now = _open(self._opener, self.path, self._options).header
        except InputError as error:
            if isinstance(error, InputUnreadable) and not isinstance(error.__cause__, GONE):
                raise
            return "was moved, removed or damaged"
        was = self._header
        same = (now.identity, now.shape, now.dtype) == (was.identity, was.shape, was.dtype)
        return "" if same else "was written to"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def __repr__(self) -> str:
        return f"<{self.format} {self.path} {self.dtype} {''.join(self.axes)} {self.shape}>"


_keepers: list[StoredArray] = []  # arrays that have kept a reader within closing_files
_closes_files = False


@contextmanager
def closing_files() -> Iterator[None]:
    """Close at the end the files of all arrays that were opened or read within; the next read opens them again."""
    global _closes_files
    _closes_files = True
    try:
        yield
    finally:
        _closes_files = False
        while _keepers:
            _keepers.pop()._reader = None
        _reopen.cache_clear()


def _open(opener: Opener, path: str, options: Mapping[str, Any]) -> Reader:
    """Open a file; errors name the path."""
    try:
        return opener(path, **options)
    except InputError as error:
        raise type(error)(f"{path}: {error}") from error
    except (HalotileError, MemoryError):
        raise
    except Exception as error:
        raise read_error(f"{path}: it cannot be opened", error) from error


@lru_cache(maxsize=MOST_SHARED)
def _reopen(pid: int, opener: Opener, path: str, options: tuple[tuple[str, Any], ...], fingerprint: str) -> Reader:
    """Open the file of an unpickled source; all copies in a process share one reader."""
    return _open(opener, path, dict(options))


def _expand_ellipsis(index: Any, shape: tuple[int, ...]) -> list[Any]:
    """Return one index entry for each axis."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if not any(entry is Ellipsis for entry in entries):
        entries.append(Ellipsis)
    at = next(number for number, entry in enumerate(entries) if entry is Ellipsis)
    missing = len(shape) - (len(entries) - 1)
    if missing < 0:
        raise IndexError(f"{index!r} has {len(entries) - 1} entries, but the array's shape is {shape}.")
    return [*entries[:at], *(slice(None),) * missing, *entries[at + 1 :]]


def _bounds(entry: Any, length: int) -> tuple[int, int]:
    """Start and stop of one index entry."""
    try:
        selected = range(length)[entry]
    except IndexError:
        raise IndexError(f"index {entry} is outside an axis of {length} pixels.") from None
    except TypeError:
        selected = None
    if isinstance(selected, int):
        return selected, selected + 1
    if selected is None or selected.step != 1:
        raise IndexError(f"{entry!r} is no index here: write integers and slices of step 1, or index what was read.")
    return selected.start, max(selected.start, selected.stop)


def read_error(what: str, error: Exception) -> InputError:
    """Convert an exception of a format's library, or of Python while parsing a file, into an InputError.

    Raise it ``from error``: a bug in halotile itself then shows with ``--debug``, and in the fuzz tests.

    ``what``: failed operation, with the path; ``error``: its cause.

    Returns
    -------
    InputUnreadable or DamagedData
        The first for errors of the operating system.
    """
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if isinstance(error, OSError) and error.errno is not None:
        return unreadable_error(f"{what}: {reason}")
    return DamagedData(f"{what}: {reason}. The stored data are damaged: restore this file from its origin.")


def unreadable_error(problem: str) -> InputUnreadable:
    """The error for data that the system cannot read, with advice."""
    return InputUnreadable(f"{problem}. Check its disk, network or permissions, then run again.")
