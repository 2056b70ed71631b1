"""Layouts of outputs: shape, shards, axes and resolution levels, convertible to and from Zarr metadata.

Each pixel of a level is the mean of 2 x 2 (or 2 x 2 x 2) pixels of the one before. A block writes its part of every level, so that nothing is
read again. For this a block starts at a multiple of the pixels that one of the coarsest level covers. Only two numbers are added at once: the
bits do not depend on the block.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, DamagedData, InputError
from halotile.storage.disk.durable import GONE
from halotile.storage.disk.object_path import OutputPath, path_of
from halotile.storage.disk.place import ZARR_JSON
from halotile.storage.grid import Grid, Region
from halotile.storage.sharded import ome_metadata
from halotile.storage.sharded.shards import LEVELS, ShardFormat
from halotile.storage.spacing import Georeference, read_georeference, voxel_shape
from halotile.storage.stored_array import read_error

# Number of files of an output above which shards grow and levels end: file systems are slow with millions of files.
MOST_FILES = 100_000
LARGEST_TOP = 1024  # longest edge in pixels at which an image needs no coarser level
SMALLEST_SHARD = 16  # shortest edge of a shard, in pixels, for which a level is made: it has one file for each block


@dataclass(frozen=True)
class LevelArray:
    """One array of an output."""

    name: str  # folder of the array in the output; empty where the output is the array
    shape: tuple[int, ...]  # shape in pixels
    form: ShardFormat

    @cached_property
    def grid(self) -> Grid:
        """The grid of shards, whose cores are clipped to the array."""
        return Grid(self.shape, self.form.shard, ((0, 0),) * len(self.shape))

    @property
    def folders(self) -> int:
        """Number of folders that hold the shards."""
        counts = self.grid.counts
        return 1 + sum(math.prod(counts[:depth]) for depth in range(1, len(counts)))

    def path(self, root: str | OutputPath) -> OutputPath:
        """Path of the array in an output at ``root``."""
        return path_of(root) / self.name

    def shards(self, region: Region) -> Iterator[tuple[str, Region]]:
        """Path relative to the array of each shard that a region overlaps, with the part of the array that it holds."""
        for index in self.indices(region):
            yield "/".join(["c", *map(str, index)]), self.grid.core_at(index)

    def indices(self, region: Region) -> Iterator[tuple[int, ...]]:
        """Index of each shard that a region overlaps."""
        edges = zip(region.start, region.stop, self.form.shard, strict=True)
        return itertools.product(*(range(a // s, -(-b // s)) for a, b, s in edges))


def level_factor(axes: Sequence[str], scale: Sequence[float], units: Sequence[str | None]) -> tuple[int, ...]:
    """Number of pixels along each axis that one of the next level covers: 2 along y, x, and along z if voxels are cubes.

    >>> level_factor("czyx", (1.0, 0.2, 0.1, 0.1), (None, "micrometer", "micrometer", "micrometer"))
    (1, 1, 2, 2)
    >>> level_factor("zyx", (0.1,) * 3, ("micrometer",) * 3)
    (2, 2, 2)
    """
    space = [i for i, axis in enumerate(axes) if axis in "zyx"]
    voxel = voxel_shape([scale[i] for i in space], [units[i] for i in space])
    halved = "zyx" if voxel is not None and set(voxel) == {1.0} else "yx"
    return tuple(2 if axis in halved else 1 for axis in axes)


def possible_levels(shape: Sequence[int], block: Sequence[int], factor: Sequence[int]) -> int:
    """Number of levels, the finest included, that blocks can write: until an image of :data:`LARGEST_TOP` is left.

    >>> possible_levels((5000, 3000), (2048, 2048), (2, 2)), possible_levels((5000, 3000), (1000, 1000), (2, 2))
    (4, 4)
    >>> possible_levels((99_000, 99_000), (500, 500), (2, 2))
    3
    """
    halved = [i for i, f in enumerate(factor) if f == 2]
    for level in itertools.count(1):
        part = 2**level
        if max(-(-shape[i] // (part // 2)) for i in halved) <= LARGEST_TOP or not all(
            block[i] >= shape[i] or (block[i] % part == 0 and block[i] // part >= SMALLEST_SHARD) for i in halved
        ):
            return level
    raise AssertionError


def level_arrays(
    shape: tuple[int, ...], form: ShardFormat, count: int, factor: Sequence[int], block: Sequence[int]
) -> Iterator[LevelArray]:
    """The arrays of a group, from the finest one: no shard holds pixels of two blocks.

    >>> form = ShardFormat((1024, 1024), (256, 256), "uint8", "lz4")
    >>> [(a.shape, a.form.shard) for a in level_arrays((5001, 6000), form, 3, (2, 2), (3072, 3072))]
    [((5001, 6000), (1024, 1024)), ((2501, 3000), (768, 768)), ((1251, 1500), (768, 768))]
    """
    for level in range(count):
        parts = [f**level for f in factor]
        lengths = tuple(-(-n // part) for n, part in zip(shape, parts, strict=True))
        sizes = zip(shape, lengths, form.shard, form.chunk, block, parts, strict=True)
        cut = [_cut(n, at, shard, chunk, b, part) for n, at, shard, chunk, b, part in sizes]
        shards, chunks = zip(*cut, strict=True)
        yield LevelArray(str(level), lengths, ShardFormat(shards, chunks, form.dtype, form.codec))


def _cut(whole: int, length: int, shard: int, chunk: int, block: int, part: int) -> tuple[int, int]:
    """Edge of a shard and of a chunk along one axis of a level whose pixel covers ``part``."""
    if part == 1:
        return shard, chunk
    if block < whole:
        edge = _divisor(block // part, shard)
        return edge, _divisor(edge, chunk)
    piece = min(chunk, length)
    return min(shard // piece * piece or piece, -(-length // piece) * piece), piece


def _divisor(length: int, most: int) -> int:
    """The longest of equal parts of a length that are no longer than ``most``."""
    return next(length // n for n in itertools.count(-(-length // most)) if length % n == 0)


def coarser(region: Region, factor: Sequence[int]) -> Region:
    """The part of the next level that a block covers."""
    return Region(
        tuple(a // f for a, f in zip(region.start, factor, strict=True)),
        tuple(-(-b // f) for b, f in zip(region.stop, factor, strict=True)),
    )


def halve(pixels: NDArray[Any], factor: Sequence[int], nodata: float | None) -> NDArray[Any]:
    """The means of pairs of pixels along each axis where ``factor`` is 2, as floats; the last of an odd number is by itself.

    Pixels that are not finite, or have the value ``nodata``, are left out; without any other a mean is NaN.

    >>> halve(np.array([[1, 3, 8], [5, 7, 8]], "uint8"), (2, 2), None)
    array([[4., 8.]], dtype=float32)
    >>> halve(np.array([[np.nan, 3.0], [np.nan, np.inf]]), (1, 2), None)
    array([[ 3.],
           [nan]])
    """
    axes = [axis for axis, f in enumerate(factor) if f == 2]
    small = pixels.dtype.itemsize <= 2 or pixels.dtype == np.float32
    means = _means(pixels, axes, np.dtype(np.float32 if small else np.float64))
    if nodata is None and (pixels.dtype.kind in "iu" or np.isfinite(means).all()):
        return means
    valid = np.isfinite(pixels)
    if nodata is not None:
        valid &= pixels != pixels.dtype.type(nodata)
    share = _means(valid, axes, np.dtype(np.float64))
    values = _means(np.where(valid, pixels, pixels.dtype.type(0)), axes, np.dtype(np.float64))
    partial = (share < 1) | ~np.isfinite(means)
    with np.errstate(invalid="ignore", over="ignore"):
        filled = np.where(share > 0, values / share, math.nan)
        means[partial] = filled[partial]
    return means


def avoid_value(pixels: NDArray[Any], value: float) -> None:
    """Give measured pixels that have come out as the value of a hole the next one, as GDAL does.

    >>> pixels = np.array([0, 7, 255], "uint8")
    >>> avoid_value(pixels, 255)
    >>> pixels.tolist()
    [0, 7, 254]
    """
    same = pixels == pixels.dtype.type(value)
    if pixels.dtype.kind == "f":
        pixels[same] = np.nextafter(pixels.dtype.type(value), pixels.dtype.type(math.inf))
    else:
        pixels[same] = value + 1 if value < np.iinfo(pixels.dtype).max else value - 1


def _means(pixels: NDArray[Any], axes: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    for axis in axes:
        length = pixels.shape[axis]
        at: list[slice] = [slice(None)] * pixels.ndim
        first, second = list(at), list(at)
        first[axis], second[axis] = slice(0, length - 1, 2), slice(1, length, 2)
        with np.errstate(over="ignore", invalid="ignore"):
            means = np.add(pixels[tuple(first)], pixels[tuple(second)], dtype=dtype)
            means *= dtype.type(0.5)
        if length % 2:
            at[axis] = slice(length - 1, length)
            means = np.concatenate([means, pixels[tuple(at)].astype(dtype)], axis)
        pixels = means
    return pixels


# Supported output types.
DTYPES = (
    *("uint8", "uint16", "uint32", "int8", "int16", "int32"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
# Attribute with the value of pixels without a measurement, of the CF conventions; xarray takes it for a number, unlike
# _FillValue.
NODATA = "missing_value"
# Attributes that are written for other fields of a layout.
_OF_LAYOUT = re.compile(f"{NODATA}|halotile|zarr_conventions|(spatial|proj):.*")
_LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C = {"name": "crc32c"}


@dataclass(frozen=True)
class Layout:
    """All properties of an output except its pixels and its path."""

    # shape, shard, chunk: shapes of the array, of one file and of one inner chunk, in pixels. A shard is a multiple
    # of the chunk on each axis; it may extend past the end of the array
    shape: tuple[int, ...]
    dtype: str  # one of `DTYPES`
    shard: tuple[int, ...]
    chunk: tuple[int, ...]
    codec: str  # `lz4`, `zstd` or `none`; a crc32c is always added
    axes: tuple[str, ...]  # names of the axes
    scale: tuple[float, ...]  # size of a pixel along each axis, in `units`
    units: tuple[str | None, ...]  # units such as `micrometer`
    ome: bool  # true: the array is level 0 of an OME-Zarr 0.5 group. False: it is a plain Zarr array
    # position of the first pixel along each axis, in `units`; empty: unknown. This and the following fields are
    # stored in OME-Zarr metadata only
    translation: tuple[float, ...] = ()
    name: str | None = None  # name of the image
    omero: Mapping[str, Any] | None = None  # display settings of its channels
    nodata: float | None = None  # value of pixels without a measurement, besides NaN
    georeference: Georeference | None = None  # place on Earth of the pixels along y and x
    # further attributes of the array, as JSON, such as units and scale_factor of the CF conventions
    attributes: Mapping[str, Any] = field(default_factory=dict)
    levels: int = 1  # number of resolution levels of an OME-Zarr
    factor: tuple[int, ...] = ()  # pixels along each axis that one of the next level covers
    block: tuple[int, ...] = ()  # pixels of a block, which writes its part of every level

    def __post_init__(self) -> None:
        parts = (self.shape, self.shard, self.chunk, self.axes, self.scale, self.units)
        if len({len(part) for part in parts}) != 1:
            raise ConfigError(
                f"shape {self.shape}, shard {self.shard}, chunk {self.chunk}, axes {self.axes}, scale {self.scale} "
                f"and units {self.units} have different numbers of axes. Write one entry for each axis."
            )
        if any(n < 1 for n in self.shape):
            raise ConfigError(f"shape is {self.shape}: an axis without pixels cannot be written.")
        if self.dtype not in DTYPES:
            raise ConfigError(f"output.dtype is {self.dtype!r}: write one of {', '.join(DTYPES)}.")
        ShardFormat(self.shard, self.chunk, self.dtype, self.codec)
        if self.ome:
            ome_metadata.check_axes(self.axes)

    @cached_property
    def form(self) -> ShardFormat:
        return ShardFormat(self.shard, self.chunk, self.dtype, self.codec)

    @cached_property
    def arrays(self) -> tuple[LevelArray, ...]:
        """The arrays of the output, from the finest level."""
        if not self.ome:
            return (LevelArray("", self.shape, self.form),)
        factor = self.factor or (1,) * len(self.shape)
        return tuple(level_arrays(self.shape, self.form, self.levels, factor, self.block or self.shape))

    @cached_property
    def grid(self) -> Grid:
        """The smallest blocks that can be written by themselves: shards, or blocks that write several levels."""
        return Grid(self.shape, self.block if self.levels > 1 else self.shard, ((0, 0),) * len(self.shape))

    @property
    def _names(self) -> tuple[str, ...]:
        """Names of the axes in the metadata."""
        return ome_metadata.viewer_names(self.axes) if self.ome else self.axes

    @property
    def size_bytes(self) -> int:
        """Size without compression: the maximum, apart from a few checksums."""
        return sum(len(a.grid) * math.prod(a.form.shard) for a in self.arrays) * np.dtype(self.dtype).itemsize

    @property
    def files(self) -> int:
        """Number of files with pixels: one for each shard."""
        return sum(len(array.grid) for array in self.arrays)

    @property
    def inodes(self) -> int:
        """Number of files and folders, including metadata."""
        groups = len(self.arrays) + 1 if self.ome else 0
        return self.files + sum(array.folders + 1 for array in self.arrays) + groups + 2

    @property
    def coarser_share(self) -> float:
        """Pixels of all coarser levels for each pixel of the finest, at most; 0 without any."""
        return 1 / (math.prod(self.factor) - 1) if self.levels > 1 else 0.0

    def in_levels(self, block: tuple[int, ...], most: int | Literal["auto"] = "auto") -> Layout:
        """The layout with as many coarser levels as an OME-Zarr needs and blocks of that shape can write.

        Unless their number is given there are no more than make :data:`MOST_FILES` files.

        ``block``: shape of a block, in pixels of the output; ``most``: most levels, the finest included; auto: until the coarsest is small.
        """
        factor = level_factor(self.axes, self.scale, self.units)
        block = tuple(map(min, block, self.shape))
        possible = possible_levels(self.shape, block, factor) if self.ome else 1
        levels = possible if most == "auto" else min(possible, most)
        layouts = (replace(self, levels=n, factor=factor, block=block) for n in range(levels, 1, -1))
        fits = (layout for layout in layouts if most != "auto" or layout.files <= MOST_FILES)
        return next(fits, self)

    def as_plain_array(self) -> Layout:
        """The layout of an array with the same pixels, without OME metadata or levels."""
        plain = replace(self, ome=False, omero=None, name=None, translation=())
        return replace(plain, levels=1, factor=(), block=())

    def check_whole_shards(self, region: Region) -> None:
        """Refuse a region that does not start and stop on shard borders or at the end of the array."""
        if not region.size or not region.inside(Region.whole(self.shape)):
            raise ConfigError(f"block {region} is empty or not inside the output's shape {self.shape}.")
        for axis, a, b, edge, n in zip(self.axes, region.start, region.stop, self.grid.block, self.shape, strict=True):
            if a % edge or (b % edge and b != n):
                raise ConfigError(
                    f"a block that is not a whole number of shards is refused: it covers {a} to {b} of axis {axis}, "
                    f"and output.shard is {edge} there. Write a tile.block that is a multiple of {edge}."
                )

    def documents(self) -> dict[str, bytes]:
        """The metadata files by their path in the output, beginning with the one at the root."""
        own_values = dict(self.attributes) | ({} if self.nodata is None else {NODATA: self.nodata})
        if self.ome:
            image = ome_metadata.OmeImage(self.translation, self.name, self.omero)
            axes = (self.axes, self.scale, self.units)
            attributes = ome_metadata.group_attributes(*axes, image, self.levels, self.factor)
            own: dict[str, Any] = {"block": list(self.block)} if self.levels > 1 else {}
            own |= {"axes": list(self.axes)} if self._names != self.axes else {}
            attributes |= self._place(self.arrays[0], own)
            group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
            arrays = {
                f"{array.name}/{ZARR_JSON}": self._array_document(array, own_values | self._place(array))
                for array in self.arrays
            }
            documents = {ZARR_JSON: group, **arrays}
        else:
            array, sizes = self.arrays[0], {"scale": list(self.scale), "units": list(self.units)}
            documents = {ZARR_JSON: self._array_document(array, own_values | self._place(array, sizes))}
        return {name: json.dumps(document, indent=2).encode() for name, document in documents.items()}

    def _place(self, array: LevelArray, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The georeference of a level as attributes, with those of halotile at the root of the output."""
        place = self.georeference
        attributes: dict[str, Any] = {}
        if place is not None:
            at, level = (self.axes.index("y"), self.axes.index("x")), int(array.name or 0)
            covered = (self.factor[i] ** level if level else 1 for i in at)
            attributes |= place.resampled(*covered).attributes([array.shape[i] for i in at])
            if own is not None and place.geokeys:
                own = {**own, "geokeys": dict(place.geokeys)}
        return attributes | ({"halotile": dict(own)} if own else {})

    def describe(self) -> dict[str, Any]:
        """Figures of the output in a plan."""
        return {
            "shard": list(self.shard),
            "chunk": list(self.chunk),
            "codec": self.codec,
            "format": "ome-zarr" if self.ome else "zarr",
            "levels": [list(array.shape) for array in self.arrays],
        }

    def to_json(self) -> dict[str, Any]:
        """The layout as JSON values."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Layout:
        """The layout written by :meth:`to_json`; fields that an older version lacks get their defaults.

        >>> layout = Layout((5, 5), "uint8", (4, 4), (2, 2), "lz4", ("y", "x"), (1.0, 1.0), (None, None), False)
        >>> Layout.from_json(layout.to_json()) == layout
        True
        """
        fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        if place := fields.get("georeference"):
            fields["georeference"] = Georeference(**{**place, "transform": tuple(place["transform"])})
        return cls(**fields)

    def _array_document(self, array: LevelArray, attributes: dict[str, Any]) -> dict[str, Any]:
        itemsize = np.dtype(self.dtype).itemsize
        codecs: list[dict[str, Any]] = [_LITTLE_ENDIAN if itemsize > 1 else {"name": "bytes"}]
        if self.codec != "none":
            options = {"cname": self.codec, "clevel": LEVELS[self.codec], "shuffle": "shuffle"}
            options |= {"typesize": itemsize, "blocksize": 0}
            codecs.append({"name": "blosc", "configuration": options})
        sharding = {
            "chunk_shape": list(array.form.chunk),
            "codecs": [*codecs, _CRC32C],
            "index_codecs": [_LITTLE_ENDIAN, _CRC32C],
            "index_location": "end",
        }
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(array.shape),
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.form.shard)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": {"f": "NaN", "c": ["NaN", "NaN"]}.get(self.form.stored.kind, 0),
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "dimension_names": list(self._names),
            "attributes": attributes,
        }


def read_layout(place: str | OutputPath) -> Layout:
    """The layout of the output at ``place``."""
    root = path_of(place)
    top = _read_document(root / ZARR_JSON)
    ome = top.get("node_type") == "group"
    array = _read_document(root / ome_metadata.FINEST / ZARR_JSON) if ome else top
    try:
        layout = _from_documents(top, array, ome)
        ours = layout._array_document(layout.arrays[0], {}) == {**array, "attributes": {}}
    except (KeyError, TypeError, ValueError, IndexError):
        ours = False
    if not ours:
        raise InputError(
            f"{root} was not laid out by halotile: it is no Zarr v3 array with shards, crc32c and one of its codecs. "
            "Read it with any Zarr library."
        )
    return layout


def _from_documents(top: dict[str, Any], array: dict[str, Any], ome: bool) -> Layout:
    names = tuple(array["dimension_names"])
    sharding, attributes = array["codecs"][0]["configuration"], array.get("attributes", {})
    compression = [codec for codec in sharding["codecs"] if codec["name"] == "blosc"]
    if ome:
        fields = ome_metadata.read_attributes(top["attributes"])
    else:
        fields = {key: tuple(array["attributes"]["halotile"][key]) for key in ("scale", "units")}
    return Layout(
        shape=tuple(array["shape"]),
        dtype=array["data_type"],
        shard=tuple(array["chunk_grid"]["configuration"]["chunk_shape"]),
        chunk=tuple(sharding["chunk_shape"]),
        codec=compression[0]["configuration"]["cname"] if compression else "none",
        axes=ome_metadata.own_axes(top["attributes"], names) or names if ome else names,
        ome=ome,
        nodata=attributes.get(NODATA),
        georeference=_place_in(top, array),
        attributes={name: value for name, value in attributes.items() if not _OF_LAYOUT.fullmatch(name)},
        **fields,
    )


def _place_in(top: dict[str, Any], array: dict[str, Any]) -> Georeference | None:
    """The georeference of the finest level."""
    sizes = dict(zip(array["dimension_names"], array["shape"], strict=True))
    attributes = {**top.get("attributes", {}), **array.get("attributes", {})}
    return read_georeference(attributes, [sizes.get("y", 0), sizes.get("x", 0)])


def _read_document(path: OutputPath) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except GONE:
        raise InputError(f"{path} is not there: {path.parent} is no Zarr v3. Write the path of one.") from None
    except OSError as error:
        raise read_error(f"{path}: it cannot be read", error) from error
    except ValueError as error:
        raise DamagedData(f"{path} is damaged: {error}. Restore it from a copy.") from None
    if not isinstance(document, dict):
        raise DamagedData(f"{path} is damaged: it holds no JSON object. Restore it from a copy.")
    return document
