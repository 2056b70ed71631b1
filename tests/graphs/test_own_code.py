"""Code and weights of the user's own: tried while a plan is made, and noticed when they change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from halotile.errors import ConfigError, ResumeRefused, WeightsError
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.reconstruct.job import PriorChoice
from halotile.graphs.kinds.sections import Input, Output
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.driver import run
from halotile.tasks.denoisers.function import GivenFunction
from halotile.tasks.priors.base import denoised_of
from tests.graphs.test_refusals import listing
from tests.graphs.trials import deblurring
from tests.support import dncnn_weights, job_of, noisy_image, read_zarr, work_of, write_zarr

NETWORKS = """
import sys
from pathlib import Path
import torch
from torch import nn
from sibling import WIDTH
class Impure(nn.Module):
    calls = 0
    def forward(self, x):
        self.calls += 1
        return x + self.calls
class Noisy(nn.Module):
    def forward(self, x): return x + torch.randn_like(x)
class InPlace(nn.Module):
    def forward(self, x): return x.mul_(0.5)
class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.numbers = [torch.rand(1)]
    def forward(self, x): return x * self.numbers[0]
class Leaving(nn.Module):
    def forward(self, x): sys.exit(3)
def unseeded(): return nn.Conv2d(1, 1, WIDTH, padding=1)
def seeded(seed=0):
    torch.manual_seed(seed)
    return unseeded()
def from_a_file(): return seeded(int(Path(__file__).with_name("seed").read_text()))
def lazy(): return nn.LazyConv2d(1, 3, padding=1)
def leaving(): sys.exit(3)
def brighter(image): return image + WIDTH
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an image and two modules of the user's own, which nobody can import yet."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    for name in ("own_networks", "sibling", "own_exit"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "own_networks.py").write_text(NETWORKS)
    (tmp_path / "sibling.py").write_text("WIDTH = 3\n")
    (tmp_path / "own_exit.py").write_text("raise SystemExit(3)\n")
    write_zarr(tmp_path / "in.zarr", noisy_image((140, 130)))
    return tmp_path


def own(folder: Path, build: str, name: str = "torch", **options: Any) -> Denoising:
    """A job with a network or a function of the folder."""
    job = job_of(folder / "in.zarr", folder / "out.zarr", name, {"import": build, **options})
    return replace(job, import_folder=str(folder))


def given(folder: Path, call: Callable[[Any], Any]) -> Denoising:
    return Denoising(
        input=Input(path=str(folder / "in.zarr")),
        output=Output(path=str(folder / "out.zarr"), shard=128, chunk=32),
        denoiser=GivenFunction(call=call, depth=0),
    )


def begin(job: Denoising) -> None:
    """What a run leaves that is killed before its first block."""
    plan = make_plan(job)
    with claim(plan):
        pass


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("dncnn", {"depth": 5, "width": 8, "sha256": "0" * 64}, "sha256 is 0000"),
        ("dncnn", {"depth": 5, "width": 8, "weights": "stem.pth"}, "does not fit .*unexpected stem"),
        ("torch", {"import": "own_networks:seeded", "weights": "stem.pth"}, "does not fit .*unexpected stem"),
        ("torch", {"import": "own_networks:seeded", "weights": "nowhere.safetensors"}, "cannot be opened"),
    ],
)
def test_bad_weights_are_refused_and_the_output_stays(
    folder: Path, name: str, options: dict[str, Any], words: str
) -> None:
    write_zarr(folder / "out.zarr", noisy_image((9, 9)))
    dncnn_weights(folder / "w.safetensors")
    torch.save({"stem": torch.zeros(3)}, folder / "stem.pth")
    options = options | {"weights": str(folder / options.get("weights", "w.safetensors"))}
    job = own(folder, "", name)
    job = replace(job, denoiser=replace(job.denoiser, options=options), output=replace(job.output, overwrite=True))
    before = listing(folder / "out.zarr")
    with pytest.raises(WeightsError, match=words):
        run(make_plan(job, fresh=True))
    assert listing(folder / "out.zarr") == before
    assert not (folder / "out.zarr.run").exists()


@pytest.mark.parametrize(
    ("build", "name", "options", "words"),
    [
        ("unseeded", "torch", {}, "own_networks:unseeded builds a different network at each call"),
        ("Hidden", "torch", {}, "own_networks:Hidden gives another result each time it is built"),
        ("lazy", "torch", {}, "lazy layers"),
        ("Impure", "torch", {}, "own_networks:Impure returned two results for one tile"),
        ("Noisy", "torch", {}, "own_networks:Noisy returned two results for one tile"),
        ("InPlace", "torch", {}, "changes its input"),
        ("InPlace", "torch", {"receptive_field": 0, "alignment": 1}, "own_networks:InPlace changes its input"),
        ("leaving", "torch", {}, "own_networks:leaving .* failed: SystemExit: 3"),
        ("Leaving", "torch", {}, "own_networks:Leaving failed on a window .*SystemExit: 3"),
        ("leaving", "function", {"depth": 0}, "own_networks:leaving failed on an image"),
        ("nowhere", "function", {"depth": 0}, "Write a name that the module defines"),
        ("own_exit:f", "function", {"depth": 0}, "importing it failed: SystemExit: 3"),
    ],
)
def test_code_that_cannot_be_tiled_is_refused(
    folder: Path, build: str, name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(own(folder, build if ":" in build else f"own_networks:{build}", name, **options))
    assert not (folder / "out.zarr.run").exists()


def test_a_given_function_that_keeps_state_is_refused_while_planning(folder: Path) -> None:
    calls: list[int] = []

    def count(image: Any) -> Any:
        calls.append(1)
        return image + len(calls)

    with pytest.raises(ConfigError, match=r"test_own_code:.*count returned two results for one image"):
        make_plan(given(folder, count))


def test_a_network_without_seed_may_have_its_weights_from_a_file(folder: Path) -> None:
    torch.save(torch.nn.Conv2d(1, 1, 3).state_dict(), folder / "w.pth")
    make_plan(own(folder, "own_networks:unseeded", weights=str(folder / "w.pth")))


def differences(job: Denoising) -> str:
    """What a run of this job would be refused for."""
    plan = make_plan(job)
    with pytest.raises(ResumeRefused) as refused, claim(plan):
        pass
    return str(refused.value)


@pytest.mark.parametrize(
    ("file", "build", "name", "options"),
    [
        ("own_networks.py", "seeded", "torch", {}),
        ("sibling.py", "seeded", "torch", {}),
        ("own_networks.py", "brighter", "function", {"depth": 0}),
    ],
)
def test_a_run_of_edited_code_does_not_go_on(
    folder: Path, file: str, build: str, name: str, options: dict[str, Any]
) -> None:
    job = own(folder, f"own_networks:{build}", name, **options)
    begin(job)
    assert make_plan(job).resumes
    with (folder / file).open("a") as opened:
        opened.write("\nMORE = 1\n")
    assert f"code.own_networks:{build} was" in differences(job)


def test_a_network_that_is_built_with_other_numbers_and_one_of_other_weights_do_not_go_on(folder: Path) -> None:
    job = own(folder, "own_networks:from_a_file")
    (folder / "seed").write_text("0")
    begin(job)
    (folder / "seed").write_text("1")
    assert "code.weights built by own_networks:from_a_file was" in differences(job)
    job = replace(with_weights(folder), output=replace(job.output, path=str(folder / "other.zarr")))
    begin(job)
    train_on(folder / "w.safetensors")
    assert "weights.w.safetensors was" in differences(job)


def times(factor: float) -> Callable[[Any], Any]:
    return lambda image: image * np.float32(factor)


def test_a_given_function_with_another_closure_does_not_go_on(folder: Path) -> None:
    begin(given(folder, times(1)))
    assert make_plan(given(folder, times(1))).resumes
    assert "code.tests.graphs.test_own_code:times.<locals>.<lambda> was" in differences(given(folder, times(2)))


@pytest.mark.cluster
def test_workers_import_from_the_folder_of_the_job(folder: Path, cluster: RunningCluster) -> None:
    run(make_plan(own(folder, "own_networks:brighter", "function", depth=0)), cluster=cluster)
    np.testing.assert_array_equal(read_zarr(folder / "out.zarr"), noisy_image((140, 130)) + 3)


def test_a_job_that_may_not_import_leaves_the_path_alone(folder: Path) -> None:
    job = job_of(folder / "in.zarr", folder / "out.zarr", "gaussian", {"sigma": 1.0})
    make_plan(replace(job, import_folder=str(folder), allow_import=False))
    assert str(folder) not in sys.path


def with_weights(folder: Path) -> Denoising:
    options = {"weights": str(dncnn_weights(folder / "w.safetensors")), "depth": 5, "width": 8}
    return job_of(folder / "in.zarr", folder / "out.zarr", "dncnn", options)


def train_on(path: Path) -> bytes:
    """Other numbers in a file of weights; what it held."""
    before = path.read_bytes()
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({name: 1.01 * tensor for name, tensor in tensors.items()}, path)
    return before


@pytest.mark.cluster
def test_a_worker_takes_no_weights_but_those_of_the_plan(folder: Path, cluster: RunningCluster) -> None:
    job = with_weights(folder)
    plan = make_plan(job)
    before = train_on(folder / "w.safetensors")
    with pytest.raises(WeightsError, match=r"w\.safetensors was changed while the job ran.*Restore the old version"):
        run(plan, cluster=cluster)
    (folder / "w.safetensors").write_bytes(before)
    plan = make_plan(job)
    assert run(plan, cluster=cluster).done == len(plan.grid)


def test_a_prior_takes_no_other_weights(folder: Path) -> None:
    job = deblurring(folder, "cpu", PriorChoice(name="pnp", options={"denoiser": with_weights(folder).denoiser}))

    def prior() -> Any:
        return denoised_of(work_of(make_plan(job)).prior)

    first, second = prior(), prior()
    before = first.runner()
    train_on(folder / "w.safetensors")
    assert second.runner() is before, "it has been built"
    assert prior().runner() is not before
    train_on(folder / "w.safetensors")
    fourth = prior()
    train_on(folder / "w.safetensors")
    with pytest.raises(WeightsError, match="was changed while the job ran"):
        fourth.runner()


def test_a_worker_takes_no_code_but_that_of_the_plan(folder: Path) -> None:
    plan = make_plan(own(folder, "own_networks:seeded"))
    with (folder / "sibling.py").open("a") as code:
        code.write("# edited\n")
    sys.path.insert(0, str(folder))
    with pytest.raises(ConfigError, match="the code of own_networks:seeded was changed while the job ran"):
        work_of(plan).task.stages()
