"""``recon-cli simulate``: which jobs it takes, what it says, and what it refuses before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.runs import driver
from tests.cli.engine import ask, printed, refused

JOB = """\
version: 1
job: reconstruct
output: {path: x.zarr}
operators:
  - {name: blur, kernel: psf.npy, data: y0.zarr, noise_sigma: 0.02}
  - {name: crop, origin: [3, 5], size: [20, 30], data: y1.zarr, noise_sigma: 0.05}
start: y0.zarr
reference: truth.npy
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A job whose measurements are not there yet; it begins with one of them."""
    np.save(tmp_path / "truth.npy", np.random.default_rng(0).random((64, 48), np.float32))
    np.save(tmp_path / "psf.npy", np.full((3, 3), 1 / 9))
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.mark.cluster
def test_measurements_make_the_job_whole(
    config: Path, cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_the_cluster(*given: Any, **options: Any) -> Any:
        return run(*given, **options, cluster=cluster)

    run = driver.run
    monkeypatch.setattr(driver, "run", on_the_cluster)
    assert ask("validate", config).exit_code == 4
    told = json.loads(printed("simulate", config, "--noise", "poisson", "--gain", "0.01", "--json"))
    assert (told["output"], told["done"]) == (str(config.parent / "y0.zarr"), told["total"])
    arrays = [zarr.open_array(config.parent / f"y{number}.zarr", mode="r") for number in range(2)]
    assert [array.shape for array in arrays] == [(64, 48), (20, 30)]
    noise = json.loads((config.parent / "y0.zarr.run" / "job.json").read_text())["noise"]
    assert (noise["name"], noise["gain"]) == ("poisson", 0.01)
    assert ask("validate", config).exit_code == 0
    message = refused("simulate", config)
    assert "y0.zarr.run belongs to a different job:" in message
    assert 'noise.name was "poisson", is "gaussian"' in message
    assert "--overwrite" in message
    again = ask("simulate", config, "--overwrite", "--quiet")
    assert (again.exit_code, again.stdout, again.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--noise", "gausian"], 2, "noise is 'gausian': there is none of that name; did you mean gaussian?"),
        (["--noise", "poisson", "--gain", "0"], 2, "gain is 0: a count has to be worth something"),
        (["--gain", "much"], 2, "'much' is not a number; write one such as 0.5."),
        (["--seed", "1.5"], 2, "'1.5' is not a whole number; write one such as 4."),
        (["--seed", "-1"], 2, "seed is -1: seeds count from 0"),
        (["--set", "reference=null"], 2, "reference is not there: measurements are simulated from the true image"),
        (["--set", "reference=gone.npy"], 4, "gone.npy does not exist"),
        (["--set", "operators[0].kernel=gone.npy"], 4, "gone.npy does not exist"),
        (["--set", "operators[1].data=truth.npy"], 2, "measurements are written as Zarr"),
        (["--set", "operators[1].data=no/y.zarr"], 2, "operators[1].data is"),
        (["--set", "operators[1].data=y0.zarr"], 2, "operators[1].data is"),
        (["--set", "operators[1].size=[900, 9]"], 2, "operators[1]: origin is (3, 5) and size (900, 9)"),
        (["--set", "run.memory_per_worker=100MiB"], 5, "run.memory_per_worker is 100MiB; one block of"),
        (["--set", "operators[0].noise_sigma=-1"], 2, "--set operators[0].noise_sigma: -1 is too small"),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_refused(config: Path, words: list[str], code: int, said: str) -> None:
    before = sorted(config.parent.iterdir())
    assert said in refused("simulate", config, *words, code=code)
    assert sorted(config.parent.iterdir()) == before


def test_a_job_without_operators_is_none_to_simulate(tmp_path: Path) -> None:
    np.save(tmp_path / "noisy.npy", np.zeros((9, 9), np.float32))
    path = tmp_path / "job.yaml"
    path.write_text(
        "version: 1\njob: denoise\ninput: {path: noisy.npy}\noutput: {path: x.zarr}\n"
        "denoiser: {name: median, size: 3}\n"
    )
    assert "job is denoise: measurements are simulated of a reconstruction" in refused("simulate", path)
