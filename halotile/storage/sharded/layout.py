"""The layout of an output: shape, shards, axes, as a value that turns into Zarr metadata and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from halotile.errors import ConfigError, DamagedData, InputError
from halotile.storage.disk.durable import GONE
from halotile.storage.grid import Grid, Region
from halotile.storage.sharded import ome_metadata
from halotile.storage.sharded.marks import METADATA
from halotile.storage.sharded.shards import LEVELS, ShardFormat
from halotile.storage.stored_array import refusal

DTYPES = ("uint8", "uint16", "uint32", "int8", "int16", "int32", "float16", "float32", "float64")
"""Types that an output can have."""


@dataclass(frozen=True)
class Layout:
    """Everything about an output but its pixels and its path.

    Parameters
    ----------
    shape, shard, chunk : tuple of int
        Shapes of the array, of one file and of one inner chunk, in pixels. A shard is a multiple of the
        chunk on each axis; it may reach past the end of the array.
    dtype : str
        One of :data:`DTYPES`.
    codec : str
        ``lz4``, ``zstd`` or ``none``; a crc32c is always added.
    axes : tuple of str
        Names of the axes.
    scale : tuple of float
        Size of a pixel along each axis, in ``units``.
    units : tuple of (str or None)
        Such as ``micrometer``.
    ome : bool
        Whether the array is level 0 of an OME-Zarr 0.5 group, or stands by itself.
    translation : tuple of float
        Place of the first pixel along each axis, in ``units``; empty: not told. This and what follows stand
        in OME-Zarr metadata only.
    name : str or None
        Name of the image.
    omero : mapping or None
        How viewers show its channels.

    Raises
    ------
    ConfigError
        When the parts do not fit together.
    """

    shape: tuple[int, ...]
    dtype: str
    shard: tuple[int, ...]
    chunk: tuple[int, ...]
    codec: str
    axes: tuple[str, ...]
    scale: tuple[float, ...]
    units: tuple[str | None, ...]
    ome: bool
    translation: tuple[float, ...] = ()
    name: str | None = None
    omero: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        parts = (self.shape, self.shard, self.chunk, self.axes, self.scale, self.units)
        if len({len(part) for part in parts}) != 1:
            raise ConfigError(
                f"shape {self.shape}, shard {self.shard}, chunk {self.chunk}, axes {self.axes}, scale {self.scale} "
                f"and units {self.units} name different numbers of axes. Write one entry for each axis."
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
        """How one shard is laid out."""
        return ShardFormat(self.shard, self.chunk, self.dtype, self.codec)

    @cached_property
    def grid(self) -> Grid:
        """The shards: their cores are what is inside the array."""
        return Grid(self.shape, self.shard, ((0, 0),) * len(self.shape))

    def array_path(self, root: str | Path) -> Path:
        """Where the array lies, in an output at ``root``."""
        return Path(root, ome_metadata.LEVEL) if self.ome else Path(root)

    def shard_path(self, root: str | Path, index: tuple[int, ...]) -> Path:
        """File of the shard at a position of the grid."""
        return self.array_path(root) / self.shard_name(index)

    @staticmethod
    def shard_name(index: tuple[int, ...]) -> str:
        """The same below the array."""
        return "/".join(["c", *map(str, index)])

    @property
    def size_bytes(self) -> int:
        """Size without compression: the most it can take, but for a few checksums."""
        shards = math.prod(-(-n // s) for n, s in zip(self.shape, self.shard, strict=True))
        return shards * math.prod(self.shard) * np.dtype(self.dtype).itemsize

    @property
    def files(self) -> int:
        """How many files hold the pixels: one for each shard."""
        return len(self.grid)

    @property
    def inodes(self) -> int:
        """Files and folders, those of metadata included."""
        counts = [-(-n // s) for n, s in zip(self.shape, self.shard, strict=True)]
        folders = 2 + sum(math.prod(counts[:depth]) for depth in range(1, len(counts)))
        return self.files + folders + 2 * (1 + self.ome)

    def check_whole_shards(self, region: Region) -> None:
        """Refuse a region that does not start and stop on shard borders, or the array's end.

        Raises
        ------
        ConfigError
            Naming the axis, the shard and lengths that would do.
        """
        if not region.size or not region.inside(Region.whole(self.shape)):
            raise ConfigError(f"block {region} is empty or not inside the output's shape {self.shape}.")
        for axis, a, b, edge, n in zip(
            self.axes, region.start, region.stop, self.shard, self.shape, strict=True
        ):
            if a % edge or (b % edge and b != n):
                raise ConfigError(
                    f"a block that is not a whole number of shards is refused: it covers {a} to {b} of axis {axis}, "
                    f"and output.shard is {edge} there. Write a tile.block that is a multiple of {edge}."
                )

    def documents(self) -> dict[str, bytes]:
        """The metadata files by their path in the output; the one at the top comes first."""
        if not self.ome:
            sizes = {"scale": list(self.scale), "units": list(self.units)}
            return {METADATA: _to_bytes(self._array_document({"halotile": sizes}))}
        image = ome_metadata.OmeImage(self.translation, self.name, self.omero)
        attributes = ome_metadata.group_attributes(self.axes, self.scale, self.units, image)
        group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        return {
            METADATA: _to_bytes(group),
            f"{ome_metadata.LEVEL}/{METADATA}": _to_bytes(self._array_document({})),
        }

    def to_json(self) -> dict[str, Any]:
        """The layout as plain values."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Layout:
        """The layout that :meth:`to_json` wrote; fields that an older one lacks have their defaults.

        Examples
        --------
        >>> layout = Layout((5, 5), "uint8", (4, 4), (2, 2), "lz4", ("y", "x"), (1.0, 1.0), (None, None), False)
        >>> Layout.from_json(layout.to_json()) == layout
        True
        """
        parts: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return cls(**parts)

    def _array_document(self, attributes: dict[str, Any]) -> dict[str, Any]:
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        crc = {"name": "crc32c"}
        inner = [self._bytes_codec(), *self._compression(), crc]
        sharding = {
            "chunk_shape": list(self.chunk),
            "codecs": inner,
            "index_codecs": [little, crc],
            "index_location": "end",
        }
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.shard)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": "NaN" if self.form.stored.kind == "f" else 0,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "dimension_names": list(self.axes),
            "attributes": attributes,
        }

    def _bytes_codec(self) -> dict[str, Any]:
        if np.dtype(self.dtype).itemsize == 1:
            return {"name": "bytes"}
        return {"name": "bytes", "configuration": {"endian": "little"}}

    def _compression(self) -> list[dict[str, Any]]:
        if self.codec == "none":
            return []
        options = {
            "cname": self.codec,
            "clevel": LEVELS[self.codec],
            "shuffle": "shuffle",
            "typesize": np.dtype(self.dtype).itemsize,
            "blocksize": 0,
        }
        return [{"name": "blosc", "configuration": options}]


def read_layout(root: str | Path) -> Layout:
    """The layout of an output that stands at ``root``.

    Raises
    ------
    InputError
        When no Zarr stands there, or one that was laid out by another program.
    DamagedData
        When its metadata cannot be read.
    """
    top = _read_document(Path(root, METADATA))
    ome = top.get("node_type") == "group"
    array = _read_document(Path(root, ome_metadata.LEVEL, METADATA)) if ome else top
    try:
        layout = _from_documents(top, array, ome)
        ours = layout._array_document({}) == {**array, "attributes": {}}
    except (KeyError, TypeError, ValueError, IndexError):
        ours = False
    if not ours:
        raise InputError(
            f"{root} was not laid out by halotile: it is no Zarr v3 array with shards, crc32c and one of its codecs. "
            "Read it with any Zarr library."
        )
    return layout


def _from_documents(top: dict[str, Any], array: dict[str, Any], ome: bool) -> Layout:
    sharding = array["codecs"][0]["configuration"]
    compression = [codec for codec in sharding["codecs"] if codec["name"] == "blosc"]
    if ome:
        words = ome_metadata.read_attributes(top["attributes"])
    else:
        words = {word: tuple(array["attributes"]["halotile"][word]) for word in ("scale", "units")}
    return Layout(
        shape=tuple(array["shape"]),
        dtype=array["data_type"],
        shard=tuple(array["chunk_grid"]["configuration"]["chunk_shape"]),
        chunk=tuple(sharding["chunk_shape"]),
        codec=compression[0]["configuration"]["cname"] if compression else "none",
        axes=tuple(array["dimension_names"]),
        ome=ome,
        **words,
    )


def _read_document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except GONE:
        raise InputError(
            f"{path} is not there: {path.parent} is no Zarr v3. Write the path of one."
        ) from None
    except OSError as error:
        raise refusal(f"{path}: it cannot be read", error) from error
    except ValueError as error:
        raise DamagedData(f"{path} is damaged: {error}. Restore it from a copy.") from None
    if not isinstance(document, dict):
        raise DamagedData(f"{path} is damaged: it holds no object. Restore it from a copy.")
    return document


def _to_bytes(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=2).encode()
