"""The scratch folder of Dask's servers, which nobody else can have made, and from which no module is imported."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dask

from halotile.graphs.clusters.connection.credentials import owned_folder

PREFIX = "halotile-scratch-"
_DASK_FOLDER = "dask-scratch-space"
"""Part of the path of each folder that Dask makes for a server."""


@contextmanager
def private_scratch() -> Iterator[str]:
    """A folder of mode 0700 in ``$TMPDIR`` for the servers that start in the context, whatever Dask's configuration says.

    Dask's own, ``$TMPDIR/dask-scratch-space``, belongs to whoever makes it first.
    """
    with (
        owned_folder(Path(tempfile.gettempdir()), PREFIX) as folder,
        dask.config.set({"temporary-directory": str(folder)}),
    ):
        yield str(folder)


def keep_off_path() -> None:
    """Remove the folders of Dask's servers from ``sys.path``, where Dask puts them first."""
    sys.path[:] = [place for place in sys.path if _DASK_FOLDER not in str(place)]
