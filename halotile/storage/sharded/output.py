"""Outputs of runs: sharded Zarr v3 arrays that are written in whole shards.

Each shard is a file with a single writer. The metadata are written directly as JSON, so that halotile controls the
fsyncs; zarr-python, tensorstore and OME-Zarr viewers can read them.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, InputError
from halotile.storage.arrays import Source, open_source
from halotile.storage.disk.durable import DISK, GONE, Buffers, Disk
from halotile.storage.disk.object_path import OutputPath, path_of
from halotile.storage.disk.place import ZARR_FILES, check_place
from halotile.storage.grid import Grid, Region
from halotile.storage.io_threads import IO_THREADS
from halotile.storage.sharded import shards
from halotile.storage.sharded.layout import Layout as Layout
from halotile.storage.sharded.layout import LevelArray, avoid_value, coarser, halve, read_layout
from halotile.storage.sharded.output_disk import OutputDisk, disk_of, opened


@dataclass(frozen=True)
class Vectors:
    """The images of one solver in one folder.

    Vectors of iteration k are in copy ``k`` modulo the number of copies, so that a pass never writes the copy it reads.
    """

    folder: Path  # folder of the images
    layout: Layout  # layout of each image
    copies: Mapping[str, int]  # number of copies of each image
    disk: Disk = DISK  # disk to write with

    def path(self, name: str, iteration: int) -> Path:
        """Path of an image of an iteration."""
        return self.folder / f"{name}.{iteration % self.copies[name]}"

    def create(self) -> None:
        """Create all copies, without pixels."""
        for path in self.paths():
            create_metadata(path, self.layout, self.disk)

    def aside(self, name: str) -> Path:
        """Path of the image that was set aside."""
        return self.folder / f"{name}.aside"

    def set_aside(self, name: str, iteration: int) -> None:
        """Remove the image of an iteration from the rotation, unless that was done already."""
        if not self.aside(name).exists():
            self.path(name, iteration).rename(self.aside(name))
        create_metadata(self.path(name, iteration), self.layout, self.disk)

    def forget_aside(self, name: str) -> None:
        """Remove the image that was set aside."""
        shutil.rmtree(self.aside(name), ignore_errors=True)

    def paths(self) -> Iterator[Path]:
        """Paths of all copies."""
        for name, count in self.copies.items():
            yield from (self.path(name, copy) for copy in range(count))

    def open(self, name: str, iteration: int) -> Source:
        """Open an image of an iteration for reading."""
        return open_source(self.path(name, iteration))

    def writer(self, name: str, iteration: int) -> ShardWriter:
        """Writer of an image of an iteration."""
        return ShardWriter(self.path(name, iteration), self.layout, self.disk)

    @property
    def size_bytes(self) -> int:
        """Maximum size of all copies."""
        return self.layout.size_bytes * sum(self.copies.values())


UNREADABLE = "cannot be read"  # end of the problem of a file that another attempt may be able to read


@dataclass(frozen=True)
class FileLayout:
    """The layout of an output that is one file, which is not there until its only block is written."""

    file_bytes: int  # size of the file, at most
    shape: ClassVar[tuple[int, ...]] = (1,)
    ome: ClassVar[bool] = False
    arrays: ClassVar[tuple[LevelArray, ...]] = ()
    levels: ClassVar[int] = 1
    files: ClassVar[int] = 1
    inodes: ClassVar[int] = 1

    @property
    def size_bytes(self) -> int:
        """Size of the file, at most."""
        return self.file_bytes

    def documents(self) -> dict[str, bytes]:
        """The metadata files: none."""
        return {}

    def to_json(self) -> dict[str, Any]:
        """The layout as JSON values."""
        return asdict(self)

    def describe(self) -> Mapping[str, Any]:
        """Figures of the output in a plan."""
        return {"format": "file"}

    def create(self, path: Path, disk: Disk = DISK, *, overwrite: bool = False) -> None:
        """Remove a file that is replaced; durable on return."""
        check_place(path, overwrite=overwrite, is_file=True)
        disk.remove(path)

    def write(self, path: Path, content: bytes, disk: Disk = DISK) -> tuple[int, bytes]:
        """Write the file as a whole; durable on return. Returns its size and its digest."""
        return disk.write_file(path, [content]), shards.digest_of([content])

    def inspect(self, path: Path) -> tuple[list[str], bytes]:
        """The problem of the file, and its digest if there is none."""
        try:
            content = path.read_bytes()
        except GONE:
            return ["the file is missing"], b""
        except OSError as error:
            return [f"the file {UNREADABLE}: {error.strerror}"], b""
        return ([], shards.digest_of([content])) if content else (["the file is empty"], b"")


open_output = read_layout
AnyLayout = Layout | FileLayout
# Ends of the problems of shards and chunks that zarr leaves out where all their pixels have the fill value.
ABSENT = ("the shard is missing", "is not in the file")
# Edge of the parts of a level that are averaged at once: they and the pixels that they cover stay in the cache.
HALVED_ROWS = 256
FOREIGN_FILE = "not what the run wrote there"
# Problem of intact shards with unexpected pixels.
FOREIGN_PIXELS = "whole, but not what the run wrote there: a shard of another place or time"


def create_output(
    path: str | OutputPath, layout: AnyLayout, disk: OutputDisk | None = None, *, overwrite: bool = False
) -> None:
    """Create an empty output; durable on return.

    ``path``: path of the Zarr, or its place in an object store. Missing parents are created; ``layout``: layout of the output; ``disk``: disk to
    write with; by default that of the path; ``overwrite``: remove an existing Zarr. Anything that is not a Zarr is never removed.
    """
    root = path_of(path)
    if isinstance(layout, FileLayout):
        return layout.create(Path(str(root)), overwrite=overwrite)
    disk = disk or disk_of(root)
    check_place(root, overwrite=overwrite)
    if root.exists():
        disk.remove_tree(root, last=ZARR_FILES)
    create_metadata(root, layout, disk)


def create_metadata(path: str | OutputPath, layout: Layout, disk: OutputDisk | None = None) -> None:
    """Write the metadata of an output, beginning with the file at the root; durable on return."""
    root = path_of(path)
    disk = disk or disk_of(root)
    for name, content in layout.documents().items():
        disk.make_directory((root / name).parent)
        disk.write_file(root / name, [content])


class WrittenBlock(NamedTuple):
    """Size and digest of the shards of a block."""

    size_bytes: int
    digest: bytes


@dataclass(frozen=True)
class ShardWriter:
    """Writer of whole shards of an output. It has no open files, so it can be sent to workers."""

    path: str | OutputPath  # output, as passed to `create_output`
    layout: Layout
    # disk to write with; by default that of the path
    disk: OutputDisk | None = field(default=None, compare=False)
    _durable: set[OutputPath] = field(default_factory=set, init=False, repr=False, compare=False)

    def write(self, region: Region, pixels: NDArray[Any]) -> WrittenBlock:
        """Write a block; durable on return.

        ``region``: region that starts on shard borders, and stops on them or at the end of the array; ``pixels``: pixels of that shape; `to_dtype`
        converts them to the output's dtype.

        Returns
        -------
        WrittenBlock
            Bytes written, and their digest.
        """
        self.layout.check_whole_shards(region)
        if pixels.shape != region.shape:
            raise ConfigError(f"pixels of shape {pixels.shape} do not fill {region} of shape {region.shape}.")
        digests: list[bytes] = []
        disk = self.disk or disk_of(path_of(self.path))
        with closing(self._encode(region, pixels, digests, disk)) as files:
            size_bytes = disk.write_files(files)
        return WrittenBlock(size_bytes, shards.digest_of(digests))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_durable": set()}

    def _encode(
        self, region: Region, pixels: NDArray[Any], digests: list[bytes], disk: OutputDisk
    ) -> Generator[tuple[OutputPath, Buffers], None, None]:
        """Encode the shards of a block level by level."""
        for number, array in enumerate(self.layout.arrays):
            if number:
                pixels = halved(pixels, self.layout.factor, self.layout.dtype, self.layout.nodata)
                region = coarser(region, self.layout.factor)

            def encode(
                shard: tuple[str, Region],
                array: LevelArray = array,
                region: Region = region,
                pixels: NDArray[Any] = pixels,
            ) -> tuple[OutputPath, Buffers]:
                name, inside = shard
                part = to_dtype(pixels[inside.relative_to(region).slices], self.layout.dtype)
                return array.path(self.path) / name, shards.encode_shard(part, array.form)

            top = array.path(self.path)
            for path, buffers in IO_THREADS.map(encode, array.shards(region)):
                disk.make_folders(path, top, self._durable)
                digests.append(shards.encoded_digest(buffers))
                yield path, buffers


def layout_from_json(values: dict[str, Any]) -> AnyLayout:
    """The layout of an output that its ``to_json`` wrote."""
    return FileLayout(**values) if "file_bytes" in values else Layout.from_json(values)


def check_block(
    path: str | OutputPath, layout: AnyLayout, region: Region, digest: bytes | None = None, *, thorough: bool = True
) -> list[str]:
    """Check every shard that a region overlaps; returns one line for each problem.

    A shard must exist with the size given by its index, contain every chunk inside the array,
    and match its checksums; with ``thorough=False`` only the checksum of the index at the end of the file is verified.
    Together the shards must match the writer's ``digest``, which detects intact shards from elsewhere.

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
    problems, actual = inspect_block(path, layout, region, thorough=thorough)
    if digest is None or problems or actual == digest:
        return problems
    if isinstance(layout, FileLayout):
        return [f"{path}: {FOREIGN_FILE}"]
    first, *more = (file for file, _, _ in _shards_of(path, layout, region))
    one_of = f" or one of {len(more)} beside it" if more else ""
    return [f"{first}{one_of}: {FOREIGN_PIXELS}"]


def inspect_block(
    path: str | OutputPath, layout: AnyLayout, region: Region, *, thorough: bool | None
) -> tuple[list[str], bytes]:
    """The problems of the shards that a region overlaps, and the digest of their contents if there are none.

    With ``thorough=None`` only the end of each shard is read, its index and the checksum of its last chunk, and the digest is of these.
    """
    if isinstance(layout, FileLayout):
        of_file, digest = layout.inspect(Path(str(path)))
        return [f"{path}: {problem}" for problem in of_file], digest
    problems, digests = [], []
    for file, array, shape in _shards_of(path, layout, region.clip(Region.whole(layout.shape))):
        shard_problems, digest = _inspect_shard(file, array.form, shape, thorough)
        problems += [f"{file}: {problem}" for problem in shard_problems]
        digests.append(digest)
    return problems, shards.digest_of(digests)


def to_dtype(pixels: NDArray[Any], dtype: str | np.dtype[Any]) -> NDArray[Any]:
    """Convert pixels to the dtype of an output, clipped to its range. Integers are rounded half to even, never wrapped.

    Floats keep NaN and infinities. Returns the same array when no conversion is needed.

    >>> to_dtype(np.array([-3.0, 0.5, 1.5, 300.0]), "uint8")
    array([  0,   0,   2, 255], dtype=uint8)
    """
    target = np.dtype(dtype)
    if pixels.dtype == target or not pixels.size or target.kind == "c":
        return pixels.astype(target, copy=False)
    if pixels.dtype.kind == "c":
        raise ConfigError(
            f"the pixels are complex, and the output is {target}. Write their modulus, or a complex output."
        )
    if target.kind == "f":
        return _narrow(pixels, target)
    if pixels.dtype.kind == "f":
        return _round(pixels, target)
    low, high = _common_limits(pixels.dtype, target)
    clipped: NDArray[Any] = np.clip(pixels, low, high).astype(target)
    return clipped


def _narrow(pixels: NDArray[Any], target: np.dtype[Any]) -> NDArray[Any]:
    """Convert floats, clipped to the finite range of the type; infinities stay infinite."""
    with np.errstate(over="ignore"):
        floats: NDArray[Any] = pixels.astype(target)
    if np.can_cast(pixels.dtype, target):
        return floats
    over = np.isinf(floats) & np.isfinite(pixels)
    if over.any():
        floats[over] = np.copysign(np.finfo(target).max, floats[over])
    return floats


def _round(pixels: NDArray[Any], target: np.dtype[Any]) -> NDArray[Any]:
    # A narrow float cannot represent the limits of an integer type.
    wide = np.float64 if target.itemsize > 2 else np.float32
    rounded: NDArray[Any] = np.rint(pixels, dtype=np.promote_types(pixels.dtype, wide))
    if np.isnan(rounded.max()):
        raise InputError(
            f"a pixel is NaN, and the output is {target}, which has no NaN. "
            "Replace the NaN pixels, or write output.dtype: float32."
        )
    limits = np.iinfo(target)
    return np.clip(rounded, limits.min, limits.max, out=rounded).astype(target)


def _common_limits(source: np.dtype[Any], target: np.dtype[Any]) -> tuple[int, int]:
    if source.kind == "b":
        return 0, 1
    a, b = np.iinfo(target), np.iinfo(source)
    return max(a.min, b.min), min(a.max, b.max)


def halved(
    pixels: NDArray[Any], factor: Sequence[int], dtype: str | np.dtype[Any], nodata: float | None
) -> NDArray[Any]:
    """The part of the next level that pixels of an image cover, in its dtype; of bool by the majority, ties being False."""
    shape = tuple(-(-n // f) for n, f in zip(pixels.shape, factor, strict=True))
    halves = np.empty(shape, dtype)
    rounded = np.dtype("uint8" if halves.dtype == np.bool_ else dtype)

    def fill(part: Region) -> None:
        finer = tuple(slice(s.start * f, s.stop * f) for s, f in zip(part.slices, factor, strict=True))
        halves[part.slices] = halve_to(to_dtype(pixels[finer], dtype), factor, rounded, nodata)

    edges = tuple(HALVED_ROWS if f == 2 else 1 for f in factor)
    IO_THREADS.run_all(fill, (block.core for block in Grid(shape, edges, ((0, 0),) * len(shape))))
    return halves


def halve_to(
    pixels: NDArray[Any], factor: Sequence[int], dtype: str | np.dtype[Any], nodata: float | None
) -> NDArray[Any]:
    """Means as of :func:`halve`, in a dtype; ``nodata`` where no pixel was measured, and nowhere else.

    >>> halve_to(np.array([[-3, 3, 0, 0]], "int16"), (1, 2), "int16", 0)
    array([[1, 0]], dtype=int16)
    """
    means = halve(pixels, factor, nodata)
    if nodata is None:
        return to_dtype(means, dtype)
    empty = np.isnan(means)
    values = to_dtype(np.where(empty, 0, means), dtype)
    avoid_value(values, nodata)
    values[empty] = nodata
    return values


def _shards_of(
    path: str | OutputPath, layout: Layout, region: Region
) -> Iterator[tuple[OutputPath, LevelArray, tuple[int, ...]]]:
    """Path of each shard that a block writes, with its array and the shape of its part inside."""
    for number, array in enumerate(layout.arrays):
        region = coarser(region, layout.factor) if number else region
        folder = array.path(path)
        for name, inside in array.shards(region):
            yield folder / name, array, inside.shape


def _inspect_shard(
    file: OutputPath, form: shards.ShardFormat, shape: tuple[int, ...], thorough: bool | None
) -> tuple[list[str], bytes]:
    """The problems of a shard, and its digest if there are none: it comes with an object; of a file four bytes of each chunk are read."""
    try:
        with opened(file) as shard:
            size = shard.size
            if not thorough:
                tail = min(size, form.index_bytes + shards.DIGEST_BYTES * (thorough is None))
                end = shard.read(tail, size - tail)
                digest = shards.digest_of([end]) if thorough is None else shard.digest
                return shards.inspect_index(end, size, shard.read, form, shape, digest)
            content = shard.whole()
            if problems := list(shards.find_problems(content, form, shape)):
                return problems, b""
            return shards.inspect_index(content, size, lambda n, offset: content[offset : offset + n], form, shape)
    except GONE:
        return [ABSENT[0]], b""
    except OSError as error:
        return [f"the shard {UNREADABLE}: {error.strerror}"], b""
