"""The denoiser of ``halotile.denoise`` as a mapping: an option may have the name of an argument."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client

import halotile
from halotile.errors import ConfigError
from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import ADDRESS, RunningCluster
from halotile.graphs.jobs.denoise import call
from halotile.graphs.kinds.sections import DenoiserChoice
from halotile.graphs.rules.arguments import cluster_of_script
from tests.support import noisy_image, write_zarr


def test_an_option_that_is_named_like_an_argument_is_given_in_a_mapping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Any] = []
    monkeypatch.setattr(call, "run_call", lambda job, *_, **__: jobs.append(job))
    section = {"name": "dncnn", "weights": tmp_path / "w.safetensors", "depth": 9}
    halotile.denoise(tmp_path / "in.zarr", tmp_path / "out.zarr", section, depth=12)
    (job,) = jobs
    assert job.denoiser == DenoiserChoice(
        name="dncnn", options={"weights": str(tmp_path / "w.safetensors"), "depth": 9}
    )
    assert job.tile.depth == 12
    assert section["name"] == "dncnn"


@pytest.mark.cluster
def test_an_open_client_serves_a_call(tmp_path: Path, cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "start", None)  # no second cluster
    source = write_zarr(tmp_path / "in.zarr", noisy_image((60, 50)))
    outcome = halotile.denoise(source, tmp_path / "out.zarr", "median", size=3, cluster=cluster.client)
    assert outcome.done == outcome.total > 0
    assert cluster.client.status == "running"


@pytest.mark.cluster
def test_a_second_cluster_beside_an_open_client_is_told(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ADDRESS, raising=False)
    with cluster.client.as_current():
        with pytest.warns(UserWarning, match=r"beside those of the Client that is open\. Write cluster=client"):
            assert cluster_of_script("auto").kind == "auto"
        assert cluster_of_script("local").kind == "local"  # asked for
        assert cluster_of_script(cluster.client).address == cluster.client.scheduler.address
        monkeypatch.setenv(ADDRESS, cluster.client.scheduler.address)
        assert cluster_of_script("auto").kind == "auto"  # it joins


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("status", "address", "words"),
    [
        ("closed", "tls://127.0.0.1:7", r"cluster is a Client \(closed\)"),
        ("running", "inproc://127.0.0.1/7/1", "whose workers are threads of this process"),
        ("running", "tcp://10.1.2.3:7", "is not encrypted; write one that begins with tls://"),
    ],
)
def test_a_client_that_cannot_serve_is_refused(status: str, address: str, words: str) -> None:
    client: Client = object.__new__(type("Fake", (Client,), {"status": status, "scheduler": SimpleNamespace(address=address), "__del__": lambda _: None}))  # fmt: skip
    with pytest.raises(ConfigError, match=words):
        cluster_of_script(client)


def test_a_mapping_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Write a name"):
        halotile.denoise(tmp_path / "in.zarr", tmp_path / "out.zarr", {"depth": 9})
