"""Metadata of an OME-Zarr image, to which levels are added: every key that is there stays."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halotile.errors import ConfigError, InputError
from halotile.storage.disk.durable import Disk
from halotile.storage.disk.place import ZARR_JSON
from halotile.storage.formats.base import Source
from halotile.storage.formats.ome import first_image
from halotile.storage.formats.parts.ome_scale import coordinates
from halotile.storage.formats.zarr import ome_attributes, open_node
from halotile.storage.sharded.levels import LevelArray
from halotile.storage.sharded.ome_metadata import transformations

VERSIONS = ("0.1", "0.2", "0.3", "0.4", "0.5")
_SHARDING = "sharding_indexed"
_ZATTRS, _ZARRAY, _ZMETADATA = ".zattrs", ".zarray", ".zmetadata"


def open_metadata(group: Path) -> LevelMetadata:
    """The metadata of the image in a group.

    Raises
    ------
    ConfigError
        When levels of means make no sense for it, or its version is not known.
    InputError
        When they name no levels.
    """
    attributes = ome_attributes(open_node(str(group)).attrs)
    image = first_image(attributes.get("multiscales"))
    if "image-label" in attributes:
        raise ConfigError(
            f"{group} is a label image: means of labels are none. Make its levels with another program."
        )
    version = attributes.get("version", image.get("version", VERSIONS[-1]))
    if version not in VERSIONS or not image["datasets"]:
        raise ConfigError(
            f"{group} is an OME-Zarr {version} with {len(image['datasets'])} levels, to which none can be added. "
            f"Write an image of version {VERSIONS[-2]} or {VERSIONS[-1]} with its finest level."
        )
    return LevelMetadata(group, tuple(image["datasets"]))


@dataclass(frozen=True)
class LevelMetadata:
    """The metadata of an image."""

    group: Path
    datasets: tuple[Mapping[str, Any], ...]
    """The entry of each level, as in the attributes."""

    @property
    def zarr_format(self) -> int:
        """Version of Zarr: 2 or 3."""
        return 3 if (self.group / ZARR_JSON).is_file() else 2

    @property
    def names(self) -> list[str]:
        """Paths of the levels in the group."""
        return [entry["path"] for entry in self.datasets]

    def free_names(self) -> Iterator[str]:
        """Names of further levels, such as s1 after s0, that nothing in the group has."""
        found = re.fullmatch(r"([^/]*?)\d+", self.names[-1])
        for number in itertools.count(len(self.names)):
            name = f"{found[1] if found else ''}{number}"
            if not os.path.lexists(self.group / name):
                yield name

    def documents(self, array: LevelArray, base: Source, covered: Sequence[int]) -> dict[str, dict[str, Any]]:
        """The metadata files of a level, by name: those of the coarsest level that is there, with another shape.

        Parameters
        ----------
        array : LevelArray
            The level.
        base : Source
            The coarsest level that is there.
        covered : sequence of int
            Number of its pixels along each axis that one of the new level covers.
        """
        folder, shape = self.group / self.names[-1], list(array.shape)
        files = (ZARR_JSON,) if self.zarr_format == 3 else (_ZARRAY, _ZATTRS)
        documents = {name: _read(folder / name) for name in files if (folder / name).is_file()}
        if self.zarr_format == 3:
            document = documents[ZARR_JSON]
            attributes = document.get("attributes", {})
            document["shape"] = shape
            document["chunk_grid"]["configuration"]["chunk_shape"] = list(array.form.shard)
            codecs = document["codecs"]
            if is_sharded := codecs[0]["name"] == _SHARDING:
                codecs[0]["configuration"]["chunk_shape"] = list(array.form.chunk)
            if json.dumps(codecs).count(f'"{_SHARDING}"') > is_sharded:
                raise ConfigError(
                    f"{folder} has shards within shards, or other codecs before them, which fit no smaller level. "
                    "Write it anew without."
                )
        else:
            attributes = documents.get(_ZATTRS, {})
            documents[_ZARRAY] |= {"shape": shape, "chunks": list(array.form.shard)}
        if base.georeference and "spatial:transform" in attributes:
            rows, columns = (base.axes.index(axis) for axis in "yx")
            place = base.georeference.resampled(covered[rows], covered[columns])
            attributes |= place.attributes([shape[rows], shape[columns]])
        return documents

    def add(
        self, documents: Mapping[str, Mapping[str, Any]], factor: Sequence[int], scratch: Path, disk: Disk
    ) -> None:
        """Name levels whose metadata files these are in the metadata of the group; durable on return.

        The files are written to a folder ``scratch`` of the file system and replaced one after the other, each atomically.
        """

        def replace(name: str, document: Mapping[str, Any]) -> None:
            disk.write_file(scratch / name, [encode(document)])
            disk.move(scratch / name, self.group / name)

        names = dict.fromkeys(path.rpartition("/")[0] for path in documents)
        entries = [self._entry(name, [f**number for f in factor]) for number, name in enumerate(names, 1)]
        if self.zarr_format == 3:
            document = _read(self.group / ZARR_JSON)
            _append(document["attributes"], entries)
            if inline := document.get("consolidated_metadata"):
                inline["metadata"] |= {path.rpartition("/")[0]: added for path, added in documents.items()}
            replace(ZARR_JSON, document)
            return
        attributes = _read(self.group / _ZATTRS)
        _append(attributes, entries)
        # First, because zarr takes the names of levels from the attributes and looks for them here.
        if (file := self.group / _ZMETADATA).is_file():
            consolidated = _read(file)
            consolidated["metadata"] |= {_ZATTRS: attributes, **documents}
            replace(_ZMETADATA, consolidated)
        replace(_ZATTRS, attributes)

    def _entry(self, name: str, covered: Sequence[int]) -> dict[str, Any]:
        """The entry of a level, whose pixels cover so many of the coarsest one that is there."""
        first, last, count = self.datasets[0], self.datasets[-1], len(covered)
        if "coordinateTransformations" not in last:
            return {"path": name}
        finest, base = coordinates({}, first, count), coordinates({}, last, count)
        # Many programs leave out that the first pixel of a coarse level begins where that of the finest one does.
        start = base.position or tuple(
            at + (coarse - fine) / 2
            for at, coarse, fine in zip(
                finest.position or (0.0,) * count, base.scale, finest.scale, strict=True
            )
        )
        return {"path": name, "coordinateTransformations": transformations(base.scale, start, covered)}


def encode(document: Mapping[str, Any]) -> bytes:
    """The bytes of a metadata file."""
    return json.dumps(document, indent=2).encode()


def _append(attributes: dict[str, Any], entries: Sequence[Mapping[str, Any]]) -> None:
    """Append entries to the levels in the attributes of a group."""
    image = ome_attributes(attributes)["multiscales"][0]
    count = len(image["datasets"])
    image["datasets"] += entries
    own = attributes.get("halotile")
    if isinstance(own, dict) and "block" in own:
        own.setdefault("levels", count)


def _read(file: Path) -> dict[str, Any]:
    document = json.loads(file.read_bytes())
    if not isinstance(document, dict):
        raise InputError(f"{file} holds no JSON object. Restore it from its origin.")
    return document
