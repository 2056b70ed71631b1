"""The other files that an HDF5 dataset is read from: link targets, sources of virtual datasets, and raw files.

The search follows HDF5's: ``H5Pset_virtual_prefix``, ``H5Pset_efile_prefix`` and ``H5Lcreate_external`` in its reference manual.
"""

import glob
import itertools
import os
import re
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from halotile.errors import InputError

_MOST_OPENED = 1_000  # maximum number of files and datasets that are searched for references, which also ends cycles
# Exceptions of h5py for a file or a dataset that it cannot open.
_UNREADABLE = (OSError, KeyError, ValueError, TypeError, RuntimeError)
_SAME = "."
_NUMBER = re.compile("%([%b])")  # in names of sources, `%b` is the number of a block, and `%%` is `%`


class _Reference(NamedTuple):
    """A reference from a dataset to another file that it is read from."""

    file: str  # its name, with `%%` for `%`; `.`: the same file. The name of a source may contain `%b`
    dataset: str | None  # name of the dataset in it, with the same escapes; None: raw data
    variable: str  # environment variable with the folders that HDF5 tries first
    size: int = 0  # length in bytes that it has to have


def other_files(file: Any, path: str, dataset: str) -> list[str]:
    """Real paths of the other files that a dataset is read from.

    ``file``: open file that contains the dataset; ``path``: absolute path of that file; ``dataset``: name of the dataset there.
    """
    own = os.path.realpath(path)
    others: set[str] = set()
    seen = {(path, _escape(dataset))}
    waiting = deque(seen)
    while waiting:
        place, name = waiting.popleft()
        for reference in _references_in(file if os.path.realpath(place) == own else None, place, name):
            found = list(_resolve(reference, place))
            if not found and not _is_numbered(reference.file):
                raise _missing(reference, place)
            for other, inside in found:
                if (length := os.path.getsize(other)) < reference.size:
                    raise InputError(
                        f"{other} has {length:,} bytes, and {place} reads {reference.size:,} of it. Restore the file from a copy."
                    )
                others.add(os.path.realpath(other))
                if inside is not None and (other, inside) not in seen and len(seen) < _MOST_OPENED:
                    seen.add((other, inside))
                    waiting.append((other, inside))
    return sorted(others - {own})


def _missing(reference: _Reference, place: str) -> InputError:
    """The error for a file that HDF5 does not find."""
    name = _fill_number(reference.file, "")
    beside = os.path.dirname(place)
    folder = beside if reference.dataset is not None else os.environ.get(reference.variable) or os.getcwd()
    remedy = f"Put it there, or name its folder in the environment variable {reference.variable}."
    if folder != beside and os.path.isfile(os.path.join(beside, name)):
        remedy = f"Set {reference.variable}='${{ORIGIN}}' in the environment: it is beside the file."
    return InputError(
        f"some of the pixels of {place} are in another file, {name}, which is not in the folder where HDF5 looks for it ({folder}). {remedy}"
    )


def _references_in(file: Any | None, path: str, name: str) -> tuple[_Reference, ...]:
    """The references of a dataset in the open file, or in the file at ``path``."""
    try:
        if file is not None:
            return tuple(_references(file, name))
        status = os.stat(path)
        return _references_at(path, name, status.st_size, status.st_mtime_ns)
    except _UNREADABLE as error:
        raise InputError(
            f"some of the pixels are in {path}, dataset {_fill_number(name, '')}, which cannot be read: {error}. Restore that file from its origin."
        ) from error


@lru_cache(maxsize=4 * _MOST_OPENED)
def _references_at(path: str, name: str, size_bytes: int, mtime_ns: int) -> tuple[_Reference, ...]:
    """The references of a dataset in the file at ``path``, which is reopened only after a change."""
    import h5py

    with h5py.File(path, "r") as file:
        return tuple(_references(file, name))


def _references(file: Any, name: str) -> Iterator[_Reference]:
    if not _is_numbered(name):
        plain = _fill_number(name, "")
        file[os.fsencode(plain)]  # an error where there is none
        yield from _references_below(file, plain)
        return
    for number in itertools.count():
        numbered = _fill_number(name, str(number))
        if os.fsencode(numbered) not in file:
            return
        yield from _references_below(file, numbered)


def _references_below(file: Any, name: str) -> Iterator[_Reference]:
    """Descend to a dataset, or to the first link on the way, whose target is a reference of its own."""
    import h5py

    node = file
    words = [word for word in name.split("/") if word not in ("", ".")]
    for depth, word in enumerate(words, 1):
        # In bytes, because names need not be UTF-8.
        link = node.get(os.fsencode(word), getlink=True) if isinstance(node, h5py.Group) else None
        if link is None:
            return
        if isinstance(link, h5py.HardLink):
            node = node[os.fsencode(word)]
            continue
        target = os.fsdecode(link.path)
        if isinstance(link, h5py.SoftLink) and not target.startswith("/"):
            target = "/".join([*words[: depth - 1], target])
        linked = link.filename if isinstance(link, h5py.ExternalLink) else _SAME
        inside = "/".join([target, *words[depth:]])
        yield _Reference(_escape(os.fsdecode(linked)), _escape(inside), "HDF5_EXT_PREFIX")
        return
    if isinstance(node, h5py.Dataset):
        yield from _sources(node)


def _sources(dataset: Any) -> Iterator[_Reference]:
    """The files of a virtual dataset, or of raw data."""
    for source in dataset.virtual_sources() if dataset.is_virtual else ():
        yield _Reference(os.fsdecode(source.file_name), os.fsdecode(source.dset_name), "HDF5_VDS_PREFIX")
    left = dataset.size * dataset.dtype.itemsize
    for name, offset, size in dataset.external or ():
        left, size = max(0, left - size), min(left, size)
        yield _Reference(_escape(os.fsdecode(name)), None, "HDF5_EXTFILE_PREFIX", offset + size)


def _resolve(reference: _Reference, place: str) -> Iterator[tuple[str, str | None]]:
    """Paths of the files that a reference in the file at ``place`` stands for, with the name of the dataset there."""
    if reference.file == _SAME:
        yield place, reference.dataset
        return
    candidates = list(_candidates(reference, place))
    numbers: set[str | None] = {None}
    if _is_numbered(reference.file):
        numbers = {*_numbers(candidates)}
        if first := next((n for n in range(len(numbers)) if str(n) not in numbers), None):
            # HDF5 ends the image there.
            name = _fill_number(reference.file, str(first))
            raise InputError(
                f"some of the pixels of {place} are in another file, {name}, which is missing, although files with higher numbers exist. "
                "Put it there, or move the others elsewhere."
            )
    for number in sorted(numbers, key=str):
        files = (os.path.join(folder, _fill_number(name, number or "")) for folder, name in candidates)
        existing = next(filter(os.path.isfile, files), None)
        if existing is not None:
            inside = reference.dataset
            if number is not None and inside is not None:
                inside = _escape(_fill_number(inside, number))
            yield os.path.abspath(existing), inside


def _candidates(reference: _Reference, place: str) -> Iterator[tuple[str, str]]:
    """Folder and file name of each place that HDF5 searches, in order; an empty folder is the working directory."""
    name, here = reference.file, os.path.dirname(place)
    prefix = os.environ.get(reference.variable, "").replace("${ORIGIN}", here)
    if reference.dataset is None:  # raw data: not beside the file, unless the variable names its folder
        yield prefix, name
        return
    if os.path.isabs(name):
        yield "", name
        name = os.path.basename(name)
    for folder in (*filter(None, prefix.split(":")), here, "", os.path.dirname(os.path.realpath(place))):
        yield folder, name


def _numbers(candidates: list[tuple[str, str]]) -> set[str]:
    """The block numbers for which a file exists."""
    numbers = set()
    for folder, name in candidates:
        wildcard, exact = "", ""
        for position, text in enumerate(_NUMBER.split(name)):  # text, escape, text, escape, ..., text
            if position % 2 and text == "b":
                wildcard += "*"
                exact += "(?P=number)" if "(?P<number>" in exact else "(?P<number>0|[1-9][0-9]*)"
            else:
                wildcard, exact = wildcard + glob.escape(text), exact + re.escape(text)
        files = glob.iglob(wildcard, root_dir=folder or None)
        numbers |= {match["number"] for file in files if (match := re.fullmatch(exact, file))}
    return numbers


def _is_numbered(name: str) -> bool:
    return "b" in _NUMBER.findall(name)


def _fill_number(name: str, number: str) -> str:
    """Replace ``%b`` by a number, and ``%%`` by ``%``.

    >>> _fill_number("run-%b-of-100%%.h5", "7")
    'run-7-of-100%.h5'
    """
    return _NUMBER.sub(lambda match: number if match[1] == "b" else "%", name)


def _escape(name: str) -> str:
    """Escape the ``%`` of a plain name."""
    return name.replace("%", "%%")
