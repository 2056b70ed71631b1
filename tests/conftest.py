"""What all tests share: one real cluster for the whole test session."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import Order, RunningCluster
from tests.batch_systems import GridEngine, Slurm, running_sge, running_slurm, why_no_sge, why_no_slurm
from tests.stores import ObjectServer, serving, told_by_environment

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # As a shell has it for what runs in the background; what tests start would inherit it, and never see Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much is tested, and what computes the tests of a GPU."""
    parser.addoption(
        "--thorough", action="store_true", help="also the tests marked thorough, which are left out without it"
    )
    parser.addoption(
        "--gpu-device",
        choices=["auto", "cuda", "cpu"],
        default="auto",
        help="tests marked gpu: on a GPU or else skipped (auto), failing without one (cuda), rehearsed on the CPU (cpu)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Show the row at which a test of a table failed: it is among the local variables."""
    config.option.showlocals = True


def pytest_report_header(config: pytest.Config) -> str:
    """Say it here as well: where several processes run the tests, the last line does not count what is left out."""
    return f"tests marked thorough: {'run' if config.getoption('--thorough') else 'left out, see --thorough'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked thorough, but for those that are named one by one."""
    if config.getoption("--thorough"):
        return
    named = [_node_id(argument, config) for argument in config.args if "::" in argument]
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        is_named = any(item.nodeid == each or item.nodeid.startswith((f"{each}[", f"{each}::")) for each in named)
        (left_out if item.get_closest_marker("thorough") and not is_named else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _node_id(argument: str, config: pytest.Config) -> str:
    """The node id that an argument of the command line means: its path may begin anywhere."""
    path, names = argument.split("::", 1)
    absolute = os.path.abspath(config.invocation_params.dir / path)
    return f"{os.path.relpath(absolute, config.rootpath)}::{names}"


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept for later is not taken from the user's cache, and does not go there."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _workers_to_come() -> Iterator[None]:
    """A plan in this process is not the last that it does: workers of other tests are forked from the same process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("halotile.graphs.clusters.workers.fork_server.expect_no_workers", lambda: None)
        yield


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whom the system does not know, as in a container, without HOME."""

    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


@pytest.fixture(scope="session")
def cluster() -> Iterator[RunningCluster]:
    """Two worker processes over TLS, started once."""
    with local.start(Order(workers=2, memory_bytes=4 * 2**30)) as running:
        yield running


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A real Slurm of two nodes, started once."""
    if reason := why_no_slurm():
        pytest.skip(reason)
    # Not among pytest's own: its daemons want a way to their socket that everybody may go.
    with TemporaryDirectory(prefix="halotile-slurm-") as folder, running_slurm(Path(folder)) as started:
        yield started


@pytest.fixture(scope="session")
def grid_engine() -> Iterator[GridEngine]:
    """A real Grid Engine of one machine, started once."""
    if reason := why_no_sge():
        pytest.skip(reason)
    with TemporaryDirectory(prefix="halotile-sge-") as folder, running_sge(Path(folder)) as started:
        yield started


@pytest.fixture(scope="session")
def object_server() -> Iterator[tuple[ObjectServer, str]]:
    """A local server of S3 with its address, started once."""
    with serving() as started:
        yield started


@pytest.fixture(scope="module")
def object_store(object_server: tuple[ObjectServer, str]) -> Iterator[ObjectServer]:
    """That server, which the environment names."""
    server, address = object_server
    with told_by_environment(address):
        yield server


@pytest.fixture
def as_in_a_worker() -> Iterator[None]:
    """One thread: torch divides its work among several, each with an end of its own; and in a busy machine they wait."""
    from halotile.tasks.devices.device import torch_threads

    with torch_threads():
        yield
