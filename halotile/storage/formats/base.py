"""The interface of file formats.

A format is one module with two functions::

    claims(path: Path) -> bool                            cheap: looks at the name or the first bytes
    open(path, *, level, dataset, axes) -> Source         raises InputError when the file cannot be used

Most formats define a reader with a ``header`` and ``read(region)``, and leave the transfer between processes to
:class:`halotile.storage.stored_array.StoredArray`.
"""

import base64
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from halotile.errors import DamagedData, InputError
from halotile.storage.axes import choose_axes, remarks_on_axes
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels, Readable
from halotile.storage.sharded.ome_metadata import Channels, OmeImage, rgb_channels
from halotile.storage.spacing import Georeference

MOST_PIXELS = 2**60
_MOST_LISTED = 20
OPACITY_REMARK = (
    "the last channel is opacity: it is denoised like the others, and transparent pixels count as measurements"
)
COMPLEX = ("complex64", "complex128")
# Pixel types that can be read.
DTYPES = ("bool", "uint8", "uint16", "uint32", "int8", "int16", "int32", "float16", "float32", "float64")

_NUMERIC_KINDS = "biufcmM"  # NumPy kinds of arrays that need not be images

# Attributes that outputs do not keep: of the file's structure, of its other variables, or of the noisy pixels.
_OF_THE_FILE = (
    *("halotile", "missing_value", "zarr_conventions", "dtype", "multiscales", "omero", "ome"),
    *("CLASS", "NAME", "DIMENSION_LIST", "DIMENSION_LABELS", "REFERENCE_LIST", "PALETTE"),
    *("coordinates", "bounds", "grid_mapping", "ancillary_variables", "cell_measures", "formula_terms"),
    *("actual_range", "compress"),
)
_OF_THE_FILE_PREFIXES = ("_", "spatial:", "proj:", "STATISTICS_")


class Source(Readable, Protocol):
    """An array in a file or store.

    It is pickled as its path and options, and reopened when unpickled. ``read`` may be called from
    several threads.
    """

    path: str
    format: str
    axes: tuple[str, ...]  # one lower-case letter for each axis, such as `("c", "y", "x")`
    chunks: tuple[int, ...]  # chunk shape in pixels; 1 along every axis when pixels can be read individually
    # shape of the part in each file, in pixels; None when all pixels are in one file
    shards: tuple[int, ...] | None
    mapped: bool  # true when part of a chunk can be read without decoding the rest
    keeps_chunk: bool  # true when the chunk that was decoded last stays in memory for the next read
    scale: tuple[float, ...]  # physical size of a pixel along each axis; 1.0 where it is unknown
    units: tuple[str | None, ...]  # unit of `scale` for each axis, such as `micrometer`
    # OME metadata other than axes, scale and units; None when the file has no OME metadata
    ome: OmeImage | None
    nodata: float | None  # value of pixels without a measurement, besides NaN; None if the file names none
    # some of label, color (six hexadecimal digits) and window (lowest and highest value shown) of each channel;
    # empty: unknown
    channels: Channels
    # place on Earth of the pixels along y and x; None if the file states none
    georeference: Georeference | None
    # attributes that describe the values, as JSON: CF's units, standard_name, scale_factor and so on, and the user's own
    attributes: Mapping[str, Any]
    # dataset of the same file that is 0 in pixels without a measurement; None if there is none
    mask: str | None
    # assumptions about the file where it leaves room for others, each with what to write instead
    remarks: tuple[str, ...]
    order: tuple[int, ...]  # the axis of the file that each axis is

    def with_sizes(self, sizes: Mapping[str, float | str]) -> Self:
        """The same array with the user's pixel sizes of some axes."""

    def one_of_many(self) -> Self:
        """The same array, whose file is closed while many others are read."""

    def in_order(self, order: Sequence[int]) -> Self:
        """The same array with its axes in another order."""

    def with_channels(self, numbers: Sequence[int], axis: int | None = None) -> Self:
        """The same array with some of its channels, in this order."""

    def arranged_as(self, image: Self) -> Self:
        """The same array in the order, and with the channels, of an image whose file has the same shape."""

    def __getitem__(self, index: Any) -> Pixels:
        """The pixels at integers and slices of step 1, as in NumPy."""

    def fingerprint(self) -> dict[str, Any]:
        """JSON values that identify the data: cheap, never reads pixels."""

    def change(self) -> str:
        """Describe the change of the file since it was opened; empty when there is none. Cheap, never reads pixels."""


@dataclass(frozen=True)
class Header:
    """Properties of an array that are known before any pixel is read."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    axes: tuple[str, ...]
    chunks: tuple[int, ...]
    scale: tuple[float, ...]
    units: tuple[str | None, ...]
    identity: Mapping[str, Any]  # additional entries of the fingerprint
    mapped: bool = False
    keeps_chunk: bool = False
    ome: OmeImage | None = None
    shards: tuple[int, ...] | None = None
    remarks: tuple[str, ...] = ()
    nodata: float | None = None
    channels: Channels = ()
    georeference: Georeference | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    mask: str | None = None

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        """Length along y and x."""
        return self.shape[self.axes.index("y")], self.shape[self.axes.index("x")]


def make_header(
    shape: Sequence[int],
    dtype: Any,
    *,
    requested: str | None,
    named: Sequence[str | None] | None = None,
    chunks: Sequence[int] | None = None,
    image: bool = True,
    attributes: Mapping[str, Any] | None = None,
    fill: Any = None,
    coordinates: Sequence[str] = (),
    **others: Any,
) -> Header:
    """The validated header of an array, with ``others`` of its fields.

    The ``attributes`` may be of the CF conventions; ``fill`` is another value of pixels without a measurement; ``coordinates`` are names of
    other arrays with the coordinates along its axes.
    With ``image=False`` the array need not be an image: it may have any numeric type and any axes, which have no names.
    """
    pixels = tuple(int(n) for n in shape)
    native = np.dtype(dtype).newbyteorder("=")
    if image:
        _refuse_dtype(native)
        _refuse_shape(pixels)
    elif native.kind not in _NUMERIC_KINDS:
        raise InputError(f"its type is {native}, which is not numeric. Convert it first.")
    axes = choose_axes(requested, named, pixels) if image else ()
    attributes = {name: _as_text(value) for name, value in (attributes or {}).items()}
    holes = nodata_of(attributes, native, fill)
    if image and native.kind == "i" and str(attributes.get("_Unsigned")).lower() == "true":
        raise InputError(
            f"its attribute _Unsigned says that numbers stored as {native} are unsigned. Write it again as u{native}."
        )
    remarks = (
        *(() if requested else remarks_on_axes(axes, pixels, named or ())),
        *_remarks_on_values(holes, attributes, coordinates),
    )
    unknown: dict[str, Any] = {"scale": (1.0,) * len(pixels), "units": (None,) * len(pixels)}
    fields = {"mapped": not chunks, "nodata": holes[0] if holes else None, **unknown, **others}
    chunks = tuple(map(int, chunks)) if chunks else (1,) * len(pixels)
    kept = kept_attributes(attributes)
    return Header(pixels, native, axes, chunks, attributes=kept, remarks=remarks, **fields)


# Attributes of the CF conventions: a value is the stored number times the first, plus the second. And the numbers that
# change nothing.
PACKING = {"scale_factor": 1, "add_offset": 0}


def packing_text(attributes: Mapping[str, Any]) -> str:
    """Factor and offset that make values of the stored numbers, from the attributes; empty where the numbers are the values.

    >>> packing_text({"scale_factor": 0.5, "add_offset": 0}), packing_text({"scale_factor": 1})
    ('scale_factor 0.5 and add_offset 0', '')
    """
    packing = {name: attributes[name] for name in PACKING if name in attributes}
    changes = any(value != PACKING[name] for name, value in packing.items())
    return " and ".join(f"{name} {value!s:.30}" for name, value in packing.items()) if changes else ""


def _as_text(value: Any) -> Any:
    """The text of an attribute of bytes, as netCDF-C writes them; anything else as it is."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def number_of_type(value: Any, dtype: np.dtype[np.generic]) -> float | None:
    """A value that pixels may have, from metadata of any type; None for NaN, which needs no mention, and for nonsense."""
    try:
        number = float(np.asarray(value).item())
        return number if math.isfinite(number) and dtype.type(number) == number else None
    except (TypeError, ValueError, OverflowError):
        return None


# The value that netCDF reads where floats were never written and no `_FillValue` is given.
FILL_OF_NETCDF = 9.969209968386869e36


def nodata_of(attributes: Mapping[str, Any], dtype: np.dtype[Any], fill: Any = None) -> list[float]:
    """The values of pixels without a measurement, besides NaN, by the attributes of the CF conventions and ``fill``.

    >>> nodata_of({"_FillValue": float("nan"), "missing_value": [-9999, 1e20]}, np.dtype("float64"))
    [-9999.0, 1e+20]
    """
    found: list[float | None] = []
    for value in (attributes.get("_FillValue"), fill, attributes.get("missing_value")):
        if isinstance(value, str) and dtype.kind == "f":  # as xarray writes it to Zarr v3
            with suppress(ValueError):
                value = np.frombuffer(base64.b64decode(value, validate=True), "<f8")
        several = value if isinstance(value, list | tuple | np.ndarray) else (value,)
        found += [number_of_type(one, dtype) for one in several]
    return list(dict.fromkeys(number for number in found if number is not None))


def _remarks_on_values(
    holes: Sequence[float], attributes: Mapping[str, Any], coordinates: Sequence[str]
) -> Iterator[str]:
    """Remarks on values that the file names as those of holes, on the range of valid ones, and on coordinates."""
    if others := ", ".join(f"{value:.10g}" for value in holes[1:4]):
        yield (
            f"the file names several values of pixels without a measurement: {holes[0]:.10g} is taken as one, {others} as measured. Write "
            "input.sides.mask, an image that is 0 in such pixels, or replace them"
        )
    names = [name for name in ("valid_min", "valid_max", "valid_range") if name in attributes]
    if valid := ", ".join(f"{name} {attributes[name]!s:.30}" for name in names):
        yield (
            f"the file declares a range of valid values ({valid}), which is not applied: values outside it "
            "count as measured. Write input.sides.mask, an image that is 0 in such pixels"
        )
    stated = attributes.get("coordinates")
    if named := ", ".join(dict.fromkeys([*coordinates, *(stated.split() if isinstance(stated, str) else ())])):
        yield (
            f"its coordinates {named} are not written to the output: copy them from the input. To keep the pixel sizes "
            "that they define, write them as input.spacing"
        )


def kept_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of an array that describe its values, so that they are true of a denoised image too.

    >>> kept_attributes({"units": b"K", "scale_factor": np.array([0.5]), "_FillValue": 0, "coordinates": "lat lon"})
    {'units': 'K', 'scale_factor': 0.5}
    """
    kept = {}
    for name, value in attributes.items():
        if name in _OF_THE_FILE or name.startswith(_OF_THE_FILE_PREFIXES):
            continue
        if isinstance(value, np.ndarray | np.generic):
            value = value.item() if value.size == 1 else value.tolist()
        with suppress(TypeError, ValueError):  # references in HDF5, and numbers that are not finite
            kept[name] = json.loads(json.dumps(_as_text(value), allow_nan=False))
    return kept


def _refuse_shape(shape: tuple[int, ...]) -> None:
    """Raise for a shape that is not an image's."""
    if len(shape) < 2:
        raise InputError(f"the array's shape is {shape}: an image has at least the axes y and x. Reshape it.")
    if 0 in shape:
        raise InputError(f"the array's shape is {shape}: an axis has length 0. Write an array with pixels.")
    if math.prod(shape) >= MOST_PIXELS:
        raise InputError(
            f"the array's shape is {shape}: no disk holds so many pixels. Its metadata are damaged; copy it again from its origin."
        )


def _refuse_dtype(dtype: np.dtype[np.generic]) -> None:
    """Raise for a type that is no number, or that floats cannot represent."""
    if dtype.name in (*DTYPES, *COMPLEX):
        return
    advice = "Convert it first."
    if dtype.kind in "iu":
        advice = "Computation uses floats, which cannot represent all its values: convert it to int32 or float64 first."
    raise InputError(f"the pixels are of type {dtype}, which cannot be used. {advice} Readable: {', '.join(DTYPES)}.")


class Reader(Protocol):
    """An open file."""

    @property
    def header(self) -> Header:
        """Properties of the array."""

    def read(self, region: Region) -> Pixels:
        """The pixels of a region inside the array, in any byte order and memory layout."""


def starts_with(path: Path, *signatures: bytes, offsets: Sequence[int] = (0,)) -> bool:
    """Return True when a file has one of the signatures, which have the same length, at one of the offsets."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return any(os.pread(file.fileno(), len(signatures[0]), offset) in signatures for offset in offsets)


def file_identity(path: str, others: Sequence[str] = ()) -> dict[str, Any]:
    """Size in bytes and modification time in nanoseconds of a file, and of the other files that hold its pixels."""
    status = os.stat(path)
    identity = {"size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    return identity | ({"files": {other: file_identity(other) for other in others}} if others else {})


def listed(names: Sequence[str]) -> str:
    """The first names, for a message."""
    return ", ".join(names[:_MOST_LISTED]) + (", ..." if len(names) > _MOST_LISTED else "")


def refuse_option(kind: str, reason: str, **options: Any) -> None:
    """Raise for options that this format does not support, rather than ignore them silently."""
    for name, value in options.items():
        if value:
            raise InputError(f"{name} is {value!r}, but {reason}. Leave {name} out for a {kind} file.")


Decode = Callable[[tuple[int, ...]], Any]  # the pixels of the chunk with this number along each axis


class KeptChunkReader:
    """A file whose chunks can only be decoded whole; one is decoded at a time, and kept for the next read.

    ``lengths``: lengths of the chunks along each axis.
    """

    def __init__(self, header: Header, decode: Decode, lengths: Sequence[Sequence[int]]) -> None:
        self.header = replace(header, chunks=tuple(map(max, lengths)), mapped=False, keeps_chunk=True)
        self._edges = [list(accumulate(along, initial=0)) for along in lengths]
        self._decode = decode
        self._lock = threading.Lock()
        self._kept: tuple[tuple[int, ...], Pixels] | None = None

    def read(self, region: Region) -> Pixels:
        pixels = np.empty(region.shape, self.header.dtype)
        spans = [
            [n for n in range(len(edges) - 1) if edges[n] < stop and edges[n + 1] > start]
            for edges, start, stop in zip(self._edges, region.start, region.stop, strict=True)
        ]
        for index in product(*spans):
            bounds = [edges[n : n + 2] for edges, n in zip(self._edges, index, strict=True)]
            place = Region(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
            part = region.clip(place)
            chunk = self._chunk(index, place.shape)
            pixels[part.relative_to(region).slices] = chunk[part.relative_to(place).slices]
        return pixels

    def _chunk(self, index: tuple[int, ...], shape: tuple[int, ...]) -> Pixels:
        """A decoded chunk: the kept one, or else the one that is kept from now on."""
        with self._lock:
            if self._kept is not None and self._kept[0] == index:
                return self._kept[1]
            self._kept = None  # which frees its memory before the next one is decoded
            pixels = np.asarray(self._decode(index))
            if pixels.shape != shape or pixels.dtype.newbyteorder("=") != self.header.dtype:
                raise DamagedData(
                    f"a chunk decodes to {pixels.dtype} pixels of shape {pixels.shape} instead of {self.header.dtype} of {shape}. "
                    "Copy the file again from its origin."
                )
            self._kept = (index, pixels)
            return pixels


def whole_image(
    path: str, shape: tuple[int, ...], dtype: Any, decode: Any, *, axes: str | None, remarks: Sequence[str]
) -> KeptChunkReader:
    """The reader of a file with one image of rows, columns and, where there are three axes, channels, which is decoded whole."""
    options: Any = {"named": "yxc"[: len(shape)], "chunks": shape, "identity": file_identity(path)}
    header = make_header(shape, dtype, requested=axes, **options)
    colours = rgb_channels(header.dtype, shape[-1]) if len(shape) == 3 else ()
    header = replace(header, remarks=(*remarks, *header.remarks), channels=colours)
    return KeptChunkReader(header, lambda _: decode(), [(n,) for n in shape])
