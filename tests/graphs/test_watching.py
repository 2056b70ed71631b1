"""The page of a run: its map, its messages, and that its failure costs the run nothing."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Client

from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.clusters.scheduler import JoinedWorkers
from halotile.graphs.watching.page import (
    ADDRESS,
    DONE,
    EDGE,
    HTML,
    LEVELS,
    NAME,
    QUARANTINED,
    RETRIED,
    ROWS,
    STATES,
    UNKNOWN,
    WAITING,
    Board,
    JobPage,
    Watch,
    curve,
    kept_page,
)
from halotile.graphs.watching.progress import Progress
from tests.faults import BLOCKS, REPOSITORY, Scene, until


def test_a_long_curve_keeps_its_ends_and_one_with_numbers_that_are_none_is_still_json() -> None:
    told = curve([{"iteration": float(n), "residual": 1 / n, "seconds": 0.1} for n in range(1, 5001)])
    assert list(told) == ["iteration", "residual"]
    assert len(told["iteration"]) == len(told["residual"]) == ROWS
    assert (told["iteration"][0], told["iteration"][-1]) == (1, 5000)
    told = curve([{"iteration": 1, "misfit": math.inf}, {"iteration": 2, "misfit": math.nan, "change": 0.5}])
    assert told == {"iteration": [1, 2], "misfit": [None, None], "change": [None, 0.5]}
    json.dumps(told, allow_nan=False)


def test_no_name_ends_the_script_of_a_page_that_is_kept() -> None:
    message = {"job": {"name": "</script><script>window.taken = 1</script>"}}
    page = kept_page(message)
    assert page.count("</script") == HTML.read_text().count("</script")
    (line,) = (line for line in page.splitlines() if line.startswith("const kept = "))
    assert json.loads(line.removeprefix("const kept = ").partition(";  //")[0]) == message


def fetched(address: str) -> tuple[str, Any]:
    """The body and the headers of an answer."""
    with urllib.request.urlopen(address, timeout=10) as answer:
        return answer.read().decode(), answer.headers


class Looking:
    """An observer that reads the page at every report of progress."""

    def __init__(self, dashboard: str | None, path: str = "halotile.json") -> None:
        assert dashboard is not None
        self.address = f"{dashboard.rpartition('/')[0]}/{path}"
        self.seen: list[dict[str, Any]] = []
        self.said = ""

    def __call__(self, progress: Progress) -> None:
        self.said += progress.message
        if ADDRESS in self.said:
            self.seen.append(json.loads(fetched(self.address)[0]))

    @property
    def boards(self) -> list[dict[str, Any]]:
        """The messages about the passes of this run."""
        return [told for told in self.seen if not told["over"] and "blocks" in told]


@pytest.mark.cluster
def test_the_page_follows_a_run_through_its_troubles(scene: Scene, cluster: RunningCluster) -> None:
    scene.set_pace(0.15)
    scene.make_trouble("flaky", 9, "2")
    scene.make_trouble("raise", 12)
    looking = Looking(cluster.dashboard)
    outcome = scene.run(cluster, observer=looking, on_bad_block="quarantine")
    assert f"/{ADDRESS}" in looking.said
    boards = looking.boards
    done = [told["blocks"]["done"] for told in boards]
    assert len(set(done)) > 2
    assert done == sorted(done)
    assert all(sum(told["blocks"].values()) == BLOCKS for told in boards)
    assert any(told["blocks"]["running"] for told in boards)
    assert boards[-1]["stages"]["compute"] > BLOCKS / 2 * 0.15
    assert 0.1 < boards[-1]["map"]["least"] < boards[-1]["map"]["most"] < 5
    job = boards[-1]["job"]
    assert (job["name"], job["shape"], job["workers"]) == ("clean.zarr", [256, 256], 2)
    assert 0 < job["planned_memory_bytes"] < job["allowed_memory_bytes"]
    assert str(scene.folder) not in json.dumps(boards)
    after = json.loads(fetched(looking.address)[0])
    page, headers = fetched(looking.address.removesuffix(".json"))
    assert page.startswith("<!doctype html>")
    assert "http" not in page, "it loads nothing else"
    assert "innerHTML" not in page
    for words in ("default-src 'none'", "connect-src 'self'"):
        assert words in headers["Content-Security-Policy"]
    assert after["over"]
    assert after["map"]["states"] == "".join(str(QUARANTINED if n == 12 else DONE) for n in range(BLOCKS))
    assert after["blocks"]["done"] == after["progress"]["done"] == outcome.done == BLOCKS - 1
    assert after["progress"]["retried"] == 4


@pytest.mark.cluster
def test_a_run_that_goes_on_begins_with_what_was_done_and_tells_prometheus(
    scene: Scene, cluster: RunningCluster
) -> None:
    pytest.importorskip("prometheus_client")
    for block in range(20, BLOCKS):
        scene.make_trouble("raise", block)
    scene.run(cluster, on_bad_block="quarantine", retries=0)
    for file in scene.folder.glob("raise-*"):
        file.unlink()
    scene.set_pace(0.1)
    looking, metrics = Looking(cluster.dashboard), Looking(cluster.dashboard, "metrics").address
    served: list[str] = []

    def look(progress: Progress) -> None:
        looking(progress)
        served.append(fetched(metrics)[0])

    assert scene.run(cluster, observer=look, on_bad_block="quarantine", retries=0).resumed == 20
    done = [line for text in served for line in text.splitlines() if line.startswith('halotile_blocks{state="done"}')]
    assert len(set(done)) > 1
    for name in ("pixels_total", "bytes_read_total", "compute_seconds_total", "peak_memory_bytes"):
        assert any(f"\nhalotile_{name} " in text for text in served)
    assert "halotile_" not in fetched(metrics)[0], "it is over"
    first, last = looking.boards[0], looking.boards[-1]
    assert first["map"]["states"].startswith(str(DONE) * 20)
    assert first["map"]["seconds"].startswith(UNKNOWN * 20)
    assert last["map"]["seconds"].startswith(UNKNOWN * 20)
    assert last["progress"]["resumed"] == 20


@pytest.mark.cluster
def test_who_has_seen_all_waits_for_news(cluster: RunningCluster) -> None:
    watch = Watch()
    address = watch.open(cluster)
    first = json.loads(fetched(f"{address}.json")[0])
    assert not first["over"]
    threading.Timer(0.5, watch.close).start()
    began = time.perf_counter()
    second = json.loads(fetched(f"{address}.json?seen={first['serial']}")[0])
    assert time.perf_counter() - began > 0.3
    assert second["over"]
    assert second["serial"] != first["serial"]


@pytest.mark.cluster
@pytest.mark.parametrize("what", ["hook", "messages"])
def test_what_dask_lacks_costs_only_the_page(
    scene: Scene, cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:

    def broken(*_: Any) -> None:
        raise AttributeError("moved")

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    if what == "hook":
        scheduler = cluster.client.cluster.scheduler
        monkeypatch.delitem(scheduler.plugins, NAME, raising=False)
        monkeypatch.delattr(scheduler, "http_application")
    else:
        monkeypatch.setattr(Watch, "_send", broken)
    said: list[str] = []
    scene.run(cluster, observer=lambda progress: said.append(progress.message))
    assert scene.status()["done"] == BLOCKS
    assert (f"dashboard: {cluster.dashboard}" in "".join(said)) == (what == "hook")
    watch = Watch()
    assert watch.open(RunningCluster(cluster.client, 2)) is None, "without a dashboard there is no page"
    assert watch.client is None


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[JoinedWorkers]:
    """A scheduler in its own process, without workers."""
    file = tmp_path / "scheduler.json"
    words = ["--host", "tcp://127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0"]
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", *words, "--scheduler-file", str(file)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as scheduler:
        try:
            until(lambda: file.exists() and file.read_text().endswith("}"))
            with Client(json.loads(file.read_text())["address"], set_as_default=False) as client:
                yield JoinedWorkers(client)
        finally:
            scheduler.terminate()


@pytest.mark.cluster
def test_a_scheduler_of_another_process_shows_the_page_of_each_run(joined: JoinedWorkers) -> None:
    def name() -> str:
        told = json.loads(fetched(f"{address}.json")[0])
        return "over" if told["over"] else told.get("job", "nothing")

    def tell(watch: Watch, job: str) -> None:
        watch._send({"job": job})
        watch._sending.result(5)  # type: ignore[union-attr]

    for _ in range(2):  # one run after the other
        watch = Watch()
        address = watch.open(joined)
        assert address is not None
        assert address.endswith(f"/{ADDRESS}")
        assert name() == "nothing"
        assert fetched(address)[0] == HTML.read_text()
        watch.close()
        assert json.loads(fetched(f"{address}.json")[0])["workers_now"] == 0
        assert name() == "over"
    first, second = Watch(), Watch()
    address = first.open(joined)
    with Client(joined.client.scheduler.address, set_as_default=False) as other:
        second.open(JoinedWorkers(other))
        tell(second, "second")
        tell(first, "first")
        assert name() == "second"
        second.close()
        assert name() == "over"
        tell(first, "first")
        assert name() == "first"
        first.close()
        assert name() == "over"


def test_a_driver_that_is_gone_ends_its_page() -> None:
    page = JobPage("a client")
    page.start(SimpleNamespace(plugins={NAME: JobPageBefore()}))
    page.remove_client(page.scheduler, "another")
    assert not page.over
    page.remove_client(page.scheduler, "a client")
    page.log_event("halotile", {"job": {}})
    assert page.over
    assert page.message == {}


class JobPageBefore:
    """The page of an earlier run."""

    def end(self) -> None:
        """Note the end."""


COUNTS = [(1,), (7,), (300,), (4, 5), (3, 4, 5), (2, 1, 6, 1), (130, 2), (257, 300), (1, 1, 1)]
"""Numbers of blocks along each axis: a line, an image, a stack, channels last, more than a map has room for."""


def walked(counts: tuple[int, ...], seed: int) -> tuple[Board, np.ndarray[Any, Any], dict[int, float]]:
    """A board with many changes, and the states that it should show, from plain bookkeeping."""
    rng = np.random.default_rng(seed)
    total = math.prod(counts)
    first = int(rng.integers(0, total + 1))
    states = np.where(np.arange(total) < first, DONE, WAITING)
    board, took = Board(counts, [range(first)]), dict[int, float]()
    for _ in range(20):
        numbers = rng.choice(total, size=min(total, 9), replace=False)
        state = int(rng.choice([DONE, RETRIED, QUARANTINED]))
        seconds = {int(n): float(rng.random()) for n in numbers} if state == DONE else {}
        board.mark(map(int, numbers), state, seconds)
        states[numbers] = state
        took |= seconds
    return board, states, took


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("seed", range(2))
def test_a_map_shows_what_matters_most_in_each_cell(counts: tuple[int, ...], seed: int) -> None:
    board, states, took = walked(counts, seed)
    in_flight = range(0, len(states), 5)
    expected, counted = Counter(STATES[s] for s in states), board.counted(in_flight)
    running = sum(states[n] == WAITING for n in in_flight)
    assert sum(counted.values()) == len(states)
    here = {"todo": expected["todo"] - running, "running": running}
    assert counted == {name: expected[name] for name in STATES} | here
    shown = board.cells()
    size = shown["rows"] * shown["columns"]
    assert max(shown["rows"], shown["columns"]) <= EDGE
    assert {len(shown[name]) for name in ("states", "filled", "seconds")} == {size}
    cells: list[list[int]] = [[] for _ in range(size)]
    for number, cell in enumerate(board._cells_of(np.arange(len(states)))):
        cells[cell].append(number)
    assert all(cells)
    for cell, numbers in enumerate(cells):
        inside = {int(states[n]) for n in numbers}
        alone = DONE if inside == {DONE} else WAITING
        first = next((s for s in (QUARANTINED, RETRIED) if s in inside), alone)
        assert int(shown["states"][cell]) == first
        assert int(shown["filled"][cell]) == 9 * sum(states[n] == DONE for n in numbers) // len(numbers)
        assert (shown["seconds"][cell] == UNKNOWN) == took.keys().isdisjoint(numbers)


@pytest.mark.parametrize(
    ("counts", "rows", "columns", "axes"),
    [
        ((5,), 1, 5, (0,)),
        ((4, 5), 4, 5, (0, 1)),
        ((9, 4, 5), 4, 5, (1, 2)),
        ((4, 5, 1), 4, 5, (0, 1)),
        ((40, 1, 1), 1, 40, (0,)),
        ((1000, 3), EDGE, 3, (0, 1)),
        ((1, 1), 1, 1, (0,)),
    ],
)
def test_the_map_has_the_last_two_cut_axes(
    counts: tuple[int, ...], rows: int, columns: int, axes: tuple[int, ...]
) -> None:
    board = Board(counts)
    assert (board.rows, board.columns, board.axes) == (rows, columns, axes)


def test_a_block_that_is_retried_stays_so_until_it_is_done() -> None:
    board = Board((2, 2), done=[range(1)])
    board.mark([2], RETRIED)
    assert board.cells(in_flight=[1, 2])["states"] == "2130"
    board.mark([2], DONE, {2: 0.5})
    assert board.cells(in_flight=[1])["states"] == "2120"
    board.mark([3], QUARANTINED)
    assert board.counted([1]) == {"todo": 0, "running": 1, "done": 2, "retried": 0, "quarantined": 1}


def test_durations_that_are_nearly_the_same_look_nearly_the_same() -> None:
    board = Board((4,))
    board.mark(range(3), DONE, {0: 0.50, 1: 0.51, 2: 0.50})
    shown = board.cells()
    assert shown["seconds"][3] == UNKNOWN
    places = [LEVELS.index(letter) for letter in shown["seconds"][:3]]
    assert max(places) - min(places) <= 3
    assert shown["most"] / shown["least"] == pytest.approx(2)
    board.mark([3], DONE, {3: 50.0})
    assert board.cells()["seconds"] == f"{LEVELS[0]}{board.cells()['seconds'][1]}{LEVELS[0]}{LEVELS[-1]}"
