"""Rows of the tables: their programs exist, their cases are in a group, and what misses its bar says so."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.benchmarks import run
from tests.benchmarks.bars import Ratio
from tests.benchmarks.rows import GROUPS, LONG_GROUPS, RATIOS
from tests.benchmarks.training_picture import curves_in

HERE = Path(__file__).parent


@pytest.mark.parametrize("row", RATIOS, ids=lambda row: f"{row.case}: {row.title}")
def test_the_programs_of_a_row_take_its_arguments(row: Ratio) -> None:
    for program in (row.ours, row.peer):
        module, _, call = program.partition(".")
        name, *given = call.split()
        tree = ast.parse((HERE / f"{module}.py").read_text())
        (function,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
        most = len(function.args.args)
        assert most - len(function.args.defaults) <= 2 + len(given) <= most


def test_every_case_is_in_one_group() -> None:
    grouped = [case for group in (GROUPS | LONG_GROUPS).values() for case in group]
    assert len(grouped) == len(set(grouped))
    assert {row.case for row in RATIOS} <= set(grouped)


@pytest.mark.parametrize(
    ("bar", "theirs", "verdict"), [(0.1, 30.05, "reached"), (0.1, 30.2, "missed"), (None, 30.2, "")]
)
def test_decibels_are_missed_where_the_peer_is_better_by_more_than_the_bar(
    bar: float | None, theirs: float, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"module.ours": 30.0, "module.theirs": theirs}
    row = Ratio("case", "title", "module.ours", "module.theirs", 1, bar, 1, "decibels")
    monkeypatch.setattr(run, "RATIOS", [row])
    monkeypatch.setattr(run, "program", lambda name, folder, edge: {"decibels": given[name]})
    (line,) = run.measure_ratios("case", tmp_path, None)
    assert line.split(" | ")[-1].strip("| ") == verdict


@pytest.mark.parametrize(
    ("bar", "ours", "verdict"),
    [
        (0.1, 61.0, "reached, trained 61 s / 60 s"),
        (None, 61.0, "trained 61 s / 60 s"),
        (0.1, 62.0, "**not the same time**: trained 62 s / 60 s"),
        (None, 62.0, "**not the same time**: trained 62 s / 60 s"),
    ],
)
def test_a_row_says_how_long_both_trained_and_where_ours_did_so_for_longer(
    bar: float | None, ours: float, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Ratio("case", "title", "module.ours", "module.theirs", 1, bar, 1, "decibels")
    seconds = {"module.ours": ours, "module.theirs": 60.0}
    monkeypatch.setattr(run, "RATIOS", [row])
    monkeypatch.setattr(run, "program", lambda name, *_: {"decibels": 30.0, "trained_seconds": seconds[name]})
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
