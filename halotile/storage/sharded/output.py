"""The output of a run: a sharded Zarr v3 array that only whole shards are written to.

One shard is one file and has one writer. The metadata is written as JSON by hand, so that its fsyncs are
ours; zarr-python, tensorstore and OME-Zarr viewers read it.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, InputError
from halotile.storage.disk.durable import DISK, GONE, Buffers, Disk
from halotile.storage.disk.place import check_place
from halotile.storage.grid import Region
from halotile.storage.io_threads import IO_THREADS
from halotile.storage.sharded.layout import Layout, read_layout
from halotile.storage.sharded.marks import MARKS
from halotile.storage.sharded.shards import (
    digest_of,
    encode_shard,
    encoded_digest,
    find_problems,
    inspect_index,
)

__all__ = [
    "Layout",
    "ShardWriter",
    "WrittenBlock",
    "check_block",
    "create_metadata",
    "create_output",
    "inspect_block",
    "open_output",
    "to_dtype",
]

open_output = read_layout
UNREADABLE = "the shard cannot be read"
"""The problem of a shard that the system may give at another look."""
OTHER = "whole, but not what the run wrote there: a shard of another place or time"
"""The problem of shards that somebody else may have written."""


def create_output(path: str | Path, layout: Layout, disk: Disk = DISK, *, overwrite: bool = False) -> None:
    """Make an empty output; durable on return.

    Parameters
    ----------
    path : path
        Where the Zarr goes. Parents that are missing are made.
    layout : Layout
        What it looks like.
    overwrite : bool
        Remove a Zarr that stands there. Anything that is not a Zarr stays.
    disk : Disk
        What writes it.

    Raises
    ------
    OutputRefused
        When something stands at ``path`` that may not be removed; nothing was touched.
    """
    root = Path(path)
    check_place(root, overwrite=overwrite)
    if os.path.lexists(root):
        disk.remove_tree(root, last=MARKS)
    create_metadata(root, layout, disk)


def create_metadata(path: str | Path, layout: Layout, disk: Disk = DISK) -> None:
    """Write the metadata of an output, the file at the top first; durable on return."""
    root = Path(path)
    for name, content in layout.documents().items():
        disk.make_directory((root / name).parent)
        disk.write_file(root / name, [content])


class WrittenBlock(NamedTuple):
    """What the shards of a block take, and their digest."""

    size_bytes: int
    digest: bytes


@dataclass(frozen=True)
class ShardWriter:
    """Writes whole shards of an output. Travels to workers: it holds no open files.

    Parameters
    ----------
    path : path
        The output, as given to :func:`create_output`.
    layout : Layout
        Its layout.
    disk : Disk
        What writes.
    """

    path: str | Path
    layout: Layout
    disk: Disk = field(default=DISK, compare=False)
    _durable: set[Path] = field(default_factory=set, init=False, repr=False, compare=False)

    def write(self, region: Region, pixels: NDArray[Any]) -> WrittenBlock:
        """Write a block; durable on return.

        Parameters
        ----------
        region : Region
            Starts on shard borders; stops on them or at the array's end.
        pixels : ndarray
            Pixels of that shape; :func:`to_dtype` makes them the output's dtype.

        Returns
        -------
        WrittenBlock
            Bytes written, and their digest.

        Raises
        ------
        ConfigError
            When the region is not a whole number of shards, or the pixels have another shape.
        InputError
            When a NaN would have to become an integer.
        OSError
            When the disk is full or fails, or the output is gone: only the folders of shards are made in it. Shards
            that stood there are whole, old or new.
        """
        self.layout.check_whole_shards(region)
        if pixels.shape != region.shape:
            raise ConfigError(f"pixels of shape {pixels.shape} do not fill {region} of shape {region.shape}.")
        digests: list[bytes] = []
        with closing(self._encoded(region, pixels, digests)) as files:
            size_bytes = self.disk.write_files(files)
        return WrittenBlock(size_bytes, digest_of(digests))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_durable": set()}

    def _encoded(
        self, region: Region, pixels: NDArray[Any], digests: list[bytes]
    ) -> Generator[tuple[Path, Buffers], None, None]:
        def encoded(shard: tuple[tuple[int, ...], Region]) -> tuple[Path, Buffers]:
            index, inside = shard
            part = to_dtype(pixels[inside.relative_to(region).slices], self.layout.dtype)
            return self.layout.shard_path(self.path, index), encode_shard(part, self.layout.form)

        for path, buffers in IO_THREADS.each(encoded, _shards_of(self.layout, region)):
            self._make_directory(path.parent)
            digests.append(encoded_digest(buffers))
            yield path, buffers

    def _make_directory(self, path: Path) -> None:
        """Make a directory of shards durable, from the array downwards, once for each process.

        That it exists does not say that it would survive a power cut: another worker may be about to
        fsync it.
        """
        if path == self.layout.array_path(self.path) or (path in self._durable and path.exists()):
            return
        self._make_directory(path.parent)
        self.disk.make_directory(path, parents=False)
        self._durable.add(path)


def check_block(
    path: str | Path, layout: Layout, region: Region, digest: bytes | None = None, *, thorough: bool = True
) -> list[str]:
    """Read every shard that a region touches and check it; one line for each problem.

    A shard has to be there, of the size that its index says, with every chunk that lies in the array,
    and every checksum has to match: that of the index alone, at the end of the file, where it is not
    to be ``thorough``. All of them have to be those whose ``digest`` the writer told: whole shards of another place or
    time are not.

    Examples
    --------
    >>> import tempfile
    >>> layout = Layout((4,), "uint8", (2,), (2,), "none", ("x",), (1.0,), (None,), False)
    >>> folder = tempfile.mkdtemp() + "/a.zarr"
    >>> create_output(folder, layout)
    >>> left = Region((0,), (2,))
    >>> ShardWriter(folder, layout).write(left, np.array([1, 2])).size_bytes
    26
    >>> [problem.removeprefix(folder) for problem in check_block(folder, layout, Region.whole((4,)))]
    ['/c/1: the shard is missing']
    >>> [problem.removeprefix(folder) for problem in check_block(folder, layout, left, b"else")]
    ['/c/0: whole, but not what the run wrote there: a shard of another place or time']
    """
    problems, found = inspect_block(path, layout, region, thorough=thorough)
    if digest is None or problems or found == digest:
        return problems
    first, *more = (layout.shard_path(path, index) for index, _ in _shards_of(layout, region))
    one_of = f" or one of {len(more)} beside it" if more else ""
    return [f"{first}{one_of}: {OTHER}"]


def inspect_block(
    path: str | Path, layout: Layout, region: Region, *, thorough: bool
) -> tuple[list[str], bytes]:
    """The problems of the shards that a region touches, and where there are none the digest of what is stored."""
    problems, digests = [], []
    array = layout.array_path(path)
    for index, inside in _shards_of(layout, region.clip(Region.whole(layout.shape))):
        file = f"{array}/{layout.shard_name(index)}"
        found, digest = _inspect_shard(file, layout, inside.shape, thorough)
        problems += [f"{file}: {problem}" for problem in found]
        digests.append(digest)
    return problems, digest_of(digests)


def to_dtype(pixels: NDArray[Any], dtype: str | np.dtype[Any]) -> NDArray[Any]:
    """Pixels in the dtype of an output, clipped to what it can hold. Integers are rounded half to even, never wrapped.

    NaN and the infinities stay in floats. Returns the same array when nothing is to be done.

    Raises
    ------
    InputError
        When a NaN would have to become an integer.

    Examples
    --------
    >>> to_dtype(np.array([-3.0, 0.5, 1.5, 300.0]), "uint8")
    array([  0,   0,   2, 255], dtype=uint8)
    """
    target = np.dtype(dtype)
    if pixels.dtype == target or not pixels.size:
        return pixels.astype(target, copy=False)
    if target.kind == "f":
        return _narrow(pixels, target)
    if pixels.dtype.kind == "f":
        return _round(pixels, target)
    low, high = _common_limits(pixels.dtype, target)
    clipped: NDArray[Any] = np.clip(pixels, low, high).astype(target)
    return clipped


def _narrow(pixels: NDArray[Any], target: np.dtype[Any]) -> NDArray[Any]:
    """Floats that are no larger than the largest one; what was infinite before stays so."""
    with np.errstate(over="ignore"):
        floats: NDArray[Any] = pixels.astype(target)
    if np.can_cast(pixels.dtype, target):
        return floats
    over = np.isinf(floats) & np.isfinite(pixels)
    if over.any():
        floats[over] = np.copysign(np.finfo(target).max, floats[over])
    return floats


def _round(pixels: NDArray[Any], target: np.dtype[Any]) -> NDArray[Any]:
    # The limits of an integer type need more digits than a narrow float has.
    digits = np.float64 if target.itemsize > 2 else np.float32
    whole: NDArray[Any] = np.rint(pixels, dtype=np.promote_types(pixels.dtype, digits))
    if np.isnan(whole.max()):
        raise InputError(
            f"a pixel is NaN, and the output is {target}, which has none. "
            "Mend the image, or write output.dtype: float32."
        )
    limits = np.iinfo(target)
    return np.clip(whole, limits.min, limits.max, out=whole).astype(target)


def _common_limits(source: np.dtype[Any], target: np.dtype[Any]) -> tuple[int, int]:
    if source.kind == "b":
        return 0, 1
    ours, theirs = np.iinfo(target), np.iinfo(source)
    return max(ours.min, theirs.min), min(ours.max, theirs.max)


def _part(content: bytes, count: int, place: int) -> bytes:
    return content[place : place + count]


def _shards_of(layout: Layout, region: Region) -> Iterator[tuple[tuple[int, ...], Region]]:
    """Position of each shard that a region touches, with what of the shard lies in the array."""
    first = tuple(a // edge for a, edge in zip(region.start, layout.shard, strict=True))
    stop = tuple(-(-b // edge) for b, edge in zip(region.stop, layout.shard, strict=True))
    for offset in np.ndindex(tuple(b - a for a, b in zip(first, stop, strict=True))):
        index = tuple(a + i for a, i in zip(first, offset, strict=True))
        start = tuple(i * edge for i, edge in zip(index, layout.shard, strict=True))
        yield index, Region(start, tuple(map(min, map(add, start, layout.shard), layout.shape)))


def _inspect_shard(
    file: str, layout: Layout, shape: tuple[int, ...], thorough: bool
) -> tuple[list[str], bytes]:
    """The problems of a shard; its digest, where there are none: for that, four bytes of each chunk are read, or there already."""
    form = layout.form
    try:
        with open(file, "rb", buffering=0) as shard:
            size = os.fstat(shard.fileno()).st_size
            if not thorough:
                end = os.pread(shard.fileno(), form.index_bytes, max(0, size - form.index_bytes))
                return inspect_index(end, size, partial(os.pread, shard.fileno()), form, shape)
            content = shard.read()
            if problems := list(find_problems(content, form, shape)):
                return problems, b""
            return inspect_index(content, size, partial(_part, content), form, shape)
    except GONE:
        return ["the shard is missing"], b""
    except IsADirectoryError:
        return ["a directory stands in place of the shard"], b""
    except OSError as error:
        return [f"{UNREADABLE}: {error.strerror}"], b""
