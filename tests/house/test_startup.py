"""Importing halotile costs nothing until something is used; what workers import is begun at once where they are certain to be needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from halotile.__main__ import _has_workers_here


@pytest.mark.parametrize("heavy", ["torch", "dask", "distributed", "zarr", "numpy"])
def test_importing_the_package_does_not_load(heavy: str) -> None:
    code = f"import sys, halotile; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "text", "scheduler", "expected"),
    [
        ("job.yaml --workers 4", "job: denoise", "", True),
        ("job.yaml --workers 4", "cluster: {kind: slurm}", "", False),
        ("job.yaml --cluster slurm", "job: denoise", "", False),
        ("job.yaml --set cluster.kind=slurm", "job: denoise", "", False),
        ("job.yaml --dry-run", "job: denoise", "", False),
        ("other.yaml", "job: denoise", "", False),
        ("job.yaml", "job: denoise", "tls://10.0.0.7:8786", False),
    ],
)
def test_workers_of_this_machine_are_certain_only_where_nothing_mentions_a_cluster(
    words: str, text: str, scheduler: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HALOTILE_CLUSTER", "auto")
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", scheduler)
    Path("job.yaml").write_text(text)
    assert _has_workers_here(words.split()) == expected
