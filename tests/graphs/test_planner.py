"""Plans: what a denoiser needs is found out, what cannot be is refused in words, and nothing is touched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halotile.errors import ConfigError, HalotileError, InputError, UnknownName
from halotile.graphs.jobs.denoise import plan as denoise_plan
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.plans.plan import make_plan
from halotile.storage.arrays import open_source
from tests.support import dncnn_weights, job_of, noisy_image, run_inline, whole_picture, work_of, write_zarr

NETWORK = "tests.networks:"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_zarr(tmp_path / "in.zarr", noisy_image((300, 260)))


def network(name: str, **more: Any) -> dict[str, Any]:
    return {"import": NETWORK + name, **more}


CONVOLUTIONS: dict[str, Any] = {"name": "torch", "options": {"import": NETWORK + "convolutions"}}
REFUSALS: dict[str, tuple[dict[str, Any], type[HalotileError], str]] = {
    "shallow depth": ({"tile": {"depth": 2}}, ConfigError, "receptive field is 20: seams would show. Write depth: 20"),
    "negative depth": ({"tile": {"depth": -1}}, ConfigError, "tile.depth: -1 is too small"),
    "three depths": ({"tile": {"depth": (30, 30, 30)}}, ConfigError, "one for each of the 2 tiled axes"),
    "part of a shard": ({"tile": {"block": 100}}, ConfigError, "Write a multiple of 128"),
    "shard of half chunks": ({"shard": 100, "chunk": 64}, ConfigError, "a shard holds whole chunks"),
    "no tile": ({"tile": {"size": 0}}, ConfigError, "tile.size: 0 is too small"),
    "no batch": ({"tile": {"batch": 0}}, ConfigError, "tile.batch: 0 is too small"),
    "unknown axis": ({"tile": {"axes": "zq"}}, ConfigError, "image's axes are 'yx'"),
    "axis twice": ({"tile": {"axes": "yy"}}, ConfigError, "one different letter for each"),
    "one axis": ({"tile": {"axes": "y"}}, ConfigError, "works on 3 or 2 axes"),
    "reversed range": ({"input": {"range": (1.0, 0.0)}}, ConfigError, "runs backwards"),
    "unknown side": ({"input": {"sides": {"sgima": "x"}}}, ConfigError, "Write one of mask, sigma"),
    "missing side": ({"input": {"sides": {"sigma": "nowhere.zarr"}}}, InputError, "nowhere.zarr"),
    "missing input": ({"source": "nowhere.zarr"}, InputError, "nowhere.zarr"),
    "unknown denoiser": ({"name": "gausian"}, UnknownName, "gaussian"),
    "unknown option": ({"options": {"sigma": "auto", "sterngth": 1}}, ConfigError, "no option 'sterngth'"),
    "missing option": ({"options": {}}, ConfigError, "strength"),
    "no import": ({**CONVOLUTIONS, "allow_import": False}, ConfigError, "--allow-import"),
    "whole image": ({"name": "torch", "options": {"import": NETWORK + "whole_norm"}}, ConfigError, "whole image"),
    "bad memory": ({"run": {"memory_per_worker": "lots"}}, ValueError, "is not a size"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused_and_nothing_touched(case: str, source: Path, tmp_path: Path) -> None:
    changes, error, said = REFUSALS[case]
    values: dict[str, Any] = {"source": source, "name": "tv", "options": {"strength": 0.1}} | changes
    may_import = values.pop("allow_import", True)
    before = sorted(tmp_path.rglob("*"))
    job = job_of(Path(values.pop("source")), tmp_path / "o.zarr", values.pop("name"), values.pop("options"), **values)
    with pytest.raises(error, match=said):
        make_plan(replace(job, allow_import=may_import))
    assert sorted(tmp_path.rglob("*")) == before


def test_seams_may_be_allowed_and_are_noted(source: Path, tmp_path: Path) -> None:
    plan = make_plan(job_of(source, tmp_path / "o.zarr", "tv", {"strength": 0.1}, tile={"depth": 2, "seams": "allow"}))
    assert work_of(plan).task.tiling.depth == ((2, 2), (2, 2))
    assert "seams will show" in plan.notes[0]


def test_a_users_network_is_probed_and_the_noise_level_estimated_once(source: Path, tmp_path: Path) -> None:
    plan = make_plan(job_of(source, tmp_path / "o.zarr", "torch", network("convolutions", options={"layers": 4})))
    assert work_of(plan).task.tiling.depth == ((4, 4), (4, 4))
    assert plan.summary()["depth_from"] == "probed"
    plan = make_plan(job_of(source, tmp_path / "o.zarr", "tv", {"strength": 1.0, "sigma": "auto"}))
    assert 0.05 < plan.identity["noise_level"] < 0.15
    assert work_of(plan).task.denoiser.sigma == plan.identity["noise_level"]


def test_a_strided_network_that_loses_the_ragged_edge_is_refused(tmp_path: Path) -> None:
    ragged = write_zarr(tmp_path / "ragged.zarr", noisy_image((302, 260)))
    with pytest.raises(ConfigError, match=r"total stride of 4, and the image's sides \[302, 260\]"):
        make_plan(job_of(ragged, tmp_path / "o.zarr", "torch", network("cropping")))
    pixels = noisy_image((300, 260))
    even = write_zarr(tmp_path / "even.zarr", pixels)
    job = job_of(even, tmp_path / "o.zarr", "torch", network("cropping"))
    assert np.array_equal(run_inline(job), whole_picture(job, pixels, 0))


def test_new_channels_become_an_axis(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", noisy_image((200, 190)))
    job = job_of(source, tmp_path / "o.zarr", "torch", network("colouring", channels=(1, 3)))
    assert make_plan(job).layout.axes == ("c", "y", "x")
    assert run_inline(job).shape == (3, 200, 190)


def test_channels_that_do_not_match_are_refused(tmp_path: Path) -> None:
    options = {"weights": str(dncnn_weights(tmp_path / "w.safetensors", channels=(3, 3))), "depth": 5, "width": 8}
    options["channels"] = (3, 3)

    def job(axes: str, *shape: int) -> Denoising:
        source = write_zarr(tmp_path / f"{len(shape)}{axes}.zarr", noisy_image(shape), axes=axes)
        return job_of(source, tmp_path / "o.zarr", "dncnn", options)

    with pytest.raises(InputError, match="takes 3 channels, the image has axes 'yx'"):
        make_plan(job("yx", 200, 190))
    with pytest.raises(InputError, match="takes 3 channels, the image has 4"):
        make_plan(job("cyx", 4, 200, 190))
    assert run_inline(job("yxc", 200, 190, 3)).shape == (3, 200, 190), "in the order of OME-Zarr"


def test_side_inputs_are_tiled_along(tmp_path: Path) -> None:
    pixels = noisy_image((300, 260))
    source = write_zarr(tmp_path / "in.zarr", pixels)
    side = noisy_image((300, 260), seed=5)
    sigma = write_zarr(tmp_path / "sigma.zarr", side)
    job = job_of(
        source, tmp_path / "o.zarr", "torch", network("by_sigma", sigma=0.1), input={"sides": {"sigma": str(sigma)}}
    )
    assert np.array_equal(run_inline(job), pixels / (1 + side))


def test_a_plan_has_the_side_input_that_it_has_checked(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = tmp_path / "mask.npy"
    np.save(mask, np.ones((300, 260), "uint8"))
    checked = open_source(mask).fingerprint()

    def replaced_meanwhile(*_: object) -> None:
        np.save(mask, np.ones((2, 2), "float32"))

    monkeypatch.setattr(denoise_plan, "check_units", replaced_meanwhile)
    job = job_of(source, tmp_path / "out.zarr", "gaussian", {"sigma": 2}, input={"sides": {"mask": str(mask)}})
    assert make_plan(job).identity["sides"] == {"mask": checked}


@pytest.mark.parametrize(
    ("given", "made", "words"),
    [
        ("uint16", "uint8", "whole numbers from 0 to 255, and the input's uint16 goes from 0 to 65535"),
        ("float32", "uint16", "only 0 and 1 are left"),
        ("uint8", "uint16", None),
        ("uint16", "float32", None),
    ],
)
def test_an_output_that_cannot_hold_the_picture_is_noted(
    tmp_path: Path, given: str, made: str, words: str | None
) -> None:
    source = write_zarr(tmp_path / "in.zarr", np.zeros((64, 64), given))
    job = job_of(source, tmp_path / "o.zarr", "gaussian", {"sigma": 1})
    plan = make_plan(replace(job, output=replace(job.output, dtype=made)))
    found = [note for note in plan.notes if note.startswith("output.dtype")]
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_a_noise_level_or_strength_in_counts_is_refused_for_a_picture_that_is_mapped(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", np.zeros((64, 64), "uint16"))
    floats = write_zarr(tmp_path / "floats.zarr", np.zeros((64, 64), "float32"))
    job = job_of(source, tmp_path / "o.zarr", "tv", {"strength": 1.0, "sigma": 150.0})
    with pytest.raises(ConfigError, match=r"sigma is 150. The image's 0 to 65535 .* as 0 to 1.*Write sigma: 0.00229"):
        make_plan(job)
    levels = write_zarr(tmp_path / "sigma.zarr", np.full((64, 64), 0.01, "float32"))
    words = r"strength is 2000. The image's 0 to 65535 .*strength is in units of that range.*Write strength: 0.0305, or sigma: auto"
    for name in ("tv", "nlm"):
        job = job_of(source, tmp_path / "o.zarr", name, {"strength": 2000.0})
        with pytest.raises(ConfigError, match=words):
            make_plan(job)
        make_plan(job_of(floats, tmp_path / "o.zarr", name, {"strength": 2000.0}))
        make_plan(replace(job, input=replace(job.input, sides={"sigma": str(levels)})))
        make_plan(job_of(source, tmp_path / "o.zarr", name, {"strength": 1.5, "sigma": 0.01}))
