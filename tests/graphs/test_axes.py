"""Nothing is mixed across an axis that is not known to be space, and z counts by its distance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import tifffile
from numpy.typing import NDArray

from halotile.errors import ConfigError, InputError
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.plans.plan import make_plan
from halotile.tasks.denoisers.gaussian import Gaussian
from halotile.tasks.denoisers.tv import TotalVariation
from tests.support import job_of, load_denoising, run_inline, work_of, write_zarr

FILTERS: dict[str, dict[str, Any]] = {
    "tv": {"strength": 0.5, "iterations": 10},
    "nlm": {"strength": 0.3, "patch": 3, "distance": 2},
    "gaussian": {"sigma": 1.5},
    "median": {"size": 3},
}


def frames(count: int = 8) -> NDArray[np.float32]:
    """Frames whose levels differ by a tenth of their range each."""
    rng = np.random.default_rng(0)
    levels = np.linspace(0, 0.7, count, dtype=np.float32)[rng.permutation(count)]
    planes: NDArray[np.float32] = levels[:, None, None] + 0.02 * rng.standard_normal((count, 60, 70)).astype(np.float32)
    return planes


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
    sources = {
        "tv": tagged(tmp_path / "apart.tif", planes, 5.0),
        "nlm": saved(tmp_path / "unknown.npy", planes),
        "gaussian": tmp_path / "series.h5",
        "median": write_zarr(tmp_path / "distance.zarr", planes, axes="zyx"),
    }
    for name, source in sources.items():
        job = job_of(source, tmp_path / f"{name}.out.zarr", name, FILTERS[name])
        plan = make_plan(job)
        assert plan.summary()["tiled_axes"] == "yx"
        assert any("axes: zyx" in note or "input.spacing" in note for note in plan.notes), plan.notes
        assert np.abs(np.median(run_inline(job), (1, 2)) - np.median(planes, (1, 2))).max() <= 0.01


def of_spacing(folder: Path, spacing: dict[str, Any], axes: str = "zyx", pixels: Any = None) -> Denoising:
    source = saved(folder / "a.npy", frames() if pixels is None else pixels)
    return job_of(source, folder / "out.zarr", "tv", FILTERS["tv"], input={"axes": axes, "spacing": spacing})


UM, NO_UNIT = ("micrometer",) * 3, (None,) * 3
KNOWN: list[tuple[dict[str, Any], Any, str, Any, Any]] = [
    ({"z": 1, "y": 1, "x": 1}, None, "zyx", (1.0, 1.0, 1.0), NO_UNIT),
    ({"z": "0.15 um", "y": "0.1 um", "x": "0.1 um"}, (1.5, 1, 1), "zyx", (0.15, 0.1, 0.1), UM),
    ({"z": "150 nm", "y": "0.1 um", "x": "0.1 um"}, (1.5, 1, 1), "zyx", None, None),
    ({"y": 0.1, "x": 0.1}, None, "yx", None, None),  # leaves the distance of planes unknown
]


@pytest.mark.parametrize(("spacing", "voxel", "tiled", "scale", "units"), KNOWN)
def test_the_job_gives_what_the_file_does_not_know(
    tmp_path: Path, spacing: dict[str, Any], voxel: Any, tiled: str, scale: Any, units: Any
) -> None:
    plan = make_plan(of_spacing(tmp_path, spacing))
    assert plan.summary()["tiled_axes"] == tiled
    assert work_of(plan).task.denoiser.spacing == voxel
    assert (plan.layout.scale, plan.layout.units) == (scale, units) or scale is None


def test_z_may_be_the_last_axis(tmp_path: Path) -> None:
    pixels, spacing = np.moveaxis(frames(), 0, 2), {"z": 5, "y": 1, "x": 1}
    for planes, is_noted in ((pixels, True), (pixels[..., :1], False)):
        plan = make_plan(of_spacing(tmp_path, spacing, "yxz", planes))
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


@pytest.mark.parametrize(("name", "options", "parts", "error", "words"), REFUSED)
def test_axes_and_sizes_that_cannot_be_are_refused(
    tmp_path: Path, name: str, options: dict[str, Any], parts: Any, error: type[Exception], words: str
) -> None:
    source = saved(tmp_path / "a.npy", frames())
    with pytest.raises(error, match=words):
        make_plan(job_of(source, tmp_path / "out.zarr", name, FILTERS.get(name, {}) | options, **parts))


@pytest.mark.parametrize("name", ["tv", "nlm", "gaussian"])
def test_tiles_are_the_volume_where_z_counts_less(tmp_path: Path, name: str) -> None:
    source = tagged(tmp_path / "a.tif", np.concatenate([frames()] * 4), 1.5)

    def job(place: str, **tile: Any) -> Any:
        return job_of(source, tmp_path / place, name, FILTERS[name], shard=32, chunk=16, tile=tile)

    assert make_plan(job("whole.zarr")).summary()["tiled_axes"] == "zyx"
    whole = run_inline(job("whole.zarr", size=128, block=128))
    assert np.array_equal(run_inline(job("tiled.zarr", size=20, block=32)), whole)


def test_a_gaussian_is_round_in_space(tmp_path: Path) -> None:
    planes = frames()
    source = tagged(tmp_path / "a.tif", planes, 1.5)
    result = run_inline(job_of(source, tmp_path / "out.zarr", "gaussian", {"sigma": 1.5}))
    np.testing.assert_allclose(result, scipy.ndimage.gaussian_filter(planes, (1.0, 1.5, 1.5)), atol=1e-6)
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
    text = (
        "version: 1\njob: denoise\ninput: {path: a.tif, dataset: 1}\noutput: {path: o.zarr}\ndenoiser: {name: none}\n"
    )
    (tmp_path / "job.yaml").write_text(text)
    assert (run_inline(load_denoising(tmp_path / "job.yaml")) == 2).all()
    differ = series(tmp_path / "b.tif", [np.zeros((edge, edge), np.uint8) for edge in (20, 30)])
    with pytest.raises(InputError, match=r"its series differ: 0 of 20 × 20, 1 of 30 × 30. Write the number of one"):
        make_plan(job_of(differ, tmp_path / "out.zarr", "gaussian", {"sigma": 1.0}, input={"dataset": "all"}))
