"""Where Dask's servers keep their files: a folder that nobody else can have made, and that no module is imported from."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dask

from halotile.graphs.clusters.connection.credentials import owned_folder

PREFIX = "halotile-scratch-"
_DASKS = "dask-scratch-space"
"""Part of the path of each folder that Dask makes for a server."""


@contextmanager
def private_scratch() -> Iterator[str]:
    """A folder of mode 0700 in ``$TMPDIR`` for the servers that start in the context, whatever Dask's configuration says.

    Dask's own, ``$TMPDIR/dask-scratch-space``, belongs to whoever makes it first.
    """
    with owned_folder(Path(tempfile.gettempdir()), PREFIX) as folder:
        made = str(folder)
        with dask.config.set({"temporary-directory": made}):
            yield made


def keep_off_path() -> None:
    """Import nothing from folders of Dask's servers, which Dask puts first on ``sys.path``."""
    sys.path[:] = [place for place in sys.path if _DASKS not in str(place)]
