"""The local cluster: encrypted, on loopback, with its own environment, and gone afterwards."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import dask
import numpy as np
import psutil
import pytest
from distributed.core import connect
from distributed.utils import LoopRunner
from scipy import ndimage

from halotile.errors import ConfigError
from halotile.graphs.clusters import local, slurm_alloc
from halotile.graphs.clusters.base import ClusterTraits, Order, RunningCluster, config_errors_described, traits_of
from halotile.graphs.clusters.workers import settings
from halotile.graphs.clusters.workers.settings import WORKER_ENVIRONMENT
from halotile.graphs.kinds import sections
from tests.faults import REPOSITORY, run_python
from tests.support import read_zarr, write_zarr

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
DECLARED = """
import sys
from halotile.graphs.clusters.base import starter_of, traits_of
from halotile.registry import names

for name in names("clusters"):
    assert callable(starter_of(name).start)
    traits_of(name)
print({"dask", "distributed", "torch"} & set(sys.modules))
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


def test_kinds_are_declared_without_dask_and_others_have_workers_elsewhere(tmp_path: Path) -> None:
    assert outcome_of(tmp_path, DECLARED) == ("set()\n", "")
    unknown = traits_of("no-such-kind")
    assert (unknown, unknown.is_remote, unknown.is_here) == (ClusterTraits(), True, False)


def status_of(address: str) -> int:
    """The status of a web server's answer."""
    try:
        with urlopen(address) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


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
    assert status_of(f"{page}/status") == 200
    logs = ("info/main/workers.html", "info/logs.html", "info/call-stacks/x.html")
    for place in (*logs, "proxy/8787/127.0.0.1/status"):
        assert status_of(f"{page}/{place}") == 404

    assert urlsplit(page).hostname == "127.0.0.1"
    this = psutil.Process()
    listening = [
        connection.laddr.ip
        for process in [this, *this.children(recursive=True)]
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 3
    assert set(listening) == {"127.0.0.1"}


def test_the_driver_gets_its_environment_back_and_no_process_or_message_stays(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_start_ends_where_what_forks_the_workers_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(_: int) -> int:
        raise EOFError("unexpected EOF")

    monkeypatch.setattr("multiprocessing.forkserver.read_signed", killed)
    with pytest.raises(ConnectionError, match="forked from was killed"), local.start(ONE):
        pass


SEEN = """
import os, sys

class Noted:
    def find_spec(name, *_):
        if name == "torch":
            open({!r} + f"/{{os.getpid()}}", "w").close()

sys.meta_path.insert(0, Noted)
"""


@pytest.mark.parametrize("axes", ["yx", "zyx"])
def test_planes_are_filtered_without_torch_and_no_driver_loads_it(axes: str, tmp_path: Path) -> None:
    """It takes two seconds and 500 MB, which workers need that filter a volume."""
    image = np.random.default_rng(0).random((32,) * len(axes), np.float32)
    source = write_zarr(tmp_path / "in.zarr", image)
    (seen := tmp_path / "seen").mkdir()
    (tmp_path / "sitecustomize.py").write_text(SEEN.format(str(seen)))
    (tmp_path / "job.yaml").write_text(
        f"version: 1\njob: denoise\ninput: {{path: {source}, axes: {axes}}}\noutput: {{path: {tmp_path}/o.zarr}}\n"
        f"tile: {{axes: {axes}}}\ndenoiser: {{name: gaussian, sigma: 1.0}}\nrun: {{workers: 1}}\n"
    )
    command = [sys.executable, "-m", "halotile", "run", str(tmp_path / "job.yaml"), "--quiet"]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}) as driver:
        assert driver.wait(120) == 0
    assert not (seen / str(driver.pid)).exists()
    assert any(seen.iterdir()) == (axes == "zyx")
    want = ndimage.gaussian_filter(image, 1.0, mode="reflect")
    np.testing.assert_allclose(read_zarr(tmp_path / "o.zarr"), want, atol=1e-6)


def test_a_job_number_that_an_allocation_left_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(slurm_alloc.NODES, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with pytest.raises(ConfigError, match=r"^SLURM_JOB_ID is 12, and .* no Slurm allocation\. .*--cluster local"):
        slurm_alloc.check(sections.Cluster())
