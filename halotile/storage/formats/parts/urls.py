"""Zarr stores at URLs: object stores and web servers, read with obstore."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import zarr.storage

from halotile.errors import MissingPackage
from halotile.storage.disk.place import ZARR_JSON
from halotile.storage.io_threads import IO_THREADS

_SAMPLED_OBJECTS = 64
"""Chunks that are checked where not all can be."""


def open_url(url: str) -> Any:
    """The store at a URL, read-only.

    Raises
    ------
    MissingPackage
        Without obstore.
    """
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise MissingPackage(
            'a Zarr at a URL is read with obstore, which is not installed. Write: pip install "halotile[s3]"'
        ) from error
    options: dict[str, Any] = {"client_options": {"allow_http": True}} if url.startswith("http://") else {}
    return zarr.storage.ObjectStore(from_url(url, **options), read_only=True)


def is_from_url(error: Exception) -> bool:
    """Return True when the exception is from obstore, which need not be installed."""
    return any(kind.__module__.partition(".")[0] == "obstore" for kind in type(error).__mro__)


def object_tags(array: Any, url: str, most: int) -> list[list[Any]]:
    """Names, sizes and tags of the objects of an array at a URL: all of them, or some where there are more than ``most``, or on a
    web server, which cannot list them."""
    import obstore

    store, top = array.store.store, f"{array.path}/" if array.path else ""
    objects: list[Any] = []
    for page in obstore.list(store, top or None) if not url.startswith("http") else ():
        objects += page
        if len(objects) > most:
            break
    if not 0 < len(objects) <= most:
        counts = [-(-n // c) for n, c in zip(array.shape, array.shards or array.chunks, strict=True)]
        places = np.linspace(0, math.prod(counts) - 1, _SAMPLED_OBJECTS).astype(int)
        chunks = {
            array.metadata.encode_chunk_key(tuple(map(int, np.unravel_index(n, counts)))) for n in places
        }
        names = (
            f"{top}{name}" for name in (ZARR_JSON if array.metadata.zarr_format == 3 else ".zarray", *chunks)
        )
        objects = [found for found in IO_THREADS.map(partial(_object_at, store), names) if found]
    return sorted(
        [found["path"], found["size"], found["e_tag"] or str(found["last_modified"])] for found in objects
    )


def _object_at(store: Any, name: str) -> Any:
    """The size and tag of an object; None for a chunk without pixels, which is not stored."""
    import obstore

    try:
        return obstore.head(store, name)
    except FileNotFoundError:
        return None
