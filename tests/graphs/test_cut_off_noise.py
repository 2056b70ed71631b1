"""Plans note noise that was cut off so much at the ends of the range of values that its level may be too low, and no other saturated pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from skimage.data import binary_blobs, retina

from halotile.graphs.plans.plan import make_plan
from tests.support import job_of, write_zarr

Image = NDArray[Any]


def notes_on(folder: Path, pixels: Image, sigma: float | str = "auto") -> list[str]:
    source = write_zarr(folder / f"{sigma}.zarr", pixels)
    plan = make_plan(job_of(source, folder / "out.zarr", "tv", {"strength": 1.0, "sigma": sigma}))
    return [note for note in plan.notes if "cut off" in note]


def noise(*shape: int) -> Image:
    return np.random.default_rng(0).standard_normal(shape)


def test_noise_of_which_little_is_left_is_noted_where_sigma_is_estimated(tmp_path: Path) -> None:
    pixels = (noise(256, 256) - 0.85).clip(0, 9)
    (note,) = notes_on(tmp_path, pixels)
    assert note == (
        "about 80% of the pixels are 0, at the end of the range of values, where noise was cut off: the estimated noise level may be too "
        "low. Write sigma as a number"
    )
    assert notes_on(tmp_path, pixels, 1.0) == []


def test_the_plane_and_both_ends_are_named(tmp_path: Path) -> None:
    pixels = np.stack([noise(256, 256), noise(256, 256).clip(-0.25, 0.25)])
    (note,) = notes_on(tmp_path, np.concatenate([pixels, pixels[:1]]))
    assert note.startswith("about 80% of the pixels in q=1 are -0.25 or 0.25, at the end of the range")


@pytest.mark.parametrize(
    "kind", ["half", "photograph", "slide", "mosaic", "dead pixels", "few measured", "two values", "counts"]
)
def test_noise_whose_level_is_known_and_genuine_black_and_white_have_no_note(tmp_path: Path, kind: str) -> None:
    random = np.random.default_rng(0)
    green = retina()[200:712, 100:612, 1] / 255
    tissue = binary_blobs(512, 0.1, volume_fraction=0.1, rng=random)
    images: dict[str, Image] = {
        "half": noise(256, 256).clip(0, 9),
        "photograph": (green + 0.2 * noise(512, 512)).clip(0, 1),
        "slide": np.where(tissue, 180 + 9 * noise(512, 512), 255).clip(0, 255).astype(np.uint8),
        "mosaic": np.where(tissue, 1 + green + 0.1 * noise(512, 512), 0.0),
        "dead pixels": np.where(random.random((512, 512)) < 0.3, 0, 5 + noise(512, 512)),
        "few measured": np.where(random.random((512, 512)) < 0.75, 0, 5 + noise(512, 512)),
        "two values": (random.random((256, 256)) < 0.3).astype(np.uint8),
        "counts": random.poisson(0.3, (256, 256)).astype(np.uint16),
    }
    assert notes_on(tmp_path, images[kind]) == []
