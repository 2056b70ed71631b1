"""Arrays in files: images on their way to the workers, and results on their way back."""

import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from halotile.storage.rim import Array


@dataclass(frozen=True, slots=True)
class Stored:
    """An array in a ``.npy`` file, which travels in place of the array."""

    path: str  # file
    kind: str  # name of the torch dtype; NumPy has no bfloat16, which is stored as float32

    def load(self) -> Array:
        """Memory-map the array, copy-on-write: writes to it stay in this process."""
        array: Array = np.load(self.path, mmap_mode="c", allow_pickle=False)
        return array

    def take(self) -> Array:
        """Load the array, and delete its file and its folder if empty: disk space is freed with the array."""
        array = self.load()
        self.delete()
        with suppress(OSError):
            Path(self.path).parent.rmdir()
        return array

    def delete(self) -> None:
        """Remove the file if it still exists."""
        Path(self.path).unlink(missing_ok=True)


def store(array: Array, folder: str | os.PathLike[str], kind: str | None = None, stem: str = "array") -> Stored:
    """Write an array to a new file in a folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store(np.arange(3.0), folder).load().tolist()
    [0.0, 1.0, 2.0]
    """
    path = Path(folder, f"{stem}-{uuid.uuid4().hex}.npy")
    np.save(path, np.ascontiguousarray(array) if array.ndim else array, allow_pickle=False)
    return Stored(str(path), kind or str(array.dtype))
