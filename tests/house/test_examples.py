"""The examples do what they say: the scene is a function of coordinates, the demo improves the picture."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.storage.grid import Grid, Region

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    """An example as a module: they are scripts, not a package."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / "examples" / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


scene = load("scene.py")


@settings(deadline=None, max_examples=8)
@given(
    block=st.tuples(st.integers(60, 400), st.integers(60, 400)),
    corner=st.tuples(st.integers(0, 70_000), st.integers(0, 70_000)),
    seed=st.integers(0, 2**32),
)
def test_a_scene_has_the_same_bits_however_it_is_cut(
    block: tuple[int, int], corner: tuple[int, int], seed: int
) -> None:
    shape = (330, 350)
    whole = scene.noisy_at(Region((0, 0), shape).shift(corner), seed)
    pieces = np.empty(shape, np.float32)
    for piece in Grid(shape, block, ((0, 0), (0, 0))):
        pieces[piece.core.slices] = scene.noisy_at(piece.core.shift(corner), seed)
    assert np.array_equal(whole, pieces)


def test_the_noise_has_the_strength_that_was_asked_for() -> None:
    region = Region((100, 200), (700, 900))
    noise = scene.noisy_at(region, seed=1, sigma=0.2) - scene.truth_at(region, seed=1)
    assert noise.std() == pytest.approx(0.2, rel=0.01)
    assert abs(noise.mean()) < 0.002


def test_the_truth_stays_in_range_and_has_something_to_see() -> None:
    truth = scene.truth_at(Region((0, 0), (600, 600)))
    assert truth.min() >= 0
    assert truth.max() <= 1
    assert truth.std() > 0.05


def test_another_seed_is_another_scene() -> None:
    region = Region((0, 0), (64, 64))
    assert not np.array_equal(scene.truth_at(region, 0), scene.truth_at(region, 1))


def test_a_scene_of_70000_pixels_is_written_in_places(tmp_path: Path) -> None:
    regions = scene.write_scene(tmp_path, 70_000, sparse=3, shard=512)
    truth, noisy = (zarr.open_array(tmp_path / f"{name}.zarr", mode="r") for name in ("truth", "noisy"))
    assert noisy.shape == (70_000, 70_000)
    assert regions[-1].stop == (70_000, 70_000)
    for region in regions:
        assert np.array_equal(truth[region.slices], scene.truth_at(region))
        assert np.array_equal(noisy[region.slices], scene.noisy_at(region))
    written = [path for path in (tmp_path / "truth.zarr/c").rglob("*") if path.is_file()]
    assert len(written) == 3


@pytest.mark.cluster
def test_the_demo_denoises_a_real_picture_twice(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/retina.py"), "--out", str(tmp_path), "--size", "600"]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        before, after = (float(x) for x in re.findall(r"([\d.]+) dB (?:before|after)", done.stdout))
        assert after > before + 10
        assert (tmp_path / "before-after.png").stat().st_size > 10_000
        assert zarr.open_array(tmp_path / "clean.zarr", mode="r").shape == (600, 600)


def test_a_trained_network_is_one_that_a_job_can_use(tmp_path: Path) -> None:
    import torch

    from halotile.tasks.denoisers.dncnn import DnCNN

    trainer = load("train_dncnn.py")
    stack = trainer.network(depth=3, width=4)
    checksum = trainer.save(stack, tmp_path / "tiny.safetensors")
    model = DnCNN(weights=str(tmp_path / "tiny.safetensors"), sha256=checksum, depth=3, width=4).build()
    picture = torch.rand(1, 1, 20, 20)
    with torch.no_grad():
        assert torch.allclose(model(picture), picture - stack(picture), atol=1e-6)


@pytest.mark.cluster
def test_the_distributed_example_improves_its_picture_twice() -> None:
    command = [sys.executable, str(ROOT / "examples/distribute.py"), "--size", "160", "--iterations", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"([\d.]+) dB before, ([\d.]+) dB after", done.stdout)
    assert len(lines) == 2
    assert all(float(after) > float(before) + 2 for before, after in lines)
