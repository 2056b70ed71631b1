"""Symbolic links that lead to nothing."""

from __future__ import annotations

import os
from pathlib import Path


def dead_link(path: str | os.PathLike[str]) -> str:
    """The link to nothing that a path leads over, in words; empty where there is none.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "scans").symlink_to("moved")
    >>> dead_link(folder / "scans" / "a.npy").removeprefix(f"{folder}/")
    'scans is a link to moved, where nothing is'
    >>> dead_link(folder / "a.npy")
    ''
    """
    place = Path(path)
    for part in (place, *place.parents):
        if os.path.exists(part):
            return ""
        if os.path.islink(part):
            return f"{part} is a link to {os.readlink(part)}, where nothing is"
    return ""
