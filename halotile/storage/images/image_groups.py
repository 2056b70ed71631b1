"""Search for the OME-Zarr image in a Zarr on a local disk."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from halotile.errors import ConfigError
from halotile.storage.disk.place import ZARR_FILES, is_array
from halotile.storage.formats import ome

DEEPEST = 4
"""Folders between a Zarr and an image in it: row, column and field of a plate."""
_MOST_LISTED = 20


def find_image(path: str) -> Path | None:
    """The group of the image at a path, of the only image inside, or of the image whose level the path is; None where there is none.

    Raises
    ------
    ConfigError
        When there are several.
    """
    top = Path(os.path.realpath(os.path.expanduser(path)))
    if "://" in path or not top.is_dir():
        return None
    if is_array(top):
        return next((folder for folder in (top.parent, top.parent.parent) if ome.claims(folder)), None)
    images = list(itertools.islice(_images_in(top, DEEPEST), _MOST_LISTED + 1))
    if len(images) > 1:
        names = [str(image.relative_to(top)) for image in images]
        listed = ", ".join(names[:_MOST_LISTED]) + (", ..." if len(names) > _MOST_LISTED else "")
        raise ConfigError(
            f"{path} contains several images: {listed}. Write the path of one, such as {os.path.join(path, names[0])}."
        )
    return images[0] if images else None


def _images_in(folder: Path, depth: int) -> Iterator[Path]:
    """The images in a Zarr group and its nested groups."""
    if not any((folder / name).is_file() for name in ZARR_FILES) or is_array(folder):
        return
    if ome.claims(folder):
        yield folder
    elif depth:
        for child in sorted(entry.path for entry in os.scandir(folder) if entry.is_dir()):
            yield from _images_in(Path(child), depth - 1)
