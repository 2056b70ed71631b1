"""What is not local is refused when the job is planned, however local it looks; what is only odd has the bits of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from skimage.data import retina

from halotile.errors import ConfigError
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.plans.plan import make_plan
from halotile.tasks.devices.device import torch_threads
from tests import deceptive
from tests.cases import thorough
from tests.support import job_of, run_inline, work_of, write_zarr

MODULE = "tests.deceptive"
KNOWN: dict[str, Any] = {"receptive_field": 70, "alignment": 1}
LARGE, SMALL = (1300, 1100), (300, 250)


def job(folder: Path, name: str, shape: tuple[int, int], options: dict[str, Any], **parts: Any) -> Denoising:
    pixels = np.random.default_rng(0).random(shape, np.float32)
    source = write_zarr(folder / "in.zarr", pixels, chunk=256)
    kind = "torch" if isinstance(getattr(deceptive, name), type) else "function"
    given = {"import": f"{MODULE}:{name}", **options}
    tile = {"size": 128} | parts.pop("tile", {})
    return job_of(source, folder / "out.zarr", kind, given, shard=512, chunk=256, tile=tile, **parts)


@pytest.mark.parametrize(
    ("name", "shape", "options", "words"),
    [
        ("Negatives", SMALL, {}, "looks at the whole image"),
        thorough("Counts", SMALL, {}, "looks at the whole image"),
        thorough("Background", SMALL, {}, "looks at the whole image"),
        ("AcrossTheBatch", SMALL, {}, "in one batch with another tile"),
        ("InParts", LARGE, {}, "other pixels in tiles than on a whole image"),
        thorough("Backwards", LARGE, {}, "other pixels in tiles than on a whole image"),
        thorough("InSevens", (1293, 1103), {}, "other pixels in tiles than on a whole image"),
        ("FarPadding", SMALL, {}, "failed on a window of .*write receptive_field and alignment"),
        ("Circular", SMALL, {}, "with circular padding write tile.boundary: periodic"),
        ("in_parts", LARGE, {"depth": 1}, "looks farther than its depth of 1"),
        ("Gated", SMALL, {"options": {"below": 0.35}}, "other pixels in tiles than on"),
        thorough("FarRolled", SMALL, {}, "other pixels in tiles than on"),
        ("without_dark_level", SMALL, {"depth": 8}, "looks farther than its depth of 8, or at the whole image"),
        thorough("without_background", SMALL, {"depth": 8}, "looks farther than its depth of 8, or at the whole image"),
        thorough("without_commonest", SMALL, {"depth": 8}, "looks farther than its depth of 8, or at the whole image"),
        thorough("by_its_size", LARGE, {"depth": 8}, "looks farther than its depth of 8, or at the whole image"),
        ("Missing", SMALL, {}, "returns NaN or infinity for pixels between 0 and 1"),
        ("rolled", SMALL, {"depth": 1}, "edge of an image .*other side.* write tile.boundary: periodic"),
    ],
)
def test_what_is_not_local_is_refused(
    tmp_path: Path, name: str, shape: tuple[int, int], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(job(tmp_path, name, shape, options))


def test_a_network_that_takes_the_mean_of_its_noise_map_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "sigma.npy", np.ones(SMALL, "float32"))
    sides = {"sides": {"sigma": str(tmp_path / "sigma.npy")}}
    with pytest.raises(ConfigError, match="looks at the whole image"):
        make_plan(job(tmp_path, "OneLevel", SMALL, {"sigma": 0.1}, input=sides))


@pytest.mark.parametrize(
    ("name", "shape", "options", "tile"),
    [
        ("Untrainable", SMALL, {}, {}),
        thorough("OneByOne", SMALL, {}, {}),
        ("FarPadding", SMALL, KNOWN, {}),
        thorough("ByNines", (1503, 1247), {}, {}),
        thorough("InSevens", (1295, 1106), {}, {}),
        thorough("Circular", SMALL, {}, {"boundary": "periodic"}),
        ("rolled", SMALL, {"depth": 1}, {"boundary": "periodic"}),
    ],
)
def test_what_is_only_odd_has_the_bits_of_the_whole(
    tmp_path: Path, name: str, shape: tuple[int, int], options: dict[str, Any], tile: dict[str, Any]
) -> None:
    requested = job(tmp_path, name, shape, options, tile=tile)
    pixels = np.random.default_rng(0).random(shape, np.float32)
    call = getattr(deceptive, name)
    with torch.inference_mode(), torch_threads():
        image = torch.from_numpy(pixels)[None, None].contiguous(memory_format=torch.channels_last)
        whole = (
            call().eval().to(memory_format=torch.channels_last)(image)[0, 0].numpy()
            if isinstance(call, type)
            else call(pixels)
        )
    assert np.array_equal(run_inline(requested), whole)


def test_a_declared_receptive_field_alone_is_the_depth(tmp_path: Path) -> None:
    plan = make_plan(job(tmp_path, "OneByOne", SMALL, {"receptive_field": 40}))
    assert work_of(plan).task.tiling.depth == ((40, 40), (40, 40))


def scene() -> NDArray[np.float32]:
    """A real image, dark at one side."""
    pixels: NDArray[np.float32] = retina()[200:900, 200:900, 1].astype(np.float32) / 255
    noise = np.random.default_rng(0).standard_normal(pixels.shape).astype(np.float32)
    return pixels + 0.03 * noise


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("function", {"import": f"{MODULE}:connected", "depth": 8}),
        ("torch", {"import": f"{MODULE}:Gated", "options": {"below": 30.0}}),
    ],
)
def test_what_only_the_image_itself_shows_is_refused(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """The threshold of the gate lies between places of this image, in its own units, and beyond any image of a trial."""
    pixels = scene() if kind == "function" else 100 * scene()
    source = write_zarr(tmp_path / "in.zarr", pixels, chunk=256)
    with pytest.raises(ConfigError, match="than on a larger part of this image"):
        make_plan(job_of(source, tmp_path / "out.zarr", kind, options, shard=512, chunk=256))


def test_pixels_that_a_function_takes_out_are_the_same_in_tiles(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", scene(), chunk=256)
    options = {"import": f"{MODULE}:missing", "depth": 0}
    make_plan(job_of(source, tmp_path / "out.zarr", "function", options))
