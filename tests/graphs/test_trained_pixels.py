"""Weights that were trained on other values than those of the image: refused in other units, noted where they differ clearly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from halotile.errors import ConfigError, WeightsError
from halotile.graphs.plans.plan import make_plan
from halotile.tasks.denoisers.common.weights import METADATA, trained_range
from halotile.tasks.networks.unet import UNetNetwork
from tests.support import job_of, write_zarr

Range = tuple[float, float]


def weights_of(path: Path, images: NDArray[Any], values: Range) -> Path:
    """Weights as a job writes them that was trained on images of shape (channels, rows, columns)."""
    pixels = torch.from_numpy((images.astype(np.float64) - values[0]) / (values[1] - values[0])).flatten(1)
    network = UNetNetwork(width=4, levels=1)
    module = network.build(len(images), pixels.mean(1).float(), pixels.std(1).float())
    save_file(dict(network.weights(module)), path, {METADATA: json.dumps({"values": values})})
    return path


def notes(folder: Path, image: NDArray[Any], weights: Path, given: Any = "auto") -> list[str]:
    """Notes of a plan on the values of an image."""
    folder = Path(mkdtemp(dir=folder))
    axes = "cyx" if image.ndim == 3 else "yx"
    source = write_zarr(folder / "image.zarr", image, axes=axes)
    plan = make_plan(job_of(source, folder / "o.zarr", "unet", {"weights": str(weights)}, input={"range": given}))
    return [note for note in plan.notes if "the weights expect" in note]


@pytest.mark.parametrize("values", [(5, 5), (2, 1), (0, math.inf), (0, math.nan)])
def test_values_that_are_no_range_are_refused(tmp_path: Path, values: Range) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.zeros(1)}, path, {METADATA: json.dumps({"values": values})})
    with pytest.raises(WeightsError, match=rf"w\.safetensors: .* are {values[0]} and {values[1]}\. Train it"):
        trained_range(path)


def waves() -> NDArray[Any]:
    """An image from 0 to 1 with noise."""
    y, x = np.mgrid[:160, :160]
    noise = 0.1 * np.random.default_rng(0).standard_normal(y.shape)
    return np.asarray(0.5 + 0.3 * np.sin(y / 9) * np.cos(x / 7) + noise)


FLOATS, BYTES, WORDS = (0.0, 1.0), (0.0, 255.0), (0.0, 65535.0)


@pytest.mark.parametrize(
    ("trained", "values", "image", "written"),
    [
        (waves(), FLOATS, (255 * waves()).clip(0, 255).astype(np.uint8), "[0, 255]"),
        (65535 * waves(), WORDS, waves(), "[0, 1]"),
        (65535 * waves(), WORDS, (255 * waves()).clip(0, 255).astype(np.uint8), "[0, 255]"),
        (255 * waves(), BYTES, waves(), "[0, 1]"),
        (1000 * waves() + 100, WORDS, 1000 * waves() + 30000, "[29900, 95435]"),
    ],
)
def test_other_units_are_refused_with_the_range_to_write(
    tmp_path: Path, trained: NDArray[Any], values: Range, image: NDArray[Any], written: str
) -> None:
    weights = weights_of(tmp_path / "w.safetensors", trained[None], values)
    with pytest.raises(ConfigError, match=r"input.range is auto, .* write input\.range: \[") as refused:
        notes(tmp_path, image, weights)
    text = str(refused.value).partition("other units, write input.range: ")[2].partition(";")[0]
    low, high = map(float, text.strip("[]").split(","))
    assert not notes(tmp_path, image, weights, (low, high))
    assert (low, high) == pytest.approx(json.loads(written), rel=0.05)
    (note,) = notes(tmp_path, image, weights, values)
    assert f"write input.range: {text}; else weights that learned from images like it do better" in note


def test_images_of_the_same_kind_are_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    cells = 100 + 3 * rng.standard_normal((512, 512))
    cells[rng.random(cells.shape) < 0.01] += 3000
    empty = 100 + 3 * rng.standard_normal((512, 512))
    of_cells = weights_of(tmp_path / "cells.safetensors", cells[None], WORDS)
    of_empty = weights_of(tmp_path / "empty.safetensors", empty[None], WORDS)
    assert not notes(tmp_path, cells.astype(np.uint16), of_cells)
    assert not notes(tmp_path, cells.astype(np.float32), of_empty), "a patch may have none"
    (note,) = notes(tmp_path, empty.astype(np.uint16), of_cells)
    assert "the pixels have mean " in note
    for factor in (0.5, 2, 3):
        assert not notes(tmp_path, (factor * cells).astype(np.uint16), of_cells)


def photons(count: float) -> NDArray[Any]:
    """An image as a camera with an offset counts so many photons at its brightest."""
    y, x = np.mgrid[:256, :256]
    counts = np.random.default_rng(1).poisson(count * (0.4 + 0.3 * np.sin(y / 30) * np.cos(x / 40)))
    return np.asarray(50 * counts + 100, np.uint16)


@pytest.mark.parametrize(("count", "lit"), [(17, None), (20, None), (26, None), (4, "darker"), (50, "brighter")])
def test_an_image_that_is_clearly_darker_or_brighter_is_noted(tmp_path: Path, count: float, lit: str | None) -> None:
    weights = weights_of(tmp_path / "w.safetensors", photons(20)[None], WORDS)
    found = notes(tmp_path, photons(count), weights)
    assert len(found) == (lit is not None)
    if lit is not None:
        before, _, text = found[0].partition(", write input.range: ")
        assert before.endswith(f"if it is the same, {lit} or in other units")
        low, high = json.loads(text.partition(";")[0])
        assert "e" not in text.partition(";")[0]
        assert not notes(tmp_path, photons(count), weights, (low, high))


def test_an_image_of_a_narrower_type_and_other_brightness_is_refused(tmp_path: Path) -> None:
    weights = weights_of(tmp_path / "w.safetensors", photons(20)[None], WORDS)
    with pytest.raises(ConfigError, match=r"input.range is auto.* write input\.range: \["):
        notes(tmp_path, (photons(4) // 4).astype(np.uint8), weights)


def test_an_image_without_noise_is_compared_too(tmp_path: Path) -> None:
    weights = weights_of(tmp_path / "w.safetensors", photons(20)[None], WORDS)
    learned = photons(20).mean()
    assert not notes(tmp_path, np.full((200, 300), learned, np.uint16), weights)
    (note,) = notes(tmp_path, np.full((200, 300), 2 * learned, np.uint16), weights)
    assert f"deviation 0, and the weights expect mean {learned:.4g} " in note
    low, high = json.loads(note.partition("write input.range: ")[2].partition(";")[0])
    assert (low, high - low) == pytest.approx((learned, 65535), rel=0.01)


def test_each_channel_is_compared(tmp_path: Path) -> None:
    pair = np.stack([waves(), 0.01 * waves()])
    weights = weights_of(tmp_path / "w.safetensors", pair, FLOATS)
    assert not notes(tmp_path, pair, weights)
    with pytest.raises(ConfigError, match="the pixels of channel 1 have mean"):
        notes(tmp_path, pair[::-1], weights)
