"""Metadata of an image without its pixels, and a configuration to start from."""

from __future__ import annotations

import glob
import itertools
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halotile.errors import DamagedData, HalotileError, InputError, InputUnreadable
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.base import Row
from halotile.graphs.kinds.sections import STEM, DenoiserChoice, Input, Output, is_pattern, jobs_of
from halotile.graphs.words import bytes_text, counted, first_line, flow, pixel_size_text, shape_text
from halotile.storage.disk.place import outside_zarr

if TYPE_CHECKING:
    from halotile.storage.arrays import Source

MOST_LEVELS = 32
NO_IMAGES = (".run", ".msk", ".ovr")  # suffixes of what belongs to an image


def describe(path: str, *, level: int = 0, dataset: str | None = None) -> dict[str, Any]:
    """Return the metadata of an image, or of the first of several, as JSON values; no configuration where the pixels are complex.

    A folder stands for its images of the most frequent kind.
    """
    from halotile.storage.images.planes import known_channels

    patterns = _patterns_of(path)
    pattern = next(iter(patterns), None)
    images = _images_of(pattern) if pattern else [path]
    named = pattern or path
    path, source, remarks = _first_readable(images, level, dataset)
    known = known_channels(source)
    names = [str(channel.get("label", f"number {n}")) for n, channel in enumerate(known)]
    remarks += [
        f"{counted(count, 'further image')} in the folder: write another job for {other}"
        for other, count in list(patterns.items())[1:]
    ]
    return {
        "path": path,
        "pattern": pattern,
        "images": len(images),
        "format": source.format,
        "shape": list(source.shape),
        "axes": "".join(source.axes),
        "dtype": str(source.dtype),
        "chunks": list(source.chunks),
        "scale": list(source.scale),
        "units": list(source.units),
        "channels": names if any("label" in channel for channel in known) else [],
        "nodata": source.nodata,
        "georeference": _georeference(source),
        "remarks": [*remarks, *source.remarks],
        "bytes": math.prod(source.shape) * source.dtype.itemsize,
        "level": level,
        "levels": [list(shape) for shape in _levels(path, dataset)],
        "dataset": dataset,
        "series": [list(shape) for shape in _series(source)],
        "config": None if source.dtype.kind == "c" else suggest(named, source, level=level, dataset=dataset),
    }


def _first_readable(images: list[str], level: int, dataset: str | None) -> tuple[str, Source, list[str]]:
    """Return path and content of the first image that is not damaged, and a remark on those before it."""
    from halotile.storage.arrays import open_source

    errors: list[InputError] = []
    for image in images:
        try:
            source = open_source(image, level=level, dataset=dataset, complex_pixels=True)
        except (DamagedData, InputUnreadable) as error:
            errors.append(error)
        else:
            more = f" ({counted(len(errors) - 1, 'image')} after it as well)" if errors[1:] else ""
            return image, source, [f"left out{more}: {first_line(str(error))}" for error in errors[:1]]
    raise errors[0]


def _patterns_of(path: str) -> dict[str, int]:
    """Return the patterns of several images, with counts: the path itself, or for a folder its names by suffix, most frequent first."""
    from halotile.storage.arrays import open_source

    if is_pattern(path):
        return {path: 0}
    if not os.path.isdir(path):
        return {}
    names = {entry.name for entry in Path(path).iterdir() if entry.name[0] != "."}
    alike: dict[str, list[str]] = {}
    for name in sorted(names):
        # What a run wrote is no image to begin with.
        if (suffix := Path(name).suffix) and f"{name}.run" not in names and not name.endswith(NO_IMAGES):
            alike.setdefault(suffix, []).append(name)
    found = {}
    for suffix, group in [("", [""]), *sorted(alike.items(), key=lambda item: -len(item[1]))]:
        try:
            open_source(os.path.join(path, group[0]), complex_pixels=True)
        except DamagedData:
            pass  # said of the file by its name
        except HalotileError:
            continue
        if not suffix:
            return {}
        found[os.path.normpath(os.path.join(glob.escape(path), f"*{suffix}"))] = len(group)
    return found


def _images_of(pattern: str) -> list[str]:
    """Return the paths that a job with the pattern takes."""
    output, choice = Output(path=_output_of(pattern)), DenoiserChoice(name="none")
    return list(jobs_of(Denoising(input=Input(path=pattern), output=output, denoiser=choice)))


def _output_of(path: str, word: str = "denoised") -> str:
    """Return the path of the output for an image, or those for a pattern."""
    if is_pattern(path):
        plain = itertools.takewhile(lambda part: not glob.has_magic(part), Path(path).parts[:-1])
        return os.path.join(os.path.dirname(outside_zarr(os.path.join(*plain, STEM))), f"{STEM}.{word}.zarr")
    folder, name = os.path.split(outside_zarr(path.rstrip("/")))
    suffixes = r"(\.ome)?\.(zarr|tiff?|npy|h5|hdf5|png|jpe?g|czi|nd2|lif|vsi)$"
    stem = re.sub(suffixes, "", name, flags=re.IGNORECASE)
    return os.path.join("" if "://" in path else folder, f"{stem}.{word}.zarr")


def _georeference(source: Source) -> dict[str, Any] | None:
    """Return the coordinate reference system and the transform of the pixels; None where the image has no place on Earth."""
    place = source.georeference
    return None if place is None else {**place.crs, "spatial:transform": list(place.transform)}


def _levels(path: str, dataset: str | None) -> list[tuple[int, ...]]:
    """Return the shapes of the levels, finest first. Each is smaller than the one before; others are not levels."""
    from halotile.storage.arrays import open_source

    shapes: list[tuple[int, ...]] = []
    for level in range(MOST_LEVELS):
        try:
            shape = open_source(path, level=level, dataset=dataset, complex_pixels=True).shape
        except HalotileError:
            break
        if shapes and math.prod(shape) >= math.prod(shapes[-1]):
            break
        shapes.append(shape)
    return shapes


def _series(source: Source) -> list[tuple[int, ...]]:
    """Return the shapes of the images in a TIFF that a dataset chooses from; none for other formats."""
    if source.format != "tiff":
        return []
    from halotile.storage.formats.tiff import series_shapes

    return series_shapes(source.path)


def suggest(path: str, source: Source, *, level: int = 0, dataset: str | None = None) -> str:
    """Return a configuration that denoises the image, or those that a pattern matches, as a starting point."""
    return job_text(path, _denoiser(source), "denoised", level=level, dataset=dataset)


def job_text(
    path: str, denoiser: str, word: str, *, level: int = 0, dataset: str | None = None, axes: str | None = None
) -> str:
    """Return a configuration with a denoiser, whose output has the name of the image and a word."""
    chosen = {"path": flow(path)}
    if level:
        chosen["level"] = str(level)
    if dataset is not None:
        chosen["dataset"] = flow(dataset)
    if axes is not None:
        chosen["axes"] = axes
    inside = ", ".join(f"{key}: {value}" for key, value in chosen.items())
    return (
        "version: 1\n"
        "job: denoise\n"
        f"input: {{{inside}}}\n"
        f"output: {{path: {flow(_output_of(path, word))}}}\n"
        f"denoiser: {denoiser}\n"
    )


def _denoiser(source: Source) -> str:
    """Return a denoiser that suits pixels of any unit: in units of the noise, where there is noise to measure."""
    sides = [length for axis, length in zip(source.axes, source.shape, strict=True) if axis in "yx"]
    if source.dtype.kind == "b" or min(sides) < 2:
        return "{name: median, size: 3}"
    return "{name: tv, strength: 1.0, sigma: auto}  # in noise levels: 0.5 is gentle, 2 is strong"


def info_rows(facts: dict[str, Any]) -> list[Row]:
    """Return the metadata as rows for people."""
    rows = []
    chunks = shape_text(facts["chunks"]) if max(facts["chunks"]) > 1 else "none, any part is read by itself"
    if facts["pattern"]:
        matching = f"{facts['images']:,} match {facts['pattern']}"
        rows.append(("images", f"{matching}; what follows is the first, {Path(facts['path']).name}"))
    rows += [
        ("format", str(facts["format"])),
        ("shape", f"{shape_text(facts['shape'])}, axes {facts['axes']}"),
        ("pixels", f"{facts['dtype']}, {bytes_text(facts['bytes'])} uncompressed"),
        ("chunks", chunks),
        ("pixel size", pixel_size_text(facts["axes"], facts["scale"], facts["units"])),
    ]
    if facts["channels"]:
        rows.append(("channels", ", ".join(facts["channels"])))
    if facts["nodata"] is not None:
        rows.append(("holes", f"pixels of {facts['nodata']:g}, by the file: they stay as they are"))
    if place := facts["georeference"]:
        x, y = place["spatial:transform"][2], place["spatial:transform"][5]
        rows.append(("georeference", f"{place.get('proj:code', 'no EPSG code')}, from x {x:.10g}, y {y:.10g}"))
    rows += [("note", remark) for remark in facts["remarks"]]
    for label in ("series", "levels"):
        shapes = facts[label] if len(facts[label]) > 1 else ()
        rows += [("" if n else label, f"{n}: {shape_text(shape)}") for n, shape in enumerate(shapes)]
    return rows


def config_text(facts: dict[str, Any]) -> str:
    """Return the configuration, with the commands that take it."""
    if not facts["config"]:
        return "Its pixels are complex: `recon-cli preview` shows their modulus and phase."
    it = "them" if facts["pattern"] else "it"
    hint = f"To denoise {it}, write this to config.yaml and type `recon-cli run config.yaml`"
    if "sigma" in facts["config"]:
        hint += ".\n`recon-cli try config.yaml sheet.png --set denoiser.strength=0.5,1,2` compares several strengths on a crop first"
    return f"{hint}:\n\n{facts['config'].rstrip()}"
