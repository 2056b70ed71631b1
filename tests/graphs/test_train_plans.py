"""Plans of the job ``train``: images, length, and what is refused; and of denoising with weights that learned from other values."""

from __future__ import annotations

import json
import math
import os
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from scipy.ndimage import uniform_filter
from skimage.data import camera, grass, immunohistochemistry

from halotile.errors import ConfigError, HalotileError, InputError, MemoryRefused, WeightsError
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.train.job import NetworkChoice, Training, WeightsFile, plan_rows
from halotile.graphs.kinds.sections import Input, Run
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.runs.driver import Outcome, run
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.stored_array import MOST_SHARED
from halotile.tasks.denoisers.common.weights import METADATA, trained_range
from halotile.tasks.networks.unet import UNetNetwork
from tests.cases import in_folders
from tests.support import job_of, read_zarr, work_of, write_zarr


def write_images(folder: Path) -> Path:
    """Write two noisy images of the same waves, and the waves."""
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
        "network": NetworkChoice(name="unet", options={"width": 4, "levels": 1}),
        "steps": 12,
        "patch": 16,
        "batch": 8,
        "run": Run(workers=2, memory_per_worker="3GiB"),
    }
    return Training(**(usual | options))


def train(job: Training, cluster: RunningCluster | None = None, **options: Any) -> tuple[Outcome, bytes]:
    """Run a training; return its end and the weights."""
    return run(make_plan(job, **options), cluster=cluster), Path(job.output.path).read_bytes()


def curve_of(job: Training) -> list[dict[str, float]]:
    """The rows of the curve without their times."""
    lines = RunDirectory.beside(job.output.path).iterations_path.read_text().splitlines()
    return [{name: n for name, n in json.loads(line).items() if name != "seconds"} for line in lines]


def recipe_of(job: Training) -> Any:
    return work_of(make_plan(job)).recipe


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the images."""
    return write_images(tmp_path_factory.mktemp("images"))


def on(folder: Path, name: str = "a.npy", pixels: Any = None, **options: Any) -> Any:
    """A training on images in a folder; one is written there first if it has pixels."""
    if pixels is not None:
        np.save(folder / name, pixels)
    return training(folder, folder, input=Input(path=str(folder / name)), **options)


def notes_with(plan: Plan, words: str) -> list[str]:
    return [note for note in plan.notes if words in note]


def test_few_of_many_images_are_open_at_once(tmp_path: Path) -> None:
    for number in range(60):
        pixels = np.arange(48 * 48, dtype=np.float32).reshape(48, 48) + 10_000 * number
        tifffile.imwrite(tmp_path / f"{number}.tif", pixels)
    patches = recipe_of(on(tmp_path, "*.tif")).patches
    assert len(np.unique(np.concatenate([patches.draw(16 * pool, 0, 60).pixels for pool in range(4)]) // 10_000)) > 40
    files = [Path(os.path.realpath(fd)) for fd in Path("/proc/self/fd").iterdir()]
    assert 0 < len([file for file in files if file.is_relative_to(tmp_path)]) <= 2 * MOST_SHARED, "a file and its map"


def test_holes_and_saturated_pixels_are_known(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(100, 60000, (128, 128)).astype(np.uint16)
    pixels[:40] = 65535
    pixels[100:, :50] = 0
    tifffile.imwrite(tmp_path / "a.tif", pixels, extratags=[(42113, "s", 0, "0", True)])
    job = on(tmp_path, "a.tif")
    patches = recipe_of(job).patches
    assert patches.images[0].values.saturated == (65535,)
    assert patches.values == (0, 65535)
    drawn = patches.draw(0, 0, 8)
    assert not drawn.valid.all()
    assert (drawn.pixels[drawn.valid] > 0).all()
    assert (drawn.pixels[drawn.valid] == 1).any(), "saturated areas count"
    assert "pixels of 65535 are saturated: isolated ones, such as hot pixels, are left out" in make_plan(job).notes


def test_a_value_far_from_all_others_is_left_out_unless_it_is_a_measurement(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).random((128, 128)).astype(np.float32)
    pixels[20:44, 20:44] = -9999
    job = on(tmp_path, pixels=pixels)
    (note,) = notes_with(make_plan(job), "-9999")
    assert "far from all others (7.9" in note
    assert "are left out: write input.nodata: -9999 here and for the denoising" in note
    drawn = recipe_of(job).patches.draw(0, 0, 64)
    assert drawn.pixels.min() >= 0
    assert not drawn.valid.all()
    measured = recipe_of(replace(job, input=replace(job.input, nodata="none")))
    assert measured.patches.draw(0, 0, 64).pixels.min() == -9999


def test_an_image_without_anything_to_learn_from_is_refused(tmp_path: Path) -> None:
    for value in (7.0, 0.0, np.nan):
        said = "no pixel is finite" if np.isnan(value) else f"all pixels are {value:g}, wherever"
        with pytest.raises(InputError, match=said):
            make_plan(on(tmp_path, pixels=np.full((128, 128), value, np.float32)))


def test_images_and_channels_of_unlike_brightness_are_noted(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).random((3, 64, 64)).astype(np.float32)
    for name, factor in (("dark", 10), ("middle", 60), ("bright", 1000)):
        np.save(tmp_path / f"{name}.npy", factor * noise[0])
    for name, factors in (("alike", (3.0, 1.0, 5.0)), ("unlike", (300.0, 1.0, 15.0)), ("empty", (1.0, 0.0, 2.0))):
        write_zarr(tmp_path / f"{name}.zarr", np.array(factors, np.float32)[:, None, None] * noise, axes="cyx")
    said = {
        "*.npy": rf"{tmp_path}/bright\.npy is 100 times as bright as {tmp_path}/dark\.npy: ",
        "[dm]*.npy": None,
        "unlike.zarr": r"channel 0 of .*unlike\.zarr is 298 times as bright as channel 1: ",
        "alike.zarr": None,
        "empty.zarr": None,
    }
    for pattern, words in said.items():
        notes = notes_with(make_plan(on(tmp_path, pattern)), "as bright as")
        assert (re.match(words, notes[0]) is not None) if words else notes == []


def test_the_length_is_decided_by_epochs_or_a_trial_measures_a_slot(images: Path, tmp_path: Path) -> None:
    job = training(images, tmp_path, steps="auto", epochs=2, run=Run(workers=2, precision="float16"))
    assert recipe_of(job).steps == 2 * 192 * 160 / (8 * 16 * 16)
    plan = make_plan(job)
    assert plan.figures["epochs"] == pytest.approx(2)
    assert "run.precision is float16, which is for denoising: a training computes in float32" in plan.notes
    assert recipe_of(training(images, tmp_path, steps="auto", minutes=0.1)).steps > 10


def test_minutes_become_steps_that_stay(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = training(images, tmp_path, steps="auto", minutes=0.5)
    trials = "halotile.graphs.jobs.train.plan.call_bounded"
    monkeypatch.setattr(trials, lambda *_: 0.1)
    plan = make_plan(job)
    assert plan.figures["steps"] == 137  # two workers do two of four slots each: 0.22 s
    directory = RunDirectory.beside(job.output.path)
    directory.create()
    directory.write_plan({"job": "train", "identity": plan.identity, "fingerprint": plan.fingerprint, "summary": {}})
    monkeypatch.setattr(trials, lambda *_: 0.2)
    again = make_plan(job)
    assert (again.figures["steps"], again.fingerprint) == (137, plan.fingerprint)
    assert make_plan(job, fresh=True).figures["steps"] == 69


NOISY, OTHER, PAIR = "{images}/noisy.zarr", "{folder}/other.zarr", {"method": "noise2noise"}
OF_DENOISING = {"sides": {"mask": NOISY}, "defects": "auto", "stripes": "auto"}
REFUSED: list[tuple[dict[str, Any], type[HalotileError], str]] = [
    ({"output": WeightsFile(path="net.zarr")}, ConfigError, "does not end with .safetensors"),
    ({"output": WeightsFile(path="s3://a/net.safetensors")}, ConfigError, "weights are written to a disk"),
    ({"epochs": 2.0}, ConfigError, "epochs: conflicts with steps"),
    (PAIR, ConfigError, "second: is not there"),
    ({"second": "b.zarr"}, ConfigError, "second: is for method: noise2noise"),
    ({**PAIR, "second": "b.zarr", "structure": "x"}, ConfigError, "hides no pixels; leave it out"),
    ({**PAIR, "second": OTHER}, InputError, "Write as many images"),
    ({**PAIR, "second": NOISY}, InputError, "with the same noise"),
    ({"input": "{folder}/*.zarr"}, InputError, "and 1 channel, and .* Write a pattern of images of one kind"),
    *(({"input": {name: value}}, ConfigError, f"input.{name}: is for job: denoise") for name, value in OF_DENOISING.items()),
    ({"batch": 9}, ConfigError, "slots: is 4, which does not divide batch: 9"),
    ({"run": Run(workers=8)}, ConfigError, "a batch has 4 parts; write slots: 8, or fewer workers"),
    ({"patch": 17}, ConfigError, "by which the network downsamples. Write patch: 18"),
    ({"patch": 161}, ConfigError, "by which the network downsamples. Write patch: 160"),
    ({"patch": 256}, InputError, "has 192 × 160 pixels, and patch is 256"),
    ({"network": NetworkChoice(name="unet", options={"depth": 3})}, ConfigError, "has no option 'depth'"),
    ({"network": NetworkChoice(name="resnet")}, ConfigError, "resnet"),
    ({"network": NetworkChoice(name="dncnn"), "method": "noise2void2"}, ConfigError, "Write method: noise2void, or"),
    ({"method": "noise2clean"}, ConfigError, "method"),
    ({"batch": 8192, "patch": 128, "slots": 2}, MemoryRefused, r"4096 patches of 128 × 128 on each worker"),
]  # fmt: skip


def test_what_cannot_be_trained_is_refused(images: Path, tmp_path: Path) -> None:
    for place, (options, kind, said) in in_folders(tmp_path, REFUSED):
        (folder := place / "input").mkdir()
        (output := place / "output").mkdir()
        write_zarr(folder / "other.zarr", np.zeros((64, 64), np.uint8))
        os.symlink(images / "noisy.zarr", folder / "noisy.zarr")
        words = {name: text.format(images=images, folder=folder) for name, text in options.items() if type(text) is str}
        given = dict(options) | words
        if "input" in given:
            path = NOISY.format(images=images)
            given["input"] = Input(path=words["input"]) if "input" in words else Input(path=path, **given["input"])
        with pytest.raises(kind, match=said):
            make_plan(training(images, output, **given))
        assert not any(output.iterdir())


SHARED: list[tuple[tuple[int, int], Any, str, str]] = [
    ((1, 1), "auto", "none", ""),
    ((1, 1), "x", "x", ""),
    ((1, 3), "auto", "x", "share noise: their correlation is |Structure is x: pixels are hidden with their neighbours"),
    ((3, 1), "auto", "y", "Structure is y"),
    ((1, 3), "none", "none", "The network would learn to keep it: write structure: x"),
    ((3, 3), "auto", "none", "Hidden pixels keep what is shared along both axes"),
    ((3, 3), "y", "y", "Hidden pixels keep what is shared along both axes"),
]


def test_pixels_are_hidden_along_the_axis_of_shared_noise(images: Path, tmp_path: Path) -> None:
    for folder, (widths, asked, decided, said) in in_folders(tmp_path, SHARED):
        clean, noisy = (read_zarr(images / f"{name}.zarr") for name in ("clean", "noisy"))
        shared = uniform_filter(noisy - clean, widths, mode="wrap") * np.prod(widths) ** 0.5
        job = on(folder, pixels=(clean + shared).astype(np.float32), structure=asked)
        plan, recipe = make_plan(job), recipe_of(job)
        assert (recipe.patches.structure, recipe.noise is not None) == (decided, widths == (1, 1) and asked == "auto")
        assert plan.identity["structure"] == decided
        method = dict(plan_rows(plan.summary()))["method"]
        assert ("hidden with their neighbours along" in method) == (decided != "none")
        notes = " ".join(notes_with(plan, "share noise"))
        assert all(part in notes for part in said.split("|"))
        assert bool(notes) == bool(said)


def judged(folder: Path, first: Any, second: Any) -> list[str]:
    """Notes of a plan on a pair of images."""
    for name, pixels in (("noisy", first), ("second", second)):
        kept = pixels if pixels.dtype == np.uint16 else pixels.astype(np.float32)
        write_zarr(folder / f"{name}.zarr", kept, axes="cyx" if pixels.ndim == 3 else None)
    return notes_with(make_plan(training(folder, folder, **PAIR, second=str(folder / "second.zarr"))), "second: ")


def photons(clean: Any, seed: int) -> NDArray[np.uint16]:
    """An image as a camera with an offset counts so few photons."""
    return np.asarray(50 * np.random.default_rng(seed).poisson(clean) + 100, np.uint16)


MAY_BE = "structure: one may be shifted"


def light(peak: float) -> NDArray[Any]:
    y, x = np.mgrid[-1:1:512j, -1:1:512j]
    return np.asarray(peak * np.exp(-2 * (y * y + x * x)))


def noisy(clean: Any, seed: int) -> NDArray[Any]:
    return np.asarray(clean + 0.1 * np.random.default_rng(seed).standard_normal(clean.shape))


PLAIN: list[tuple[Any, Any]] = [
    (lambda image: image, None),
    (lambda image: np.where(image > 1, np.nan, image), None),
    (lambda image: image + 0.1 * np.random.default_rng(5).standard_normal(image.shape), None),
    (lambda image: np.roll(image, (-2, 3), (0, 1)), "is shifted by -2 rows and 3 columns relative to"),
    (lambda image: 1.3 * image, "has 1.3 times the contrast of .*, and is brighter by 0.4"),
    (lambda image: image - 0.1, "second.zarr is darker than .*noisy.zarr by 0.2[0-9]* standard deviations: it"),
    (lambda image: 0.5 + 1.2 * (image - 0.5), "second.zarr has 1.2 times the contrast of .*noisy.zarr: it learns"),
    (lambda image: 0.5 * image + 0.3, InputError),
    (lambda image: image[::-1, ::-1], InputError),
]
LIT: list[tuple[Any, str | None]] = [
    (lambda image: image, None),
    (lambda image: np.roll(image, 5, 1), "is shifted by 0 rows and 5 columns relative to"),
    *((lambda image, rows=rows: np.roll(image, rows, 0), MAY_BE) for rows in (40, 100)),
    (lambda image: image[::-1, ::-1], MAY_BE),
]


@pytest.mark.parametrize(("lit", "change", "said"), [*((False, *row) for row in PLAIN), *((True, *row) for row in LIT)])
def test_a_second_image_differs_in_its_noise_alone(tmp_path: Path, lit: bool, change: Any, said: Any) -> None:
    """Those that are lit alike share their coarse structure wherever they are."""
    clean = light(5) + immunohistochemistry()[..., 0] / 50 if lit else camera()[:256, :256] / 255
    first = photons(clean, 0) if lit else noisy(clean, 0)
    second = photons(change(clean), 1) if lit else change(noisy(clean, 1))
    if said is InputError:
        with pytest.raises(InputError, match=r"second: .*second.zarr (does not show|has 0\.5 times the contrast)"):
            judged(tmp_path, first, second)
        return
    notes = judged(tmp_path, first, second)
    assert len(notes) == (said is not None)
    assert said is None or re.search(said, notes[0])


def test_another_image_under_the_same_light_is_noted_and_mere_noise_is_not_judged(tmp_path: Path) -> None:
    (note,) = judged(tmp_path, photons(light(20) + camera() / 50, 0), photons(light(20) + grass() / 50, 1))
    assert re.search(rf"share \d% of their fine {MAY_BE}", note)
    (noise := tmp_path / "noise").mkdir()
    first, second = (np.random.default_rng(n).poisson(1.0, (256, 256)).astype(np.uint16) for n in range(2))
    assert judged(noise, first, second) == []


def test_each_channel_of_a_second_image_is_compared(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    clean = np.cumsum(np.cumsum(rng.standard_normal((3, 256, 256)), 1), 2)
    clean /= clean.std((1, 2), keepdims=True)
    first, second = (clean + 0.1 * rng.standard_normal(clean.shape) for _ in range(2))
    others = {
        "right": (second, ""),
        "swapped": (second[[1, 0, 2]], r"second\.zarr does not show the same as .*noisy\.zarr, channel 0,"),
        "copy": (2 * first, r"second\.zarr has the same pixels as .*, and so the same noise"),
    }
    for name, (other, said) in others.items():
        (folder := tmp_path / name).mkdir()
        with pytest.raises(InputError, match=said) if said else nullcontext():
            judged(folder, first, other)


Range = tuple[float, float]
FLOATS, BYTES, WORDS = (0.0, 1.0), (0.0, 255.0), (0.0, 65535.0)


def weights_of(path: Path, images: NDArray[Any], values: Range) -> Path:
    """Weights as a job writes them that was trained on images of shape (channels, rows, columns)."""
    pixels = torch.from_numpy((images.astype(np.float64) - values[0]) / (values[1] - values[0])).flatten(1)
    network = UNetNetwork(width=4, levels=1)
    module = network.build(len(images), pixels.mean(1).float(), pixels.std(1).float())
    save_file(dict(network.weights(module)), path, {METADATA: json.dumps({"values": values})})
    return path


def learned(folder: Path, image: NDArray[Any], weights: Path, given: Any = "auto") -> list[str]:
    """Notes of a plan on the values of an image that weights denoise."""
    folder = Path(mkdtemp(dir=folder))
    source = write_zarr(folder / "image.zarr", image, axes="cyx" if image.ndim == 3 else "yx")
    job = job_of(source, folder / "o.zarr", "unet", {"weights": str(weights)}, input={"range": given})
    return notes_with(make_plan(job), "the weights expect")


def test_values_that_are_no_range_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    for low, high in ((5, 5), (2, 1), (0, math.inf), (0, math.nan)):
        save_file({"a": torch.zeros(1)}, path, {METADATA: json.dumps({"values": (low, high)})})
        with pytest.raises(WeightsError, match=rf"w\.safetensors: .* {low} and {high} to 0 and 1, which"):
            trained_range(path)


def waves() -> NDArray[Any]:
    """An image from 0 to 1 with noise."""
    y, x = np.mgrid[:160, :160]
    noise = 0.1 * np.random.default_rng(0).standard_normal(y.shape)
    return np.asarray(0.5 + 0.3 * np.sin(y / 9) * np.cos(x / 7) + noise)


IN_BYTES = (255 * waves()).clip(0, 255).astype(np.uint8)
OTHER_UNITS = [
    (waves(), FLOATS, IN_BYTES, "[0, 255]"),
    (65535 * waves(), WORDS, waves(), "[0, 1]"),
    (65535 * waves(), WORDS, IN_BYTES, "[0, 255]"),
    (255 * waves(), BYTES, waves(), "[0, 1]"),
    (1000 * waves() + 100, WORDS, 1000 * waves() + 30000, "[29900, 95435]"),
]


def test_other_units_are_refused_with_the_range_to_write(tmp_path: Path) -> None:
    for trained, values, image, written in OTHER_UNITS:
        weights = weights_of(tmp_path / "w.safetensors", trained[None], values)
        with pytest.raises(ConfigError, match=r"input.range is auto, .* write input\.range: \[") as refused:
            learned(tmp_path, image, weights)
        text = str(refused.value).partition("other units, write input.range: ")[2].partition(";")[0]
        low, high = map(float, text.strip("[]").split(","))
        assert not learned(tmp_path, image, weights, (low, high))
        assert (low, high) == pytest.approx(json.loads(written), rel=0.05)
        (note,) = learned(tmp_path, image, weights, values)
        assert f"write input.range: {text}; otherwise use weights that were trained on images like this one" in note


def test_images_of_the_same_kind_are_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    cells = 100 + 3 * rng.standard_normal((512, 512))
    cells[rng.random(cells.shape) < 0.01] += 3000
    empty = 100 + 3 * rng.standard_normal((512, 512))
    of_cells = weights_of(tmp_path / "cells.safetensors", cells[None], WORDS)
    of_empty = weights_of(tmp_path / "empty.safetensors", empty[None], WORDS)
    assert not learned(tmp_path, cells.astype(np.float32), of_empty), "a patch may have none"
    (note,) = learned(tmp_path, empty.astype(np.uint16), of_cells)
    assert "the pixels have mean " in note
    for factor in (0.5, 1, 2, 3):
        assert not learned(tmp_path, (factor * cells).astype(np.uint16), of_cells)


def lit(count: float) -> NDArray[Any]:
    """An image with so many photons at its brightest."""
    y, x = np.mgrid[:256, :256]
    return photons(count * (0.4 + 0.3 * np.sin(y / 30) * np.cos(x / 40)), 1)


@pytest.mark.parametrize(("count", "said"), [(17, None), (20, None), (26, None), (4, "darker"), (50, "brighter")])
def test_an_image_that_is_clearly_darker_or_brighter_is_noted(tmp_path: Path, count: float, said: str | None) -> None:
    weights = weights_of(tmp_path / "w.safetensors", lit(20)[None], WORDS)
    found = learned(tmp_path, lit(count), weights)
    assert len(found) == (said is not None)
    if said is not None:
        before, _, text = found[0].partition(", write input.range: ")
        assert before.endswith(f"if it is the same kind of image, only {said} or in other units")
        low, high = json.loads(text.partition(";")[0])
        assert "e" not in text.partition(";")[0]
        assert not learned(tmp_path, lit(count), weights, (low, high))


def test_images_of_a_narrower_type_without_noise_and_of_several_channels_are_compared(tmp_path: Path) -> None:
    weights = weights_of(tmp_path / "w.safetensors", lit(20)[None], WORDS)
    with pytest.raises(ConfigError, match=r"input.range is auto.* write input\.range: \["):
        learned(tmp_path, (lit(4) // 4).astype(np.uint8), weights)
    mean = lit(20).mean()
    assert not learned(tmp_path, np.full((200, 300), mean, np.uint16), weights)
    (note,) = learned(tmp_path, np.full((200, 300), 2 * mean, np.uint16), weights)
    assert f"deviation 0, and the weights expect mean {mean:.4g} " in note
    low, high = json.loads(note.partition("write input.range: ")[2].partition(";")[0])
    assert (low, high - low) == pytest.approx((mean, 65535), rel=0.01)
    pair = np.stack([waves(), 0.01 * waves()])
    of_pair = weights_of(tmp_path / "pair.safetensors", pair, FLOATS)
    assert not learned(tmp_path, pair, of_pair)
    with pytest.raises(ConfigError, match="the pixels of channel 1 have mean"):
        learned(tmp_path, pair[::-1], of_pair)
