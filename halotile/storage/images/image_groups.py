"""Search for the OME-Zarr image in a Zarr, such as a plate or the output of bioformats2raw."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from halotile.errors import ConfigError, HalotileError, InputError
from halotile.storage.disk.place import ZARR_FILES, is_array
from halotile.storage.formats import ome
from halotile.storage.formats.zarr import ome_attributes, open_node

DEEPEST = 4
"""Groups between a Zarr and an image in it: row, column and field of a plate."""
_MOST_LISTED = 20


def find_image(path: str) -> Path | None:
    """The group of the image at a path on a disk, of the only image inside, or of the image whose level the path is; None where there is none."""
    top = Path(os.path.realpath(os.path.expanduser(path)))
    if "://" in path or not any((top / name).is_file() for name in ZARR_FILES):
        return None
    if is_array(top):
        return next((folder for folder in (top.parent, top.parent.parent) if ome.claims(folder)), None)
    inside = image_inside(path, ConfigError)
    return None if inside is None else top / inside


def image_inside(path: str, of_several: type[HalotileError] = InputError) -> str | None:
    """The path inside a Zarr, at a path or URL, of its only image; empty for the Zarr itself, None where there is none."""
    try:
        top = open_node(os.path.expanduser(path))
    except InputError as error:
        raise type(error)(f"{path}: {error}") from error
    found = _images_in(top, DEEPEST) if hasattr(top, "members") else iter(())
    names = list(itertools.islice(found, _MOST_LISTED + 1))
    if len(names) > 1:
        listed = ", ".join(names[:_MOST_LISTED]) + (", ..." if len(names) > _MOST_LISTED else "")
        folder, unpack = (
            (path.removesuffix(".zip"), "Unpack it, and write") if os.path.isfile(path) else (path, "Write")
        )
        raise of_several(
            f"{path} contains several images: {listed}. {unpack} the path of one, such as {os.path.join(folder, names[0])}."
        )
    return names[0] if names else None


def _images_in(group: Any, depth: int) -> Iterator[str]:
    """Paths of the images in a Zarr group and its nested groups."""
    attributes = ome_attributes(group.attrs)
    if attributes.get("multiscales"):
        yield group.path
    elif depth:
        for child in _groups_in(group, attributes):
            yield from _images_in(child, depth - 1)


def _groups_in(group: Any, attributes: Mapping[str, Any]) -> Iterator[Any]:
    """The groups in a group; none beside arrays, which are read instead."""
    names: list[str] = []
    # A web server lists nothing, so the metadata come first.
    for key, entries in (("plate", "wells"), ("well", "images")):
        with suppress(KeyError, TypeError):
            names += [entry["path"] for entry in attributes[key][entries]]
    if "bioformats2raw.layout" in attributes and not names:
        names += itertools.takewhile(group.__contains__, map(str, itertools.count()))
    if names:
        children = [group.get(name) for name in names]
    else:
        with warnings.catch_warnings():
            # zarr warns of unrelated files beside the groups.
            warnings.simplefilter("ignore")
            children = [child for _, child in sorted(group.members(), key=itemgetter(0))]
    found = [child for child in children if child is not None]
    yield from found if all(hasattr(child, "members") for child in found) else ()
