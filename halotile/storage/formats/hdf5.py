"""Datasets in HDF5 files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from halotile.errors import DamagedData, InputError, MissingPackage
from halotile.storage.formats._hdf5_files import check_raw_files, other_files
from halotile.storage.formats.base import Source, file_identity, identity_of, make_header, refuse_option
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels
from halotile.storage.stored_array import StoredArray

_MAGIC = b"\x89HDF\r\n\x1a\n"
_CHECKSUM_BYTES = 4


def claims(path: Path) -> bool:
    """Whether an HDF5 signature stands at the start, or behind a user block of 512, 1024, ... bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        for offset in (0, 512, 1024, 2048, 4096):
            file.seek(offset)
            if file.read(len(_MAGIC)) == _MAGIC:
                return True
    return False


def open(path: str, *, level: int = 0, dataset: str | None = None, axes: str | None = None) -> Source:  # noqa: A001 - what every format has
    """A dataset of an HDF5 file: the one named, or the only one with two or more axes."""
    refuse_option("hdf5", "an HDF5 dataset has one resolution (name another dataset instead)", level=level)
    return StoredArray(path, "hdf5", Hdf5Reader, dataset=dataset, axes=axes)


class Hdf5Reader:
    """An open HDF5 file. h5py lets one thread in at a time."""

    def __init__(self, path: str, *, dataset: str | None, axes: str | None) -> None:
        h5py = _import_h5py()
        self._file = h5py.File(path, "r")
        name, pixels = _choose(h5py, self._file, dataset)
        _refuse_short_chunks(pixels)
        check_raw_files(pixels, path)
        self.header = make_header(
            pixels.shape,
            pixels.dtype,
            requested=axes,
            named=[dimension.label for dimension in pixels.dims],
            chunks=pixels.chunks,
            identity={
                "dataset": os.fsdecode(pixels.name),
                **file_identity(path),
                # A link has the name of its place, its target that in the other file.
                **identity_of(other_files(self._file, path, name)),
            },
        )
        # One that was asked for its chunks keeps the properties it was made with open. HDF5 crashes over those of a virtual
        # dataset when a process ends while some thread still has them.
        self.pixels = h5py.Dataset(pixels.id)

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
        pixels: Pixels = self.pixels[region.slices]
        return pixels


def _import_h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise MissingPackage(
            'an HDF5 file is read with h5py, which is not installed. Write: pip install "halotile[hdf5]"'
        ) from error
    return h5py


def _choose(h5py: Any, file: Any, dataset: str | None) -> tuple[str, Any]:
    """The dataset that is meant, by its name in this file."""
    if dataset is not None:
        found = file.get(dataset)
        if isinstance(found, h5py.Dataset):
            return dataset, found
        raise InputError(f"dataset is {dataset!r}, but the file has no such dataset. {_listed(h5py, file)}")
    # Links often name a dataset of the file once more.
    for datasets in (_datasets(h5py, file), _linked(h5py, file)):
        images = {name: d for name, d in datasets.items() if len(d.shape or ()) >= 2}
        if len(images) == 1:
            return next(iter(images.items()))
        if images:
            break
    raise InputError(
        f"the file holds {len(images)} datasets with two or more axes: which one is meant is not clear. "
        + _listed(h5py, file)
    )


def _refuse_short_chunks(pixels: Any) -> None:
    """Raise for a chunk that is shorter than its Fletcher-32: HDF5 would read past it, and end the process."""
    if not pixels.fletcher32:
        return
    sizes: list[int] = []
    pixels.id.chunk_iter(lambda chunk: sizes.append(chunk.size))
    if min(sizes, default=_CHECKSUM_BYTES) < _CHECKSUM_BYTES:
        raise DamagedData("a chunk is shorter than its checksum. Copy the file again from its origin.")


def _datasets(h5py: Any, file: Any) -> dict[str, Any]:
    """Every dataset that is stored in the file itself."""
    found: dict[str, Any] = {}
    file.visititems(lambda name, node: found.update({name: node}) if isinstance(node, h5py.Dataset) else None)
    return found


def _linked(h5py: Any, file: Any) -> dict[str, Any]:
    """Every dataset that a soft link or one to another file leads to, by the name of the link."""
    found: dict[str, Any] = {}

    def look(place: str, node: Any) -> None:
        for key in node if isinstance(node, h5py.Group) else ():
            if isinstance(node.get(key, getlink=True), h5py.SoftLink | h5py.ExternalLink):
                with suppress(KeyError, OSError):  # it leads nowhere
                    if isinstance(target := node[key], h5py.Dataset):
                        found[f"{place}{key}"] = target

    look("", file)
    file.visititems(lambda name, node: look(f"{name}/", node))
    return found


def _listed(h5py: Any, file: Any) -> str:
    """The datasets in words."""
    datasets = _datasets(h5py, file) | _linked(h5py, file)
    shown = [f"{name} {d.dtype} {d.shape}" for name, d in datasets.items()]
    return f"Write dataset: one of {'; '.join(shown)}." if shown else "It holds no datasets at all."
