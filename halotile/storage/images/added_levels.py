"""Levels added to an OME-Zarr image in place, level by level and shard by shard, in little memory.

They are written to a hidden folder of the group, which keeps them and a record of the image when the program is killed. When all are
complete and durable they are moved beside the other levels; the metadata that name them are replaced last.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.abc.buffer import Buffer
from zarr.storage import LocalStore

from halotile import errors
from halotile.errors import ConfigError, DamagedData, DiskRefused, InputError
from halotile.storage.arrays import Source, open_source
from halotile.storage.disk.durable import DISK, Disk, refusing_full
from halotile.storage.disk.place import ZARR_JSON, check_parents
from halotile.storage.formats.ome import first_image
from halotile.storage.formats.parts.ome_scale import coordinates
from halotile.storage.formats.zarr import ome_attributes, open_array, open_node
from halotile.storage.grid import Grid, Region
from halotile.storage.images.png import Tick
from halotile.storage.rim import Array, Readable
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.json_files import read_object
from halotile.storage.run_directory.object_claim import check_finished
from halotile.storage.sharded.layout import LevelArray, level_arrays, level_factor, possible_levels
from halotile.storage.sharded.ome_metadata import transformations
from halotile.storage.sharded.output import halved
from halotile.storage.sharded.shards import ShardFormat

VERSIONS = ("0.1", "0.2", "0.3", "0.4", "0.5")
_SHARDING = "sharding_indexed"
_ZATTRS, _ZARRAY, _ZMETADATA = ".zattrs", ".zarray", ".zmetadata"
LevelDocuments = Mapping[str, Mapping[str, Any]]

WORK = ".levels"  # folder in the group, with the files of a run directory, of levels that are being made
# Most bytes of pixels in a shard, and of those that are written at once, unless a single chunk is larger.
SHARD_BYTES = 8 * 2**20
PART_BYTES = 8 * 2**20  # most bytes of finer pixels that are averaged at once, unless a few chunks are larger


def add_levels(group: Path, tick: Tick = lambda _: None, disk: Disk = DISK) -> tuple[int, list[tuple[int, ...]]]:
    """Add the levels that an image lacks; what an interrupted call has written is kept.

    ``group``: group of an OME-Zarr image; ``tick``: progress callback, called with the finished fraction, 0 to 1; ``disk``: disk to write with.

    Returns
    -------
    int
        Number of levels that there are.
    list of tuple of int
        Shapes of the coarsest level that there was and of those that were added.
    """
    work = RunDirectory(group / WORK, disk)
    if not (image := _Image.read(group, disk)).missing and not work.path.exists():
        return image.outcome
    check_parents(work.path, "the folder of its levels")
    _check_unused(group)
    advice = "Free some space and run again: the levels so far are kept, hidden in the image."
    with refusing_full(f"the levels of {group} cannot be written", advice), work.lock():
        image = _Image.read(group, disk)
        try:
            if image.missing:
                image.make(work, tick)
        except (errors.InputUnreadable, errors.OutputRefused, DiskRefused):
            raise
        except errors.HalotileError:
            work.remove()  # with this image there is nothing to go on
            raise
        work.remove()
    return image.outcome


def _check_unused(group: Path) -> None:
    """Refuse the output of a run that is writing it, or that :func:`check_finished` refuses."""
    RunDirectory.beside(group).of_run().check_free()
    check_finished(group)


class _DurableStore(LocalStore):  # type: ignore[misc]
    """A store whose chunks are durable once they have their names."""

    disk = DISK

    def set_sync(self, key: str, value: Buffer) -> None:
        """Write a chunk."""
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        self.disk.write_file(path, [memoryview(value.as_numpy_array())])

    async def set(self, key: str, value: Buffer) -> None:
        """Write a chunk in a thread."""
        await asyncio.to_thread(self.set_sync, key, value)


@dataclass(frozen=True)
class _Image:
    """An image with its coarsest level, which the next ones are made of."""

    group: Path
    disk: Disk
    datasets: Sequence[Mapping[str, Any]]  # entry of each level in the attributes
    base: Source  # coarsest level that is there

    @classmethod
    def read(cls, group: Path, disk: Disk) -> _Image:
        attributes = ome_attributes(open_node(str(group)).attrs)
        image = first_image(attributes.get("multiscales"))
        if "image-label" in attributes:
            raise ConfigError(
                f"{group} is a label image: labels cannot be averaged. Make its levels with another program."
            )
        version, count = attributes.get("version", image.get("version", VERSIONS[-1])), len(image["datasets"])
        if version not in VERSIONS or not count:
            raise ConfigError(
                f"{group} is an OME-Zarr {version} with {count} levels, to which none can be added. "
                f"Write an image of version {VERSIONS[-2]} or {VERSIONS[-1]} with its finest level."
            )
        return cls(group, disk, image["datasets"], open_source(group, level=count - 1))

    @property
    def zarr_format(self) -> int:
        """Version of Zarr: 2 or 3."""
        return 3 if (self.group / ZARR_JSON).is_file() else 2

    @cached_property
    def factor(self) -> tuple[int, ...]:
        """Pixels along each axis that one of the next level covers."""
        return level_factor(self.base.axes, self.base.scale, self.base.units)

    @cached_property
    def missing(self) -> tuple[LevelArray, ...]:
        """The arrays to add, without names."""
        base = self.base
        shard = _small_shard(base.shards or base.chunks, base.chunks, base.dtype.itemsize)
        form = ShardFormat(shard, base.chunks, base.dtype.name, "none")
        count = possible_levels(base.shape, base.shape, self.factor)
        return tuple(level_arrays(base.shape, form, count, self.factor, base.shape))[1:]

    @property
    def outcome(self) -> tuple[int, list[tuple[int, ...]]]:
        """Number of levels with those that were missing, and shapes from the coarsest that there was."""
        shapes = [self.base.shape, *(array.shape for array in self.missing)]
        return len(self.datasets) + len(self.missing), shapes

    def make(self, work: RunDirectory, tick: Tick) -> None:
        """Write the levels, move them into the group, and name them in its metadata."""
        record = self._begin(work)
        named = zip(self.missing, record["names"], strict=True)
        arrays = [replace(array, name=name) for array, name in named]
        documents: dict[str, Any] = {}
        for number, array in enumerate(arrays, 1):
            files = self._documents(array, number)
            documents |= {f"{array.name}/{file}": document for file, document in files.items()}
        if not record["complete"]:
            self._check_room(work)
            self._write(work.state_path, arrays, documents, tick)
            work.write_job(record | {"complete": True})
        if change := self.base.change():
            raise InputError(f"{self.base.path} {change} while its levels were made, which are left out. Run again.")
        _check_unused(self.group)
        for array in arrays:
            if (made := work.state_path / array.name).exists():
                self.disk.move(made, self.group / array.name)
        for name, content in self._naming(record["names"], documents).items():
            # By way of the scratch folder: what a killed call leaves there is removed with it.
            self.disk.write_file(work.state_path / name, [content])
            self.disk.move(work.state_path / name, self.group / name)

    def _begin(self, work: RunDirectory) -> dict[str, Any]:
        """The record of the levels that are made; those of an image that has changed since are removed."""
        image = self.base.fingerprint()
        record = work.read_job() or {}
        if record.get("image") == image and len(record["names"]) == len(self.missing):
            return record
        work.forget_state()
        names = [entry["path"] for entry in self.datasets]
        for name in record.get("names", ()):
            if name not in names and (self.group / name).is_dir():
                self.disk.remove_tree(self.group / name)
        found = re.fullmatch(r"([^/]*?)\d+", self.datasets[-1]["path"])  # s1 follows s0
        free = (f"{found[1] if found else ''}{number}" for number in itertools.count(len(names)))
        free = (name for name in free if not os.path.lexists(self.group / name))
        record = {"image": image, "names": [*itertools.islice(free, len(self.missing))], "complete": False}
        work.write_job(record)
        return record

    def _check_room(self, work: RunDirectory) -> None:
        """Refuse levels for which there is no room, even without compression."""
        needed = sum(math.prod(array.shape) for array in self.missing) * self.base.dtype.itemsize
        there = sum(file.stat().st_size for file in work.state_path.rglob("*") if file.is_file())
        free = shutil.disk_usage(self.group).free
        if needed - there > free:
            raise DiskRefused(
                f"{self.group}: its levels take up to {needed - there:,} bytes, and {free:,} are free. Free some space, or move the image."
            )

    def _documents(self, array: LevelArray, number: int) -> dict[str, dict[str, Any]]:
        """The metadata files of a further level, by name: those of the coarsest level that is there, with another shape."""
        folder, shape, base = self.group / self.datasets[-1]["path"], list(array.shape), self.base
        files = (ZARR_JSON,) if self.zarr_format == 3 else (_ZARRAY, _ZATTRS)
        documents = {name: _read(folder / name) for name in files if (folder / name).is_file()}
        if self.zarr_format == 3:
            document = documents[ZARR_JSON]
            attributes = document.get("attributes", {})
            document["shape"] = shape
            document["chunk_grid"]["configuration"]["chunk_shape"] = list(array.form.shard)
            codecs = document["codecs"]
            if is_sharded := codecs[0]["name"] == _SHARDING:
                codecs[0]["configuration"]["chunk_shape"] = list(array.form.chunk)
            if json.dumps(codecs).count(f'"{_SHARDING}"') > is_sharded:
                raise ConfigError(
                    f"{folder} has shards within shards, or other codecs before them, which do not fit a smaller level. "
                    "Rewrite the image without them."
                )
        else:
            attributes = documents.get(_ZATTRS, {})
            documents[_ZARRAY] |= {"shape": shape, "chunks": list(array.form.shard)}
        if base.georeference and "spatial:transform" in attributes:
            rows, columns = (base.axes.index(axis) for axis in "yx")
            place = base.georeference.resampled(self.factor[rows] ** number, self.factor[columns] ** number)
            attributes |= place.attributes([shape[rows], shape[columns]])
        return documents

    def _naming(self, names: Sequence[str], documents: LevelDocuments) -> dict[str, bytes]:
        """The metadata files of the group that name further levels, whose metadata files these are, in the order of writing."""
        file = ZARR_JSON if self.zarr_format == 3 else _ZATTRS
        document = _read(self.group / file)
        attributes = document["attributes"] if self.zarr_format == 3 else document
        own, levels = attributes.get("halotile"), ome_attributes(attributes)["multiscales"][0]["datasets"]
        if isinstance(own, dict) and "block" in own:
            own.setdefault("levels", len(levels))
        levels += [self._entry(name, [f**n for f in self.factor]) for n, name in enumerate(names, 1)]
        files = {file: document}
        if self.zarr_format == 3 and (inline := document.get("consolidated_metadata")):
            inline["metadata"] |= {path.rpartition("/")[0]: added for path, added in documents.items()}
        if self.zarr_format == 2 and (self.group / _ZMETADATA).is_file():
            consolidated = _read(self.group / _ZMETADATA)
            consolidated["metadata"] |= {_ZATTRS: document, **documents}
            # First, because zarr takes the names of levels from the attributes and looks for them here.
            files = {_ZMETADATA: consolidated, **files}
        return {name: json.dumps(content, indent=2).encode() for name, content in files.items()}

    def _entry(self, name: str, covered: Sequence[int]) -> dict[str, Any]:
        """The entry of a level, whose pixels cover so many of the coarsest one that is there."""
        first, last, count = self.datasets[0], self.datasets[-1], len(covered)
        if "coordinateTransformations" not in last:
            return {"path": name}
        finest, base = coordinates({}, first, count), coordinates({}, last, count)
        # Many programs leave out that the first pixel of a coarse level begins where that of the finest one does.
        first_at = finest.position or (0.0,) * count
        places = zip(first_at, base.scale, finest.scale, strict=True)
        start = base.position or tuple(at + (coarse - fine) / 2 for at, coarse, fine in places)
        return {"path": name, "coordinateTransformations": transformations(base.scale, start, covered)}

    def _write(self, folder: Path, arrays: Sequence[LevelArray], documents: LevelDocuments, tick: Tick) -> None:
        """Write the levels, each from the one before."""
        for name, document in documents.items():
            self.disk.make_directory((folder / name).parent)
            self.disk.write_file(folder / name, [json.dumps(document, indent=2).encode()])
        finer: Readable = self.base
        total, done = sum(math.prod(array.shape) for array in arrays), 0
        for array in arrays:
            for pixels in self._write_level(folder, array, finer):
                done += pixels
                tick(done / total)
            finer = open_array(str(folder / array.name))
            for directory, _, _ in os.walk(folder / array.name, topdown=False):
                self.disk.sync_directory(Path(directory))

    def _write_level(self, folder: Path, array: LevelArray, finer: Readable) -> Iterator[int]:
        """Write the shards of a level that are not there; yields the number of pixels of each."""
        path = folder / array.name
        store = _DurableStore(path)
        store.disk = self.disk
        target: Any = zarr.open_array(store, mode="r+", zarr_format=self.zarr_format)
        present = open_array(str(path))
        edges = _grown(array.form.shard, array.shape, SHARD_BYTES // self.base.dtype.itemsize)
        for block in Grid(array.shape, edges, ((0, 0),) * len(edges)):
            files = (path / target.metadata.encode_chunk_key(index) for index in array.indices(block.core))
            if not (all(map(os.path.isfile, files)) and _is_readable(present, block.core)):
                target[block.core.slices] = self._means(finer, block.core, array.form)
            yield block.core.size

    def _means(self, finer: Readable, core: Region, form: ShardFormat) -> Array:
        """The pixels of a part of a level."""
        pixels, dtype = np.empty(core.shape, self.base.dtype), self.base.dtype
        edges = _part_edges(core.shape, form.chunk, self.factor, dtype.itemsize)
        for part in Grid(core.shape, edges, ((0, 0),) * len(edges)):
            covered = part.core.shift(core.start).scale(self.factor).clip(Region.whole(finer.shape))
            pixels[part.core.slices] = halved(finer.read(covered), self.factor, dtype, self.base.nodata)
        return pixels


def _small_shard(shard: Sequence[int], chunk: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Edges of a shard of as many chunks, or of fewer where it is large: it is encoded whole.

    >>> _small_shard((4096, 4096), (512, 512), 4), _small_shard((8192, 8192), (8192, 8192), 2)
    ((1024, 2048), (8192, 8192))
    """
    counts = [s // c for s, c in zip(shard, chunk, strict=True)]
    while max(counts) > 1 and math.prod(counts) * math.prod(chunk) * itemsize > SHARD_BYTES:
        axis = counts.index(max(counts))
        counts[axis] = -(-counts[axis] // 2)
    return tuple(n * c for n, c in zip(counts, chunk, strict=True))


def _part_edges(shape: Sequence[int], chunk: Sequence[int], factor: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Edges of the parts of a level that are averaged at once, from whole chunks of the finer one.

    >>> _part_edges((2048, 2048), (256, 256), (2, 2), 2), _part_edges((1, 75, 600), (1, 75, 75), (1, 2, 2), 1)
    ((512, 2048), (1, 75, 600))
    """
    edges = [c // f if c % f == 0 else c for c, f in zip(chunk, factor, strict=True)]
    return _grown(edges, shape, PART_BYTES // (itemsize * math.prod(factor)))


def _grown(edges: Sequence[int], shape: Sequence[int], most: int) -> tuple[int, ...]:
    """Edges of a part of so many pixels at most, a multiple of other edges along each axis, the last ones first."""
    grown = list(edges)
    for axis in reversed(range(len(grown))):
        grown[axis] *= max(1, min(-(-shape[axis] // grown[axis]), most // math.prod(grown)))
    return tuple(grown)


def _is_readable(present: Readable, region: Region) -> bool:
    """Return True where the shards of a region that an earlier call wrote are intact."""
    try:
        return bool(present.read(region).size)
    except DamagedData:
        return False


def _read(file: Path) -> dict[str, Any]:
    return read_object(file, "Restore it from its origin.") or {}
