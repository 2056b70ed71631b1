"""Images of counted photons and planes that differ in their noise: better, without bias, the same bits in any tiles, and not rounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from skimage.data import camera, retina

from halotile.errors import ConfigError, ResumeRefused
from halotile.graphs.jobs.denoise.image import JobImage, choose_noise_level
from halotile.graphs.jobs.denoise.job import Denoising, NoiseModel
from halotile.graphs.jobs.denoise.pixels import ResultType, choose_photon_noise, choose_type
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.claim import claim
from halotile.storage.arrays import open_source
from halotile.tasks.denoisers.tv import TotalVariation
from halotile.tasks.inner_tiles import Roles
from tests.cases import in_folders, thorough
from tests.support import job_of, run_inline, write_zarr

Image = NDArray[Any]
AUTO: dict[str, dict[str, Any]] = {
    "tv": {"strength": 1.0, "sigma": "auto"},
    "nlm": {"strength": 0.8, "sigma": "auto"},
    "torch": {"import": "tests.networks:by_sigma", "sigma": "auto"},
}
QUICK = AUTO | {"nlm": {"strength": 0.8, "sigma": "auto", "patch": 3, "distance": 2}}
PHOTONS = {"model": "poisson-gaussian"}
GIVEN = PHOTONS | {"gain": 1.0}


def true_counts(peak: float) -> Image:
    """A part of the retina with the black background, in photons."""
    green = retina()[..., 1].astype(np.float64)
    counts: Image = green[400:900, :500] / green.max() * peak
    return counts


PART = np.s_[100:400, 100:400]


def counted(counts: Image, seed: int = 0) -> Image:
    return np.random.default_rng(seed).poisson(counts).astype(np.float32)


def decibels(result: Image, truth: Image, peak: float) -> float:
    return float(-10 * np.log10(np.mean((result - truth) ** 2) / peak**2))


def job_on(folder: Path, name: str, noise: dict[str, Any], pixels: Image | None = None, **parts: Any) -> Denoising:
    """A job on an image, or on that which was given before."""
    axes = parts.pop("axes", "cyx")
    if pixels is not None:
        rmtree(folder / "in.zarr", ignore_errors=True)
        write_zarr(folder / "in.zarr", pixels, axes=axes[-pixels.ndim :])
    options = parts.pop("options", AUTO)[name]
    return job_of(folder / "in.zarr", folder / "out.zarr", name, options, noise=noise, shard=512, **parts)


def denoised(folder: Path, pixels: Image, name: str, noise: dict[str, Any], **parts: Any) -> Image:
    folder.mkdir(exist_ok=True)
    return run_inline(job_on(folder, name, noise, pixels, **{"options": QUICK, **parts}))


BETTER = [(5, 1.0, "tv"), (100, -0.1, "tv"), thorough(20, 0.6, "tv")]
BETTER += [thorough(peak, least, "nlm") for peak, least in ((5, 1.0), (20, 1.0), (100, -0.1))]


@pytest.mark.parametrize(("peak", "least", "name"), BETTER)
def test_counts_come_out_better_and_unbiased(tmp_path: Path, name: str, peak: int, least: float) -> None:
    truth = true_counts(peak)[PART] if name == "tv" and peak != 20 else true_counts(peak)
    pixels, found = counted(truth), []
    for noise in ({}, GIVEN, PHOTONS):
        result = denoised(tmp_path, pixels, name, noise, options=AUTO)
        found.append(decibels(result, truth, peak))
        if noise:
            assert found[-1] - found[0] >= least
            assert result.mean() == pytest.approx(pixels.mean(), rel=0.005)
    if (name, peak) == ("tv", 20):  # 1 dB more than a median of levels gave, before one level was the root mean square
        assert found[2] >= 33.32
    # As good as with the true gain, which compares with nothing that improves beside it.
    assert found[2] >= found[1] - 0.1


@pytest.mark.parametrize("name", ["tv", thorough("nlm")])
def test_an_offset_and_read_noise_are_taken_into_account(tmp_path: Path, name: str) -> None:
    photons = true_counts(40)[PART] if name == "tv" else true_counts(40)
    truth, read = 100 + 2 * photons, 4 * np.random.default_rng(1).standard_normal(photons.shape)
    pixels = (100 + 2 * counted(photons) + read).astype(np.float32)
    plain = decibels(denoised(tmp_path, pixels, name, {}, options=AUTO), truth, 80)
    for noise in (PHOTONS | {"gain": 2.0, "offset": 100.0, "read_sigma": 4.0}, PHOTONS):
        result = denoised(tmp_path, pixels, name, noise, options=AUTO)
        assert decibels(result, truth, 80) - plain >= 0.3
        assert (result - 100).mean() == pytest.approx((pixels - 100).mean(), rel=0.005)


@pytest.mark.parametrize("name", AUTO)
def test_tiles_give_the_bits_of_the_whole_image_and_a_hole_reaches_no_other_pixel(tmp_path: Path, name: str) -> None:
    plain = counted(true_counts(20)[130:353, 90:301])
    whole = denoised(tmp_path, plain, name, GIVEN, tile={"size": 512})
    assert np.array_equal(denoised(tmp_path, plain, name, GIVEN, tile={"size": 37}), whole)
    results, at = [], np.zeros(plain.shape, bool)
    at[40:60, 70:101] = at[::17, 5] = True
    for value, tile in ((np.nan, 512), (np.nan, 37), (1e6, 100)):
        pixels, given = np.where(at, np.float32(value), plain), {} if np.isnan(value) else {"nodata": value}
        results.append(denoised(tmp_path, pixels, name, GIVEN, tile={"size": tile}, input=given))
        assert np.array_equal(results[-1][at], pixels[at], equal_nan=True)
        assert np.array_equal(results[-1][~at], results[0][~at])


NOISE = (0.02, 0.2)


def scene() -> NDArray[np.float32]:
    """Two planes of the same image with noise of such levels."""
    plane = retina()[300:700, 300:660, 1].astype(np.float32) / 255
    noise = np.random.default_rng(0).standard_normal((2, *plane.shape)).astype(np.float32)
    planes: NDArray[np.float32] = plane + noise * np.array(NOISE, np.float32)[:, None, None]
    return planes


OF_PLANES: list[Any] = [(name, {}, "cyx") for name in AUTO] + [("torch", PHOTONS, "cyx")]
OF_PLANES += [thorough(name, {}, "yxc") for name in AUTO] + [thorough(name, PHOTONS, "cyx") for name in ("tv", "nlm")]


@pytest.mark.parametrize(("name", "noise", "axes"), OF_PLANES)
def test_each_plane_has_the_bits_that_it_has_alone(tmp_path: Path, name: str, noise: dict[str, Any], axes: str) -> None:
    planes, counts = scene()[:, :180, :200], true_counts(50)[100:280, 100:300]
    if noise:
        planes = np.stack([counted(counts), 3 * counted(counts, 1) + 10]).astype(np.float32)
    whole, tile = np.moveaxis(planes, 0, axes.index("c")), {"size": 128}
    together = denoised(tmp_path, whole, name, noise, axes=axes, tile=tile)
    assert together.shape == planes.shape  # planes come first, whatever their axis is
    for number, plane in enumerate(planes):
        assert np.array_equal(together[number], denoised(tmp_path / str(number), plane, name, noise, tile=tile))


def test_integers_in_the_units_of_the_file(tmp_path: Path) -> None:
    pixels = counted(true_counts(100)[PART])
    floats = denoised(tmp_path, pixels, "tv", GIVEN)
    exact = denoised(tmp_path, pixels.astype(np.uint16), "tv", GIVEN, input={"range": (0.0, 1000.0)})
    assert np.abs(exact - floats).max() <= 0.01
    job = job_on(tmp_path, "tv", GIVEN)
    whole = replace(job, output=replace(job.output, dtype="uint16"))
    (note,) = on_rounding(whole)
    assert note.endswith("output.dtype: float32 keeps them")
    rounded = run_inline(whole)
    assert rounded.dtype == np.uint16
    assert np.abs(rounded - floats).max() <= 0.51


@pytest.mark.parametrize("name", ["tv", thorough("nlm")])
@pytest.mark.parametrize(
    ("gains", "level", "sigma", "least"), [((30.0,), 100.0, 1.5, 0.3), ((2.0, 20.0), 420.0, 3.2, 0.6)]
)
def test_a_channel_without_photons_is_denoised_as_one_of_constant_noise(
    tmp_path: Path, name: str, gains: tuple[float, ...], level: float, sigma: float, least: float
) -> None:
    truth = true_counts(3900)[100:400, 100:400]
    lit = [gain * counted(truth / gain, seed) + 50 for seed, gain in enumerate(gains)]
    empty = level + sigma * np.random.default_rng(9).standard_normal(truth.shape)
    planes = np.stack([*lit, empty, np.full(truth.shape, 7.25)]).astype(np.float32)
    plain = denoised(tmp_path, planes, name, {}, options=AUTO)
    result = denoised(tmp_path, planes, name, PHOTONS, options=AUTO)
    assert abs(result[-2].mean(dtype=float) - empty.mean()) < 0.002 * sigma
    assert abs(result[-2].mean(dtype=float) - level) < 0.02
    assert np.sqrt(np.mean((result[-2] - level) ** 2)) < least
    assert np.abs(result[-1] - 7.25).max() < 1e-5
    assert np.array_equal(result[-2:], plain[-2:])
    (note,) = [note for note in make_plan(job_on(tmp_path, name, PHOTONS)).notes if "photon noise of gain" in note]
    assert f"c={len(gains)} shows no photon noise: taken as constant, {sigma:.1f}"[:-1] in note


@pytest.mark.parametrize("model", ["gaussian", "auto"])
@pytest.mark.parametrize("photons", [False, True])
def test_the_default_is_one_level_with_a_note_where_noise_grows(tmp_path: Path, model: str, photons: bool) -> None:
    truth = true_counts(50)
    pixels = counted(truth) if photons else truth + 3 * np.random.default_rng(0).standard_normal(truth.shape)
    plan = make_plan(job_on(tmp_path, "tv", {"model": model}, pixels.astype(np.float32)))
    noted = any("the noise grows with brightness, as" in note for note in plan.notes)
    assert (plan.identity["noise"] is not None) == (photons and model == "auto")
    assert noted == (photons and model == "gaussian")


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    rows: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
        ("gaussian", {"sigma": 2.0}, {}, "denoisers with a noise level, which gaussian has not"),
        ("tv", {"strength": 1.0}, {}, "write sigma: auto"),
        ("tv", {"strength": 1.0, "sigma": 0.1}, {}, "write sigma: auto"),
        ("tv", AUTO["tv"], {"tile": {"depth": 20}}, "receptive field is 60"),
        ("tv", AUTO["tv"], {"noise": PHOTONS | {"offset": 3.0}}, "noise.offset: is for a known gain"),
        ("tv", AUTO["tv"], {"noise": {"gain": 3.0}}, "noise.gain: is for model: poisson-gaussian"),
        ("tv", AUTO["tv"], {"noise": PHOTONS | {"gain": 0.0}}, "write more than 0"),
        ("tv", AUTO["tv"], {"noise": PHOTONS | {"gain": 1.0, "read_sigma": -1.0}}, "write at least 0"),
        ("tv", AUTO["tv"], {"noise": PHOTONS | {"gain": 1.0, "offset": np.inf}}, "is not finite"),
        ("tv", AUTO["tv"], {"noise": PHOTONS}, "do not show noise that grows with brightness"),
    ]
    for folder, (name, options, parts, words) in in_folders(tmp_path, rows):
        level = 3 * np.random.default_rng(0).standard_normal((200, 200))
        source = write_zarr(folder / "in.zarr", (100 + level).astype(np.float32))
        job = job_of(source, folder / "out.zarr", name, options, **({"noise": GIVEN} | parts))
        with pytest.raises(ConfigError, match=words):
            make_plan(job)


def test_a_noise_map_beside_photon_noise_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "sigma.npy", np.ones((500, 500), np.float32))
    sides = {"sides": {"sigma": str(tmp_path / "sigma.npy")}}
    job = job_on(tmp_path, "tv", GIVEN, counted(true_counts(20)), input=sides)
    with pytest.raises(ConfigError, match="leave one of them out"):
        make_plan(job)
    auto = replace(job, noise=replace(job.noise, model="auto", gain="auto"))
    assert make_plan(auto).identity["noise"] is None


def test_an_estimate_is_written_out_and_a_resumed_run_keeps_its_noise(tmp_path: Path) -> None:
    job = job_on(tmp_path, "tv", PHOTONS, counted(true_counts(20)))
    plan = make_plan(job)
    own = plan.identity["noise"]
    again = make_plan(replace(job, noise=NoiseModel(**plan.documents.resolved["noise"])))
    assert {**again.identity["noise"], "estimated": True} == own
    source = open_source(tmp_path / "in.zarr")
    image = JobImage(job=job, original=source, source=source, roles=Roles(("y", "x"), (0, 1), None))

    def gain_of(model: Any, **before: Any) -> Any:
        previous = {"identity": {"noise": {**own, **before} if before else None}}
        begun = replace(image, job=replace(job, noise=NoiseModel(model=model)), previous=previous)
        found = choose_photon_noise(begun, TotalVariation(**AUTO["tv"]), None)
        return found.noise.gain if found else None

    assert gain_of("auto", gain=1.25) == gain_of("poisson-gaussian", gain=1.25) == 1.25
    assert gain_of("auto") is None
    assert gain_of("poisson-gaussian", gain=1.25, estimated=False) == own["gain"]


def test_levels_of_an_earlier_run_with_another_number_of_planes_are_not_taken(tmp_path: Path) -> None:
    planes = scene()
    source = write_zarr(tmp_path / "in.zarr", planes, axes="cyx")
    job, roles = job_of(source, tmp_path / "out.zarr", "tv", AUTO["tv"]), Roles(("c", "y", "x"), (1, 2), None)
    denoiser = TotalVariation(strength=1.0, sigma="auto")
    before: dict[str, Any] = {"identity": {"noise_level": [0.5, 0.6]}}
    opened = open_source(source)
    image = JobImage(job=job, original=opened, source=opened, roles=roles, previous=before)
    _, kept = choose_noise_level(image, denoiser, None, {})
    assert kept == pytest.approx([0.5, 0.6])
    for known in (0.5, [0.5, 0.6, 0.7]):
        before = {"identity": {"noise_level": known}}
        _, levels = choose_noise_level(replace(image, previous=before), denoiser, None, {})
        assert levels == pytest.approx(NOISE, rel=0.15)


TV = ("tv", {"strength": 1.0, "sigma": "auto"})


def drawn(peak: float) -> Image:
    """Whole numbers of photons."""
    return counted(true_counts(peak)[:400, 100:]).astype(np.uint16)


def job_for(folder: Path, pixels: Image, denoiser: tuple[str, dict[str, Any]] = TV, **parts: Any) -> Denoising:
    return job_of(write_zarr(folder / "in.zarr", pixels), folder / "out.zarr", *denoiser, **parts)


def on_rounding(job: Denoising) -> list[str]:
    return [note for note in make_plan(job).notes if "rounding to whole numbers" in note]


@pytest.mark.parametrize("model", ["gaussian", "poisson-gaussian"])
@pytest.mark.parametrize("peak", [5, 100])
def test_counts_lose_nothing_by_default(tmp_path: Path, peak: int, model: str) -> None:
    wanted = job_for(tmp_path, drawn(peak), noise={"model": model})
    (note,) = on_rounding(wanted)
    assert note.endswith("so the result is float32. output.dtype: uint16 rounds it all the same")
    result = run_inline(wanted)
    assert result.dtype == np.float32
    error, rounded = (np.mean((r - true_counts(peak)[:400, 100:]) ** 2) for r in (result, result.round()))
    assert 10 * np.log10(rounded / error) > {5: 2.0, 100: 0.1}[peak]


def test_few_levels_of_one_channel_and_little_noise_in_a_wide_type_are_not_rounded(tmp_path: Path) -> None:
    ramp = np.linspace(1000, 3000, 300) + 1.2 * np.random.default_rng(0).standard_normal((300, 300))
    channels = np.stack([60 * drawn(400), drawn(5) + np.uint16(100)])
    for number, pixels in enumerate((channels, ramp.round().astype(np.uint16))):
        (tmp_path / str(number)).mkdir()
        assert len(on_rounding(job_for(tmp_path / str(number), pixels))) == 1


PHOTOGRAPHS = [camera() + sigma * np.random.default_rng(0).standard_normal((512, 512)) for sigma in (1.0, 5.0)]
LABELS = np.add.outer(np.arange(200) // 40, np.arange(200) // 50).astype(np.uint16)
OTHERS: list[tuple[Image, tuple[str, dict[str, Any]]]] = [
    *((pixels.round().clip(0, 255).astype(np.uint8), TV) for pixels in PHOTOGRAPHS),
    (60 * drawn(400), TV),
    (LABELS, ("gaussian", {"sigma": 1.0})),
    (drawn(5), ("none", {})),
    (drawn(5), ("median", {"size": 3})),
    (drawn(5)[:1], ("gaussian", {"sigma": 1.0})),
    (drawn(5) + np.uint32(2**30), TV),
]


@pytest.mark.parametrize(("pixels", "denoiser"), OTHERS)
def test_others_keep_their_type(tmp_path: Path, pixels: Image, denoiser: tuple[str, dict[str, Any]]) -> None:
    assert make_plan(job_for(tmp_path, pixels, denoiser)).summary()["output_dtype"] == str(pixels.dtype)


@pytest.mark.parametrize(("photometric", "dtype"), [("rgb", "uint16"), ("minisblack", "float32")])
def test_a_photograph_stays_one(tmp_path: Path, photometric: str, dtype: str) -> None:
    pixels = np.stack([drawn(20)] * 3, -1)
    tifffile.imwrite(tmp_path / "in.tif", pixels, photometric=photometric, planarconfig="contig")
    plan = make_plan(job_of(tmp_path / "in.tif", tmp_path / "out.zarr", *TV))
    assert plan.summary()["output_dtype"] == dtype


@pytest.mark.parametrize("before", ["uint16", "float32"])
def test_a_resumed_run_keeps_its_type(tmp_path: Path, before: str) -> None:
    wanted, roles = job_for(tmp_path, drawn(5)), Roles(("y", "x"), (0, 1), None)
    source = open_source(wanted.input.path)
    previous = {"identity": {"layout": {"dtype": before}}}
    image = JobImage(job=wanted, original=source, source=source, roles=roles, previous=previous)
    assert choose_type(image, TotalVariation(strength=1.0), None) == ResultType(before)


@pytest.mark.parametrize("value", [0, 65535])
def test_integers_with_holes_keep_their_type(tmp_path: Path, value: int) -> None:
    pixels = np.where(np.arange(400) % 50 == 0, value, 1000 + 60 * drawn(400)).astype(np.uint16)
    source = write_zarr(tmp_path / "in.zarr", pixels)
    for denoiser in (TV, ("none", {}), ("median", {"size": 3})):
        wanted = job_of(source, tmp_path / "out.zarr", *denoiser, input={"nodata": value})
        assert make_plan(wanted).summary()["output_dtype"] == "uint16"


@pytest.mark.parametrize("place", [0, 7])
def test_a_plane_of_few_values_is_found_among_others(tmp_path: Path, place: int) -> None:
    planes = np.stack([(3000 + 90 * np.random.default_rng(1).standard_normal((400, 400))).astype(np.uint16)] * 8)
    planes[place] = drawn(5)
    plan = make_plan(job_of(write_zarr(tmp_path / "in.zarr", planes, axes="cyx"), tmp_path / "out.zarr", *TV))
    assert plan.summary()["output_dtype"] == "float32"
    assert any(f"grows with brightness in c={place}, as" in note for note in plan.notes)


@pytest.mark.parametrize("together", [False, True])
def test_a_channel_of_few_values_is_found_also_where_all_are_taken_together(tmp_path: Path, together: bool) -> None:
    rng = np.random.default_rng(0)
    bright, dark = 3000 + 90 * rng.standard_normal((256, 256)), 65 + rng.standard_normal((256, 256))
    source = open_source(write_zarr(tmp_path / "in.zarr", np.stack([bright, dark]).astype(np.uint16), axes="cyx"))
    wanted, roles = job_of(source.path, tmp_path / "out.zarr", *TV), Roles(("c", "y", "x"), (1, 2), None)
    image = JobImage(job=wanted, original=source, source=source, roles=replace(roles, channel=0 if together else None))
    assert choose_type(image, TotalVariation(strength=1.0), None).dtype == "float32"


def test_a_level_that_was_given_is_no_estimate_of_a_resumed_run(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "a.zarr", np.random.default_rng(0).integers(0, 200, (96, 96)).astype("u1"))
    given, left_out = (
        job_of(source, tmp_path / "o.zarr", "tv", AUTO["tv"], noise=noise) for noise in ({"read_sigma": 10.0}, {})
    )
    with claim(make_plan(given)):
        pass
    with pytest.raises(ResumeRefused, match=r"noise\.read_sigma was 10\.0, is absent"), claim(make_plan(left_out)):
        pass


@pytest.mark.parametrize("model", ["gaussian", "poisson-gaussian"])
def test_the_report_lists_the_noise_of_each_plane(tmp_path: Path, model: str) -> None:
    rng = np.random.default_rng(0)
    planes = np.stack([100 + level * rng.standard_normal((96, 96)) for level in (5.0, 20.0)]).astype("f4")
    source = write_zarr(tmp_path / "in.zarr", planes, axes="zyx")
    given = {"gain": 2.0, "offset": 100.0, "read_sigma": 5.0} if model != "gaussian" else {}
    plan = make_plan(job_of(source, tmp_path / "o.zarr", *TV, noise={"model": model, **given}))
    listed = dict(plan.figures.get("noise_by_plane", []))
    if given:  # one for all planes
        assert listed == {}
    else:
        assert [float(text.removeprefix("noise level ")) for text in listed.values()] == pytest.approx([5, 20], rel=0.1)
        assert [*listed] == ["z=0", "z=1"]
