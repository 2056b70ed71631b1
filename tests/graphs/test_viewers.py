"""Outputs, and images to which levels were added, in the libraries that viewers open images with: calibrated, named, in levels.

requirements-oracles.txt installs them.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tifffile
import zarr

from halotile.cli.info import describe
from halotile.graphs.plans.plan import make_plan
from halotile.storage.arrays import open_source
from halotile.storage.images.added_levels import add_levels
from halotile.storage.sharded import layout
from tests.support import Image, job_of, noisy_image, run_inline, write_zarr

MonkeyPatch = pytest.MonkeyPatch

pytestmark = pytest.mark.filterwarnings("ignore")  # of these libraries

LUTS = [np.outer(colour, np.arange(256)).astype("uint8") for colour in ([1, 0, 0], [0, 1, 0])]
Seen = tuple[list[Any], dict[str, Any]]
"""Levels as a library reads them, and what it says of them."""


def in_ome_zarr(path: Path) -> Seen:
    io, reader = pytest.importorskip("ome_zarr.io"), pytest.importorskip("ome_zarr.reader")
    (node,) = reader.Reader(io.parse_url(path))()
    return node.data, {"scales": [step[0]["scale"] for step in node.metadata["coordinateTransformations"]]}


def in_ngff_zarr(path: Path) -> Seen:
    images = pytest.importorskip("ngff_zarr").from_ngff_zarr(str(path), validate=True).images
    scales = [[image.scale[axis] for axis in image.dims] for image in images]
    return [image.data for image in images], {"scales": scales, "x": [image.translation["x"] for image in images]}


def in_bioio(path: Path) -> Seen:
    image, levels = pytest.importorskip("bioio_ome_zarr").Reader(str(path)), []
    for level in image.resolution_levels:
        image.set_resolution_level(level)
        levels.append(image.data)
    image.set_resolution_level(0)
    sizes = {"y": image.physical_pixel_sizes.Y, "x": image.physical_pixel_sizes.X, "t": image.time_interval}
    return levels, {"names": image.channel_names, "sizes": sizes}


def in_napari(path: Path) -> Seen:
    napari = pytest.importorskip("napari_ome_zarr")
    ((data, shown, kind),) = napari.napari_get_reader(str(path))(str(path))
    assert kind == "image"
    named = {"names": "name", "shown": "scale", "colours": "colormap", "limits": "contrast_limits"}
    return data, {name: shown[key] for name, key in named.items() if key in shown}


READERS = [in_ome_zarr, in_ngff_zarr, in_bioio, in_napari]


class Expected(NamedTuple):
    """What viewers should see of an output."""

    axes: str
    scale: list[float]
    units: list[str | None]
    names: list[str]
    colours: list[str]
    limits: list[list[int]] | None
    x: float = 0.0


def hyperstack(path: Path) -> Image:
    """Times, planes and channels as ImageJ stores them."""
    pixels = noisy_image((2, 3, 2, 96, 80), "uint16")
    words: Any = {"axes": "TZCYX", "unit": "um", "spacing": 0.5, "finterval": 2.0}
    words |= {"LUTs": LUTS, "Ranges": (5.0, 900.0, 0.0, 70.0)}
    tifffile.imwrite(path, pixels, imagej=True, resolution=(5, 5), metadata=words)
    return pixels.transpose(0, 2, 1, 3, 4)


def microscope(path: Path) -> Image:
    """Channels of an OME-TIFF, with their names."""
    pixels = noisy_image((3, 96, 80), "uint16")
    channels = {"Name": ["DAPI", "GFP", "Cy5"], "Color": [65535, 16711935, -1]}
    at = {"PositionX": [40.0] * 3, "PositionXUnit": ["µm"] * 3}
    words: Any = {"axes": "CYX", "PhysicalSizeX": 0.1, "PhysicalSizeY": 0.1, "Channel": channels, "Plane": at}
    tifffile.imwrite(path, pixels, ome=True, photometric="minisblack", metadata=words)
    return pixels


def photograph(path: Path) -> Image:
    """Interleaved colours, whose size in the world is not known."""
    pixels = noisy_image((96, 80, 3), "uint8")
    tifffile.imwrite(path, pixels, photometric="rgb")
    return pixels.transpose(2, 0, 1)


UM = "micrometer"
CASES: dict[Any, Expected] = {
    hyperstack: Expected(
        "tczyx", [2.0, 1.0, 0.5, 0.2, 0.2], ["second", None, UM, UM, UM], ["0", "1"], ["FF0000", "00FF00"], [[5, 900], [0, 70]]
    ),
    microscope: Expected(
        "cyx", [1.0, 0.1, 0.1], [None, UM, UM], ["DAPI", "GFP", "Cy5"], ["0000FF", "00FF00", "FFFFFF"], None, x=40.0
    ),
    photograph: Expected(
        "cyx", [1.0] * 3, [None] * 3, ["red", "green", "blue"], ["FF0000", "00FF00", "0000FF"], [[0, 255]] * 3
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", CASES)
def test_viewers_show_outputs_in_levels_with_names(make: Any, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    from ome_zarr_models.v04.omero import Omero
    from ome_zarr_models.v05.image import Image as OmeImage

    monkeypatch.setattr(layout, "LARGEST_TOP", 40)
    monkeypatch.setattr(layout, "SMALLEST_SHARD", 4)
    pixels, expected, path = make(tmp_path / "in.tif"), CASES[make], tmp_path / "out.zarr"
    run_inline(job_of(tmp_path / "in.tif", path, "none", shard=32, chunk=16))
    ome = OmeImage.from_zarr(zarr.open_group(path, mode="r")).ome_attributes
    assert [axis.name for axis in ome.multiscales[0].axes] == list(expected.axes)
    assert [axis.unit for axis in ome.multiscales[0].axes] == expected.units
    channels = Omero.model_validate(ome.omero).channels
    assert [channel.color for channel in channels] == expected.colours
    assert all(channel.window.start < channel.window.end for channel in channels)
    sizes = dict(zip(expected.axes, expected.scale, strict=True))
    for read in READERS:
        levels, facts = read(path)
        shapes = [(*pixels.shape[:-2], -(-pixels.shape[-2] // n), -(-pixels.shape[-1] // n)) for n in (1, 2, 4)]
        assert [level.shape for level in levels] == shapes
        np.testing.assert_array_equal(np.asarray(levels[0]), pixels)
        wanted: dict[str, Any] = {
            "scales": expected.scale,
            "x": [expected.x, expected.x + sizes["x"] / 2],
            "names": expected.names,
            "sizes": {axis: sizes.get(axis) for axis in "yxt"},
            "shown": [size for axis, size in sizes.items() if axis != "c"],
            "limits": expected.limits or facts.get("limits"),
        }
        found = facts | {"scales": facts.get("scales", [expected.scale])[0], "x": facts.get("x", wanted["x"])[:2]}
        assert {name: found.get(name, wanted[name]) for name in wanted} == wanted
        assert all(low < high <= np.iinfo(pixels.dtype).max for low, high in facts.get("limits", ()))


NAPARI = """
import json, sys
import napari, numpy
viewer = napari.Viewer(show=False)
print(json.dumps([
    {
        "name": layer.name,
        "colour": (255 * layer.colormap.colors[-1][:3]).round().tolist(),
        "limits": list(map(float, layer.contrast_limits)),
        "scale": list(map(float, layer.scale)),
        "units": list(map(str, layer.units)),
        "shapes": [level.shape for level in layer.data],
        "sum": int(numpy.asarray(layer.data[0]).sum(dtype="int64")),
    }
    for layer in viewer.open(sys.argv[1], plugin="napari-ome-zarr")
]))
viewer.close()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("make", CASES)
def test_napari_itself_shows_outputs(make: Any, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """In an environment of its own, on a screen that Xvfb emulates."""
    python = os.environ.get("NAPARI_PYTHON") or pytest.skip("NAPARI_PYTHON names no Python with napari")
    monkeypatch.setattr(layout, "LARGEST_TOP", 40)
    monkeypatch.setattr(layout, "SMALLEST_SHARD", 4)
    pixels, expected, path = make(tmp_path / "in.tif"), CASES[make], tmp_path / "out.zarr"
    run_inline(job_of(tmp_path / "in.tif", path, "none", shard=32, chunk=16))
    command = ["xvfb-run", "-a", python, "-c", NAPARI, str(path)]
    layers = json.loads(subprocess.run(command, capture_output=True, timeout=300, check=True).stdout.splitlines()[-1])
    at = expected.axes.index("c")
    each = np.moveaxis(pixels, at, 0)
    assert [layer["name"] for layer in layers] == expected.names
    assert [layer["colour"] for layer in layers] == [[*bytes.fromhex(colour)] for colour in expected.colours]
    assert [layer["sum"] for layer in layers] == each.sum((*range(1, each.ndim),), dtype="int64").tolist()
    scale, units = (
        [*part[:at], *part[at + 1 :]] for part in (expected.scale, [unit or "pixel" for unit in expected.units])
    )
    for number, layer in enumerate(layers):
        assert (layer["scale"], layer["units"]) == (pytest.approx(scale), units)
        rows = [shape[-2:] for shape in layer["shapes"]]
        assert rows == [[-(-96 // n), -(-80 // n)] for n in (1, 2, 4)]
        assert not expected.limits or layer["limits"] == expected.limits[number]


FIVE, TEN = noisy_image((5, 96, 80), "uint16"), noisy_image((2, 5, 96, 80), "uint16")
BANDS = ("red", "nir", "", "swir", "b5")


def write_bands(path: Path) -> None:
    """Bands of a GeoTIFF."""
    item = '<Item name="DESCRIPTION" sample="{}" role="description">{}</Item>'
    names = "".join(item.format(n, band) for n, band in enumerate(BANDS) if band)
    place = [(33550, "d", 3, (10.0, 10.0, 0.0)), (33922, "d", 6, (0.0, 0.0, 0.0, 5e5, 5e6, 0.0))]
    tags = [(*tag, True) for tag in (*place, (42112, "s", 0, f"<GDALMetadata>{names}</GDALMetadata>"))]
    kinds: Any = {"photometric": "minisblack", "planarconfig": "separate", "metadata": None}
    tifffile.imwrite(path.with_suffix(".tif"), FIVE, extratags=tags, **kinds)


def test_bands_and_slices_keep_their_names(tmp_path: Path) -> None:
    write_bands(tmp_path / "bands")
    for axes, labels in (("CYX", ["DAPI", "GFP"]), ("ZCYX", [*"abcd"])):
        pixels, words = noisy_image((*(2 for _ in axes[:-2]), 96, 80), "uint16"), {"axes": axes, "Labels": labels}
        tifffile.imwrite(tmp_path / f"{axes}.tif", pixels, imagej=True, metadata=words)
    for source, names in (("bands", ["red", "nir", "2", "swir", "b5"]), ("CYX", ["DAPI", "GFP"])):
        run_inline(job_of(tmp_path / f"{source}.tif", tmp_path / f"{source}.zarr", "none"))
        assert in_bioio(tmp_path / f"{source}.zarr")[1]["names"] == names
        for suffix in ("tif", "zarr"):
            assert set(names) - {"2"} <= set(describe(str(tmp_path / f"{source}.{suffix}"))["channels"])
    assert open_source(tmp_path / "ZCYX.tif").channels == (), "slices that are no channels"


def in_bio_image(path: Path) -> Seen:
    return [pytest.importorskip("bioio").BioImage(path).data], {}


def test_every_plane_is_within_reach_of_viewers(tmp_path: Path) -> None:
    write_bands(tmp_path / "bands")
    # Nothing says what they are.
    tifffile.imwrite(tmp_path / "pages.tif", FIVE, photometric="minisblack", metadata=None)
    np.save(tmp_path / "array.npy", FIVE)
    zarr.create_array(tmp_path / "runs.zarr", data=TEN, dimension_names=("time", "run", "y", "x"))
    for path in sorted(tmp_path.iterdir()):
        output, pixels = path.with_suffix(".out.zarr"), TEN if path.suffix == ".zarr" else FIVE
        run_inline(job_of(path, output, "none"))
        for read in (in_ome_zarr, in_ngff_zarr, in_bio_image, in_napari):
            seen = np.asarray(read(output)[0][0])
            assert np.squeeze(seen).shape == pixels.shape
            np.testing.assert_array_equal(seen.reshape(pixels.shape)[..., -1, :, :], pixels[..., -1, :, :])
    # An axis of no stated meaning has none there.
    assert open_source(tmp_path / "pages.out.zarr").axes == ("q", "y", "x")
    (multiscale,) = zarr.open_group(tmp_path / "pages.out.zarr", mode="r").attrs["ome"]["multiscales"]
    assert multiscale["axes"][0] == {"name": "t"}


def test_a_chunk_that_cannot_be_read_does_not_keep_a_plan_from_being_made(tmp_path: Path) -> None:
    path = write_zarr(tmp_path / "in.zarr", noisy_image((64, 64)), chunk=32)
    (chunk,) = (tmp_path / "in.zarr/c/1").glob("1")
    chunk.write_bytes(b"none")
    plan = make_plan(job_of(path, tmp_path / "out.zarr", "gaussian", {"sigma": 1.0}))
    omero = plan.layout.omero
    assert omero is not None
    assert omero["channels"][0]["window"] == {"start": 0, "end": 1, "min": 0, "max": 1}


PIXELS = noisy_image((2, 3, 150, 213), "uint16")
SCALE = {"c": 1.0, "z": 2.0, "y": 0.5, "x": 0.5}
SHAPES = [(2, 3, 150, 213), (2, 3, 75, 107), (2, 3, 38, 54)]


def write_by_ome_zarr(version: str, path: Path) -> None:
    writer, form = pytest.importorskip("ome_zarr.writer"), pytest.importorskip("ome_zarr.format")
    chosen = form.FormatV04() if version == "0.4" else form.FormatV05()
    group = zarr.open_group(path, mode="w", zarr_format=2 if version == "0.4" else 3)
    kwargs: Any = {"axes": "czyx", "fmt": chosen, "scale": SCALE, "storage_options": {"chunks": (1, 1, 64, 64)}}
    writer.write_image(PIXELS, group, scale_factors=[], **kwargs)


def write_by_ngff_zarr(version: str, path: Path) -> None:
    ngff = pytest.importorskip("ngff_zarr")
    image = ngff.to_ngff_image(PIXELS, dims=list("czyx"), scale=SCALE)
    ngff.to_ngff_zarr(path, ngff.to_multiscales(image, scale_factors=[], chunks=64), version=version)


def write_by_bioformats2raw(version: str, path: Path) -> None:
    """Its layout: the image is a group of a group, in Zarr v2 with nested folders."""
    zarr.open_group(path, mode="w", zarr_format=2, attributes={"bioformats2raw.layout": 3})
    group = zarr.open_group(path / "0", mode="w", zarr_format=2)
    options: Any = {"chunk_key_encoding": {"name": "v2", "separator": "/"}, "chunks": (1, 1, 64, 64)}
    group.create_array("0", shape=PIXELS.shape, dtype=PIXELS.dtype, **options)[...] = PIXELS
    axes = [{"name": "c", "type": "channel"}, *({"name": a, "type": "space", "unit": "micrometer"} for a in "zyx")]
    steps = [{"type": "scale", "scale": list(SCALE.values())}]
    datasets = [{"path": "0", "coordinateTransformations": steps}]
    group.attrs["multiscales"] = [{"version": version, "axes": axes, "datasets": datasets}]


WRITERS = [(write, version) for write in (write_by_ome_zarr, write_by_ngff_zarr) for version in ("0.4", "0.5")]


@pytest.mark.parametrize(("write", "version"), [*WRITERS, (write_by_bioformats2raw, "0.4")])
def test_levels_that_were_added_to_the_image_of_another_program_are_read_by_all(
    tmp_path: Path, monkeypatch: MonkeyPatch, write: Any, version: str
) -> None:
    from ome_zarr_models.v04.image import Image as Old
    from ome_zarr_models.v05.image import Image as New

    monkeypatch.setattr("halotile.storage.sharded.layout.LARGEST_TOP", 60)
    path = tmp_path / "cells.ome.zarr"
    write(version, path)
    path = path / "0" if write is write_by_bioformats2raw else path
    assert add_levels(path)[0] == 3
    expected: list[Image] = [open_source(path, level=level)[...] for level in range(3)]
    np.testing.assert_array_equal(expected[0], PIXELS)
    halved = np.rint(PIXELS[..., :212].reshape(2, 3, 75, 2, 106, 2).mean((3, 5)))
    np.testing.assert_array_equal(expected[1][..., :75, :106], halved)
    group = zarr.open_group(path, mode="r")
    model: Any = Old.from_zarr(group).attributes if version == "0.4" else New.from_zarr(group).ome_attributes
    assert len(model.multiscales[0].datasets) == 3
    wanted = {"scales": [[1.0, 2.0, 0.5 * n, 0.5 * n] for n in (1, 2, 4)], "x": [0.0, 0.25, 0.75]}
    for read in READERS:
        levels, facts = read(path)
        assert [level.shape for level in levels] == SHAPES
        for level, pixels in zip(levels, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(level), pixels)
        assert all(facts[name] == wanted[name] for name in wanted.keys() & facts)
