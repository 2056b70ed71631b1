"""What stands at an output's place: the run's own, the run's own but damaged, or somebody else's.

One rule for whoever asks: what is missing or cannot be read is the run's own, damaged; what is whole and not what the run wrote is
somebody else's. So it is with metadata, which may be those of another array; with files, which may have no place in the output;
and with pixels. A few whole shards of another place or time were swapped or put back, and are damage: only where they are more than
half of what is done do they make another result. Attributes beside those that the run wrote are its user's, and no damage.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from halotile.errors import OutputRefused
from halotile.storage.disk.durable import DISK, GONE, PARTIAL, Disk
from halotile.storage.sharded.layout import Layout
from halotile.storage.sharded.marks import MARKS, METADATA
from halotile.storage.sharded.output import OTHER
from halotile.storage.stored_array import refusal

REPLACE = "Move it away, or run with --fresh and output.overwrite: true to replace it."
_KIND = ("node_type", "shape", "data_type", "chunk_grid", "codecs")
"""What another array has otherwise. Whatever else differs is damage."""


def metadata_problems(root: str | Path, layout: Layout) -> list[str]:
    """What is damaged of the metadata of an output: one line for each file.

    Raises
    ------
    OutputRefused
        When they are those of another array or group.
    InputUnreadable
        When the system does not give them.
    """
    lines = []
    for file, ours, found in _documents(root, layout):
        if other := _of_another(file, ours, found):
            raise OutputRefused(f"{root} is not what the run wrote there: {other}. {REPLACE}")
        if not _holds(found, ours):
            what = "not what the run wrote" if file.is_file() else "missing"
            lines.append(f"metadata: {file} is {what}")
    return lines


def restore_metadata(root: str | Path, layout: Layout, disk: Disk = DISK) -> None:
    """Write the metadata anew that are damaged, with the attributes of the user's that can be read; durable on return.

    Raises
    ------
    OutputRefused
        Where a directory stands in place of such a file.
    InputUnreadable
        When the system does not give one.
    """
    for file, ours, found in _documents(root, layout):
        if _holds(found, ours):
            continue
        if file.is_dir():
            raise OutputRefused(f"{file} is a directory, where the run wrote a file. Move it elsewhere.")
        ours["attributes"] |= _users_attributes(ours, found)
        disk.make_directory(file.parent)
        disk.write_file(file, [json.dumps(ours, indent=2).encode()])


def find_stranger(root: str | Path, layout: Layout) -> str:
    """Something at an output's place that no run wrote there, in words; empty where all but the pixels is the run's own."""
    for file, ours, found in _documents(root, layout):
        if other := _of_another(file, ours, found):
            return other
        if attributes := _users_attributes(ours, found):
            return f"{file} has attributes that no run wrote ({', '.join(attributes)})"
    shard = re.compile(re.escape(f"{layout.array_path(root)}/c") + r"/\d+" * len(layout.shape))
    own = {str(Path(root, name)) for name in layout.documents()}
    for folder, _, names in os.walk(root):
        for path in (f"{folder}/{name}" for name in names if not name.endswith(PARTIAL)):
            if path not in own and not shard.fullmatch(path):
                return f"no run wrote {path}"
    return ""


def other_pixels(problems: Mapping[int, list[str]], done: int) -> str:
    """That the pixels are of another result, in words; empty where they are the run's own, however damaged.

    Parameters
    ----------
    problems : mapping
        Of blocks, by their numbers: see :func:`halotile.storage.sharded.output.check_block`.
    done : int
        How many blocks were looked at.

    Examples
    --------
    >>> other_pixels({0: [f"a.zarr/c/0: {OTHER}"], 1: ["a.zarr/c/1: cut short"]}, 2)
    ''
    >>> other_pixels({0: [f"a.zarr/c/0: {OTHER}"], 1: [f"a.zarr/c/1: {OTHER}"]}, 3)
    '2 of the 3 blocks that are done are whole there, with other pixels'
    """
    others = sum(lines[0].endswith(OTHER) for lines in problems.values())
    if 2 * others <= done:
        return ""
    return f"{others:,} of the {done:,} blocks that are done are whole there, with other pixels"


def _documents(
    root: str | Path, layout: Layout
) -> Iterator[tuple[Path, dict[str, Any], dict[str, Any] | None]]:
    """Each file of metadata, what the run wrote into it, and what can be read of it."""
    for name, content in layout.documents().items():
        file = Path(root, name)
        yield file, json.loads(content), _read(file)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(_bytes_of(file))
    except (*GONE, IsADirectoryError, ValueError):
        return None
    except OSError as error:
        raise refusal(f"{file}: it cannot be read", error) from error
    return found if isinstance(found, dict) else None


def _bytes_of(file: Path) -> bytes:
    return file.read_bytes()


def _of_another(file: Path, ours: Mapping[str, Any], found: Mapping[str, Any] | None) -> str:
    """What makes metadata those of another array or group, in words; empty where they are the run's own."""
    if found is None:
        old = (file.with_name(mark) for mark in MARKS if mark != METADATA)
        return next((f"{mark} is of another Zarr" for mark in old if mark.is_file()), "")
    for key in _KIND:
        if key in ours and key in found and not _holds(found[key], ours[key]):
            return f"{file} has {key} {json.dumps(found[key])}, and the run wrote {json.dumps(ours[key])}"
    return ""


def _users_attributes(ours: Mapping[str, Any], found: Mapping[str, Any] | None) -> dict[str, Any]:
    attributes = (found or {}).get("attributes")
    if not isinstance(attributes, dict):
        return {}
    return {name: value for name, value in attributes.items() if name not in ours["attributes"]}


def _holds(found: Any, ours: Any) -> bool:
    """Whether all that the run wrote is there: programs that set an attribute write the whole file anew, and add to it."""
    if isinstance(ours, dict):
        return isinstance(found, dict) and all(
            key in found and _holds(found[key], value) for key, value in ours.items()
        )
    if isinstance(ours, list):
        return isinstance(found, list) and len(found) == len(ours) and all(map(_holds, found, ours))
    return bool(found == ours) or repr(found) == repr(ours)  # NaN is not equal to itself
