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
from halotile.storage.formats.base import listed
from halotile.storage.formats.zarr import ome_attributes, open_node

DEEPEST = 4
"""Groups between a Zarr and an image in it: row, column and field of a plate."""
_MOST_NAMED = 20


def find_image(path: str) -> Path | None:
    """The group of the image at a path on a disk, of the only image inside, or of the image whose level the path is; None where there is none."""
    top = Path(os.path.realpath(os.path.expanduser(path)))
    if "://" in path or not any((top / name).is_file() for name in ZARR_FILES):
        return None
    if is_array(top):
        return next((folder for folder in (top.parent, top.parent.parent) if ome.claims(folder)), None)
    inside = image_inside(path, of_several=ConfigError)
    return None if inside is None else top / inside[0]


def note_of_level(path: str) -> tuple[str, ...]:
    """A note on the array at a path on a disk that is a level of an image; none for another array."""
    text = "it is read without the pixel sizes and channels of its OME-Zarr: for these, write "
    with suppress(InputError):
        if group := find_image(path):
            level = os.path.relpath(os.path.realpath(os.path.expanduser(path)), group)
            if _holder(open_node(str(group)), level):
                return (f"{text}input.path: {group} and input.dataset: {level}",)
    return ()


def image_inside(
    path: str, dataset: str | None = None, *, of_several: type[HalotileError] = InputError
) -> tuple[str, str | None] | None:
    """Find the image in a Zarr, at a path or URL, that a dataset names or is a level of; without one, the only image.

    Returns
    -------
    (str, str or None) or None
        The path of its group inside the Zarr, empty for the Zarr itself, and that of the dataset inside the group; None where there is no image.
    """
    try:
        top = open_node(os.path.expanduser(path))
    except InputError as error:
        raise type(error)(f"{path}: {error}") from error
    if not hasattr(top, "members"):
        return None
    if dataset and (holder := _holder(top, dataset)):
        return holder
    node = top if dataset is None else _node(top, dataset)
    searched = top if node is None else node
    found = _images_in(searched, DEEPEST) if hasattr(searched, "members") else iter(())
    names = list(itertools.islice(found, _MOST_NAMED + 1))
    if node is None and names not in ([], [""]):
        raise of_several(
            f"{path}: dataset is {dataset!r}, but no image or array there has this path. Write dataset: one of {listed(names)}."
        )
    if len(names) > 1:
        advice = f"the path of one, such as {os.path.join(path, names[0])}"
        advice = f"dataset: one of {listed(names)}" if os.path.isfile(path) else advice
        raise of_several(f"{path} contains several images: {listed(names)}. Write {advice}.")
    return (names[0], None) if names and node is not None else None


def _holder(top: Any, dataset: str) -> tuple[str, str | None] | None:
    """The path of the innermost group whose image a dataset is or belongs to, and the path of the dataset inside it."""
    parts = dataset.strip("/").split("/")
    for count in range(len(parts), -1, -1):
        group, inside = "/".join(parts[:count]), "/".join(parts[count:]) or None
        images = ome_attributes(getattr(_node(top, group), "attrs", {})).get("multiscales")
        if images and (inside is None or ome.named_image(images, inside)):
            return group, inside
    return None


def _node(top: Any, path: str) -> Any:
    """The array or group at a path inside a group; None where there is none."""
    with suppress(KeyError, ValueError):  # ValueError: zarr refuses names such as "../other"
        return top[path] if path else top
    return None


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
