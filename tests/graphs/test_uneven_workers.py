"""Workers that are slow, hang, or are gone with their whole node: the others do their blocks, with the same bits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
from distributed import Client, LocalCluster

from halotile.cli.status import read_status, status_rows
from halotile.errors import ClusterFailed, ConfigError, OutputRefused
from halotile.graphs.clusters import base, local, scheduler
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.kinds import sections
from halotile.graphs.runs.passes import cluster_passes
from halotile.graphs.runs.passes.cluster_passes import BlockPass
from halotile.graphs.runs.passes.stream import Grouping, Stream, workers_of
from halotile.storage.run_directory.locks import WorkerLock
from tests.faults import BLOCKS, REPOSITORY, Scene, is_alive, members, until

pytestmark = pytest.mark.cluster

PACE = 0.1
FOUR = {"tls://n1:1", "tls://n1:2", "tls://n2:1", "tls://n3:1"}


def order(**options: float) -> Order:
    return Order(workers=2, memory_bytes=2**32, choice=sections.Cluster(dashboard=False), **options)  # type: ignore[arg-type]


def processes(cluster: RunningCluster) -> list[int]:
    return sorted(cluster.client.run(os.getpid).values())


def test_others_take_the_work_of_a_worker_that_is_five_times_slower(
    scene: Scene, check_whole: Callable[[], None]
) -> None:
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
def test_a_worker_that_hangs_is_replaced_while_the_others_go_on(
    scene: Scene, check_whole: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize(("when", "words"), [("blocks", "blocks fail there"), ("load", "cannot be loaded")])
def test_a_sick_worker_is_named_and_the_others_do_its_blocks(
    scene: Scene, cluster: RunningCluster, check_whole: Callable[[], None], when: str, words: str
) -> None:
    address, sick = cluster.client.run(os.getpid).popitem()
    scene.make_sick(sick, when)
    scene.set_pace(0.005)
    outcome = scene.run(cluster, retries=1)
    assert (outcome.done, outcome.quarantined) == (BLOCKS, ())
    (retired,) = outcome.retired
    assert retired.startswith(f"{address} on {socket.gethostname()}: ")
    assert words in retired
    assert f"no libfoo.so for sick-{sick}" in retired
    assert scene.status()["retired"] == [retired]
    assert ("retired", retired) in status_rows(read_status(scene.directory.path))
    (event,) = [event for event in scene.events("message") if "No more blocks go to" in event["text"]]
    assert f"worker {address} on {socket.gethostname()}" in event["text"]
    assert scene.blocks_of(sick) == []
    check_whole()


def test_a_job_that_no_worker_can_load_fails_with_the_error(scene: Scene, cluster: RunningCluster) -> None:
    for process in processes(cluster):
        scene.make_sick(process, "load")
    with pytest.raises(ConfigError, match=r"ImportError: no libfoo\.so"):
        scene.run(cluster)
    assert scene.journalled() == set()


@pytest.mark.thorough
def test_a_block_that_kills_the_only_worker_that_can_load_the_job_is_the_one_that_fails(scene: Scene) -> None:
    scene.make_trouble("die", 9)
    with local.start(order()) as cluster:
        scene.make_sick(processes(cluster)[0], "load")
        outcome = scene.run(cluster, retries=0, on_bad_block="quarantine")
    assert [bad.number for bad in outcome.quarantined] == [9]
    assert scene.journalled() == set(range(BLOCKS)) - {9}


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
def test_a_sick_worker_that_comes_first_ends_a_run_only_where_no_other_comes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
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
    assert [bad.number for bad in outcome.quarantined] == list(range(20, 40))
    assert outcome.retired == ()


@pytest.mark.parametrize(
    ("failed", "elsewhere"),
    [
        (["tls://n1:1"], {"tls://n2:1", "tls://n3:1"}),  # another host
        (["tls://n1:1", "tls://n2:1"], {"tls://n3:1"}),
        (["tls://n1:1", "tls://n2:1", "tls://n3:1"], {"tls://n1:2"}),  # another worker
        (["tls://n1:1", "tls://n1:2", "tls://n2:1", "tls://n3:1"], FOUR),
        ([""], FOUR),  # nobody knows where
    ],
)
def test_a_retry_goes_to_another_host_or_at_least_to_another_worker(
    failed: list[str], elsewhere: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockPass, "_find_fit", lambda *_: set(FOUR))
    blocks = object.__new__(BlockPass)
    blocks.failed_on = {7: failed}
    stream: Any = None
    assert blocks._elsewhere(7, stream) == elsewhere


@pytest.mark.parametrize("alone", [False, True])
def test_a_retry_whose_workers_are_gone_goes_to_others(cluster: RunningCluster, alone: bool) -> None:
    stream = Stream(cluster.client, len, name=f"tied{alone:d}", grouping=Grouping(cluster.workers))
    stream.again([7], alone=alone, workers=["tcp://127.0.0.1:1"])
    numbers = []
    for answers in stream.answers(iter(range(3)), 3, poll_seconds=0.1):
        numbers += [number for answer in answers for number in answer.numbers]
        if not answers:
            stream.look_after_tied(workers_of(cluster.client))
    assert sorted(numbers) == [0, 1, 2, 7]


@contextmanager
def nodes(address: str, count: int, *options: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Nodes of one worker each: process groups of a nanny and its worker."""
    worker = ("-m", "halotile.graphs.clusters.workers", address, "--death-timeout", "60")
    command = [sys.executable, *worker, *options]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    started = [subprocess.Popen(command, cwd=REPOSITORY, env=environment, start_new_session=True) for _ in range(count)]
    try:
        yield started
    finally:
        for node in started:
            lose(node)


def lose(node: subprocess.Popen[bytes]) -> None:
    """Kill every process of a node at once."""
    if members(node.pid):
        os.killpg(node.pid, signal.SIGKILL)
    node.wait()


@contextmanager
def joined(address: str) -> Iterator[RunningCluster]:
    """The two nodes of a scheduler, once they are there."""
    choice = sections.Cluster(kind="scheduler", address=address, tls=False)
    with scheduler.start(Order(workers=2, memory_bytes=2**32, choice=choice)) as cluster:
        until(lambda: cluster.workers == 2)
        yield cluster


@contextmanager
def some_scheduler(**options: float) -> Iterator[str]:
    """The address of a scheduler that has no workers."""
    with LocalCluster(
        n_workers=0,
        protocol="tcp://",
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        scheduler_kwargs={"dashboard": False, **options},
    ) as running:
        yield running.scheduler_address


@pytest.mark.thorough
def test_a_node_that_is_lost_in_the_middle_of_a_write_leaves_nothing_behind(
    scene: Scene, check_whole: Callable[[], None]
) -> None:
    scene.set_pace(PACE)
    torn = scene.make_trouble("tear", 9)
    lost: list[set[int]] = []

    def lose_the_writer(_: object) -> None:
        if not lost and not torn.exists():
            # The other node may be in the middle of a write as well, and end it meanwhile.
            halves = [half for half in scene.output.rglob("*.partial") if half.exists()]
            assert any(half.stat().st_size for half in halves)
            (writer,) = (node for node in started if members(node.pid) & writers())
            lost.append(members(writer.pid))
            lose(writer)

    def writers() -> set[int]:
        return {process for process in scene.workers() if 9 in scene.blocks_of(process)}

    with some_scheduler() as address, nodes(address, 2) as started, joined(address) as cluster:
        scene.run(cluster, observer=lose_the_writer)
    assert len(lost[0]) >= 2
    check_whole()


@pytest.mark.thorough
def test_a_worker_that_wakes_when_the_run_is_over_spoils_nothing(scene: Scene, check_whole: Callable[[], None]) -> None:
    scene.set_pace(PACE)
    scene.make_trouble("tear", 9)
    with some_scheduler(worker_ttl=1.0) as address, nodes(address, 2, "--no-nanny"), joined(address) as cluster:
        scene.run(cluster)
        check_whole()
        (asleep,) = {process for process in scene.workers() if 9 in scene.blocks_of(process)[-3:]}
        with pytest.raises(OutputRefused, match=f"still hold .*{asleep} on"):
            WorkerLock(scene.directory.path).wait_for_all(0)
        os.kill(asleep, signal.SIGCONT)
        WorkerLock(scene.directory.path).wait_for_all(20)
        check_whole()


def test_a_task_that_took_too_long_hands_back_what_it_has_not_begun(
    cluster: RunningCluster, scene: Scene, check_whole: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grouping, "limit_seconds", lambda *_: 0.0)
    monkeypatch.setattr(Grouping, "size", lambda *_: 16)
    outcome = scene.run(cluster)
    assert outcome.done == BLOCKS
    assert sorted(scene.seen()) == list(range(BLOCKS))
    check_whole()


def test_tasks_have_a_limit_once_it_is_known_how_long_blocks_take() -> None:
    assert Grouping(2).limit_seconds(4) is None
    assert Grouping(2, seconds_per_block=0.01).limit_seconds(4) == 2.0
    assert Grouping(2, seconds_per_block=3.0).limit_seconds(4) == 24.0
