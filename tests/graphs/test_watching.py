"""What a run says of itself: in its directory, in a progress bar, on its page, and of workers whose last bits may differ."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from distributed import Client

from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.clusters.scheduler import JoinedWorkers
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.graphs.runs.status import Status
from halotile.graphs.watching import page
from halotile.graphs.watching.progress import Progress, progress_shown
from halotile.storage.run_directory.directory import PAGE, RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.tasks.block import Receipt
from halotile.tasks.devices import device as module
from halotile.tasks.devices.device import cpu_kind
from tests.browsing import chromium, needs_browser
from tests.faults import BLOCKS, REPOSITORY, Scene, until
from tests.support import job_of, noisy_image, write_zarr

Patch = pytest.MonkeyPatch


def test_a_long_curve_keeps_its_ends_and_one_with_numbers_that_are_none_is_still_json() -> None:
    told = page.curve([{"iteration": float(n), "residual": 1 / n, "seconds": 0.1} for n in range(1, 5001)])
    assert list(told) == ["iteration", "residual"]
    assert len(told["iteration"]) == len(told["residual"]) == page.ROWS
    assert (told["iteration"][0], told["iteration"][-1]) == (1, 5000)
    told = page.curve([{"iteration": 1, "misfit": math.inf}, {"iteration": 2, "misfit": math.nan, "change": 0.5}])
    assert told == {"iteration": [1, 2], "misfit": [None, None], "change": [None, 0.5]}
    json.dumps(told, allow_nan=False)


def test_no_name_ends_the_script_of_a_page_that_is_kept() -> None:
    message = {"job": {"name": "</script><script>window.taken = 1</script>"}}
    text = page.kept_page(message)
    assert text.count("</script") == page.HTML.read_text().count("</script")
    (line,) = (line for line in text.splitlines() if line.startswith("const kept = "))
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
        if page.ADDRESS in self.said:
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
    assert f"/{page.ADDRESS}" in looking.said
    boards = looking.boards
    done = [told["blocks"]["done"] for told in boards]
    assert len(set(done)) > 2
    assert done == sorted(done)
    assert all(sum(told["blocks"].values()) == BLOCKS for told in boards)
    assert any(told["blocks"]["running"] for told in boards)
    assert boards[-1]["stages"]["compute"] > BLOCKS / 2 * 0.15
    assert 0.1 < boards[-1]["map"]["least"] < boards[-1]["map"]["most"] < 5
    pictures = {told["examples"] for told in boards if "examples" in told}
    assert all(base64.b64decode(png).startswith(b"\x89PNG") for png in pictures)
    assert pictures
    job = boards[-1]["job"]
    assert (job["name"], job["shape"], job["workers"]) == ("clean.zarr", [256, 256], 2)
    assert 0 < job["planned_memory_bytes"] < job["allowed_memory_bytes"]
    assert str(scene.folder) not in json.dumps(boards)
    after = json.loads(fetched(looking.address)[0])
    text, headers = fetched(looking.address.removesuffix(".json"))
    assert text.startswith("<!doctype html>")
    assert "http" not in text, "it loads nothing else"
    assert "innerHTML" not in text
    for words in ("default-src 'none'", "connect-src 'self'"):
        assert words in headers["Content-Security-Policy"]
    assert after["over"]
    assert "examples" not in after
    assert after["map"]["states"] == "".join(str(page.QUARANTINED if n == 12 else page.DONE) for n in range(BLOCKS))
    assert after["blocks"]["done"] == after["progress"]["done"] == outcome.done == BLOCKS - 1
    assert after["progress"]["retried"] == 4


@pytest.mark.cluster
def test_a_resumed_run_begins_with_what_was_done_and_tells_prometheus(scene: Scene, cluster: RunningCluster) -> None:
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
    assert first["map"]["states"].startswith(str(page.DONE) * 20)
    assert first["map"]["seconds"].startswith(page.UNKNOWN * 20)
    assert last["map"]["seconds"].startswith(page.UNKNOWN * 20)
    assert last["progress"]["resumed"] == 20


@pytest.mark.cluster
def test_who_has_seen_all_waits_for_news(cluster: RunningCluster) -> None:
    watch = page.Watch()
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
def test_lacks_of_dask_cost_only_the_page(scene: Scene, cluster: RunningCluster, monkeypatch: Patch, what: str) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    if what == "hook":
        scheduler = cluster.client.cluster.scheduler
        monkeypatch.delitem(scheduler.plugins, page.NAME, raising=False)
        monkeypatch.delattr(scheduler, "http_application")
    else:
        monkeypatch.setattr(page.Watch, "_send", Mock(side_effect=AttributeError("moved")))
    said: list[str] = []
    scene.run(cluster, observer=lambda progress: said.append(progress.message))
    assert scene.status()["done"] == BLOCKS
    assert (f"dashboard: {cluster.dashboard}" in "".join(said)) == (what == "hook")
    watch = page.Watch()
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

    def tell(watch: page.Watch, job: str) -> None:
        watch._send({"job": job})
        watch._sending.result(5)  # type: ignore[union-attr]

    for _ in range(2):  # one run after the other
        watch = page.Watch()
        address = watch.open(joined)
        assert address is not None
        assert address.endswith(f"/{page.ADDRESS}")
        assert name() == "nothing"
        assert fetched(address)[0] == page.HTML.read_text()
        watch.close()
        assert json.loads(fetched(f"{address}.json")[0])["workers_now"] == 0
        assert name() == "over"
    first, second = page.Watch(), page.Watch()
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
    shown = page.JobPage("a client")
    shown.start(SimpleNamespace(plugins={page.NAME: Mock()}))
    shown.remove_client(shown.scheduler, "another")
    assert not shown.over
    shown.remove_client(shown.scheduler, "a client")
    shown.log_event("halotile", {"job": {}})
    assert (shown.over, shown.message) == (True, {})


COUNTS = [(1,), (7,), (300,), (4, 5), (3, 4, 5), (2, 1, 6, 1), (130, 2), (257, 300), (1, 1, 1)]
"""Numbers of blocks along each axis: a line, an image, a stack, channels last, more than a map has room for."""


def walked(counts: tuple[int, ...], seed: int) -> tuple[page.Board, np.ndarray[Any, Any], dict[int, float]]:
    """A board with many changes, and the states that it should show, from plain bookkeeping."""
    rng = np.random.default_rng(seed)
    total = math.prod(counts)
    first = int(rng.integers(0, total + 1))
    states = np.where(np.arange(total) < first, page.DONE, page.WAITING)
    board, took = page.Board(counts, [range(first)]), dict[int, float]()
    for _ in range(20):
        numbers = rng.choice(total, size=min(total, 9), replace=False)
        state = int(rng.choice([page.DONE, page.RETRIED, page.QUARANTINED]))
        seconds = {int(n): float(rng.random()) for n in numbers} if state == page.DONE else {}
        board.mark(map(int, numbers), state, seconds)
        states[numbers] = state
        took |= seconds
    return board, states, took


@pytest.mark.parametrize(("counts", "seed"), [*zip(COUNTS, range(9), strict=True)])
def test_a_map_shows_what_matters_most_in_each_cell(counts: tuple[int, ...], seed: int) -> None:
    board, states, took = walked(counts, seed)
    in_flight = range(0, len(states), 5)
    expected, counted = Counter(page.STATES[s] for s in states), board.counted(in_flight)
    running = sum(states[n] == page.WAITING for n in in_flight)
    assert sum(counted.values()) == len(states)
    here = {"todo": expected["todo"] - running, "running": running}
    assert counted == {name: expected[name] for name in page.STATES} | here
    shown = board.cells()
    size = shown["rows"] * shown["columns"]
    assert max(shown["rows"], shown["columns"]) <= page.EDGE
    assert {len(shown[name]) for name in ("states", "filled", "seconds")} == {size}
    cells: list[list[int]] = [[] for _ in range(size)]
    for number, cell in enumerate(board._cells_of(np.arange(len(states)))):
        cells[cell].append(number)
    assert all(cells)
    for cell, numbers in enumerate(cells):
        inside = {int(states[n]) for n in numbers}
        alone = page.DONE if inside == {page.DONE} else page.WAITING
        first = next((s for s in (page.QUARANTINED, page.RETRIED) if s in inside), alone)
        assert int(shown["states"][cell]) == first
        assert int(shown["filled"][cell]) == 9 * sum(states[n] == page.DONE for n in numbers) // len(numbers)
        assert (shown["seconds"][cell] == page.UNKNOWN) == took.keys().isdisjoint(numbers)


def test_the_map_has_the_last_two_cut_axes() -> None:
    rows: list[tuple[tuple[int, ...], int, int, tuple[int, ...]]] = [
        ((5,), 1, 5, (0,)), ((4, 5), 4, 5, (0, 1)), ((9, 4, 5), 4, 5, (1, 2)), ((4, 5, 1), 4, 5, (0, 1)),
        ((40, 1, 1), 1, 40, (0,)), ((1000, 3), page.EDGE, 3, (0, 1)), ((1, 1), 1, 1, (0,)),
    ]  # fmt: skip
    for counts, *expected in rows:
        board = page.Board(counts)
        assert [board.rows, board.columns, board.axes] == expected


@pytest.fixture
def status(tmp_path: Path) -> Status:
    """The status of a run of three blocks that has not begun."""
    source = write_zarr(tmp_path / "in.zarr", noisy_image((3 * 128, 30)))
    plan = make_plan(job_of(source, tmp_path / "out.zarr", "gaussian", {"sigma": 1}, tile={"block": 128}))
    directory = RunDirectory(plan.run_directory)
    directory.create()
    return Status(directory, plan, None)


def go_through(status: Status, *, begin: int, end: int) -> dict[str, object]:
    """A run from its first word to its last, and what is recorded of it then."""
    again = Status(status.directory, status.plan, None)
    again.begin(begin)
    moment = again.progress("stop", done=end, failed=0)
    if begin != end:
        moment = replace(moment, peak_memory_bytes=2**29 * end, seconds=7.0)
    again.end("finished", moment, "")
    return status.directory.read_status() or {}


def test_a_run_speaks_for_itself_unless_nothing_was_left_to_do_and_times_of_attempts_add_up(status: Status) -> None:
    spans = ((0, 1), (1, 2), (2, 3), (3, 3), (0, 3))
    *_, last, again, anew = ends = [go_through(status, begin=begin, end=end) for begin, end in spans]
    assert (last["state"], last["peak_memory_bytes"], last["seconds"]) == ("finished", 3 * 2**29, 7.0)
    assert again == last != anew
    assert [end["all_seconds"] for end in ends] == [7, 14, 21, 21, 7]
    status.begin(1)
    recorded = status.directory.read_status() or {}
    assert (recorded["done"], recorded["resumed"], recorded["seconds"]) == (1, 1, 0.0)
    Status(status.directory, status.plan, None).begin(0)  # a run that is cut off
    assert go_through(status, begin=3, end=3)["state"] == "finished"


def test_of_a_long_message_one_line_is_shown_and_all_is_kept(status: Status) -> None:
    shown: list[str] = []
    status = Status(status.directory, status.plan, lambda progress: shown.append(progress.message))
    message = "block 7 failed: ValueError: poisoned\nby hand"
    status.report(message)
    status.notify(status.progress("denoise", done=0, failed=0))
    assert shown == ["block 7 failed: ValueError: poisoned"]
    assert [event["text"] for event in status.directory.read_events()] == [message]


def test_a_line_that_is_reported_while_an_observer_is_notified_is_shown_next(status: Status) -> None:
    shown: list[str] = []

    def observe(progress: Progress) -> None:
        if not shown:
            watched.report("third")
        shown.append(progress.message)

    watched = Status(status.directory, status.plan, observe)
    watched.report("first")
    before = watched.progress("denoise", done=0, failed=0)
    watched.report("second")
    for progress in (before, before, watched.progress("denoise", done=0, failed=0)):
        watched.notify_now(progress)
    assert shown == ["first\nsecond", "third", ""]


def test_bits_of_a_gpu_that_change_are_reported_once(status: Status) -> None:
    shown: list[str] = []
    status.directory.write_plan({"fingerprint": status.fingerprint})
    status = Status(status.directory, status.plan, lambda progress: shown.append(progress.message))
    first, later = ({"4×1×64×64": digest, "4×1×8×8": "c"} for digest in "ab")
    for bits in (first, {}, first, later, later):
        status.note_arithmetic(Receipt(worker="tcp://w", host="node7", cpu_kind="an H200", bits=bits))
    status.notify(status.progress("stop", done=1, failed=0))
    assert "".join(shown).count("rounds differently") == 1
    assert "tcp://w on node7" in "".join(shown)
    again = Status(status.directory, status.plan, lambda progress: shown.append(progress.message))
    again.note_arithmetic(Receipt(cpu_kind="an H200", bits=first))
    again.note_arithmetic(Receipt(cpu_kind="another", bits=later))
    again.notify(status.progress("stop", done=1, failed=0))
    assert "2 kinds of CPUs or GPUs" in "".join(shown)
    assert "".join(shown).count("rounds differently") == 1


MOMENTS = [
    Progress("start", 2, 2, 8, 0, 800, 0.1),
    Progress("denoise", 6, 2, 8, 4_000_000, 8_000_000, 2.0, message="block 3 is tried again"),
]


@pytest.mark.parametrize("where", ["terminal", "notebook", "log", "observer"])
def test_a_bar_is_shown_at_a_terminal_or_in_a_notebook(where: str, monkeypatch: Patch) -> None:
    screen, observed = io.StringIO(), list[Progress]()
    monkeypatch.setattr(screen, "isatty", lambda: where in ("terminal", "observer"), raising=False)
    monkeypatch.setattr(sys, "stderr", screen)
    if where == "notebook":  # without widgets the bar is of text, without a warning
        shell = type("ZMQInteractiveShell", (), {})()
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with progress_shown(observed.append if where == "observer" else None) as observe:
        for moment in MOMENTS:
            if observe is not None:
                observe(moment)
    text = screen.getvalue()
    assert observed == (MOMENTS if where == "observer" else [])
    if where in ("log", "observer"):
        assert text == ""
        return
    assert ("6/8" in text, "IProgress" in text) == (True, False)
    if where == "terminal":
        assert all(words in text for words in ("denoise", "2 Mpix/s", "block 3 is tried again\n"))


CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: A name with its clock @ 2.10GHz
flags\t\t: fpu sse4_2 avx avx2 {more}

processor\t: 1
vendor_id\t: none
"""


def test_a_processor_is_named_by_what_libraries_choose_by(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(module, "_machine", module._machine.__wrapped__)
    monkeypatch.setattr(module, "_CPUS", tmp_path / "cpuinfo")
    monkeypatch.setattr(module, "_CACHE", tmp_path / "size")
    names = set()
    for flag, limit, cache in [("", "", "1M"), ("avx512f", "", "1M"), ("avx512f", "AVX2", "1M"), ("", "", "2M")]:
        (tmp_path / "cpuinfo").write_text(CPUINFO.format(more=flag))
        (tmp_path / "size").write_text(f"{cache}\n")
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        names.add(cpu_kind())
    assert len(names) == 4
    assert all(name.startswith("GenuineIntel 6 143, AVX") and "clock" not in name for name in names)


# --- the page in a real browser: it appears, its map fills, nothing goes wrong on the way ---


def in_browser(test: Callable[..., None]) -> Any:
    """Mark a test that needs a browser and a cluster."""
    return pytest.mark.browser(pytest.mark.cluster(needs_browser(test)))


COLOURS = """
const canvas = document.getElementById(arguments[0]), found = new Map();
const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
for (let place = 0; place < pixels.length; place += 4) {
  const colour = pixels.slice(place, place + 3).join(",");
  found.set(colour, (found.get(colour) || 0) + 1);
}
return Object.fromEntries(found);
"""
"""Number of pixels of a canvas by colour."""
PAINTED = "readColours(); return Object.fromEntries(STATES.map((name) => [name, colours[name]]));"
"""The colour of each state."""


@pytest.fixture
def browser() -> Iterator[Any]:
    """Headless Chromium, which records errors of its pages."""
    with chromium("--disable-gpu") as opened:
        yield opened


def page_of(cluster: RunningCluster) -> str:
    """The address of the page."""
    return f"{(cluster.dashboard or '').rpartition('/')[0]}/{page.ADDRESS}"


def text(browser: Any, name: str) -> str:
    """The text of an element of the page."""
    return str(browser.execute_script("return document.getElementById(arguments[0]).textContent", name))


def painted(browser: Any, state: str) -> int:
    """Pixels of the map in the colour of a state."""
    colour = browser.execute_script(PAINTED)[state].lstrip("#")
    wanted = ",".join(str(int(colour[place : place + 2], 16)) for place in (0, 2, 4))
    return int(browser.execute_script(COLOURS, "states").get(wanted, 0))


def follows(browser: Any, condition: Callable[[], bool]) -> None:
    """Wait for a condition; the page must not report an error meanwhile."""
    until(condition, seconds=30)
    own = "getImageData"  # it is these tests that read the canvas
    assert [entry for entry in browser.get_log("browser") if own not in entry["message"]] == []


@in_browser
def test_the_map_fills_while_a_job_runs(scene: Scene, cluster: RunningCluster, browser: Any) -> None:
    scene.set_pace(0.4)
    scene.make_trouble("flaky", 9, "2")
    scene.make_trouble("raise", 2)
    begun = threading.Event()

    def look(progress: Progress) -> None:
        if page.ADDRESS in progress.message:
            begun.set()

    options = {"observer": look, "on_bad_block": "quarantine"}
    running = threading.Thread(target=scene.run, args=(cluster,), kwargs=options)
    running.start()
    try:
        assert begun.wait(60)
        browser.get(page_of(cluster))
        follows(browser, lambda: text(browser, "done").isdecimal() and int(text(browser, "done")) > 4)
        early, speed = painted(browser, "done"), text(browser, "speed")
        assert min(early, painted(browser, "running")) > 0
        follows(browser, lambda: int(text(browser, "done")) > 20)
        assert painted(browser, "done") > 2 * early
        assert min(painted(browser, "quarantined"), painted(browser, "todo")) > 0
        assert text(browser, "speed") != speed
        assert len(browser.execute_script(COLOURS, "seconds")) > 2
        assert [text(browser, name) for name in ("name", "word")] == ["clean.zarr", "running"]
        scene.set_pace(0)
        follows(browser, lambda: text(browser, "word") == "the run is over")
        assert text(browser, "done") == "63"
        assert browser.execute_script("return document.getElementById('stages-card').hidden") is False
        assert painted(browser, "todo") == 0
    finally:
        scene.set_pace(0)
        running.join()


@in_browser
def test_names_are_text_and_a_curve_is_drawn(cluster: RunningCluster, browser: Any) -> None:
    cluster.client.register_plugin(page.JobPage(cluster.client.id))
    message = json.loads(json.dumps(TOLD))
    cluster.client.log_event(page.TOPIC, message)
    browser.get(page_of(cluster))
    follows(browser, lambda: text(browser, "name") == TOLD["job"]["name"])
    assert browser.execute_script("return document.getElementsByTagName('img').length") == 0
    assert browser.execute_script("return window.taken") is None
    names = [button.text for button in browser.find_elements("css selector", "#choices button")]
    assert names == ["residual", "PSNR"]
    for button in browser.find_elements("css selector", "#choices button"):
        button.click()
        assert len(browser.execute_script(COLOURS, "curve")) > 2
    for width in (360, 1600):
        browser.set_window_size(width, 900)
        # The window is of that width at once, what is in it before long.
        over = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        follows(browser, lambda script=over: browser.execute_script(script) == 0)  # type: ignore[misc]
    cluster.client.log_event(page.TOPIC, message | {"over": True})
    follows(browser, lambda: text(browser, "word") == "the run is over")


TOLD: dict[str, Any] = {
    "job": {
        "name": "<img src=x onerror='window.taken = 1'>.zarr", "shape": [4, 6], "block": [2, 2], "counted": "block", "workers": 2,
        "planned_memory_bytes": None, "allowed_memory_bytes": 2**30,
    },
    "progress": {
        "phase": "<b>iterate</b>", "done": 3, "resumed": 0, "total": 18, "seconds": 4.0, "pixels_done": 24, "peak_memory_bytes": 2**29,
        "retried": 1, "failed": 0, "megapixels_per_second": 6e-6, "megabytes_per_second": 1e-5, "eta_seconds": 20.0,
    },
    "curve": {"iteration": [1, 2, 3], "residual": [1.0, 0.1, 0.01], "psnr": [20.1, 25.2, None]},
    "pass": {"phase": "<b>iterate</b>", "title": "<b>iteration 4 of 9</b>"},
}  # fmt: skip


@in_browser
@pytest.mark.parametrize("width", [1400, 360])
def test_the_kept_page_is_the_report_of_a_run(cluster: RunningCluster, tmp_path: Path, width: int) -> None:
    clean = np.kron(np.random.default_rng(0).uniform(50, 200, (12, 12)), np.ones((32, 32)))
    noisy = clean + 10 * np.random.default_rng(1).standard_normal(clean.shape)
    source = write_zarr(tmp_path / "a <b>.zarr", noisy.astype("f4"))
    job = job_of(source, tmp_path / "o.zarr", "tv", {"strength": 1.0, "sigma": "auto"})
    plan = make_plan(job)
    outcome = run(plan, cluster=cluster)
    kept = RunDirectory.beside(job.output.path).path / PAGE
    assert kept.stat().st_size < 2 * 2**20
    with chromium("--disable-gpu", f"--window-size={width},1000") as opened:
        opened.get(kept.as_uri())
        shown = opened.execute_script("return document.getElementById('report').innerText")
        listed = "[...document.querySelectorAll('#report img')]"
        images = opened.execute_script(f"return {listed}.map((each) => [each.alt, each.naturalWidth])")
        is_wider = opened.execute_script("return document.documentElement.scrollWidth > window.innerWidth")
        assert opened.get_log("browser") == []
    assert [alt.partition(",")[0] for alt, _ in images] == ["before", "after", "residual"] * (len(images) // 3)
    assert images
    assert all(width == 256 for _, width in images)
    assert not is_wider
    for name, text in outcome.inspection.rows:
        assert f"{name}\t{text}" in shown
    assert f"recon-cli view {job.output.path} --against '{source}'" in shown
    assert '"strength": 1.0' in shown
    with Journal.open_any(kept.parent / "journal") as journal:
        assert f"output\t{journal.image_digest(0).hex()}, o.zarr" in shown
    assert plan.fingerprint in shown
    assert "<td>tv, on CPUs in float32</td>" in plan._repr_html_()
    assert outcome._repr_html_().count("<img src=") == 3
    assert f"<td>residual</td><td>{dict(outcome.inspection.rows)['residual']}</td>" in outcome._repr_html_()
    assert "halotile" in shown
