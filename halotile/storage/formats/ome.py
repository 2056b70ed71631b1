"""Resolution levels of OME-Zarr 0.4 and 0.5 images."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from halotile.errors import InputError
from halotile.storage.formats import zarr as plain
from halotile.storage.formats.base import Header, Source
from halotile.storage.formats.parts.ome_scale import coordinates, known_sizes
from halotile.storage.run_directory.json_files import digest
from halotile.storage.sharded.ome_metadata import OmeImage, checked_omero, own_axes, valid_parts
from halotile.storage.spacing import read_georeference
from halotile.storage.stored_array import StoredArray

_BEFORE_NAMES = "tczyx"  # axes of an image of OME-Zarr 0.1 or 0.2: always five

_FILL_REMARK = (
    "the fill value is 0, which xarray reads as pixels without a measurement: here 0 is a measurement. If it is none, write "
    "input.nodata: 0"
)


def claims(path: Path) -> bool:
    """Return True when the attributes at the root of a Zarr describe a multiscale image."""
    if not (path.is_dir() or path.suffix == ".zip"):
        return False
    new = plain.read_document(path, "zarr.json")
    attributes = new.get("attributes", {}) if isinstance(new, dict) else plain.read_document(path, ".zattrs")
    return isinstance(attributes, dict) and bool(plain.ome_attributes(attributes).get("multiscales"))


def open(  # noqa: A001 - common to all formats
    path: str, *, level: int = 0, dataset: str | None = None, axes: str | None = None, inside: str = ""
) -> Source:
    """Open one level of the first image of an OME-Zarr group, or of the one that ``dataset`` names; the group is ``inside`` another Zarr."""
    return StoredArray(path, "ome", OmeReader, level=level, dataset=dataset, axes=axes, inside=inside)


class OmeReader(plain.ArrayReader):
    """An open level of an OME-Zarr image."""

    def __init__(self, path: str, *, level: int, dataset: str | None, axes: str | None, inside: str) -> None:
        top = plain.open_node(path)
        group = top[inside] if inside else top
        attributes = plain.ome_attributes(group.attrs)
        images: Any = attributes.get("multiscales")
        omero = attributes.get("omero")
        image, own_level = named_image(images, dataset) or (first_image(images), None)
        if own_level is not None:
            level = _only_level(own_level, level, dataset)
        entry = _level_entry(image, level)
        array = plain.choose_array(group, entry["path"])
        named, units = _axis_names(image.get("axes"), len(array.shape))
        named = own_axes(group.attrs, named or ()) or named
        stated = coordinates(image, entry, len(array.shape))
        super().__init__(path, array)
        fill = plain.fill_of_xarray(array)
        # Writers of OME-Zarr name the axes for xarray, but leave the fill value at its default.
        on_fill = () if fill is None or fill else (_FILL_REMARK,)
        header = self.make_header(
            requested=axes,
            named=named,
            identity={"level": level, "multiscales": digest(image), **self.identity()},
            fill=fill or None,
            ome=OmeImage(stated.position, _text(image.get("name")), checked_omero(omero)),
        )
        if omero and checked_omero(omero) is None:
            header = replace(header, channels=valid_parts(omero))
        remarks = [
            *header.remarks,
            *(_on_other_images(images) if dataset is None else ()),
            *_on_channels(omero, dict(zip(header.axes, array.shape, strict=True)).get("c", 1)),
        ]
        sizes, known, on_sizes = known_sizes(header.axes, stated, units or (None,) * len(header.axes))
        found = {**group.attrs, **array.attrs, "halotile": group.attrs.get("halotile")}
        place = read_georeference(found, header.rows_and_columns)
        header = replace(header, scale=sizes, units=known, georeference=place)
        self.header: Header = replace(header, remarks=(*remarks, *on_fill, *on_sizes))


def first_image(multiscales: Any) -> Mapping[str, Any]:
    """The first image of a group, after validation of its levels."""
    image: Any = multiscales[0] if isinstance(multiscales, list) and multiscales else None
    if _paths(image) is not None:
        return dict(image)
    raise InputError(
        "its OME-Zarr attributes name no levels: multiscales[0].datasets is not a list with a path in each entry. "
        "Repair the attributes, or write dataset: the path of an array inside."
    )


def _on_other_images(images: Any) -> Iterator[str]:
    """A remark on images of the group besides the first, with names that choose them."""
    if isinstance(images, list) and len(images) > 1:
        others = _other_images(images)
        one = f"{'one of ' if others[1:] else ''}{', '.join(others)}"
        other = f": for another, write input.dataset: {one}" if others else ""
        yield f"it has {len(images)} multiscales, and this is the first{other}"


def _on_channels(omero: Any, count: int) -> Iterator[str]:
    """Remarks on display settings that are not valid, or not of this number of channels."""
    if omero and checked_omero(omero) is None:
        yield "its omero attribute is not valid: only valid names and colours of it are kept"
    if (described := len(valid_parts(omero))) not in (0, count):
        yield f"its omero attribute describes {described} of {count} channels"


def _other_images(images: Sequence[Any]) -> list[str]:
    """A path that names each image after the first: of an array that no image before it has."""
    seen, others = set(_paths(images[0]) or ()), []
    for paths in map(_paths, images[1:]):
        others += [path for path in paths or () if path not in seen][:1]
        seen |= {*(paths or ())}
    return others


def named_image(multiscales: Any, dataset: str | None) -> tuple[Mapping[str, Any], int | None] | None:
    """The image of a group with an array as one of its levels, and its number; or the image whose levels are all in a nested group."""
    for image in multiscales if isinstance(multiscales, list) and dataset else ():
        paths = _paths(image) or []
        if dataset in paths:
            return image, paths.index(dataset)
        if paths and all(path.startswith(f"{dataset}/") for path in paths):
            return image, None
    return None


def _paths(image: Any) -> list[str] | None:
    """The path of each level of an image; None where its attributes are not valid."""
    entries = image.get("datasets") if isinstance(image, dict) else None
    if not isinstance(entries, list):
        return None
    paths: list[Any] = [entry.get("path") if isinstance(entry, dict) else None for entry in entries]
    return paths if all(isinstance(path, str) for path in paths) else None


def _only_level(own: int, requested: int, dataset: str | None) -> int:
    """The level that a dataset is, after refusal of another one."""
    if requested not in (0, own):
        raise InputError(
            f"level is {requested}, but dataset {dataset} is level {own} itself. Leave level out, or write another dataset."
        )
    return own


def _level_entry(image: Mapping[str, Any], level: int) -> Mapping[str, Any]:
    """The entry of one level in the multiscale attributes."""
    entries: Sequence[Mapping[str, Any]] = image["datasets"]
    if level < len(entries):
        return entries[level]
    known = ", ".join(f"{number} ({entry['path']!r})" for number, entry in enumerate(entries))
    raise InputError(f"level is {level}, but this image has no such level. Write one of: {known or 'none'}.")


def _axis_names(entries: Any, count: int) -> tuple[Sequence[str | None] | None, Sequence[str | None] | None]:
    """Name and unit of each axis; entries are dictionaries since 0.4, plain names in 0.3, and tczyx without any before."""
    if entries is None and count == len(_BEFORE_NAMES):
        return list(_BEFORE_NAMES), None
    if not isinstance(entries, list):
        return None, None
    axes = [entry if isinstance(entry, dict) else {"name": entry} for entry in entries]
    units = [_text(axis.get("unit")) for axis in axes]
    return [_axis_name(axis) for axis in axes], units if len(axes) == count else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _axis_name(axis: Mapping[str, Any]) -> str:
    """The name of an axis, or its type when that identifies a longer name."""
    name = str(axis.get("name", ""))
    return str(axis["type"]) if len(name) != 1 and axis.get("type") in ("time", "channel") else name
