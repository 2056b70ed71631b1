"""Names become modules or plug-ins; nothing is imported before it is used, but what workers are certain to need is begun at once."""

from __future__ import annotations

import importlib.metadata
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from halotile import errors, registry
from halotile.__main__ import _begin_early
from halotile.errors import ConfigError, UnknownName
from halotile.graphs.clusters.workers import fork_server


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
