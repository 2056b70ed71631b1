"""Whether an output may be made at a path, and what stands there be replaced."""

from __future__ import annotations

import json
import os
import shlex
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from halotile.errors import OutputRefused
from halotile.storage.disk.durable import PARTIAL
from halotile.storage.sharded.marks import MARKS, METADATA


def check_path(path: str | Path, key: str = "output.path") -> None:
    """Refuse a path that a symlink turns into another, or that a file stands in the way of.

    Parameters
    ----------
    path : path
        As it was written: made absolute, it would have lost the ``..`` behind a symlink.
    key : str
        What the job calls it.

    Raises
    ------
    OutputRefused
        Saying where it leads.
    """
    root = Path(path)
    if not root.name:
        raise OutputRefused(f"{key} is {root}: that is no name for an output. Write one in that folder.")
    if root.is_symlink():
        raise OutputRefused(f"{key} is {root}, a symlink to {os.readlink(root)}. Write where it leads.")
    check_parents(root, key)
    if array := next(filter(_is_array, root.parents), None):
        raise OutputRefused(
            f"{key} is {root}: {array} is a Zarr array, and what lies in its folder goes with it. "
            "Write a path beside it."
        )
    check_dots(root, key)


def check_dots(path: str | Path, key: str = "output.path") -> None:
    """Refuse a path whose ``..`` lies behind a symlink: made absolute, it would be another one.

    Raises
    ------
    OutputRefused
        Saying where it leads.
    """
    if os.path.realpath(path) != os.path.realpath(os.path.abspath(path)):
        raise OutputRefused(
            f"{key} is {path}: behind a symlink, its .. leads to {os.path.realpath(path)}. Write that path."
        )


def check_parents(path: str | Path, key: str = "output.path") -> None:
    """Refuse a path that cannot come to be, because what it would lie in is no folder, not there, or not to be written in.

    Raises
    ------
    OutputRefused
        Saying what stands in the way.
    """
    root = Path(path)
    if not root.name:
        raise OutputRefused(f"{key} is {root}: that is no name for an output. Write one in that folder.")
    for parent in root.parents:
        if not os.path.lexists(parent) or parent.is_dir():
            continue
        # A symlink that leads nowhere, or in a circle, is none either.
        what = "a symlink that leads to no directory" if parent.is_symlink() else "a file"
        raise OutputRefused(
            f"{key} is {root}: {parent} is {what}, so nothing can be made in it. Write another path."
        )
    # A misspelt folder would otherwise fill a disk that nobody looks at.
    if not root.parent.is_dir():
        raise OutputRefused(
            f"{key} is {root}: there is no folder {root.parent}. "
            f"Make it first (mkdir -p {shlex.quote(str(root.parent))}), or write another path."
        )
    if not os.path.lexists(root) and not os.access(root.parent, os.W_OK | os.X_OK):
        raise OutputRefused(
            f"{key} is {root}: you may not write in {root.parent}. Write a path in a folder of your own."
        )


def check_entry(directory: Path) -> None:
    """Refuse a run directory that this user may not enter: they are made for their owners alone.

    Raises
    ------
    OutputRefused
        Naming its owner.
    """
    if directory.is_dir() and not os.access(directory, os.R_OK | os.X_OK):
        raise OutputRefused(
            f"{directory} is closed to user {os.geteuid()}: user {directory.stat().st_uid} made it. Ask that user, or write another "
            "output.path."
        )


def check_owner(directory: Path) -> None:
    """Refuse a run directory that another user made, who could steer the run; none is no fault.

    Raises
    ------
    OutputRefused
        Naming its owner.
    """
    if not directory.exists() or (owner := directory.stat().st_uid) == os.geteuid():
        return
    # Some file systems have one owner for all that is made on a machine.
    with suppress(PermissionError), TemporaryFile(dir=directory) as ours:
        if os.fstat(ours.fileno()).st_uid == owner:
            return
    raise OutputRefused(
        f"{directory} is where this run would keep its journal, and another user (number {owner}) made it, who could steer "
        "the run. Move it away, or write another output.path."
    )


def _is_array(folder: Path) -> bool:
    """Whether a folder is a Zarr array. A group may hold other things."""
    if (folder / ".zarray").is_file():
        return True
    try:
        return bool(json.loads((folder / METADATA).read_bytes()).get("node_type") == "array")
    except (OSError, ValueError, AttributeError):
        return False


def check_place(
    path: str | Path,
    *,
    overwrite: bool,
    key: str = "output.path",
    remedy: str = "output.overwrite: true",
    may_lack_metadata: bool = False,
) -> None:
    """Refuse a place where no output can be made; nothing is touched.

    Parameters
    ----------
    path : path
        As it was written.
    overwrite : bool
        Whether a Zarr that stands there may be removed. Anything that is not a Zarr may not.
    key, remedy : str
        What the job calls the path, and how it says that it may be replaced.
    may_lack_metadata : bool
        Whether all that stands there is known to be a run's, also without the files that tell a Zarr.

    Raises
    ------
    OutputRefused
        When the path goes through a symlink, or what stands there has to stay.
    """
    root = Path(path)
    check_path(root, key)
    if not os.path.lexists(root):
        return
    if not overwrite:
        raise OutputRefused(f"{key} is {root}: something stands there. Write another path, or {remedy}.")
    _check_removable(root, key, may_lack_metadata)


def _check_removable(root: Path, key: str, may_lack_metadata: bool) -> None:
    """Only a Zarr that holds nothing but its own may be removed."""
    here = root.resolve()
    for name, place in (("home directory", Path(os.path.expanduser("~"))), ("working directory", Path.cwd())):
        if place.resolve().is_relative_to(here):
            raise OutputRefused(f"{key} is {root}: it holds your {name}, and is not removed.")
    if not root.is_dir():
        raise OutputRefused(f"{key} is {root}: a file stands there, not a Zarr. Write another path.")
    is_known = may_lack_metadata or any((root / mark).is_file() for mark in MARKS)
    if not is_known and not all(entry.endswith(PARTIAL) for entry in os.listdir(root)):
        raise OutputRefused(
            f"{key} is {root}: it is no Zarr (none of {', '.join(MARKS)} in it), and is not removed. "
            "Write another path."
        )
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            if os.path.islink(os.path.join(folder, name)):
                raise OutputRefused(
                    f"{key} is {root}: {os.path.join(folder, name)} is a symlink, so not all of it is its own. "
                    "Remove it by hand, or write another path."
                )
