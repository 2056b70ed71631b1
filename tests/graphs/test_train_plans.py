"""Plans of the job ``train``: images, length, and what is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import tifffile
from scipy.ndimage import uniform_filter
from skimage.data import brick, camera, grass, immunohistochemistry

from halotile.errors import ConfigError, HalotileError, InputError, MemoryRefused, ResumeRefused
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.clusters.common import machine as gpu_detection
from halotile.graphs.clusters.common.machine import Gpus
from halotile.graphs.jobs.train.job import NetworkChoice, WeightsFile, plan_rows
from halotile.graphs.kinds.sections import Cluster, Input, Run
from halotile.graphs.plans import needs
from halotile.graphs.plans.plan import make_plan
from halotile.storage.images.png import encode_png
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.stored_array import MOST_SHARED
from tests.cases import thorough
from tests.graphs.trainings import recipe_of, train, training, write_images
from tests.support import read_zarr, write_zarr


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the images."""
    return write_images(tmp_path_factory.mktemp("images"))


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
    assert 0 < len([file for file in files if file.is_relative_to(tmp_path)]) <= 2 * MOST_SHARED, "a file and its map"


def test_the_memory_of_decoded_images_does_not_grow_with_their_number(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    needs = []
    for numbers in (range(20), range(20, 60)):
        for number in numbers:
            path = tmp_path / f"{number}.png"
            path.write_bytes(
                b"".join(encode_png(np.arange(number, number + 30000, dtype=np.uint8).reshape(100, 100, 3)))
            )
        plan = make_plan(training(tmp_path, tmp_path, input=Input(path=str(tmp_path / "*.png"))))
        needs.append(plan.summary()["peak_memory_per_worker_bytes"])
    assert needs[0] == needs[1]


def test_channels_are_taken_together_and_planes_apart(tmp_path: Path) -> None:
    pixels = np.arange(3 * 2 * 64 * 80, dtype=np.uint16).reshape(3, 2, 64, 80)
    tifffile.imwrite(tmp_path / "a.ome.tif", pixels, metadata={"axes": "TCYX"})
    (image,) = recipe_of(training(tmp_path, tmp_path, input=Input(path=str(tmp_path / "a.ome.tif")))).patches.images
    assert (image.channels, image.spatial, image.planes) == (2, (2, 3), (3, 1, 1, 1))


def test_holes_and_saturated_pixels_are_known(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(100, 60000, (128, 128)).astype(np.uint16)
    pixels[:40] = 65535
    pixels[100:, :50] = 0
    tag = (42113, "s", 0, "0", True)
    tifffile.imwrite(tmp_path / "a.tif", pixels, extratags=[tag])
    job = training(tmp_path, tmp_path, input=Input(path=str(tmp_path / "a.tif")))
    patches = recipe_of(job).patches
    assert patches.images[0].values.saturated == (65535,)
    assert patches.values == (0, 65535)
    drawn = patches.draw(0, 0, 8)
    assert not drawn.valid.all()
    assert (drawn.pixels[drawn.valid] > 0).all()
    assert (drawn.pixels[drawn.valid] == 1).any(), "saturated areas count"
    assert "pixels of 65535 are saturated: those on their own, such as hot pixels, are left out" in make_plan(job).notes


def test_a_value_far_from_all_others_is_left_out_unless_it_is_a_measurement(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).random((128, 128)).astype(np.float32)
    pixels[20:44, 20:44] = -9999
    np.save(tmp_path / "a.npy", pixels)
    job = training(tmp_path, tmp_path, input=Input(path=str(tmp_path / "a.npy")))
    (note,) = [note for note in make_plan(job).notes if "-9999" in note]
    assert "far from all others (7.9" in note
    assert "are left out: write input.nodata: -9999 here and for the denoising" in note
    drawn = recipe_of(job).patches.draw(0, 0, 64)
    assert drawn.pixels.min() >= 0
    assert not drawn.valid.all()
    measured = recipe_of(replace(job, input=replace(job.input, nodata="none")))
    assert measured.patches.draw(0, 0, 64).pixels.min() == -9999


@pytest.mark.parametrize("value", [7.0, 0.0, np.nan])
def test_an_image_without_anything_to_learn_from_is_refused(tmp_path: Path, value: float) -> None:
    np.save(tmp_path / "a.npy", np.full((128, 128), value, np.float32))
    said = "no pixel is finite" if np.isnan(value) else f"all pixels are {value:g}, wherever"
    with pytest.raises(InputError, match=said):
        make_plan(training(tmp_path, tmp_path, input=Input(path=str(tmp_path / "a.npy"))))


def test_images_of_unlike_brightness_are_noted(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).random((64, 64)).astype(np.float32)
    for name, factor in (("dark", 10), ("middle", 60), ("bright", 1000)):
        np.save(tmp_path / f"{name}.npy", factor * noise)
    plans = [
        make_plan(training(tmp_path, tmp_path, input=Input(path=str(tmp_path / pattern))))
        for pattern in ("*.npy", "[dm]*.npy")
    ]
    notes = [[note for note in plan.notes if "as bright as" in note] for plan in plans]
    assert notes[0][0].startswith(f"{tmp_path}/bright.npy is 100 times as bright as {tmp_path}/dark.npy: ")
    assert notes[1] == []


def test_channels_of_unlike_brightness_are_noted(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).random((3, 64, 64)).astype(np.float32)
    for name, factors in (("alike", (3.0, 1.0, 5.0)), ("unlike", (300.0, 1.0, 15.0)), ("empty", (1.0, 0.0, 2.0))):
        pixels = np.array(factors, np.float32)[:, None, None] * noise
        write_zarr(tmp_path / f"{name}.zarr", pixels, axes="cyx")
    plans = {
        name: make_plan(training(tmp_path, tmp_path, input=Input(path=str(tmp_path / f"{name}.zarr"))))
        for name in ("alike", "unlike", "empty")
    }
    notes = {name: [note for note in plan.notes if "as bright as" in note] for name, plan in plans.items()}
    assert (notes["alike"], notes["empty"]) == ([], [])
    assert re.match(r"channel 0 of .*unlike\.zarr is 298 times as bright as channel 1: ", notes["unlike"][0])


def test_the_length_is_decided_by_epochs(images: Path, tmp_path: Path) -> None:
    job = training(images, tmp_path, steps="auto", epochs=2)
    assert recipe_of(job).steps == 2 * 192 * 160 / (8 * 16 * 16)
    assert make_plan(job).figures["epochs"] == pytest.approx(2)


def test_minutes_become_steps_that_stay(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ({"method": "noise2noise", "second": "b.zarr", "structure": "x"}, ConfigError, "hides no pixels; leave it out"),
        ({"batch": 9}, ConfigError, "slots: is 4, which does not divide batch: 9"),
        ({"run": Run(workers=8)}, ConfigError, "a batch has 4 parts; write slots: 8, or fewer workers"),
        ({"patch": 17}, ConfigError, "the network reduces by 2. Write patch: 18"),
        ({"patch": 161}, ConfigError, "the network reduces by 2. Write patch: 160"),
        ({"patch": 256}, InputError, "has 192 × 160 pixels, and patch is 256"),
        ({"network": NetworkChoice(name="unet", options={"depth": 3})}, ConfigError, "has no option 'depth'"),
        ({"network": NetworkChoice(name="resnet")}, ConfigError, "resnet"),
        ({"network": NetworkChoice(name="dncnn"), "method": "noise2void2"}, ConfigError, "Write method: noise2void, or"),
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


@pytest.mark.parametrize(
    ("widths", "asked", "decided", "said"),
    [
        ((1, 1), "auto", "none", ""),
        ((1, 1), "x", "x", ""),
        (
            (1, 3),
            "auto",
            "x",
            "share noise: their correlation is |Structure is x: pixels are hidden with their neighbours",
        ),
        ((3, 1), "auto", "y", "Structure is y"),
        ((1, 3), "none", "none", "The network would learn to keep it: write structure: x"),
        ((3, 3), "auto", "none", "Hidden pixels keep what is shared along both axes"),
        ((3, 3), "y", "y", "Hidden pixels keep what is shared along both axes"),
    ],
)
def test_pixels_are_hidden_along_the_axis_of_shared_noise(
    images: Path,
    tmp_path: Path,
    widths: tuple[int, int],
    asked: Literal["auto", "none", "x", "y"],
    decided: str,
    said: str,
) -> None:
    clean, noisy = (read_zarr(images / f"{name}.zarr") for name in ("clean", "noisy"))
    shared = uniform_filter(noisy - clean, widths, mode="wrap") * np.prod(widths) ** 0.5
    write_zarr(tmp_path / "shared.zarr", (clean + shared).astype(np.float32))
    job = training(images, tmp_path, input=Input(path=str(tmp_path / "shared.zarr")), structure=asked)
    plan, recipe = make_plan(job), recipe_of(job)
    assert (recipe.patches.structure, recipe.noise is not None) == (decided, widths == (1, 1) and asked == "auto")
    assert plan.identity["structure"] == decided
    assert ("hidden with their neighbours along" in dict(plan_rows(plan.summary()))["method"]) == (decided != "none")
    notes = " ".join(note for note in plan.notes if "share noise" in note)
    assert all(part in notes for part in said.split("|"))
    assert bool(notes) == bool(said)


def test_a_precision_is_not_for_a_training(images: Path, tmp_path: Path) -> None:
    plan = make_plan(training(images, tmp_path, run=Run(workers=2, precision="float16")))
    assert "run.precision is float16, which is for denoising: a training computes in float32" in plan.notes


def test_workers_that_would_share_a_gpu_are_one_or_refused(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (needs, gpu_detection):
        monkeypatch.setattr(module, "gpus_here", lambda: Gpus(("0", "1")))
    run = Run(device="cuda", memory_per_worker="3GiB")
    local, each = (Cluster(kind=kind) for kind in ("local", "local-cuda"))
    plan = make_plan(training(images, tmp_path, run=run, cluster=local))
    assert plan.run.workers == 1
    assert plan.computing.requested.why == "one for the GPU"
    with pytest.raises(ConfigError, match=r"workers is 2.*cannot share a GPU.*\{kind: local-cuda\}"):
        make_plan(training(images, tmp_path, run=replace(run, workers=2), cluster=local))
    assert make_plan(training(images, tmp_path, run=run, cluster=each)).run.workers == 2


def test_an_input_that_does_not_fit_is_refused(images: Path, tmp_path: Path) -> None:
    write_zarr(tmp_path / "other.zarr", np.zeros((64, 64), np.uint8))
    pair = {"method": "noise2noise", "second": str(tmp_path / "other.zarr")}
    with pytest.raises(InputError, match="Write as many images"):
        make_plan(training(images, tmp_path, **pair))
    with pytest.raises(InputError, match="its noise is no other"):
        make_plan(training(images, tmp_path, **(pair | {"second": str(images / "noisy.zarr")})))
    os.symlink(images / "noisy.zarr", tmp_path / "noisy.zarr")
    with pytest.raises(InputError, match=r"and 1 channel, and .* Write a pattern of images of one kind"):
        make_plan(training(images, tmp_path, input=Input(path=str(tmp_path / "*.zarr"))))
    sides = Input(path=str(images / "noisy.zarr"), sides={"mask": str(images / "noisy.zarr")})
    with pytest.raises(ConfigError, match=r"input.sides: is for job: denoise"):
        make_plan(training(images, tmp_path, input=sides))
    with pytest.raises(ConfigError, match=r"input.defects: is for job: denoise"):
        make_plan(training(images, tmp_path, input=Input(path=str(images / "noisy.zarr"), defects="auto")))
    striped = Input(path=str(images / "noisy.zarr"), stripes="auto")
    with pytest.raises(ConfigError, match=r"input.stripes: is for job: denoise"):
        make_plan(training(images, tmp_path, input=striped))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda image: image, None),
        (lambda image: np.where(image > 1, np.nan, image), None),
        (lambda image: image + 0.1 * np.random.default_rng(5).standard_normal(image.shape), None),
        (lambda image: np.roll(image, (-2, 3), (0, 1)), "is shifted by -2 rows and 3 columns against"),
        (lambda image: 1.3 * image, "has 1.3 times the contrast of .*, and is brighter by 0.4"),
        (lambda image: image - 0.1, "second.zarr is darker than .*noisy.zarr by 0.2[0-9]* standard deviations: it"),
        (lambda image: 0.5 + 1.2 * (image - 0.5), "second.zarr has 1.2 times the contrast of .*noisy.zarr: it learns"),
        (lambda image: 0.5 * image + 0.3, InputError),
        (lambda image: image[::-1, ::-1], InputError),
    ],
)
def test_a_second_image_differs_in_its_noise_alone(tmp_path: Path, change: Any, said: Any) -> None:
    rng = np.random.default_rng(0)
    clean = camera()[:256, :256] / 255
    first, second = (clean + 0.1 * rng.standard_normal(clean.shape) for _ in range(2))
    write_zarr(tmp_path / "noisy.zarr", first.astype(np.float32))
    write_zarr(tmp_path / "second.zarr", change(second).astype(np.float32))
    job = training(tmp_path, tmp_path, method="noise2noise", second=str(tmp_path / "second.zarr"))
    if said is InputError:
        with pytest.raises(InputError, match=r"second: .*second.zarr (does not show|has 0\.5 times the contrast)"):
            make_plan(job)
        return
    notes = [note for note in make_plan(job).notes if note.startswith("second: ")]
    assert len(notes) == (said is not None)
    assert said is None or re.search(said, notes[0])


def photons_of(name: str, folder: Path, clean: Any, seed: int) -> str:
    """Write an image as few photons show it; return its path."""
    counts = np.random.default_rng(seed).poisson(clean)
    return str(write_zarr(folder / f"{name}.zarr", (50 * counts + 100).astype(np.uint16)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda image: image, None),
        (lambda image: np.roll(image, 5, 1), "is shifted by 0 rows and 5 columns against"),
        (lambda image: np.roll(image, 100, 0), "structure: one may be shifted"),
        (lambda image: np.roll(image, 40, 0), "structure: one may be shifted"),
        (lambda image: image[::-1, ::-1], "structure: one may be shifted"),
        thorough(np.rot90, "structure: one may be shifted"),
        thorough(lambda image: image.T, "structure: one may be shifted"),
    ],
)
def test_a_second_image_is_placed_as_the_first(tmp_path: Path, change: Any, said: str | None) -> None:
    """Both are lit alike, so that they share their coarse structure wherever they are."""
    y, x = np.mgrid[-1:1:512j, -1:1:512j]
    light = 5 * np.exp(-2 * (y * y + x * x))
    clean = light + immunohistochemistry()[..., 0] / 50
    given = {
        "input": Input(path=photons_of("first", tmp_path, clean, 0)),
        "method": "noise2noise",
        "second": photons_of("second", tmp_path, change(clean), 1),
    }
    job = training(tmp_path, tmp_path, **given)
    notes = [note for note in make_plan(job).notes if note.startswith("second: ")]
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


def test_another_image_under_the_same_light_is_noted(tmp_path: Path) -> None:
    y, x = np.mgrid[-1:1:512j, -1:1:512j]
    light = 20 * np.exp(-2 * (y * y + x * x))
    paths = [
        photons_of(name, tmp_path, light + clean / 50, seed)
        for seed, (name, clean) in enumerate((("first", camera()), ("second", grass())))
    ]
    job = training(tmp_path, tmp_path, input=Input(path=paths[0]), method="noise2noise", second=paths[1])
    (note,) = [note for note in make_plan(job).notes if note.startswith("second: ")]
    assert re.search(r"share \d% of their fine structure: one may be shifted", note)


@pytest.mark.thorough
@pytest.mark.parametrize("photons", [thorough(1), 7, thorough(1000)])
def test_smooth_periodic_and_symmetric_pairs_are_right(tmp_path: Path, photons: float) -> None:
    y, x = np.mgrid[-256:256, -256:256]
    images = {
        "smooth": np.exp(-(y * y + x * x) / 2 / 120**2),
        "slope": 0.5 + x / 600,
        "disk": 0.1 + (y * y + x * x < 150**2),
        "waves": 0.5 + 0.3 * np.sin(y / 9) * np.cos(x / 7),
        "bricks": brick() / 255,
    }
    for name, clean in images.items():
        paths = [photons_of(f"{name}{seed}", tmp_path, photons * clean, seed) for seed in range(2)]
        job = training(tmp_path, tmp_path, input=Input(path=paths[0]), method="noise2noise", second=paths[1])
        assert not [note for note in make_plan(job).notes if note.startswith("second: ")], name


def test_pairs_of_mere_noise_are_not_judged(tmp_path: Path) -> None:
    for seed, name in enumerate(("noisy", "second")):
        counts = np.random.default_rng(seed).poisson(1.0, (256, 256))
        write_zarr(tmp_path / f"{name}.zarr", counts.astype(np.uint16))
    job = training(tmp_path, tmp_path, method="noise2noise", second=str(tmp_path / "second.zarr"))
    assert not [note for note in make_plan(job).notes if note.startswith("second: ")]


def test_another_training_is_not_resumed(images: Path, cluster: RunningCluster, tmp_path: Path) -> None:
    job = training(images, tmp_path, steps=2)
    train(job, cluster)
    with pytest.raises(ResumeRefused, match="seed was 0, is 1"):
        train(replace(job, seed=1), cluster)
    with pytest.raises(ResumeRefused, match='mode was "exact", is "fast"'):
        train(replace(job, mode="fast"), cluster)


def test_each_channel_of_a_second_image_is_compared(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    clean = np.cumsum(np.cumsum(rng.standard_normal((3, 256, 256)), 1), 2)
    clean /= clean.std((1, 2), keepdims=True)
    first, second = (clean + 0.1 * rng.standard_normal(clean.shape) for _ in range(2))
    for name, pixels in (("noisy", first), ("second", second), ("swapped", second[[1, 0, 2]]), ("copy", 2 * first)):
        write_zarr(tmp_path / f"{name}.zarr", pixels.astype(np.float32), axes="cyx")
    given = {"input": Input(path=str(tmp_path / "noisy.zarr")), "method": "noise2noise"}
    assert make_plan(training(tmp_path, tmp_path, **given, second=str(tmp_path / "second.zarr")))
    with pytest.raises(InputError, match=r"swapped\.zarr does not show the same as .*noisy\.zarr, channel 0,"):
        make_plan(training(tmp_path, tmp_path, **given, second=str(tmp_path / "swapped.zarr")))
    with pytest.raises(InputError, match=r"copy\.zarr has the same pixels as .*: its noise is no other"):
        make_plan(training(tmp_path, tmp_path, **given, second=str(tmp_path / "copy.zarr")))
