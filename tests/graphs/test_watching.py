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
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client

from halotile.cli.arguments import Flags
from halotile.cli.config.loading import load_job
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.clusters.scheduler import JoinedWorkers
from halotile.graphs.jobs.reconstruct.job import Reconstruction
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run as reconstruct
from halotile.graphs.watching.page import (
    ADDRESS,
    DONE,
    HTML,
    NAME,
    QUARANTINED,
    ROWS,
    UNKNOWN,
    JobPage,
    Metrics,
    Watch,
    curve,
    kept_page,
)
from halotile.graphs.watching.progress import Progress
from halotile.storage.grid import Grid
from halotile.storage.run_directory.number_ranges import RangeSet
from tests.faults import BLOCKS, REPOSITORY, Scene, until
from tests.graphs.test_reconstruct import Scene as Reconstructing


def test_a_long_curve_keeps_its_ends_and_fits() -> None:
    rows = [{"iteration": float(n), "residual": 1 / n, "seconds": 0.1} for n in range(1, 5001)]
    told = curve(rows)
    assert list(told) == ["iteration", "residual"]
    assert len(told["iteration"]) == len(told["residual"]) == ROWS
    assert (told["iteration"][0], told["iteration"][-1]) == (1, 5000)


def test_a_curve_with_numbers_that_are_none_is_still_json() -> None:
    told = curve([{"iteration": 1, "misfit": math.inf}, {"iteration": 2, "misfit": math.nan, "change": 0.5}])
    assert told == {"iteration": [1, 2], "misfit": [None, None], "change": [None, 0.5]}
    json.dumps(told, allow_nan=False)


def test_no_name_ends_the_script_of_a_page_that_is_kept() -> None:
    message = {"job": {"name": "</script><script>window.taken = 1</script>"}}
    page = kept_page(message)
    assert page.count("</script") == HTML.read_text().count("</script")
    (line,) = (line for line in page.splitlines() if line.startswith("const kept = "))
    assert json.loads(line.removeprefix("const kept = ").partition(";  //")[0]) == message


def test_a_watch_that_was_not_opened_does_nothing() -> None:
    watch = Watch()
    watch.begin(
        Grid((2, 2), (1, 1), ((0, 0), (0, 0))), done=RangeSet(range(2)), quarantined=(), phase="denoise", title=""
    )
    watch.mark(1, QUARANTINED)
    watch.show(object(), {}, [])  # type: ignore[arg-type]
    watch.close()
    assert watch.board is None


def test_metrics_without_their_package_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    metrics = Metrics(dict)
    metrics.end()
    metrics.end()


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
    assert after["over"]
    assert after["map"]["states"] == "".join(str(QUARANTINED if n == 12 else DONE) for n in range(BLOCKS))
    assert after["blocks"]["done"] == after["progress"]["done"] == outcome.done == BLOCKS - 1
    assert after["progress"]["retried"] == 4


@pytest.mark.thorough
@pytest.mark.cluster
def test_iterations_are_shown_one_after_the_other(cluster: RunningCluster, tmp_path: Path) -> None:
    scene = Reconstructing.create(tmp_path)
    scene.set_pace(0.2)  # the page is told about twice a second, and each iteration is to be seen
    job = load_job(scene.config, flags=Flags(allow_import=True))
    assert isinstance(job, Reconstruction)
    looking = Looking(cluster.dashboard)
    groups: set[str] = set()

    def look(progress: Progress) -> None:
        looking(progress)
        groups.update(cluster.client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.task_groups)))

    reconstruct(make_plan(job), observer=look, cluster=cluster)
    boards = looking.boards
    titles = list(dict.fromkeys(told["pass"]["title"] for told in boards))
    assert {"iteration 2 of 6", "iteration 5 of 6"} <= set(titles)
    assert titles == sorted(titles)
    assert {"iterate-it002", "iterate-it005"} <= groups
    told = boards[-1]["curve"]
    assert {"iteration", "misfit", "change", "psnr"} <= told.keys()
    assert told["iteration"] == list(range(1, len(told["iteration"]) + 1))
    in_order = [len(told["curve"].get("iteration", ())) for told in boards]
    assert in_order == sorted(in_order)


@pytest.mark.cluster
def test_a_run_that_goes_on_begins_with_what_was_done(scene: Scene, cluster: RunningCluster) -> None:
    for block in range(20, BLOCKS):
        scene.make_trouble("raise", block)
    scene.run(cluster, on_bad_block="quarantine", retries=0)
    for file in scene.folder.glob("raise-*"):
        file.unlink()
    scene.set_pace(0.1)
    looking = Looking(cluster.dashboard)
    assert scene.run(cluster, observer=looking, on_bad_block="quarantine", retries=0).resumed == 20
    first, last = looking.boards[0], looking.boards[-1]
    assert first["map"]["states"].startswith(str(DONE) * 20)
    assert first["map"]["seconds"].startswith(UNKNOWN * 20)
    assert last["map"]["seconds"].startswith(UNKNOWN * 20)
    assert last["progress"]["resumed"] == 20


@pytest.mark.cluster
def test_the_page_is_one_file_that_loads_nothing_else(scene: Scene, cluster: RunningCluster) -> None:
    scene.run(cluster)
    looking = Looking(cluster.dashboard, ADDRESS)
    page, headers = fetched(looking.address)
    assert page.startswith("<!doctype html>")
    assert "http" not in page
    assert "innerHTML" not in page
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "connect-src 'self'" in headers["Content-Security-Policy"]


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
def test_a_dask_without_the_hook_costs_the_page_and_nothing_else(
    scene: Scene, cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cluster.dashboard is not None
    scheduler = cluster.client.cluster.scheduler
    monkeypatch.delitem(scheduler.plugins, NAME, raising=False)
    monkeypatch.delattr(scheduler, "http_application")
    said: list[str] = []
    scene.run(cluster, observer=lambda progress: said.append(progress.message))
    assert scene.status()["done"] == BLOCKS
    assert f"dashboard: {cluster.dashboard}" in "".join(said)


@pytest.mark.cluster
def test_a_dask_that_loses_messages_costs_the_page_and_nothing_else(
    scene: Scene, cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise AttributeError("moved")

    monkeypatch.setattr(Watch, "_send", broken)
    scene.run(cluster)
    assert scene.status()["done"] == BLOCKS


@pytest.mark.cluster
def test_without_a_dashboard_there_is_no_page(cluster: RunningCluster) -> None:
    watch = Watch()
    assert watch.open(RunningCluster(cluster.client, 2)) is None
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
def test_a_scheduler_of_another_process_has_the_same_page(joined: JoinedWorkers) -> None:
    for _ in range(2):  # one run after the other
        watch = Watch()
        address = watch.open(joined)
        assert address is not None
        assert address.endswith(f"/{ADDRESS}")
        assert not json.loads(fetched(f"{address}.json")[0])["over"]
        assert fetched(address)[0] == HTML.read_text()
        watch.close()
        told = json.loads(fetched(f"{address}.json")[0])
        assert (told["over"], told["workers_now"]) == (True, 0)


@pytest.mark.cluster
def test_of_two_runs_on_one_scheduler_the_other_is_shown_when_one_is_over(joined: JoinedWorkers) -> None:
    def name() -> str:
        told = json.loads(fetched(f"{address}.json")[0])
        return "over" if told["over"] else told.get("job", "nothing")

    def tell(watch: Watch, job: str) -> None:
        watch._send({"job": job})
        watch._sending.result(5)  # type: ignore[union-attr]

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


@pytest.mark.cluster
def test_prometheus_is_told_while_a_run_lasts(scene: Scene, cluster: RunningCluster) -> None:
    pytest.importorskip("prometheus_client")
    scene.set_pace(0.1)
    looking = Looking(cluster.dashboard, "metrics")
    told: list[str] = []
    scene.run(cluster, observer=lambda _: told.append(fetched(looking.address)[0]))
    done = [line for text in told for line in text.splitlines() if line.startswith('halotile_blocks{state="done"}')]
    assert len(set(done)) > 1
    for name in (
        "halotile_pixels_total",
        "halotile_bytes_read_total",
        "halotile_compute_seconds_total",
        "halotile_peak_memory_bytes",
    ):
        assert any(f"\n{name} " in text for text in told)
    assert "halotile_" not in fetched(looking.address)[0]
