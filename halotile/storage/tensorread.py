"""Reads regions of a Zarr v3 array in a local directory with tensorstore, where that is installed.

It is for what :mod:`halotile.storage.localread` leaves aside (transposed chunks, chains of compressors, shards
in shards): there it fetches a window in a part of zarr-python's time, the same bits. What remains of Zarr v2,
which is F order and bz2, gains nothing, and filters it does not read.
"""

from __future__ import annotations

import errno
import importlib.util
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from halotile.errors import DamagedData
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels

_DOCUMENT = "zarr.json"
_DAMAGE = ("DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "OUT_OF_RANGE")
"""How tensorstore's messages begin when bytes do not decode; others tell of the system."""


def open_tensor(
    folder: Path, shape: tuple[int, ...], dtype: np.dtype[np.generic], fill: Any
) -> TensorArray | None:
    """The array in ``folder``, where tensorstore is installed and takes it to be what zarr-python does.

    Parameters
    ----------
    folder : Path
        Directory with the array's ``zarr.json``.
    shape : tuple of int
        Its shape in pixels.
    dtype : numpy dtype
        Type of a pixel.
    fill : scalar
        What a missing chunk reads as.

    Returns
    -------
    TensorArray or None
        None: leave it to zarr-python.
    """
    native = dtype.newbyteorder("=")
    if not (folder / _DOCUMENT).is_file() or native.kind not in "biuf" or not _usable():
        return None
    store = _opened(folder)
    if store is None or store.shape != shape or store.dtype.numpy_dtype != native:
        return None
    if np.asarray(store.fill_value, native).tobytes() != np.asarray(fill, native).tobytes():
        return None
    return TensorArray(folder / _DOCUMENT, store)


def _usable() -> bool:
    # tensorstore ends a forked child that uses what its parent has used.
    return importlib.util.find_spec("tensorstore") is not None and _first_process() == os.getpid()


@lru_cache
def _first_process() -> int:
    """The process that came here first; a forked child inherits its answer."""
    return os.getpid()


def _opened(folder: Path) -> Any:
    """tensorstore's view of an array; None where it does not understand the metadata."""
    import tensorstore

    place = {"driver": "file", "path": f"{folder}/"}
    try:
        return tensorstore.open({"driver": "zarr3", "kvstore": place}, open=True, read=True).result()
    except ValueError:
        return None


@dataclass(frozen=True)
class TensorArray:
    """A Zarr array that tensorstore reads."""

    document: Path
    store: Any

    def read(self, region: Region) -> Pixels:
        """The pixels of a region inside the array.

        Raises
        ------
        DamagedData
            With the file, when what it holds does not decode.
        """
        try:
            pixels: Pixels = self.store[region.slices].read().result()
        except ValueError as error:
            message = str(error)
            if not message.startswith(_DAMAGE):
                raise OSError(errno.EIO, message) from error
            raise DamagedData(message.partition(": ")[2] or message) from error
        # A missing chunk is fill value; but a disk that went away is not a picture of fill value.
        if not self.document.exists():
            raise DamagedData(f"{self.document} is gone, so a missing file means nothing")
        return pixels
