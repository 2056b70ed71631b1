"""Reads regions of a Zarr array in a local directory with tensorstore, where that is installed.

It is for what :mod:`halotile.storage.sharded.local_reader` leaves aside: transposed chunks or F order, chains of
compressors, shards in shards. There it fetches a window in a part of zarr-python's time, the same bits.
Filters and codecs that it does not know, it leaves to zarr-python.
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
from halotile.storage.sharded.local_reader import refuse_lost_array

_DRIVERS = {"zarr.json": "zarr3", ".zarray": "zarr"}
_UNCHECKED = ("bz2", "gzip", "zlib")
"""Compressors of Zarr v2 whose checksum, which comes last, tensorstore does not read."""
_DAMAGE = ("DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "OUT_OF_RANGE")
"""How tensorstore's messages begin when bytes do not decode; others tell of the system."""


def open_tensor(
    folder: Path, shape: tuple[int, ...], dtype: np.dtype[np.generic], fill: Any
) -> TensorArray | None:
    """The array in ``folder``, where tensorstore is installed and takes it to be what zarr-python does.

    Parameters
    ----------
    folder : Path
        Directory with the array's ``zarr.json`` or ``.zarray``.
    shape : tuple of int
        Its shape in pixels.
    dtype : numpy dtype
        Type of a pixel.
    fill : scalar or None
        What a missing chunk reads as; None: zero.

    Returns
    -------
    TensorArray or None
        None: leave it to zarr-python.
    """
    native = dtype.newbyteorder("=")
    document = next((folder / name for name in _DRIVERS if (folder / name).is_file()), None)
    if document is None or native.kind not in "biuf" or not _usable():
        return None
    store = _opened(document)
    if store is None or (store.shape, store.dtype.numpy_dtype) != (shape, native):
        return None
    same_fill = _bits(store.fill_value, native) == _bits(fill, native)
    return TensorArray(document, store) if same_fill else None


def _bits(fill: Any, native: np.dtype[np.generic]) -> bytes:
    return np.asarray(0 if fill is None else fill, native).tobytes()


def _usable() -> bool:
    # tensorstore ends a forked child that uses what its parent has used.
    return importlib.util.find_spec("tensorstore") is not None and _first_process() == os.getpid()


@lru_cache
def _first_process() -> int:
    """The process that came here first; a forked child inherits its answer."""
    return os.getpid()


def _opened(document: Path) -> Any:
    """tensorstore's view of an array; None where it does not understand the metadata."""
    import tensorstore

    place = {"driver": "file", "path": f"{document.parent}/"}
    spec = {"driver": _DRIVERS[document.name], "kvstore": place}
    try:
        store = tensorstore.open(spec, open=True, read=True).result()
    except ValueError:
        return None
    compressor = store.spec().to_json().get("metadata", {}).get("compressor") or {}
    return None if compressor.get("id") in _UNCHECKED else store


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
        refuse_lost_array(self.document)
        return pixels
