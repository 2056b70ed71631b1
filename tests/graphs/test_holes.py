"""Holes stay as they are, no other pixel depends on them, and tiles give the bits of the whole image."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import zarr
from numpy.typing import NDArray
from skimage.data import retina

from halotile.errors import ConfigError, InputError
from halotile.graphs.plans.plan import make_plan
from halotile.storage.arrays import open_source
from halotile.storage.images.planes import choose_planes
from halotile.storage.images.png import write_png
from halotile.tasks.holes import Holes, fill_from_nearest, fill_reach
from tests.cases import all_of, thorough
from tests.graphs.holed import FILTERS, NODATA, cut, scene, with_tag
from tests.support import job_of, run_inline, work_of, write_zarr


@pytest.mark.parametrize("name", all_of(FILTERS, thorough=["nlm", "torch", "function"]))
def test_holes_stay_and_their_value_reaches_no_other_pixel(tmp_path: Path, name: str) -> None:
    pixels, holes = scene()
    results = [cut(tmp_path, write_zarr(tmp_path / "nan.zarr", pixels), name, 64)]
    for value in (NODATA, 1e6):
        filled = np.where(holes, np.float32(value), pixels)
        results.append(cut(tmp_path, with_tag(tmp_path / f"{value:g}.tif", filled, f"{value:g}"), name, 64))
        assert (results[-1][holes] == np.float32(value)).all()
        results[-1][holes] = np.nan
    assert np.array_equal(np.isnan(results[0]), holes)
    for other in results[1:]:
        assert np.array_equal(results[0], other, equal_nan=True)


@pytest.mark.parametrize("name", all_of(FILTERS, thorough=["nlm", "torch", "function"]))
def test_infinite_pixels_are_holes_too(tmp_path: Path, name: str) -> None:
    pixels, holes = scene()
    infinite = np.where(holes & (np.arange(300) % 2 == 0), np.float32(np.inf), pixels)
    infinite[np.isnan(infinite) & (np.arange(300) % 3 == 0)] = -np.inf
    result = cut(tmp_path, write_zarr(tmp_path / "inf.zarr", infinite), name, 64)
    assert np.array_equal(result[holes], infinite[holes], equal_nan=True)
    result[holes] = np.nan
    expected = cut(tmp_path, write_zarr(tmp_path / "nan.zarr", pixels), name, 64)
    assert np.array_equal(result, expected, equal_nan=True)


@pytest.mark.parametrize("name", all_of(FILTERS, thorough=["nlm", "torch"]))
def test_tiles_give_the_bits_of_the_whole_image(tmp_path: Path, name: str) -> None:
    pixels, _ = scene()
    source = write_zarr(tmp_path / "in.zarr", pixels)
    whole = cut(tmp_path, source, name, 512)
    for tile in (40, 100):
        assert np.array_equal(cut(tmp_path, source, name, tile), whole, equal_nan=True)


@pytest.mark.parametrize("name", all_of(FILTERS, thorough=["nlm", "function", "torch"]))
def test_far_from_holes_nothing_changes(tmp_path: Path, name: str) -> None:
    pixels, holes = scene()
    plain = np.where(holes, np.float32(100), pixels)
    with_holes = cut(tmp_path, write_zarr(tmp_path / "holed.zarr", pixels), name, 128)
    without = cut(tmp_path, write_zarr(tmp_path / "plain.zarr", plain), name, 128)
    task = work_of(make_plan(job_of(tmp_path / "plain.zarr", tmp_path / "x.zarr", name, FILTERS[name]))).task
    reach = max(map(max, task.tiling.depth))
    far = ~scipy.ndimage.binary_dilation(holes, np.ones((3, 3)), iterations=reach)
    assert far.sum() > 500
    assert np.array_equal(with_holes[far], without[far])


@pytest.mark.parametrize("name", ["tv", "nlm", "gaussian", "median"])
def test_pixels_beside_a_hole_are_as_good_as_elsewhere(tmp_path: Path, name: str) -> None:
    clean = retina()[300:620, 300:600, 1].astype(np.float64)
    pixels, holes = scene()
    result = cut(tmp_path, write_zarr(tmp_path / "in.zarr", pixels), name, 128)
    beside = scipy.ndimage.binary_dilation(holes, np.ones((5, 5))) & ~holes
    elsewhere = ~scipy.ndimage.binary_dilation(holes, np.ones((9, 9)))
    error = (result - clean) ** 2
    assert np.sqrt(error[beside].mean()) < 1.25 * np.sqrt(error[elsewhere].mean())


def test_a_gaussian_is_the_normalised_one(tmp_path: Path) -> None:
    pixels, holes = scene()
    result = cut(tmp_path, write_zarr(tmp_path / "in.zarr", pixels), "gaussian", 128)
    weights = scipy.ndimage.gaussian_filter((~holes).astype(float), 2.0)
    total = scipy.ndimage.gaussian_filter(np.where(holes, 0, pixels).astype(float), 2.0)
    expected = total / np.where(holes, 1, weights)
    np.testing.assert_allclose(result[~holes], expected[~holes], rtol=1e-5)


def test_a_median_is_that_of_the_measured_pixels(tmp_path: Path) -> None:
    pixels, holes = scene()
    result = cut(tmp_path, write_zarr(tmp_path / "in.zarr", pixels), "median", 128)
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(pixels, 2, "symmetric"), (5, 5))
    with np.errstate(all="ignore"):
        expected = np.nanquantile(np.where(holes[..., None, None], 0, windows), 0.5, axis=(2, 3), method="inverted_cdf")
    assert np.array_equal(result[~holes], expected[~holes])


def test_a_median_beside_a_hole_is_a_value_of_the_image(tmp_path: Path) -> None:
    labels = np.random.default_rng(1).choice(np.array([10, 200], "uint16"), (40, 50))
    labels[::3, ::4] = 0
    source = write_zarr(tmp_path / "in.zarr", labels)
    result = cut(tmp_path, source, "median", 64, input={"nodata": 0.0})
    assert set(np.unique(result)) == {0, 10, 200}


def test_no_slope_of_tv_crosses_a_hole(tmp_path: Path) -> None:
    """Two halves with a hole all the way between them are two images."""
    pixels, _ = scene(0.0)
    pixels[:, 150:153] = np.nan
    options = {"strength": 8.0}
    result = run_inline(job_of(write_zarr(tmp_path / "in.zarr", pixels), tmp_path / "out.zarr", "tv", options))
    for number, half in enumerate((slice(0, 150), slice(153, None))):
        source = write_zarr(tmp_path / f"{number}.zarr", np.ascontiguousarray(pixels[:, half]))
        alone = run_inline(job_of(source, tmp_path / f"{number}.out.zarr", "tv", options))
        assert np.array_equal(result[:, half], alone)


@pytest.mark.parametrize("nodata", ["nan", "none"])
def test_the_job_decides(tmp_path: Path, nodata: str) -> None:
    pixels, holes = scene(NODATA)
    source = with_tag(tmp_path / "a.tif", pixels, "-9999")
    result = cut(tmp_path, source, "gaussian", 128, input={"nodata": nodata})
    assert not (result[holes] == NODATA).all()
    plan = make_plan(job_of(source, tmp_path / "b.zarr", "gaussian", FILTERS["gaussian"]))
    assert any(note.startswith("pixels of -9999, NaN or infinity are holes") for note in plan.notes), plan.notes


def test_a_number_of_the_job_is_for_integers_too(tmp_path: Path) -> None:
    pixels, holes = scene(0, "uint16")
    source = write_zarr(tmp_path / "in.zarr", pixels)
    result = cut(tmp_path, source, "median", 64, input={"nodata": 0.0})
    assert np.array_equal(result == 0, holes)


def test_a_value_in_the_attributes_of_a_zarr_counts(tmp_path: Path) -> None:
    pixels, holes = scene(0, "uint16")
    source = write_zarr(tmp_path / "in.zarr", pixels)
    zarr.open_array(source).attrs["_FillValue"] = 0
    assert np.array_equal(cut(tmp_path, source, "median", 64) == 0, holes)


@pytest.mark.parametrize("name", ["_FillValue", "missing_value"])
def test_a_value_in_the_attributes_of_an_hdf5_file_counts(tmp_path: Path, name: str) -> None:
    h5py = pytest.importorskip("h5py")
    pixels, holes = scene(NODATA)
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("image", data=pixels).attrs[name] = np.array([NODATA], "float32")
    result = cut(tmp_path, tmp_path / "in.h5", "median", 64)
    zarr_of_it = write_zarr(tmp_path / "in.zarr", pixels)
    zarr.open_array(zarr_of_it).attrs[name] = NODATA
    assert np.array_equal(result, cut(tmp_path, zarr_of_it, "median", 64))
    assert np.array_equal(result == NODATA, holes)


@pytest.mark.parametrize(
    ("shape", "at", "said"),
    [
        ((320, 300), None, "({holes:,} of 96,000)"),
        ((4200, 4200), None, "(about 0.99% of the pixels in samples of it, and at most about 6% of the image)"),
        ((320, 300), slice(0, 0), "(0 of 96,000)"),
    ],
)
def test_the_plan_says_how_many_holes_there_are(
    tmp_path: Path, shape: tuple[int, int], at: slice | None, said: str
) -> None:
    holes = np.random.default_rng(0).random(shape) < 0.01
    holes = holes if at is None else np.zeros(shape, bool)
    pixels = np.where(holes, NODATA, 5 + np.random.default_rng(1).random(shape)).astype("float32")
    job = job_of(with_tag(tmp_path / "a.tif", pixels, "-9999"), tmp_path / "o.zarr", "median", FILTERS["median"])
    notes = make_plan(job).notes
    assert any(said.format(holes=holes.sum()) in note for note in notes), notes


def test_holes_beside_the_samples_are_within_what_the_plan_says(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).random((4200, 4200), np.float32)
    pixels[:, :79] = NODATA  # 1.88 %
    job = job_of(with_tag(tmp_path / "a.tif", pixels, "-9999"), tmp_path / "o.zarr", "median", FILTERS["median"])
    (note,) = [note for note in make_plan(job).notes if "are holes" in note]
    most = re.search(r"at most about (\d+)% of the image", note)
    assert most
    assert int(most[1]) >= 1.88


def test_the_output_names_the_value_of_its_holes(tmp_path: Path) -> None:
    pixels, holes = scene(NODATA)
    cut(tmp_path, with_tag(tmp_path / "a.tif", pixels, "-9999"), "median", 64)
    again = open_source(tmp_path / "a.64.out.zarr")
    assert again.nodata == NODATA
    drawing = write_png(tmp_path / "a.png", [choose_planes(again, {}, None)], edge=100)
    assert drawing.low > 0, "holes have no part in the contrast"
    second = cut(tmp_path, tmp_path / "a.64.out.zarr", "median", 64)
    assert np.array_equal(second == NODATA, holes)


def test_the_value_that_xarray_writes_counts(tmp_path: Path) -> None:
    pixels, _ = scene(NODATA)
    source = write_zarr(tmp_path / "in.zarr", pixels)
    zarr.open_array(source).attrs["_FillValue"] = base64.b64encode(np.float64(NODATA).tobytes()).decode()
    assert open_source(source).nodata == NODATA


def test_a_mask_is_a_hole(tmp_path: Path) -> None:
    pixels, holes = scene(1e5)
    np.save(tmp_path / "mask.npy", ~holes)
    sides = {"sides": {"mask": str(tmp_path / "mask.npy")}}
    result = cut(tmp_path, write_zarr(tmp_path / "in.zarr", pixels), "gaussian", 64, input=sides)
    assert (result[holes] == 1e5).all()
    assert result[~holes].max() < 300


@pytest.mark.parametrize(
    ("name", "advice"), [("s.zarr", r"s\.zarr/NAME: ERR, SCI"), ("s.h5", "own, and its path: ERR f")]
)
def test_a_side_input_among_others_is_refused_with_what_to_write(tmp_path: Path, name: str, advice: str) -> None:
    h5py = pytest.importorskip("h5py")
    pixels, path = scene()[0], tmp_path / name
    group = zarr.open_group(tmp_path / "s.zarr", mode="w")
    with h5py.File(tmp_path / "s.h5", "w") as file:
        for part in ("SCI", "ERR"):
            file[part], group[part] = pixels, pixels
    source = write_zarr(tmp_path / "in.zarr", pixels)
    given = {"sides": {"sigma": str(path)}}
    with pytest.raises(InputError, match=rf"input\.sides\.sigma: .*no dataset to choose.*{advice}"):
        make_plan(job_of(source, tmp_path / "o.zarr", "tv", {"strength": 1.0}, input=given))


def test_noise_is_estimated_beside_holes(tmp_path: Path) -> None:
    pixels, _ = scene(NODATA)
    source = with_tag(tmp_path / "a.tif", pixels, "-9999")
    plan = make_plan(job_of(source, tmp_path / "out.zarr", "tv", {"strength": 1.0, "sigma": "auto"}))
    assert plan.identity["noise_level"] == pytest.approx(10, rel=0.1)


def test_holes_are_counted(tmp_path: Path) -> None:
    from halotile.graphs.runs.driver import run

    pixels, holes = scene()
    job = job_of(
        write_zarr(tmp_path / "in.zarr", pixels),
        tmp_path / "o.zarr",
        "gaussian",
        FILTERS["gaussian"],
        run={"workers": 1},
    )
    assert run(make_plan(job)).holes == holes.sum()


def test_planes_have_holes_of_their_own(tmp_path: Path) -> None:
    pixels, holes = scene()
    other = np.where(np.roll(holes, 40, 0), np.nan, 100 + np.arange(300, dtype=np.float32))
    source = write_zarr(tmp_path / "in.zarr", np.stack([pixels, other.astype(np.float32)]), axes="cyx")
    result = cut(tmp_path, source, "gaussian", 64)
    assert np.array_equal(np.isnan(result), np.stack([holes, np.roll(holes, 40, 0)]))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_filled_hole_is_the_same_in_any_window(dims: int) -> None:
    rng = np.random.default_rng(dims)
    shape = {1: (400,), 2: (120, 130), 3: (40, 42, 44)}[dims]
    pixels = rng.random(shape)
    valid = rng.random(shape) < {1: 0.004, 2: 0.002, 3: 0.01}[dims]
    whole = fill_from_nearest(pixels, valid, dims, 7.0)
    assert np.array_equal(whole[valid], pixels[valid])
    assert (whole == 7.0).any()
    reach = fill_reach(dims)
    for _ in range(20):
        start = [int(rng.integers(0, n - 5)) for n in shape]
        inner = tuple(slice(a, a + 5) for a in start)
        near = tuple(slice(max(0, a - reach), a + 5 + reach) for a in start)
        there = tuple(slice(a - n.start, a - n.start + 5) for a, n in zip(start, near, strict=True))
        assert np.array_equal(fill_from_nearest(pixels[near], valid[near], dims, 7.0)[there], whole[inner])


def test_the_nearest_pixel_along_a_line_fills_a_hole() -> None:
    line = np.array([[1.0, 0, 0, 0, 5.0]])
    assert fill_from_nearest(line, line > 0, 2, 0.0).tolist() == [[1, 1, 1, 5, 5]]
    assert Holes(None, 0.0).valid(np.zeros(3)) is None


def masked(folder: Path, holes: NDArray[np.bool_]) -> dict[str, Any]:
    np.save(folder / "mask.npy", ~holes)
    return {"sides": {"mask": str(folder / "mask.npy")}}


@pytest.mark.parametrize("name", ["function", thorough("torch")])
@pytest.mark.parametrize("nodata", ["auto", thorough("none")])
def test_a_mask_gives_the_same_bits_in_any_block(tmp_path: Path, name: str, nodata: str) -> None:
    pixels, holes = scene(100, "uint16" if nodata == "auto" else "float32")
    source = write_zarr(tmp_path / "in.zarr", pixels)
    given = {"nodata": nodata, **masked(tmp_path, holes)}

    def result(shard: int) -> NDArray[Any]:
        job = job_of(
            source, tmp_path / f"{shard}.zarr", name, FILTERS[name], shard=shard, input=given, tile={"block": shard}
        )
        return run_inline(job)

    assert np.array_equal(result(32), result(512))


def test_values_under_a_mask_are_in_no_mean(tmp_path: Path) -> None:
    holes = np.zeros((200, 200), bool)
    holes[20:180, 20:180] = True
    results = []
    for value in (0.0, 1e4):
        pixels = np.where(holes, np.float32(value), np.float32(50))
        source = write_zarr(tmp_path / f"{value:g}.zarr", pixels)
        options = {"import": "scipy.ndimage:uniform_filter", "options": {"size": 81}, "depth": 40}
        results.append(
            run_inline(
                job_of(source, tmp_path / f"{value:g}.out.zarr", "function", options, input=masked(tmp_path, holes))
            )
        )
        assert np.allclose(results[-1][~holes], 50)
    assert np.array_equal(results[0][~holes], results[1][~holes])


def test_a_range_that_begins_elsewhere_is_no_hole(tmp_path: Path) -> None:
    pixels, _ = scene(0, "uint16")
    source = write_zarr(tmp_path / "in.zarr", pixels)
    plain = cut(tmp_path, source, "gaussian", 64, input={"nodata": 0.0})
    (tmp_path / "in.64.out.zarr").rename(tmp_path / "first.zarr")
    ranged = cut(tmp_path, source, "gaussian", 64, input={"nodata": 0.0, "range": (100.0, 1100.0)})
    assert np.abs(plain.astype(float) - ranged).max() <= 1


def test_patches_at_the_edge_of_an_image_do_not_depend_on_tiles_with_holes(tmp_path: Path) -> None:
    pixels = scene(0.0)[0]
    pixels[100:120, 100:120] = pixels[:4, 150:154] = np.nan
    source = write_zarr(tmp_path / "in.zarr", pixels)

    def result(tile: int) -> NDArray[Any]:
        options = {"strength": 0.8, "sigma": 10.0, "distance": 3}
        return run_inline(
            job_of(source, tmp_path / f"{tile}.zarr", "nlm", options, tile={"size": tile, "boundary": "cut"})
        )

    assert np.array_equal(result(40), result(512), equal_nan=True)


def test_measured_pixels_never_come_out_as_holes(tmp_path: Path) -> None:
    pixels, holes = scene(100, "uint8")
    source = write_zarr(tmp_path / "in.zarr", pixels)
    result = cut(tmp_path, source, "gaussian", 64, input={"nodata": 100.0})
    assert np.array_equal(result == 100, pixels == 100)
    assert (np.abs(result[pixels != 100].astype(int) - 100) == 1).any()
    assert holes.any()


@pytest.mark.parametrize(
    ("dtype", "parts", "words"),
    [
        ("uint8", {"input": {"nodata": -9999.0}}, "no pixel of type uint8 has that value"),
        ("uint8", {"input": {"nodata": 3.5}}, "no pixel of type uint8 has that value"),
        (
            "int16",
            {"input": {"nodata": -9999.0}, "output": {"dtype": "uint8"}},
            "cannot hold the value of holes, -9999",
        ),
        ("float32", {"output": {"dtype": "uint8"}}, "cannot hold the NaN of this image's holes"),
    ],
)
def test_a_value_that_cannot_be_is_refused(tmp_path: Path, dtype: str, parts: dict[str, Any], words: str) -> None:
    pixels = scene(np.nan if dtype == "float32" else 0)[0].astype(dtype)
    source = write_zarr(tmp_path / "in.zarr", pixels)
    job = job_of(source, tmp_path / "out.zarr", "gaussian", FILTERS["gaussian"], input=parts.get("input", {}))
    with pytest.raises(ConfigError, match=words):
        make_plan(replace(job, output=replace(job.output, **parts.get("output", {}))))


def test_a_noise_map_may_have_the_holes_of_the_image(tmp_path: Path) -> None:
    pixels, holes = scene()
    np.save(tmp_path / "sigma.npy", np.where(holes, np.nan, 10).astype(np.float32))
    sides = {"sides": {"sigma": str(tmp_path / "sigma.npy")}}
    source = write_zarr(tmp_path / "in.zarr", pixels)
    result = run_inline(job_of(source, tmp_path / "map.zarr", "tv", {"strength": 1.0}, input=sides))
    level = run_inline(job_of(source, tmp_path / "level.zarr", "tv", {"strength": 1.0, "sigma": 10.0}))
    assert np.array_equal(result, level, equal_nan=True)
