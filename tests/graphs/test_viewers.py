"""Outputs in the libraries that viewers open images with: calibrated, named, in levels.

requirements-oracles.txt installs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr

from halotile.cli.info import describe
from halotile.graphs.plans.plan import make_plan
from halotile.storage.arrays import open_source
from halotile.storage.sharded import layout
from halotile.storage.sharded.layout import read_layout
from tests.support import Image, job_of, noisy_image, run_inline, write_zarr

pytestmark = pytest.mark.filterwarnings("ignore")  # of these libraries

LUTS = [np.outer(colour, np.arange(256)).astype("uint8") for colour in ([1, 0, 0], [0, 1, 0])]


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


def test_the_models_of_ome_zarr_accept_it(case: tuple[Path, Image, dict[str, Any]]) -> None:
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


def test_ome_zarr_py_reads_it(case: tuple[Path, Image, dict[str, Any]]) -> None:
    io, reader = pytest.importorskip("ome_zarr.io"), pytest.importorskip("ome_zarr.reader")
    path, pixels, expected = case
    (node,) = reader.Reader(io.parse_url(path))()
    assert [level.shape for level in node.data] == shapes_of(pixels)
    np.testing.assert_array_equal(np.asarray(node.data[0]), pixels)
    assert node.metadata["coordinateTransformations"][0][0]["scale"] == expected["scale"]


def test_ngff_zarr_reads_and_validates_it(case: tuple[Path, Image, dict[str, Any]]) -> None:
    ngff = pytest.importorskip("ngff_zarr")
    path, pixels, expected = case
    images = ngff.from_ngff_zarr(str(path), validate=True).images
    assert [image.data.shape for image in images] == shapes_of(pixels)
    assert [images[0].scale[axis] for axis in expected["axes"]] == expected["scale"]
    first = expected.get("x", 0)
    assert (images[0].translation["x"], images[1].translation["x"]) == (first, first + expected["scale"][-1] / 2)
    np.testing.assert_array_equal(np.asarray(images[0].data), pixels)


def test_bioio_reads_it(case: tuple[Path, Image, dict[str, Any]]) -> None:
    bioio = pytest.importorskip("bioio_ome_zarr")
    path, pixels, expected = case
    image = bioio.Reader(str(path))
    np.testing.assert_array_equal(image.data, pixels)
    assert list(image.resolution_levels) == [0, 1, 2]
    assert image.channel_names == expected["names"]
    sizes = dict(zip(expected["axes"], expected["scale"], strict=True))
    assert (sizes["y"], sizes["x"]) == (image.physical_pixel_sizes.Y, image.physical_pixel_sizes.X)
    assert image.time_interval == sizes.get("t")


def test_napari_shows_it_with_sizes_names_and_contrast(case: tuple[Path, Image, dict[str, Any]]) -> None:
    napari = pytest.importorskip("napari_ome_zarr")
    path, pixels, expected = case
    ((data, shown, kind),) = napari.napari_get_reader(str(path))(str(path))
    assert (kind, [level.shape for level in data]) == ("image", shapes_of(pixels))
    assert shown["name"] == expected["names"]
    assert shown["scale"] == [s for s, axis in zip(expected["scale"], expected["axes"], strict=True) if axis != "c"]
    assert expected["limits"] in (None, shown["contrast_limits"])
    for low, high in shown["contrast_limits"]:
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


def by_ome_zarr(path: Path) -> Any:
    io, reader = pytest.importorskip("ome_zarr.io"), pytest.importorskip("ome_zarr.reader")
    (node,) = reader.Reader(io.parse_url(path))()
    return node.data[0]


def by_ngff_zarr(path: Path) -> Any:
    return pytest.importorskip("ngff_zarr").from_ngff_zarr(str(path), validate=True).images[0].data


def by_bioio(path: Path) -> Any:
    return pytest.importorskip("bioio").BioImage(path).data


def by_napari(path: Path) -> Any:
    napari = pytest.importorskip("napari_ome_zarr")
    ((data, _, _),) = napari.napari_get_reader(str(path))(str(path))
    return data[0]


@pytest.mark.parametrize("read", [by_ome_zarr, by_ngff_zarr, by_bioio, by_napari])
@pytest.mark.parametrize("make", [series, array, times, map_of_bands])
def test_every_plane_is_within_reach_of_viewers(make: Any, read: Any, tmp_path: Path) -> None:
    pixels = make(tmp_path / "in")
    (path,) = tmp_path.glob("in.*")
    run_inline(job_of(path, tmp_path / "out.zarr", "none"))
    seen = np.asarray(read(tmp_path / "out.zarr"))
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


def test_the_contrast_of_one_channel_is_that_of_what_was_measured(tmp_path: Path) -> None:
    napari = pytest.importorskip("napari_ome_zarr")
    pixels = noisy_image((96, 80), "float32")
    pixels[:40] = -9999
    tag = (42113, "s", 0, "-9999", True)
    tifffile.imwrite(tmp_path / "in.tif", pixels, extratags=[tag], metadata=None)
    run_inline(job_of(tmp_path / "in.tif", tmp_path / "out.zarr", "none"))
    path = str(tmp_path / "out.zarr")
    ((_, shown, _),) = napari.napari_get_reader(path)(path)
    low, high = shown["contrast_limits"]
    assert pixels[40:].min() <= low < high <= pixels[40:].max()
    assert shown["name"] == "out"


@pytest.mark.parametrize("count", [2, 5])
def test_channels_without_names_have_the_contrast_of_what_was_measured(tmp_path: Path, count: int) -> None:
    napari = pytest.importorskip("napari_ome_zarr")
    pixels = np.stack([noisy_image((96, 80), "float32") * (n + 1) for n in range(count)])
    pixels[:, :40] = -9999
    tag = (42113, "s", 0, "-9999", True)
    tifffile.imwrite(tmp_path / "in.tif", pixels, extratags=[tag], metadata=None)
    job = job_of(tmp_path / "in.tif", tmp_path / "out.zarr", "none", input={"axes": "cyx"})
    run_inline(job)
    path = str(tmp_path / "out.zarr")
    ((_, shown, _),) = napari.napari_get_reader(path)(path)
    for n, (low, high) in enumerate(shown["contrast_limits"]):
        assert pixels[n, 40:].min() <= low < high <= pixels[n, 40:].max()
    assert shown["name"] == [str(n) for n in range(count)]
    assert len({str(colour) for colour in shown["colormap"]}) == count


def test_a_chunk_that_cannot_be_read_does_not_keep_a_plan_from_being_made(tmp_path: Path) -> None:
    path = write_zarr(tmp_path / "in.zarr", noisy_image((64, 64)), chunk=32)
    (chunk,) = (tmp_path / "in.zarr/c/1").glob("1")
    chunk.write_bytes(b"none")
    plan = make_plan(job_of(path, tmp_path / "out.zarr", "gaussian", {"sigma": 1.0}))
    omero = plan.layout.omero
    assert omero is not None
    assert omero["channels"][0]["window"] == {"start": 0, "end": 1, "min": 0, "max": 1}
