"""A run that was moved together with its output goes on where it is now."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from halotile.graphs.runs.verify import verify
from tests.cli.engine import printed

CONFIG = """\
version: 1
job: denoise
input: {path: noisy.npy}
output: {path: clean.zarr, shard: 32, chunk: 16}
denoiser: {name: gaussian, sigma: 1}
tile: {size: 32, block: 32}
run: {workers: 1}
"""


def go(*words: str) -> None:
    printed(*words)


def move(folder: Path, before: str, after: str) -> Path:
    """The output and what lies beside it; the first shard is lost on the way."""
    for name in (f"{before}.zarr", f"{before}.zarr.run"):
        (folder / name).rename(folder / name.replace(before, after))
    output = folder / f"{after}.zarr"
    (output / "0/c/0/0").unlink()
    return output


@pytest.mark.cluster
def test_a_moved_run_is_resumed_and_repaired_where_it_is(tmp_path: Path) -> None:
    np.save(tmp_path / "noisy.npy", np.random.default_rng(0).random((64, 64), np.float32))
    (tmp_path / "config.yaml").write_text(CONFIG)
    go("run", str(tmp_path / "config.yaml"), "--no-dashboard", "-q")
    whole = (tmp_path / "clean.zarr/0/c/0/0").read_bytes()
    moved = move(tmp_path, "clean", "moved")
    go("resume", f"{moved}.run", "--no-dashboard", "-q")
    assert verify(moved).problems == ()
    again = move(tmp_path, "moved", "again")
    go("verify", str(again), "--repair", "-q")
    assert verify(again).problems == ()
    assert (again / "0/c/0/0").read_bytes() == whole
    assert sorted(path.name for path in tmp_path.glob("*.zarr*")) == ["again.zarr", "again.zarr.run"]
