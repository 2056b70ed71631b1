"""The table of a GPU, rehearsed on the CPU: every program runs, every row is there, nothing is made up."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from halotile.graphs.clusters.base import RunningCluster
from halotile.tasks.denoisers.torch import UserNetwork
from halotile.tasks.trials.probe import probe
from tests.benchmarks import bench_gpu, gpu_beside, gpu_programs, unets
from tests.benchmarks.bench_gpu import CASES, STAGES, Bench, Table, main
from tests.benchmarks.measuring import take_turns

OURS = {
    "mpix_per_s": 80.0,
    "streaming_mpix_per_s": 90.0,
    "plan_seconds": 0.1,
    "busy": 0.8,
    "peak_bytes": 1050,
    "planned_bytes": 1000,
    "redundancy": 1.25,
    "tile": [512, 512],
    "batch": 4,
    "block": [1024, 1024],
}


def results(**changes: Any) -> dict[str, list[dict[str, Any]]]:
    """What programs could have given: no peer is installed."""
    return {
        "ours 1": [OURS | changes],
        "ours 2": [OURS],
        "bare": [{"mpix_per_s": 100.0, "way": "one"}],
        "bare rule": [{"mpix_per_s": 95.0, "way": "one"}],
        "copy": [{"mpix_per_s": 100.0}],
        "lanes": [dict.fromkeys([*STAGES.values()], 5.0)],
    }


def row(name: str, title: str, given: dict[str, list[dict[str, Any]]], **failed: str) -> list[str]:
    """The cells of a row."""
    lines = Table(given, failed).lines(CASES[name], "what")
    (found,) = [line for line in lines if line.startswith(f"| {title} |")]
    return [cell.strip(" *") for cell in found.strip("|").split("|")]


@pytest.mark.cluster
@pytest.mark.usefixtures("as_in_a_worker")
def test_every_program_runs_on_the_processor(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_programs, "started", lambda _: nullcontext(cluster))
    monkeypatch.setattr(bench_gpu, "is_installed", lambda _: False)

    def here(name: str, folder: Path, edge: int, *more: str) -> Any:
        module, _, function = name.partition(".")
        return getattr(importlib.import_module(f"tests.benchmarks.{module}"), function)(folder, edge, *more)

    bench = Bench(tmp_path, "cpu", 1, 1.0, 2, here)
    table = "\n".join(line for case in CASES.values() for line in bench.rows(case, 64))
    assert bench.failed == {}
    assert (table.count("end to end, one worker"), table.count("monai is not installed")) == (3, 4)
    assert table.count("| while blocks stream / pure copy | ≥ 0.8 | **") == 1
    assert f"residual U-Net, {unets.parameters(2) / 1e6:.3g} M parameters 64²" in table


@pytest.mark.usefixtures("as_in_a_worker")
@pytest.mark.parametrize("words", ["monai least", "monai default", "deepinv large", "deepinv default"])
def test_peers_run_on_the_processor(words: str, tmp_path: Path) -> None:
    name, way = words.split()
    pytest.importorskip(name)
    assert getattr(gpu_beside, name)(tmp_path, 320, "cpu", "cnn", way)["mpix_per_s"] > 0


@pytest.mark.parametrize(
    ("name", "title", "bar", "measured", "verdict"),
    [
        ("cnn", "end to end / bare forward", "≥ 0.7", "0.800", "reached"),
        ("unet", "end to end / bare forward", "≥ 0.9", "0.800", "missed"),
        ("unet", "the same with the halo counted", "", "1.000", ""),
        ("gaussian", "while blocks stream / pure copy", "≥ 0.8", "0.900", "reached"),
        ("cnn", "bare forward, cuDNN choosing by rule / by stopwatch", "", "0.950", ""),
        ("cnn", "peak VRAM / plan", "0.9 to 1.1", "1.050", "reached"),
    ],
)
def test_bars_are_held_against_what_was_measured(name: str, title: str, bar: str, measured: str, verdict: str) -> None:
    cells = row(name, title, results())
    assert (cells[1], cells[2], cells[5]) == (bar, measured, verdict)


def test_what_is_not_planned_or_installed_has_no_ratio_and_memory_is_near_its_plan_from_both_sides() -> None:
    title = "peak VRAM / plan"
    assert [row("cnn", title, results(peak_bytes=peak))[5] for peak in (899, 1101)] == ["missed"] * 2
    assert row("cnn", title, results(planned_bytes=0))[2] == "not measured"
    cells = row("cnn", "end to end / MONAI, windows of 2048", results())
    assert cells[2:] == ["not measured", "", "monai is not installed", ""]


def test_a_program_that_fails_costs_its_rows_and_no_others(tmp_path: Path) -> None:
    def broken(name: str, *_: Any) -> Any:
        if name.endswith("bare"):
            raise SystemExit("bare failed:\nOutOfMemoryError: a | b")
        return results()[{"gpu_programs.ours": "ours 1"}.get(name, name.removeprefix("gpu_programs."))][0]

    bench = Bench(tmp_path, "cpu", 2, 1.0, 2, broken)
    lines = bench.rows(CASES["gaussian"], 64)
    failed = [line for line in lines if line.endswith("| failed |")]
    assert len(failed) == 2
    assert "OutOfMemoryError: a / b" in failed[0]
    assert bench.failed == {"bare": "OutOfMemoryError: a | b"}
    assert any("while blocks stream / pure copy | ≥ 0.8 | **0.900**" in line for line in lines)


def test_a_device_is_looked_for_in_a_process_of_its_own_and_figures_of_the_processor_are_not_for_the_documentation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (main(["--look", "--device", "cpu"]), capsys.readouterr().err) == (0, "the processor is here\n")
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--out", str(bench_gpu.DOCS / "benchmarks.md")])
    assert "do not belong into the documentation" in capsys.readouterr().err
    monkeypatch.setattr(bench_gpu, "program", lambda *_: {"name": None})
    assert (main([]), capsys.readouterr().err.count("\n")) == (2, 1)


def test_rounds_end_when_the_time_is_up() -> None:
    rounds = take_turns(["a", "b", "a"], lambda _: {"x": 1.0}, 5, limit_seconds=-1.0)
    assert {name: len(runs) for name, runs in rounds.items()} == {"a": 1, "b": 1}


def test_the_unet_is_as_large_and_looks_as_far_as_it_says() -> None:
    assert (unets.parameters(), unets.reach()) == (32_638_080, 185)
    small = UserNetwork(import_="tests.benchmarks.unets:residual_unet", options={"width": 2, "blocks": 1})
    assert probe(small, 2) == (unets.reach(blocks=1), unets.STRIDE)
