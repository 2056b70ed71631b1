"""The page of a run in a real browser: it appears, its map fills, nothing goes wrong on the way."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.graphs.watching.page import ADDRESS, TOPIC, JobPage
from halotile.graphs.watching.progress import Progress
from halotile.storage.run_directory.directory import PAGE, RunDirectory
from tests.browsing import chromium, needs_browser
from tests.faults import Scene, until
from tests.support import job_of, write_zarr

pytestmark = [pytest.mark.browser, pytest.mark.cluster, needs_browser]

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
CURVE = {"iteration": [1, 2, 3], "residual": [1.0, 0.1, 0.01], "psnr": [20.1, 25.2, None]}


@pytest.fixture
def browser() -> Iterator[Any]:
    """Headless Chromium, which records errors of its pages."""
    with chromium("--disable-gpu") as opened:
        yield opened


def page_of(cluster: RunningCluster) -> str:
    """The address of the page."""
    return f"{(cluster.dashboard or '').rpartition('/')[0]}/{ADDRESS}"


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


def test_the_map_fills_while_a_job_runs(scene: Scene, cluster: RunningCluster, browser: Any) -> None:
    scene.set_pace(0.4)
    scene.make_trouble("flaky", 9, "2")
    scene.make_trouble("raise", 2)
    begun = threading.Event()

    def look(progress: Progress) -> None:
        if ADDRESS in progress.message:
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


def test_names_are_text_and_a_curve_is_drawn(cluster: RunningCluster, browser: Any) -> None:
    page = JobPage(cluster.client.id)
    cluster.client.register_plugin(page)
    message = json.loads(json.dumps(TOLD))
    cluster.client.log_event(TOPIC, message)
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
    cluster.client.log_event(TOPIC, message | {"over": True})
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
    "curve": CURVE,
    "pass": {"phase": "<b>iterate</b>", "title": "<b>iteration 4 of 9</b>"},
    "stages": {"read": 1.0, "compute": 2.0, "write": 1.0},
    "blocks": {"todo": 2, "running": 0, "done": 3, "retried": 1, "quarantined": 0},
    "map": {
        "rows": 2, "columns": 3, "states": "222300", "filled": "999000", "least": 0.1, "most": 0.2, "seconds": "0Za...", "extent": [4, 6],
    },
}  # fmt: skip


@pytest.mark.parametrize("width", [1400, 360])
def test_the_kept_page_is_the_report_of_a_run(cluster: RunningCluster, tmp_path: Path, width: int) -> None:
    clean = np.kron(np.random.default_rng(0).uniform(50, 200, (12, 12)), np.ones((32, 32)))
    noisy = clean + 10 * np.random.default_rng(1).standard_normal(clean.shape)
    source = write_zarr(tmp_path / "a <b>.zarr", noisy.astype("f4"))
    job = job_of(source, tmp_path / "o.zarr", "tv", {"strength": 1.0, "sigma": "auto"})
    outcome = run(make_plan(job), cluster=cluster)
    page = RunDirectory.beside(job.output.path).path / PAGE
    assert page.stat().st_size < 2 * 2**20
    with chromium("--disable-gpu", f"--window-size={width},1000") as opened:
        opened.get(page.as_uri())
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
    assert outcome._repr_html_().count("<img src=") == 3
    assert f"<td>residual</td><td>{dict(outcome.inspection.rows)['residual']}</td>" in outcome._repr_html_()
    assert "halotile" in shown
