"""Channels that a job selects, and that have settings of their own."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from jsonschema import validate
from ruamel.yaml import YAML

import halotile
from halotile.cli.config.loading import check_saved_job
from halotile.cli.config.schema import config_schema
from halotile.errors import ConfigError, HalotileError
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.kinds.sections import DenoiserChoice
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.tasks.denoisers.tv import TotalVariation
from tests.support import Image, dncnn_weights, job_of, load_denoising, noisy_image, read_zarr, run_inline, write_zarr

Patch = pytest.MonkeyPatch

NAMES = ["DAPI", "GFP", "FISH", "Cy5"]


def stained(folder: Path, pixels: Image | None = None, name: str = "a.tif") -> Path:
    """Four channels with names and colours."""
    pixels = noisy_image((4, 96, 80), "uint16") if pixels is None else pixels
    colours = [0x0000FFFF, 0x00FF00FF, -16776961, 0xFFFF00FF - 2**32]
    channels = {"Name": NAMES[: len(pixels)], "Color": colours[: len(pixels)]}
    planes = {"ExposureTime": list(range(len(pixels)))}
    tifffile.imwrite(folder / name, pixels, ome=True, metadata={"axes": "CYX", "Channel": channels, "Plane": planes})
    return folder / name


SELECTED: list[tuple[tuple[Any, ...], list[int]]] = [
    (("FISH", "DAPI"), [2, 0]), ((1, "Cy5"), [1, 3]), ((2,), [2]), (("3",), [3]),
]  # fmt: skip


def test_channels_are_selected_with_what_describes_them(tmp_path: Path) -> None:
    pixels = noisy_image((4, 96, 80), "uint16")
    plain = job_of(stained(tmp_path, pixels), tmp_path / "o.zarr", "none")
    whole: Any = make_plan(plain)
    assert "channels" not in whole.identity["input"]
    for wanted, numbers in SELECTED:
        job = replace(plain, input=replace(plain.input, channels=wanted))
        assert (run_inline(job) == pixels[numbers]).all()
        chosen: Any = make_plan(job)
        assert whole.fingerprint != chosen.fingerprint
        planes = chosen.layout.attributes["ome_planes"]
        assert planes["sizes"] == [1, len(numbers), 1]
        assert [float(plane["ExposureTime"]) for plane in planes["planes"]] == numbers
        colours = [whole.layout.omero["channels"][number]["color"] for number in numbers]
        kept = [(each["label"], each["color"]) for each in chosen.layout.omero["channels"]]
        assert kept == list(zip([NAMES[number] for number in numbers], colours, strict=True))


@pytest.mark.parametrize("strength", [1.0, [1.0, 2.0]])
def test_a_map_of_all_channels_is_selected_too(tmp_path: Path, strength: Any) -> None:
    pixels, results = noisy_image((4, 96, 80)), []
    sigma = np.broadcast_to(np.array([0.1, 0.2, 0.3, 0.4], "float32")[:, None, None], pixels.shape)
    source = write_zarr(tmp_path / "a.zarr", pixels, axes="cyx")
    for number, side in enumerate((sigma, sigma[[3, 1]])):
        path = write_zarr(tmp_path / f"s{number}.zarr", np.ascontiguousarray(side))
        given = {"channels": (3, 1), "sides": {"sigma": str(path)}}
        job = job_of(source, tmp_path / f"o{number}.zarr", "tv", {"strength": strength}, input=given)
        results.append(run_inline(job))
    assert (results[0] == results[1]).all()


@pytest.mark.parametrize("stated", [None, -1])
def test_channels_without_colours_get_different_ones(tmp_path: Path, stated: int | None) -> None:
    channels: dict[str, Any] = {"Name": NAMES} | ({"Color": [stated] * 4} if stated else {})
    pixels = noisy_image((4, 64, 64), "uint16")
    tifffile.imwrite(tmp_path / "a.tif", pixels, ome=True, metadata={"axes": "CYX", "Channel": channels})
    omero: Any = make_plan(job_of(tmp_path / "a.tif", tmp_path / "o.zarr", "none")).layout.omero
    colours = {channel["color"] for channel in omero["channels"]}
    assert len(colours) == 4
    assert "FFFFFF" not in colours


MISSING: list[tuple[tuple[Any, ...], str | None, str]] = [
    (("DAPY",), None, "no channel DAPY, but DAPI (0), GFP (1), FISH (2), Cy5 (3). Did you mean DAPI?"),
    (("dapi",), None, "no channel dapi"),
    ((4,), None, "no channel 4"),
    ((-1,), None, "no channel -1"),
    (("DAPI", 0), None, "a channel twice"),
    ((0,), "zyx", "has no channels"),
]


@pytest.mark.parametrize(("wanted", "axes", "words"), MISSING)
def test_channels_that_there_are_not(tmp_path: Path, wanted: tuple[Any, ...], axes: str | None, words: str) -> None:
    job = job_of(stained(tmp_path), tmp_path / "o.zarr", "none", input={"channels": wanted, "axes": axes})
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_plan(job)


TV: dict[str, Any] = {"name": "tv", "strength": 1.0, "sigma": "auto"}
"""The denoiser of channels that the cases below leave alone."""


def single_job(source: Path, place: Path, denoiser: dict[str, Any], **parts: Any) -> Any:
    """A job of small blocks whose result is not rounded."""
    options = {key: value for key, value in denoiser.items() if key != "name"}
    job = job_of(source, place, denoiser["name"], options, shard=32, chunk=16, **parts)
    return replace(job, output=replace(job.output, dtype="float32"))


def apart_job(source: Path, place: Path, case: Case, **parts: Any) -> Any:
    others = {key: DenoiserChoice.from_mapping(other) for key, other in case.channels.items()}
    return replace(single_job(source, place, case.denoiser, **parts), channels=others)


@dataclass(frozen=True)
class Case:
    """A job, and what it says of each of four channels."""

    denoiser: dict[str, Any]
    channels: dict[str, dict[str, Any]]
    of_channel: list[dict[str, Any]]


NONE, GAUSSIAN, MEDIAN = {"name": "none"}, {"name": "gaussian", "sigma": 1.5}, {"name": "median", "size": 5}
NLM = {"name": "nlm", "strength": 1.0, "patch": 3, "sigma": "auto"}
STRENGTHS, LEVELS = [0.5, 1.0, 2.0, 1.0], [0.05, "auto", "auto", 0.2]
CASES = {
    "names": Case({**TV, "strength": dict(zip(NAMES, STRENGTHS, strict=True))}, {}, [{**TV, "strength": n} for n in STRENGTHS]),
    "numbers": Case({**TV, "iterations": {"1": 5, "3": 7}}, {}, [TV, TV | {"iterations": 5}, TV, TV | {"iterations": 7}]),
    "a list": Case({**TV, "strength": [1, 1, 1, 2]}, {}, [TV, TV, TV, {**TV, "strength": 2}]),
    "no main one": Case(NONE, {"DAPI": TV, "GFP": GAUSSIAN, "FISH": TV, "Cy5": GAUSSIAN}, [TV, GAUSSIAN, TV, GAUSSIAN]),
    "nlm": Case({**NLM, "distance": [2, 3, 2, 3]}, {"Cy5": MEDIAN}, [*({**NLM, "distance": n} for n in (2, 3, 2)), MEDIAN]),
    "levels": Case({**TV, "sigma": dict(zip(NAMES, LEVELS, strict=True))}, {}, [{**TV, "sigma": n} for n in LEVELS]),
}  # fmt: skip
SCENES = ("float64", "holes", "mask", "sigma", "photons", "volume", "stripes", "defects")
CROSSED = [*(("uint16", name) for name in CASES), *((scene, "others") for scene in SCENES), ("photons", "levels")]
CASES["others"] = Case(TV, {"2": NONE, "1": GAUSSIAN}, [TV, GAUSSIAN, NONE, TV])


def of_scene(folder: Path, scene: str) -> tuple[Image, dict[str, Any], dict[str, Any]]:
    """The pixels of a scene, its input and its noise."""
    dtype = {"uint16": "uint16", "float64": "float64", "photons": "uint16"}.get(scene, "float32")
    pixels = noisy_image((4, 12, 40, 36) if scene == "volume" else (4, 96, 80), dtype)
    given: dict[str, Any] = {"spacing": {"z": 1.0, "y": 1.0, "x": 1.0}} if scene == "volume" else {}
    if scene == "holes":
        pixels[:, 20:30, 30:50] = np.nan
    if scene == "photons":
        pixels = (10 * np.random.default_rng(0).poisson(pixels / 500) + 100).astype("uint16")
    if scene == "stripes":
        pixels, given["stripes"] = pixels + np.random.default_rng(1).normal(0, 0.1, 80).astype("float32"), {"axis": "x"}
    if scene == "defects":
        pixels[:, 30, 40], given["defects"] = 50, "auto"
    sides = {
        "mask": (np.arange(80) % 9 > 1) * np.ones((4, 96, 80), "uint8"),
        "sigma": np.linspace(0.05, 0.2, 4 * 96 * 80, dtype="float32").reshape(4, 96, 80),
    }
    if scene in sides:
        given["sides"] = {scene: str(write_zarr(folder / "side.zarr", sides[scene]))}
    return pixels, given, {"model": "poisson-gaussian", "gain": 10.0, "offset": 100.0} if scene == "photons" else {}


@pytest.mark.parametrize(("scene", "name"), CROSSED)
def test_each_channel_has_the_bits_of_a_job_with_it_alone(tmp_path: Path, name: str, scene: str) -> None:
    case, (pixels, given, noise) = CASES[name], of_scene(tmp_path, scene)
    is_volume = scene == "volume"
    source = write_zarr(tmp_path / "a.zarr", pixels, axes="czyx") if is_volume else stained(tmp_path, pixels)
    job = apart_job(source, tmp_path / "o.zarr", case, input=given, noise=noise)
    if scene == "defects":
        for each in (job, replace(job, input=replace(job.input, defects="none"))):
            assert len([note for note in make_plan(each).notes if "about 4 of 30,720 pixels stand out" in note]) == 1
    if scene == "stripes":
        assert [each.phase for each in make_plan(job).work.passes] == ["stripes", "denoise"]
    whole = run_inline(job)
    for number, denoiser in enumerate(case.of_channel):
        own = {**given, "channels": (number,)}
        if scene == "sigma" and denoiser["name"] not in ("tv", "nlm"):
            own["sides"] = {}
        of_level = noise if denoiser.get("sigma") == "auto" else {}
        job = single_job(source, tmp_path / f"o{number}.zarr", denoiser, input=own, noise=of_level)
        if is_volume:
            job = replace(job, tile=replace(job.tile, axes="zyx"))
        assert np.array_equal(run_inline(job)[0], whole[number], equal_nan=True), (number, denoiser)


def test_equal_denoisers_are_one(tmp_path: Path) -> None:
    source = stained(tmp_path)
    plain = make_plan(single_job(source, tmp_path / "o.zarr", TV))
    same = Case({**TV, "strength": [1, 1.0, 1, 1], "iterations": {"FISH": 20}}, {"GFP": TV}, [])
    assert TotalVariation(strength=1.0).iterations == 20
    assert make_plan(apart_job(source, tmp_path / "o.zarr", same)).identity == plain.identity


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({**TV, "strength": {"DAPI": 1.0}}, {}, "GFP: denoiser tv: write strength, which has no default"),
    ({**TV, "strength": [1, 2]}, {}, "denoiser.strength is [1, 2], and the image has 4 channels"),
    ({**TV, "iterations": {"DAPY": 9}}, {}, "denoiser.iterations: the image has no channel DAPY"),
    ({**TV, "iterations": {"DAPI": 9, "0": 8}}, {}, "denoiser.iterations names a channel twice"),
    ({**TV, "strength": {"DAPI": -1, "GFP": 1, "FISH": 1, "Cy5": 1}}, {}, "DAPI: strength is -1"),
    (TV, {"Texas": NONE}, "channels: the image has no channel Texas, but DAPI (0)"),
    (TV, {"FISH": {"name": "tvv"}}, "FISH: denoiser 'tvv' is not known here. Did you mean 'tv'?"),
    (TV, {"FISH": {"name": "dncnn", "channels": [2, 2]}}, "FISH: dncnn takes 2 channels together"),
]


@pytest.mark.parametrize(("denoiser", "channels", "words"), WRONG)
def test_settings_that_cannot_be(tmp_path: Path, denoiser: Any, channels: Any, words: str) -> None:
    weights = {"weights": str(dncnn_weights(tmp_path / "w.safetensors", channels=(2, 2)))}
    given = {key: each | (weights if each["name"] == "dncnn" else {}) for key, each in channels.items()}
    with pytest.raises(HalotileError, match=re.escape(words)):
        make_plan(apart_job(stained(tmp_path), tmp_path / "o.zarr", Case(denoiser, given, [])))


def test_a_network_beside_filters_has_its_own_tiles(tmp_path: Path) -> None:
    """Its windows are longer than a block, and its rim is another one."""
    weights = str(dncnn_weights(tmp_path / "w.safetensors"))
    network = {"name": "dncnn", "weights": weights, "depth": 5, "width": 8}
    pixels = noisy_image((4, 100, 130), "float64")
    case = Case(TV, {"DAPI": network, "FISH": NONE}, [network, TV, NONE, TV])
    job = apart_job(stained(tmp_path, pixels), tmp_path / "o.zarr", case)
    whole = run_inline(job)
    parts: Any = make_plan(job).identity["channels"]
    found = [(part["numbers"], part["denoiser"]["name"], len(part["weights"])) for part in parts]
    assert found == [([1, 3], "tv", 0), ([0], "dncnn", 1), ([2], "none", 0)]
    light = replace(job, denoiser=DenoiserChoice(name="none"), channels={})
    heavy = replace(light, channels={"GFP": job.denoiser})
    assert make_plan(heavy).memory_bytes > make_plan(light).memory_bytes
    for number, denoiser in enumerate(case.of_channel):
        job = single_job(tmp_path / "a.tif", tmp_path / f"{number}.zarr", denoiser, input={"channels": (number,)})
        assert (run_inline(job)[0] == whole[number]).all()


@pytest.mark.cluster
def test_a_run_keeps_what_it_estimated(tmp_path: Path, cluster: RunningCluster, monkeypatch: Patch) -> None:
    photons = np.linspace(5, 200, 80) * np.ones((4, 96, 80))
    pixels = (10 * np.random.default_rng(0).poisson(photons) + 100).astype("uint16")
    case = Case({**TV, "strength": {"DAPI": 0.5, "GFP": 1.0, "FISH": 2.0}}, {"Cy5": NONE}, [])
    job = apart_job(stained(tmp_path, pixels), tmp_path / "o.zarr", case, noise={"model": "poisson-gaussian"})
    done = run(make_plan(job), cluster=cluster)
    assert {row["plane"] for row in done.inspection.figures["residual"]} == {"c=0", "c=1", "c=2"}
    written = read_zarr(tmp_path / "o.zarr")
    again = replace(job, output=replace(job.output, path=str(tmp_path / "again.zarr")))
    assert (run_inline(again) == written).all()
    monkeypatch.setattr("halotile.graphs.jobs.denoise.pixels.estimate_photon_noise", None)
    plan = make_plan(job)
    assert plan.resumes
    assert [part["channels"] for part in plan.summary()["channels"]] == [["DAPI"], ["GFP"], ["FISH"], ["Cy5"]]
    for shard in filter(Path.is_file, (tmp_path / "o.zarr/0/c/2").rglob("*")):
        shard.write_bytes(b"")
    assert halotile.verify(tmp_path / "o.zarr", repair=True).sound
    assert (read_zarr(tmp_path / "o.zarr") == written).all()


CONFIG = """\
version: 1
job: denoise
input: {path: a.tif, channels: [DAPI, 1, FISH]}
output: {path: o.zarr}
denoiser: {name: tv, strength: {DAPI: 1.0, GFP: 2, FISH: 1}, sigma: auto}
channels:
  FISH: {name: gaussian, sigma: 1}
"""


def test_a_file_has_settings_of_channels(tmp_path: Path) -> None:
    stained(tmp_path)
    (tmp_path / "job.yaml").write_text(CONFIG)
    job = load_denoising(tmp_path / "job.yaml")
    plan = make_plan(job)
    filters = ["{name: tv, strength: 1.0, sigma: auto}", "{name: tv, strength: 2, sigma: auto}", "{name: gaussian, sigma: 1}"]  # fmt: skip
    assert [part["setting"] for part in plan.summary()["channels"]] == filters
    assert check_saved_job(plan.documents.asked, tmp_path, "saved") == replace(job, run=job.run)
    decided = check_saved_job({**plan.documents.resolved, "version": 1, "job": "denoise"}, tmp_path, "decided")
    assert (run_inline(decided) == run_inline(job)).all()  # type: ignore[arg-type]
    validate(instance=YAML(typ="safe").load(CONFIG), schema=config_schema())
    said = r"DAPI: noise level .*\nGFP: noise level .*, estimated from the whole image"
    assert re.fullmatch(said, plan.summary()["noise"])


MISTAKES = [
    ("GFP: 2", 'GFP: "2"', 'denoiser.strength.GFP: "2" is not a number; write it without quotes'),
    ("GFP: 2", "GFP: -2", "denoiser.strength.GFP: strength is -2"),
    ("{DAPI: 1.0, GFP: 2, FISH: 1}", "[1, x, 2]", 'denoiser.strength[1]: "x" is not a number'),
    ("sigma: auto}", "sigma: auto, patch: {DAPI: 3}}", "denoiser.patch: is for denoiser nlm"),
    ("sigma: 1}", "sigma: -1}", "channels.FISH.sigma: sigma is -1"),
    ("{name: gaussian, sigma: 1}", "none", 'channels.FISH: "none" is not a mapping; write `{name: none, ...}`'),
    ("name: gaussian", "name: gausian", "channels.FISH.name: no denoiser is called gausian; did you mean gaussian?"),
    ("[DAPI, 1, FISH]", "DAPI", 'input.channels: "DAPI" is not a list of texts or whole numbers'),
]


@pytest.mark.parametrize(("wrong", "right", "words"), MISTAKES)
def test_mistakes_in_settings_of_channels_have_their_places(tmp_path: Path, wrong: str, right: str, words: str) -> None:
    stained(tmp_path)
    assert wrong in CONFIG
    (tmp_path / "job.yaml").write_text(CONFIG.replace(wrong, right))
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_denoising(tmp_path / "job.yaml")
