"""The other files that an HDF5 dataset is read from: those of links, the sources of virtual datasets, and raw ones.

Each is looked for where HDF5 looks: ``H5Pset_virtual_prefix``, ``H5Pset_efile_prefix`` and ``H5Lcreate_external`` in its reference manual.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from halotile.errors import InputError

_MOST_OPENED = 1_000
"""Files and datasets that are looked into for the files that they name in turn. It ends circles, too."""
_UNREADABLE = (OSError, KeyError, ValueError, TypeError, RuntimeError)
"""What h5py raises for a file or a dataset that it cannot open: HDF5 reads fill values there."""
_SAME = "."
_NUMBER = re.compile("%([%b])")
"""In names of sources, ``%b`` is the number of a block, and ``%%`` is ``%``."""


class _Reference(NamedTuple):
    """What a dataset says of another file that it is read from."""

    file: str
    """Its name; ``.``: the same file. That of a source may have ``%b``, and all have ``%%`` for ``%``."""
    dataset: str | None
    """Name of the dataset in it, in the same spelling; None: raw numbers."""
    variable: str
    """What HDF5 looks at in the environment for the folders to try first."""


def other_files(file: Any, path: str, dataset: str) -> list[str]:
    """Real paths of the other files that a dataset is read from, as far as they are there.

    Parameters
    ----------
    file : h5py.File
        The file that it was asked for in, open.
    path : str
        Absolute path of that.
    dataset : str
        Name of the dataset there.
    """
    own = os.path.realpath(path)
    found: set[str] = set()
    seen = {(path, _escaped(dataset))}
    waiting = deque(seen)
    while waiting:
        place, name = waiting.popleft()
        for reference in _looked_into(file if os.path.realpath(place) == own else None, place, name):
            for other, inside in _places(reference, place):
                found.add(os.path.realpath(other))
                if inside is not None and (other, inside) not in seen and len(seen) < _MOST_OPENED:
                    seen.add((other, inside))
                    waiting.append((other, inside))
    return sorted(found - {own})


def check_raw_files(dataset: Any, path: str) -> None:
    """Refuse a dataset of raw numbers in files that are not where HDF5 looks for them.

    Raises
    ------
    InputError
        With the file, and how to have it found.
    """
    for name in (os.fsdecode(name) for name, _, _ in dataset.external or ()):
        reference = _Reference(_escaped(name), None, "HDF5_EXTFILE_PREFIX")
        if any(_places(reference, path)):
            continue
        beside = os.path.join(os.path.dirname(path), name)
        remedy = (
            "Set HDF5_EXTFILE_PREFIX='${ORIGIN}' in the environment: it is beside the file."
            if os.path.isfile(beside)
            else "Put it there, or name its folder in the environment variable HDF5_EXTFILE_PREFIX."
        )
        raise InputError(
            f"the pixels of {os.fsdecode(dataset.name)} are in another file, {name}, which is not in the folder where HDF5 looks "
            f"for it ({os.environ.get(reference.variable) or os.getcwd()}). {remedy}"
        )


def _looked_into(file: Any | None, place: str, name: str) -> tuple[_Reference, ...]:
    """What a dataset of a file says of others; of the file that was asked for, what cannot be read is an error."""
    if file is not None:
        return tuple(_references(file, name))
    with suppress(*_UNREADABLE):
        facts = os.stat(place)
        return _references_of(place, name, facts.st_size, facts.st_mtime_ns)
    return ()


@lru_cache(maxsize=4 * _MOST_OPENED)
def _references_of(place: str, name: str, size_bytes: int, mtime_ns: int) -> tuple[_Reference, ...]:
    """The same of a file that is not open; it is opened again only when it was changed."""
    import h5py

    with h5py.File(place, "r") as file:
        return tuple(_references(file, name))


def _references(file: Any, name: str) -> Iterator[_Reference]:
    if not _is_numbered(name):
        yield from _references_below(file, _filled(name, ""))
        return
    for number in itertools.count():
        numbered = _filled(name, str(number))
        if os.fsencode(numbered) not in file:
            return
        yield from _references_below(file, numbered)


def _references_below(file: Any, name: str) -> Iterator[_Reference]:
    """Go down to a dataset, up to the first link: what that leads to is a reference of its own."""
    import h5py

    node = file
    words = [word for word in name.split("/") if word not in ("", ".")]
    for depth, word in enumerate(words, 1):
        # In bytes, for names need not be UTF-8.
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
        yield _Reference(_escaped(os.fsdecode(linked)), _escaped(inside), "HDF5_EXT_PREFIX")
        return
    if isinstance(node, h5py.Dataset):
        yield from _sources(node)


def _sources(dataset: Any) -> Iterator[_Reference]:
    """The files of a virtual dataset, or of raw numbers."""
    for source in dataset.virtual_sources() if dataset.is_virtual else ():
        yield _Reference(os.fsdecode(source.file_name), os.fsdecode(source.dset_name), "HDF5_VDS_PREFIX")
    for name, _, _ in dataset.external or ():
        yield _Reference(_escaped(os.fsdecode(name)), None, "HDF5_EXTFILE_PREFIX")


def _places(reference: _Reference, place: str) -> Iterator[tuple[str, str | None]]:
    """Paths of the files that a reference in the file at ``place`` means, with the name of the dataset there."""
    if reference.file == _SAME:
        yield place, reference.dataset
        return
    ways = list(_ways(reference, place))
    for number in sorted(_numbers(ways)) if _is_numbered(reference.file) else [None]:
        files = (os.path.join(folder, _filled(name, number or "")) for folder, name in ways)
        there = next(filter(os.path.isfile, files), None)
        if there is not None:
            inside = reference.dataset
            if number is not None and inside is not None:
                inside = _escaped(_filled(inside, number))
            yield os.path.abspath(there), inside


def _ways(reference: _Reference, place: str) -> Iterator[tuple[str, str]]:
    """The folders where HDF5 looks for a file, in its order, with the name of the file there; no folder: that of the process."""
    name, here = reference.file, os.path.dirname(place)
    given = os.environ.get(reference.variable, "").replace("${ORIGIN}", here)
    if reference.dataset is None:  # raw numbers: not beside the file, unless the variable says so
        yield given, name
        return
    if os.path.isabs(name):
        yield "", name
        name = os.path.basename(name)
    for folder in (*filter(None, given.split(":")), here, "", os.path.dirname(os.path.realpath(place))):
        yield folder, name


def _numbers(ways: list[tuple[str, str]]) -> set[str]:
    """The numbers for which there is a file of a numbered name."""
    found = set()
    for folder, name in ways:
        wild, exact = "", ""
        for at, text in enumerate(_NUMBER.split(name)):  # text, sign, text, sign, ..., text
            if at % 2 and text == "b":
                wild += "*"
                exact += "(?P=number)" if "(?P<number>" in exact else "(?P<number>0|[1-9][0-9]*)"
            else:
                wild, exact = wild + glob.escape(text), exact + re.escape(text)
        files = glob.iglob(wild, root_dir=folder or None)
        found |= {match["number"] for file in files if (match := re.fullmatch(exact, file))}
    return found


def _is_numbered(name: str) -> bool:
    return "b" in _NUMBER.findall(name)


def _filled(name: str, number: str) -> str:
    """A name with a number for ``%b``.

    Examples
    --------
    >>> _filled("run-%b-of-100%%.h5", "7")
    'run-7-of-100%.h5'
    """
    return _NUMBER.sub(lambda found: number if found[1] == "b" else "%", name)


def _escaped(name: str) -> str:
    """A plain name in the spelling of numbered ones."""
    return name.replace("%", "%%")
