"""Zarr v2 and v3 arrays: directories, .zip stores and URLs."""

import json
import math
import os
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from halotile.errors import DamagedData, InputError, InputUnreadable
from halotile.storage.disk.object_path import DENIED, credentials_fault, first_words, is_of_store, store_at
from halotile.storage.disk.place import ZARR_FILES, ZARR_JSON
from halotile.storage.formats.base import Header, Source, file_identity, listed, make_header, refuse_option
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.storage.run_directory.json_files import digest
from halotile.storage.sharded.local_reader import is_complete, lost_chunk, open_local, refuse_lost_array, split_region
from halotile.storage.spacing import read_georeference
from halotile.storage.stored_array import StoredArray

MOST_OBJECTS = 10_000  # objects that are listed, a thousand with each request: every worker does so
_SAMPLED_OBJECTS, _AT_ONCE = 64, 16  # chunks that are checked where not all can be, and requests at once


def object_tags(array: Any, url: str) -> list[list[Any]]:
    """Names, sizes and tags of the objects of an array at a URL: all of them, or some where there are more than :data:`MOST_OBJECTS`, or where
    they cannot be listed, as on a web server; none where only reading is allowed.
    """
    try:
        listed = [] if url.startswith("http") else _listed(array)
        objects = listed if 0 < len(listed) <= MOST_OBJECTS else _sampled(array)
    except Exception as error:
        if _is_denied(error):
            return []
        if not is_of_store(error) and not isinstance(error, OSError):
            raise
        raise InputUnreadable(f"the store does not answer: {first_words(error)}. Try again later.") from error
    return sorted([one["path"], one["size"], one["e_tag"] or str(one["last_modified"])] for one in objects)


def _is_denied(error: Exception) -> bool:
    return type(error).__name__ in DENIED


def _listed(array: Any) -> list[Any]:
    """The objects of an array, and one too many where there are more; none where listing is not allowed."""
    import obstore

    objects: list[Any] = []
    try:
        for page in obstore.list(array.store.store, f"{array.path}/" if array.path else None):
            objects += page
            if len(objects) > MOST_OBJECTS:
                break
    except Exception as error:
        if not _is_denied(error):
            raise
        return []
    return objects


def _sampled(array: Any) -> list[Any]:
    """The objects of the metadata and of chunks that are spread evenly."""
    counts = [-(-n // c) for n, c in zip(array.shape, array.shards or array.chunks, strict=True)]
    places = np.linspace(0, math.prod(counts) - 1, _SAMPLED_OBJECTS).astype(int)
    chunks = {array.metadata.encode_chunk_key(tuple(map(int, np.unravel_index(n, counts)))) for n in places}
    top = f"{array.path}/" if array.path else ""
    names = (ZARR_JSON if array.metadata.zarr_format == 3 else ".zarray", *sorted(chunks))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = pool.map(partial(_object_at, array.store.store), (f"{top}{name}" for name in names))
        return [one for one in found if one]


def _object_at(store: Any, name: str) -> Any:
    """The size and tag of an object; None for a chunk without pixels, which is not stored."""
    import obstore

    try:
        return obstore.head(store, name)
    except FileNotFoundError:
        return None


_DIMENSIONS = "_ARRAY_DIMENSIONS"  # attribute of xarray with the names of the axes
# Maximum number of chunk files whose modification times are checked for changes: a quarter of a second on a local disk.
_MOST_FILES = 65_536
_MOST_DIRECTORIES = 20_000  # maximum number of chunk directories that are checked when there are more files than that


def claims(path: Path) -> bool:
    """Return True for Zarr metadata at the root."""
    if path.is_dir():
        return any((path / name).is_file() for name in ZARR_FILES)
    return path.suffix == ".zip" and any(_zip_member(path, name) is not None for name in ZARR_FILES)


def open(path: str, *, level: int = 0, dataset: str | None = None, axes: str | None = None) -> Source:  # noqa: A001 - common to all formats
    """Open a Zarr array, or an array of a Zarr group: the named one, or the only one."""
    refuse_option("plain Zarr", "a Zarr array without OME metadata has one resolution", level=level)
    return StoredArray(path, "zarr", ZarrReader, dataset=dataset, axes=axes)


def open_array(path: str) -> Readable:
    """Open a Zarr array, or the only one of a group, with any numeric type and any axes."""
    return StoredArray(path, "zarr", ZarrReader, dataset=None, axes=None, image=False)


class ArrayReader:
    """Reads of an open Zarr array: by :mod:`halotile.storage.sharded.local_reader` where it supports the layout, else by zarr-python."""

    def __init__(self, path: str, array: Any) -> None:
        if not all((*array.chunks, *(array.shards or ()))):
            raise InputError("its chunks or shards have an edge of length 0. Write it again.")
        self.array = array
        self._path = path
        self._folder = Path(path, array.path) if Path(path).is_dir() else None
        # Reads in processes that have not opened the array, nor loaded zarr, which takes a third of a second and 8 MB.
        self.portable = open_local(self._folder, array.dtype, array.fill_value) if self._folder else None

    def read(self, region: Region) -> Pixels:
        if self.portable is not None:
            return self.portable.read(region)
        pixels: Pixels = self.array[region.slices]
        if self._folder is not None:
            self._refuse_empty(region, self._folder)
        if is_complete(self.array.attrs.asdict(), self.array.shape):
            self._refuse_lost(region, pixels)
        return pixels

    def _refuse_empty(self, region: Region, folder: Path) -> None:
        """Refuse what zarr-python reads as fill values: an array that is gone, and a shard without bytes."""
        refuse_lost_array(folder / (ZARR_JSON if self.array.metadata.zarr_format == 3 else ".zarray"))
        for index, _, _ in split_region(region, self.array.shards) if self.array.shards else ():
            shard = folder / self.array.metadata.encode_chunk_key(index)
            if shard.exists() and not shard.stat().st_size:
                raise DamagedData(f"chunk file {shard.relative_to(folder)} is empty")

    def _refuse_lost(self, region: Region, pixels: Pixels) -> None:
        """Raise where a chunk file or object of a complete array is missing; looked for where all its pixels have the fill value."""
        from zarr.core.sync import sync

        place, fill = self.array.store_path, self.array.fill_value
        for index, _, target in split_region(region, self.array.shards or self.array.chunks):
            key = self.array.metadata.encode_chunk_key(index)
            filled = np.full_like(pixels[target], fill)
            if np.array_equal(pixels[target], filled, equal_nan=True) and not sync((place / key).exists()):
                raise DamagedData(f"chunk file {key}: {lost_chunk(place / ZARR_JSON, fill)}")

    def make_header(self, **options: Any) -> Header:
        """The validated header of the array; ``options`` as of :func:`make_header`."""
        array, local = self.array, self.portable
        # Part of a chunk can be read without decoding the rest.
        options["mapped"] = local is not None and local.sharding is None and local.chain.raw
        shards = array.shards or array.chunks or None
        options |= {"chunks": array.chunks, "shards": shards, "attributes": array.attrs.asdict()}
        return make_header(array.shape, array.dtype, **options)

    def identity(self) -> dict[str, Any]:
        """Values that distinguish this array from another at the same path."""
        values: dict[str, Any] = {"array": self.array.path, "metadata": digest(self.array.metadata.to_dict())}
        if self._folder is not None:
            for name in (ZARR_JSON, ".zarray"):
                with suppress(FileNotFoundError):
                    values["mtime_ns"] = (self._folder / name).stat().st_mtime_ns
            return values | {"chunks_changed": digest(list(_chunk_times(self._folder, self.array)))}
        if "://" in self._path:
            return values | {"objects": digest(object_tags(self.array, self._path))}
        return values | file_identity(self._path)


class ZarrReader(ArrayReader):
    """An open Zarr array; with ``image=False`` it need not be an image."""

    def __init__(self, path: str, *, dataset: str | None, axes: str | None, image: bool = True) -> None:
        node = open_node(path)
        array = choose_array(node, dataset)
        super().__init__(path, array)
        header = self.make_header(
            requested=axes,
            named=_dimension_names(array),
            **_pixel_sizes(array),
            identity=self.identity(),
            image=image,
            fill=fill_of_xarray(array),
            coordinates=_coordinates(path, node, array) if image else (),
        )
        place = read_georeference(array.attrs.asdict(), header.rows_and_columns) if image else None
        self.header: Header = replace(header, georeference=place)


def _pixel_sizes(array: Any) -> dict[str, Any]:
    """Scale and units from halotile's own attribute, which is used for axes that OME-Zarr cannot represent."""
    attribute = array.attrs.get("halotile")
    try:
        scale, units = tuple(map(float, attribute["scale"])), tuple(attribute["units"])
    except (TypeError, KeyError, ValueError):
        return {}
    valid = len(scale) == len(units) == array.ndim and all(0 < size < math.inf for size in scale)
    return {"scale": scale, "units": units} if valid else {}


def _coordinates(path: str, node: Any, array: Any) -> list[str]:
    """Names of the arrays beside an array with the coordinates along its axes, which have their names."""
    group, folder = node, array.path.rpartition("/")[0]
    if _is_array(node):
        try:
            group = open_node(os.path.dirname(os.path.abspath(path))) if os.path.isdir(path) else None
        except InputError:  # the folder is no group
            group = None
    names = (name for name in _dimension_names(array) or () if isinstance(name, str))
    return [name for name in names if group is not None and _has_line(group, f"{folder}/{name}".strip("/"))]


def _has_line(group: Any, path: str) -> bool:
    """Return True for an array of one axis at a path inside a group."""
    try:
        found = group.get(path)
    except Exception:  # damaged metadata of a neighbour, say, which the image does not need
        return False
    return _is_array(found) and len(found.shape) == 1


def fill_of_xarray(array: Any) -> Any:
    """The fill value of an array of Zarr v2 that xarray wrote, or reads as its own: the ``_FillValue`` of the CF conventions; else None."""
    is_of_xarray = array.metadata.zarr_format == 2 and _DIMENSIONS in array.attrs
    return array.fill_value if is_of_xarray and array.dtype.kind != "b" else None


def _chunk_times(folder: Path, array: Any) -> Iterator[tuple[Any, ...]]:
    """Sizes and modification times of the chunk files, and modification times of their directories.

    Above a number of files only the directories are checked, which reveals chunks that were added, removed
    or replaced, but not overwritten in place.
    """
    counts = [-(-n // c) for n, c in zip(array.shape, array.shards or array.chunks, strict=True)]
    first = array.metadata.encode_chunk_key((0,) * array.ndim)
    top = folder / "c" if first.startswith("c/") else folder
    levels = first.removeprefix("c/").count("/")
    files = math.prod(counts) <= _MOST_FILES
    while not files and levels and math.prod(counts[:levels]) > _MOST_DIRECTORIES:
        levels -= 1
    if top.is_dir():
        yield from _times_below(str(top), levels, files)


def _times_below(folder: str, levels: int, files: bool) -> Iterator[tuple[Any, ...]]:
    yield os.path.basename(folder), os.stat(folder).st_mtime_ns
    if not levels and not files:
        return
    for entry in sorted(os.scandir(folder), key=attrgetter("name")):
        if entry.is_dir():
            if levels:
                yield from _times_below(entry.path, levels - 1, files)
        elif files and not entry.name.startswith("."):
            status = entry.stat()
            yield entry.name, status.st_size, status.st_mtime_ns


def open_node(path: str) -> Any:
    """The Zarr array or group at a path, read-only."""
    import zarr

    if fault := credentials_fault(path):
        raise InputError(f"the address {fault}.")
    try:
        # Metadata of both versions may exist.
        version = 3 if os.path.isfile(os.path.join(path, ZARR_JSON)) else None
        return zarr.open(_store(path), mode="r", zarr_format=version)
    except json.JSONDecodeError as error:
        raise DamagedData(f"its Zarr metadata are not JSON: {error}. Restore them from their origin.") from error
    except FileNotFoundError as error:
        raise InputError("no Zarr array or group is there. Write the path of an existing one.") from error
    except (ValueError, TypeError, KeyError, NotImplementedError) as error:  # raised by zarr for unusual metadata
        raise InputError(f"zarr cannot open it: {error}. Write it again with a supported type and codec.") from error
    except Exception as error:
        if not is_of_store(error):
            raise
        raise InputUnreadable(
            f"the store cannot be read: {first_words(error)}. Check the address, and its credentials in the environment."
        ) from error


def _store(path: str) -> Any:
    """The store at a path or URL."""
    from zarr.storage import LocalStore, ObjectStore, ZipStore

    if "://" in path:
        return ObjectStore(store_at(path), read_only=True)
    return LocalStore(path, read_only=True) if os.path.isdir(path) else ZipStore(path, mode="r")


def choose_array(node: Any, dataset: str | None) -> Any:
    """The requested array, or the only one."""
    if _is_array(node):
        if dataset:
            raise InputError(f"dataset is {dataset!r}, but the path is an array itself. Leave dataset out.")
        return node
    with suppress(KeyError, ValueError):  # ValueError: zarr refuses names such as "../other"
        if dataset and _is_array(array := node[dataset]):
            return array
    arrays = _arrays_inside(node)
    # Arrays at the top take precedence over those in nested groups.
    top = [name for name in arrays if "/" not in name] or arrays
    if dataset is None and len(top) == 1:
        return node[top[0]]
    if not arrays:
        raise InputError("the group holds no arrays at all. Write the path of another Zarr.")
    reason = f"no dataset was chosen, but the group holds {len(arrays)} arrays"
    reason = f"dataset is {dataset!r}, but the group has no such array" if dataset else reason
    raise InputError(f"{reason}. Write dataset: one of {listed(arrays)}.")


def _is_array(node: Any) -> bool:
    import zarr

    return isinstance(node, zarr.Array)


def _arrays_inside(group: Any) -> list[str]:
    """Paths of the arrays in a group and its nested groups."""
    with warnings.catch_warnings():
        # zarr warns of unrelated files beside the arrays, such as a file manager's.
        warnings.simplefilter("ignore")
        return sorted(name for name, node in group.members(max_depth=None) if _is_array(node))


def ome_attributes(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The OME-Zarr part of a node's attributes: under "ome" in 0.5, at the top in 0.4."""
    nested = attributes.get("ome")
    return nested if isinstance(nested, dict) else attributes


def read_document(path: Path, name: str) -> Any:
    """A JSON document at the root of a directory or .zip store; None when there is none."""
    try:
        text = (path / name).read_bytes() if path.is_dir() else _zip_member(path, name)
        return None if text is None else json.loads(text)
    except (FileNotFoundError, ValueError):
        return None


def _zip_member(path: Path, name: str) -> bytes | None:
    """The bytes of one member of a .zip file; None when there is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(name)
    except (KeyError, zipfile.BadZipFile):
        return None


def _dimension_names(array: Any) -> Sequence[str | None] | None:
    """The axis names of an array, from v3 metadata or xarray's attribute in v2."""
    names = getattr(array.metadata, "dimension_names", None) or array.attrs.get(_DIMENSIONS)
    return list(names) if names else None
