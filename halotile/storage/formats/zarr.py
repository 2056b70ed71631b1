"""Zarr v2 and v3 arrays: directories, .zip stores and URLs."""

from __future__ import annotations

import json
import math
import os
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import zarr
import zarr.storage

from halotile.errors import DamagedData, InputError, InputUnreadable, MissingPackage
from halotile.storage.formats.base import (
    Header,
    Source,
    file_identity,
    make_header,
    refuse_option,
)
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.storage.run_directory.checksummed_lines import digest
from halotile.storage.sharded.local_reader import LocalArray, open_local
from halotile.storage.sharded.marks import MARKS
from halotile.storage.sharded.tensorstore_reader import TensorArray, open_tensor
from halotile.storage.stored_array import StoredArray

_MOST_LISTED = 20
_MOST_FILES = 65_536
"""Chunk files whose own time is looked at to tell whether an array was changed: a quarter of a second on a local disk."""
_MOST_DIRECTORIES = 20_000
"""Directories of chunks that are looked at where the files are more."""


def claims(path: Path) -> bool:
    """Whether Zarr metadata stand at the root."""
    if path.is_dir():
        return any((path / mark).is_file() for mark in MARKS)
    return path.suffix == ".zip" and any(_zip_member(path, mark) is not None for mark in MARKS)


def open(path: str, *, level: int = 0, dataset: str | None = None, axes: str | None = None) -> Source:  # noqa: A001 - what every format has
    """A Zarr array, or an array of a Zarr group: the one named, or the only one."""
    refuse_option("plain Zarr", "a Zarr array without OME metadata has one resolution", level=level)
    return StoredArray(path, "zarr", ZarrReader, dataset=dataset, axes=axes)


def open_numbers(path: str) -> Readable:
    """A Zarr array of any numbers on any axes, or the only one of a group."""
    return StoredArray(path, "zarr", ZarrReader, dataset=None, axes=None, image=False)


class ZarrReader:
    """An open Zarr array; without ``image``, it need not be one."""

    def __init__(self, path: str, *, dataset: str | None, axes: str | None, image: bool = True) -> None:
        array = choose_array(open_node(path), dataset)
        self.pixels = ArrayPixels(path, array)
        self.header: Header = make_header(
            array.shape,
            array.dtype,
            requested=axes,
            named=_dimension_names(array),
            chunks=array.chunks,
            shards=array.shards or array.chunks,
            **_pixel_sizes(array),
            identity=self.pixels.identity(),
            mapped=self.pixels.mapped,
            image=image,
        )

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
        return self.pixels.read(region)


def _pixel_sizes(array: Any) -> dict[str, Any]:
    """Scale and units, where an output of ours keeps them because OME-Zarr has no room for its axes."""
    kept = array.attrs.get("halotile")
    try:
        scale, units = [float(size) for size in kept["scale"]], list(kept["units"])
    except (TypeError, KeyError, ValueError):
        return {}
    whole = len(scale) == len(units) == array.ndim and all(0 < size < math.inf for size in scale)
    return {"scale": scale, "units": units} if whole else {}


class ArrayPixels:
    """The pixels of an open Zarr array, read by the first that can.

    Those are :mod:`halotile.storage.sharded.local_reader`, :mod:`halotile.storage.sharded.tensorstore_reader` and zarr-python.
    """

    def __init__(self, path: str, array: Any) -> None:
        if not all((*array.chunks, *(array.shards or ()))):
            raise InputError("its chunks or shards hold no pixels: an edge of theirs is 0. Write it again.")
        self.array = array
        self._path = path
        self._folder = Path(path, array.path) if Path(path).is_dir() else None
        self.local = _open_local(self._folder, array) if self._folder else None

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
        if self.local is not None:
            return self.local.read(region)
        pixels: Pixels = self.array[region.slices]
        return pixels

    @property
    def mapped(self) -> bool:
        """Whether a part of a chunk is read without decoding the rest."""
        return isinstance(self.local, LocalArray) and self.local.sharding is None and self.local.chain.raw

    def identity(self) -> dict[str, Any]:
        """What tells this array from another at its path."""
        found: dict[str, Any] = {"array": self.array.path, "metadata": digest(self.array.metadata.to_dict())}
        for mark in ("zarr.json", ".zarray"):
            if self._folder is not None and (self._folder / mark).exists():
                found["mtime_ns"] = (self._folder / mark).stat().st_mtime_ns
        if self._folder is not None:
            found["chunks_changed"] = digest(list(_changes(self._folder, self.array)))
        return found if self._folder or "://" in self._path else {**found, **file_identity(self._path)}


def _open_local(folder: Path, array: Any) -> LocalArray | TensorArray | None:
    """The fastest reader of an array on this machine's disk; None: zarr-python."""
    fill = array.fill_value
    return open_local(folder, array.dtype, fill) or open_tensor(folder, array.shape, array.dtype, fill)


def _changes(folder: Path, array: Any) -> Iterator[tuple[Any, ...]]:
    """What changes when a chunk does: its file's size and time, and the time of its directory.

    Beyond so many files only the directories are looked at: they tell of chunks that came, went
    or were replaced, not of one that was written over in place.
    """
    counts = [-(-n // c) for n, c in zip(array.shape, array.shards or array.chunks, strict=True)]
    first = array.metadata.encode_chunk_key((0,) * array.ndim)
    top = folder / "c" if first.startswith("c/") else folder
    levels = first.removeprefix("c/").count("/")
    files = math.prod(counts) <= _MOST_FILES
    while not files and levels and math.prod(counts[:levels]) > _MOST_DIRECTORIES:
        levels -= 1
    if top.is_dir():
        yield from _changes_below(str(top), levels, files)


def _changes_below(folder: str, levels: int, files: bool) -> Iterator[tuple[Any, ...]]:
    yield os.path.basename(folder), os.stat(folder).st_mtime_ns
    if not levels and not files:
        return
    for entry in sorted(os.scandir(folder), key=attrgetter("name")):
        if entry.is_dir():
            if levels:
                yield from _changes_below(entry.path, levels - 1, files)
        elif files and not entry.name.startswith("."):
            found = entry.stat()
            yield entry.name, found.st_size, found.st_mtime_ns


def open_node(path: str) -> Any:
    """The Zarr array or group at a path, read-only.

    Raises
    ------
    InputError
        When there is none.
    DamagedData
        When its metadata cannot be read.
    """
    try:
        return zarr.open(_store(path), mode="r", zarr_format=_zarr_format(path))
    except json.JSONDecodeError as error:
        raise DamagedData(
            f"its Zarr metadata are not JSON: {error}. Restore them from their origin."
        ) from error
    except FileNotFoundError as error:
        raise InputError("no Zarr array or group is there. Write the path of an existing one.") from error
    except (ValueError, TypeError, KeyError, NotImplementedError) as error:  # zarr-python's, for odd metadata
        raise InputError(
            f"zarr cannot open it: {error}. Write it again with a supported type and codec."
        ) from error
    except Exception as error:
        if not _is_from_store(error):
            raise
        reason = " ".join(str(error).partition("Debug source")[0].split())
        raise InputUnreadable(
            f"the store does not give it: {reason}. Check the address, and its credentials in the environment."
        ) from error


def _is_from_store(error: Exception) -> bool:
    """Whether obstore, which need not be installed, raised this."""
    return any(kind.__module__.partition(".")[0] == "obstore" for kind in type(error).__mro__)


def _store(path: str) -> Any:
    """The store at a path or URL."""
    if "://" in path:
        options = {"client_options": {"allow_http": True}} if path.startswith("http://") else {}
        return zarr.storage.ObjectStore(_import_obstore().store.from_url(path, **options), read_only=True)
    if os.path.isdir(path):
        return zarr.storage.LocalStore(path, read_only=True)
    return zarr.storage.ZipStore(path, mode="r")


def _import_obstore() -> Any:
    try:
        import obstore.store
    except ImportError as error:
        raise MissingPackage(
            'a Zarr at a URL is read with obstore, which is not installed. Write: pip install "halotile[s3]"'
        ) from error
    return obstore


def _zarr_format(path: str) -> int | None:
    """The version to read where both may stand side by side; None: let zarr look."""
    return 3 if os.path.isfile(os.path.join(path, "zarr.json")) else None


def choose_array(node: Any, dataset: str | None) -> Any:
    """The array that is meant."""
    if isinstance(node, zarr.Array):
        if dataset:
            raise InputError(
                f"dataset is {dataset!r}, but an array stands at the path itself. Leave dataset out."
            )
        return node
    found = _member(node, dataset) if dataset else None
    if isinstance(found, zarr.Array):
        return found
    arrays = _arrays_inside(node)
    # An array at the top goes before those in groups inside.
    picked = [name for name in arrays if "/" not in name] or arrays
    if dataset is None and len(picked) == 1:
        return node[picked[0]]
    if not arrays:
        raise InputError("the group holds no arrays at all. Write the path of another Zarr.")
    if dataset:
        requested = f"dataset is {dataset!r}, but the group has no such array"
    else:
        requested = f"the group holds {len(arrays)} arrays: which one is meant is not clear"
    listed = ", ".join(arrays[:_MOST_LISTED]) + (", ..." if len(arrays) > _MOST_LISTED else "")
    raise InputError(f"{requested}. Write dataset: one of {listed}.")


def _member(group: Any, name: str) -> Any:
    """What a group holds under a name; None where the name leads nowhere."""
    try:
        return group[name]
    except (KeyError, ValueError):  # ValueError: zarr refuses names such as "../other"
        return None


def _arrays_inside(group: Any) -> list[str]:
    """Paths of the arrays in a group and in the groups inside it."""
    with warnings.catch_warnings():
        # Files beside the arrays, such as a file manager's, are nobody's business here.
        warnings.simplefilter("ignore")
        return sorted(name for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array))


def ome_attributes(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The OME-Zarr part of a node's attributes: under "ome" in 0.5, at the top in 0.4."""
    nested = attributes.get("ome")
    return nested if isinstance(nested, dict) else attributes


def holds_levels(path: str) -> bool:
    """Whether the Zarr at a URL has OME-Zarr attributes that name its levels."""
    try:
        return bool(ome_attributes(open_node(path).attrs).get("multiscales"))
    except InputError as error:
        raise type(error)(f"{path}: {error}") from error


def read_document(path: Path, name: str) -> Any:
    """A JSON document at the root of a directory or .zip store; None where there is none."""
    try:
        text = (path / name).read_bytes() if path.is_dir() else _zip_member(path, name)
        return None if text is None else json.loads(text)
    except (FileNotFoundError, ValueError):
        return None


def _zip_member(path: Path, name: str) -> bytes | None:
    """The bytes of one member of a .zip file; None where there is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(name)
    except (KeyError, zipfile.BadZipFile):
        return None


def _dimension_names(array: Any) -> Sequence[str | None] | None:
    """What the array calls its axes: v3 metadata, or xarray's attribute in v2."""
    names = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS")
    return list(names) if names else None
