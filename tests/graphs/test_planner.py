"""Plans: what a denoiser needs is found out, what cannot be is refused in words, and nothing is touched."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halotile.errors import ConfigError, HalotileError, InputError, OutputRefused, UnknownName
from halotile.graphs.jobs.denoise import plan as denoise_plan
from halotile.graphs.plans.plan import make_plan
from halotile.storage.arrays import open_source
from tests.support import dncnn_weights, job_of, noisy_image, run_inline, whole_picture, work_of, write_zarr

NETWORK = "tests.networks:"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_zarr(tmp_path / "in.zarr", noisy_image((300, 260)))


def network(name: str, **more: Any) -> dict[str, Any]:
    return {"import": NETWORK + name, **more}


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
    "bad memory": ({"run": {"memory_per_worker": "lots"}}, ValueError, "is not a size"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused_and_nothing_touched(case: str, source: Path, tmp_path: Path) -> None:
    changes, error, said = REFUSALS[case]
    values: dict[str, Any] = {"source": source, "name": "tv", "options": {"strength": 0.1}} | changes
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=said):
        make_plan(
            job_of(Path(values.pop("source")), tmp_path / "o.zarr", values.pop("name"), values.pop("options"), **values)
        )
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("where", ["in.zarr", "in.zarr/c", "."])
def test_an_output_that_overlaps_the_input_is_refused(where: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputRefused, match=r"elsewhere|another path"):
        make_plan(job_of(source, tmp_path / where, "tv", {"strength": 0.1}))


def test_seams_may_be_allowed_and_are_noted(source: Path, tmp_path: Path) -> None:
    plan = make_plan(job_of(source, tmp_path / "o.zarr", "tv", {"strength": 0.1}, tile={"depth": 2, "seams": "allow"}))
    assert work_of(plan).task.tiling.depth == ((2, 2), (2, 2))
    assert "seams will show" in plan.notes[0]


def test_a_users_code_runs_only_when_it_is_allowed(source: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    job = job_of(source, tmp_path / "o.zarr", "torch", network("convolutions"))
    with pytest.raises(ConfigError, match="--allow-import"):
        make_plan(replace(job, allow_import=False))


def test_a_users_network_is_probed(source: Path, tmp_path: Path) -> None:
    plan = make_plan(job_of(source, tmp_path / "o.zarr", "torch", network("convolutions", options={"layers": 4})))
    assert work_of(plan).task.tiling.depth == ((4, 4), (4, 4))
    assert plan.summary()["depth_from"] == "probed"


@pytest.mark.thorough
def test_a_strided_network_is_aligned_and_exact(tmp_path: Path) -> None:
    pixels = noisy_image((501, 470))
    source = write_zarr(tmp_path / "in.zarr", pixels)
    job = job_of(source, tmp_path / "o.zarr", "torch", network("unet"), tile={"size": 150})
    plan = make_plan(job)
    assert work_of(plan).task.tiling.align == (4, 4)
    assert np.array_equal(run_inline(job), whole_picture(job, pixels, 0))


def test_a_strided_network_that_loses_the_ragged_edge_is_refused(tmp_path: Path) -> None:
    ragged = write_zarr(tmp_path / "ragged.zarr", noisy_image((302, 260)))
    with pytest.raises(ConfigError, match=r"total stride of 4, and the image's sides \[302, 260\]"):
        make_plan(job_of(ragged, tmp_path / "o.zarr", "torch", network("cropping")))
    pixels = noisy_image((300, 260))
    even = write_zarr(tmp_path / "even.zarr", pixels)
    job = job_of(even, tmp_path / "o.zarr", "torch", network("cropping"))
    assert np.array_equal(run_inline(job), whole_picture(job, pixels, 0))


def test_a_network_that_looks_everywhere_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="whole image"):
        make_plan(job_of(source, tmp_path / "o.zarr", "torch", network("whole_norm")))


@pytest.mark.thorough
def test_super_resolution_doubles_the_output(tmp_path: Path) -> None:
    pixels = noisy_image((301, 270))
    job = job_of(
        write_zarr(tmp_path / "in.zarr", pixels), tmp_path / "o.zarr", "torch", network("doubler", scale=2), shard=128
    )
    got = run_inline(job)
    assert got.shape == (602, 540)
    assert make_plan(job).grid.block[0] % 64 == 0
    import torch

    from tests.networks import doubler

    model = doubler().to(memory_format=torch.channels_last)
    with torch.inference_mode():
        batch = torch.from_numpy(pixels)[None, None].contiguous(memory_format=torch.channels_last)
        assert np.array_equal(got, model(batch)[0, 0].numpy())


def test_new_channels_become_an_axis(tmp_path: Path) -> None:
    pixels = noisy_image((200, 190))
    job = job_of(
        write_zarr(tmp_path / "in.zarr", pixels), tmp_path / "o.zarr", "torch", network("colouring", channels=(1, 3))
    )
    plan = make_plan(job)
    assert plan.layout.axes == ("c", "y", "x")
    assert run_inline(job).shape == (3, 200, 190)


def test_channels_that_do_not_match_are_refused(tmp_path: Path) -> None:
    weights = str(dncnn_weights(tmp_path / "w.safetensors", channels=(3, 3)))
    options = {"weights": weights, "depth": 5, "width": 8, "channels": (3, 3)}
    grey = write_zarr(tmp_path / "grey.zarr", noisy_image((200, 190)))
    with pytest.raises(InputError, match="takes 3 channels, the image has axes 'yx'"):
        make_plan(job_of(grey, tmp_path / "o.zarr", "dncnn", options))
    four = write_zarr(tmp_path / "four.zarr", noisy_image((4, 200, 190)), axes="cyx")
    with pytest.raises(InputError, match="takes 3 channels, the image has 4"):
        make_plan(job_of(four, tmp_path / "o.zarr", "dncnn", options))
    three = write_zarr(tmp_path / "three.zarr", noisy_image((200, 190, 3)), axes="yxc")
    job = job_of(three, tmp_path / "o.zarr", "dncnn", options)
    assert run_inline(job).shape == (3, 200, 190), "in the order of OME-Zarr"


def test_the_noise_level_is_estimated_once_for_the_whole_picture(source: Path, tmp_path: Path) -> None:
    plan = make_plan(job_of(source, tmp_path / "o.zarr", "tv", {"strength": 1.0, "sigma": "auto"}))
    assert 0.05 < plan.identity["noise_level"] < 0.15
    assert work_of(plan).task.denoiser.sigma == plan.identity["noise_level"]


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


def test_masked_pixels_stay_as_they_were(tmp_path: Path) -> None:
    pixels = noisy_image((2, 300, 260), "uint16")
    mask = np.zeros((300, 260), "uint8")
    mask[50:200, 100:170] = 1
    source = write_zarr(tmp_path / "in.zarr", pixels, axes="tyx")
    sides = {"mask": str(write_zarr(tmp_path / "mask.zarr", mask))}
    masked = run_inline(job_of(source, tmp_path / "m.zarr", "gaussian", {"sigma": 2}, input={"sides": sides}))
    plain = run_inline(job_of(source, tmp_path / "o.zarr", "gaussian", {"sigma": 2}))
    assert np.array_equal(masked[:, mask == 0], pixels[:, mask == 0])
    inside = (slice(None), slice(58, 192), slice(108, 162))
    assert np.array_equal(masked[inside], plain[inside])


def test_a_plan_with_a_built_in_denoiser_loads_no_torch(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from halotile.graphs.kinds.sections import *; from halotile.graphs.plans.plan import make_plan; "
        "from halotile.graphs.jobs.denoise.job import Denoising; "
        f"make_plan(Denoising(input=Input(path={str(source)!r}), output=Output(path={str(tmp_path / 'o.zarr')!r}), "
        "denoiser=DenoiserChoice(name='tv', options={'strength': 0.1}))); "
        "sys.exit(sum(name in sys.modules for name in ('torch', 'dask', 'distributed')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("folder", ["a.txt", "loop"])
def test_an_output_under_what_is_no_folder_is_refused(source: Path, tmp_path: Path, folder: str) -> None:
    (tmp_path / "a.txt").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OutputRefused, match="so nothing can be made in it"):
        make_plan(job_of(source, tmp_path / folder / "o.zarr", "gaussian", {"sigma": 1}))


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


def test_a_noise_level_in_counts_is_refused_for_a_picture_that_is_mapped(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", np.zeros((64, 64), "uint16"))
    job = job_of(source, tmp_path / "o.zarr", "tv", {"strength": 1.0, "sigma": 150.0})
    with pytest.raises(ConfigError, match=r"sigma is 150. The image's 0 to 65535 .* as 0 to 1.*Write sigma: 0.00229"):
        make_plan(job)


@pytest.mark.parametrize("name", ["tv", "nlm"])
def test_so_is_a_strength_that_stands_in_the_place_of_one(tmp_path: Path, name: str) -> None:
    source = write_zarr(tmp_path / "in.zarr", np.zeros((64, 64), "uint16"))
    floats = write_zarr(tmp_path / "floats.zarr", np.zeros((64, 64), "float32"))
    job = job_of(source, tmp_path / "o.zarr", name, {"strength": 2000.0})
    with pytest.raises(
        ConfigError,
        match=r"strength is 2000. The image's 0 to 65535 .*strength is in units of that range.*Write strength: 0.0305, or sigma: auto",
    ):
        make_plan(job)
    make_plan(job_of(floats, tmp_path / "o.zarr", name, {"strength": 2000.0}))
    levels = write_zarr(tmp_path / "sigma.zarr", np.full((64, 64), 0.01, "float32"))
    given = replace(job, input=replace(job.input, sides={"sigma": str(levels)}))
    make_plan(given)
    make_plan(job_of(source, tmp_path / "o.zarr", name, {"strength": 1.5, "sigma": 0.01}))
