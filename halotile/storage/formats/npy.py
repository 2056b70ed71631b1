"""NumPy .npy files, memory-mapped."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np

from halotile.errors import DamagedData, InputError
from halotile.storage.formats.base import Source, file_identity, make_header, refuse_option
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.storage.stored_array import StoredArray

_MAGIC = b"\x93NUMPY"
_MOST_HEADER_BYTES = 2**16
"""Far more than any array of numbers has; a damaged header may name 4 GB."""
_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def claims(path: Path) -> bool:
    """Whether the file starts as a .npy file does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def open(path: str, *, level: int = 0, dataset: str | None = None, axes: str | None = None) -> Source:  # noqa: A001 - what every format has
    """The array in a .npy file."""
    refuse_option("npy", "a .npy file holds one array at one resolution", level=level, dataset=dataset)
    return StoredArray(path, "npy", NpyReader, axes=axes)


def open_numbers(path: str) -> Readable:
    """The array in a .npy file, of any numbers on any axes."""
    return StoredArray(path, "npy", NpyReader, axes=None, image=False)


class NpyReader:
    """An open .npy file: nothing is in memory but the pages that were touched.

    Without ``image`` it need not hold one.
    """

    def __init__(self, path: str, *, axes: str | None, image: bool = True) -> None:
        shape, fortran, dtype, offset = _read_header(path)
        self.header = make_header(shape, dtype, requested=axes, identity=file_identity(path), image=image)
        _refuse_truncated(path, offset + math.prod(shape) * dtype.itemsize)
        self.pixels = np.memmap(path, dtype, "r", offset, shape, "F" if fortran else "C")

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
        return np.array(self.pixels[region.slices], order="C")


def _read_header(path: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, whether in Fortran order, type, and where the pixels start."""
    with Path(path).open("rb") as whole:
        file = io.BytesIO(whole.read(_MOST_HEADER_BYTES))
        try:
            version = np.lib.format.read_magic(file)
            shape, fortran, dtype = _HEADER_READERS[version](file)
        except KeyError:
            raise InputError("this version of .npy holds only structured types. Convert it first.") from None
        except ValueError as error:
            raise DamagedData(f"the .npy header cannot be read: {error}. Restore the file.") from error
        return shape, fortran, dtype, file.tell()


def _refuse_truncated(path: str, needed_bytes: int) -> None:
    """Raise when the file is shorter than its header says."""
    size_bytes = Path(path).stat().st_size
    if size_bytes < needed_bytes:
        raise DamagedData(
            f"the file is cut short: it has {size_bytes} bytes and its header asks for {needed_bytes}. "
            "Copy it again from its origin."
        )
