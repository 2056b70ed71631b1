"""The table of a GPU, rehearsed on the CPU: every program runs, every row is there, nothing is made up."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from halotile.graphs.clusters.base import RunningCluster
from halotile.tasks.denoisers.torch import UserNetwork
from halotile.tasks.trials.probe import probe
from tests.benchmarks import bench_gpu, gpu_programs, unets
from tests.benchmarks.bench_gpu import CASES, Bench, main
from tests.benchmarks.measuring import take_turns


@pytest.mark.cluster
@pytest.mark.usefixtures("as_in_a_worker")
def test_every_program_runs_on_the_processor(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_programs, "started", lambda _: nullcontext(cluster))
    monkeypatch.setattr(bench_gpu, "is_installed", lambda _: False)

    def here(name: str, folder: Path, edge: int, *more: str) -> Any:
        if name.endswith("bare") and "gaussian" in more:
            raise SystemExit("bare failed:\nOutOfMemoryError: a | b")
        return getattr(gpu_programs, name.removeprefix("gpu_programs."))(folder, edge, *more)

    bench = Bench(tmp_path, "cpu", 1, 1.0, 2, here)
    lines = [line for case in CASES.values() for line in bench.rows(case, 64)]
    table, failed = "\n".join(lines), [line for line in lines if line.endswith("| failed |")]
    assert bench.failed == {"bare": "OutOfMemoryError: a | b"}
    assert (len(failed), "OutOfMemoryError: a / b" in failed[0]) == (2, True), "the other rows are there"
    pattern = r"\| ≥ (\S+) \| \*\*([\d.]+)\*\* .*\| (\w+) \|$"
    held = [(float(bar), float(ratio), verdict) for bar, ratio, verdict in re.findall(pattern, table, re.MULTILINE)]
    assert len(held) == 3
    assert all(ratio == bar or (ratio > bar) == (verdict == "reached") for bar, ratio, verdict in held)
    assert table.count("| peak VRAM / plan | 0.9 to 1.1 | **not measured** |") == 3
    assert (table.count("end to end, one worker"), table.count("monai is not installed")) == (3, 4)
    assert table.count("| while blocks stream / pure copy | ≥ 0.8 | **") == 1
    assert f"residual U-Net, {unets.parameters(2) / 1e6:.3g} M parameters 64²" in table


@pytest.mark.usefixtures("as_in_a_worker")
@pytest.mark.parametrize("words", ["monai least", "monai default", "deepinv large", "deepinv default"])
def test_peers_run_on_the_processor(words: str, tmp_path: Path) -> None:
    name, way = words.split()
    pytest.importorskip(name)
    assert getattr(gpu_programs, name)(tmp_path, 320, "cpu", "cnn", way)["mpix_per_s"] > 0


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
