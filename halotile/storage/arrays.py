"""Opens the array at a path, whatever its format."""

from __future__ import annotations

import difflib
import os
from functools import partial
from pathlib import Path
from typing import Any

from halotile import registry
from halotile.errors import DamagedData, HalotileError, InputError, InputUnreadable
from halotile.storage.disk.links import dead_link
from halotile.storage.formats.base import Source
from halotile.storage.rim import Readable
from halotile.storage.sharded.marks import MARKS
from halotile.storage.stored_array import refusal

__all__ = ["Source", "open_numbers", "open_source"]

_SUPPORTED = (
    "Zarr v2 and v3 arrays, OME-Zarr 0.4 and 0.5 groups, TIFF, BigTIFF and OME-TIFF, .npy, "
    'and HDF5 (with pip install "halotile[hdf5]")'
)


def open_source(
    path: str | os.PathLike[str], *, level: int = 0, dataset: str | None = None, axes: str | None = None
) -> Source:
    """The array at ``path``, ready to be read region by region.

    Parameters
    ----------
    path : str or path
        A Zarr or OME-Zarr directory or .zip, a TIFF, .npy or HDF5 file, or the URL of a Zarr, such as
        ``s3://bucket/picture.zarr``.
    level : int
        Resolution level of an OME-Zarr or of a pyramidal TIFF; 0 is the finest.
    dataset : str, optional
        Which array of a Zarr group or HDF5 file; which series (a number) of a TIFF.
    axes : str, optional
        One letter for each axis, such as ``"tcyx"``, over what the file says.

    Returns
    -------
    Source
        It has ``shape``, ``dtype``, ``axes``, ``chunks``, ``scale``, ``units`` and ``read(region)``, and is
        indexed with integers and slices.

    Raises
    ------
    InputError
        When nothing is there, no format knows it, or it cannot be used: complex pixels, an axis without
        pixels, a level that does not exist.
    DamagedData
        When a file is cut short, or is not what its format allows.
    InputUnreadable
        When the system does not give it.
    MissingPackage
        When an optional package is needed.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/a.npy", np.arange(12, dtype="uint16").reshape(3, 4))
    ...     source = open_source(f"{folder}/a.npy")
    ...     source.axes, source[1:, 1:3].tolist()
    (('y', 'x'), [[5, 6], [9, 10]])
    """
    text = os.path.expanduser(os.fspath(path))
    if level < 0:
        raise InputError(f"level is {level}: levels count from 0, the finest. Write 0 or more.")
    try:
        module = _format_of(text, dataset)
    except (HalotileError, MemoryError):
        raise
    except Exception as error:
        # Metadata that no library gets through, or a file that the system does not give.
        raise refusal(f"{text}: its format cannot be told", error) from error
    return _as_source(module.open(text, level=level, dataset=dataset, axes=axes))


def _format_of(text: str, dataset: str | None) -> Any:
    """The module of the format that stands at a path or URL."""
    if "://" in text:
        zarr = registry.find("formats", "zarr")
        return registry.find("formats", "ome") if dataset is None and zarr.holds_levels(text) else zarr
    place = Path(text)
    if not place.exists():
        raise InputError(_nothing_there(place))
    modules = (registry.find("formats", name) for name in registry.names("formats"))
    module = next((module for module in modules if module.claims(place)), None)
    if module is None:
        raise InputError(_nobody_reads(place))
    return module


def open_numbers(path: str | os.PathLike[str]) -> Readable:
    """The array at ``path``; in a Zarr or .npy it may hold what is no image: complex numbers, a single axis.

    Raises
    ------
    InputError
        When nothing is there, no format knows it, or it holds no numbers.
    """
    try:
        return open_source(path)
    except (DamagedData, InputUnreadable):
        raise
    except InputError:
        text = os.path.expanduser(os.fspath(path))
        for module in map(partial(registry.find, "formats"), ("zarr", "npy")):
            if "://" in text or module.claims(Path(text)):
                return _as_readable(module.open_numbers(text))
        raise


def _as_readable(opened: Readable) -> Readable:
    """As :func:`_as_source`."""
    return opened


def _as_source(opened: Source) -> Source:
    """What a format opened: modules found by name have no types of their own."""
    return opened


def _nothing_there(place: Path) -> str:
    """Says what stands nearest to a path where nothing is."""
    if link := dead_link(place):
        return f"{place}: nothing is there, for {link}. Mend it, or write the path of an existing file or directory."
    parent, missing = place.parent, place
    while not parent.exists():
        parent, missing = parent.parent, parent
    if parent != place.parent:
        return (
            f"{place}: nothing is there, for there is no {missing.name} in {parent.absolute()}. "
            "Write an existing path."
        )
    neighbours = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    near = difflib.get_close_matches(place.name, neighbours, n=1)
    hint = f"Did you mean {parent / near[0]}?" if near else "Write the path of an existing file or directory."
    return f"{place}: nothing is there. {hint}"


def _nobody_reads(place: Path) -> str:
    """Says what stands at a path that no format knows."""
    return f"{place}: {_what_stands_at(place)}, which no format here reads. Readable: {_SUPPORTED}."


def _what_stands_at(place: Path) -> str:
    """A file or directory in words."""
    if not place.is_dir():
        if place.stat().st_size == 0:
            return "an empty file"
        with place.open("rb") as file:
            return f"a file that begins with {file.read(8)!r}"
    entries = sorted(entry for entry in place.iterdir())
    stores = [e.name for e in entries if any((e / mark).exists() for mark in MARKS)]
    if stores:
        shown = ", ".join(stores[:5])
        return f"a directory without Zarr metadata of its own (inside it: {shown}; name one of these)"
    return f"a directory of {len(entries)} entries without Zarr metadata" if entries else "an empty directory"
