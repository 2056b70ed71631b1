"""Checks of whether files at an output's path are the run's own, damaged, or foreign.

One rule applies throughout: missing or unreadable data are the run's own, damaged; intact data that the run did not write are
foreign. This holds for metadata, which may describe another array; for files, which may not belong in the output;
and for pixels. A few intact shards with other pixels were swapped or restored from elsewhere, and count as damage: only when they
are more than half of the finished blocks is the output another result. Where more than half of the finished blocks are as they were
written, the array is the run's, whatever its metadata describe. Attributes that the user added are not damage.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from halotile.errors import DamagedData, InputError, OutputRefused
from halotile.storage.disk.durable import GONE, PARTIAL
from halotile.storage.disk.object_path import OutputPath, files_below, path_of
from halotile.storage.disk.place import ZARR_FILES, ZARR_JSON
from halotile.storage.grid import Region
from halotile.storage.sharded.layout import read_layout
from halotile.storage.sharded.local_reader import COMPLETE, is_complete
from halotile.storage.sharded.ome_metadata import FINEST
from halotile.storage.sharded.output import FOREIGN_FILE, FOREIGN_PIXELS, AnyLayout, inspect_block
from halotile.storage.sharded.output_disk import OutputDisk, disk_of
from halotile.storage.stored_array import read_error

REPLACE = "Move it away, or run with --fresh and output.overwrite: true to replace it."
# Keys that differ in the metadata of another array. Any other difference is damage.
_IDENTIFYING_KEYS = ("node_type", "shape", "data_type", "chunk_grid", "codecs")


def metadata_problems(
    root: str | OutputPath, layout: AnyLayout, holds_own_pixels: Callable[[], bool] = lambda: False
) -> list[str]:
    """Describe the damaged metadata files of an output, one line for each.

    ``layout``: layout that the run wrote; ``holds_own_pixels``: returns True where more than half of the blocks that are done are stored as they were
    written. It is called only where the metadata describe another array, and decides whether they are damaged.
    """
    lines = []
    for file, written, present in _documents(root, layout):
        if reason := _foreign_reason(file, written, present):
            if present is None or not holds_own_pixels() or _has_further_shards(root, layout):
                raise OutputRefused(f"{root} is not what the run wrote there: {reason}. {REPLACE}")
            lines.append(f"metadata: {reason}")
        elif not _contains(present, written):
            what = "not what the run wrote" if file.is_file() else "missing"
            lines.append(f"metadata: {file} is {what}")
    return lines


def restore_metadata(root: str | OutputPath, layout: AnyLayout, disk: OutputDisk | None = None) -> None:
    """Rewrite damaged metadata, keeping the user's readable attributes; durable on return."""
    disk = disk or disk_of(path_of(root))
    for file, written, present in _documents(root, layout):
        if _contains(present, written):
            continue
        written["attributes"] |= _user_attributes(written, present)
        disk.make_directory(file.parent)
        disk.write_file(file, [json.dumps(written, indent=2).encode()])


def mark_complete(root: str | OutputPath, layout: AnyLayout) -> None:
    """Note in the arrays of an output that every shard was written: readers take a missing one for lost, not for fill values."""
    root = path_of(root)
    for array in layout.arrays:
        file = array.path(root) / ZARR_JSON
        document = _read_document(file)
        if document is None or is_complete(document.get("attributes"), array.shape):
            continue
        own = document.setdefault("attributes", {}).setdefault("halotile", {})
        own[COMPLETE] = list(array.shape)
        disk_of(root).write_file(file, [json.dumps(document, indent=2).encode()])


def unmark_advice(root: str | OutputPath, layout: AnyLayout) -> str:
    """Say how to make missing chunks pixels of the fill value, as words; empty where :func:`mark_complete` marked no array."""
    files = {array.path(path_of(root)) / ZARR_JSON: array.shape for array in layout.arrays}
    read = {file: (_read_document(file) or {}).get("attributes") for file in files}
    marked = " and ".join(str(file) for file in files if is_complete(read[file], files[file]))
    return marked and f'remove "{COMPLETE}" from "halotile" in the attributes of {marked}'


def is_marked(root: str | OutputPath) -> bool:
    """Return True for an image, or a level of one, that :func:`mark_complete` marked."""
    documents = (_read_document(path_of(root) / name / ZARR_JSON) or {} for name in ("", FINEST))
    return any(is_complete(one.get("attributes"), one.get("shape", ())) for one in documents)


def added_levels(place: str | OutputPath, layout: AnyLayout) -> int:
    """Number of the levels that were added to an output, which no journal knows."""
    document = _read_document(path_of(place) / ZARR_JSON) if layout.ome else None
    try:
        datasets = (document or {})["attributes"]["ome"]["multiscales"][0]["datasets"]
    except (KeyError, IndexError, TypeError):
        return 0
    return max(0, len(datasets) - layout.levels)


def remove_added_levels(place: str | OutputPath, layout: AnyLayout, disk: OutputDisk | None = None) -> int:
    """Remove the levels that were added to an output whose pixels are about to change, and return their number."""
    root = path_of(place)
    disk, file = disk or disk_of(root), root / ZARR_JSON
    document = _read_document(file)
    if document is None or not added_levels(root, layout):
        return 0
    datasets = document["attributes"]["ome"]["multiscales"][0]["datasets"]
    names = [str(entry.get("path", "")) for entry in datasets[layout.levels :] if isinstance(entry, dict)]
    del datasets[layout.levels :]
    document.pop("consolidated_metadata", None)
    disk.write_file(file, [json.dumps(document, indent=2).encode()])
    own = {"", ".", "..", *(array.name for array in layout.arrays)}
    for name in names:
        # Anybody may have written these names: nothing outside the image is removed.
        if "/" not in name and name not in own and (root / name).is_dir():
            disk.remove_tree(root / name)
    return len(names)


def stored_digest(path: str | OutputPath, remedy: str = "") -> bytes:
    """Digest of all shards of a finished output; only their ends are read; empty if halotile did not lay it out.

    A lost shard is refused with a remedy, by default that of an image.
    """
    try:
        layout = read_layout(path)
    except DamagedData:
        raise
    except InputError:
        return b""
    problems, digest = inspect_block(path, layout, Region.whole(layout.shape), thorough=None)
    if problems:
        remedy = remedy or (
            "write the image again, or let `recon-cli verify --repair` compute the output of a run anew. If another program left out "
            f"pixels of the fill value, move its .run folder away and {unmark_advice(path, layout)}."
        )
        raise DamagedData(
            f"{problems[0]}; {len(problems):,} of the {layout.files:,} shards of {path} cannot be read. Restore them from a copy, {remedy}"
        )
    return digest


def find_foreign_entry(root: str | OutputPath, layout: AnyLayout) -> str:
    """Describe something at an output's path that no run wrote, other than pixels; empty when there is nothing."""
    for file, written, present in _documents(root, layout):
        if reason := _foreign_reason(file, written, present):
            return reason
        if attributes := _user_attributes(written, present):
            return f"{file} has attributes that no run wrote ({', '.join(attributes)})"
    folders = "|".join(f"{array.name}/c".lstrip("/") for array in layout.arrays)
    shard = re.compile(f"({folders})" + r"/\d+" * len(layout.shape))
    own = layout.documents()
    for name in files_below(path_of(root)):
        if not name.endswith(PARTIAL) and name not in own and not shard.fullmatch(name):
            return f"no run wrote {root}/{name}"
    return ""


def foreign_pixels_reason(problems: Mapping[int, list[str]], done: int) -> str:
    """Explain why the pixels belong to another result; empty when they are the run's own, even if damaged.

    ``problems``: problems of the blocks, by number: see `check_block`; ``done``: number of blocks that were checked.

    >>> foreign_pixels_reason({0: [f"a.zarr/c/0: {FOREIGN_PIXELS}"], 1: ["a.zarr/c/1: cut short"]}, 2)
    ''
    >>> foreign_pixels_reason({0: [f"a.zarr/c/0: {FOREIGN_PIXELS}"], 1: [f"a.zarr/c/1: {FOREIGN_PIXELS}"]}, 3)
    '2 of the 3 blocks that are done are whole there, with other pixels'
    """
    if any(lines[0].endswith(FOREIGN_FILE) for lines in problems.values()):
        return "the file has other contents"
    others = sum(lines[0].endswith(FOREIGN_PIXELS) for lines in problems.values())
    if 2 * others <= done:
        return ""
    return f"{others:,} of the {done:,} blocks that are done are whole there, with other pixels"


def _has_further_shards(root: str | OutputPath, layout: AnyLayout) -> bool:
    """Return True where there are shards outside the array that the run wrote: a user appended them."""
    for array in layout.arrays:
        counts = array.grid.counts
        for name in files_below(array.path(root) / "c"):
            index = name.split("/")
            is_shard = len(index) == len(counts) and all(map(str.isdecimal, index))
            if is_shard and any(int(i) >= n for i, n in zip(index, counts, strict=True)):
                return True
    return False


def _documents(
    root: str | OutputPath, layout: AnyLayout
) -> Iterator[tuple[OutputPath, dict[str, Any], dict[str, Any] | None]]:
    """Each metadata file with the document that the run wrote and the one that is there; None: missing or damaged."""
    for name, content in layout.documents().items():
        file = path_of(root) / name
        yield file, json.loads(content), _read_document(file)


def _read_document(file: OutputPath) -> dict[str, Any] | None:
    try:
        document = json.loads(_read_bytes(file))
    except (*GONE, ValueError):
        return None
    except OSError as error:
        raise read_error(f"{file}: it cannot be read", error) from error
    return document if isinstance(document, dict) else None


def _read_bytes(file: OutputPath) -> bytes:
    """Read a file; a function of its own for tests to replace."""
    return file.read_bytes()


def _foreign_reason(file: OutputPath, written: Mapping[str, Any], present: Mapping[str, Any] | None) -> str:
    """Explain why metadata belong to another array or group; empty when they are the run's own."""
    if present is None:
        v2_files = (file.with_name(name) for name in ZARR_FILES if name != ZARR_JSON)
        return next((f"{v2_file} is of another Zarr" for v2_file in v2_files if v2_file.is_file()), "")
    for key in _IDENTIFYING_KEYS:
        if key in written and key in present and not _contains(present[key], written[key]):
            there, own = json.dumps(present[key]), json.dumps(written[key])
            return f"{file} has {key} {there}, and the run wrote {own}"
    return ""


def _user_attributes(written: Mapping[str, Any], present: Mapping[str, Any] | None) -> dict[str, Any]:
    attributes = (present or {}).get("attributes")
    if not isinstance(attributes, dict):
        return {}
    own = {*written["attributes"], "halotile"}
    return {name: value for name, value in attributes.items() if name not in own}


def _own_levels(key: str, present: Any, written: Any) -> Any:
    """The value of a key without the levels that were added to those of the run."""
    return present[: len(written)] if key == "datasets" and isinstance(present, list) else present


def _contains(present: Any, written: Any) -> bool:
    """Return True when everything written is present: programs that set an attribute rewrite and extend the whole file."""
    if isinstance(written, dict):
        return isinstance(present, dict) and all(
            key in present and _contains(_own_levels(key, present[key], value), value) for key, value in written.items()
        )
    if isinstance(written, list):
        same_length = isinstance(present, list) and len(present) == len(written)
        return same_length and all(map(_contains, present, written))
    return bool(present == written) or repr(present) == repr(written)  # NaN is not equal to itself
