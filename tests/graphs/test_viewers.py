"""Outputs, and images to which levels were added, in the libraries that viewers open images with: calibrated, named, in levels.

requirements-oracles.txt installs them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr

from halotile.cli.info import describe
from halotile.graphs.plans.plan import make_plan
from halotile.storage.arrays import open_source
from halotile.storage.images.added_levels import add_levels
from halotile.storage.sharded import layout
from halotile.storage.sharded.layout import read_layout
from tests.support import Image, job_of, noisy_image, run_inline, write_zarr

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
    facts = {"names": shown["name"], "shown": list(shown["scale"]), "colours": shown.get("colormap")}
    return data, facts | {"limits": shown["contrast_limits"]}


READERS = [in_ome_zarr, in_ngff_zarr, in_bioio, in_napari]


def hyperstack(path: Path) -> Image:
    """Times, planes and channels as ImageJ stores them."""
    pixels = noisy_image((2, 3, 2, 96, 80), "uint16")
    words = {
        "axes": "TZCYX",
        "unit": "um",
        "spacing": 0.5,
        "finterval": 2.0,
        "LUTs": LUTS,
        "Ranges": (5.0, 900.0, 0.0, 70.0),
    }
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


CASES: dict[Any, dict[str, Any]] = {
    hyperstack: {
        "axes": "tczyx",
        "scale": [2.0, 1.0, 0.5, 0.2, 0.2],
        "units": ["second", None, "micrometer", "micrometer", "micrometer"],
        "names": ["0", "1"],
        "colours": ["FF0000", "00FF00"],
        "limits": [[5, 900], [0, 70]],
    },
    microscope: {
        "axes": "cyx",
        "scale": [1.0, 0.1, 0.1],
        "units": [None, "micrometer", "micrometer"],
        "x": 40.0,
        "names": ["DAPI", "GFP", "Cy5"],
        "colours": ["0000FF", "00FF00", "FFFFFF"],
        "limits": None,
    },
    photograph: {
        "axes": "cyx",
        "scale": [1.0, 1.0, 1.0],
        "units": [None, None, None],
        "names": ["red", "green", "blue"],
        "colours": ["FF0000", "00FF00", "0000FF"],
        "limits": [[0, 255]] * 3,
    },
}


@pytest.fixture(params=CASES, ids=lambda make: make.__name__)
def case(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Image, dict[str, Any]]:
    """An output in three levels, its pixels, and what viewers should see."""
    monkeypatch.setattr(layout, "LARGEST_TOP", 40)
    monkeypatch.setattr(layout, "SMALLEST_SHARD", 4)
    pixels = request.param(tmp_path / "in.tif")
    run_inline(job_of(tmp_path / "in.tif", tmp_path / "out.zarr", "none", shard=32, chunk=16))
    return tmp_path / "out.zarr", pixels, CASES[request.param]


def shapes_of(pixels: Image) -> list[tuple[int, ...]]:
    return [(*pixels.shape[:-2], -(-pixels.shape[-2] // n), -(-pixels.shape[-1] // n)) for n in (1, 2, 4)]


def test_the_models_of_ome_zarr_accept_outputs(case: tuple[Path, Image, dict[str, Any]]) -> None:
    from ome_zarr_models.v04.omero import Omero
    from ome_zarr_models.v05.image import Image as OmeImage

    path, _, expected = case
    ome = OmeImage.from_zarr(zarr.open_group(path, mode="r")).ome_attributes
    assert [axis.name for axis in ome.multiscales[0].axes] == list(expected["axes"])
    assert [axis.unit for axis in ome.multiscales[0].axes] == expected["units"]
    channels = Omero.model_validate(ome.omero).channels
    assert [channel.color for channel in channels] == expected["colours"]
    for channel in channels:
        assert channel.window is not None
        assert channel.window.start < channel.window.end


@pytest.mark.parametrize("read", READERS)
def test_viewers_show_outputs_in_levels_with_sizes_names_and_contrast(
    case: tuple[Path, Image, dict[str, Any]], read: Callable[[Path], Seen]
) -> None:
    path, pixels, expected = case
    levels, facts = read(path)
    assert [level.shape for level in levels] == shapes_of(pixels)
    np.testing.assert_array_equal(np.asarray(levels[0]), pixels)
    sizes = dict(zip(expected["axes"], expected["scale"], strict=True))
    first = expected.get("x", 0)
    wanted = {
        "scales": expected["scale"],
        "x": first,
        "names": expected["names"],
        "sizes": {axis: sizes.get(axis) for axis in "yxt"},
        "shown": [size for axis, size in sizes.items() if axis != "c"],
        "limits": expected["limits"] or facts.get("limits"),
    }
    for name in wanted.keys() & facts:
        assert (facts[name][0] if name in ("scales", "x") else facts[name]) == wanted[name]
    assert facts.get("x", [0, first + sizes["x"] / 2])[1] == first + sizes["x"] / 2
    for low, high in facts.get("limits", ()):
        assert low < high <= np.iinfo(pixels.dtype).max


def series(path: Path) -> Image:
    """Pages of a plain TIFF, of which nothing says what they are."""
    pixels = noisy_image((5, 96, 80), "uint16")
    tifffile.imwrite(path.with_suffix(".tif"), pixels, photometric="minisblack", metadata=None)
    return pixels


def array(path: Path) -> Image:
    """A bare array."""
    pixels = noisy_image((5, 96, 80), "uint16")
    np.save(path.with_suffix(".npy"), pixels)
    return pixels


def times(path: Path) -> Image:
    """An axis that nothing names, beside one of time."""
    pixels = noisy_image((2, 5, 96, 80), "uint16")
    zarr.create_array(path.with_suffix(".zarr"), data=pixels, dimension_names=("time", "run", "y", "x"))
    return pixels


def map_of_bands(path: Path) -> Image:
    """Bands of a GeoTIFF."""
    pixels = noisy_image((5, 96, 80), "uint16")
    items = "".join(
        f'<Item name="DESCRIPTION" sample="{n}" role="description">{name}</Item>'
        for n, name in enumerate(BANDS)
        if name
    )
    tags = [
        (33550, "d", 3, (10.0, 10.0, 0.0)),
        (33922, "d", 6, (0.0, 0.0, 0.0, 5e5, 5e6, 0.0)),
        (42112, "s", 0, f"<GDALMetadata>{items}</GDALMetadata>"),
    ]
    tifffile.imwrite(
        path.with_suffix(".tif"),
        pixels,
        photometric="minisblack",
        planarconfig="separate",
        metadata=None,
        extratags=[(*tag, True) for tag in tags],
    )
    return pixels


BANDS = ("red", "nir", "", "swir", "b5")


def slices(path: Path) -> Image:
    """Channels of ImageJ with labels of slices."""
    pixels = noisy_image((2, 96, 80), "uint16")
    words = {"axes": "CYX", "Labels": ["DAPI", "GFP"]}
    tifffile.imwrite(path.with_suffix(".tif"), pixels, imagej=True, metadata=words)
    return pixels


@pytest.mark.parametrize(
    ("make", "names"), [(map_of_bands, ["red", "nir", "2", "swir", "b5"]), (slices, ["DAPI", "GFP"])]
)
def test_bands_and_slices_keep_their_names(make: Any, names: list[str], tmp_path: Path) -> None:
    bioio = pytest.importorskip("bioio_ome_zarr")
    make(tmp_path / "in")
    run_inline(job_of(tmp_path / "in.tif", tmp_path / "out.zarr", "none"))
    assert bioio.Reader(str(tmp_path / "out.zarr")).channel_names == names
    for name in ("in.tif", "out.zarr"):
        assert set(names) - {"2"} <= set(describe(str(tmp_path / name))["channels"])


def test_labels_of_slices_that_are_no_channels_are_no_names(tmp_path: Path) -> None:
    words = {"axes": "ZCYX", "Labels": ["a", "b", "c", "d"]}
    tifffile.imwrite(tmp_path / "a.tif", noisy_image((2, 2, 96, 80), "uint16"), imagej=True, metadata=words)
    assert open_source(tmp_path / "a.tif").channels == ()


def in_bio_image(path: Path) -> Seen:
    return [pytest.importorskip("bioio").BioImage(path).data], {}


@pytest.mark.parametrize("read", [in_ome_zarr, in_ngff_zarr, in_bio_image, in_napari])
@pytest.mark.parametrize("make", [series, array, times, map_of_bands])
def test_every_plane_is_within_reach_of_viewers(make: Any, read: Callable[[Path], Seen], tmp_path: Path) -> None:
    pixels = make(tmp_path / "in")
    (path,) = tmp_path.glob("in.*")
    run_inline(job_of(path, tmp_path / "out.zarr", "none"))
    seen = np.asarray(read(tmp_path / "out.zarr")[0][0])
    assert np.squeeze(seen).shape == pixels.shape
    np.testing.assert_array_equal(seen.reshape(pixels.shape)[..., -1, :, :], pixels[..., -1, :, :])


def test_an_axis_of_no_stated_meaning_has_none_in_the_output_either(tmp_path: Path) -> None:
    series(tmp_path / "in")
    run_inline(job_of(tmp_path / "in.tif", tmp_path / "out.zarr", "none"))
    source = open_source(tmp_path / "out.zarr")
    assert "".join(source.axes) == "qyx"
    assert source.remarks == open_source(tmp_path / "in.tif").remarks
    (multiscale,) = zarr.open_group(tmp_path / "out.zarr", mode="r").attrs["ome"]["multiscales"]
    assert multiscale["axes"][0] == {"name": "t"}
    assert read_layout(tmp_path / "out.zarr").axes == source.axes


@pytest.mark.parametrize("count", [1, 2, 5])
def test_channels_without_names_have_the_contrast_of_what_was_measured(tmp_path: Path, count: int) -> None:
    pixels = np.stack([noisy_image((96, 80), "float32") * (n + 1) for n in range(count)])
    pixels[:, :40] = -9999
    tag = (42113, "s", 0, "-9999", True)
    tifffile.imwrite(tmp_path / "in.tif", pixels if count > 1 else pixels[0], extratags=[tag], metadata=None)
    run_inline(job_of(tmp_path / "in.tif", tmp_path / "out.zarr", "none", input={"axes": "cyx"} if count > 1 else {}))
    _, facts = in_napari(tmp_path / "out.zarr")
    limits = facts["limits"] if count > 1 else [facts["limits"]]
    for n, (low, high) in enumerate(limits):
        assert pixels[n, 40:].min() <= low < high <= pixels[n, 40:].max()
    assert facts["names"] == ([str(n) for n in range(count)] if count > 1 else "out")
    assert count == 1 or len({str(colour) for colour in facts["colours"]}) == count


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
    writer.write_image(
        PIXELS,
        group,
        scale_factors=[],
        axes="czyx",
        fmt=chosen,
        scale=SCALE,
        storage_options={"chunks": (1, 1, 64, 64)},
    )


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
    group.attrs["multiscales"] = [
        {"version": version, "axes": axes, "datasets": [{"path": "0", "coordinateTransformations": steps}]}
    ]


WRITERS = [(write, version) for write in (write_by_ome_zarr, write_by_ngff_zarr) for version in ("0.4", "0.5")]


@pytest.mark.parametrize(
    ("write", "version"), [*WRITERS, (write_by_bioformats2raw, "0.4")], ids=lambda part: getattr(part, "__name__", part)
)
def test_levels_that_were_added_to_the_image_of_another_program_are_read_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[str, Path], None], version: str
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
