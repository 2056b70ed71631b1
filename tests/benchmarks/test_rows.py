"""Rows of the tables, and the model of one scheduler with many workers: programs exist, what misses its bar says so, simulation and formulas agree."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from halotile.graphs.runs.passes.stream import least_task_seconds
from tests.benchmarks import run
from tests.benchmarks.bars import Ratio
from tests.benchmarks.rows import GROUPS, LONG_GROUPS, RATIOS
from tests.benchmarks.training_picture import curves_in

HERE = Path(__file__).parent


def test_the_programs_of_a_row_take_its_arguments() -> None:
    for row, program in ((each, name) for each in RATIOS for name in (each.ours, each.peer)):
        module, _, call = program.partition(".")
        name, *given = call.split()
        tree = ast.parse((HERE / f"{module}.py").read_text())
        (function,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
        most = len(function.args.args)
        assert most - len(function.args.defaults) <= 2 + len(given) <= most, row


def test_every_case_is_in_one_group() -> None:
    grouped = [case for group in (GROUPS | LONG_GROUPS).values() for case in group]
    assert len(grouped) == len(set(grouped))
    assert {row.case for row in RATIOS} <= set(grouped)


@pytest.mark.parametrize(
    ("bar", "theirs", "trained", "verdict"),
    [
        (0.1, 30.05, None, "reached"),
        (0.1, 30.2, None, "missed"),
        (None, 30.2, None, ""),
        (0.1, 30.0, 61.0, "reached, trained 61 s / 60 s"),
        (None, 30.0, 61.0, "trained 61 s / 60 s"),
        (0.1, 30.0, 62.0, "**not the same time**: trained 62 s / 60 s"),
        (None, 30.0, 62.0, "**not the same time**: trained 62 s / 60 s"),
    ],
)
def test_decibels_are_missed_where_the_peer_is_better_by_more_than_the_bar_after_the_same_time(
    bar: float | None,
    theirs: float,
    trained: float | None,
    verdict: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"module.ours": {"decibels": 30.0}, "module.theirs": {"decibels": theirs}}
    if trained is not None:
        given["module.ours"]["trained_seconds"], given["module.theirs"]["trained_seconds"] = trained, 60.0
    monkeypatch.setattr(run, "RATIOS", [Ratio("case", "title", "module.ours", "module.theirs", 1, bar, 1, "decibels")])
    monkeypatch.setattr(run, "program", lambda name, folder, edge: given[name])
    (line,) = run.measure_ratios("case", tmp_path, None)
    assert line.split(" | ")[-1].strip("| ") == verdict


def test_the_picture_of_a_training_finds_the_rows_of_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decibels(name: str, folder: Path, edge: int) -> dict[str, float]:
        which = name.split(".")[1].split()[0]
        trained = {} if which == "untrained" else {"trained_seconds": 900.0}
        return {"decibels": {"ours": 30.0, "careamics": 29.0, "untrained": 28.0}[which]} | trained

    monkeypatch.setattr(run, "program", decibels)
    lines = [line for case in LONG_GROUPS["training-long"] for line in run.measure_ratios(case, tmp_path, None)]
    found = curves_in("\n".join(lines))
    assert len(found) == 4
    for curves in found.values():
        assert curves == {"halotile": {15: 30}, "CAREamics": {15: 29}, "tv": {15: 28}, "nlm": {15: 28}}


@pytest.mark.parametrize("workers", [100, 1000, 10_000])
def test_tasks_last_so_long_that_one_scheduler_keeps_its_workers_busy(workers: int) -> None:
    """By the formula and the seconds of docs/design/011: choosing a worker takes longer the more there are."""
    tasks_per_second = (1 - 0.12) / (0.0016 + 0.9e-6 * workers)
    assert 0.95 * workers / tasks_per_second < max(1.0, least_task_seconds(workers))
