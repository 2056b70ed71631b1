"""Datasets in HDF5 files."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from halotile.errors import DamagedData, InputError
from halotile.registry import optional
from halotile.storage.formats.base import FILL_OF_NETCDF, Source, file_identity, make_header, refuse_option, starts_with
from halotile.storage.formats.parts.hdf5_files import other_files
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels
from halotile.storage.stored_array import StoredArray

_MAGIC = b"\x89HDF\r\n\x1a\n"
_CHECKSUM_BYTES = 4
_NO_VARIABLE = b"This is a netCDF dimension but not a netCDF variable"


def claims(path: Path) -> bool:
    """Return True for an HDF5 signature at the start, or after a user block of 512, 1024, ... bytes."""
    return starts_with(path, _MAGIC, offsets=(0, 512, 1024, 2048, 4096))


def open(path: str, *, level: int = 0, dataset: str | None = None, axes: str | None = None) -> Source:  # noqa: A001 - common to all formats
    """Open a dataset of an HDF5 file: the named one, or the only one with two or more axes."""
    refuse_option("hdf5", "an HDF5 dataset has one resolution (name another dataset instead)", level=level)
    return StoredArray(path, "hdf5", Hdf5Reader, dataset=dataset, axes=axes)


class Hdf5Reader:
    """An open HDF5 file, which h5py reads in one thread at a time."""

    def __init__(self, path: str, *, dataset: str | None, axes: str | None) -> None:
        h5py = optional("an HDF5 file is read with h5py", "h5py", '"halotile[hdf5]"')
        self._file = h5py.File(path, "r")
        name, pixels = _choose(h5py, self._file, dataset)
        _refuse_short_chunks(pixels)
        is_float = pixels.dtype.kind == "f"
        self.header = make_header(
            pixels.shape,
            pixels.dtype,
            requested=axes,
            named=[_axis_name(dimension) for dimension in pixels.dims],
            chunks=pixels.chunks,
            attributes=pixels.attrs,
            fill=FILL_OF_NETCDF if is_float and float(pixels.fillvalue) == FILL_OF_NETCDF else None,
            coordinates=[*filter(None, map(_coordinate, pixels.dims))],
            identity={
                # Of a link, this is the name of its target.
                "dataset": os.fsdecode(pixels.name),
                **file_identity(path, other_files(self._file, path, name)),
            },
        )
        # A new dataset object, because one whose chunks were queried keeps its creation properties open, and HDF5 crashes on
        # those of a virtual dataset when a process ends while a thread still has them.
        self.pixels = h5py.Dataset(pixels.id)

    def read(self, region: Region) -> Pixels:
        pixels: Pixels = self.pixels[region.slices]
        return pixels


def _choose(h5py: Any, file: Any, dataset: str | None) -> tuple[str, Any]:
    """Name and node of the requested dataset, or of the only one."""
    if dataset is not None:
        node = file.get(dataset)
        if isinstance(node, h5py.Dataset):
            return dataset, node
        raise InputError(
            f"dataset is {dataset!r}, but the file has no such dataset. {_listed(_datasets(h5py, file) | _linked_datasets(h5py, file))}"
        )
    # Links come second, because they often name a dataset of the same file again.
    for datasets in (_datasets(h5py, file), _linked_datasets(h5py, file)):
        images = {name: d for name, d in datasets.items() if len(d.shape or ()) >= 2}
        if len(images) == 1:
            return next(iter(images.items()))
        if images:
            break
    raise InputError(
        f"no dataset was chosen, but the file holds {len(images)} datasets with two or more axes. {_listed(images)}"
    )


def _coordinate(dimension: Any) -> str:
    """The name of the dimension scale with the coordinates along an axis; empty for the scale of netCDF-4 without any."""
    with suppress(RuntimeError, KeyError, ValueError):  # as below
        if len(dimension) and not os.fsencode(dimension[0].attrs.get("NAME", "")).startswith(_NO_VARIABLE):
            return os.fsdecode(dimension[0].name).rpartition("/")[2]
    return ""


def _axis_name(dimension: Any) -> str:
    """The label of an axis, or else the name of its dimension scale, which is that of the dimension in netCDF-4."""
    name = dimension.label
    # The scale was deleted, or is in the file that this was copied from.
    with suppress(RuntimeError, KeyError, ValueError):
        name = name or (dimension[0].name if len(dimension) else None)
    return os.fsdecode(name or "").rpartition("/")[2]


def _refuse_short_chunks(pixels: Any) -> None:
    """Raise for a chunk that is shorter than its Fletcher-32 checksum, beyond which HDF5 would read and crash."""
    if not pixels.fletcher32:
        return
    sizes: list[int] = []
    pixels.id.chunk_iter(lambda chunk: sizes.append(chunk.size))
    if min(sizes, default=_CHECKSUM_BYTES) < _CHECKSUM_BYTES:
        raise DamagedData("a chunk is shorter than its checksum. Copy the file again from its origin.")


def _datasets(h5py: Any, file: Any) -> dict[str, Any]:
    """Every dataset that is stored in the file itself, by name."""
    datasets: dict[str, Any] = {}
    file.visititems(datasets.__setitem__)
    return {name: node for name, node in datasets.items() if isinstance(node, h5py.Dataset)}


def _linked_datasets(h5py: Any, file: Any) -> dict[str, Any]:
    """Every dataset that a soft or external link leads to, by the name of the link."""
    datasets: dict[str, Any] = {}

    def visit(prefix: str, node: Any) -> None:
        for key in node if isinstance(node, h5py.Group) else ():
            if isinstance(node.get(key, getlink=True), h5py.SoftLink | h5py.ExternalLink):
                with suppress(KeyError, OSError):  # a broken link
                    if isinstance(target := node[key], h5py.Dataset):
                        datasets[f"{prefix}{key}"] = target

    visit("", file)
    file.visititems(lambda name, node: visit(f"{name}/", node))
    return datasets


def _listed(datasets: Mapping[str, Any]) -> str:
    """The part of an error message that lists datasets."""
    shown = [f"{name} {d.dtype.name} {d.shape}" for name, d in datasets.items()]
    return f"Write dataset: one of {'; '.join(shown)}." if shown else "It holds no datasets at all."
