"""What an output takes over from its input besides pixels: axes, scale, units, place, names and type."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import tifffile
import zarr
from ome_zarr_models.common.omero import Omero
from ome_zarr_models.v05.image import Image

import halotile
from halotile.errors import InputError
from halotile.graphs.plans.plan import make_plan
from halotile.storage.arrays import open_source
from halotile.storage.sharded.output import create_output
from tests.support import job_of, noisy_image, read_zarr, run_inline, write_zarr

CHANNEL = {"color": "00FF00", "label": "GFP", "window": {"start": 0, "end": 90, "min": 0, "max": 999}}


def ome_zarr(path: Path, pixels: Any, axes: str, **more: Any) -> Path:
    """An image of one level, half a pixel beside the origin."""
    group = zarr.open_group(path, mode="w")
    group.create_array("0", data=pixels)
    steps = [{"type": "scale", "scale": [2.0] * len(axes)}, {"type": "translation", "translation": [1.0] * len(axes)}]
    kinds = {"t": "time", "c": "channel"}
    image = {
        "axes": [{"name": axis, "type": kinds.get(axis, "space")} for axis in axes],
        "datasets": [{"path": "0", "coordinateTransformations": steps}],
        "name": "cells",
    }
    group.attrs["ome"] = {"version": "0.5", "multiscales": [image], **more}
    return path


def output_of(job: Any) -> zarr.Group:
    plan = make_plan(job)
    create_output(plan.output, plan.layout)
    return zarr.open_group(plan.output, mode="r")


def gaussian(source: Path, output: Path, **parts: Any) -> Any:
    return job_of(source, output, "gaussian", {"sigma": 1}, **parts)


DATASET = r"Write dataset: one of (?P<dataset>[^,]*), .*"
ROOTS = [("0 1", "folder", r"Write the path of one, such as (?P<path>.*)\.$"), ("0 1", "zip", DATASET)]


@pytest.mark.parametrize(("series", "place", "advice"), [*ROOTS, ("A/1/0 B/2/0", "zip", DATASET)])
def test_the_advice_for_a_root_of_several_images_keeps_sizes_and_channels(
    tmp_path: Path, series: str, place: str, advice: str
) -> None:
    root = tmp_path / "root.zarr"
    zarr.create_group(root, attributes={"ome": {"version": "0.5", "bioformats2raw.layout": 3}})
    for name in series.split():
        zarr.create_group(root, path=name)
        ome_zarr(root / name, noisy_image((1, 64, 48), "uint16"), "cyx", omero={"channels": [CHANNEL]})
    source = root if place == "folder" else Path(shutil.make_archive(str(tmp_path / "a"), "zip", root))
    with pytest.raises(InputError, match="contains several images") as refused:
        make_plan(gaussian(source, tmp_path / "out.zarr"))
    found = re.search(advice, str(refused.value))
    assert found, refused.value
    chosen = found.groupdict()
    group = output_of(gaussian(Path(chosen.pop("path", source)), tmp_path / "out.zarr", input=chosen))
    ome: Any = group.attrs["ome"]
    assert ome["omero"]["channels"] == [CHANNEL]
    assert ome["multiscales"][0]["name"] == "cells"
    assert ome["multiscales"][0]["datasets"][0]["coordinateTransformations"][0]["scale"] == [2, 2, 2]


def described(group: zarr.Group) -> tuple[str, list[str | None], list[float]]:
    """The axes of a valid OME-Zarr, their units, and the steps of its finest level."""
    multiscale = Image.from_zarr(group).ome_attributes.multiscales[0]
    kinds = {"t": "time", "c": "channel"}
    assert [axis.type for axis in multiscale.axes] == [kinds.get(axis.name, "space") for axis in multiscale.axes]
    scale: Any = multiscale.datasets[0].coordinateTransformations[0]
    return "".join(axis.name for axis in multiscale.axes), [axis.unit for axis in multiscale.axes], list(scale.scale)


def test_an_ome_tiff_becomes_a_valid_ome_zarr(tmp_path: Path) -> None:
    words: Any = {"axes": "TCYX", "PhysicalSizeX": 0.1, "PhysicalSizeXUnit": "µm", "TimeIncrement": 3}
    source = tmp_path / "in.ome.tif"
    tifffile.imwrite(source, noisy_image((2, 3, 64, 48), "uint16"), ome=True, metadata=words)
    found = described(output_of(gaussian(source, tmp_path / "o.zarr")))
    assert found == ("tcyx", ["second", None, None, "micrometer"], [3.0, 1.0, 1.0, 0.1])


PACKING: dict[str, Any] = {"scale_factor": 0.01, "add_offset": 273.15, "units": "K", "standard_name": "air_temperature"}


@pytest.mark.parametrize(("dtype", "form"), [("auto", "auto"), ("float32", "zarr")])
def test_the_output_keeps_what_the_stored_numbers_mean(
    tmp_path: Path, dtype: str, form: Literal["auto", "zarr"]
) -> None:
    kelvin = np.random.default_rng(0).normal(280, 1, (1300, 200))
    packed = ((kelvin - PACKING["add_offset"]) / PACKING["scale_factor"]).round().astype("int16")
    source = zarr.create_array(tmp_path / "in.zarr", data=packed, dimension_names=["lat", "lon"])
    source.attrs.update(PACKING | {"_FillValue": -32768, "coordinates": "lat lon", "actual_range": [-9, 9]})
    job = gaussian(tmp_path / "in.zarr", tmp_path / "o.zarr")
    job = replace(job, output=replace(job.output, dtype=dtype, format=form))
    assert any("scale_factor 0.01 and add_offset 273.15" in note for note in make_plan(job).notes)
    run_inline(job)
    levels = ["0", "1"] if form == "auto" else [""]
    for level in levels:
        array: Any = zarr.open_array(tmp_path / "o.zarr" / level, mode="r")
        kept = {name: value for name, value in array.attrs.items() if name != "halotile"}
        assert kept == PACKING | {"missing_value": -32768}
        assert abs((array[...] * array.attrs["scale_factor"] + array.attrs["add_offset"]).mean() - 280) < 0.1
    assert open_source(tmp_path / "o.zarr").attributes == PACKING


def microscope_tiff(folder: Path, axes: str, shape: tuple[int, ...], **options: Any) -> tuple[Path, Any]:
    """An OME-TIFF with its axes in some order, and its pixels as they were written."""
    pixels = noisy_image(shape, "uint8")
    words: Any = {"axes": axes, "PhysicalSizeX": 0.5, "PhysicalSizeXUnit": "µm"}
    kind = "rgb" if "S" in axes else "minisblack"
    path = folder / "in.ome.tif"
    tifffile.imwrite(path, pixels, ome=True, photometric=kind, metadata=words, **options)
    return path, pixels


ORDERS = [
    ("YXS", (64, 48, 3), (2, 0, 1)),
    ("ZCYX", (4, 2, 64, 48), (1, 0, 2, 3)),
    ("TZCYX", (2, 3, 2, 40, 48), (0, 2, 1, 3, 4)),
]


@pytest.mark.parametrize("options", [{}, {"tile": (32, 32), "compression": "zlib"}], ids=["mapped", "packed"])
@pytest.mark.parametrize(("axes", "shape", "order"), ORDERS)
def test_the_axes_of_an_ome_tiff_are_put_in_the_order_of_ome_zarr(
    tmp_path: Path, axes: str, shape: tuple[int, ...], order: tuple[int, ...], options: dict[str, Any]
) -> None:
    path, pixels = microscope_tiff(tmp_path, axes, shape, **options)
    wanted, letters = pixels.transpose(order), axes.lower().replace("s", "c")
    source = open_source(path)
    assert "".join(source.axes) == "".join(letters[i] for i in order)
    assert np.array_equal(source[...], wanted)
    part = (slice(1, 2), *[slice(None)] * (wanted.ndim - 3), slice(5, 40), slice(7, 33))
    assert np.array_equal(source[part], wanted[part])
    assert open_source(path, axes=letters).shape == shape, "as they lie, where they are named"
    axes, _, scale = described(output_of(gaussian(path, tmp_path / "o.zarr")))
    assert (axes, scale[-1]) == ("".join(source.axes), 0.5)


def test_an_ome_tiff_whose_axes_ome_zarr_cannot_hold_becomes_a_plain_zarr(tmp_path: Path) -> None:
    path, _ = microscope_tiff(tmp_path, "CYXS", (2, 64, 48, 3))
    plan = make_plan(gaussian(path, tmp_path / "o.zarr"))
    assert not plan.layout.ome
    assert plan.layout.scale[plan.layout.axes.index("x")] == 0.5
    assert any(note.startswith("OME-Zarr has no room for the axes") for note in plan.notes)
    create_output(plan.output, plan.layout)
    again = open_source(str(plan.output))
    assert (again.axes, again.scale, again.units) == (plan.layout.axes, plan.layout.scale, plan.layout.units)


def test_attributes_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    array, units = zarr.create_array(tmp_path / "a.zarr", shape=(4, 6), dtype="uint8"), [None] * 2
    for kept in (None, 3, {"scale": [1, 2]}, {"scale": [1, "a"], "units": units}, {"scale": [0, 1], "units": units}):
        array.attrs["halotile"] = kept  # type: ignore[assignment]
        assert open_source(tmp_path / "a.zarr").scale == (1.0, 1.0)


def test_name_place_and_channels_of_an_ome_zarr_are_kept(tmp_path: Path) -> None:
    source = ome_zarr(tmp_path / "in.zarr", noisy_image((2, 64, 48)), "cyx", omero={"channels": [CHANNEL] * 2})
    group = output_of(gaussian(source, tmp_path / "o.zarr"))
    multiscale = Image.from_zarr(group).ome_attributes.multiscales[0]
    assert multiscale.name == "cells"
    assert list(multiscale.datasets[0].coordinateTransformations[1].translation) == [1.0, 1.0, 1.0]
    ome: Any = group.attrs["ome"]
    assert len(Omero.model_validate(ome["omero"]).channels) == 2
    assert ome["omero"]["channels"][1]["label"] == "GFP"


GEOKEYS = (1, 1, 0, 4, 1024, 0, 1, 1, 1025, 0, 1, 1, 3072, 0, 1, 32632, 3076, 0, 1, 9001)
GEOTIFF = [
    (33550, "d", 3, (10.0, 10.0, 0.0), True),
    (33922, "d", 6, (0.0, 0.0, 0.0, 5e5, 5e6, 0.0), True),
    (34735, "H", len(GEOKEYS), GEOKEYS, True),
    (42113, "s", 0, "7", True),
]


@pytest.mark.parametrize("form", ["ome-zarr", "zarr"])
def test_a_georeference_is_kept_from_a_geotiff_to_a_cloud_optimized_one(tmp_path: Path, form: str) -> None:
    pixels = noisy_image((64, 48), "uint8")
    pixels[:9, :9] = 7
    tifffile.imwrite(tmp_path / "a.tif", pixels, extratags=GEOTIFF)
    for source, output in (("a.tif", "b.zarr"), ("b.zarr", "c.zarr")):
        job = gaussian(tmp_path / source, tmp_path / output)
        last = run_inline(replace(job, output=replace(job.output, format=form)))
    attributes = zarr.open(tmp_path / "c.zarr", mode="r").attrs
    assert (attributes["proj:code"], attributes["spatial:shape"]) == ("EPSG:32632", [64, 48])
    assert attributes["spatial:transform"] == [10, 0, 500_000, 0, -10, 5_000_000]
    assert len(attributes["zarr_conventions"]) == 2
    halotile.export(tmp_path / "c.zarr", tmp_path / "c.tif", cog=True)
    before, after = open_source(tmp_path / "a.tif"), open_source(tmp_path / "c.tif")
    assert before.georeference
    assert after.georeference
    # GDAL adds keys that follow from the code.
    assert after.georeference == replace(before.georeference, geokeys=after.georeference.geokeys)
    assert after.nodata == 7
    assert (last[:9, :9] == 7).all()


def test_finer_pixels_have_their_centres_and_georeference_elsewhere(tmp_path: Path) -> None:
    source, doubler = ome_zarr(tmp_path / "in.zarr", noisy_image((64, 48)), "yx"), {"import": "tests.networks:doubler"}
    layout = make_plan(job_of(source, tmp_path / "o.zarr", "torch", doubler | {"scale": 2})).layout
    # A pixel of 2 around 1 goes from 0 to 2; its halves lie around 0.5 and 1.5.
    assert (layout.scale, layout.translation) == ((1.0, 1.0), (0.5, 0.5))
    tifffile.imwrite(tmp_path / "a.tif", noisy_image((64, 48)), extratags=GEOTIFF[:3])
    layout = make_plan(job_of(tmp_path / "a.tif", tmp_path / "o.zarr", "torch", doubler | {"scale": 2})).layout
    assert layout.georeference is not None
    assert layout.georeference.transform == (5, 0, 500_000, 0, -5, 5_000_000)
    assert (layout.scale, layout.units) == ((5, 5), ("meter", "meter"))


def test_names_of_channels_that_are_no_longer_there_are_left_out(tmp_path: Path) -> None:
    source = ome_zarr(tmp_path / "in.zarr", noisy_image((64, 48)), "yx", omero={"channels": [CHANNEL]})
    zarr.open_array(source / "0").attrs["units"] = "K"
    one = make_plan(gaussian(source, tmp_path / "o.zarr"))
    assert (one.layout.omero, one.layout.attributes) == ({"channels": [CHANNEL]}, {"units": "K"})
    options = {"import": "tests.networks:colouring", "channels": [1, 3]}
    three = make_plan(job_of(source, tmp_path / "p.zarr", "torch", options))
    assert three.layout.shape == (3, 64, 48)
    assert (three.layout.ome, three.layout.omero, three.layout.attributes) == (True, None, {})
    assert three.layout.translation == (0.0, 1.0, 1.0)


def test_a_mask_becomes_numbers_between_0_and_1(tmp_path: Path) -> None:
    mask = noisy_image((64, 48)) > 0.5
    plain = run_inline(gaussian(write_zarr(tmp_path / "m.zarr", mask), tmp_path / "o.zarr"))
    assert plain.dtype == np.float32
    run_inline(gaussian(write_zarr(tmp_path / "f.zarr", mask.astype("float32")), tmp_path / "p.zarr"))
    np.testing.assert_array_equal(plain, read_zarr(tmp_path / "p.zarr"))
    assert 0 <= plain.min() < 0.4 < 0.6 < plain.max() <= 1 + 1e-6


def test_a_czi_becomes_a_valid_ome_zarr(tmp_path: Path) -> None:
    for package in ("bioio_czi", "pylibCZIrw"):
        pytest.importorskip(package, reason=f'{package} is not installed: pip install "halotile[bioio]"')
    from pylibCZIrw import czi

    with czi.create_czi(str(tmp_path / "a.czi")) as file:
        for c, z in np.ndindex(2, 3):
            plane = noisy_image((64, 48), "uint16", seed=c + z)
            file.write(data=plane[..., None], plane={"C": c, "Z": z})
        names = {0: "DAPI", 1: "GFP"}
        file.write_metadata(channel_names=names, scale_x=1e-7, scale_y=1e-7, scale_z=3e-7)
    group = output_of(gaussian(tmp_path / "a.czi", tmp_path / "o.zarr"))
    axes, units, scale = described(group)
    assert (axes, units) == ("czyx", [None, "micrometer", "micrometer", "micrometer"])
    np.testing.assert_allclose(scale, [1.0, 0.3, 0.1, 0.1])
    channels = Omero.model_validate(Image.from_zarr(group).ome_attributes.omero).channels
    assert [channel.label for channel in channels] == ["DAPI", "GFP"]
