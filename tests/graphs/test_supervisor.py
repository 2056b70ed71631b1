"""Lost launches are replaced; launches that keep ending at once are given up, with the reason."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from distributed.core import Status

from halotile.errors import ClusterFailed
from halotile.graphs.clusters.launches.base import Launch, LaunchState
from halotile.graphs.clusters.launches.remote_cluster import Supervisor


@dataclass(eq=False)
class FakeLaunch:
    """A launch with a given state."""

    title: str
    refusal: str | None = None
    state: LaunchState = field(default_factory=lambda: LaunchState(False, "PENDING (Resources)"))

    def log_tail(self) -> str:
        """The end of its log."""
        return "no such module"


class FakeCluster:
    """Launches by name, and the names of those whose workers are connected."""

    status = Status.running

    def __init__(self) -> None:
        self.workers: dict[str, FakeLaunch] = {}
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
            self.workers[f"w{self.made}"] = FakeLaunch(f"job {self.made}", self.refusal)

    def scale_down(self, names: Sequence[str]) -> None:
        """Drop launches."""
        for name in names:
            del self.workers[name]

    def sync(self, function: Any, *arguments: Any, **_: Any) -> Any:
        """Call the function at once."""
        return function(*arguments)


class Watch:
    """A supervisor whose updates are called by hand, with its own clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
        self.now = 0.0
        monkeypatch.setattr("halotile.graphs.clusters.launches.remote_cluster.time.monotonic", lambda: self.now)
        self.cluster = FakeCluster()
        self.reports: list[str] = []
        self.supervisor = Supervisor(None, workers, cluster=self.cluster, query=query, report=self.reports.append)

    def rounds(self, count: int, seconds: float = 5.0) -> None:
        """Update some times."""
        for _ in range(count):
            self.supervisor._update()
            self.now += seconds

    def end(self, name: str) -> None:
        """End a launch."""
        self.cluster.here.discard(name)
        self.cluster.workers[name].state = LaunchState(True, "FAILED (NonZeroExitCode)")


def query(launches: Sequence[Launch]) -> dict[Launch, LaunchState]:
    return {launch: launch.state for launch in launches if isinstance(launch, FakeLaunch)}


def test_as_many_launches_are_asked_for_as_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, 3)
    watch.rounds(2)
    assert [*watch.cluster.workers] == ["w1", "w2", "w3"]
    assert watch.supervisor.missing() == "3 PENDING (Resources)"
    watch.cluster.here.add("w2")
    assert watch.supervisor.missing() is None
    assert watch.supervisor.missing(2) == "3 PENDING (Resources)"


def test_a_launch_that_ended_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, 2)
    watch.rounds(1)
    watch.cluster.here |= {"w1", "w2"}
    watch.rounds(1)
    watch.end("w1")
    watch.rounds(2)
    assert [*watch.cluster.workers] == ["w2", "w3"]
    assert watch.reports == ["1 worker lost (job 1: FAILED (NonZeroExitCode)); asking for it again"]


def test_launches_that_keep_ending_at_once_are_given_up_with_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, 2)
    for _ in range(4):
        watch.rounds(1, seconds=60)
        for name in [*watch.cluster.workers]:
            watch.end(name)
    assert watch.cluster.made == 4
    with pytest.raises(
        ClusterFailed, match=r"4 workers one after the other ended before .* job 3: FAILED .*\n.*no such module"
    ):
        watch.supervisor.check()


def test_a_pause_lies_between_two_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, 1)
    watch.rounds(1)
    watch.end("w1")
    watch.rounds(2, seconds=0.5)
    assert watch.cluster.made == 1
    watch.rounds(5, seconds=0.5)
    assert watch.cluster.made == 2


def test_launches_that_worked_a_while_are_replaced_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, 1)
    for number in range(1, 30):
        watch.rounds(1)
        name = f"w{number}"
        assert [*watch.cluster.workers] == [name]
        watch.cluster.here.add(name)
        watch.rounds(14)
        watch.end(name)
        watch.rounds(2)
    watch.supervisor.check()


def test_workers_that_were_well_do_not_count_against_those_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, 2)
    watch.rounds(1)
    watch.cluster.here |= {"w1", "w2"}
    watch.rounds(14)
    for name in ("w1", "w2"):
        watch.end(name)
    watch.rounds(2)
    for _ in range(3):
        watch.end(next(iter({*watch.cluster.workers} - watch.cluster.here)))
        watch.rounds(8)
    watch.supervisor.check()
    assert len(watch.cluster.workers) == 2


def test_what_was_given_up_is_asked_for_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, 1)
    for _ in range(6):
        watch.rounds(1, seconds=20)
        for name in [*watch.cluster.workers]:
            watch.end(name)
    made = watch.cluster.made
    with pytest.raises(ClusterFailed):
        watch.supervisor.check()
    watch.rounds(2, seconds=400)
    assert watch.cluster.made == made + 1
    watch.supervisor.check()


def test_a_cluster_goes_on_with_the_workers_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, 2)
    watch.rounds(1)
    watch.cluster.here.add("w1")
    while watch.now < 1000 and not (watch.reports and "no more" in watch.reports[-1]):
        watch.rounds(1, seconds=25)
        for name in {*watch.cluster.workers} - {"w1"}:
            watch.end(name)
    assert "no more workers are asked for" in watch.reports[-1]
    assert next(iter(watch.cluster.workers)) == "w1"
    watch.supervisor.check()
    with pytest.raises(ClusterFailed):
        watch.supervisor.check(2)
    watch.cluster.here.clear()
    with pytest.raises(ClusterFailed):
        watch.supervisor.check()


def test_workers_that_there_is_no_room_for_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, 2)
    watch.supervisor.capacity = lambda: 1  # an allocation that has lost a node
    watch.cluster.here.add("w1")
    watch.supervisor.check()
    with pytest.raises(ClusterFailed, match="room for 1 of 2 workers"):
        watch.supervisor.check(2)


def test_a_launch_that_is_not_taken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, 1)
    watch.cluster.refusal = "sbatch: error: invalid partition."
    watch.rounds(10, seconds=30)
    with pytest.raises(ClusterFailed, match="invalid partition"):
        watch.supervisor.check()


def test_a_supervisor_that_stumbles_goes_on_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halotile.graphs.clusters.launches.remote_cluster.POLL_SECONDS", 0.01)
    cluster, reports = FakeCluster(), []  # type: tuple[FakeCluster, list[str]]
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
