"""Answers of trials that are kept: for this network, its weights, what it reads, and this job alone. Those about networks of halotile take no process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.plans.trials import denoiser_trials
from halotile.tasks.denoisers.dncnn import DnCNN
from halotile.tasks.denoisers.torch import UserNetwork
from halotile.tasks.trials.provenance import build_digest, is_own
from halotile.tasks.trials.trial import sides_as_channels
from tests.support import dncnn_weights, job_of, noisy_image, write_zarr


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Denoising:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_zarr(tmp_path / "in.zarr", noisy_image((140, 130)))
    weights = dncnn_weights(tmp_path / "w.safetensors", depth=3)
    options = {"weights": str(weights), "depth": 3, "width": 8}
    return job_of(tmp_path / "in.zarr", tmp_path / "out.zarr", "dncnn", options)


LOOKING = """
import os
from pathlib import Path
import torch
from torch import nn

HERE = Path(__file__).parent

class Looking(nn.Module):
    def __init__(self, note):
        super().__init__()
        try:
            open(HERE / "absent")
        except FileNotFoundError:
            pass
        assert (HERE / "radius.py").read_text()  # it is read again later on
    def forward(self, x):
        with open(HERE / "calls", "a") as calls:
            calls.write(".")
        radius = int((HERE / "radius.py").read_text()) + int(os.environ.get("MORE_RADIUS", 0))
        return nn.functional.avg_pool2d(x, 2 * radius + 1, 1, radius, count_include_pad=False)
"""


def radius_of(folder: Path) -> tuple[int, bool]:
    """The receptive field that a plan finds, and True where the network was called for it."""
    (folder / "calls").write_text("")
    named = {"import": "looking_networks:Looking", "options": {"note": 300 * "a"}}  # no file has such a name
    made = job_of(folder / "in.zarr", folder / "out.zarr", "torch", named)
    plan = make_plan(replace(made, import_folder=str(folder)))
    return plan.identity["probed"][0], bool((folder / "calls").read_text())


def test_what_a_network_reads_again_or_finds_in_the_environment_is_in_the_key(
    job: Denoising, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "looking_networks.py").write_text(LOOKING)
    (tmp_path / "radius.py").write_text("1")
    assert radius_of(tmp_path) == (1, True)
    assert radius_of(tmp_path) == (1, False)
    (tmp_path / "radius.py").write_text("4")
    assert radius_of(tmp_path) == (4, True)
    assert radius_of(tmp_path) == (4, False)
    monkeypatch.setenv("SSH_TTY", "/dev/pts/9")
    assert radius_of(tmp_path) == (4, False)
    monkeypatch.setenv("MORE_RADIUS", "2")
    assert radius_of(tmp_path) == (6, True)


def trials_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the denoisers that are tried from now on."""
    tried = []

    def bounded(call: Callable[[], Any], title: str, *_: Any, **__: Any) -> Any:
        tried.append(title)
        return call()

    monkeypatch.setattr(denoiser_trials, "bounded", bounded)
    return tried


def test_a_stored_answer_takes_no_process(job: Denoising, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = trials_of(monkeypatch)
    first = make_plan(job)
    assert tried == ["dncnn"]
    assert make_plan(job).identity == first.identity
    assert tried == ["dncnn"]
    weights = dncnn_weights(Path(str(job.denoiser.options["weights"])), depth=3)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    make_plan(job)
    make_plan(replace(job, tile=replace(job.tile, size=(32, 32))))
    assert tried == ["dncnn"] * 3


def test_only_options_and_files_tell_a_network_of_halotile(tmp_path: Path) -> None:
    weights = dncnn_weights(tmp_path / "w.safetensors")
    ours = DnCNN(weights=str(weights), depth=5, width=8)
    foreign = UserNetwork(import_="tests.networks:convolutions")

    class Derived(DnCNN):
        """A network of another package, which may build anything."""

    assert is_own(ours)
    assert is_own(sides_as_channels(ours, ["sigma"]))
    assert not is_own(foreign)
    assert not is_own(Derived(weights=str(weights), depth=5, width=8))
    before = build_digest(ours)
    assert build_digest(replace(ours, residual="none")) != before
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert build_digest(ours) != before
