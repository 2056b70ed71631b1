"""Lost launches are replaced; launches that keep ending at once are given up, with the reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from distributed.core import Status

from halotile.errors import ClusterFailed
from halotile.graphs.clusters.launches.base import LaunchState
from halotile.graphs.clusters.launches.remote_cluster import Supervisor

PENDING = LaunchState(False, "PENDING (Resources)")


class FakeCluster:
    """Launches by name, and the names of those whose workers are connected."""

    status = Status.running

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {}
        self.here: set[str] = set()
        self.made = 0
        self.refusal: str | None = None

    @property
    def scheduler_info(self) -> dict[str, Any]:
        """The workers, in the form of Dask."""
        return {"workers": {name: {"name": name} for name in self.here}}

    def scale(self, count: int) -> None:
        """Make launches up to this number."""
        while len(self.workers) < count:
            self.made += 1
            launch = Mock(title=f"job {self.made}", refusal=self.refusal, state=PENDING)
            launch.log_tail.return_value = "no such module"
            self.workers[f"w{self.made}"] = launch

    def scale_down(self, names: Sequence[str]) -> None:
        """Drop launches."""
        for name in names:
            del self.workers[name]

    def sync(self, function: Any, *arguments: Any, **_: Any) -> Any:
        """Call the function at once."""
        return function(*arguments)


def query(launches: Sequence[Any]) -> dict[Any, LaunchState]:
    return {launch: launch.state for launch in launches}


class Watch:
    """A supervisor whose updates are called by hand, with its own clock."""

    def __init__(self, workers: int, clock: SimpleNamespace) -> None:
        self.clock, self.cluster, self.reports = clock, FakeCluster(), list[str]()
        self.supervisor = Supervisor(None, workers, cluster=self.cluster, query=query, report=self.reports.append)

    def rounds(self, count: int, seconds: float = 5.0) -> None:
        """Update some times."""
        for _ in range(count):
            self.supervisor._update()
            self.clock.now += seconds

    def end(self, *names: str) -> None:
        """End launches."""
        for name in names:
            self.cluster.here.discard(name)
            self.cluster.workers[name].state = LaunchState(True, "FAILED (NonZeroExitCode)")

    def end_at_once(self, times: int, seconds: float) -> None:
        """End all launches that have no worker, again and again."""
        for _ in range(times):
            self.rounds(1, seconds)
            self.end(*{*self.cluster.workers} - self.cluster.here)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Watch]:
    """Makes a watch of some workers."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("halotile.graphs.clusters.launches.remote_cluster.time.monotonic", lambda: clock.now)
    return lambda workers: Watch(workers, clock)


def test_a_launch_is_asked_for_each_worker_and_replaced_when_it_ends(watch: Callable[[int], Watch]) -> None:
    three = watch(3)
    three.rounds(2)
    assert [*three.cluster.workers] == ["w1", "w2", "w3"]
    assert three.supervisor.missing() == "3 PENDING (Resources)"
    three.cluster.here.add("w2")
    assert three.supervisor.missing() is None
    assert three.supervisor.missing(2) == "3 PENDING (Resources)"
    three.cluster.here |= {"w1", "w3"}
    three.rounds(1)
    three.end("w1")
    three.rounds(2)
    assert [*three.cluster.workers] == ["w2", "w3", "w4"]
    assert three.reports == ["1 worker lost (job 1: FAILED (NonZeroExitCode)); asking for it again"]


def test_launches_that_keep_ending_are_given_up_with_the_log_for_a_while(watch: Callable[[int], Watch]) -> None:
    two, one = watch(2), watch(1)
    two.end_at_once(4, seconds=60)
    assert two.cluster.made == 4
    said = r"4 workers in a row ended before .* job 3: FAILED .*\n.*no such module"
    with pytest.raises(ClusterFailed, match=said):
        two.supervisor.check()
    one.end_at_once(6, seconds=20)
    made = one.cluster.made
    with pytest.raises(ClusterFailed):
        one.supervisor.check()
    one.rounds(2, seconds=400)
    assert one.cluster.made == made + 1
    one.supervisor.check()
    one.end_at_once(2, seconds=40)
    one.supervisor.check()  # it is counted anew


def test_a_pause_lies_between_two_tries(watch: Callable[[int], Watch]) -> None:
    one = watch(1)
    one.end_at_once(1, seconds=5)
    one.rounds(2, seconds=0.5)
    assert one.cluster.made == 1
    one.rounds(5, seconds=0.5)
    assert one.cluster.made == 2


def test_launches_that_worked_are_replaced_without_end_and_do_not_count(watch: Callable[[int], Watch]) -> None:
    one, two = watch(1), watch(2)
    for number in range(1, 30):
        one.rounds(1)
        assert [*one.cluster.workers] == [f"w{number}"]
        one.cluster.here.add(f"w{number}")
        one.rounds(14)
        one.end(f"w{number}")
        one.rounds(2)
    one.supervisor.check()
    two.rounds(1)
    two.cluster.here |= {"w1", "w2"}
    two.rounds(14)
    two.end("w1", "w2")
    two.rounds(2)
    for _ in range(3):
        two.end(next(iter({*two.cluster.workers} - two.cluster.here)))
        two.rounds(8)
    two.supervisor.check()
    assert len(two.cluster.workers) == 2


def test_a_cluster_goes_on_with_the_workers_that_are_left(watch: Callable[[int], Watch]) -> None:
    two = watch(2)
    two.rounds(1)
    two.cluster.here.add("w1")
    while two.clock.now < 1000 and not (two.reports and "no more" in two.reports[-1]):
        two.end_at_once(1, seconds=25)
    assert "no more workers are asked for" in two.reports[-1]
    assert next(iter(two.cluster.workers)) == "w1"
    two.supervisor.check()
    for wanted, here in ((2, {"w1"}), (1, set[str]())):
        two.cluster.here = here
        with pytest.raises(ClusterFailed):
            two.supervisor.check(wanted)


def test_workers_without_room_and_refused_launches_are_not_waited_for(watch: Callable[[int], Watch]) -> None:
    two, one = watch(2), watch(1)
    two.supervisor.capacity = lambda: 1  # an allocation that has lost a node
    two.cluster.here.add("w1")
    two.supervisor.check()
    with pytest.raises(ClusterFailed, match="room for 1 of 2 workers"):
        two.supervisor.check(2)
    one.cluster.refusal = "sbatch: error: invalid partition."
    one.rounds(10, seconds=30)
    with pytest.raises(ClusterFailed, match="invalid partition"):
        one.supervisor.check()


def test_a_supervisor_that_stumbles_goes_on_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halotile.graphs.clusters.launches.remote_cluster.POLL_SECONDS", 0.01)
    cluster, reports = FakeCluster(), list[str]()
    scale, failures = cluster.scale, iter([True] * 5)

    def stumble(count: int) -> None:
        if next(failures, False):
            raise KeyError("a worker that has just gone")
        scale(count)

    monkeypatch.setattr(cluster, "scale", stumble)
    with Supervisor(None, 2, cluster=cluster, query=query, report=reports.append):
        deadline = time.monotonic() + 20
        while cluster.made < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert cluster.made == 2
    assert reports == ["supervising the workers failed, and is tried again: KeyError: 'a worker that has just gone'"]
