"""The main job as one call from Python."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Client
from scipy.ndimage import uniform_filter

import halotile
from halotile import errors
from halotile.errors import ConfigError, HalotileError
from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import ADDRESS, RunningCluster
from halotile.graphs.jobs.denoise import call
from halotile.graphs.kinds.sections import DenoiserChoice
from halotile.graphs.rules.arguments import cluster_of_script
from halotile.graphs.watching.progress import Progress
from tests.support import dncnn_weights, job_of, noisy_image, read_zarr, run_inline, write_zarr

Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.cluster


def test_a_function_of_the_callers_own_runs_on_every_tile(tmp_path: Path) -> None:
    pixels = noisy_image((700, 650))
    source = write_zarr(tmp_path / "in.zarr", pixels)
    seen: list[Progress] = []
    options: dict[str, Any] = {"depth": 4, "size": 9, "boundary": "reflect", "observer": seen.append}
    outcome = halotile.denoise(source, tmp_path / "out.zarr", uniform_filter, **options)
    assert outcome.done == outcome.total == 1
    assert outcome.peak_memory_bytes > 2**20
    assert seen[-1].done == 1
    want = uniform_filter(np.pad(pixels, 4, mode="symmetric"), 9)[4:-4, 4:-4]
    np.testing.assert_array_equal(read_zarr(tmp_path / "out.zarr"), want)


@pytest.mark.parametrize(("precision", "most"), [("bfloat16", 0.03), ("float16", 0.004)])
def test_half_precision_is_close_and_asked_for(precision: str, most: float, tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", noisy_image((300, 260)))
    options = {"weights": str(dncnn_weights(tmp_path / "w.safetensors")), "depth": 5, "width": 8}
    exact = run_inline(job_of(source, tmp_path / "a.zarr", "dncnn", options))
    rough = run_inline(job_of(source, tmp_path / "b.zarr", "dncnn", options, run={"precision": precision}))
    assert not np.array_equal(rough, exact)
    assert np.abs(rough - exact).max() < most * np.abs(exact).max()


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("gaussian", {"sigma": 1, "precision": "half"}, r"run\.precision: .half. is not"),
    ("gaussian", {"sigma": 1, "device": "gpu"}, r"run\.device: .gpu. is not auto, cpu or cuda"),
    ("gaussian", {"sigma": 1, "device": "cuda", "cluster": "local"}, "no GPU here"),
    (uniform_filter, {"size": 9}, "needs depth"),
    ({"depth": 9}, {}, "Write a name"),
]


def test_a_call_that_cannot_be_is_refused(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    source = write_zarr(tmp_path / "in.zarr", noisy_image((64, 64)))
    for denoiser, arguments, words in REFUSED:
        with pytest.raises(ConfigError, match=words):
            halotile.denoise(source, tmp_path / "out.zarr", denoiser, **arguments)


def test_every_error_is_the_fitting_builtin_and_survives_pickling() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HalotileError)]
    assert len(kinds) >= 14
    for kind in kinds:
        back = pickle.loads(pickle.dumps(kind("what, why, what instead")))
        assert type(back) is kind
        assert str(back) == "what, why, what instead"


def test_a_relative_path_is_kept_whole(tmp_path: Path, monkeypatch: Patch) -> None:
    write_zarr(tmp_path / "in.zarr", noisy_image((64, 64)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("halotile.graphs.runs.driver.run", lambda plan, **_: plan.documents.asked)
    job: Any = halotile.denoise("in.zarr", "out.zarr", "gaussian", sigma=1.0, workers=1)
    assert job["input"]["path"] == str(tmp_path / "in.zarr")
    assert job["output"]["path"] == str(tmp_path / "out.zarr")


def test_options_named_like_arguments_are_in_a_mapping(tmp_path: Path, monkeypatch: Patch) -> None:
    jobs: list[Any] = []
    monkeypatch.setattr(call, "run_call", lambda job, *_, **__: jobs.append(job))
    section = {"name": "dncnn", "weights": tmp_path / "w.safetensors", "depth": 9}
    halotile.denoise(tmp_path / "in.zarr", tmp_path / "out.zarr", section, depth=12)
    (job,) = jobs
    options = {"weights": str(tmp_path / "w.safetensors"), "depth": 9}
    assert (job.denoiser, job.tile.depth) == (DenoiserChoice(name="dncnn", options=options), 12)
    assert section["name"] == "dncnn"


def test_an_open_client_serves_a_call(tmp_path: Path, cluster: RunningCluster, monkeypatch: Patch) -> None:
    monkeypatch.setattr(local, "start", None)  # no second cluster
    source = write_zarr(tmp_path / "in.zarr", noisy_image((60, 50)))
    outcome = halotile.denoise(source, tmp_path / "out.zarr", "median", size=3, cluster=cluster.client)
    assert outcome.done == outcome.total > 0
    assert cluster.client.status == "running"


def test_a_second_cluster_beside_a_client_is_told(cluster: RunningCluster, monkeypatch: Patch) -> None:
    monkeypatch.delenv(ADDRESS, raising=False)
    with cluster.client.as_current():
        with pytest.warns(UserWarning, match=r"beside those of the Client that is open\. Write cluster=client"):
            assert cluster_of_script("auto").kind == "auto"
        assert cluster_of_script("local").kind == "local"  # asked for
        assert cluster_of_script(cluster.client).address == cluster.client.scheduler.address
        monkeypatch.setenv(ADDRESS, cluster.client.scheduler.address)
        assert cluster_of_script("auto").kind == "auto"  # it joins


def test_a_client_that_cannot_serve_is_refused() -> None:
    for status, address, words in (
        ("closed", "tls://127.0.0.1:7", r"cluster is a Client \(closed\)"),
        ("running", "inproc://127.0.0.1/7/1", "whose workers are threads of this process"),
        ("running", "tcp://10.1.2.3:7", "is not encrypted; write one that begins with tls://"),
    ):
        own = {"status": status, "scheduler": SimpleNamespace(address=address), "__del__": lambda _: None}
        client: Client = object.__new__(type("Fake", (Client,), own))
        with pytest.raises(ConfigError, match=words):
            cluster_of_script(client)
