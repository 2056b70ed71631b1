"""Reading of regions of a Zarr array in a local directory with tensorstore, if it is installed.

It serves layouts that :mod:`halotile.storage.sharded.local_reader` does not support: transposed chunks or F order, chains of
compressors, nested shards. It reads the same bits in a fraction of zarr-python's time.
zarr-python reads arrays with other filters and codecs.
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
"""Compressors of Zarr v2 whose trailing checksum tensorstore does not read."""
_DAMAGE = ("DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "OUT_OF_RANGE")
"""Prefixes of tensorstore's messages for bytes that cannot be decoded; others are system errors."""


def open_tensor(
    folder: Path, shape: tuple[int, ...], dtype: np.dtype[np.generic], fill: Any
) -> TensorArray | None:
    """Open the array in ``folder`` if tensorstore is installed and agrees with zarr-python on shape, type and fill value.

    Parameters
    ----------
    folder : Path
        Directory with the array's ``zarr.json`` or ``.zarray``.
    shape : tuple of int
        Its shape in pixels.
    dtype : numpy dtype
        Type of a pixel.
    fill : scalar or None
        Value of missing chunks; None: zero.

    Returns
    -------
    TensorArray or None
        None: use zarr-python.
    """
    native = dtype.newbyteorder("=")
    document = next((folder / name for name in _DRIVERS if (folder / name).is_file()), None)
    if document is None or native.kind not in "biuf" or not _usable():
        return None
    store = _open(document)
    if store is None or (store.shape, store.dtype.numpy_dtype) != (shape, native):
        return None
    same_fill = _bits(store.fill_value, native) == _bits(fill, native)
    return TensorArray(document, store) if same_fill else None


def _bits(fill: Any, native: np.dtype[np.generic]) -> bytes:
    return np.asarray(0 if fill is None else fill, native).tobytes()


def _usable() -> bool:
    # tensorstore aborts a forked child that uses it after its parent did.
    return importlib.util.find_spec("tensorstore") is not None and _first_process() == os.getpid()


@lru_cache
def _first_process() -> int:
    """Number of the first process that called this; a forked child inherits the cached value."""
    return os.getpid()


def _open(document: Path) -> Any:
    """tensorstore's view of an array; None when it does not support the metadata."""
    import tensorstore

    kvstore = {"driver": "file", "path": f"{document.parent}/"}
    spec = {"driver": _DRIVERS[document.name], "kvstore": kvstore}
    try:
        store = tensorstore.open(spec, open=True, read=True).result()
    except ValueError:
        return None
    compressor = store.spec().to_json().get("metadata", {}).get("compressor") or {}
    return None if compressor.get("id") in _UNCHECKED else store


@dataclass(frozen=True)
class TensorArray:
    """A Zarr array that is read with tensorstore."""

    document: Path
    store: Any

    def read(self, region: Region) -> Pixels:
        """The pixels of a region inside the array.

        Raises
        ------
        DamagedData
            When a file cannot be decoded, with its name.
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
