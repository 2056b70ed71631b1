"""Clusters: the local one, encrypted, on loopback and gone afterwards; running schedulers that are joined with certificates; pages under their own names."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import dask
import numpy as np
import psutil
import pytest
from distributed import LocalCluster
from distributed.core import connect
from distributed.utils import LoopRunner

from halotile import DistributedContext
from halotile.errors import ConfigError
from halotile.graphs.clusters import local, scheduler, slurm_alloc
from halotile.graphs.clusters.base import Order, RunningCluster, config_errors_described
from halotile.graphs.clusters.common import security
from halotile.graphs.clusters.common.answers import differing_versions
from halotile.graphs.clusters.common.security import LEFT_OUT, Credentials, answer_allowed_only, credentials
from halotile.graphs.clusters.workers import settings
from halotile.graphs.clusters.workers.settings import ALLOCATOR_ENVIRONMENT, WORKER_ENVIRONMENT
from halotile.graphs.kinds import sections
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.graphs.watching.page import ADDRESS, Watch
from tests.faults import REPOSITORY, run_python
from tests.support import IN_THREADS, job_of, noisy_image, read_zarr, write_zarr

Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.cluster

ONE = Order(workers=1, memory_bytes=2**31, choice=sections.Cluster(dashboard=False))
FORKS = pytest.mark.skipif(settings.METHOD != "forkserver", reason="workers are forked on Linux only")


def worker_view() -> dict[str, object]:
    """The environment and settings of a worker, as it sees them, and a random number without a seed."""
    import torch

    from halotile.tasks.devices.device import prepare_process

    prepare_process(threads=1)
    return {
        "environment": {name: os.environ.get(name) for name in WORKER_ENVIRONMENT},
        "threads": torch.get_num_threads(),
        "blocked": signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "pid": os.getpid(),
        "drawn": float(np.random.random()),
    }


def test_workers_have_their_own_environment_and_numbers_and_never_see_ctrl_c(cluster: RunningCluster) -> None:
    views = cluster.client.run(worker_view).values()
    for view in views:
        assert (view["environment"], view["threads"], view["blocked"]) == (WORKER_ENVIRONMENT, 1, True)
    assert len({view["drawn"] for view in views}) == 2
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


FORKED = """
import builtins, multiprocessing, os, signal, sys
from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import Order
from halotile.graphs.kinds import sections

def look():
    return "torch" in sys.modules, os.getppid() != driver, os.environ.get("PYTHONPATH")

def die():
    builtins.kept = multiprocessing.get_context("spawn").Lock()
    os.kill(os.getpid(), signal.SIGKILL)

driver = os.getpid()
with local.start(Order(workers=1, memory_bytes=2**31, choice=sections.Cluster(dashboard=False))) as cluster:
    print(*cluster.client.run(look).values())
    print(type(cluster.client.submit(die).exception(timeout=60)).__name__)
"""
KILLED = """
import multiprocessing, os, signal, threading, time
from multiprocessing import forkserver
from multiprocessing.connection import wait
from halotile.graphs.clusters.workers.fork_server import PRELOADED, ensure_forks

def start():
    ensure_forks()
    process = context.Process(target=time.sleep, args=(5,), daemon=True)
    process.start()
    return process

def start_in_place_of(process):
    wait([process.sentinel])
    start().kill()
    print("started\\n", end="")  # in one write

if __name__ == "__main__":
    PRELOADED[:] = ["numpy"]  # to be quick
    context = multiprocessing.get_context("forkserver")
    for _ in range(15):
        processes = [start(), start()]
        threads = [threading.Thread(target=start_in_place_of, args=(process,)) for process in processes]
        for thread in threads:
            thread.start()
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        for thread in threads:
            thread.join()
"""


def outcome_of(folder: Path, text: str) -> tuple[str, str]:
    """What a script prints that ends well, in a working directory with modules that nobody should import."""
    (folder / "script.py").write_text(text)
    (elsewhere := folder / "elsewhere").mkdir()
    for module in ("torch", "numbers"):
        (elsewhere / f"{module}.py").write_text("print('not meant')")
    done = run_python(str(folder / "script.py"), cwd=elsewhere)
    assert done.returncode == 0
    return done.stdout, done.stderr


@pytest.mark.thorough
@FORKS
def test_workers_come_back_when_the_process_that_they_are_forked_from_is_killed(tmp_path: Path) -> None:
    assert outcome_of(tmp_path, KILLED) == ("started\n" * 30, "")


@FORKS
def test_workers_import_nothing_from_the_working_directory_and_die_without_complaint(tmp_path: Path) -> None:
    assert outcome_of(tmp_path, FORKED) == (f"(True, True, '{REPOSITORY}')\nKilledWorker\n", "")


def test_kinds_are_declared_without_dask(tmp_path: Path) -> None:
    code = "import sys\nfrom halotile.graphs.clusters.base import traits_of\nfrom halotile.registry import names\n"
    code += "[traits_of(name) for name in names('clusters')]\nprint({'dask', 'distributed', 'torch'} & {*sys.modules})"
    assert outcome_of(tmp_path, code) == ("set()\n", "")


def status_of(address: str, headers: Mapping[str, str] = {}) -> int:
    """The status of a web server's answer. ``{port}`` in a header: as a browser says it."""
    place = urlsplit(address)
    with closing(HTTPConnection(place.hostname or "", place.port, timeout=30)) as connection:
        given = {key: text.format(port=place.port) for key, text in headers.items()}
        connection.request("GET", place.path, headers=given)
        return connection.getresponse().status


def test_all_traffic_is_encrypted_on_loopback_and_strangers_see_nothing(cluster: RunningCluster) -> None:
    """The scheduler with its dashboard is in this process, the workers are its children."""
    info = cluster.client.scheduler_info()
    addresses = [info["address"], *info["workers"]]
    assert all(address.startswith("tls://127.0.0.1:") for address in addresses)
    with pytest.raises((OSError, TypeError)):
        asyncio.run(connect(info["address"], timeout=2))
    with pytest.raises(OSError):
        asyncio.run(connect(info["address"].replace("tls://", "tcp://"), timeout=2))

    page = (cluster.dashboard or "").removesuffix("/status")
    logs = ("info/main/workers.html", "info/logs.html", "info/call-stacks/x.html")
    assert {status_of(f"{page}/{place}") for place in (*logs, "proxy/8787/127.0.0.1/status")} == {404}
    this = psutil.Process()
    listening = [
        connection.laddr.ip
        for process in [this, *this.children(recursive=True)]
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 3
    assert set(listening) == {"127.0.0.1"}


def test_the_driver_gets_its_environment_back_and_no_process_or_message_stays(monkeypatch: Patch) -> None:
    """Messages of Dask are silent until its event loop has ended."""
    handlers = [one for one in logging.getLogger("distributed").handlers if type(one) is logging.StreamHandler]
    levels = [handler.level for handler in handlers]
    at_the_end: list[int] = []
    stop = LoopRunner._real_stop

    def observed(self: LoopRunner, timeout: float) -> None:
        at_the_end.extend(handler.level for handler in handlers)
        stop(self, timeout)

    monkeypatch.setattr(LoopRunner, "_real_stop", observed)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("SET_SINCE_THE_LAST_CLUSTER", "yes")
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    before = dict(os.environ)
    with local.start(ONE) as started:
        assert started.dashboard is None
        scheduler = started.client.cluster.scheduler
        assert scheduler.http_server.port != 8787, "Dask's usual port, which may be taken"
        for page in ("status", "info/main/workers.html", "json/counts.json", "metrics"):
            assert status_of(f"http://127.0.0.1:{scheduler.http_server.port}/{page}") == 404
        (view,) = started.client.run(worker_view).values()
        assert list(started.client.run(os.getenv, "SET_SINCE_THE_LAST_CLUSTER").values()) == ["yes"]
    assert dict(os.environ) == before
    assert not psutil.pid_exists(view["pid"])
    assert set(at_the_end) == {logging.CRITICAL}
    assert [handler.level for handler in handlers] == levels


MISTAKES: dict[str, tuple[object, str]] = {
    "worker.preload": (["no_such_module"], ""),
    "nanny.preload": (["no_such_module"], "no_such_module"),
    "scheduler.preload": (["no_such_module"], "no_such_module"),
    "admin.log-length": ("many", "TypeError"),
}


def test_what_fails_in_dasks_configuration_is_not_blamed_on_memory() -> None:
    for setting, (value, text) in MISTAKES.items():
        with pytest.raises(ConfigError) as caught, dask.config.set({f"distributed.{setting}": value}), local.start(ONE):
            pass
        assert re.search(rf"^the cluster did not start \(.*{text}.*preload or a setting", str(caught.value))
        assert "memory" not in str(caught.value).partition(". ")[0]


SETTINGS = "Correct what fails in Dask's configuration, a preload or a setting"
CAUSES: list[tuple[int | Exception, str]] = [
    (errno.EAGAIN, "Write fewer workers: "),
    (errno.EMFILE, "Allow more open files (ulimit -n)"),
    (errno.ENFILE, "All programs of this machine together"),
    (errno.ENOSPC, "Make room: "),
    (errno.EADDRNOTAVAIL, "This machine refused it: `recon-cli doctor`"),
    (errno.EADDRINUSE, "This machine refused it: `recon-cli doctor`"),
    (MemoryError(), "Write fewer workers: "),
    (FileNotFoundError(errno.ENOENT, "No such file", "preload.py"), SETTINGS),
    (TimeoutError(), SETTINGS),
    (TypeError("many"), SETTINGS),
]


def test_a_cluster_that_does_not_start_names_its_cause_and_the_remedy() -> None:
    for cause, remedy in CAUSES:
        text = os.strerror(cause) if isinstance(cause, int) else ""
        with pytest.raises(ConfigError) as caught, config_errors_described():
            raise RuntimeError("Cluster failed to start") from OSError(cause, text) if isinstance(cause, int) else cause
        assert f"{text}). {remedy}" in str(caught.value)
        assert ("configuration" in str(caught.value)) == (remedy == SETTINGS)


@FORKS
def test_a_start_ends_where_what_forks_the_workers_is_killed(monkeypatch: Patch) -> None:
    def killed(_: int) -> int:
        raise EOFError("unexpected EOF")

    monkeypatch.setattr("multiprocessing.forkserver.read_signed", killed)
    with pytest.raises(ConnectionError, match="forked from was killed"), local.start(ONE):
        pass


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_planes_are_filtered_without_torch(tmp_path: Path, dtype: str) -> None:
    """It takes two seconds and 500 MB, in the driver and in each worker."""
    source = write_zarr(tmp_path / "in.zarr", (1000 * noisy_image((32, 32))).clip(0).astype(dtype))
    for module, mark in (("torch", "imported"), ("sitecustomize", "begun")):
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / mark)!r}, 'w').close()")
    (tmp_path / "job.yaml").write_text(
        f"version: 1\njob: denoise\ninput: {{path: {source}}}\noutput: {{path: {tmp_path}/o.zarr}}\n"
        "denoiser: {name: gaussian, sigma: 1.0}\nrun: {workers: 1}\n"
    )
    command = [sys.executable, "-m", "halotile", "run", str(tmp_path / "job.yaml"), "--quiet"]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=120, check=True)
    assert ((tmp_path / "begun").exists(), (tmp_path / "imported").exists()) == (True, False)


def test_a_job_number_that_an_allocation_left_is_named_with_its_remedy(monkeypatch: Patch) -> None:
    monkeypatch.delenv(slurm_alloc.NODES, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with pytest.raises(ConfigError, match=r"^SLURM_JOB_ID is 12, and .* no Slurm allocation\. .*--cluster local"):
        slurm_alloc.check(sections.Cluster())


# --- who may connect ---------------------------------------------------------------------------


def test_certificates_are_of_one_run_for_their_owner_and_gone_afterwards(tmp_path: Path) -> None:
    with ExitStack() as both:
        made = both.enter_context(credentials(tmp_path))
        shutil.copytree(made.folder, tmp_path / f"{made.folder.name}-of-a-killed-run")
        other = both.enter_context(credentials(tmp_path))
        assert {*tmp_path.iterdir()} == {made.folder, other.folder}, "what lives stays"
        assert made.folder.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in made.folder.iterdir()} == {0o600}
        key = Path(made.paths[1]).read_text()
        assert "PRIVATE KEY" in key != Path(other.paths[1]).read_text()
        assert {*made.environment().values()} == {*made.paths, "true"}, "files, and no secret"
        for role in ("scheduler", "worker", "client"):
            assert made.security.get_connection_args(role)["require_encryption"]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.usefixtures("homeless")
def test_the_users_own_folder_is_closed_and_there_is_none_without_a_home(tmp_path: Path, monkeypatch: Patch) -> None:
    with pytest.raises(ConfigError, match=r"HOME is unset.*Set HOME or XDG_CACHE_HOME"):
        security.private_base()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert security.private_base().stat().st_mode & 0o777 == 0o700


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

    gone = str(tmp_path / "gone.pem")
    with dask.config.set({f"distributed.comm.tls.{name}": gone for name in ("ca-file", "client.cert", "client.key")}):
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


def test_pages_and_their_websockets_are_for_those_who_were_told_of_them(cluster: RunningCluster) -> None:
    base, watch = (cluster.dashboard or "").removesuffix("/status"), Watch()
    watch.open(cluster)
    for page in PAGES:
        assert status_of(base + page) == 200
        assert status_of(base + page, {"Host": "localhost:8000"}) == 200, "at the near end of a tunnel"
        assert [status_of(base + page, headers) for headers in THEIRS] == [404] * 3
    watch.close()
    for origin in ("http://localhost:{port}", "http://127.0.0.1:{port}", "http://[::1]:{port}"):
        assert status_of(f"{base}/status/ws", WEBSOCKET | {"Origin": origin}) == 101
    assert [status_of(f"{base}/status/ws", WEBSOCKET | headers) for headers in THEIRS] == [404] * 3
    # Pages that name folders or fail are left out.
    for page in (*LEFT_OUT, "json/identity.json"):
        assert (status_of(f"{base}/{page}"), status_of(f"{base}/{page}/ws", WEBSOCKET)) == (404, 404)


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
