"""Trials of networks that halotile builds itself: a stored answer takes no process and no torch, and is for these weights and this job alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.plans.make import make_plan
from halotile.graphs.plans.trials import denoiser_trials
from halotile.tasks.denoisers.dncnn import DnCNN
from halotile.tasks.denoisers.torch import UserNetwork
from halotile.tasks.trials.provenance import build_digest, is_own
from halotile.tasks.trials.sides import sides_as_channels
from tests.support import dncnn_weights, job_of, noisy_image, write_zarr


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Denoising:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_zarr(tmp_path / "in.zarr", noisy_image((140, 130)))
    weights = dncnn_weights(tmp_path / "w.safetensors", depth=3)
    options = {"weights": str(weights), "depth": 3, "width": 8}
    return job_of(tmp_path / "in.zarr", tmp_path / "out.zarr", "dncnn", options)


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
