"""Joining a running scheduler: with its certificates, and never without where that is not safe."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

from halotile import DistributedContext
from halotile.errors import ConfigError
from halotile.graphs.clusters import scheduler
from halotile.graphs.clusters.base import Order
from halotile.graphs.clusters.common.answers import differing_versions
from halotile.graphs.clusters.common.security import Credentials, credentials
from halotile.graphs.clusters.workers.settings import ALLOCATOR_ENVIRONMENT
from halotile.graphs.kinds import sections
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from tests.faults import run_python
from tests.support import job_of, noisy_image, read_zarr, write_zarr

pytestmark = pytest.mark.cluster


def order(**choice: object) -> Order:
    return Order(workers=1, memory_bytes=2**31, choice=sections.Cluster(kind="scheduler", **choice))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Credentials]:
    """Certificates of another user."""
    with credentials(tmp_path_factory.mktemp("own")) as made:
        yield made


@pytest.fixture(scope="module")
def running(own: Credentials) -> Iterator[LocalCluster]:
    """A running scheduler with a worker."""
    with LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        processes=False,
        security=own.security,
        protocol="tls://",
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
    ) as cluster:
        yield cluster


@pytest.fixture
def trusted(own: Credentials) -> Iterator[None]:
    """Dask's configuration with the certificates."""
    certificate, key = own.paths
    tls = "distributed.comm.tls"
    with dask.config.set({f"{tls}.ca-file": certificate, f"{tls}.client.cert": certificate, f"{tls}.client.key": key}):
        yield


@pytest.mark.usefixtures("trusted")
def test_a_job_runs_on_it_and_leaves_it_running(running: LocalCluster, tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", noisy_image((300, 260)))
    plan = make_plan(job_of(source, tmp_path / "out.zarr", "median", {"size": 3}))
    with scheduler.start(order(address=running.scheduler_address)) as cluster:
        assert cluster.workers == 1
        assert cluster.missing() is None
        assert run(plan, cluster=cluster).done == len(plan.grid)
    assert np.isfinite(read_zarr(tmp_path / "out.zarr")).all()
    assert running.scheduler.status.name == "running"


@pytest.mark.usefixtures("trusted")
def test_it_is_found_by_its_file_or_in_the_environment(
    running: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "scheduler.json"
    file.write_text(json.dumps({"address": running.scheduler_address}))
    with scheduler.start(order(scheduler_file=str(file))) as cluster:
        assert cluster.client.scheduler.address == running.scheduler_address
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", running.scheduler_address)
    with scheduler.start(order()) as cluster:
        assert cluster.client.scheduler.address == running.scheduler_address


@pytest.mark.usefixtures("trusted")
def test_workers_that_lack_our_environment_are_told_of(running: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    notes: list[str] = []
    requested = dataclasses.replace(order(address=running.scheduler_address), report=notes.append)
    with scheduler.start(requested):
        assert any("Start them as: MALLOC_MMAP_THRESHOLD_=" in line for line in notes)
    for name, value in ALLOCATOR_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    notes.clear()
    with scheduler.start(requested):
        assert notes == []


@pytest.mark.usefixtures("trusted")
def test_a_certificate_that_is_not_there_is_named(running: LocalCluster, tmp_path: Path) -> None:
    with dask.config.set({"distributed.comm.tls.ca-file": str(tmp_path / "gone.pem")}):
        text = refused(order(address=running.scheduler_address))
    assert "distributed.comm.tls.ca-file is" in text
    assert "gone.pem, and there is no such file" in text


def refused(choice: Order) -> str:
    with pytest.raises(ConfigError) as caught, scheduler.start(choice):
        pass
    return str(caught.value)


def test_what_is_missing_or_not_safe_is_told(tmp_path: Path, running: LocalCluster) -> None:
    assert "no address is given" in refused(order())
    assert "has no scheduler's address" in refused(order(scheduler_file=str(tmp_path / "none.json")))
    assert "names no certificate to connect with" in refused(order(address=running.scheduler_address))
    assert "write tls: false, or --no-tls" in refused(order(address="tcp://127.0.0.1:9"))
    for tls in (True, False):
        assert "Start it with TLS" in refused(order(address="tcp://10.9.8.7:9", tls=tls)).replace(
            "start it", "Start it"
        )


def test_a_script_is_refused_likewise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tcp://10.9.8.7:9")
    with pytest.raises(ConfigError, match="Start it with TLS"), DistributedContext():
        pass


def test_workers_that_lack_halotile_or_have_another_version_are_told(running: LocalCluster, own: Credentials) -> None:
    with Client(running.scheduler_address, security=own.security, set_as_default=False) as client:
        assert differing_versions(client) == ()


KNOCK = """
import asyncio, os, sys
from distributed.comm import connect
from distributed.security import Security

def arguments(certificate):
    key = certificate.replace("certificate", "key")
    files = {"tls_ca_file": certificate, "tls_client_cert": certificate, "tls_client_key": key} if certificate else {}
    return Security(**files).get_connection_args("client")

async def knock(address, arguments):
    comm = await connect(address, timeout=5, **arguments)
    await comm.write({"op": "identity", "reply": True})
    return (await asyncio.wait_for(comm.read(), 5))["type"]

owned, own, address, certificate, reader = sys.argv[1:]
# As its owner, who gets an answer, else a refusal would say nothing. What is imported on the way may be out of others' reach.
assert asyncio.run(knock(owned, arguments(own))) == "Scheduler"
theirs = arguments(certificate) if reader == "owner" else None
os.setgid(65534); os.setuid(65534)
print(asyncio.run(knock(address, arguments(certificate) if theirs is None else theirs)))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("how", ["plain", "no certificate", "another authority", "the files themselves"])
def test_another_user_is_refused(running: LocalCluster, own: Credentials, how: str, tmp_path: Path) -> None:
    address = running.scheduler_address
    with credentials(tmp_path) as other:
        requested, certificate, reader, text = {
            "plain": (address.replace("tls://", "tcp://"), "", "nobody", ""),
            "no certificate": (address, "", "nobody", "TypeError"),
            # Read beforehand: they are theirs, wherever they lie.
            "another authority": (address, other.paths[0], "owner", "CERTIFICATE_VERIFY_FAILED"),
            "the files themselves": (address, own.paths[0], "nobody", "Permission denied"),
        }[how]
        done = run_python("-c", KNOCK, address, own.paths[0], requested, certificate, reader)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "AssertionError" not in done.stderr
    assert text in done.stderr


def test_a_worker_with_another_authority_is_refused(running: LocalCluster, tmp_path: Path) -> None:
    with credentials(tmp_path) as other:
        certificate, key = other.paths
        words = ("--tls-ca-file", certificate, "--tls-cert", certificate, "--tls-key", key, "--death-timeout", "5")
        worker = ("-P", "-m", "halotile.graphs.clusters.workers", running.scheduler_address)
        done = run_python(*worker, *words)
    assert done.returncode == 1
    assert re.search(
        r"^no worker on .*CERTIFICATE_VERIFY_FAILED|^no worker on .*TimeoutError", done.stderr, re.MULTILINE
    ), done.stderr
    assert len(running.scheduler.workers) == 1
