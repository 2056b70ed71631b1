"""Holes and masked pixels stay as they are and no other pixel depends on them; defects are replaced on request; tiles give the bits of the whole image."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import tifffile
import zarr
from numpy.typing import NDArray
from skimage.data import camera, retina

from halotile.errors import ConfigError, InputError
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.denoise.compare import choose_crop, compare, samples_at
from halotile.graphs.jobs.denoise.job import Denoising, kept_defects
from halotile.graphs.jobs.denoise.passes import inspect_residual
from halotile.graphs.kinds.sections import Input
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.runs.driver import run
from halotile.storage.arrays import open_source
from halotile.storage.grid import Region
from halotile.storage.images.planes import choose_planes
from halotile.storage.images.png import write_png
from halotile.storage.run_directory.directory import PAGE
from halotile.tasks.holes import Holes, fill_from_nearest, fill_reach
from halotile.tasks.noise import defects
from halotile.tasks.noise.defects import outliers, replacements
from halotile.tasks.noise.estimate import plane_level
from tests.cases import all_of, thorough
from tests.graphs.holed import FILTERS, NODATA, cut, scene, with_tag
from tests.support import job_of, read_zarr, run_inline, work_of, write_zarr


@pytest.mark.parametrize("name", all_of(FILTERS, thorough=["nlm", "torch", "function"]))
def test_holes_stay_and_their_value_reaches_no_other_pixel_in_any_tiles(tmp_path: Path, name: str) -> None:
    pixels, holes = scene()
    whole = cut(tmp_path, write_zarr(tmp_path / "nan.zarr", pixels), name, 512)
    assert np.array_equal(np.isnan(whole), holes)
    infinite = np.where(holes & (np.arange(300) % 2 == 0), np.float32(np.inf), pixels)
    infinite[np.isnan(infinite) & (np.arange(300) % 3 == 0)] = -np.inf
    filled = {64: np.where(holes, np.float32(NODATA), pixels), 100: np.where(holes, np.float32(1e6), pixels)}
    sources = {n: with_tag(tmp_path / f"{n}.tif", each, f"{each[holes][0]:g}") for n, each in filled.items()}
    for tile, source in {40: write_zarr(tmp_path / "inf.zarr", infinite), **sources}.items():
        result = cut(tmp_path, source, name, tile)
        assert np.array_equal(result[holes], filled.get(tile, infinite)[holes], equal_nan=True)
        result[holes] = np.nan
        assert np.array_equal(result, whole, equal_nan=True)
    plain = np.where(holes, np.float32(100), pixels)
    without = cut(tmp_path, write_zarr(tmp_path / "plain.zarr", plain), name, 128)
    task = work_of(make_plan(job_of(tmp_path / "plain.zarr", tmp_path / "x.zarr", name, FILTERS[name]))).task
    reach = max(map(max, task.tiling.depth))
    far = ~scipy.ndimage.binary_dilation(holes, np.ones((3, 3)), iterations=reach)
    assert far.sum() > 500
    assert np.array_equal(whole[far], without[far])


@pytest.mark.parametrize("name", ["tv", "nlm", "gaussian", "median"])
def test_pixels_beside_a_hole_are_as_good_as_elsewhere(tmp_path: Path, name: str) -> None:
    clean = retina()[300:620, 300:600, 1].astype(np.float64)
    pixels, holes = scene()
    result = cut(tmp_path, write_zarr(tmp_path / "in.zarr", pixels), name, 128)
    beside = scipy.ndimage.binary_dilation(holes, np.ones((5, 5))) & ~holes
    elsewhere = ~scipy.ndimage.binary_dilation(holes, np.ones((9, 9)))
    error = (result - clean) ** 2
    assert np.sqrt(error[beside].mean()) < 1.25 * np.sqrt(error[elsewhere].mean())
    if name == "gaussian":  # the normalised one
        weights = scipy.ndimage.gaussian_filter((~holes).astype(float), 2.0)
        total = scipy.ndimage.gaussian_filter(np.where(holes, 0, pixels).astype(float), 2.0)
        np.testing.assert_allclose(result[~holes], (total / np.where(holes, 1, weights))[~holes], rtol=1e-5)
    if name == "median":  # that of the measured pixels
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(pixels, 2, "symmetric"), (5, 5))
        known = np.where(holes[..., None, None], 0, windows)
        expected = np.nanquantile(known[beside], 0.5, axis=(1, 2), method="inverted_cdf")
        assert np.array_equal(result[beside], expected)


def test_no_slope_of_tv_crosses_a_hole(tmp_path: Path) -> None:
    """Two halves with a hole all the way between them are two images."""
    pixels, _ = scene(0.0)
    pixels[:, 150:153] = np.nan
    parts = {"all": pixels, "left": pixels[:, :150].copy(), "right": pixels[:, 153:].copy()}
    result, left, right = (cut(tmp_path, write_zarr(tmp_path / f"{n}.zarr", p), "tv", 512) for n, p in parts.items())
    assert np.array_equal(np.hstack([left, right]), np.delete(result, np.s_[150:153], 1))


STATED: list[tuple[str, str, float, dict[str, Any]]] = [
    ("in.zarr", "uint16", 0, {"nodata": 0.0}),
    ("in.zarr _FillValue", "uint16", 0, {}),
    ("in.zarr _FillValue", "float32", NODATA, {}),
    ("in.h5 _FillValue", "float32", NODATA, {}),
    ("in.h5 missing_value", "float32", NODATA, {}),
]


@pytest.mark.parametrize(("place", "dtype", "value", "given"), STATED)
def test_a_value_of_the_job_or_a_file_counts(tmp_path: Path, place: str, dtype: str, value: float, given: Any) -> None:
    pixels, holes = scene(value, dtype)
    name, _, attribute = place.partition(" ")
    if name == "in.h5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(tmp_path / name, "w") as file:
            file.create_dataset("image", data=pixels).attrs[attribute] = np.array([value], "float32")
    else:
        write_zarr(tmp_path / name, pixels)
    if attribute and name == "in.zarr":  # that of floats as xarray writes it
        packed = base64.b64encode(np.float64(value).tobytes()).decode()
        zarr.open_array(tmp_path / name).attrs[attribute] = value if dtype == "uint16" else packed
    assert np.array_equal(cut(tmp_path, tmp_path / name, "median", 512, input=given) == value, holes)


def test_the_job_decides_and_the_output_names_the_value_of_its_holes(tmp_path: Path) -> None:
    pixels, holes = scene(NODATA)
    source = with_tag(tmp_path / "a.tif", pixels, "-9999")
    for tile, nodata in ((127, "nan"), (128, "none")):
        result = cut(tmp_path, source, "gaussian", tile, input={"nodata": nodata})
        assert not (result[holes] == NODATA).all()
    cut(tmp_path, source, "median", 64)
    again = open_source(tmp_path / "a.64.out.zarr")
    assert again.nodata == NODATA
    drawing = write_png(tmp_path / "a.png", [choose_planes(again, {}, None)], edge=100)
    assert drawing.low > 0, "holes have no part in the contrast"
    assert np.array_equal(cut(tmp_path, tmp_path / "a.64.out.zarr", "median", 64) == NODATA, holes)


SHOWN = [
    (310, "scattered", "({holes:,} of 96,100)"),
    (4200, "scattered", "(about 0.99% of the pixels in samples of it, and at most about 6% of the image)"),
    (4200, "beside the samples", "at most about 6% of the image"),
    (310, "none", "(0 of 96,100)"),
]


@pytest.mark.parametrize(("edge", "where", "said"), SHOWN)
def test_the_plan_says_how_many_holes_there_are(tmp_path: Path, edge: int, where: str, said: str) -> None:
    holes = np.zeros((edge, edge), bool)
    holes[:, : 79 * (where == "beside the samples")] = True
    holes |= (where == "scattered") & (np.random.default_rng(0).random((edge, edge)) < 0.01)
    pixels = np.where(holes, np.float32(NODATA), np.float32(5))
    job = job_of(with_tag(tmp_path / "a.tif", pixels, "-9999"), tmp_path / "o.zarr", "median", FILTERS["median"])
    (note,) = [note for note in make_plan(job).notes if note.startswith("pixels of -9999, NaN or infinity are holes")]
    assert said.format(holes=holes.sum()) in note


def test_a_side_input_among_others_is_refused_with_what_to_write(tmp_path: Path) -> None:
    h5py, pixels = pytest.importorskip("h5py"), scene()[0]
    source, group = write_zarr(tmp_path / "in.zarr", pixels), zarr.open_group(tmp_path / "s.zarr", mode="w")
    with h5py.File(tmp_path / "s.h5", "w") as file:
        for part in ("SCI", "ERR"):
            file[part], group[part] = pixels, pixels
    for name, advice in {"s.zarr": r"s\.zarr/NAME: ERR, SCI", "s.h5": "own, and its path: ERR f"}.items():
        given = {"sides": {"sigma": str(tmp_path / name)}}
        with pytest.raises(InputError, match=rf"input\.sides\.sigma: .*no dataset to choose.*{advice}"):
            make_plan(job_of(source, tmp_path / "o.zarr", "tv", {"strength": 1.0}, input=given))


def test_noise_is_estimated_beside_holes_and_its_map_may_have_them(tmp_path: Path) -> None:
    pixels, holes = scene()
    np.save(tmp_path / "sigma.npy", np.where(holes, np.nan, 10).astype(np.float32))
    source, sides = write_zarr(tmp_path / "in.zarr", pixels), {"sides": {"sigma": str(tmp_path / "sigma.npy")}}
    result = run_inline(job_of(source, tmp_path / "map.zarr", "tv", {"strength": 1.0}, input=sides))
    level = run_inline(job_of(source, tmp_path / "level.zarr", "tv", {"strength": 1.0, "sigma": 10.0}))
    assert np.array_equal(result, level, equal_nan=True)
    tagged = with_tag(tmp_path / "a.tif", np.nan_to_num(pixels, nan=NODATA), "-9999")
    plan = make_plan(job_of(tagged, tmp_path / "out.zarr", "tv", {"strength": 1.0, "sigma": "auto"}))
    assert plan.identity["noise_level"] == pytest.approx(10, rel=0.1)


@pytest.mark.cluster
def test_planes_have_holes_of_their_own_which_are_counted(tmp_path: Path, cluster: RunningCluster) -> None:
    pixels, holes = scene()
    other = np.where(np.roll(holes, 40, 0), np.nan, 100 + np.arange(300, dtype=np.float32))
    source = write_zarr(tmp_path / "in.zarr", np.stack([pixels, other.astype(np.float32)]), axes="cyx")
    assert np.array_equal(np.isnan(cut(tmp_path, source, "gaussian", 64)), np.stack([holes, np.roll(holes, 40, 0)]))
    job = job_of(source, tmp_path / "o.zarr", "gaussian", FILTERS["gaussian"])
    assert run(make_plan(job), cluster=cluster).holes == 2 * holes.sum()


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
    line = np.array([[1.0, 0, 0, 0, 5.0]])
    assert fill_from_nearest(line, line > 0, 2, 0.0).tolist() == [[1, 1, 1, 5, 5]]
    assert Holes(None, 0.0).valid(np.zeros(3)) is None


def masked(folder: Path, holes: NDArray[np.bool_]) -> dict[str, Any]:
    np.save(folder / "mask.npy", ~holes)
    return {"sides": {"mask": str(folder / "mask.npy")}}


@pytest.mark.parametrize("name", ["function", thorough("torch")])
@pytest.mark.parametrize("nodata", ["auto", thorough("none")])
def test_a_mask_gives_the_same_bits_in_any_block_whatever_is_under_it(tmp_path: Path, name: str, nodata: str) -> None:
    pixels, holes = scene(100, "uint16" if nodata == "auto" else "float32")
    given, results = {"nodata": nodata, **masked(tmp_path, holes)}, []
    for n, value in ((96, 100), (512, 60000)):
        source = write_zarr(tmp_path / f"{n}.zarr", np.where(holes, value, pixels).astype(pixels.dtype))
        job = job_of(source, tmp_path / f"{n}.o.zarr", name, FILTERS[name], shard=n, input=given, tile={"block": n})
        results.append(run_inline(job)[~holes])
    assert np.array_equal(results[0], results[1])


def test_a_range_that_begins_elsewhere_is_no_hole(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", scene(0, "uint16")[0])
    plain = cut(tmp_path, source, "gaussian", 64, input={"nodata": 0.0})
    ranged = cut(tmp_path, source, "gaussian", 65, input={"nodata": 0.0, "range": (100.0, 1100.0)})
    assert np.abs(plain.astype(float) - ranged).max() <= 1


def test_patches_at_the_edge_of_an_image_do_not_depend_on_tiles_with_holes(tmp_path: Path) -> None:
    pixels = scene(0.0)[0]
    pixels[100:120, 100:120] = pixels[:4, 150:154] = np.nan
    source, results = write_zarr(tmp_path / "in.zarr", pixels), []
    for size in (40, 512):
        tile = {"size": size, "boundary": "cut"}
        results.append(run_inline(job_of(source, tmp_path / f"{size}.zarr", "nlm", FILTERS["nlm"], tile=tile)))
    assert np.array_equal(results[0], results[1], equal_nan=True)


def test_measured_pixels_never_come_out_as_holes(tmp_path: Path) -> None:
    pixels, holes = scene(100, "uint8")
    result = cut(tmp_path, write_zarr(tmp_path / "in.zarr", pixels), "gaussian", 64, input={"nodata": 100.0})
    assert np.array_equal(result == 100, pixels == 100)
    assert (np.abs(result[pixels != 100].astype(int) - 100) == 1).any()
    assert holes.any()


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("uint8", "auto", {"nodata": -9999.0}, "no pixel of type uint8 has that value"),
    ("uint8", "auto", {"nodata": 3.5}, "no pixel of type uint8 has that value"),
    ("int16", "uint8", {"nodata": -9999.0}, "cannot hold the value of holes, -9999"),
    ("float32", "uint8", {}, "cannot hold the NaN of this image's holes"),
]


@pytest.mark.parametrize(("dtype", "out", "given", "words"), REFUSED)
def test_a_value_that_cannot_be_is_refused(tmp_path: Path, dtype: str, out: str, given: Any, words: str) -> None:
    source = write_zarr(tmp_path / "in.zarr", scene(np.nan if dtype == "float32" else 0)[0].astype(dtype))
    job = job_of(source, tmp_path / "out.zarr", "gaussian", FILTERS["gaussian"], input=given)
    with pytest.raises(ConfigError, match=words):
        make_plan(replace(job, output=replace(job.output, dtype=out)))


MASKED = np.zeros((256, 320), bool)
MASKED[:, :150] = MASKED[30:50, 200:260] = True


def masked_job(folder: Path, value: float, *, photons: bool = False, tile: int = 128, hole: float = 100.0) -> Denoising:
    """A job of a real image with noise, with these pixels under its mask, or with holes there for NaN."""
    clean, rng = camera()[100:356, 100:420].astype(np.float32), np.random.default_rng(0)
    noisy = 4 * rng.poisson(clean / 12 + 1) if photons else clean + 10 * rng.standard_normal(clean.shape)
    pixels = np.where(MASKED, np.float32(value), noisy.astype(np.float32))
    if np.isfinite(value):  # noise of its own
        pixels[MASKED] += 50 * np.random.default_rng(1).standard_normal(MASKED.sum()).astype(np.float32)
    pixels[200:204, 250:254] = hole
    source = write_zarr(folder / f"{value:g}.{tile}.zarr", pixels)
    parts: dict[str, Any] = {"noise": {"model": "poisson-gaussian"}} if photons else {}
    parts["input"] = masked(folder, MASKED) if np.isfinite(value) else {}
    output, options = folder / f"{value:g}.{tile}.out.zarr", {"strength": 1.0, "sigma": "auto"}
    return job_of(source, output, "tv", options, tile={"size": tile}, **parts)


@pytest.mark.parametrize("photons", [False, True])
def test_other_pixels_have_the_bits_beside_a_mask_that_they_have_beside_holes(tmp_path: Path, photons: bool) -> None:
    expected = run_inline(masked_job(tmp_path, np.nan, photons=photons, hole=np.nan))
    for value, tile in ((0.0, 128), (5000.0, 48)):
        result = run_inline(masked_job(tmp_path, value, photons=photons, tile=tile, hole=np.nan))
        assert np.array_equal(result[~MASKED], expected[~MASKED], equal_nan=True)
        assert np.array_equal(result[MASKED], open_source(str(tmp_path / f"{value:g}.{tile}.zarr"))[...][MASKED])


def test_masked_pixels_are_counted_and_have_no_part_in_contrast_and_noise(tmp_path: Path) -> None:
    plans = [make_plan(masked_job(tmp_path, value)) for value in (np.nan, 5000.0, 1e6)]
    assert f"masked pixels ({MASKED.sum():,} of {MASKED.size:,}) stay as they are" in "\n".join(plans[2].notes)
    (channel,) = work_of(plans[2]).task.writer.layout.omero["channels"]
    assert channel["window"]["end"] < 400
    levels = []
    for plan in plans[:2]:
        task = work_of(plan).task
        (squares,) = samples_at(plan.sources[0], task, choose_crop(plan.sources[0], task, {}, None))
        levels.append(plane_level(squares))
    assert levels[0] == levels[1] == pytest.approx(10, rel=0.15)


# --- defects: pixels that the noise does not explain are replaced before anything is computed --

Patch = pytest.MonkeyPatch

HOT, DEAD = (100, 64), (131, 140)


def dim_scene(dtype: str = "uint16") -> NDArray[Any]:
    """A real image of photons: a dim one of the camera of a microscope, or a bright one of few grey levels."""
    clean = retina()[300:520, 300:530, 1] / 255
    photons = np.random.default_rng(0).poisson(clean * 60) * 2.2
    image: NDArray[Any] = np.rint(photons + 20 if dtype == "uint8" else photons + 100).astype(dtype)
    return image


def with_defects(pixels: NDArray[Any]) -> NDArray[Any]:
    hot = pixels.copy()
    hot[HOT], hot[DEAD] = 255 if pixels.dtype == np.uint8 else 60000, 0
    return hot


OPTIONS: dict[str, Any] = {"tv": {"strength": 1.0, "sigma": "auto"}, "median": {"size": 3}, "gaussian": {"sigma": 1.0}}
PHOTONS: dict[str, Any] = {"noise": {"model": "poisson-gaussian"}}
AUTO: dict[str, Any] = {"input": {"defects": "auto"}}


def job_on(folder: Path, name: str, pixels: Any, denoiser: str = "tv", *, axes: Any = None, **parts: Any) -> Denoising:
    source = folder / f"{name}.zarr"
    if not source.exists():
        write_zarr(source, pixels, axes=axes)
    output = folder / f"{len([*folder.iterdir()])}.out.zarr"
    return job_of(source, output, denoiser, OPTIONS[denoiser], **parts)


def done(*given: Any, **parts: Any) -> Any:
    return run_inline(job_on(*given, **parts))


def planned(*given: Any, **parts: Any) -> Plan:
    return make_plan(job_on(*given, **parts))


def test_two_hot_pixels_change_no_other(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    clean = retina()[300:540, 300:524, 1] / 255 * 40
    plain = np.rint(2.2 * rng.poisson(clean) + 100 + 2 * rng.standard_normal(clean.shape)).astype(np.uint16)
    hot, mask = plain.copy(), np.ones(plain.shape, np.uint8)
    hot[200, 100], hot[150, 151] = 60000, 8000
    mask[200, 100] = mask[150, 151] = 0
    np.save(tmp_path / "mask.npy", mask)
    expected, spoilt = (done(tmp_path, name, image, **PHOTONS) for name, image in (("plain", plain), ("hot", hot)))
    found = done(tmp_path, "hot", hot, **PHOTONS, **AUTO)
    masked = done(tmp_path, "hot", hot, **PHOTONS, input={"sides": {"mask": str(tmp_path / "mask.npy")}})
    others = mask == 1
    assert np.abs(spoilt - expected)[others].max() > 80
    assert np.abs(found - masked)[others].max() <= 2.4
    assert np.abs(found - expected).max() <= 2.4
    assert np.array_equal(done(tmp_path, "plain", plain, **PHOTONS, **AUTO), expected)
    for name, parts, advice in (
        ("plain", {}, ""), ("hot", {}, "write input.defects: auto"), ("hot", AUTO, "replaced before anything is computed"),
    ):  # fmt: skip
        notes = [note for note in planned(tmp_path, name, hot, **PHOTONS, **parts).notes if "stand out" in note]
        assert [note.endswith(advice) for note in notes] == [True] * bool(advice)


@pytest.mark.parametrize(("dtype", "denoiser"), [("uint8", "tv"), ("uint16", "median"), ("float32", "tv")])
def test_tiles_give_the_bits_of_the_whole_image(tmp_path: Path, dtype: str, denoiser: str) -> None:
    hot = with_defects(dim_scene(dtype))
    hot[[0, 0, 219, 127, 128], [0, 229, 100, 127, 40]] = 250 if dtype == "uint8" else 9000
    whole = done(tmp_path, "hot", hot, denoiser, shard=256, **AUTO)
    for shard in (32, 96):
        assert np.array_equal(done(tmp_path, "hot", hot, denoiser, shard=shard, tile={"size": 32}, **AUTO), whole)


@pytest.mark.cluster
def test_workers_give_the_same_bits_and_a_run_goes_on_with_its_noise(tmp_path: Path, cluster: RunningCluster) -> None:
    hot = with_defects(dim_scene())
    job = job_on(tmp_path, "hot", hot, "tv", **AUTO)
    outcome = run(make_plan(job), cluster=cluster)
    assert outcome.defects == 2
    page = (Path(f"{job.output.path}.run") / PAGE).read_text("utf-8")
    assert '["defects", "2 pixels replaced before anything was computed"]' in page
    assert np.array_equal(read_zarr(Path(job.output.path)), done(tmp_path, "hot", hot, **AUTO))
    first, again = make_plan(job, fresh=True), make_plan(job)
    assert again.identity["defects"] == first.identity["defects"] != None  # noqa: E711
    assert run(again, cluster=cluster).resumed > 0


@pytest.mark.parametrize("how", ["auto", "path", "stripes"])
def test_kept_defects_have_their_own_values(tmp_path: Path, how: str) -> None:
    hot, is_defect = with_defects(dim_scene()), np.zeros((220, 230), bool)
    is_defect[HOT] = is_defect[DEAD] = True
    tifffile.imwrite(tmp_path / "defects.tif", is_defect.astype(np.uint8))
    wanted: dict[str, Any] = {"defects": str(tmp_path / "defects.tif") if how == "path" else "auto"}
    if how == "stripes":
        stripes = np.random.default_rng(1).normal(0, 20, 230)
        hot, wanted["stripes"] = with_defects(dim_scene().astype("float32") + stripes.astype("float32")), {"axis": "x"}
    replaced = done(tmp_path, "hot", hot, input=wanted)
    kept = done(tmp_path, "hot", hot, input=wanted | {"defects_in_output": "kept"})
    assert np.array_equal(kept[is_defect], hot[is_defect])
    assert np.array_equal(kept[~is_defect], replaced[~is_defect])
    assert (np.abs(replaced - hot.astype(float))[is_defect] > 50).all()


def test_only_the_defects_of_a_path_are_replaced(tmp_path: Path) -> None:
    pixels, mask = dim_scene(), np.zeros((220, 230), np.uint8)
    mask[50, 60] = 1
    hot = with_defects(pixels)
    hot[50, 60] = 0
    np.save(tmp_path / "defects.npy", mask)
    given: dict[str, Any] = {"input": {"defects": str(tmp_path / "defects.npy"), "nodata": "none"}}
    own = done(tmp_path, "hot", hot, "median", **given)
    repaired = hot.copy()
    repaired[50, 60] = replacements(hot, np.array([[50, 60]]), np.ones(hot.shape, bool))[0][0]
    assert np.array_equal(own, done(tmp_path, "repaired", repaired, "median"))
    broken = hot.astype("f4")
    broken[50, 60] = np.nan  # a value as any other, where nothing stands for a hole
    assert np.array_equal(done(tmp_path, "broken", broken, "median", **given), own)
    mask[::2, ::3] = 1  # far more at once than fit into one table of neighbours
    np.save(tmp_path / "defects.npy", mask)
    assert np.isfinite(done(tmp_path, "hot", hot, "median", **given)).all()


def test_a_stack_has_its_own_noise_and_defects_in_each_plane(tmp_path: Path) -> None:
    stack = np.stack([dim_scene(), with_defects(dim_scene()) // 2, dim_scene()])
    stack[2, 9, 9] = 3000
    together = done(tmp_path, "stack", stack, axes="cyx", **AUTO)
    for number, plane in enumerate(stack):
        assert np.array_equal(together[number], done(tmp_path, f"plane{number}", plane, **AUTO))


def test_a_volume_is_repaired_plane_by_plane(tmp_path: Path) -> None:
    volume = np.stack([np.roll(dim_scene()[:96, :96], 7 * z, 0) for z in range(8)])
    volume[3, 40, 50] = 60000
    parts: dict[str, Any] = {"axes": "zyx", "chunk": 16, "tile": {"axes": "zyx", "size": 32}}
    whole, small = (done(tmp_path, "volume", volume, "gaussian", shard=n, **parts, **AUTO) for n in (96, 32))
    assert np.array_equal(whole, small)
    plain = done(tmp_path, "plain", np.delete(volume, 3, 0), "gaussian", axes="zyx", tile={"axes": "zyx"})
    assert whole.max() < 1.1 * plain.max()


@pytest.mark.parametrize("axis", ["t", "q"])  # q: an axis that the file does not name
def test_pixels_that_are_hot_in_no_plane_but_in_all_are_found(tmp_path: Path, axis: str) -> None:
    rng = np.random.default_rng(3)
    stack = (rng.standard_normal((12, 1, 90, 100)) + 100).astype(np.float32)
    stack[:, 0, 20, 30] += 3
    stack[5, 0, 70, 70] += 300  # a cosmic ray is in one plane alone
    plan = planned(tmp_path, "stack", stack, "gaussian", axes=f"{axis}cyx", **AUTO)
    assert plan.identity["defects"]["places"] == [[-1, 0, 20, 30]]
    task = work_of(plan).task
    image: Any = task.repaired()
    repaired = image.read(Region.whole(stack.shape))
    assert (repaired != stack)[:, 0, 20, 30].all()
    assert np.count_nonzero(repaired != stack) == 13
    stack[2:4, 0, 20, 30] = np.nan, np.inf  # which is no measurement there
    stack[:, 0, 80:, :10] = np.nan  # nor is anything in this corner
    torn = planned(tmp_path, "torn", stack, "gaussian", axes=f"{axis}cyx", **AUTO)
    assert torn.identity["defects"]["places"] == plan.identity["defects"]["places"]


def test_without_noise_no_defect_is_found_and_a_line_of_pixels_has_none_of_the_plan(tmp_path: Path) -> None:
    dark = np.zeros((128, 128), np.uint16)
    dark[20::40, 30::40] = 4000
    (note,) = planned(tmp_path, "dark", dark, "median", **AUTO).summary()["notes"]
    assert "finds nothing in 1 plane of 1, whose samples show no noise. If there is noise, write its level" in note
    known: dict[str, Any] = {"noise": {"read_sigma": 1.0}, **AUTO}
    assert done(tmp_path, "dark", dark, "median", **known).max() == 0
    line = (100 + np.random.default_rng(0).standard_normal((1, 500))).astype("f4")
    assert planned(tmp_path, "line", line, "tv", **known).identity["defects"]["places"] == []


def test_holes_are_neither_defects_nor_neighbours(tmp_path: Path) -> None:
    hot = with_defects(dim_scene("float32"))
    hot[HOT[0] - 1 : HOT[0] + 2, HOT[1] + 1] = np.nan
    hot[HOT[0] - 1, HOT[1] - 1] = -9999
    wanted = {"defects": "auto", "nodata": -9999.0}
    found = done(tmp_path, "holed", hot, input=wanted)
    plan = planned(tmp_path, "holed", hot, input=wanted)
    holes = np.isnan(hot) | (hot == -9999)
    assert np.array_equal(found[holes], hot[holes], equal_nan=True)
    assert 100 < found[HOT] < 250
    assert np.isfinite(found[~holes]).all()
    image: Any = work_of(plan).task.repaired()
    image.read(Region.whole(hot.shape))
    assert image.defects_of(Region.whole(hot.shape))[0].tolist() == [[*HOT], [*DEAD]]


def test_replaced_defects_are_no_residual(tmp_path: Path) -> None:
    hot = dim_scene()
    hot[np.random.default_rng(1).integers(5, 215, 60), np.random.default_rng(2).integers(5, 215, 60)] = 60000
    for kept in ("replaced", "kept"):
        job = job_on(tmp_path, "hot", hot, "median", input={"defects": "auto", "defects_in_output": kept})
        run_inline(job)
        plan = make_plan(replace(job, output=replace(job.output, overwrite=True)), fresh=True)
        (row,) = inspect_residual(work_of(plan).task, plan.output).figures["residual"]
        assert row["ratio"] < 1.3


def test_a_crop_is_that_of_the_run(tmp_path: Path) -> None:
    hot = with_defects(dim_scene())
    job = job_on(tmp_path, "hot", hot, "tv", **AUTO)
    found = compare([("a",)], lambda _: job, region=Region((70, 40), (170, 180)))
    assert found.outliers == 2
    assert np.array_equal(found.tried[0].denoised[0], run_inline(job)[70:170, 40:180])


def test_a_path_that_cannot_be_used(tmp_path: Path) -> None:
    large = np.zeros((220, 230), np.uint8)
    large[10:17, 30:37] = 1
    np.save(tmp_path / "large.npy", large)
    np.save(tmp_path / "other.npy", np.zeros((5, 6)))
    marked = r"input\.defects marks row 12, column 32 and every measured pixel"
    shape = r"input\.defects has shape \(5, 6\)"
    for name, words in (("other", shape), ("missing", r"missing\.npy"), ("large", marked)):
        with pytest.raises(InputError, match=words):
            planned(tmp_path, "in", dim_scene(), "median", input={"defects": str(tmp_path / f"{name}.npy")})


def test_defects_are_not_kept_where_the_image_has_another_shape() -> None:
    for scale in (1, 2):
        given: Any = SimpleNamespace(scale=scale, channels=(1, 1), title="a")
        faults = kept_defects(Input(path="a", defects="auto", defects_in_output="kept"), given)
        assert ["changes the image's shape" in message for _, message in faults] == [True] * (scale - 1)


@pytest.mark.parametrize("photons", [0.5, 2, 13, 20, 500])
@pytest.mark.parametrize(("gain", "offset", "read"), [(1.0, 0.0, 0.0), (2.2, 100.0, 2.0)])
def test_noise_has_no_defects(photons: float, gain: float, offset: float, read: float) -> None:
    rng = np.random.default_rng(5)
    image = gain * rng.poisson(photons, (1024, 1024)) + offset + read * rng.standard_normal((1024, 1024))
    assert len(outliers(np.rint(image).clip(0).astype(np.uint16), gain, read**2 - gain * offset)) == 0


def test_point_sources_survive() -> None:
    rng, (rows, columns) = np.random.default_rng(0), np.mgrid[-8:8, -8:8]
    image = rng.standard_normal((1024, 1024))
    for at in np.ndindex(64, 64):
        width, height = rng.uniform(0.8, 2.5), rng.uniform(5, 200)
        row, column = rng.uniform(-0.5, 0.5, 2)
        spot = np.exp(-((rows - row) ** 2 + (columns - column) ** 2) / (2 * width**2))
        image[16 * at[0] : 16 * at[0] + 16, 16 * at[1] : 16 * at[1] + 16] += height * spot
    assert len(outliers(image, 0.0, 1.0)) == 0


@pytest.mark.parametrize(("gain", "variance"), [(0.0, 1.0), (1.0, 0.0)])
def test_no_outlier_is_overlooked(monkeypatch: Patch, gain: float, variance: float) -> None:
    rng = np.random.default_rng(2)
    image = (rng.poisson(30, (120, 130)) if gain else 5 * rng.standard_t(2, (120, 130))).astype(np.float32)
    image[rng.random(image.shape) < 0.05] = 200
    valid = rng.random(image.shape) > 0.1
    at = np.argwhere(valid)
    expected = at[defects._is_outlier(defects._around(image, at, valid), gain, variance)]
    assert len(expected) > 20
    for strip in (130, 1 << 18):
        monkeypatch.setattr(defects, "STRIP_PIXELS", strip)
        assert np.array_equal(outliers(image, gain, variance, valid), expected)


def test_a_median_beside_a_hole_is_a_value_of_the_image(tmp_path: Path) -> None:
    labels = np.random.default_rng(1).choice(np.array([10, 200], "uint16"), (40, 50))
    labels[::3, ::4] = 0
    result = cut(tmp_path, write_zarr(tmp_path / "in.zarr", labels), "median", 64, input={"nodata": 0.0})
    assert set(np.unique(result)) == {0, 10, 200}
