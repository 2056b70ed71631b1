"""The job ``train``: a run like every other, whose weights do not depend on its workers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import psutil
import pytest
import tifffile
import torch
from safetensors.torch import load

from halotile.errors import (
    ConfigError,
    DamagedData,
    Diverged,
    HalotileError,
    InputError,
    MemoryRefused,
    OutputRefused,
    ResumeRefused,
)
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.train.job import NetworkChoice, Training, WeightsFile
from halotile.graphs.jobs.train.passes import TrainWork
from halotile.graphs.jobs.train.words import FAST, plan_rows
from halotile.graphs.kinds.sections import Input, Run
from halotile.graphs.plans.make import make_plan
from halotile.graphs.runs.driver import run
from halotile.graphs.runs.outcome import Outcome
from halotile.graphs.runs.outputs import held_output
from halotile.graphs.runs.outputs.claim import claim
from halotile.graphs.runs.verify import verify
from halotile.graphs.watching.progress import Progress
from halotile.storage.images.png import contrast, encode_png
from halotile.storage.images.sheet import grey
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.names import EXAMPLES, PAGE
from halotile.storage.stored_array import MOST_SHARED
from halotile.tasks.training.recipe import Recipe, read_curve
from tests.faults import REPOSITORY, members, until
from tests.graphs.test_watching import Looking, fetched
from tests.support import job_of, read_zarr, run_inline, work_of, write_zarr

NETWORK = NetworkChoice(name="unet", options={"width": 4, "levels": 1})


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two noisy images of the same waves."""
    folder = tmp_path_factory.mktemp("images")
    y, x = np.mgrid[:192, :160]
    clean = (0.5 + 0.3 * np.sin(y / 9) * np.cos(x / 7)).astype(np.float32)
    rng = np.random.default_rng(0)
    for name in ("noisy", "second"):
        noise = 0.2 * rng.standard_normal(clean.shape).astype(np.float32)
        write_zarr(folder / f"{name}.zarr", clean + noise)
    write_zarr(folder / "clean.zarr", clean)
    return folder


def training(images: Path, folder: Path, **options: Any) -> Training:
    """A small training."""
    usual: dict[str, Any] = {
        "input": Input(path=str(images / "noisy.zarr")),
        "output": WeightsFile(path=str(folder / "net.safetensors")),
        "network": NETWORK,
        "steps": 12,
        "patch": 16,
        "batch": 8,
        "run": Run(workers=2, memory_per_worker="3GiB"),
    }
    return Training(**(usual | options))


def train(job: Training, cluster: RunningCluster | None = None, **options: Any) -> tuple[Outcome, bytes]:
    """Run a training; return its end and the weights."""
    outcome = run(make_plan(job, **options), cluster=cluster)
    return outcome, Path(job.output.path).read_bytes()


@pytest.fixture(scope="module")
def expected(images: Path, cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of two workers."""
    return train(training(images, tmp_path_factory.mktemp("expected")), cluster)[1]


@pytest.mark.cluster
def test_one_worker_gives_the_same_bits(
    images: Path, cluster: RunningCluster, expected: bytes, tmp_path: Path
) -> None:
    job = training(images, tmp_path, run=Run(workers=1, memory_per_worker="3GiB"))
    outcome, weights = train(job, cluster)
    assert weights == expected
    assert (outcome.done, outcome.total, outcome.counted) == (13, 13, "step")
    assert outcome.peak_memory_bytes > 200 * 2**20
    assert outcome.inspection.figures["denoiser"] == {"name": "unet", "weights": job.output.path}
    rows = [
        json.loads(line)
        for line in (RunDirectory.beside(job.output.path).iterations_path).read_text().splitlines()
    ]
    assert [row["iteration"] for row in rows] == list(range(1, 13))
    assert {"loss", "validation", "rate"} <= set(rows[-1])


@pytest.mark.cluster
def test_the_page_shows_curve_learning_rate_and_examples_and_is_kept(
    images: Path, cluster: RunningCluster, tmp_path: Path
) -> None:
    job = training(images, tmp_path, steps=30)
    directory = RunDirectory.beside(job.output.path)
    looking = Looking(cluster.dashboard)
    run(make_plan(job), cluster=cluster, observer=looking)
    message = json.loads(fetched(looking.address)[0])
    curve = message["curve"]
    assert curve.keys() == {"iteration", "loss", "validation", "rate"}
    assert curve["iteration"] == list(range(1, 31))
    assert curve["rate"] == sorted(curve["rate"], reverse=True)
    assert (message["progress"]["done"], message["job"]["counted"]) == (31, "step")
    examples = (directory.path / EXAMPLES).read_bytes()
    assert b64decode(message["examples"]) == examples
    held_out = recipe_of(job).patches.held_out(16)
    assert held_out is not None
    with PIL.Image.open(BytesIO(examples)) as image:
        shown = np.asarray(image)[:16, :16]
    np.testing.assert_array_equal(shown, grey(held_out.pixels[0], *contrast([held_out.pixels[0]]))[..., 0])
    kept = re.search(r"^const kept = (.*);", (directory.path / PAGE).read_text(), re.MULTILINE)
    assert kept
    assert json.loads(kept[1]).items() <= message.items()


@pytest.mark.cluster
def test_a_killed_worker_and_a_killed_driver_change_no_bit(
    images: Path, cluster: RunningCluster, tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    _, expected = train(training(images, tmp_path / "whole", steps=200), cluster)
    job = training(images, tmp_path, steps=200)
    path = tmp_path / "train.yaml"
    path.write_text(json.dumps(make_plan(job).documents.resolved))
    curve = RunDirectory.beside(job.output.path).state_path / "curve.json"
    command = [sys.executable, "-m", "halotile.cli.main", "run", str(path), "--quiet"]
    with subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True) as driver:
        until(lambda: driver.poll() is not None or read_curve(curve)[0] > 0, seconds=60)
        assert driver.poll() is None
        others = [psutil.Process(pid) for pid in members(driver.pid) if pid != driver.pid]
        max(others, key=lambda process: process.memory_info().rss).kill()
        until(lambda: driver.poll() is not None or read_curve(curve)[0] > 100, seconds=60)
        assert driver.poll() is None
        driver.kill()
    _, weights = train(job)
    assert weights == expected
    assert verify(job.output.path, job=job).sound


@pytest.mark.cluster
def test_the_weights_denoise_with_nothing_else_to_say(
    images: Path, cluster: RunningCluster, tmp_path: Path
) -> None:
    job = training(
        images, tmp_path, steps=150, rate=5e-3, second=str(images / "second.zarr"), method="noise2noise"
    )
    outcome, _ = train(job, cluster)
    denoiser = dict(outcome.inspection.figures["denoiser"])
    denoised = run_inline(
        job_of(images / "noisy.zarr", tmp_path / "out.zarr", denoiser.pop("name"), denoiser)
    )
    noisy, clean = (read_zarr(images / f"{name}.zarr") for name in ("noisy", "clean"))
    assert np.std(denoised - clean) < 0.5 * np.std(noisy - clean)


@pytest.mark.cluster
def test_weights_know_the_values_that_they_learned_from(
    images: Path, cluster: RunningCluster, tmp_path: Path
) -> None:
    counts = np.clip(np.rint(1000 * read_zarr(images / "noisy.zarr")), 0, None)
    write_zarr(tmp_path / "counts.zarr", counts.astype(np.uint16))
    write_zarr(tmp_path / "floats.zarr", counts.astype(np.float32))
    job = training(images, tmp_path, input=Input(path=str(tmp_path / "counts.zarr")))
    options = {"weights": job.output.path}
    train(job, cluster)
    stored, floats = (
        run_inline(job_of(tmp_path / f"{name}.zarr", tmp_path / f"{name}.out.zarr", "unet", options))
        for name in ("counts", "floats")
    )
    assert np.abs(floats - stored).max() < 0.51
    assert floats.mean() == pytest.approx(counts.mean(), rel=0.3)


@pytest.mark.cluster
def test_a_loss_that_is_not_finite_ends_the_job_in_its_own_words(
    images: Path, cluster: RunningCluster, tmp_path: Path
) -> None:
    with pytest.raises(Diverged, match=r"the loss is .* Write a smaller learning rate"):
        train(training(images, tmp_path, rate=1e30), cluster)


@pytest.mark.cluster
def test_a_file_of_another_program_in_its_place_is_not_overwritten(
    images: Path, cluster: RunningCluster, tmp_path: Path
) -> None:
    job = training(images, tmp_path, steps=2)
    train(job, cluster)
    path = Path(job.output.path)
    path.write_bytes(b"mine")
    with pytest.raises(OutputRefused, match="the file has other contents"):
        train(job, cluster)
    assert path.read_bytes() == b"mine"
    assert not verify(path, job=job).sound


@pytest.mark.cluster
def test_a_file_that_is_removed_before_the_end_is_written_again(
    images: Path, cluster: RunningCluster, expected: bytes, tmp_path: Path
) -> None:
    job = training(images, tmp_path)
    path = Path(job.output.path)

    def remove_it(progress: Progress) -> None:
        if progress.done == progress.total:
            path.unlink(missing_ok=True)

    with pytest.raises(
        DamagedData, match=r"after the run had written .*, it was emptied or removed. Put it back"
    ):
        run(make_plan(job), cluster=cluster, observer=remove_it)
    path.touch()
    assert train(job, cluster)[1] == expected


@pytest.mark.cluster
@pytest.mark.parametrize("fresh", [False, True])
def test_a_file_that_is_put_there_meanwhile_is_not_overwritten(
    images: Path, cluster: RunningCluster, tmp_path: Path, fresh: bool
) -> None:
    job = training(images, tmp_path, steps=2)
    with claim(make_plan(job)):
        Path(job.output.path).write_bytes(b"mine")
    with pytest.raises(HalotileError, match=r"that no run wrote|has not written it yet"):
        train(job, cluster, fresh=fresh)
    assert Path(job.output.path).read_bytes() == b"mine"


@pytest.mark.cluster
def test_steps_that_may_have_seen_another_image_are_taken_back(
    images: Path, cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "image.zarr"
    shutil.copytree(images / "noisy.zarr", source)
    job = training(images, tmp_path, input=Input(path=str(source)), steps=2000)
    metadata = source / "zarr.json"
    written = metadata.stat()
    monkeypatch.setattr(held_output, "LOOK_SECONDS", 0.5)
    state = RunDirectory.beside(job.output.path).state_path

    def change_it(progress: Progress) -> None:
        if list(state.glob("*.certain")) and metadata.stat().st_mtime_ns == written.st_mtime_ns:
            os.utime(metadata, ns=(1, 1))

    monkeypatch.setattr("halotile.tasks.training.trainer.CHECKPOINT_SECONDS", 0.2)
    with pytest.raises(InputError, match="while the run read it"):
        run(make_plan(job), cluster=cluster, observer=change_it)
    left = [path.name.split(".")[-1] for path in state.iterdir()]
    assert "last" not in left
    assert "certain" not in left


@pytest.mark.cluster
def test_a_file_that_was_removed_is_trained_again(
    images: Path, cluster: RunningCluster, tmp_path: Path
) -> None:
    job = training(images, tmp_path, steps=2)
    _, weights = train(job, cluster)
    Path(job.output.path).unlink()
    with pytest.raises(OutputRefused, match="is not there"):
        train(job, cluster)
    assert train(job, cluster, fresh=True)[1] == weights


def test_a_network_learns_from_several_images(images: Path, tmp_path: Path) -> None:
    plan = make_plan(training(images, tmp_path, input=Input(path=str(images / "*.zarr"))))
    assert [Path(source.path).name for source in plan.sources] == ["clean.zarr", "noisy.zarr", "second.zarr"]
    assert plan.figures["shapes"] == [[192, 160]] * 3


def test_few_of_many_images_are_open_at_once(tmp_path: Path) -> None:
    for number in range(60):
        pixels = np.arange(48 * 48, dtype=np.float32).reshape(48, 48) + 10_000 * number
        tifffile.imwrite(tmp_path / f"{number}.tif", pixels)
    patches = recipe_of(training(tmp_path, tmp_path, input=Input(path=str(tmp_path / "*.tif")))).patches
    drawn = np.concatenate([patches.draw(16 * pool, 0, 60).pixels for pool in range(4)])
    assert len(np.unique(drawn // 10_000)) > 40
    files = [Path(os.path.realpath(fd)) for fd in Path("/proc/self/fd").iterdir()]
    assert 0 < len([file for file in files if file.is_relative_to(tmp_path)]) <= 2 * MOST_SHARED, (
        "a file and its map"
    )


def test_the_memory_of_decoded_images_does_not_grow_with_their_number(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    needs = []
    for numbers in (range(20), range(20, 60)):
        for number in numbers:
            path = tmp_path / f"{number}.png"
            path.write_bytes(b"".join(encode_png(np.full((100, 100, 3), number, np.uint8))))
        plan = make_plan(training(tmp_path, tmp_path, input=Input(path=str(tmp_path / "*.png"))))
        needs.append(plan.summary()["peak_memory_per_worker_bytes"])
    assert needs[0] == needs[1]


def test_channels_are_taken_together_and_planes_apart(tmp_path: Path) -> None:
    pixels = np.zeros((3, 2, 64, 80), np.uint16)
    tifffile.imwrite(tmp_path / "a.ome.tif", pixels, metadata={"axes": "TCYX"})
    (image,) = recipe_of(
        training(tmp_path, tmp_path, input=Input(path=str(tmp_path / "a.ome.tif")))
    ).patches.images
    assert (image.channels, image.spatial, image.planes) == (2, (2, 3), (3, 1, 1, 1))


def test_holes_and_saturated_pixels_are_known(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(100, 60000, (128, 128)).astype(np.uint16)
    pixels[:40] = 65535
    pixels[100:, :50] = 0
    tag = (42113, "s", 0, "0", True)
    tifffile.imwrite(tmp_path / "a.tif", pixels, extratags=[tag])
    job = training(tmp_path, tmp_path, input=Input(path=str(tmp_path / "a.tif")))
    patches = recipe_of(job).patches
    assert patches.images[0].ends == (65535,)
    assert patches.values == (0, 65535)
    drawn = patches.draw(0, 0, 8)
    assert not drawn.valid.all()
    assert (drawn.pixels[drawn.valid] > 0).all()
    assert (drawn.pixels[drawn.valid] == 1).any(), "saturated areas count"
    assert (
        "pixels of 65535 are saturated: those on their own, such as hot pixels, are left out"
        in make_plan(job).notes
    )


def recipe_of(job: Training) -> Recipe:
    work = work_of(make_plan(job))
    assert isinstance(work, TrainWork)
    return work.recipe


def test_the_length_is_decided_by_epochs(images: Path, tmp_path: Path) -> None:
    job = training(images, tmp_path, steps="auto", epochs=2)
    assert recipe_of(job).steps == 2 * 192 * 160 / (8 * 16 * 16)
    assert make_plan(job).figures["epochs"] == pytest.approx(2)


def test_minutes_become_steps_that_stay(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = training(images, tmp_path, steps="auto", minutes=0.5)
    trials = "halotile.graphs.jobs.train.plan.call_bounded"
    monkeypatch.setattr(trials, lambda *_: 0.1)
    plan = make_plan(job)
    assert plan.figures["steps"] == 137  # two workers do two of four slots each: 0.22 s
    RunDirectory.beside(job.output.path).create()
    RunDirectory.beside(job.output.path).write_plan(
        {"job": "train", "identity": plan.identity, "fingerprint": plan.fingerprint, "summary": {}}
    )
    monkeypatch.setattr(trials, lambda *_: 0.2)
    again = make_plan(job)
    assert (again.figures["steps"], again.fingerprint) == (137, plan.fingerprint)
    assert make_plan(job, fresh=True).figures["steps"] == 69


def test_a_trial_measures_a_slot(images: Path, tmp_path: Path) -> None:
    assert recipe_of(training(images, tmp_path, steps="auto", minutes=0.1)).steps > 10


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"output": WeightsFile(path="net.zarr")}, ConfigError, "does not end with .safetensors"),
        ({"output": WeightsFile(path="s3://a/net.safetensors")}, ConfigError, "weights are written to a disk"),
        ({"epochs": 2.0}, ConfigError, "epochs: stands beside steps"),
        ({"method": "noise2noise"}, ConfigError, "second: is not there"),
        ({"second": "b.zarr"}, ConfigError, "second: is for method: noise2noise"),
        ({"batch": 9}, ConfigError, "slots: is 4, which does not divide batch: 9"),
        ({"run": Run(workers=8)}, ConfigError, "a batch has 4 parts; write slots: 8, or fewer workers"),
        ({"patch": 17}, ConfigError, "the network reduces by 2. Write patch: 18"),
        ({"patch": 256}, InputError, "has 192 × 160 pixels, and patch is 256"),
        ({"network": NetworkChoice(name="unet", options={"depth": 3})}, ConfigError, "has no option 'depth'"),
        ({"network": NetworkChoice(name="resnet")}, ConfigError, "resnet"),
        ({"method": "noise2clean"}, ConfigError, "method"),
        ({"batch": 8192, "patch": 128, "slots": 2}, MemoryRefused, "4096 patches of 128 × 128 on each worker"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(
    images: Path, tmp_path: Path, options: Mapping[str, Any], kind: type[HalotileError], said: str
) -> None:
    with pytest.raises(kind, match=said.replace("(", r"\(")):
        make_plan(training(images, tmp_path, **options))
    assert not any(tmp_path.iterdir())


def test_an_input_that_does_not_fit_is_refused(images: Path, tmp_path: Path) -> None:
    write_zarr(tmp_path / "other.zarr", np.zeros((64, 64), np.uint8))
    pair = {"method": "noise2noise", "second": str(tmp_path / "other.zarr")}
    with pytest.raises(InputError, match="Write images of the same"):
        make_plan(training(images, tmp_path, **pair))
    with pytest.raises(InputError, match="its noise is no other"):
        make_plan(training(images, tmp_path, **(pair | {"second": str(images / "noisy.zarr")})))
    os.symlink(images / "noisy.zarr", tmp_path / "noisy.zarr")
    with pytest.raises(InputError, match="Write a pattern of images of one kind"):
        make_plan(training(images, tmp_path, input=Input(path=str(tmp_path / "*.zarr"))))
    sides = Input(path=str(images / "noisy.zarr"), sides={"mask": str(images / "noisy.zarr")})
    with pytest.raises(ConfigError, match=r"input.sides: is for job: denoise"):
        make_plan(training(images, tmp_path, input=sides))


def test_another_training_is_not_resumed(images: Path, cluster: RunningCluster, tmp_path: Path) -> None:
    job = training(images, tmp_path, steps=2)
    train(job, cluster)
    with pytest.raises(ResumeRefused, match="seed was 0, is 1"):
        train(replace(job, seed=1), cluster)
    with pytest.raises(ResumeRefused, match='mode was "exact", is "fast"'):
        train(replace(job, mode="fast"), cluster)


@pytest.mark.cluster
def test_fast_gradients_give_nearly_the_same_network(
    images: Path, cluster: RunningCluster, expected: bytes, tmp_path: Path
) -> None:
    job = training(images, tmp_path, mode="fast")
    outcome, weights = train(job, cluster)
    exact, fast = (load(content) for content in (expected, weights))
    assert all(torch.allclose(exact[name], fast[name], atol=1e-4) for name in exact)
    assert outcome.done == 13
    assert ("gradients", FAST) in plan_rows(make_plan(job).summary())
