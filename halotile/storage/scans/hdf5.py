"""HDF5 files, which optional h5py reads and writes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halotile.errors import HalotileError, InputError
from halotile.registry import optional
from halotile.storage.formats.parts.hdf5_files import other_files
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.stored_array import read_error

SUFFIXES = (".cxi", ".h5", ".hdf5")
"""Ends of the names of results."""


def fault_of_name(path: str) -> str | None:
    """Return what is wrong with the name of a result, and what to write."""
    if path.endswith(SUFFIXES):
        return None
    return f"{path} does not end with {', '.join(SUFFIXES)}; write one of them"


def load_h5py() -> Any:
    """Return the module."""
    return optional("a CXI file is read and written with h5py", "h5py", '"halotile[hdf5]"')


def check_there(path: str) -> None:
    """Refuse a path where nothing is, or nothing yet."""
    if not os.path.exists(path):
        raise InputError(f"there is no file {path}. Write the path of one that is there.")
    run = RunDirectory.beside(Path(path).absolute()).path
    if run.is_dir() and os.path.isfile(path) and not os.path.getsize(path):
        raise InputError(
            f"{path} is empty: the run in {run} has not written it yet. Wait for it, or go on with `recon-cli resume {shlex.quote(str(run))}`."
        )


@contextmanager
def opened(path: str) -> Iterator[Any]:
    """Open an HDF5 file for reading."""
    check_there(path)
    h5py = load_h5py()
    if os.path.isfile(path) and not h5py.is_hdf5(path):
        raise InputError(f"{path} is no HDF5 file. Write the path of one.")
    with reading(path):
        file = h5py.File(path, "r")
    with file:
        yield file


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Convert everything that h5py, zarr or NumPy raise for the contents of a file."""
    try:
        yield
    except (HalotileError, MemoryError):
        raise
    except Exception as error:
        raise read_error(f"{path}: it cannot be read", error) from error


def dataset_in(file: Any, *names: str, kinds: str = "biuf", ndim: int | None = None, tail: tuple[int, ...] = ()) -> Any:
    """The first dataset that an HDF5 file or a Zarr group has under some names; None where there is none.

    ``kinds``: kinds of NumPy types that it may have; empty: any; ``ndim``: number of its axes; ``tail``: lengths of the last ones.
    """
    is_hdf5 = hasattr(file, "filename")
    path = os.path.abspath(file.filename) if is_hdf5 else file.store_path
    for name in names:
        found = file.get(name)  # None also for a link that leads nowhere
        if found is None:
            link = file.get(name, getlink=True) if is_hdf5 and name in file else None
            if missing := getattr(link, "filename", None):
                raise InputError(f"{path}: {name} is in another file, {missing}, which cannot be opened.")
            continue
        shape = getattr(found, "shape", None)
        right = shape is not None and ndim in (None, len(shape)) and shape[len(shape) - len(tail) :] == tail
        if not right or (kinds and found.dtype.kind not in kinds):
            what = "it is a group, or empty" if shape is None else f"it has {found.dtype}, {list(shape)}"
            lengths = ", ".join(["n"] * ((ndim or 0) - len(tail)) + [str(length) for length in tail])
            axes = "" if ndim is None else f" of shape [{lengths}]"
            raise InputError(f"{path}: {name} is no array of numbers{axes}: {what}.")
        if is_hdf5 and (found.is_virtual or found.external):
            other_files(found.file, os.path.abspath(found.file.filename), found.name)
        return found
    return None
