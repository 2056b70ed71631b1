"""Checks of single values of a job, each with its error message.

Job files and scripts both use these checks, so the same value gets the same message. The planner checks
what depends on the image, and a denoiser checks its own options.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from halotile import registry
from halotile.graphs.clusters.launches.batch_system import is_walltime
from halotile.graphs.kinds.base import Check
from halotile.graphs.kinds.sections import Cluster, Input, Output, Run, Tile, parse_bytes
from halotile.graphs.words import nearest, shown
from halotile.storage.disk.object_path import SCHEMES
from halotile.storage.spacing import parse_size

LEAST_MEMORY_BYTES = 64 * 2**20
_DTYPES = ("auto", "uint8", "uint16", "int8", "int16", "uint32", "int32", "float16", "float32", "float64")


_LONGEST_NAME = 230
"""Longest name of an output, in bytes. File systems allow 255, and the names beside an output are longer."""
_COMMANDS = {".tif": ("export", "a TIFF"), ".tiff": ("export", "a TIFF"), ".png": ("preview", "a PNG")}
"""Command that writes a file of each name, and what it is."""
_ODD_IN_ADDRESS = re.compile(r"[?#%+\\*]|//|(?<![^/])\.\.?(?![^/])")
"""Characters that a URL escapes, an empty part, and parts that lead elsewhere."""
_OTHER_FORMATS = re.compile(r"\.(tiff?|png|jpe?g|bmp|gif|np[yz]|h5|hdf5?|nc|mat|zip)", re.IGNORECASE)


@dataclass(frozen=True)
class AtLeast:
    """A check that a number, or each number of a list, is large enough; "auto" passes.

    >>> AtLeast(1)([256, 0])
    '[256, 0] is too small; write at least 1'
    >>> AtLeast(1)("auto")
    """

    least: int

    def __call__(self, value: Any) -> str | None:
        """Return the fault of the value, if it has one."""
        numbers = value if isinstance(value, list | tuple) else [value]
        if len(numbers) > 0 and all(isinstance(n, str) or self.least <= n < math.inf for n in numbers):
            return None
        if math.inf in numbers:
            return f"{shown(value)} is not finite; write a number of at least {self.least}"
        return f"{shown(value)} is too small; write at least {self.least}"


@dataclass(frozen=True)
class Above:
    """A check that a number is larger than another."""

    bound: float

    def __call__(self, value: float | str) -> str | None:
        """Return the fault of the value, if it has one."""
        if isinstance(value, str) or self.bound < value < math.inf:
            return None
        if not math.isfinite(value):
            return f"{shown(value)} is not finite; write a number above {self.bound:g}"
        return f"{value} is too small; write more than {self.bound:g}"


MOST_SEED = 2**63 - 1


def seed(value: int) -> str | None:
    """Refuse a seed that no random generator takes."""
    return None if 0 <= value <= MOST_SEED else f"is {value}; write 0 to {MOST_SEED}"


@dataclass(frozen=True)
class Named:
    """A check that a word names an extension. It is looked up by name only: importing it would load Dask.

    >>> Named("solver", "solvers", without=("lanczos",))("fitsa")
    'no solver is called fitsa; did you mean fista?'
    """

    word: str
    registry: str
    without: tuple[str, ...] = ()
    """Names that jobs cannot use."""
    besides: tuple[str, ...] = ()
    """Other words that are accepted."""

    @property
    def names(self) -> list[str]:
        """Return the accepted words."""
        return [*self.besides, *(name for name in registry.names(self.registry) if name not in self.without)]

    def __call__(self, value: str) -> str | None:
        """Return the fault of the value, if it has one."""
        if value in self.names:
            return None
        near = nearest(value, self.names, likeness=0.5)  # the names are short
        hint = f"did you mean {near}?" if near else f"write one of {', '.join(self.names)}"
        return f"no {self.word} is called {value}; {hint}"


def _memory(value: str | int) -> str | None:
    try:
        count = parse_bytes(value)
    except ValueError:
        return f"{shown(value)} is not a size; write a number and a unit, such as 4GiB or 512MB"
    if count < LEAST_MEMORY_BYTES:
        return f"{value} is {count:,} bytes, less than a worker needs to start; give it a unit such as 4GiB"
    return None


def _range(value: Any) -> str | None:
    if value == "auto":
        return None
    if not math.isfinite(value[1] - value[0]):
        return f"{shown(value)} is not finite; write two numbers [low, high] with low < high"
    if not value[0] < value[1]:
        return f"{shown(value)} runs backwards; write [low, high] with low < high"
    return None


def _axes(value: str | None) -> str | None:
    if value in (None, "auto"):
        return None
    letters = str(value)
    if not letters or not letters.isalpha() or len({*letters.lower()}) != len(letters):
        return f"{shown(letters)} does not name axes; write one different letter for each, such as yx or tczyx"
    return None


def _spacing(value: Mapping[str, float | str]) -> str | None:
    for axis, size in value.items():
        if len(axis) != 1 or not axis.isalpha():
            return f"{shown(axis)} is not an axis; write letters of axes, such as {{z: 0.3 um, y: 0.1 um, x: 0.1 um}}"
        if parse_size(size) is None:
            return f"{shown(size)} is not the size of a pixel; write a number above 0, with a unit or without, such as 0.3 um"
    return None


def _dtype(value: str) -> str | None:
    if value in _DTYPES:
        return None
    if value.startswith("complex"):
        return f"{shown(value)} cannot hold a denoised image; write auto, or a float or integer type"
    near = nearest(value, _DTYPES)
    return f"{shown(value)} is not one of {', '.join(_DTYPES)}" + (f"; did you mean {near}?" if near else "")


def filled(value: str) -> str | None:
    return None if value.strip() else "is empty; write a path"


def output_path(value: str) -> str | None:
    if not value.isprintable():
        return f"{shown(value)} has characters in it that no screen shows; write a path without"
    return (_address_fault(value) if "://" in value else None) or _output_name(value) or filled(value)


def _address_fault(value: str) -> str | None:
    """Return the fault of an output's place in a store, if it has one.

    >>> _address_fault("https://host/clean.zarr")
    '"https://host/clean.zarr" can be read at most; write a place in a store, such as s3://bucket/clean.zarr, or a path'
    """
    scheme, _, rest = value.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme not in SCHEMES:
        return (
            f"{shown(value)} can be read at most; write a place in a store, such as s3://bucket/clean.zarr, or a path"
        )
    if not bucket or not key.strip("/"):
        return (
            f"{shown(value)} names no output in a bucket; write one such as {scheme}://{bucket or 'bucket'}/clean.zarr"
        )
    if odd := _ODD_IN_ADDRESS.search(rest):
        return f"{shown(value)} has {odd[0]} in it, which addresses and names of files do not take alike; write letters, digits, - and _"
    if len(os.fsencode(value)) > _LONGEST_NAME:
        return f"{shown(value)} is of {len(os.fsencode(value))} bytes, and its run directory is named after it; write at most {_LONGEST_NAME}"
    return None


def _output_name(value: str) -> str | None:
    """Return the fault of the last part of an output's path, if it has one.

    >>> _output_name("scans/out.tif")
    'scans/out.tif is no name for the Zarr that a run writes; write scans/out.zarr, and `recon-cli export scans/out.zarr scans/out.tif` makes a TIFF of it'
    """
    path = PurePath(value)
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        return (
            f"{shown(path.name)} is a name of {len(os.fsencode(path.name))} bytes; write one of at most {_LONGEST_NAME}"
        )
    if not _OTHER_FORMATS.fullmatch(path.suffix):
        return None
    zarr = f"{value.removesuffix(path.suffix)}.zarr"
    image = path if path.suffix.lower() in _COMMANDS else path.with_suffix(".tif")
    command, kind = _COMMANDS[image.suffix.lower()]
    image = PurePath(image.name) if "://" in value else image
    return (
        f"{value} is no name for the Zarr that a run writes; write {zarr}, and "
        f"`recon-cli {command} {zarr} {image}` makes {kind} of it"
    )


def _address(value: str) -> str | None:
    if re.fullmatch(r"(tls|tcp)://(\[[0-9a-fA-F:]+\]|[^:/\s]+):\d+", value):
        return None
    return f"{shown(value)} is not the address of a scheduler; write one such as tls://10.0.0.7:8786"


_LINES = [{"gain": gain, "axis": axis} for gain in (False, True) for axis in "xy"]


def _stripes(value: Any) -> str | None:
    if isinstance(value, str) or ({"gain": False} | dict(value) in _LINES):
        return None
    return f"{shown(dict(value))} names no lines; write {{axis: x}} where columns are off, or {{axis: y}} for rows; with gain: true beside it for factors"


def _walltime(value: str) -> str | None:
    if is_walltime(value):
        return None
    return (
        f'{shown(value)} is not a time; write hours, minutes and seconds, such as "04:00:00", or with days "2-00:00:00"'
    )


def _one_line(value: str) -> str | None:
    """Refuse more than one line: the value is written into a job script, where a second line would be a command."""
    return None if value.isprintable() and value.strip() else f"{shown(value)} is not a name; write a word of one line"


def _directives(value: Any) -> str | None:
    for directive in value:
        if not directive.isprintable():
            return f"{shown(directive)} is more than a line; write an entry for each directive"
        if directive.lstrip().startswith("#"):
            instead = directive.lstrip("# ").partition(" ")[2]
            return f"{shown(directive)} has the mark of a directive before it, which is added; write {shown(instead)}"
    return None


COMMON: Mapping[tuple[type, str], Check] = {
    (Input, "path"): filled,
    (Input, "level"): AtLeast(0),
    (Input, "axes"): _axes,
    (Input, "spacing"): _spacing,
    (Input, "range"): _range,
    (Input, "stripes"): _stripes,
    (Output, "path"): output_path,
    (Output, "levels"): AtLeast(1),
    (Output, "shard"): AtLeast(1),
    (Output, "chunk"): AtLeast(1),
    (Output, "dtype"): _dtype,
    (Tile, "size"): AtLeast(1),
    (Tile, "depth"): AtLeast(0),
    (Tile, "batch"): AtLeast(1),
    (Tile, "block"): AtLeast(1),
    (Tile, "axes"): _axes,
    (Run, "workers"): AtLeast(1),
    (Run, "retries"): AtLeast(0),
    (Run, "memory_per_worker"): _memory,
    (Run, "stall_seconds"): Above(0),
    (Cluster, "kind"): Named("cluster", "clusters", besides=("auto",)),
    (Cluster, "address"): _address,
    (Cluster, "walltime"): _walltime,
    (Cluster, "queue"): _one_line,
    (Cluster, "account"): _one_line,
    (Cluster, "interface"): _one_line,
    (Cluster, "directives"): _directives,
    (Cluster, "cores"): AtLeast(1),
    (Cluster, "gpus"): AtLeast(0),
}
"""Checks of the sections that several kinds of jobs share, by type of the section and key. Empty values are not checked."""
