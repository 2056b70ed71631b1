"""NumPy .npy files, memory-mapped."""

import io
import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from halotile.errors import DamagedData, InputError
from halotile.storage.formats.base import Source, file_identity, make_header, refuse_option, starts_with
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.storage.stored_array import StoredArray

_MAGIC = b"\x93NUMPY"
_MOST_HEADER_BYTES = 2**16  # limit far above any numeric array's header; a damaged header may claim 4 GB
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def claims(path: Path) -> bool:
    """Return True for a .npy signature at the start."""
    return starts_with(path, _MAGIC)


def open(path: str, *, level: int = 0, dataset: str | None = None, axes: str | None = None) -> Source:  # noqa: A001 - common to all formats
    """Open the array in a .npy file."""
    refuse_option("npy", "a .npy file holds one array at one resolution", level=level, dataset=dataset)
    return StoredArray(path, "npy", NpyReader, axes=axes)


def open_array(path: str) -> Readable:
    """Open the array in a .npy file, with any numeric type and any axes."""
    return StoredArray(path, "npy", NpyReader, axes=None, image=False)


class NpyReader:
    """A memory-mapped .npy file; with ``image=False`` the array need not be an image."""

    def __init__(self, path: str, *, axes: str | None, image: bool = True) -> None:
        shape, fortran, dtype, offset = _read_header(path)
        self.header = make_header(shape, dtype, requested=axes, identity=file_identity(path), image=image)
        self._needed_bytes = offset + math.prod(shape) * dtype.itemsize
        with Path(path).open("rb") as file:
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._check_size()
        self.pixels: Pixels = np.ndarray(shape, dtype, self._mapped, offset, order="F" if fortran else "C")

    def read(self, region: Region) -> Pixels:
        self._check_size()
        return np.array(self.pixels[region.slices], order="C")

    def _check_size(self) -> None:
        """Refuse a file that is cut short, before or since: pixels that are mapped and no longer there would end the process."""
        size_bytes = self._mapped.size()
        if size_bytes < self._needed_bytes:
            raise DamagedData(
                f"the file is cut short: it has {size_bytes} bytes and its header asks for {self._needed_bytes}. "
                "Copy it again from its origin."
            )


def _read_header(path: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, True for Fortran order, type, and offset of the pixels."""
    with Path(path).open("rb") as whole:
        file = io.BytesIO(whole.read(_MOST_HEADER_BYTES))
        try:
            version = np.lib.format.read_magic(file)
            shape, fortran, dtype = _READERS[version](file)
        except KeyError:
            raise InputError("this version of .npy holds only structured types. Convert it first.") from None
        except ValueError as error:
            raise DamagedData(f"the .npy header cannot be read: {error}. Restore the file.") from error
        return shape, fortran, dtype, file.tell()
