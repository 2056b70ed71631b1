"""Zarr stores at URLs: object stores and web servers, read with obstore."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from halotile.errors import InputUnreadable
from halotile.storage.disk.object_path import first_words, is_of_store, store_at
from halotile.storage.disk.place import ZARR_JSON

MOST_OBJECTS = 10_000
"""Objects that are listed, a thousand with each request: every worker does so."""
_SAMPLED_OBJECTS, _AT_ONCE = 64, 16
"""Chunks that are checked where not all can be, and requests at once."""


def open_url(url: str) -> Any:
    """The store at a URL, read-only.

    Raises
    ------
    MissingPackage
        Without obstore.
    """
    from zarr.storage import ObjectStore

    return ObjectStore(store_at(url), read_only=True)


def object_tags(array: Any, url: str) -> list[list[Any]]:
    """Names, sizes and tags of the objects of an array at a URL: all of them, or some where there are more than :data:`MOST_OBJECTS`, or where
    they cannot be listed, as on a web server; none where only reading is allowed.

    Raises
    ------
    InputUnreadable
        When the store does not answer.
    """
    try:
        listed = [] if url.startswith("http") else _listed(array)
        objects = listed if 0 < len(listed) <= MOST_OBJECTS else _sampled(array)
    except Exception as error:
        if _is_denied(error):
            return []
        if not is_of_store(error) and not isinstance(error, OSError):
            raise
        raise InputUnreadable(f"the store does not answer: {first_words(error)}. Try again later.") from error
    return sorted(
        [found["path"], found["size"], found["e_tag"] or str(found["last_modified"])] for found in objects
    )


def _is_denied(error: Exception) -> bool:
    return type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError", "PermissionError")


def _listed(array: Any) -> list[Any]:
    """The objects of an array, and one too many where there are more; none where listing is not allowed."""
    import obstore

    objects: list[Any] = []
    try:
        for page in obstore.list(array.store.store, f"{array.path}/" if array.path else None):
            objects += page
            if len(objects) > MOST_OBJECTS:
                break
    except Exception as error:
        if not _is_denied(error):
            raise
        return []
    return objects


def _sampled(array: Any) -> list[Any]:
    """The objects of the metadata and of chunks that are spread evenly."""
    counts = [-(-n // c) for n, c in zip(array.shape, array.shards or array.chunks, strict=True)]
    places = np.linspace(0, math.prod(counts) - 1, _SAMPLED_OBJECTS).astype(int)
    chunks = {array.metadata.encode_chunk_key(tuple(map(int, np.unravel_index(n, counts)))) for n in places}
    top = f"{array.path}/" if array.path else ""
    names = (
        f"{top}{name}"
        for name in (ZARR_JSON if array.metadata.zarr_format == 3 else ".zarray", *sorted(chunks))
    )
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [found for found in pool.map(partial(_object_at, array.store.store), names) if found]


def _object_at(store: Any, name: str) -> Any:
    """The size and tag of an object; None for a chunk without pixels, which is not stored."""
    import obstore

    try:
        return obstore.head(store, name)
    except FileNotFoundError:
        return None
