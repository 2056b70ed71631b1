"""What an output takes over from its input besides pixels, its levels, and axes: nothing is mixed across one that is not known to be space."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import scipy.ndimage
import tifffile
import zarr
from numpy.typing import NDArray
from ome_zarr_models.common.omero import Omero
from ome_zarr_models.v05.image import Image

import halotile
from halotile.errors import BlockFailed, ConfigError, InputError
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.denoise import pixels as pixel_choices
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.verify import verify
from halotile.storage.arrays import open_source
from halotile.storage.sharded import layout
from halotile.storage.sharded.output import create_output
from halotile.tasks.denoisers.gaussian import Gaussian
from halotile.tasks.denoisers.tv import TotalVariation
from tests.cases import in_folders
from tests.faults import BLOCK, BLOCKS, Scene, flip_bit
from tests.support import job_of, load_denoising, noisy_image, read_zarr, run_inline, work_of, write_zarr

KINDS = {"t": "time", "c": "channel"}
CHANNEL = {"color": "00FF00", "label": "GFP", "window": {"start": 0, "end": 90, "min": 0, "max": 999}}


def ome_zarr(path: Path, pixels: Any, axes: str, **more: Any) -> Path:
    """An image of one level, half a pixel beside the origin."""
    group = zarr.open_group(path, mode="w")
    group.create_array("0", data=pixels)
    steps = [{"type": "scale", "scale": [2.0] * len(axes)}, {"type": "translation", "translation": [1.0] * len(axes)}]
    image = {"axes": [{"name": axis, "type": KINDS.get(axis, "space")} for axis in axes], "name": "cells"}
    datasets = [{"path": "0", "coordinateTransformations": steps}]
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{**image, "datasets": datasets}], **more}
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
def test_the_advice_for_several_images_keeps_all(tmp_path: Path, series: str, place: str, advice: str) -> None:
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
    assert (ome["omero"]["channels"], len(Omero.model_validate(ome["omero"]).channels)) == ([CHANNEL], 1)
    assert ome["multiscales"][0]["name"] == "cells"
    scale, translation = ome["multiscales"][0]["datasets"][0]["coordinateTransformations"]
    assert (scale["scale"], translation["translation"]) == ([2, 2, 2], [1, 1, 1])


def described(group: zarr.Group) -> tuple[str, list[str | None], list[float]]:
    """The axes of a valid OME-Zarr, their units, and the steps of its finest level."""
    multiscale = Image.from_zarr(group).ome_attributes.multiscales[0]
    assert [axis.type for axis in multiscale.axes] == [KINDS.get(axis.name, "space") for axis in multiscale.axes]
    scale: Any = multiscale.datasets[0].coordinateTransformations[0]
    return "".join(axis.name for axis in multiscale.axes), [axis.unit for axis in multiscale.axes], list(scale.scale)


PACKING: dict[str, Any] = {"scale_factor": 0.01, "add_offset": 273.15, "units": "K", "standard_name": "air_temperature"}


@pytest.mark.parametrize(("dtype", "form"), [("auto", "auto"), ("float32", "zarr")])
def test_outputs_keep_what_stored_numbers_mean(tmp_path: Path, dtype: str, form: Literal["auto", "zarr"]) -> None:
    kelvin = np.random.default_rng(0).normal(280, 1, (1300, 200))
    packed = ((kelvin - PACKING["add_offset"]) / PACKING["scale_factor"]).round().astype("int16")
    source = zarr.create_array(tmp_path / "in.zarr", data=packed, dimension_names=["lat", "lon"])
    source.attrs.update(PACKING | {"_FillValue": -32768, "coordinates": "lat lon", "actual_range": [-9, 9]})
    job = gaussian(tmp_path / "in.zarr", tmp_path / "o.zarr")
    job = replace(job, output=replace(job.output, dtype=dtype, format=form))
    assert any("scale_factor 0.01 and add_offset 273.15" in note for note in make_plan(job).notes)
    run_inline(job)
    for level in ["0", "1"] if form == "auto" else [""]:
        array: Any = zarr.open_array(tmp_path / "o.zarr" / level, mode="r")
        kept = {name: value for name, value in array.attrs.items() if name != "halotile"}
        assert kept == PACKING | {"missing_value": -32768}
        assert abs((array[...] * array.attrs["scale_factor"] + array.attrs["add_offset"]).mean() - 280) < 0.1
    assert open_source(tmp_path / "o.zarr").attributes == PACKING


ORDERS: list[tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ("YXS", (64, 48, 3), (2, 0, 1), {"tile": (32, 32), "compression": "zlib"}),
    ("ZCYX", (4, 2, 64, 48), (1, 0, 2, 3), {}),
    ("TZCYX", (2, 3, 2, 40, 48), (0, 2, 1, 3, 4), {"tile": (32, 32), "compression": "zlib"}),
]


@pytest.mark.parametrize(("axes", "shape", "order", "options"), ORDERS)
def test_the_axes_of_an_ome_tiff_are_put_in_the_order_of_ome_zarr(
    tmp_path: Path, axes: str, shape: tuple[int, ...], order: tuple[int, ...], options: dict[str, Any]
) -> None:
    pixels, path = noisy_image(shape, "uint8"), tmp_path / "in.ome.tif"
    words: Any = {"axes": axes, "PhysicalSizeX": 0.5, "PhysicalSizeXUnit": "µm", "TimeIncrement": 3}
    kind = "rgb" if "S" in axes else "minisblack"
    tifffile.imwrite(path, pixels, ome=True, photometric=kind, metadata=words, **options)
    wanted, letters = pixels.transpose(order), axes.lower().replace("s", "c")
    source = open_source(path)
    assert "".join(source.axes) == "".join(letters[i] for i in order)
    assert np.array_equal(source[...], wanted)
    part = (slice(1, 2), *[slice(None)] * (wanted.ndim - 3), slice(5, 40), slice(7, 33))
    assert np.array_equal(source[part], wanted[part])
    assert open_source(path, axes=letters).shape == shape, "as they lie, where they are named"
    axes, units, scale = described(output_of(gaussian(path, tmp_path / "o.zarr")))
    assert (axes, scale[-1], units[-1]) == ("".join(source.axes), 0.5, "micrometer")
    assert "t" not in axes or (scale[0], units[0]) == (3.0, "second")


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


FILTERS: dict[str, dict[str, Any]] = {
    "tv": {"strength": 0.5, "iterations": 10},
    "nlm": {"strength": 0.3, "patch": 3, "distance": 2},
    "gaussian": {"sigma": 1.5},
    "median": {"size": 3},
}


def frames(count: int = 8) -> NDArray[np.float32]:
    """Frames whose levels differ by a tenth of their range each."""
    rng = np.random.default_rng(0)
    levels = np.linspace(0, 0.7, count)[rng.permutation(count)]
    return (levels[:, None, None] + 0.02 * rng.standard_normal((count, 60, 70))).astype(np.float32)


def tagged(path: Path, pixels: NDArray[Any], spacing: float) -> Path:
    """An ImageJ stack with pixels of 1 micrometer and planes ``spacing`` apart."""
    words = {"axes": "ZYX", "spacing": spacing, "unit": "um"}
    tifffile.imwrite(path, pixels, imagej=True, resolution=(1, 1), metadata=words)
    return path


def saved(path: Path, pixels: NDArray[Any]) -> Path:
    np.save(path, pixels)
    return path


def test_planes_far_apart_or_of_no_stated_meaning_stay_as_they_are_alone(tmp_path: Path) -> None:
    h5py, planes = pytest.importorskip("h5py"), frames()
    with h5py.File(tmp_path / "series.h5", "w") as file:
        file["frames"] = planes
    sources = [tagged(tmp_path / "apart.tif", planes, 5.0), saved(tmp_path / "unknown.npy", planes)]
    sources += [tmp_path / "series.h5", write_zarr(tmp_path / "distance.zarr", planes, axes="zyx")]
    for name, source in zip(FILTERS, sources, strict=True):
        job = job_of(source, tmp_path / f"{name}.out.zarr", name, FILTERS[name])
        plan = make_plan(job)
        assert plan.summary()["tiled_axes"] == "yx"
        assert any("axes: zyx" in note or "input.spacing" in note for note in plan.notes), plan.notes
        assert np.abs(np.median(run_inline(job), (1, 2)) - np.median(planes, (1, 2))).max() <= 0.01


def of_spacing(folder: Path, spacing: dict[str, Any], axes: str = "zyx", pixels: Any = None) -> Plan:
    source = saved(folder / "a.npy", frames() if pixels is None else pixels)
    section = {"axes": axes, "spacing": spacing}
    return make_plan(job_of(source, folder / "out.zarr", "tv", FILTERS["tv"], input=section))


UM, NO_UNIT = ("micrometer",) * 3, (None,) * 3
KNOWN: list[tuple[dict[str, Any], Any, str, Any, Any]] = [
    ({"z": 1, "y": 1, "x": 1}, None, "zyx", (1.0, 1.0, 1.0), NO_UNIT),
    ({"z": "0.15 um", "y": "0.1 um", "x": "0.1 um"}, (1.5, 1, 1), "zyx", (0.15, 0.1, 0.1), UM),
    ({"z": "150 nm", "y": "0.1 um", "x": "0.1 um"}, (1.5, 1, 1), "zyx", None, None),
    ({"y": 0.1, "x": 0.1}, None, "yx", None, None),  # leaves the distance of planes unknown
]


def test_jobs_give_what_files_do_not_know(tmp_path: Path) -> None:
    for folder, (spacing, voxel, tiled, scale, units) in in_folders(tmp_path, KNOWN):
        plan = of_spacing(folder, spacing)
        assert (plan.summary()["tiled_axes"], work_of(plan).task.denoiser.spacing) == (tiled, voxel)
        assert (plan.layout.scale, plan.layout.units) == (scale, units) or scale is None


def test_z_may_be_the_last_axis(tmp_path: Path) -> None:
    pixels, spacing = np.moveaxis(frames(), 0, 2), {"z": 5, "y": 1, "x": 1}
    for planes, is_noted in ((pixels, True), (pixels[..., :1], False)):
        plan = of_spacing(tmp_path, spacing, "yxz", planes)
        assert plan.summary()["tiled_axes"] == "yx"
        assert any("5 times as far apart" in note for note in plan.notes) == is_noted
    network = {"import": "tests.networks:convolutions"}
    job = job_of(tmp_path / "a.npy", tmp_path / "n.zarr", "torch", network, input={"axes": "yxz"})
    assert make_plan(job).summary()["tiled_axes"] == "yx"


UNITS = "all with a unit of length, or all without"
VOLUMES: dict[str, Any] = {"import": "tests.networks:volumes"}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ("tv", {}, {"input": {"axes": "zyx", "spacing": {"z": 1.5}}}, ConfigError, UNITS),
    ("tv", {}, {"input": {"axes": "zyx", "spacing": {"z": 1.5, "y": "1 um", "x": "1 um"}}}, ConfigError, UNITS),
    ("tv", {}, {"input": {"spacing": {"z": 1}}}, InputError, r"spacing is given along z, and the axes are qyx"),
    ("torch", VOLUMES, {}, ConfigError, r"and input: {axes: ...} where the file does not"),
    ("torch", VOLUMES, {"tile": {"axes": "zyx"}}, ConfigError, r"axes are 'qyx'. Write some of .*input.axes if"),
    ("tv", {"spacing": (3.0, 1.0, 1.0)}, {}, ConfigError, r"spacing is \[3.0, 1.0, 1.0\], and 2 axes are tiled"),
    ("tv", {"spacing": (0.0, 1.0)}, {}, ConfigError, r"spacing is \[0.0, 1.0\]"),
]


def test_axes_and_sizes_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for folder, (name, options, parts, error, words) in in_folders(tmp_path, REFUSED):
        source = saved(folder / "a.npy", frames())
        with pytest.raises(error, match=words):
            make_plan(job_of(source, folder / "out.zarr", name, FILTERS.get(name, {}) | options, **parts))


@pytest.mark.parametrize("name", ["tv", "nlm", "gaussian"])
def test_tiles_are_the_volume_where_z_counts_less_and_a_gaussian_is_round(tmp_path: Path, name: str) -> None:
    planes = np.concatenate([frames()] * 4)
    source = tagged(tmp_path / "a.tif", planes, 1.5)

    def job(place: str, **tile: Any) -> Any:
        return job_of(source, tmp_path / place, name, FILTERS[name], shard=32, chunk=16, tile=tile)

    assert make_plan(job("whole.zarr")).summary()["tiled_axes"] == "zyx"
    whole = run_inline(job("whole.zarr", size=128, block=128))
    assert np.array_equal(run_inline(job("tiled.zarr", size=20, block=32)), whole)
    if name == "gaussian":
        np.testing.assert_allclose(whole, scipy.ndimage.gaussian_filter(planes, (1.0, 1.5, 1.5)), atol=1e-6)
        assert Gaussian(sigma=1).with_spacing((1.0, 1.0, 1.0)) == Gaussian(sigma=1)


@pytest.mark.parametrize("accelerated", [False, True])
def test_total_variation_in_space_does_not_depend_on_how_finely_z_is_sampled(accelerated: bool) -> None:
    """Along z alone, voxels of edge s make of the weight w what voxels of edge 1 make of w / s."""
    import torch

    from halotile.tasks.denoisers.tv import Proximal

    kind = Proximal if accelerated else TotalVariation
    line = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 1, 40, 1, 1))).repeat(1, 1, 1, 3, 3)
    near = kind(strength=0.6 / 1.5, iterations=1000).build()(line)
    far = kind(strength=0.6, iterations=1000).with_spacing((1.5, 1.0, 1.0)).build()(line)
    assert torch.allclose(near, far, atol=2e-3)
    assert not torch.allclose(kind(strength=0.6, iterations=1000).build()(line), far, atol=2e-2)


def series(path: Path, planes: Any, compression: str | None = None) -> Path:
    """A TIFF of several series."""
    with tifffile.TiffWriter(path) as file:
        for plane in planes:
            options: dict[str, Any] = {"photometric": "minisblack", "compression": compression, "contiguous": False}
            file.write(plane, metadata={"axes": "YX"}, **options)
    return path


def test_series_of_equal_shape_make_one_image(tmp_path: Path) -> None:
    planes = frames(3)
    for compression in (None, "zlib"):
        path = series(tmp_path / f"{compression}.tif", planes, compression)
        one = make_plan(job_of(path, tmp_path / "one.zarr", "gaussian", {"sigma": 1.0}))
        words = ("3 series", "this is series 0", "or all for one image")
        assert any(all(each in note for each in words) for note in one.notes)
        job = job_of(path, tmp_path / f"{compression}.zarr", "gaussian", {"sigma": 1.0}, input={"dataset": "all"})
        assert "dataset is all: its 3 series are one axis, q" in make_plan(job).notes
        expected = [scipy.ndimage.gaussian_filter(plane, 1.0) for plane in planes]
        np.testing.assert_allclose(run_inline(job), expected, atol=1e-6)


def test_a_series_is_written_as_a_number_and_those_that_differ_are_no_image(tmp_path: Path) -> None:
    series(tmp_path / "a.tif", [np.full((40, 30), value, "uint8") for value in (1, 2)])
    sections = "input: {path: a.tif, dataset: 1}\noutput: {path: o.zarr}\ndenoiser: {name: none}\n"
    (tmp_path / "job.yaml").write_text(f"version: 1\njob: denoise\n{sections}")
    assert (run_inline(load_denoising(tmp_path / "job.yaml")) == 2).all()
    differ = series(tmp_path / "b.tif", [np.zeros((edge, edge), np.uint8) for edge in (20, 30)])
    with pytest.raises(InputError, match=r"its series differ: 0 of 20 × 20, 1 of 30 × 30. Write the number of one"):
        make_plan(job_of(differ, tmp_path / "out.zarr", "gaussian", {"sigma": 1.0}, input={"dataset": "all"}))


@pytest.mark.cluster
def test_levels_are_as_many_as_the_job_asks_for_and_are_resumed_verified_and_repaired(
    scene: Scene, cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "LARGEST_TOP", 40)
    monkeypatch.setattr(layout, "SMALLEST_SHARD", 4)
    parts: dict[str, dict[str, Any]] = {"output": {"format": "ome-zarr"}}
    cause = scene.make_trouble("raise", 19)
    with pytest.raises(BlockFailed):
        scene.run(cluster, parts=parts, retries=0)
    cause.unlink()
    assert scene.run(cluster, parts=parts).resumed == BLOCKS - 1
    written = scene.files()
    assert {name.split("/")[0] for name in written} == {"zarr.json", "0", "1", "2", "3"}
    scene.run(cluster, parts=parts, fresh=True)
    assert scene.files() == written
    flip_bit(sorted((scene.output / "3" / "c").glob("*/*"))[5], 0)
    assert [problem.split(":")[0] for problem in verify(scene.output).problems] == ["block 5"]
    assert verify(scene.output, job=scene.job(parts=parts), repair=True).sound
    assert scene.files() == written
    for wanted, count in ((1, 1), (2, 2), ("auto", 4)):
        plan = make_plan(scene.job(parts={"output": {"format": "ome-zarr", "levels": wanted}}))
        assert len(plan.summary()["levels"]) == count
        assert plan.layout.block == ((BLOCK, BLOCK) if wanted != 1 else ())
    with pytest.raises(ConfigError, match=r"output\.levels: 0 is too small; write at least 1"):
        make_plan(scene.job(parts={"output": {"levels": 0}}))


def test_colours_come_first_as_ome_zarr_wants(tmp_path: Path) -> None:
    pixels = noisy_image((90, 70, 3), "uint8")
    source = write_zarr(tmp_path / "in.zarr", pixels)
    mask = write_zarr(tmp_path / "mask.zarr", (pixels > pixels.mean()).astype("uint8"))
    parts = {"input": {"sides": {"mask": str(mask)}}}
    first = run_inline(job_of(source, tmp_path / "ome.zarr", "median", {"size": 3}, **parts))
    bare = job_of(source, tmp_path / "bare.zarr", "median", {"size": 3}, **parts)
    last = run_inline(replace(bare, output=replace(bare.output, format="zarr")))
    assert first.shape == (3, 90, 70)
    np.testing.assert_array_equal(first, last.transpose(2, 0, 1))
    assert open_source(str(tmp_path / "ome.zarr")).axes == ("c", "y", "x")
    kept = read_zarr(mask) == 0
    np.testing.assert_array_equal(last[kept], pixels[kept])


def test_axes_that_ome_zarr_does_not_permit_give_a_bare_array_and_a_note(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", noisy_image((2, 3, 2, 40, 40)), axes="pqtyx")
    job = job_of(source, tmp_path / "out.zarr", "gaussian", {"sigma": 1.0})
    plan = make_plan(job)
    assert (plan.summary()["format"], plan.layout.ome) == ("zarr", False)
    assert any(note.startswith("OME-Zarr has no room for the axes pqtyx") for note in plan.notes)
    with pytest.raises(ConfigError, match=r"OME-Zarr 0\.5 requires t, then c"):
        make_plan(replace(job, output=replace(job.output, format="ome-zarr")))


@pytest.mark.parametrize("dtype", [*("bool", "uint8", "int32", "uint32", "float16", "float32", "float64", ">u2")])
def test_without_a_denoiser_pixels_are_stored_as_they_are(tmp_path: Path, dtype: str) -> None:
    pixels = noisy_image((130, 71), dtype)
    if dtype == "int32":
        pixels[0, :2] = np.iinfo(dtype).min, np.iinfo(dtype).max
    if pixels.dtype.kind == "f":
        pixels[5, 5:9] = np.nan, np.inf, -np.inf, np.finfo(dtype).max
    source = write_zarr(tmp_path / "in.zarr", pixels)
    np.testing.assert_array_equal(run_inline(job_of(source, tmp_path / "out.zarr", "none")), pixels)


def test_a_run_that_goes_on_keeps_the_contrast_of_its_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that could not be read when it began may be readable by now."""
    words = {"axes": "CYX", "Channel": {"Name": ["DAPI", "GFP"]}}
    tifffile.imwrite(tmp_path / "in.tif", noisy_image((2, 90, 80), "uint16"), ome=True, metadata=words)
    job = job_of(tmp_path / "in.tif", tmp_path / "out.zarr", "gaussian", {"sigma": 1.0})
    first = make_plan(job)
    with claim(first):
        pass
    monkeypatch.setattr(pixel_choices, "TAILS", (10, 90))
    again = make_plan(job)
    assert again.resumes
    assert again.layout == first.layout
    assert make_plan(job, fresh=True).layout != first.layout
