"""Maps of the error of a denoiser: as large as the error, the same bits for any blocks, workers and kills; bad input in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skimage.data
import zarr
from numpy.typing import NDArray
from typer.testing import CliRunner

import halotile
from halotile.cli.main import app
from halotile.errors import ConfigError, InputError, ResumeRefused
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.denoise.job import Denoising, NoiseModel
from halotile.graphs.jobs.samples.job import FieldPrior, MapOutput, MeasuredOperator, PosteriorOptions, Sampling
from halotile.graphs.kinds.sections import Cluster, DenoiserChoice, Input, Output, Run, Tile
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.driver import run
from halotile.graphs.runs.verify import verify
from halotile.tasks.devices.device import torch_threads
from tests.graphs.sampling import computed, journalled, killed, launch, same
from tests.support import read_zarr, work_of

Patch = pytest.MonkeyPatch

Pixels = NDArray[Any]
SIGMA = 20.0
IMAGES = {"camera": np.s_[100:292, 150:342], "coins": np.s_[50:242, 50:242], "moon": np.s_[150:342, 150:342]}
TV = {"name": "tv", "strength": 0.5, "sigma": SIGMA}
MEDIAN: dict[str, Any] = {"denoiser": {"name": "median", "size": 3}}


def scene(folder: Path, name: str = "camera") -> Pixels:
    """Write an image with noise; return it without."""
    truth: Pixels = getattr(skimage.data, name)()[IMAGES[name]].astype(float)
    noisy = truth + SIGMA * np.random.default_rng(1).standard_normal(truth.shape)
    zarr.create_array(folder / "y.zarr", data=noisy.astype("float32"), chunks=(64, 64), overwrite=True)
    return truth


SIZES: dict[str, Any] = {"shard": 64, "chunk": 64}
SECTIONS: dict[str, type[Any]] = {"input": Input, "output": MapOutput, "posterior": PosteriorOptions, "tile": Tile}


def job_in(folder: Path, out: str = "mean", **changes: Any) -> Sampling:
    """A job of three redraws; ``changes``: values of its sections, or other ones."""
    parts: dict[str, Any] = {
        "input": {"path": str(folder / "y.zarr")},
        "output": {"path": str(folder / f"{out}.zarr"), "std": str(folder / f"{out}-std.zarr"), **SIZES},
        "posterior": {"count": 3},
        "tile": {"block": 64},
    }
    sections = {name: SECTIONS[name](**values | changes.pop(name, {})) for name, values in parts.items()}
    denoiser = DenoiserChoice.from_mapping(changes.pop("denoiser", TV))
    own: dict[str, Any] = {"run": Run(workers=1, memory_per_worker="3GiB"), "cluster": Cluster(dashboard=False)}
    return Sampling(denoiser=denoiser, **sections, **own, **changes)


def denoised(job: Sampling) -> Pixels:
    """The image of the denoising job with these sections."""
    parts: Any = {name: getattr(job, name) for name in ("input", "denoiser", "noise", "run", "cluster")}
    return computed(Denoising(output=Output(path=job.output.path + "d", **SIZES), **parts))[0]


@pytest.fixture(autouse=True, scope="module")
def _as_in_workers() -> Any:
    with torch_threads():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("error")
    scene(place)
    return place


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Pixels, ...]:
    """Both maps, computed as one block."""
    return computed(job_in(folder, "whole", tile={"block": 192, "size": 192}))


@pytest.mark.parametrize("name", IMAGES)
def test_two_standard_deviations_hold_as_many_pixels_as_they_should(tmp_path: Path, name: str) -> None:
    truth = scene(tmp_path, name)
    mean, std = computed(job_in(tmp_path, posterior={"count": 16}, tile={"block": 192}))
    assert 0.93 <= np.mean(np.abs(mean - truth) <= 2 * std) <= 0.97


NOISE = NoiseModel(model="poisson-gaussian", gain=2.0, read_sigma=3.0)
ALIKE: list[dict[str, Any]] = [
    {},
    {"denoiser": {"name": "median", "size": 3}, "noise": NoiseModel(read_sigma=SIGMA)},
    {"denoiser": {"name": "tv", "strength": 1.0, "sigma": "auto"}, "tile": {"boundary": "periodic"}},
    {"denoiser": {"name": "tv", "strength": 1.0, "sigma": "auto", "iterations": 5}, "noise": NOISE},
    {"input": {"defects": "auto"}},
]


@pytest.mark.parametrize("changes", ALIKE, ids=["tv", "median", "periodic", "photons", "defects"])
def test_images_are_those_of_a_denoising_job(folder: Path, changes: dict[str, Any], monkeypatch: Patch) -> None:
    monkeypatch.setattr("halotile.graphs.jobs.samples.bootstrap.PLACES", 2)
    job = job_in(folder, **changes)
    tile = changes.get("tile", {})
    one = computed(job)
    other = computed(job_in(folder, "b", **changes | {"tile": tile | {"block": 192, "size": 96}}))
    assert same(one, other)
    assert np.array_equal(one[0], denoised(replace(job, tile=Tile())) if not tile else one[0])
    assert (one[1] > 0).mean() > 0.99


def test_planes_have_maps_of_their_own(tmp_path: Path) -> None:
    scene(tmp_path)
    y = np.asarray(zarr.open_array(tmp_path / "y.zarr")[:])
    np.save(tmp_path / "two.npy", np.stack([y, 2 * y]))
    given = {"path": str(tmp_path / "two.npy"), "axes": "cyx"}
    auto: dict[str, Any] = {"denoiser": {"name": "tv", "strength": 0.5, "sigma": "auto"}, "input": given}
    plan = make_plan(job_in(tmp_path, **auto))
    assert work_of(plan).task.level.values.ravel() == pytest.approx([SIGMA, 2 * SIGMA], rel=0.05)
    std = computed(job_in(tmp_path, **auto))[1]
    assert std[1].mean() == pytest.approx(2 * std[0].mean(), rel=0.05)


def test_holes_stay_and_have_no_error(tmp_path: Path) -> None:
    scene(tmp_path)
    y, hole = zarr.open_array(tmp_path / "y.zarr"), (slice(60, 70), slice(100, 120))
    y[hole] = np.nan
    y[60:65, 100:120] = -9999
    y.attrs["missing_value"] = -9999.0
    job, expected = job_in(tmp_path), y[hole]
    mean, std = computed(job)
    assert np.array_equal(mean, denoised(job), equal_nan=True)
    assert np.array_equal(mean[hole], expected, equal_nan=True)
    assert np.isnan(std[hole]).all()
    assert np.isnan(std).sum() == 200


def test_workers_and_a_kill_change_no_bit(
    folder: Path, tmp_path: Path, whole: tuple[Pixels, ...], cluster: RunningCluster, monkeypatch: Patch
) -> None:
    place: dict[str, Any] = {"output": tmp_path / "m.zarr", "std": tmp_path / "s.zarr"}
    halotile.samples(folder / "y.zarr", denoiser=TV, posterior={"count": 3}, cluster=cluster.client, **place)
    assert same(tuple(map(read_zarr, place.values())), whole)
    written = {
        "version": 1, "job": "samples", "input": {"path": str(folder / "y.zarr")}, "denoiser": TV,
        "posterior": {"count": 3, "method": "bootstrap", "calibrate": "sure"},
        "output": {"path": "mean.zarr", "std": "mean-std.zarr", **SIZES}, "tile": {"block": 64},
        "run": {"workers": 1, "memory_per_worker": "3GiB"}, "cluster": {"dashboard": False},
    }  # fmt: skip
    (tmp_path / "job.yaml").write_text(json.dumps(written))
    killed(launch(tmp_path), lambda: len(journalled(tmp_path, "mean-std.zarr")) >= 2)
    assert 0 < len(journalled(tmp_path, "mean.zarr")) < 9
    output = replace(job_in(folder).output, path=str(tmp_path / "mean.zarr"), std=str(tmp_path / "mean-std.zarr"))
    run(make_plan(replace(job_in(folder), output=output)), cluster=cluster)
    assert same((read_zarr(tmp_path / "mean.zarr"), read_zarr(tmp_path / "mean-std.zarr")), whole)
    assert verify(tmp_path / "mean.zarr").problems == verify(tmp_path / "mean-std.zarr").problems == ()
    status = CliRunner().invoke(app, ["status", str(tmp_path / "mean.zarr")])
    assert "from SURE, applied" in status.stdout
    monkeypatch.setattr("halotile.graphs.jobs.samples.bootstrap._calibrated", None)  # the factor is that of the run
    np.save(tmp_path / "m.npy", np.ones((192, 192)))
    mask = MeasuredOperator(name="mask", data=str(folder / "y.zarr"), options={"mask": str(tmp_path / "m.npy")})
    prior = FieldPrior(options={"std": 50.0, "range": 8.0, "mean": 100.0})
    others = (job_in(folder, posterior={"calibrate": "none"}), Sampling(operators=(mask,), output=output, prior=prior))
    for other, words in zip(others, (r'calibrate was "sure", is "none"', r"denoiser was"), strict=True):
        with pytest.raises(ResumeRefused, match=words), claim(make_plan(replace(other, output=output))):
            pass


def test_the_factor_is_reported_and_left_out_on_request(folder: Path, whole: tuple[Pixels, ...]) -> None:
    raw = computed(job_in(folder, "raw", posterior={"calibrate": "none"}, tile={"block": 192}))
    about = zarr.open_array(folder / "raw-std.zarr/0").attrs["posterior"]
    assert about["calibrate"] == "none"
    assert zarr.open_array(folder / "whole-std.zarr/0").attrs["posterior"]["factor"] == about["factor"] != 1
    assert whole[1] == pytest.approx(raw[1] * about["factor"], rel=1e-5)
    rows = dict(make_plan(job_in(folder)).kind.rows(make_plan(job_in(folder)).summary()))
    assert rows["calibration"].startswith(f"{about['factor']:.3g} from SURE, applied; ")


def test_the_plan_tells_how_much_the_factor_depends_on_the_noise(folder: Path, monkeypatch: Patch) -> None:
    plans = (make_plan(job_in(folder, **MEDIAN, noise=NoiseModel(read_sigma=k * SIGMA))) for k in (1, 1.02))
    usual, stronger = (work_of(plan).also[0].layout.attributes["posterior"] for plan in plans)
    assert stronger["factor"] == pytest.approx(usual["factor_if_noise_is_2_percent_stronger"], rel=0.03)
    assert stronger["factor"] < 0.98 * usual["factor"]
    monkeypatch.setattr("halotile.graphs.jobs.samples.bootstrap.LEAST", 10.0)
    make_plan(job_in(folder))
    with pytest.raises(InputError, match=r"so the estimated noise level is probably too high"):
        make_plan(job_in(folder, **MEDIAN))
    make_plan(job_in(folder, **MEDIAN, posterior={"calibrate": "none"}))


HOT: list[tuple[str, dict[str, Any]]] = [
    ("normal", {"denoiser": {"name": "gaussian", "sigma": 1.0}, "noise": NoiseModel(read_sigma=SIGMA)}),
    ("poisson", {"denoiser": TV | {"sigma": "auto"}, "noise": replace(NOISE, gain=1.0)}),
]


@pytest.mark.parametrize(("law", "parts"), HOT, ids=[law for law, _ in HOT])
def test_hot_pixels_leave_the_factor_of_the_others(tmp_path: Path, law: str, parts: dict[str, Any]) -> None:
    truth, rng, found = scene(tmp_path), np.random.default_rng(3), []
    y = zarr.open_array(tmp_path / "y.zarr")
    pixels = truth + SIGMA * rng.standard_normal(truth.shape) if law == "normal" else rng.poisson(4 * truth)
    for hot in (0, pixels.size // 1000):
        pixels.ravel()[rng.choice(pixels.size, hot, replace=False)] = 60000
        y[:] = pixels
        said = work_of(make_plan(job_in(tmp_path, **parts))).also[0].layout.attributes["posterior"]
        found.append([said["factor"], said["factor_if_noise_is_2_percent_stronger"]])
    assert found[1] == pytest.approx(found[0], rel=0.01)


def test_noise_that_is_not_known_is_refused_in_words(tmp_path: Path) -> None:
    scene(tmp_path)
    y = zarr.open_array(tmp_path / "y.zarr")
    pixels = y[:]
    noise = SIGMA * np.random.default_rng(2).standard_normal(pixels.shape)
    y[:] = 100 + noise + np.roll(noise, 1, 1)
    with pytest.raises(InputError, match=r"the noise is correlated, by .* noise.read_sigma"):
        make_plan(job_in(tmp_path, **MEDIAN))
    make_plan(job_in(tmp_path, **MEDIAN, noise=NoiseModel(read_sigma=SIGMA)))
    y[:] = np.add.outer(np.arange(192), np.zeros(192))
    with pytest.raises(InputError, match=r"no noise is seen in .* Write its standard deviation as noise.read_sigma"):
        make_plan(job_in(tmp_path, **MEDIAN))
    y[:] = np.random.default_rng(2).standard_normal(pixels.shape)
    strong: dict[str, Any] = {"denoiser": {"name": "tv", "strength": 50.0}, "noise": NoiseModel(read_sigma=2.0)}
    with pytest.raises(InputError, match=r"SURE sees no error"):
        make_plan(job_in(tmp_path, **strong))
    plan = make_plan(job_in(tmp_path, **strong, posterior={"calibrate": "none"}))
    assert plan.summary()["calibration"] == "not known, not applied"
    assert work_of(plan).also[0].layout.attributes["posterior"]["factor"] is None


FEW = [
    (np.ones((1, 1)), r"have 1 measured pixel, and .* needs 1,000. Write posterior.calibrate: none"),
    (np.eye(8), r"have 64 measured pixels"),
    (np.full((192, 192), np.nan), r"have no pixel that was measured"),
]


def test_too_few_pixels_give_no_factor(tmp_path: Path) -> None:
    for pixels, words in FEW:
        np.save(tmp_path / "y.npy", pixels)
        parts = MEDIAN | {"input": {"path": str(tmp_path / "y.npy")}, "noise": NoiseModel(read_sigma=SIGMA)}
        with pytest.raises(InputError, match="samples of the image " + words):
            make_plan(job_in(tmp_path, **parts))
        std = computed(job_in(tmp_path, f"{len(pixels)}", **parts, posterior={"calibrate": "none"}))[1]
        assert np.array_equal(np.isnan(std), np.isnan(pixels))


OPERATOR = MeasuredOperator(name="mask", data="y.zarr", options={"mask": "m.npy"})
OF_OPERATOR: dict[str, Any] = {"input": None, "denoiser": None, "operators": (OPERATOR,)}
SEEN = halotile.measurement("blur", "y.zarr", kernel=[[0.5, 0.5]])
Option = PosteriorOptions
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"operators": (OPERATOR,)}, "has operators and input and denoiser. Write operators, .* or input and denoiser"),
    ({"denoiser": None}, "job: samples has input. Write"),
    ({"input": None}, "job: samples has denoiser. Write"),
    ({"posterior": Option(method="blocks")}, "posterior.method is for operators, and this job has a denoiser"),
    ({"posterior": Option(tol=0.1)}, "posterior.tol is for operators"),
    ({"prior": FieldPrior(options={"std": 1.0})}, "prior is for operators"),
    ({"output": MapOutput(path="m.zarr")}, "output.std null: a map is of one image"),
    ({"output": MapOutput(path="m.zarr", std="s.zarr", samples="d.zarr")}, "output.samples is for operators"),
    (OF_OPERATOR | {"posterior": Option(calibrate="none")}, "calibrate is for a denoiser, and this job has operators"),
    (OF_OPERATOR | {"posterior": Option(method="bootstrap")}, "posterior.method is for a denoiser"),
    ({"posterior": Option(count=1)}, "one draw gives no standard deviation"),
]
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (SEEN, {}, r"neither a path nor a list of measurements. Write .* \[halotile.measurement\(...\)\]"),
    (["y.zarr"], {}, r"measurements is \[\"y.zarr\"\]: that is neither"),
    ([SEEN], {"shape": 3}, r"shape: 3 is not auto or a list of whole numbers"),
    ([SEEN], {"output": None}, r"output is of type NoneType, .* give its path"),
    ([SEEN], {"std": 3}, r"std is of type int, .* give its path"),
]


def test_wrong_combinations_and_arguments_are_refused_in_words(folder: Path) -> None:
    for changes, words in REFUSED:
        with pytest.raises(ConfigError, match=words):
            make_plan(replace(job_in(folder), **changes))
    for measurements, arguments, words in WRONG:
        with pytest.raises(ConfigError, match=words):
            halotile.samples(measurements, **{"output": "m.zarr"} | arguments)
