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


def medians_move(before: NDArray[Any], after: NDArray[Any]) -> float:
    return float(np.abs(np.median(after, axis=(1, 2)) - np.median(before, axis=(1, 2))).max())


def tagged(path: Path, pixels: NDArray[Any], spacing: float) -> Path:
    """An ImageJ stack with pixels of 1 micrometer and planes ``spacing`` apart."""
    tifffile.imwrite(
        path, pixels, imagej=True, resolution=(1, 1), metadata={"axes": "ZYX", "spacing": spacing, "unit": "um"}
    )
    return path


def saved(path: Path, pixels: NDArray[Any]) -> Path:
    np.save(path, pixels)
    return path


def stored(path: Path, pixels: NDArray[Any]) -> Path:
    """An HDF5 file."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file["frames"] = pixels
    return path


@pytest.mark.parametrize("name", FILTERS)
def test_planes_far_apart_or_of_no_stated_meaning_stay_as_they_are_alone(tmp_path: Path, name: str) -> None:
    planes = frames()
    sources = {
        "apart": tagged(tmp_path / "apart.tif", planes, 5.0),
        "unknown": saved(tmp_path / "unknown.npy", planes),
        "series": stored(tmp_path / "series.h5", planes),
        "distance": write_zarr(tmp_path / "distance.zarr", planes, axes="zyx"),
    }
    for key, source in sources.items():
        job = job_of(source, tmp_path / f"{key}.out.zarr", name, FILTERS[name])
        plan = make_plan(job)
        assert plan.summary()["tiled_axes"] == "yx"
        assert any("axes: zyx" in note or "input.spacing" in note for note in plan.notes), plan.notes
        assert medians_move(planes, run_inline(job)) <= 0.01


@pytest.mark.parametrize("name", FILTERS)
def test_a_volume_of_known_voxels_is_denoised_as_one(tmp_path: Path, name: str) -> None:
    source = tagged(tmp_path / "cubes.tif", frames(), 1.0)
    assert make_plan(job_of(source, tmp_path / "out.zarr", name, FILTERS[name])).summary()["tiled_axes"] == "zyx"


@pytest.mark.parametrize("spacing", [{"z": 1, "y": 1, "x": 1}, {"z": "0.15 um", "y": "0.1 um", "x": "0.1 um"}])
def test_the_job_gives_what_the_file_does_not_know(tmp_path: Path, spacing: dict[str, Any]) -> None:
    source = saved(tmp_path / "a.npy", frames())
    job = job_of(source, tmp_path / "out.zarr", "tv", FILTERS["tv"], input={"axes": "zyx", "spacing": spacing})
    plan = make_plan(job)
    task = work_of(plan).task
    assert plan.summary()["tiled_axes"] == "zyx"
    assert task.denoiser.spacing == ((1.5, 1, 1) if spacing["z"] != 1 else None)
    layout = plan.layout
    assert layout.scale == ((0.15, 0.1, 0.1) if spacing["z"] != 1 else (1.0, 1.0, 1.0))
    assert layout.units == (("micrometer",) * 3 if spacing["z"] != 1 else (None,) * 3)


def of_spacing(folder: Path, spacing: dict[str, Any], axes: str = "zyx", pixels: Any = None) -> Denoising:
    source = saved(folder / "a.npy", frames() if pixels is None else pixels)
    return job_of(source, folder / "out.zarr", "tv", FILTERS["tv"], input={"axes": axes, "spacing": spacing})


def test_units_of_length_are_compared(tmp_path: Path) -> None:
    job = of_spacing(tmp_path, {"z": "150 nm", "y": "0.1 um", "x": "0.1 um"})
    assert work_of(make_plan(job)).task.denoiser.spacing == (1.5, 1, 1)


@pytest.mark.parametrize("spacing", [{"z": 1.5}, {"z": 1.5, "y": "1 um", "x": "1 um"}])
def test_sizes_that_tell_no_shape_are_refused(tmp_path: Path, spacing: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="all with a unit of length, or all without"):
        make_plan(of_spacing(tmp_path, spacing))


def test_sizes_of_planes_alone_leave_the_distance_unknown(tmp_path: Path) -> None:
    plan = make_plan(of_spacing(tmp_path, {"y": 0.1, "x": 0.1}))
    assert plan.summary()["tiled_axes"] == "yx"
    assert any("their distance is not known" in note for note in plan.notes)


def test_z_may_be_the_last_axis(tmp_path: Path) -> None:
    pixels = np.moveaxis(frames(), 0, 2)
    plan = make_plan(of_spacing(tmp_path, {"z": 5, "y": 1, "x": 1}, "yxz", pixels))
    assert plan.summary()["tiled_axes"] == "yx"
    assert any("5 times as far apart" in note for note in plan.notes)
    one = make_plan(of_spacing(tmp_path, {"z": 5, "y": 1, "x": 1}, "yxz", pixels[..., :1]))
    assert one.summary()["tiled_axes"] == "yx"
    assert not any("far apart" in note for note in one.notes)
    network = {"import": "tests.networks:convolutions"}
    job = job_of(tmp_path / "a.npy", tmp_path / "n.zarr", "torch", network, input={"axes": "yxz"})
    assert make_plan(job).summary()["tiled_axes"] == "yx"


def test_an_axis_that_the_image_lacks_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "a.npy", frames())
    job = job_of(source, tmp_path / "out.zarr", "tv", FILTERS["tv"], input={"spacing": {"z": 1}})
    with pytest.raises(InputError, match=r"spacing is given along z, and the axes are qyx"):
        make_plan(job)


def test_a_network_for_volumes_asks_for_the_axes(tmp_path: Path) -> None:
    source = saved(tmp_path / "a.npy", frames())
    options = {"import": "tests.networks:volumes"}
    with pytest.raises(ConfigError, match=r"and input: {axes: ...} where the file does not"):
        make_plan(job_of(source, tmp_path / "out.zarr", "torch", options))
    with pytest.raises(ConfigError, match=r"axes are 'qyx'. Write some of these, or input.axes if they are others"):
        make_plan(job_of(source, tmp_path / "out.zarr", "torch", options, tile={"axes": "zyx"}))


def test_a_spacing_of_the_denoiser_is_for_the_axes_that_are_tiled(tmp_path: Path) -> None:
    source = saved(tmp_path / "a.npy", frames())
    with pytest.raises(ConfigError, match=r"spacing is \[3.0, 1.0, 1.0\], and 2 axes are tiled"):
        make_plan(job_of(source, tmp_path / "out.zarr", "tv", {**FILTERS["tv"], "spacing": (3.0, 1.0, 1.0)}))
    with pytest.raises(ConfigError, match=r"spacing is \[0.0, 1.0\]"):
        make_plan(job_of(source, tmp_path / "out.zarr", "tv", {**FILTERS["tv"], "spacing": (0.0, 1.0)}))


@pytest.mark.parametrize("name", ["tv", "nlm", "gaussian"])
def test_tiles_are_the_volume_where_z_counts_less(tmp_path: Path, name: str) -> None:
    source = tagged(tmp_path / "a.tif", np.concatenate([frames()] * 5), 1.5)

    def job(place: str, **tile: Any) -> Any:
        return job_of(source, tmp_path / place, name, FILTERS[name], shard=32, chunk=16, tile=tile)

    whole = run_inline(job("whole.zarr", size=128, block=128))
    assert np.array_equal(run_inline(job("tiled.zarr", size=20, block=32)), whole)


def test_a_gaussian_is_round_in_space(tmp_path: Path) -> None:
    planes = frames()
    source = tagged(tmp_path / "a.tif", planes, 1.5)
    result = run_inline(job_of(source, tmp_path / "out.zarr", "gaussian", {"sigma": 1.5}))
    np.testing.assert_allclose(result, scipy.ndimage.gaussian_filter(planes, (1.0, 1.5, 1.5)), atol=1e-6)


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


def test_equal_voxels_change_no_bit_and_no_name() -> None:
    assert Gaussian(sigma=1).with_spacing((1.0, 1.0, 1.0)) == Gaussian(sigma=1)


def test_series_of_equal_shape_make_one_image(tmp_path: Path) -> None:
    planes = frames(3)
    for compression in (None, "zlib"):
        path = tmp_path / f"{compression}.tif"
        with tifffile.TiffWriter(path) as file:
            for plane in planes:
                file.write(plane, photometric="minisblack", metadata={"axes": "YX"}, compression=compression)
        one = make_plan(job_of(path, tmp_path / "one.zarr", "gaussian", {"sigma": 1.0}))
        assert any(
            "3 series" in note and "this is series 0" in note and "or all for one image" in note for note in one.notes
        )
        job = job_of(path, tmp_path / f"{compression}.zarr", "gaussian", {"sigma": 1.0}, input={"dataset": "all"})
        assert "dataset is all: its 3 series are one axis, q" in make_plan(job).notes
        result = run_inline(job)
        assert result.shape == planes.shape
        for plane, denoised in zip(planes, result, strict=True):
            np.testing.assert_allclose(denoised, scipy.ndimage.gaussian_filter(plane, 1.0), atol=1e-6)


def test_series_that_differ_are_no_image(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for edge in (20, 30):
            file.write(np.zeros((edge, edge), np.uint8), photometric="minisblack", metadata=None)
    job = job_of(tmp_path / "a.tif", tmp_path / "out.zarr", "gaussian", {"sigma": 1.0}, input={"dataset": "all"})
    with pytest.raises(InputError, match=r"its series differ: 0 of 20 × 20, 1 of 30 × 30. Write the number of one"):
        make_plan(job)


def test_a_series_is_written_as_a_number(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for value in (1, 2):
            file.write(np.full((40, 30), value, "uint8"), photometric="minisblack", contiguous=False)
    (tmp_path / "job.yaml").write_text(
        "version: 1\njob: denoise\ninput: {path: a.tif, dataset: 1}\noutput: {path: o.zarr}\ndenoiser: {name: none}\n"
    )
    assert (run_inline(load_denoising(tmp_path / "job.yaml")) == 2).all()
