"""Processes that are killed, stopped or asked to end, and workers that are slow, hang or are gone: nothing is lost, and every block is done once."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import dask
import pytest
from distributed import Client, LocalCluster, Nanny, Status, WorkerPlugin

from halotile.cli.status import read_status, status_rows
from halotile.errors import ClusterFailed, ConfigError, OutputRefused, Stalled, Stopped
from halotile.graphs.clusters import base, local, scheduler
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.kinds import sections
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.passes import cluster_passes, worker_setup
from halotile.graphs.runs.passes.cluster_passes import BlockPass
from halotile.graphs.runs.passes.stream import LARGEST_GROUP, TASKS_PER_WORKER, Grouping, Stream, workers_of
from halotile.graphs.watching.progress import Progress
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.locks import WorkerLock
from tests.cases import thorough
from tests.faults import BLOCKS, REPOSITORY, Scene, is_alive, members, until
from tests.support import work_of

Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.cluster
Check = Callable[[], None]

PACE = 0.08


def order(workers: int = 2, **options: float) -> Order:
    return Order(workers=workers, memory_bytes=2**32, choice=sections.Cluster(dashboard=False), **options)  # type: ignore[arg-type]


def processes(cluster: RunningCluster) -> list[int]:
    return sorted(cluster.client.run(os.getpid).values())


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
            kill(sorted(scene.workers())[:kills])
            until(lambda enough=enough: len(scene.seen()) >= enough)  # type: ignore[misc]
        scene.set_pace(0)
        said, _ = driver.communicate(timeout=60)
    assert driver.returncode == 0, said
    check_whole()
    assert len(scene.seen()) < BLOCKS + 40
    assert scene.events("bad block") == scene.events("retry") == []


@pytest.mark.thorough
def test_workers_that_die_again_and_again_are_replaced_each_time(scene: Scene) -> None:
    for block in range(3):
        scene.make_trouble("die", block)
    with local.start(order(workers=1)) as cluster:
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
    worker_setup.BlockPlugin("a job", work_of(make_plan(scene.job())).task, scene.directory.path).teardown(None)
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
def test_workers_that_die_early_leave_no_traceback(deaths: int, tmp_path: Path, caplog: Any) -> None:
    """The others go on."""
    lost = pytest.raises(ConnectionError, match=r"does not answer .CommClosedError")
    ends: Any = lost if deaths == 2 else nullcontext()
    deadly = cast(worker_setup.BlockPlugin, Deadly(tmp_path, deaths))
    with local.start(order()) as cluster, ends, worker_setup.prepared(cluster.client, deadly) as failures:
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
            scene.set_pace(0)
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
    assert scene.run(stall_seconds=3, workers=2).done == BLOCKS
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


@dataclass
class Done:
    """A result as small as a receipt."""

    numbers: tuple[int, ...]
    seconds: float


def noop(numbers: tuple[int, ...], seconds: float = 0.0) -> Done:
    time.sleep(seconds)
    return Done(numbers, 1e-6 * len(numbers))


def fail_or_die_once(numbers: tuple[int, ...], marker: str) -> Done:
    """Seven fails, and five kills its worker once."""
    if 7 in numbers:
        raise ValueError("seven")
    with suppress(FileExistsError):
        if 5 in numbers:
            Path(marker).touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
    return noop(numbers)


def stream_of(cluster: RunningCluster, function: object, **options: float) -> Stream:
    return Stream(cluster.client, function, name="noop", grouping=Grouping(cluster.workers), **options)  # type: ignore[arg-type]


def test_errors_keep_numbers_and_a_kill_costs_only_what_was_in_flight(cluster: RunningCluster, tmp_path: Path) -> None:
    stream = stream_of(cluster, partial(fail_or_die_once, marker=f"{tmp_path}/died"))
    answers, again = list[Any](), [3]
    for group in stream.answers(iter(range(200)), 200):
        answers += group
        if len(answers) > 3 and again:
            stream.again([again.pop()])
    (bad,) = [answer for answer in answers if answer.error is not None]
    assert 7 in bad.numbers
    assert isinstance(bad.error, ValueError)
    assert Counter(n for answer in answers for n in answer.numbers) == Counter([*range(200), 3])
    assert (3,) in [answer.numbers for answer in answers], "what is sent again comes back alone"


def test_every_number_comes_back_once_and_few_tasks_are_in_flight(cluster: RunningCluster) -> None:
    stream = stream_of(cluster, noop)
    seen: Counter[int] = Counter()
    for answers in stream.answers(iter(range(5000)), 5000):
        assert len(stream._in_flight) + len(answers) <= 2 * TASKS_PER_WORKER
        for answer in answers:
            assert answer.result.numbers == answer.numbers
            seen.update(answer.numbers)
    assert seen == Counter(range(5000))


def test_a_drain_waits_for_tasks_on_workers_and_not_for_the_others(cluster: RunningCluster) -> None:
    stream = stream_of(cluster, partial(noop, seconds=0.5))
    on_workers = TASKS_PER_WORKER * cluster.workers
    answers = stream.answers(iter(range(on_workers + 2)), on_workers + 2, poll_seconds=0.1)
    groups = [next(group for group in answers if group)]
    with dask.annotate(resources={"nowhere": 1}):
        groups.append(next(answers))
    assert max(stream.in_flight()) >= on_workers
    stream.drain()
    groups += answers
    assert sorted(n for group in groups for a in group for n in a.numbers) == list(range(on_workers))


def test_a_result_on_a_worker_that_hangs_is_not_awaited(cluster: RunningCluster, monkeypatch: Patch) -> None:
    workers = processes(cluster)
    stream = stream_of(cluster, noop, stall_seconds=1.0)
    gather, found = stream._gather, list[Any]()

    def gather_from_the_stopped(futures: list[Any]) -> list[Any]:
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        fetched = gather(futures)
        found.extend(fetched)
        return fetched

    monkeypatch.setattr(stream, "_gather", gather_from_the_stopped)
    began = time.monotonic()
    try:
        with pytest.raises(Stalled, match="no block came back for 1 s"):
            list(stream.answers(iter(range(2)), 2))
        assert time.monotonic() - began < 30
        assert set(found) == {None}
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGCONT)
        stream.abandon()


def test_groups_grow_with_fast_blocks_many_workers_and_what_is_left() -> None:
    grouping = Grouping(workers=2)
    assert (grouping.size(10**6), grouping.limit_seconds(4)) == (1, None)
    grouping.learn(1, 1e-5)
    assert (grouping.size(10**6), grouping.size(12)) == (LARGEST_GROUP, 3)
    for _ in range(50):
        grouping.learn(1, 5.0)
    assert grouping.size(10**6) == 1
    for seconds, size, limit in ((0.01, 4, 2.0), (0.05, 4, 2.0), (3.0, 1, 24.0)):
        grouping = Grouping(workers=2, seconds_per_block=seconds)
        assert (grouping.size(16), grouping.limit_seconds(4)) == (size, limit)
    alone, two = (Grouping(workers, 10.0, seconds_per_block=0.2, keeps_all=True) for workers in (1, 2))
    assert (alone.size(1000), alone.size(30), two.size(30)) == (50, 30, 8), "one worker alone need not share"
    assert Grouping(1, target_seconds=10.0, seconds_per_block=0.2).size(30) == 15
    assert [Grouping(n, seconds_per_block=0.05).size(10**6) for n in (100, 1000)] == [20, 80]


def test_others_take_the_work_of_a_worker_that_is_five_times_slower(scene: Scene, check_whole: Check) -> None:
    scene.set_pace(PACE)
    with local.start(order()) as cluster:
        fast, slow = processes(cluster)
        scene.set_pace_of(slow, 5 * PACE)
        scene.run(cluster)
    # One queue for both would give it every sixth.
    assert 1 <= len(scene.blocks_of(slow)) <= len(scene.blocks_of(fast)) / 3
    assert sorted(scene.seen()) == list(range(BLOCKS))
    check_whole()


@pytest.mark.thorough
def test_a_worker_that_hangs_is_replaced(scene: Scene, check_whole: Check, monkeypatch: Patch) -> None:
    monkeypatch.setattr(base, "LEAST_SILENCE_SECONDS", 1.0)
    scene.set_pace(3 * PACE)
    scene.make_trouble("hang", 9)
    with local.start(order(stall_seconds=1.0)) as cluster:
        before = processes(cluster)
        scene.run(cluster)
        after = processes(cluster)
    (hung,) = set(before) - set(after)
    assert not is_alive(hung)
    assert 9 in scene.blocks_of(hung)
    (other,) = set(before) - {hung}
    (new,) = set(after) - {other}
    assert scene.blocks_of(new)
    # What was in the hung worker's hands was done again, and nothing else; the cluster was not started anew.
    done_again = {block for block in range(BLOCKS) if scene.seen().count(block) > 1}
    assert 9 in done_again <= set(scene.blocks_of(hung))
    assert scene.events("message") == []
    check_whole()


@pytest.mark.parametrize(("how", "said"), [("blocks", "blocks fail there"), ("load", "cannot be loaded")])
def test_a_sick_worker_is_named(scene: Scene, cluster: RunningCluster, check_whole: Check, how: str, said: str) -> None:
    address, sick = cluster.client.run(os.getpid).popitem()
    scene.make_sick(sick, how)
    scene.set_pace(0.005)
    outcome = scene.run(cluster, retries=1)
    assert (outcome.done, outcome.quarantined) == (BLOCKS, ())
    (retired,) = outcome.retired
    assert retired.startswith(f"{address} on {socket.gethostname()}: ")
    assert said in retired
    assert f"no libfoo.so for sick-{sick}" in retired
    assert scene.status()["retired"] == [retired]
    assert ("retired", retired) in status_rows(read_status(scene.directory.path))
    (event,) = [event for event in scene.events("message") if "No more blocks go to" in event["text"]]
    assert f"worker {address} on {socket.gethostname()}" in event["text"]
    assert scene.blocks_of(sick) == []
    check_whole()


@pytest.mark.thorough
def test_a_worker_that_wakes_when_the_run_is_over_spoils_nothing(scene: Scene, check_whole: Check) -> None:
    scene.set_pace(PACE)
    scene.make_trouble("tear", 9)
    options: Any = {"host": "127.0.0.1", "protocol": "tcp://", "dashboard_address": "127.0.0.1:0", "n_workers": 0}
    options["scheduler_kwargs"] = {"dashboard": False, "worker_ttl": 1.0}
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with ExitStack() as stack:
        address = stack.enter_context(LocalCluster(**options)).scheduler_address
        words = [address, "--death-timeout", "60", "--no-nanny"]
        command = [sys.executable, "-m", "halotile.graphs.clusters.workers", *words]
        for _ in range(2):
            stack.callback(stack.enter_context(subprocess.Popen(command, cwd=REPOSITORY, env=environment)).kill)
        choice = sections.Cluster(kind="scheduler", address=address, tls=False)
        cluster = stack.enter_context(scheduler.start(Order(workers=2, memory_bytes=2**32, choice=choice)))
        until(lambda: cluster.workers == 2)
        scene.run(cluster)
        check_whole()
        (asleep,) = {process for process in scene.workers() if 9 in scene.blocks_of(process)[-3:]}
        with pytest.raises(OutputRefused, match=f"still hold .*{asleep} on"):
            WorkerLock(scene.directory.path).wait_for_all(0)
        os.kill(asleep, signal.SIGCONT)
        WorkerLock(scene.directory.path).wait_for_all(20)
        check_whole()


@dataclass(kw_only=True)
class Growing(RunningCluster):
    """A cluster whose second worker comes later, or not at all."""

    running: LocalCluster
    comes: bool

    def missing(self, wanted: int = 1) -> str | None:
        if len(workers_of(self.client)) >= wanted:
            return None
        if self.comes:
            self.running.scale(2)
        return "1 PENDING"

    def check(self, wanted: int = 1) -> None:
        if not self.comes:
            raise ClusterFailed("1 worker ended before it did anything.")


@pytest.mark.parametrize("comes", [True, False])
def test_a_sick_worker_ends_a_run_only_where_no_other_comes(scene: Scene, monkeypatch: Patch, comes: bool) -> None:
    monkeypatch.setattr(cluster_passes, "RESTART_SECONDS", 1.0)
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0") as running,
        Client(running, set_as_default=False) as client,
    ):
        cluster = Growing(client, 2, running=running, comes=comes)
        (sick,) = processes(cluster)
        scene.make_sick(sick, "load")
        with nullcontext() if comes else pytest.raises(ConfigError, match=r"ImportError: no libfoo\.so"):
            scene.run(cluster)
    assert len(scene.journalled()) == (BLOCKS if comes else 0)


def test_blocks_that_fail_everywhere_retire_no_worker(scene: Scene, cluster: RunningCluster) -> None:
    for block in range(20, 40):
        scene.make_trouble("raise", block)
    outcome = scene.run(cluster, retries=1, on_bad_block="quarantine")
    assert ([bad.number for bad in outcome.quarantined], outcome.retired) == (list(range(20, 40)), ())


def test_a_retry_goes_to_another_host_or_worker(monkeypatch: Patch) -> None:
    first, second, third, last = four = ["tls://n1:1", "tls://n2:1", "tls://n3:1", "tls://n1:2"]
    monkeypatch.setattr(BlockPass, "_find_fit", lambda *_: set(four))
    blocks, stream = object.__new__(BlockPass), Mock()
    for failed, elsewhere in (
        ([first], [second, third]),  # another host
        ([first, second], [third]),
        ([first, second, third], [last]),  # another worker
        (four, four),
        ([""], four),  # nobody knows where
    ):
        blocks.failed_on = {7: failed}
        assert blocks._elsewhere(7, stream) == set(elsewhere)


@pytest.mark.parametrize("alone", [False, True])
def test_a_retry_whose_workers_are_gone_goes_to_others(cluster: RunningCluster, alone: bool) -> None:
    stream = Stream(cluster.client, len, name=f"tied{alone:d}", grouping=Grouping(cluster.workers))
    stream.again([7], alone=alone, workers=["tcp://127.0.0.1:1"])
    numbers = list[int]()
    for answers in stream.answers(iter(range(3)), 3, poll_seconds=0.1):
        numbers += [number for answer in answers for number in answer.numbers]
        if not answers:
            stream.look_after_tied(workers_of(cluster.client))
    assert sorted(numbers) == [0, 1, 2, 7]


def test_a_slow_task_hands_blocks_back(
    cluster: RunningCluster, scene: Scene, check_whole: Check, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Grouping, "limit_seconds", lambda *_: 0.0)
    monkeypatch.setattr(Grouping, "size", lambda *_: 16)
    assert (scene.run(cluster).done, sorted(scene.seen())) == (BLOCKS, list(range(BLOCKS)))
    check_whole()
