"""The bounded stream: every number comes back once, few are in flight, trouble is reported."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from dask import annotate

from halotile.errors import Stalled
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.runs.passes.stream import LARGEST_GROUP, TASKS_PER_WORKER, Grouping, Stream

pytestmark = pytest.mark.cluster


@dataclass
class Done:
    """A result as small as a receipt."""

    numbers: tuple[int, ...]
    seconds: float


def noop(numbers: tuple[int, ...]) -> Done:
    return Done(numbers, 1e-6 * len(numbers))


def fail_on_seven(numbers: tuple[int, ...]) -> Done:
    if 7 in numbers:
        raise ValueError("seven")
    return noop(numbers)


def die_once(numbers: tuple[int, ...], marker: str) -> Done:
    if 5 in numbers:
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return noop(numbers)
        os.kill(os.getpid(), signal.SIGKILL)
    return noop(numbers)


def sleep_long(numbers: tuple[int, ...]) -> Done:
    time.sleep(3)
    return noop(numbers)


def sleep_a_little(numbers: tuple[int, ...]) -> Done:
    time.sleep(0.5)
    return noop(numbers)


def stream_of(cluster: RunningCluster, function: object, **options: float) -> Stream:
    return Stream(cluster.client, function, name="noop", grouping=Grouping(cluster.workers), **options)  # type: ignore[arg-type]


def test_every_number_comes_back_once_and_few_tasks_are_in_flight(cluster: RunningCluster) -> None:
    stream = stream_of(cluster, noop)
    seen: Counter[int] = Counter()
    most = 0
    for answers in stream.answers(iter(range(5000)), 5000):
        most = max(most, len(stream._in_flight) + len(answers))
        for answer in answers:
            assert answer.result.numbers == answer.numbers
            seen.update(answer.numbers)
    assert seen == Counter(range(5000))
    assert most <= 2 * TASKS_PER_WORKER


def test_an_error_comes_back_with_its_numbers(cluster: RunningCluster) -> None:
    stream = stream_of(cluster, fail_on_seven)
    answers = [a for group in stream.answers(iter(range(20)), 20) for a in group]
    (bad,) = [a for a in answers if a.error is not None]
    assert 7 in bad.numbers
    assert isinstance(bad.error, ValueError)
    assert sorted(n for a in answers for n in a.numbers) == list(range(20))


def test_numbers_sent_again_come_back_alone(cluster: RunningCluster) -> None:
    stream = stream_of(cluster, noop)
    groups: list[tuple[int, ...]] = []
    for answers in stream.answers(iter(range(10)), 10):
        for answer in answers:
            if groups.count((3,)) == 0 and 3 in answer.numbers and answer.numbers != (3,):
                stream.again([3])
            groups.append(answer.numbers)
        if len(groups) == 1:
            stream.again([3])
    assert (3,) in groups


def test_a_drained_stream_hands_out_no_more(cluster: RunningCluster) -> None:
    stream = stream_of(cluster, noop)
    seen: list[int] = []
    for answers in stream.answers(iter(range(100_000)), 100_000):
        seen += [n for a in answers for n in a.numbers]
        stream.drain()
    assert 0 < len(seen) <= 2 * TASKS_PER_WORKER * LARGEST_GROUP
    assert len(set(seen)) == len(seen)


def test_a_drain_waits_for_tasks_on_workers_and_not_for_the_others(cluster: RunningCluster) -> None:
    stream = stream_of(cluster, sleep_a_little)
    on_workers = TASKS_PER_WORKER * cluster.workers
    answers = stream.answers(iter(range(on_workers + 2)), on_workers + 2, poll_seconds=0.1)
    groups = [next(group for group in answers if group)]
    with annotate(resources={"nowhere": 1}):
        groups.append(next(answers))
    assert max(stream.in_flight()) >= on_workers
    stream.drain()
    groups += answers
    assert sorted(n for group in groups for a in group for n in a.numbers) == list(range(on_workers))


def test_a_stream_without_answers_stalls_with_a_text(cluster: RunningCluster) -> None:
    stream = stream_of(cluster, sleep_long, stall_seconds=0.5)
    with pytest.raises(Stalled, match=r"run\.stall_seconds"):
        for _ in stream.answers(iter(range(2)), 2, poll_seconds=0.1):
            pass
    stream.abandon()
    time.sleep(3)


def test_a_result_on_a_worker_that_hangs_is_not_awaited_for_ever(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = cluster.client.run(os.getpid).values()
    stream = stream_of(cluster, noop, stall_seconds=1.0)
    gather = stream._gather
    found: list[Any] = []

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


def test_a_killed_worker_costs_only_what_was_in_flight(cluster: RunningCluster, tmp_path: object) -> None:
    from functools import partial

    stream = stream_of(cluster, partial(die_once, marker=f"{tmp_path}/died"))
    seen = Counter(
        n for answers in stream.answers(iter(range(2000)), 2000) for a in answers for n in a.numbers if a.result
    )
    assert seen == Counter(range(2000))


def test_groups_grow_with_fast_blocks_and_shrink_towards_the_end() -> None:
    grouping = Grouping(workers=2)
    assert grouping.size(10**6) == 1
    grouping.learn(1, 1e-5)
    assert grouping.size(10**6) == LARGEST_GROUP
    assert grouping.size(12) == 3
    for _ in range(50):
        grouping.learn(1, 5.0)
    assert grouping.size(10**6) == 1


def test_the_first_group_is_as_large_as_an_earlier_pass_allows() -> None:
    assert Grouping(workers=2).size(16) == 1
    assert Grouping(workers=2, seconds_per_block=0.05).size(16) == 4
    assert Grouping(workers=2, seconds_per_block=3.0).size(16) == 1


def test_one_worker_alone_need_not_share() -> None:
    alone, two = (Grouping(workers, target_seconds=10.0, seconds_per_block=0.2, keeps_all=True) for workers in (1, 2))
    assert (alone.size(1000), alone.size(30), two.size(30)) == (50, 30, 8)
    assert Grouping(1, target_seconds=10.0, seconds_per_block=0.2).size(30) == 15


def test_tasks_last_longer_where_one_scheduler_serves_many_workers() -> None:
    few, many = (Grouping(workers, seconds_per_block=0.05).size(10**6) for workers in (100, 1000))
    assert (few, many) == (20, 80)
