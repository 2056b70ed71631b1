"""The job ``train``: a run like every other, whose weights do not depend on its workers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import psutil
import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load

from halotile import __version__
from halotile.errors import DamagedData, Diverged, HalotileError, OutputRefused, ResumeRefused
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.train.job import FAST, Training, WeightsFile, plan_rows
from halotile.graphs.kinds.sections import Input, Run
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.driver import Outcome, run
from halotile.graphs.runs.verify import verify
from halotile.storage.images.png import contrast, grey
from halotile.storage.run_directory.directory import EXAMPLES, PAGE, RunDirectory
from halotile.tasks.groups.training.curve import read_curve
from tests.cases import thorough
from tests.faults import REPOSITORY, flip_bit, members, until
from tests.graphs.test_train_plans import curve_of, recipe_of, train, training, write_images
from tests.graphs.test_watching import Looking, fetched
from tests.support import job_of, read_zarr, run_inline, write_zarr

pytestmark = pytest.mark.cluster

New = Callable[..., Training]
Go = Callable[..., tuple[Outcome, bytes]]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the images."""
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture
def new(images: Path, tmp_path: Path) -> Callable[..., Training]:
    """Makes a training of these images, with options."""
    return partial(training, images, tmp_path)


@pytest.fixture
def go(cluster: RunningCluster) -> Callable[..., tuple[Outcome, bytes]]:
    """Runs a training; returns its end and the weights."""
    return partial(train, cluster=cluster)


@pytest.fixture(scope="module")
def expected(images: Path, cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of two workers."""
    return train(training(images, tmp_path_factory.mktemp("expected")), cluster)[1]


def test_one_worker_gives_the_same_bits(new: New, go: Go, expected: bytes) -> None:
    job = new(run=Run(workers=1, memory_per_worker="3GiB"))
    outcome, weights = go(job)
    assert weights == expected
    assert (outcome.done, outcome.total, outcome.counted) == (12, 12, "step")
    assert outcome.peak_memory_bytes > 200 * 2**20
    assert outcome.inspection.figures["denoiser"] == {"name": "unet", "weights": job.output.path}
    rows = curve_of(job)
    assert [row["iteration"] for row in rows] == list(range(1, 13))
    assert set(rows[-1]) == {"iteration", "loss", "validation", "rate"}


def test_fast_gradients_give_nearly_the_same_network_and_infinity_ends_a_job(new: New, go: Go, expected: bytes) -> None:
    job = new(mode="fast")
    outcome, weights = go(job)
    exact, fast = (load(content) for content in (expected, weights))
    assert all(torch.allclose(exact[name], fast[name], atol=1e-4) for name in exact)
    assert outcome.done == 12
    assert ("gradients", FAST) in plan_rows(make_plan(job).summary())
    with pytest.raises(Diverged, match=r"the loss is .* Write a smaller learning rate"):
        go(new(lr=1e30, output=WeightsFile(path=f"{job.output.path}.safetensors")))


def test_the_page_shows_curve_learning_rate_and_examples_and_is_kept(new: New, cluster: RunningCluster) -> None:
    job = new(steps=15)
    directory = RunDirectory.beside(job.output.path)
    looking = Looking(cluster.dashboard)
    run(make_plan(job), cluster=cluster, observer=looking)
    message = json.loads(fetched(looking.address)[0])
    curve = message["curve"]
    assert curve.keys() == {"iteration", "loss", "validation", "rate"}
    assert curve["iteration"] == list(range(1, 16))
    assert curve["rate"] == sorted(curve["rate"], reverse=True)
    assert (message["progress"]["done"], message["job"]["counted"]) == (15, "step")
    examples = (directory.path / EXAMPLES).read_bytes()
    assert b64decode(message["examples"]) == examples
    assert message["job"]["drawing"].startswith("Patches")
    held_out = recipe_of(job).patches.held_out(16)
    assert held_out is not None
    with PIL.Image.open(BytesIO(examples)) as image:
        shown = np.asarray(image)[:16, :16]
    np.testing.assert_array_equal(shown, grey(held_out.pixels[0], *contrast([held_out.pixels[0]]))[..., 0])
    kept = re.search(r"^const kept = (.*);", (directory.path / PAGE).read_text(), re.MULTILINE)
    assert kept
    assert json.loads(kept[1]).items() <= message.items()


@pytest.mark.thorough
def test_a_killed_worker_and_driver_change_no_bit(images: Path, cluster: RunningCluster, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole, job = (training(images, folder, steps=200) for folder in (tmp_path / "whole", tmp_path))
    _, expected = train(whole, cluster)
    path = tmp_path / "train.yaml"
    path.write_text(json.dumps(make_plan(job).documents.resolved))
    often = "from halotile.tasks.training import trainer\ntrainer.CHECKPOINT_SECONDS = 0.1\n"
    (tmp_path / "sitecustomize.py").write_text(often)
    state = RunDirectory.beside(job.output.path).state_path
    command = [sys.executable, "-m", "halotile.cli.main", "run", str(path), "--quiet"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(REPOSITORY)))}
    with subprocess.Popen(command, env=environment, start_new_session=True) as driver:
        until(lambda: driver.poll() is not None or list(state.glob("*.checkpoint")), seconds=60)
        assert driver.poll() is None
        others = [psutil.Process(pid) for pid in members(driver.pid) if pid != driver.pid]
        max(others, key=lambda process: process.memory_info().rss).kill()
        until(lambda: driver.poll() is not None or read_curve(state / "curve.json")[0] > 100, seconds=60)
        assert driver.poll() is None
        driver.kill()
    assert not Path(job.output.path).exists()
    _, weights = train(job)
    assert weights == expected
    assert curve_of(job) == curve_of(whole)
    assert verify(job.output.path, job=job).sound


def test_weights_know_the_values_that_they_learned_from(images: Path, new: New, go: Go, tmp_path: Path) -> None:
    counts = np.clip(np.rint(1000 * read_zarr(images / "noisy.zarr")), 0, None)
    write_zarr(tmp_path / "counts.zarr", counts.astype(np.uint16))
    write_zarr(tmp_path / "floats.zarr", counts.astype(np.float32))
    outcome, _ = go(new(input=Input(path=str(tmp_path / "counts.zarr"))))
    options = dict(outcome.inspection.figures["denoiser"])
    denoiser = options.pop("name"), options
    paths = [tmp_path / f"{kind}.zarr" for kind in ("counts", "floats")]
    stored, floats = (run_inline(job_of(path, path.with_suffix(".out.zarr"), *denoiser)) for path in paths)
    assert np.abs(floats - stored).max() < 0.51
    assert floats.mean() == pytest.approx(counts.mean(), rel=0.3)


def test_a_file_that_is_removed_before_the_end_is_written_again(
    new: New, cluster: RunningCluster, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new()
    path = Path(job.output.path)

    def remove_it(progress: Any) -> None:
        if progress.done == progress.total:
            path.unlink(missing_ok=True)

    said = r"after the run had written .*, it was emptied or removed. `recon-cli verify .* --repair`"
    with pytest.raises(DamagedData, match=said):
        run(make_plan(job), cluster=cluster, observer=remove_it)
    checkpoints = list(RunDirectory.beside(path).state_path.glob("*.checkpoint"))
    trained = [checkpoint.stat().st_mtime_ns for checkpoint in checkpoints]
    monkeypatch.setattr(RunDirectory, "forget_state", lambda _: None)
    assert verify(path, job=job, repair=True).sound
    assert path.read_bytes() == expected
    assert trained == [checkpoint.stat().st_mtime_ns for checkpoint in checkpoints] != []


@pytest.mark.parametrize("fresh", [False, True])
def test_a_file_that_is_put_there_meanwhile_is_not_overwritten(new: New, go: Go, fresh: bool) -> None:
    job = new(steps=2)
    with claim(make_plan(job)):
        Path(job.output.path).write_bytes(b"mine")
    with pytest.raises(HalotileError, match=r"that no run wrote|has not written it yet"):
        go(job, fresh=fresh)
    assert Path(job.output.path).read_bytes() == b"mine"


def test_weights_are_named_once_trained(new: New, cluster: RunningCluster, expected: bytes, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    path.write_bytes(b"before")
    job = new(output=WeightsFile(path=str(path), overwrite=True))
    plan = make_plan(job)
    with claim(plan):  # a run that is killed before its first step
        path.with_name(f"{path.name}.1234.partial").write_bytes(b"half")
        assert not path.exists()
    named: list[bool] = []
    run(plan, cluster=cluster, observer=lambda progress: named.append(path.exists() and progress.done < progress.total))
    assert not any(named)
    assert path.read_bytes() == expected
    assert not list(tmp_path.glob("*.partial"))
    assert verify(path, job=job).sound


SAID = (
    "| data | `noisy.zarr` |", "| pixels | 30,720 (192 × 160", "| noise level | 0.2", "| method | noise2void |",
    "| length | 2 steps of 8 patches of 16 × 16", f"halotile {__version__}",
    "denoiser: {name: unet, weights: net.safetensors}", "- step 2: loss ",
)  # fmt: skip


def test_a_model_card_lies_beside_the_weights_and_keeps_its_licence(new: New, go: Go, tmp_path: Path) -> None:
    (card := tmp_path / "net.md").write_text("mine")
    job = new(steps=2, output=WeightsFile(path=str(tmp_path / "net.safetensors"), overwrite=True))
    go(job)
    assert card.read_text() == "mine"
    card.unlink()
    _, weights = go(job, fresh=True)
    text = card.read_text()
    _, head, body = text.split("---\n", 2)
    assert YAML(typ="safe").load(head) == {
        "license": None, "library_name": "halotile", "pipeline_tag": "image-to-image", "tags": ["denoising", "noise2void", "unet"]
    }  # fmt: skip
    assert [said for said in (*SAID, f"`{sha256(weights).hexdigest()}`") if said not in body] == []
    filled = text.replace("license:", "license: cc-by-4.0")
    card.write_text(filled)
    go(job)
    assert card.read_text() == filled
    outcome, _ = go(replace(job, steps=3), fresh=True)
    assert "license: cc-by-4.0" in card.read_text()
    assert "| length | 3 steps" in card.read_text()
    assert ("model card", str(card)) in outcome.inspection.rows


@pytest.mark.parametrize("damage", [Path.unlink, thorough(flip_bit), thorough(lambda path: path.write_bytes(b""))])
def test_a_damaged_file_is_repaired_and_another_one_left_alone(new: New, go: Go, damage: Callable[..., object]) -> None:
    job = new(steps=2)
    _, weights = go(job)
    path = Path(job.output.path)
    damage(path)
    assert not verify(path).sound
    if not path.exists():
        with pytest.raises(OutputRefused, match=r"is not there, .* `recon-cli verify .* --repair` writes it again"):
            go(job)
    assert verify(path, job=job, repair=True).sound
    assert path.read_bytes() == weights
    for change, said in (({"seed": 1}, "seed was 0, is 1"), ({"mode": "fast"}, 'mode was "exact", is "fast"')):
        with pytest.raises(ResumeRefused, match=said):
            go(replace(job, **change))
    path.write_bytes(b"mine")
    with pytest.raises(OutputRefused, match="the file has other contents"):
        go(job)
    assert path.read_bytes() == b"mine"
    assert not verify(path, job=job).sound
    path.unlink()
    assert go(job, fresh=True)[1] == weights
