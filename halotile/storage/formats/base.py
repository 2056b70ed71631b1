"""What a file format gives: a source, which is an array in a file.

A format is one module. It has two functions::

    claims(path: Path) -> bool                            cheap: looks at a name or a few bytes
    open(path, *, level, dataset, axes) -> Source         raises InputError where it cannot be used

Most formats write a reader, which has a ``header`` and ``read(region)``, and let
:class:`halotile.storage.stored_array.StoredArray` carry it over process borders.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from halotile.errors import InputError
from halotile.storage.axes import choose_axes
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.storage.sharded.ome_metadata import OmeImage

DTYPES = ("bool", "uint8", "uint16", "uint32", "int8", "int16", "int32", "float16", "float32", "float64")
"""Types of pixels that can be read."""

_NUMBERS = "biufcmM"
"""Kinds of types with which arrays that need not be images are computed."""


class Source(Readable, Protocol):
    """An array that lies in a file or store.

    It pickles as its path and options, and opens again on the other side. ``read`` may be called from
    several threads.
    """

    path: str
    format: str

    @property
    def axes(self) -> tuple[str, ...]:
        """One lower-case letter for each axis, such as ``("c", "y", "x")``."""
        ...

    @property
    def chunks(self) -> tuple[int, ...]:
        """How the pixels are stored, in pixels; 1 on every axis where any pixel can be read by itself."""
        ...

    @property
    def shards(self) -> tuple[int, ...] | None:
        """How the pixels are divided into files, in pixels; None where they are all in one."""
        ...

    @property
    def mapped(self) -> bool:
        """Whether a part of a chunk is read without decoding the rest."""
        ...

    @property
    def scale(self) -> tuple[float, ...]:
        """Physical size of a pixel along each axis; 1.0 where it is unknown."""
        ...

    @property
    def units(self) -> tuple[str | None, ...]:
        """Unit of ``scale`` for each axis, such as ``"micrometer"``."""
        ...

    @property
    def ome(self) -> OmeImage | None:
        """What OME metadata say besides axes, scale and units; None where there are no such metadata."""
        ...

    def __getitem__(self, index: Any) -> Pixels:
        """The pixels at integers and slices of step 1, as in NumPy."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data, as JSON values: cheap, never reads pixels."""
        ...

    def change(self) -> str:
        """What has become of it since it was opened, in words; empty where nothing has. Cheap, never reads pixels.

        Raises
        ------
        InputUnreadable
            When the system does not tell: another look may.
        """
        ...


@dataclass(frozen=True)
class Header:
    """What is known of an array before any pixel is read."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    axes: tuple[str, ...]
    chunks: tuple[int, ...]
    scale: tuple[float, ...]
    units: tuple[str | None, ...]
    identity: Mapping[str, Any]
    """What else the fingerprint holds."""
    mapped: bool = False
    ome: OmeImage | None = None
    shards: tuple[int, ...] | None = None


def make_header(
    shape: Sequence[int],
    dtype: Any,
    *,
    requested: str | None,
    named: Sequence[str | None] | None = None,
    chunks: Sequence[int] | None = None,
    scale: Sequence[float] | None = None,
    units: Sequence[str | None] | None = None,
    identity: Mapping[str, Any],
    mapped: bool = False,
    ome: OmeImage | None = None,
    shards: Sequence[int] | None = None,
    image: bool = True,
) -> Header:
    """A header of an array that halotile can read.

    Without ``image`` it need be none: it may hold numbers of any type, on any axes, which stay unnamed.

    Raises
    ------
    InputError
        For a type of pixels, a shape or axes that cannot be used.
    """
    pixels = tuple(int(n) for n in shape)
    native = np.dtype(dtype).newbyteorder("=")
    if image:
        _refuse_dtype(native)
        _refuse_shape(pixels)
    elif native.kind not in _NUMBERS:
        raise InputError(f"it holds {native}, which are no numbers. Convert them first.")
    return Header(
        shape=pixels,
        dtype=native,
        axes=choose_axes(requested, named, pixels, native) if image else (),
        chunks=tuple(int(n) for n in chunks) if chunks else (1,) * len(pixels),
        scale=tuple(float(s) for s in scale) if scale else (1.0,) * len(pixels),
        units=tuple(units) if units else (None,) * len(pixels),
        identity=dict(identity),
        mapped=mapped or not chunks,
        ome=ome,
        shards=tuple(int(n) for n in shards) if shards else None,
    )


def _refuse_shape(shape: tuple[int, ...]) -> None:
    """Raise for a shape that no image has."""
    if len(shape) < 2:
        raise InputError(f"the array's shape is {shape}: an image has at least the axes y and x. Reshape it.")
    if 0 in shape:
        raise InputError(f"the array's shape is {shape}: an axis without pixels leaves nothing to do.")


def _refuse_dtype(dtype: np.dtype[np.generic]) -> None:
    """Raise for a type that is no number, or that float computation cannot hold."""
    if dtype.name in DTYPES:
        return
    advice = "Convert it first."
    if dtype.kind == "c":
        advice = "Write its real and imaginary parts, or magnitude and phase, as channels."
    elif dtype.kind in "iu":
        advice = "Its values are computed as floats, which cannot hold them all: convert it to int32 or float64 first."
    raise InputError(
        f"the pixels are of type {dtype}, which cannot be used. {advice} Readable: {', '.join(DTYPES)}."
    )


class Reader(Protocol):
    """An open file."""

    @property
    def header(self) -> Header:
        """What is known of the array."""
        ...

    def read(self, region: Region) -> Pixels:
        """The pixels of a region inside the array, in any byte order and memory layout."""
        ...


def file_identity(path: str) -> dict[str, Any]:
    """Size in bytes and time of change in nanoseconds of a file."""
    status = os.stat(path)
    return {"size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def identity_of(others: Sequence[str]) -> dict[str, Any]:
    """The same of the other files that hold pixels of an image, by their paths; nothing where there are none."""
    return {"files": {path: file_identity(path) for path in others}} if others else {}


def refuse_option(kind: str, reason: str, **options: Any) -> None:
    """Raise for options that this format has no use for: they would be ignored silently."""
    for name, value in options.items():
        if value:
            raise InputError(f"{name} is {value!r}, but {reason}. Leave {name} out for a {kind} file.")
