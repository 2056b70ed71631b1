"""HDF5 files, which optional h5py reads and writes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halotile.errors import InputError, MissingPackage
from halotile.storage.run_directory.names import run_path
from halotile.storage.stored_array import read_error

SUFFIXES = (".cxi", ".h5", ".hdf5")
"""Ends of the names of results."""


def fault_of_name(path: str) -> str | None:
    """Return what is wrong with the name of a result, and what to write."""
    if path.endswith(SUFFIXES):
        return None
    return f"{path} does not end with {', '.join(SUFFIXES)}; write one of them"


def load_h5py() -> Any:
    """Return the module.

    Raises
    ------
    MissingPackage
        When it is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise MissingPackage(
            'a CXI file is read and written with h5py, which is not installed. Write: pip install "halotile[hdf5]"'
        ) from error
    return h5py


def check_there(path: str) -> None:
    """Refuse a path where nothing is, or nothing yet.

    Raises
    ------
    InputError
        With the path.
    """
    if not os.path.exists(path):
        raise InputError(f"there is no file {path}. Write the path of one that is there.")
    run = run_path(Path(path).absolute())
    if run.is_dir() and os.path.isfile(path) and not os.path.getsize(path):
        raise InputError(
            f"{path} is empty: the run in {run} has not written it yet. Wait for it, or go on with `recon-cli resume {shlex.quote(str(run))}`."
        )


@contextmanager
def opened(path: str) -> Iterator[Any]:
    """Open an HDF5 file for reading.

    Raises
    ------
    InputError, MissingPackage
        When it is none, or h5py is not installed.
    """
    check_there(path)
    h5py = load_h5py()
    if os.path.isfile(path) and not h5py.is_hdf5(path):
        raise InputError(f"{path} is no HDF5 file. Write the path of one.")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise read_error(path, error) from error
    with file:
        yield file
