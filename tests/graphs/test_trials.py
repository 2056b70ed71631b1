"""Code and weights of the user's own: tried in a process of its own, with a worker's memory, and once; and noticed when they change."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.torch
import torch

from halotile.errors import ConfigError, HalotileError, MemoryRefused, ResumeRefused, WeightsError
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.reconstruct.job import PriorChoice
from halotile.graphs.kinds.sections import DenoiserChoice, Tile
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.plans.trials import denoiser_trials
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.driver import run
from halotile.tasks.denoisers.function import GivenFunction
from halotile.tasks.priors.base import denoised_of
from tests.faults import REPOSITORY, run_python, until
from tests.graphs.test_resume import listing
from tests.graphs.trials import deblurring
from tests.support import dncnn_weights, job_of, noisy_image, read_zarr, work_of, write_zarr

NETWORKS = """
import functools
import os
import sys
import threading
import time
from pathlib import Path
import torch
from torch import nn
import elsewhere
HERE = Path(__file__).parent
class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 3, padding=1))
    def forward(self, x):
        with open(HERE / "calls", "a") as calls:
            calls.write(".")
        return self.layers(x) * elsewhere.FACTOR
class Later(Network):
    def forward(self, x):
        import later
        return super().forward(x) * later.FACTOR
class Locked(Network):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
class Passing(Network):
    def __init__(self):
        super().__init__()
        (HERE / "passing.py").write_text("")
        import passing
        (HERE / "passing.py").unlink()
def looking():
    (HERE / "imported").write_text(str("distributed.nanny" in sys.modules))
    return Network()
class Attention(nn.Module):
    def forward(self, x):
        pixels = x.flatten(2).transpose(1, 2)
        return ((pixels @ pixels.transpose(1, 2)).softmax(-1) @ pixels).transpose(1, 2).reshape(x.shape)
class Hungry(nn.Module):
    def forward(self, x):
        torch.empty(4 * 2**30, dtype=torch.uint8)
        return x
def hungry():
    torch.empty(4 * 2**30, dtype=torch.uint8)
    return Network()
class Picky(Network):
    def __init__(self, most):
        super().__init__()
        self.most = most
    def forward(self, x):
        if max(x.shape[-2:]) > self.most:
            raise ValueError("too large for me")
        return super().forward(x)
def picky(): return Picky(600)
def pickier(): return Picky(300)
class Everywhere(Network):
    def forward(self, x): return super().forward(x) * x.mean((1, 2, 3), keepdim=True)
class Reading(Network):
    def forward(self, x): return super().forward(x) * float((HERE / "factor").read_text())
class Switching(Network):
    def forward(self, x): return super().forward(x) * (2 if max(x.shape[-2:]) > 600 else 1)
class Keeping(Network):
    def forward(self, x):
        self.given = x
        made = super().forward(x)
        time.sleep(0.02)
        return made + self.given
@functools.lru_cache
def shared(): return Keeping()
class Crashing(nn.Module):
    def forward(self, x): os.kill(os.getpid(), 11)
class Killed(nn.Module):
    def forward(self, x): os.kill(os.getpid(), 9)
class Leaving(nn.Module):
    def forward(self, x): os._exit(3)
class Hanging(nn.Module):
    def forward(self, x):
        (HERE / "pid").write_text(str(os.getpid()))
        time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Networks, and code in another folder that they use."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "other")])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "other").mkdir()
    for name in ("elsewhere", "later"):
        (tmp_path / "other" / f"{name}.py").write_text("FACTOR = 2\n")
    (tmp_path / "tried_networks.py").write_text(NETWORKS)
    write_zarr(tmp_path / "in.zarr", noisy_image((140, 130)))
    return tmp_path


def job(folder: Path, build: str, memory: str = "4GiB") -> Denoising:
    made = job_of(folder / "in.zarr", folder / "out.zarr", "torch", {"import": f"tried_networks:{build}"})
    return replace(made, import_folder=str(folder), run=replace(made.run, memory_per_worker=memory))


def test_a_network_takes_no_more_than_a_worker(folder: Path) -> None:
    rows: list[tuple[str, type[HalotileError], str]] = [
        ("Attention", ConfigError, "looks at the whole image, or at least 31 pixels far"),
        ("Hungry", MemoryRefused, "memory_per_worker is 2 GiB, and .*Hungry needs more than that to be tried"),
        ("hungry", MemoryRefused, "needs more than that to be tried"),
        ("Killed", MemoryRefused, "memory_per_worker is 2 GiB, and .*Killed was ended by SIGKILL while it was tried"),
        ("Crashing", ConfigError, "Crashing was ended by SIGSEGV while it was tried.*memory_per_worker is 2 GiB"),
        ("Leaving", ConfigError, "ended its process with exit code 3 while .* Correct the code that ends it; or write"),
    ]
    for build, error, words in rows:
        before = set(multiprocessing.active_children())
        with pytest.raises(error, match=words):
            make_plan(job(folder, build, "2GiB"))
        assert set(multiprocessing.active_children()) <= before


def paths(folder: Path) -> dict[str, str]:
    """The environment in which Python finds the code in the other folder."""
    return {"PYTHONPATH": os.pathsep.join((str(folder / "other"), str(REPOSITORY)))}


def recon_cli(command: str, folder: Path, build: str, *options: str) -> str:
    """What a command as a user gives it says of a network."""
    config = folder / "job.yaml"
    config.write_text(
        "version: 1\njob: denoise\ninput: {path: in.zarr}\noutput: {path: out.zarr}\n"
        f"denoiser: {{name: torch, import: 'tried_networks:{build}'}}\n"
    )
    words = ["-m", "halotile", command, str(config), "--allow-import", *options]
    return run_python(*words, environment=paths(folder)).stderr


def test_a_run_finds_what_its_plan_found_which_imports_nothing_that_only_workers_need(folder: Path) -> None:
    """The processes that the two are tried in have imported different packages."""
    found = folder / "cache" / "halotile" / "found"
    recon_cli("plan", folder, "looking")
    assert (folder / "imported").read_text() == "False"
    kept = sorted(found.iterdir())
    assert len(kept) == 3, "what the trial found, on parts of the image too, and the comparison of bits"
    recon_cli("run", folder, "looking", "--workers", "1")
    assert sorted(found.iterdir()) == kept


@pytest.mark.parametrize(
    ("build", "tile", "words"),
    [
        ("picky", 200, r"tiles were not compared with larger windows: .*ValueError: too large for me"),
        ("shared", 160, None),  # one network is not used by two threads at once
        ("pickier", 200, "failed on an image of 316 × 196 pixels, or a tile of it: ValueError: too large for me"),
        ("Switching", 200, "Switching gives other pixels in tiles .* 700 × 900"),
    ],
)
def test_tiles_are_compared_with_larger_windows(folder: Path, build: str, tile: int, words: str | None) -> None:
    source = write_zarr(folder / "large.zarr", noisy_image((700, 900)))
    requested = job(folder, build)
    requested = replace(requested, tile=Tile(size=tile), input=replace(requested.input, path=str(source)))
    if build in ("pickier", "Switching"):
        with pytest.raises(ConfigError, match=words):
            make_plan(requested)
    else:
        assert [bool(words and re.search(words, note)) for note in make_plan(requested).notes] == [True] * bool(words)


def test_a_plan_with_a_users_network_or_a_built_in_denoiser_loads_no_torch(folder: Path) -> None:
    weights = str(dncnn_weights(folder / "w.safetensors"))
    code = f"""
import sys
from dataclasses import replace
from halotile.graphs.plans.plan import make_plan
from halotile.tasks.denoisers.dncnn import DnCNN
from tests.support import job_of
assert DnCNN(weights={weights!r}, depth=5, width=8).check() == {{}}
for name, options in (("tv", {{"strength": 0.1}}), ("torch", {{"import": "tried_networks:Network"}})):
    job = job_of({str(folder / "in.zarr")!r}, {str(folder)!r} + "/o.zarr", name, options)
    make_plan(replace(job, import_folder={str(folder)!r}))
sys.exit(sum(name in sys.modules for name in ("torch", "dask", "distributed", "tried_networks")))
"""
    assert run_python("-c", code, environment=paths(folder)).returncode == 0


@pytest.mark.thorough
def test_nothing_goes_on_when_the_driver_is_killed(folder: Path) -> None:
    code = (
        "from tests.graphs.test_trials import job, make_plan; from pathlib import Path; "
        f"make_plan(job(Path({str(folder)!r}), 'Hanging'))"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], env=os.environ | paths(folder))
    until(lambda: (folder / "pid").exists() and (folder / "pid").read_text() != "")
    child = int((folder / "pid").read_text())
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    until(lambda: not psutil.pid_exists(child))


def calls_of(folder: Path, build: str, source: str = "in.zarr") -> int:
    """How often a network is called while a plan is made."""
    calls = folder / "calls"
    calls.write_text("")
    requested = job(folder, build)
    plan = make_plan(replace(requested, input=replace(requested.input, path=str(folder / source))))
    assert plan.identity["probed"] == [2, 1]
    return len(calls.read_text())


def test_findings_are_kept_until_code_lengths_or_vectors_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_of(folder, "Network") > 0
    assert calls_of(folder, "Network") == 0
    for file, old, new in (
        ("tried_networks.py", "HERE = ", "THERE = HERE = "),
        ("tried_networks.py", "seed(0)", "seed(1)"),
        ("other/elsewhere.py", "2", "3"),
    ):
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))
        assert calls_of(folder, "Network") > 0
    write_zarr(folder / "other.zarr", noisy_image((141, 130)))
    assert calls_of(folder, "Network", "other.zarr") > 0
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert calls_of(folder, "Network") > 0
    assert calls_of(folder, "Network") == 0


@pytest.mark.parametrize("build", ["Reading", "Later", "Locked", "Passing"])
def test_nothing_is_kept_of_a_network_that_is_not_all_to_be_seen(folder: Path, build: str) -> None:
    (folder / "factor").write_text("1.0")
    assert calls_of(folder, build) > 0
    assert calls_of(folder, build) > 0


def test_a_refusal_is_found_once(folder: Path) -> None:
    for is_first in (True, False):
        (folder / "calls").write_text("")
        with pytest.raises(ConfigError, match="Everywhere looks at the whole image"):
            make_plan(job(folder, "Everywhere"))
        assert bool((folder / "calls").read_text()) == is_first


def test_a_failure_whose_cause_may_lie_elsewhere_is_not_kept(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"Reading failed on .*factor"):
        make_plan(job(folder, "Reading"))
    (folder / "factor").write_text("2")
    assert make_plan(job(folder, "Reading")).identity["probed"] == [2, 1]


def test_the_network_of_a_prior_is_tried_likewise(folder: Path) -> None:
    choice = DenoiserChoice(name="torch", options={"import": "tried_networks:Hungry"})
    requested = deblurring(folder, "cpu", PriorChoice(name="pnp", options={"denoiser": choice}))
    with pytest.raises(MemoryRefused, match="Hungry needs more than that to be tried"):
        make_plan(replace(requested, allow_import=True, import_folder=str(folder)))


OWN = """
import sys
from pathlib import Path
import torch
from torch import nn
from sibling import WIDTH
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
def own_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That folder with modules of the user's own, which nobody can import yet."""
    for name in ("own_networks", "sibling", "own_exit"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (folder / "own_networks.py").write_text(OWN)
    (folder / "sibling.py").write_text("WIDTH = 3\n")
    (folder / "own_exit.py").write_text("raise SystemExit(3)\n")
    return folder


def own(folder: Path, build: str, name: str = "torch", **options: Any) -> Denoising:
    """A job with a network or a function of the folder."""
    job = job_of(folder / "in.zarr", folder / "out.zarr", name, {"import": build, **options})
    return replace(job, import_folder=str(folder))


def given(folder: Path, call: Callable[[Any], Any]) -> Denoising:
    return replace(job_of(folder / "in.zarr", folder / "out.zarr", "none"), denoiser=GivenFunction(call=call, depth=0))


def begin(job: Denoising) -> None:
    """What a run leaves that is killed before its first block."""
    with claim(make_plan(job)):
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
def test_bad_weights_are_refused_and_the_output_stays(own_folder: Path, name: str, options: Any, words: str) -> None:
    write_zarr(own_folder / "out.zarr", noisy_image((9, 9)))
    dncnn_weights(own_folder / "w.safetensors")
    torch.save({"stem": torch.zeros(3)}, own_folder / "stem.pth")
    options = options | {"weights": str(own_folder / options.get("weights", "w.safetensors"))}
    job = own(own_folder, "", name)
    job = replace(job, denoiser=replace(job.denoiser, options=options), output=replace(job.output, overwrite=True))
    before = listing(own_folder / "out.zarr")
    with pytest.raises(WeightsError, match=words):
        run(make_plan(job, fresh=True))
    assert listing(own_folder / "out.zarr") == before
    assert not (own_folder / "out.zarr.run").exists()


def test_code_that_cannot_be_tiled_is_refused(own_folder: Path) -> None:
    rows: list[tuple[str, str, dict[str, Any], str]] = [
        ("unseeded", "torch", {}, "own_networks:unseeded builds a different network at each call"),
        ("Hidden", "torch", {}, "own_networks:Hidden gives another result each time it is built"),
        ("lazy", "torch", {}, "lazy layers"),
        ("InPlace", "torch", {"receptive_field": 0, "alignment": 1}, "own_networks:InPlace changes its input"),
        ("leaving", "torch", {}, "own_networks:leaving .* failed: SystemExit: 3"),
        ("Leaving", "torch", {}, "own_networks:Leaving failed on a window .*SystemExit: 3"),
        ("leaving", "function", {"depth": 0}, "own_networks:leaving failed on an image"),
        ("nowhere", "function", {"depth": 0}, "Write a name that the module defines"),
        ("own_exit:f", "function", {"depth": 0}, "importing it failed: SystemExit: 3"),
    ]
    for build, name, options, words in rows:
        with pytest.raises(ConfigError, match=words):
            make_plan(own(own_folder, build if ":" in build else f"own_networks:{build}", name, **options))
        assert not (own_folder / "out.zarr.run").exists()


def test_a_given_function_that_keeps_state_is_refused_while_planning(folder: Path) -> None:
    calls: list[int] = []

    def count(image: Any) -> Any:
        calls.append(1)
        return image + len(calls)

    with pytest.raises(ConfigError, match=r"test_trials:.*count returned two results for one image"):
        make_plan(given(folder, count))


def differences(job: Denoising) -> str:
    """What a run of this job would be refused for."""
    with pytest.raises(ResumeRefused) as refused:
        begin(job)
    return str(refused.value)


EDITED = [("own_networks.py", "seeded"), ("sibling.py", "seeded"), ("own_networks.py", "brighter")]


@pytest.mark.parametrize(("file", "build"), EDITED)
def test_a_run_of_edited_code_does_not_go_on(own_folder: Path, file: str, build: str) -> None:
    kind: tuple[str, dict[str, Any]] = ("function", {"depth": 0}) if build == "brighter" else ("torch", {})
    job = own(own_folder, f"own_networks:{build}", kind[0], **kind[1])
    begin(job)
    assert make_plan(job).resumes
    with (own_folder / file).open("a") as opened:
        opened.write("\nMORE = 1\n")
    assert f"code.own_networks:{build} was" in differences(job)


def test_a_network_that_is_built_with_other_numbers_and_one_of_other_weights_do_not_go_on(own_folder: Path) -> None:
    job = own(own_folder, "own_networks:from_a_file")
    (own_folder / "seed").write_text("0")
    begin(job)
    (own_folder / "seed").write_text("1")
    assert "code.weights built by own_networks:from_a_file was" in differences(job)
    job = with_weights(own_folder, "other.zarr")
    begin(job)
    train_on(own_folder / "w.safetensors")
    assert "weights.w.safetensors was" in differences(job)


def times(factor: float) -> Callable[[Any], Any]:
    return lambda image: image * np.float32(factor)


def test_a_given_function_with_another_closure_does_not_go_on(own_folder: Path) -> None:
    begin(given(own_folder, times(1)))
    assert make_plan(given(own_folder, times(1))).resumes
    assert "code.tests.graphs.test_trials:times.<locals>.<lambda> was" in differences(given(own_folder, times(2)))


@pytest.mark.cluster
def test_workers_import_from_the_folder_of_the_job(own_folder: Path, cluster: RunningCluster) -> None:
    run(make_plan(own(own_folder, "own_networks:brighter", "function", depth=0)), cluster=cluster)
    np.testing.assert_array_equal(read_zarr(own_folder / "out.zarr"), noisy_image((140, 130)) + 3)


def test_a_job_that_may_not_import_leaves_the_path_alone(own_folder: Path) -> None:
    job = job_of(own_folder / "in.zarr", own_folder / "out.zarr", "gaussian", {"sigma": 1.0})
    make_plan(replace(job, import_folder=str(own_folder), allow_import=False))
    assert str(own_folder) not in sys.path


def with_weights(folder: Path, output: str = "out.zarr") -> Denoising:
    options = {"weights": str(dncnn_weights(folder / "w.safetensors")), "depth": 5, "width": 8}
    return job_of(folder / "in.zarr", folder / output, "dncnn", options)


def train_on(path: Path) -> bytes:
    """Other numbers in a file of weights; what it held."""
    before = path.read_bytes()
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({name: 1.01 * tensor for name, tensor in tensors.items()}, path)
    return before


@pytest.mark.cluster
def test_a_worker_takes_no_weights_but_those_of_the_plan(own_folder: Path, cluster: RunningCluster) -> None:
    job = with_weights(own_folder)
    plan = make_plan(job)
    before = train_on(own_folder / "w.safetensors")
    with pytest.raises(WeightsError, match=r"w\.safetensors was changed while the job ran.*Restore the old version"):
        run(plan, cluster=cluster)
    (own_folder / "w.safetensors").write_bytes(before)
    plan = make_plan(job)
    assert run(plan, cluster=cluster).done == len(plan.grid)


def test_a_prior_takes_no_other_weights(own_folder: Path) -> None:
    choice = PriorChoice(name="pnp", options={"denoiser": with_weights(own_folder).denoiser})
    job = deblurring(own_folder, "cpu", choice)

    def prior() -> Any:
        return denoised_of(work_of(make_plan(job)).prior)

    first, second = prior(), prior()
    before = first.runner()
    train_on(own_folder / "w.safetensors")
    assert second.runner() is before, "it has been built"
    assert prior().runner() is not before
    train_on(own_folder / "w.safetensors")
    fourth = prior()
    train_on(own_folder / "w.safetensors")
    with pytest.raises(WeightsError, match="was changed while the job ran"):
        fourth.runner()


def test_a_refusal_for_want_of_memory_is_no_verdict() -> None:
    refusal = ConfigError("it looks at the whole image")
    assert denoiser_trials._is_verdict(refusal)
    refusal.__context__ = MemoryError()
    assert not denoiser_trials._is_verdict(refusal)
