"""The dashboard's bar of a phase counts the blocks of the job, done and to come."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.runs.passes.stream import Grouping, Stream
from halotile.graphs.watching.bars import BlockBar, show_blocks, task_key
from tests.graphs.test_stream import noop

DONE = ("memory", "released")


def bar_of(cluster: RunningCluster, phase: str) -> dict[str, int]:
    """The numbers on the dashboard: blocks done, and all of them."""

    def look(phase: str, dask_scheduler: Any) -> dict[str, int]:
        states = dask_scheduler.task_prefixes[phase].states
        return {state: count for state, count in states.items() if count and state != "forgotten"}

    shown: dict[str, int] = cluster.client.run_on_scheduler(look, phase=phase)
    return {"done": sum(shown.get(state, 0) for state in DONE), "all": sum(shown.values())}


def ends_at(cluster: RunningCluster, phase: str, total: int) -> bool:
    """Wait until the bar shows that all blocks are done; the scheduler forgets the last tasks a little later."""
    for _ in range(100):
        if bar_of(cluster, phase) == {"done": total, "all": total}:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.cluster
def test_the_bar_counts_blocks_from_those_that_were_done_before_to_all(cluster: RunningCluster) -> None:
    stream = Stream(cluster.client, noop, name="halves", grouping=Grouping(2, least=7))
    seen, middle = 0, None
    show_blocks(cluster.client, "halves", done=100, total=400)
    for answers in stream.answers(iter(range(100, 400)), 300):
        seen += sum(len(answer.numbers) for answer in answers)
        if middle is None and answers:
            middle = bar_of(cluster, "halves")
            assert middle["all"] == 400
            assert 100 + seen <= middle["done"] <= 400
    assert seen == 300
    assert ends_at(cluster, "halves", 400)


@pytest.mark.cluster
def test_iterations_are_groups_of_one_bar_and_stages_are_bars_of_their_own(cluster: RunningCluster) -> None:
    for iteration in range(2):
        show_blocks(cluster.client, "twice", done=10, total=60, stages=("load", "store", "twice"))
        stream = Stream(cluster.client, noop, name="twice", grouping=Grouping(2), iteration=iteration)
        groups: set[str] = set()
        for _ in stream.answers(iter(range(10, 60)), 50):
            groups |= cluster.client.run_on_scheduler(lambda dask_scheduler: set(dask_scheduler.task_groups))
            assert bar_of(cluster, "twice")["all"] == 60
        assert f"twice-it{iteration + 1:03d}" in groups
        assert all(ends_at(cluster, bar, 60) for bar in ("twice", "load", "store"))


@pytest.mark.cluster
def test_a_second_run_on_the_same_scheduler_counts_anew(cluster: RunningCluster) -> None:
    for total in (30, 20):
        show_blocks(cluster.client, "again", done=0, total=total)
        stream = Stream(cluster.client, noop, name="again", grouping=Grouping(2))
        list(stream.answers(iter(range(total)), total))
        assert ends_at(cluster, "again", total)


def test_a_release_of_dask_that_keeps_other_books_costs_the_bar_and_nothing_else() -> None:
    bar = BlockBar("denoise", 0, 10)
    bar.start(SimpleNamespace(plugins={}))
    bar.transition(task_key("denoise", 0, 3), "processing", "memory")
    bar.transition(("another", 1), "processing", "memory")
    assert bar.done == 3
