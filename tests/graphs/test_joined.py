"""Who may connect: certificates of one run, a running scheduler that is joined with them, and a dashboard under its own names."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import dask
import numpy as np
import pytest
from distributed import LocalCluster

from halotile import DistributedContext
from halotile.errors import ConfigError
from halotile.graphs.clusters import scheduler
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.clusters.common.answers import differing_versions
from halotile.graphs.clusters.common.security import (
    LEFT_OUT,
    Credentials,
    answer_allowed_only,
    credentials,
    private_base,
    remove_stale,
)
from halotile.graphs.clusters.workers.settings import ALLOCATOR_ENVIRONMENT
from halotile.graphs.kinds import sections
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.graphs.watching.page import ADDRESS, Watch
from tests.faults import REPOSITORY, run_python
from tests.support import IN_THREADS, job_of, noisy_image, read_zarr, write_zarr

Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.cluster


def test_certificates_are_of_one_run_for_their_owner_and_gone_afterwards(tmp_path: Path) -> None:
    with credentials(tmp_path) as made, credentials(tmp_path) as other:
        assert made.folder.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in made.folder.iterdir()} == {0o600}
        key = Path(made.paths[1]).read_text()
        assert "PRIVATE KEY" in key != Path(other.paths[1]).read_text()
        assert {*made.environment().values()} == {*made.paths, "true"}, "files, and no secret"
        for role in ("scheduler", "worker", "client"):
            assert made.security.get_connection_args(role)["require_encryption"]
    assert [*tmp_path.iterdir()] == []


HOLDER = """
import sys, time
from pathlib import Path
from halotile.graphs.clusters.common.security import credentials
with credentials(Path(sys.argv[1])) as made:
    print(made.folder, flush=True)
    time.sleep(60)
"""


def test_what_a_killed_run_left_behind_is_swept_and_what_lives_stays(tmp_path: Path) -> None:
    command, environment = [sys.executable, "-c", HOLDER, str(tmp_path)], os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        left = Path(holder.stdout.readline().strip())
        remove_stale(tmp_path)
        assert (left / "key.pem").exists(), "its owner lives"
        holder.send_signal(signal.SIGKILL)
        holder.wait(30)
    with credentials(tmp_path) as made:
        assert not left.exists()
        assert [*tmp_path.iterdir()] == [made.folder]


@pytest.mark.usefixtures("homeless")
def test_the_users_own_folder_is_closed_to_others_and_there_is_none_without_a_home(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    with pytest.raises(ConfigError, match=r"HOME is unset.*Set HOME or XDG_CACHE_HOME"):
        private_base()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert private_base().stat().st_mode & 0o777 == 0o700


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
    with LocalCluster(1, **IN_THREADS, security=own.security, protocol="tls://", host="127.0.0.1") as cluster:
        yield cluster


@pytest.fixture
def trusted(own: Credentials) -> Iterator[None]:
    """Dask's configuration with the certificates."""
    files = dict(zip(("ca-file", "client.cert", "client.key"), (own.paths[0], *own.paths), strict=True))
    with dask.config.set({f"distributed.comm.tls.{name}": path for name, path in files.items()}):
        yield


@pytest.mark.usefixtures("trusted")
def test_a_job_leaves_its_scheduler_running(running: LocalCluster, tmp_path: Path, monkeypatch: Patch) -> None:
    source = write_zarr(tmp_path / "in.zarr", noisy_image((300, 260)))
    plan = make_plan(job_of(source, tmp_path / "out.zarr", "median", {"size": 3}))
    address = running.scheduler_address
    with scheduler.start(order(address=address)) as cluster:
        assert cluster.workers == 1
        assert cluster.missing() is None
        assert run(plan, cluster=cluster).done == len(plan.grid)
    assert np.isfinite(read_zarr(tmp_path / "out.zarr")).all()
    # It is found by its file, or in the environment.
    (file := tmp_path / "scheduler.json").write_text(json.dumps({"address": address}))
    with scheduler.start(order(scheduler_file=str(file))) as cluster:
        assert cluster.client.scheduler.address == address
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", address)
    with scheduler.start(order()) as cluster:
        assert cluster.client.scheduler.address == address
        assert differing_versions(cluster.client) == ()
    assert running.scheduler.status.name == "running"


@pytest.mark.usefixtures("trusted")
def test_workers_that_lack_our_environment_are_told_of(running: LocalCluster, monkeypatch: Patch) -> None:
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


def refused(choice: Order) -> str:
    with pytest.raises(ConfigError) as caught, scheduler.start(choice):
        pass
    return str(caught.value)


def test_what_is_missing_or_unsafe_is_told(tmp_path: Path, running: LocalCluster, monkeypatch: Patch) -> None:
    assert "no address is given" in refused(order())
    assert "has no scheduler's address" in refused(order(scheduler_file=str(tmp_path / "none.json")))
    assert "names no certificate to connect with" in refused(order(address=running.scheduler_address))
    assert "write tls: false, or --no-tls" in refused(order(address="tcp://127.0.0.1:9"))
    for tls in (True, False):
        assert "start it with tls" in refused(order(address="tcp://10.9.8.7:9", tls=tls)).lower()
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tcp://10.9.8.7:9")
    with pytest.raises(ConfigError, match="Start it with TLS"), DistributedContext():
        pass

    with dask.config.set({"distributed.comm.tls.ca-file": str(tmp_path / "gone.pem")}):
        text = refused(order(address=running.scheduler_address))
    assert re.search(r"distributed\.comm\.tls\.ca-file is .*gone\.pem, and there is no such file", text)


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

owned, own, address, other = sys.argv[1:]
# As its owner, who gets an answer, else a refusal would say nothing. What is imported on the way may be out of others' reach.
assert asyncio.run(knock(owned, arguments(own))) == "Scheduler"
theirs = arguments(other)  # read beforehand: they are theirs, wherever they lie
os.setgid(65534); os.setuid(65534)
for place, given in ((address, lambda: arguments("")), (owned, lambda: arguments("")), (owned, lambda: theirs), (owned, lambda: arguments(own))):
    try:
        print("answered", asyncio.run(knock(place, given())))
    except BaseException as error:
        print("refused", type(error).__name__, str(error).replace("\\n", " "), repr(error.__cause__))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(running: LocalCluster, own: Credentials, tmp_path: Path) -> None:
    """Without TLS, without a certificate, with one of another authority, and with the paths of the right files."""
    address = running.scheduler_address
    plain = address.replace("tls://", "tcp://")
    with credentials(tmp_path) as other:
        done = run_python("-c", KNOCK, address, own.paths[0], plain, other.paths[0])
    assert done.returncode == 0, done.stderr
    expected = ("", "TypeError", "CERTIFICATE_VERIFY_FAILED", "Permission denied")
    for line, text in zip(done.stdout.splitlines(), expected, strict=True):
        assert line.startswith("refused")
        assert text in line


def test_a_worker_with_another_authority_is_refused(running: LocalCluster, tmp_path: Path) -> None:
    with credentials(tmp_path) as other:
        certificate, key = other.paths
        words = ("--tls-ca-file", certificate, "--tls-cert", certificate, "--tls-key", key, "--death-timeout", "5")
        done = run_python("-P", "-m", "halotile.graphs.clusters.workers", running.scheduler_address, *words)
    assert done.returncode == 1
    assert re.search(r"^no worker on .*(CERTIFICATE_VERIFY_FAILED|TimeoutError)", done.stderr, re.M), done.stderr
    assert len(running.scheduler.workers) == 1


WEBSOCKET = {
    "Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}  # fmt: skip
THEIRS = {"Host": "rebound.example"}, {"Origin": "http://rebound.example"}, {"Origin": "null"}
PAGES = ("/status", f"/{ADDRESS}", f"/{ADDRESS}.json", "/metrics", "/health", "/statics/css/base.css")


def status_of(cluster: RunningCluster, path: str, headers: dict[str, str]) -> int:
    """The status of the dashboard's answer."""
    place = urlsplit(cluster.dashboard or "")
    with closing(HTTPConnection(place.hostname or "", place.port, timeout=30)) as connection:
        # ``{port}``: as a browser says it.
        connection.request("GET", path, headers={name: text.format(port=place.port) for name, text in headers.items()})
        return connection.getresponse().status


def test_pages_and_their_websockets_are_for_those_who_were_told_of_them(cluster: RunningCluster) -> None:
    watch = Watch()
    watch.open(cluster)
    for page in PAGES:
        assert status_of(cluster, page, {}) == 200
        assert status_of(cluster, page, {"Host": "localhost:8000"}) == 200, "at the near end of a tunnel"
        assert [status_of(cluster, page, headers) for headers in THEIRS] == [404] * 3
    watch.close()
    for origin in ("http://localhost:{port}", "http://127.0.0.1:{port}", "http://[::1]:{port}"):
        assert status_of(cluster, "/status/ws", WEBSOCKET | {"Origin": origin}) == 101
    assert [status_of(cluster, "/status/ws", WEBSOCKET | headers) for headers in THEIRS] == [404] * 3
    # Pages that name folders or fail are left out.
    for page in (*LEFT_OUT, "json/identity.json"):
        assert status_of(cluster, f"/{page}", {}) == 404
        assert status_of(cluster, f"/{page}/ws", WEBSOCKET) == 404


def test_what_dasks_configuration_links_to_was_told_too() -> None:
    """A dashboard behind the proxy of a notebook hub."""
    here = SimpleNamespace(http_server=SimpleNamespace(), http_application=lambda request: None)
    answer_allowed_only(here, "https://Hub.example/user/ada/proxy/40001/status")
    (rule,) = here.http_server.request_callback.rules
    for host, origin, answered in (
        ("hub.example", "https://hub.example", True),
        ("127.0.0.1", "https://HUB.example:443", True),
        ("hub.example.rebound.example", "https://hub.example", False),
        ("hub.example", "https://hub.example.rebound.example", False),
        ("hub.example", "https://rebound.example/hub.example", False),
    ):
        headers = {"Host": host, "Origin": origin}
        request = SimpleNamespace(host=host, host_name=host.lower(), headers=headers, path="/status")
        assert (rule.matcher.match(request) is not None) == answered
