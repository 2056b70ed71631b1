"""Names become modules or plug-ins, nothing is imported before it is used, and a kind of job from a package of its own gets everything that ours have."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pickle
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray
from scipy.ndimage import correlate1d

from halotile import errors, registry
from halotile.__main__ import _begin_early
from halotile.errors import ConfigError, UnknownName
from halotile.graphs.clusters.workers import fork_server
from halotile.storage.run_directory.journal import Journal
from tests.cli.engine import ask
from tests.faults import until
from tests.support import read_zarr


def test_a_file_is_found_by_its_name() -> None:
    for name in ("bioio", "hdf5", "jpeg", "npy", "ome", "png", "tiff", "zarr"):
        assert name in registry.names("formats")
        assert registry.find("formats", name).__name__ == f"halotile.storage.formats.{name}"


def test_names_are_the_files_but_base_and_private_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tasks" / "lenses"
    folder.mkdir(parents=True)
    for name in ("__init__", "base", "_shared", "wide", "tele"):
        (folder / f"{name}.py").write_text("raise RuntimeError('listing must not import')\n")
    monkeypatch.setattr(registry, "_PACKAGE", tmp_path)
    _forget()
    assert registry.names("lenses") == ["tele", "wide"]
    _forget()


def _forget() -> None:
    registry._built_in.cache_clear()
    registry._layer_of.cache_clear()


def test_an_unknown_name_or_kind_is_answered_with_the_nearest_and_all() -> None:
    with pytest.raises(UnknownName, match=r"format 'tif' .*Did you mean 'tiff'\?.*npy.*zarr") as caught:
        registry.find("formats", "tif")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    for name in ("base", "_private", "__init__", "../arrays", "", "os.path"):
        with pytest.raises(UnknownName):
            registry.find("formats", name)
    with pytest.raises(UnknownName, match="Did you mean 'denoisers'"):
        registry.names("denoiser")


def test_no_error_has_credentials_in_it() -> None:
    for kind in (value for value in vars(errors).values() if isinstance(value, type)):
        error = pickle.loads(pickle.dumps(kind("s3://me:sesame@b/a: no answer from https://h/a?sig=sesame")))
        assert str(error) == "s3://b/a: no answer from https://h/a"
        assert "sesame" not in repr(error)


def _offer(monkeypatch: pytest.MonkeyPatch, **offers: str) -> None:
    points = [importlib.metadata.EntryPoint(n.rstrip("_"), v, "halotile.formats") for n, v in offers.items()]
    monkeypatch.setattr(registry, "_plug_ins", lambda kind: points)


def test_an_entry_point_is_found_but_replaces_no_built_in_and_a_broken_or_ambiguous_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _offer(monkeypatch, mine="json:loads", npy="json:loads")
    assert "mine" in registry.names("formats")
    assert registry.find("formats", "mine") is json.loads
    assert registry.find("formats", "npy").__name__ == "halotile.storage.formats.npy"
    _offer(monkeypatch, mine="json:loads", mine_="json:dumps")
    with pytest.raises(ConfigError, match="json:dumps and json:loads"):
        registry.find("formats", "mine")
    for value in ("no_such_package:x", "json:no_such_name"):
        _offer(monkeypatch, mine=value)
        with pytest.raises(ConfigError, match=value):
            registry.find("formats", "mine")


HEAVY = "numpy zarr torch dask distributed halotile.storage"
FORMATS = "zarr tifffile h5py numcodecs obstore"
DENOISERS = "gaussian, median, tv, nlm, dncnn, torch as own, function"
TRAINING = """
import torch
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.groups.training.fit import fit
from halotile.tasks.training.trainer import AdamOptimizer
layer, image = torch.nn.Conv2d(1, 1, 3), torch.ones(1, 1, 5, 5)
adam = AdamOptimizer(layer.parameters(), lambda step: 0.1)
fit(TorchGroup(), layer, lambda step, slot: image, lambda f, x: f(x).square().mean(), adam, steps=2)
from halotile.tasks.convolution.activations import SteadyNetwork
SteadyNetwork(torch.nn.Sigmoid())(image)
"""
DECLARED = f"""
import halotile.tasks.noise.estimate, halotile.tasks.denoisers.common.weights, halotile.tasks.trials.probe
from halotile.tasks.denoisers import {DENOISERS}
assert median.DENOISER(size=3).receptive_field() == 1
from halotile.tasks.operators.deepinv import DeepInv
DeepInv(physics="Blur", reach_=4).kind
"""


@pytest.mark.parametrize(
    ("code", "packages"),
    [
        ("import halotile", HEAVY),
        ("from halotile import registry as r; r.names('formats'); r.names('denoisers')", HEAVY),
        ("import halotile.storage.arrays", FORMATS),
        (DECLARED, "torch deepinv"),
        (TRAINING, "torch._dynamo"),  # the compiler would take a second and 150 MB in each worker
    ],
    ids=["package", "names", "formats", "declarations", "networks"],
)
def test_nothing_heavy_is_imported_before_it_is_used(code: str, packages: str) -> None:
    code += f"\nimport sys; print([name for name in {packages.split()} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "text", "scheduler", "expected"),
    [
        ("job.yaml --workers 4", "job: denoise", "", ["forks"]),
        ("job.yaml --workers 4", "cluster: {kind: slurm}", "", []),
        ("job.yaml --cluster slurm", "job: denoise", "", []),
        ("job.yaml --set cluster.kind=slurm", "job: denoise", "", []),
        ("job.yaml --dry-run", "job: denoise", "", []),
        ("other.yaml", "job: denoise", "", []),
        ("job.yaml", "job: denoise", "tls://10.0.0.7:8786", []),
        ("job.yaml", "denoiser: {name: gaussian, sigma: 1}", "", ["no torch", "forks"]),
        ("job.yaml", "denoiser:\n  name: median", "", ["no torch", "forks"]),
        ("job.yaml", '{"denoiser": {"name": "none"}}', "", ["no torch", "forks"]),
        ("job.yaml", "denoiser: {name: gaussian}\nnoise: {model: poisson}", "", ["forks"]),
        ("job.yaml --set denoiser.name=tv", "denoiser: {name: gaussian, sigma: 1}", "", ["forks"]),
        ("job.yaml", "denoiser: {name: nonesuch}", "", ["forks"]),
    ],
)
def test_workers_of_this_machine_are_certain_only_where_nothing_mentions_a_cluster(
    words: str, text: str, scheduler: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(fork_server, "ensure_forks", lambda: begun.append("forks"))
    monkeypatch.setattr(fork_server, "expect_no_torch", lambda: begun.append("no torch"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HALOTILE_CLUSTER", "auto")
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", scheduler)
    Path("job.yaml").write_text(text)
    _begin_early(["run", *words.split()])
    assert begun == expected


ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples/plugin/local_deviation"
RADIUS = 5
JOB = """
version: 1
job: local-deviation
input: {path: in.zarr}
output: {path: deviation.zarr, shard: 64, chunk: 32}
overview: overview.zarr
radius: 5
run: {workers: 2, memory_per_worker: 2GiB}
"""
FIRST, SECOND = "deviation.zarr", "overview.zarr"
SHAPE = (900, 800)


@dataclass(frozen=True)
class Place:
    """A folder with a job, where the package is installed."""

    folder: Path

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command."""
        paths = os.pathsep.join([str(self.folder / "site"), str(ROOT)])
        return subprocess.Popen(
            [sys.executable, "-m", "halotile", *words],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *words: str, code: int = 0) -> str:
        """Return what a command wrote; it ends with this exit code."""
        ended = self.start(*words)
        out, err = ended.communicate(timeout=240)
        assert ended.returncode == code, out + err
        return out + err

    def status(self) -> dict[str, Any]:
        """Return what the run directory says of the run."""
        path = self.folder / f"{FIRST}.run/status.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def pixels(self, name: str) -> NDArray[Any]:
        """Return an output."""
        return read_zarr(self.folder / name)

    def done(self, name: str) -> int:
        """Return how many blocks of an output are in its journal."""
        path = self.folder / f"{name}.run/journal"
        return len(Journal.open_any(path).done) if path.exists() else 0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The package as pip lays it, and a job of its kind."""
    folder = tmp_path_factory.mktemp("plug-in")
    shutil.copytree(PACKAGE, folder / "site/local_deviation", ignore=shutil.ignore_patterns("__pycache__"))
    about = folder / "site/local_deviation-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: local-deviation\nVersion: 1.0\n")
    points = (PACKAGE.parent / "pyproject.toml").read_text().partition('"halotile.jobs"]\n')[2]
    name, _, module = points.strip().partition(" = ")
    (about / "entry_points.txt").write_text(f"[halotile.jobs]\n{name} = {module.strip(chr(34))}\n")
    pixels = np.random.default_rng(0).random(SHAPE).astype("float32")
    array = zarr.create_array(folder / "in.zarr", shape=pixels.shape, chunks=(256, 256), dtype="f4")
    array[...] = pixels
    (folder / "job.yaml").write_text(JOB)
    return Place(folder)


def truth(place: Place) -> NDArray[Any]:
    """The deviation of the whole image."""
    pixels = place.pixels("in.zarr").astype(np.float64)
    edge = 2 * RADIUS + 1
    mean, mean_of_squares = (
        correlate1d(correlate1d(each, np.ones(edge), 0), np.ones(edge), 1) / edge**2 for each in (pixels, pixels**2)
    )
    deviation: NDArray[Any] = np.sqrt(np.maximum(mean_of_squares - mean**2, 0.0)).astype(np.float32)
    return deviation


@pytest.fixture
def here(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """The same place with the package in this process, where commands that start no worker run."""
    monkeypatch.syspath_prepend(str(place.folder / "site"))
    monkeypatch.chdir(place.folder)
    registry._plug_ins.cache_clear()
    yield place
    registry._plug_ins.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "local_deviation"]:
        del sys.modules[name]


def said(*words: str, code: int = 0) -> str:
    """What a command writes in this process; it ends with this exit code."""
    ended = ask(*words)
    assert ended.exit_code == code, ended.output
    return ended.output if code else ended.stdout


def test_its_job_is_validated_and_its_mistakes_have_words_and_its_keys_are_in_the_schema(here: Place) -> None:
    assert "ok, deviation within 5 pixels" in said("validate", "job.yaml")
    wrong = said("validate", "job.yaml", "--set", "radius=0", "--set", "inptu.path=x", code=2)
    assert "radius: 0 is too small; write at least 1" in wrong
    assert "inptu: unknown key; did you mean input?" in wrong
    unread = said("validate", "job.yaml", "--set", "run.on_nan=fail", code=2)
    assert "run.on_nan: fail, and this kind of job does not search what it reads for NaN" in unread
    (part,) = [part for part in json.loads(said("schema"))["anyOf"] if part["title"] == "local-deviation"]
    assert part["required"] == ["version", "job", "input", "output", "overview"]
    assert part["properties"]["radius"]["minimum"] == 1
    assert part["properties"]["radius"]["description"].startswith("Edge of the square")


def test_its_plan_counts_both_outputs_and_its_scratch_array_and_its_batch_script_is_shown(here: Place) -> None:
    before = sorted(here.folder.iterdir())
    plan = json.loads(said("plan", "job.yaml", "--json"))
    assert [Path(path).name for path in plan["outputs"]] == [FIRST, SECOND]
    assert plan["output_bytes"] >= 4 * SHAPE[0] * SHAPE[1] * 1.25
    assert plan["scratch_bytes"] >= 8 * SHAPE[0] * SHAPE[1]
    small = said("plan", "job.yaml", "--set", "run.memory_per_worker=100MiB", code=5)
    assert "run.memory_per_worker is 100MiB; one block of" in small
    shown = said("submit", "job.yaml", "--dry-run", "--set", "cluster.kind=slurm")
    assert "#SBATCH --signal=B:USR1@120" in shown
    assert f"attend {here.folder / FIRST}.run" in shown
    assert " of scratch; " in shown
    assert sorted(here.folder.iterdir()) == before


@pytest.mark.cluster
@pytest.mark.thorough
def test_its_scaling_is_measured_over_all_of_its_passes(place: Place) -> None:
    before = sorted(place.folder.iterdir())
    words = ("--workers", "1,2", "--trials", "1", "--blocks", "4", "--json", "--quiet")
    found = json.loads(place.call("bench", "job.yaml", *words))
    one, two = found["workers"]
    assert one["written_bytes"] == two["written_bytes"] > 3 * 6 * 64 * 64
    assert sorted(place.folder.iterdir()) == before


@pytest.mark.cluster
def test_it_is_killed_resumed_verified_and_repaired(place: Place) -> None:
    killed = place.start("run", "job.yaml")
    until(lambda: killed.poll() is not None or (place.done(FIRST) >= 4 and place.status().get("dashboard")), 120)
    page = urllib.request.urlopen(place.status()["dashboard"] + ".json", timeout=20).read()
    killed.kill()
    killed.communicate()
    assert json.loads(page)["job"]["name"] == FIRST
    done = place.done(FIRST)
    assert done >= 4
    outcome = json.loads(place.call("resume", SECOND, "--json", "--quiet"))
    assert outcome["done"] == outcome["total"]
    assert outcome["resumed"] >= done
    assert np.array_equal(place.pixels(FIRST), truth(place))
    assert np.array_equal(place.pixels(SECOND), place.pixels(FIRST)[::2, ::2])
    assert not (place.folder / f"{FIRST}.run/state").exists()
    assert "radius was 5, is 4" in place.call("run", "job.yaml", "--set", "radius=4", code=2)
    (shard,) = list(place.folder.glob(f"{SECOND}/0/c/2/2"))
    shard.write_bytes(shard.read_bytes()[:-9])
    assert f"{SECOND} block" in place.call("verify", FIRST, code=4)
    place.call("verify", SECOND, "--repair")
    assert np.array_equal(place.pixels(SECOND), place.pixels(FIRST)[::2, ::2])
