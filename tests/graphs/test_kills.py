"""Processes that are killed, stopped or asked to end: nothing is lost, and nothing done is done again."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import dask
import pytest
from distributed import Nanny, Status, WorkerPlugin

from halotile.errors import OutputRefused, Stopped
from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.kinds import sections
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.passes import worker_setup
from halotile.graphs.watching.progress import Progress
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.locks import WorkerLock
from tests.cases import thorough
from tests.faults import BLOCKS, Scene, is_alive, members, until
from tests.support import work_of

Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.cluster
Check = Callable[[], None]

PACE = 0.08


@contextmanager
def running(scene: Scene, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A run in a process of its own that has done a few blocks."""
    scene.set_pace(PACE)
    driver = scene.start(**options)
    try:
        until(lambda: driver.poll() is not None or len(scene.journalled()) >= 6)
        assert driver.poll() is None, driver.communicate()[0]
        yield driver
    finally:
        kill(members(driver.pid))
        driver.communicate()


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # some end by themselves once their driver is gone
            os.kill(pid, signal.SIGKILL)


def test_killed_workers_are_replaced_and_the_run_goes_on(scene: Scene, check_whole: Check) -> None:
    with running(scene) as driver:
        for kills in (1, 1, 2):
            enough = len(scene.seen()) + 3
            workers = sorted(scene.workers())
            kill(workers[:kills])
            until(partial(scene.has_seen, enough))
        said, _ = driver.communicate(timeout=60)
    assert driver.returncode == 0, said
    check_whole()
    assert len(scene.seen()) < BLOCKS + 40
    assert scene.events("bad block") == scene.events("retry") == []


@pytest.mark.thorough
def test_workers_that_die_again_and_again_are_replaced_each_time(scene: Scene) -> None:
    for block in range(3):
        scene.make_trouble("die", block)
    with local.start(Order(workers=1, memory_bytes=2**32, choice=sections.Cluster(dashboard=False))) as cluster:
        # Dask would otherwise give a worker up that is not back after 15 s.
        assert dask.config.get("distributed.deploy.lost-worker-timeout") == "365 days"
        outcome = scene.run(cluster, retries=0, on_bad_block="quarantine", workers=1)
        assert [bad.number for bad in outcome.quarantined] == [0, 1, 2]
        (nanny,) = cluster.client.cluster.workers.values()
        until(lambda: nanny.process.status == Status.running, seconds=15)


def test_a_second_run_is_refused_at_once_and_a_killed_driver_loses_nothing_that_was_journalled(
    scene: Scene, cluster: RunningCluster, check_resumes: Check
) -> None:
    with running(scene) as driver:
        scene.set_pace(0.5)  # the first has to be there still
        for fresh in (False, True):
            with pytest.raises(OutputRefused, match=rf"in use: process {driver.pid} on .*, started 2"):
                scene.run(cluster, fresh=fresh)
        assert RunDirectory(scene.directory.path).is_running() is not None
        scene.set_pace(PACE)
        until(lambda: len(scene.journalled()) >= 30)
        driver.kill()
        driver.wait()
        assert scene.status()["state"] == "running"
        # Its workers may still be alive: the next run has to wait for them.
        check_resumes()


def test_a_worker_of_a_driver_that_is_gone_may_not_write(scene: Scene, monkeypatch: Patch) -> None:
    with scene.directory.lock():
        gone = scene.directory.driver()
    with scene.directory.lock(), pytest.raises(OutputRefused, match="this worker belongs to process"):
        WorkerLock(scene.directory.path).hold(gone)
    WorkerLock(scene.directory.path).wait_for_all(0)
    monkeypatch.setattr(worker_setup, "SETUP_SECONDS", 0.1)
    plugin = worker_setup.BlockPlugin("a job", work_of(make_plan(scene.job())).task, scene.directory.path)
    plugin.teardown(None)
    assert worker_setup.run_blocks((0,), "a job", scene.directory).done == []


class Deadly(WorkerPlugin):  # type: ignore[misc]
    """A plugin that kills the first workers that load it."""

    name = "deadly"

    def __init__(self, folder: Path, deaths: int) -> None:
        self.folder, self.deaths = folder, deaths

    def setup(self, worker: Any) -> None:
        for number in range(self.deaths):
            with suppress(FileExistsError):
                (self.folder / str(number)).mkdir()
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("deaths", [1, 2])
def test_workers_that_die_early_leave_no_traceback(
    deaths: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The others go on."""
    ends: Any = pytest.raises(ConnectionError, match=r"does not answer .CommClosedError")
    ends = ends if deaths == 2 else nullcontext()
    order = Order(workers=2, memory_bytes=2**32, choice=sections.Cluster(dashboard=False))
    deadly = cast(worker_setup.BlockPlugin, Deadly(tmp_path, deaths))
    with local.start(order) as cluster, ends, worker_setup.prepared(cluster.client, deadly) as failures:
        assert failures == []
    assert len(list(tmp_path.iterdir())) == deaths
    gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_a_run_that_breaks_off_is_waited_out(scene: Scene, cluster: RunningCluster, check_resumes: Check) -> None:
    def break_off(progress: Progress) -> None:
        if progress.done > 5:
            raise RuntimeError("the observer fell over")

    scene.set_pace(0.3)
    with pytest.raises(RuntimeError, match="fell over"):
        scene.run(cluster, observer=break_off)
    with pytest.raises(OutputRefused, match="still hold"):
        # The tasks that were handed out end with the block at hand; until then the output is not free.
        WorkerLock(scene.directory.path).wait_for_all(0)
    assert scene.status()["state"] == "failed"
    check_resumes()


def test_a_lost_scheduler_is_started_anew(scene: Scene, check_whole: Check, monkeypatch: Patch) -> None:
    started: list[RunningCluster] = []
    start = local.start

    @contextmanager
    def noted(order: Order) -> Iterator[RunningCluster]:
        with start(order) as cluster:
            started.append(cluster)
            yield cluster

    done: set[int] = set()
    said: list[str] = []

    def kill_scheduler(progress: Progress) -> None:
        said.append(progress.message)
        if progress.done > 10 and not done:
            done.update(scene.journalled())
            scene.forget()
            running = started[0].client.cluster
            running.sync(running.scheduler.close)

    monkeypatch.setattr(local, "start", noted)
    scene.set_pace(PACE)
    scene.run(observer=kill_scheduler)
    assert len(started) == 2
    assert "Starting the cluster anew, going on from the journal" in "\n".join(said)
    assert len(done) > 10
    assert done.isdisjoint(scene.seen())
    check_whole()


def test_a_worker_that_hangs_is_ended_with_its_cluster(scene: Scene, check_whole: Check) -> None:
    scene.make_trouble("hang", 9)
    scene.set_pace(0.02)
    outcome = scene.run(stall_seconds=3, workers=2)
    assert outcome.done == BLOCKS
    (anew,) = [event["text"] for event in scene.events("message") if "anew" in event["text"]]
    assert "no block came back for 3 s" in anew
    assert "run.stall_seconds" in anew
    assert not scene.workers()
    check_whole()


ENDS = [("SIGTERM", 1, "stopped on SIGTERM"), thorough("SIGUSR1", 1, "stopped on SIGUSR1")]
ENDS += [thorough("SIGHUP", 1, "stopped on SIGHUP"), ("SIGINT", 1, "resume"), thorough("SIGINT", 3, "resume")]


@pytest.mark.parametrize(("name", "count", "words"), ENDS)
def test_a_signal_keeps_what_is_done(scene: Scene, check_resumes: Check, name: str, count: int, words: str) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # heeded also where all of this was started by nohup
    try:
        with running(scene) as driver:
            workers = scene.workers()
            for _ in range(count):  # to the workers too, but for what is for the driver alone
                (os.kill if name == "SIGUSR1" else os.killpg)(driver.pid, signal.Signals[name])
                time.sleep(0.05)
            # Ctrl-C: 10 s where a press tears what closes.
            said, _ = driver.communicate(timeout=8 if name == "SIGINT" else 30)
            until(lambda: not members(driver.pid) and not any(map(is_alive, workers)), seconds=5)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert driver.returncode == (130 if name == "SIGINT" else 75), said
    assert words in said
    assert "Traceback" not in said
    status = scene.status()
    assert (status["state"], status["done"]) == ("stopped", len(scene.journalled()))
    assert name == "SIGINT" or name in status["reason"]
    assert 6 <= len(scene.journalled()) < BLOCKS
    check_resumes()


def test_a_drain_does_not_wait_for_workers_that_do_not_come_back(scene: Scene, monkeypatch: Patch) -> None:
    for block in range(BLOCKS):
        scene.make_trouble("die", block)
    requested: list[float] = []

    def ask(progress: Progress) -> None:
        if not requested and len(scene.seen()) >= 2:
            requested.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Nanny, "_on_worker_exit_sync", lambda *_: None)
    with pytest.raises(Stopped, match="stopped on SIGTERM with 0 of 64 blocks done"):
        scene.run(observer=ask)
    assert time.monotonic() - requested[0] < 20


@pytest.mark.parametrize("send", [thorough(os.kill), os.killpg], ids=["the driver", "every process"])
def test_a_signal_while_the_cluster_starts_stops_the_run(scene: Scene, send: Callable[[int, int], None]) -> None:
    driver = scene.start()
    until(lambda: scene.status().get("state") == "running")
    send(driver.pid, signal.SIGTERM)
    said, _ = driver.communicate(timeout=60)
    assert driver.returncode == 75, said
    assert scene.seen() == []
