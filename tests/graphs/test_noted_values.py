"""Plans note values that spoil a result, and heed the masks in files: one far from all others, noise that was cut off, masks of GDAL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from skimage.data import binary_blobs, retina

from halotile.cli.info import describe
from halotile.errors import ConfigError, InputError
from halotile.graphs.plans.plan import make_plan
from halotile.storage.arrays import open_source
from tests.graphs.holed import FILTERS, NODATA, scene
from tests.support import job_of, noisy_image, run_inline, write_zarr

Image = NDArray[Any]
FAR, CUT_OFF = "far from all others", "cut off"


def notes_on(folder: Path, words: str, pixels: Image, name: str = "tv", sigma: Any = "auto", **parts: Any) -> list[str]:
    """The notes of a plan with these words."""
    source = write_zarr(folder / "in.zarr", pixels) if not (folder / "in.zarr").exists() else folder / "in.zarr"
    options = {"strength": 1.0, "sigma": sigma} if name == "tv" else FILTERS[name]
    plan = make_plan(job_of(source, folder / "out.zarr", name, options, **parts))
    return [note for note in plan.notes if words in note]


def noise(*shape: int) -> Image:
    return np.random.default_rng(0).standard_normal(shape)


@pytest.mark.parametrize("name", ["tv", "gaussian"])
def test_a_value_far_from_all_others_is_noted(tmp_path: Path, name: str) -> None:
    pixels, holes = scene(NODATA)
    low, high = pixels[~holes].min(), pixels[~holes].max()
    (note,) = notes_on(tmp_path, FAR, pixels, name)
    assert note == (
        f"{holes.sum():,} pixels are -9999, far from all others ({low:,.5g} to {high:,.5g}): if they are no measurements, "
        "write input.nodata: -9999, or they may spoil the pixels around them"
    )
    for nodata in (NODATA, "none"):
        assert notes_on(tmp_path, FAR, pixels, name, input={"nodata": nodata}) == []


@pytest.mark.parametrize("alone", [True, False])
def test_areas_of_a_far_integer_are_noted_and_hot_pixels_are_defects(tmp_path: Path, alone: bool) -> None:
    pixels = np.random.default_rng(0).normal(200, 30, (600, 600)).clip(0, 399).astype(np.uint16)
    pixels.flat[::1000] = 65535
    if not alone:
        pixels[300:310, 300:310] = 65535
    notes = notes_on(tmp_path, FAR, pixels)
    assert len(notes) == (not alone)
    words = ("% of the pixels, by samples, are 65535, far from all others", "write input.nodata: 65535, or")
    assert all(each in note for note in notes for each in words)


def test_noise_of_which_little_is_left_is_noted_where_sigma_is_estimated(tmp_path: Path) -> None:
    pixels = (noise(256, 256) - 0.85).clip(0, 9)
    assert notes_on(tmp_path, CUT_OFF, pixels) == [
        "about 80% of the pixels are 0, at the end of the range of values, where noise was cut off: the estimated noise level may be too "
        "low. Write the level in the units of the file: noise: {model: gaussian, read_sigma: ...}"
    ]
    assert notes_on(tmp_path, CUT_OFF, pixels, sigma=1.0) == []


def test_the_plane_and_both_ends_are_named(tmp_path: Path) -> None:
    pixels = np.stack([noise(256, 256), noise(256, 256).clip(-0.25, 0.25), noise(256, 256)])
    (note,) = notes_on(tmp_path, CUT_OFF, pixels)
    assert note.startswith("about 80% of the pixels in q=1 are -0.25 or 0.25, at the end of the range")


def photo() -> Image:
    pixels: Image = np.rint((retina()[:600, :600, 1] - 100.0) * 3).clip(0, 255)
    return (pixels + np.random.default_rng(0).integers(0, 9, pixels.shape)).clip(0, 255)


RANDOM, GREEN = np.random.default_rng(0), retina()[200:712, 100:612, 1] / 255
TISSUE = binary_blobs(512, 0.1, volume_fraction=0.1, rng=RANDOM)
USUAL: dict[str, tuple[str, Image]] = {
    "photo": (FAR, photo().astype(np.uint8)),
    "float photo": (FAR, photo().astype(np.float32)),
    "mask": (FAR, np.where(np.random.default_rng(0).random((600, 600)) < 0.5, 0, 255).astype(np.uint8)),
    "few": (FAR, np.where(np.arange(360_000).reshape(600, 600) < 5, 1e6, photo()).astype(np.float32)),
    "half": (CUT_OFF, noise(256, 256).clip(0, 9)),
    "photograph": (CUT_OFF, (GREEN + 0.2 * noise(512, 512)).clip(0, 1)),
    "slide": (CUT_OFF, np.where(TISSUE, 180 + 9 * noise(512, 512), 255).clip(0, 255).astype(np.uint8)),
    "mosaic": (CUT_OFF, np.where(TISSUE, 1 + GREEN + 0.1 * noise(512, 512), 0.0)),
    "dead pixels": (CUT_OFF, np.where(RANDOM.random((512, 512)) < 0.3, 0, 5 + noise(512, 512))),
    "few measured": (CUT_OFF, np.where(RANDOM.random((512, 512)) < 0.75, 0, 5 + noise(512, 512))),
    "two values": (CUT_OFF, (RANDOM.random((256, 256)) < 0.3).astype(np.uint8)),
    "counts": (CUT_OFF, RANDOM.poisson(0.3, (256, 256)).astype(np.uint16)),
}


@pytest.mark.parametrize("kind", USUAL)
def test_genuine_black_and_white_and_noise_whose_level_is_known_have_no_note(tmp_path: Path, kind: str) -> None:
    assert notes_on(tmp_path, *USUAL[kind]) == []


KEPT = np.ones((100, 120), bool)
KEPT[30:60, 40:80] = False
MASK = 4
"""NewSubfileType of a mask."""


def masked_map(path: Path, mask: Any = KEPT, bands: int = 2, **options: Any) -> Path:
    """A map as GDAL writes it, whose pixels under the mask are far from the others."""
    pixels = noisy_image((*KEPT.shape, bands), "uint16")
    pixels[~KEPT] = 60_000
    options |= {"photometric": "minisblack", "planarconfig": "contig", "metadata": None}
    with tifffile.TiffWriter(path) as file:
        for step in (1, 2) if options.get("tile") else (1,):
            file.write(pixels[::step, ::step], subfiletype=step - 1, **options)
            file.write(mask[::step, ::step], subfiletype=step - 1, **options)
    # tifffile does not write masks of several bands.
    with tifffile.TiffFile(path, mode="r+b") as file:
        for number, page in enumerate(file.pages[1::2]):
            page.tags["NewSubfileType"].overwrite(MASK | number)
    return path


def denoised(source: Path, **section: Any) -> Any:
    output = source.with_suffix(".zarr")
    return run_inline(job_of(source, output, "gaussian", {"sigma": 3.0}, input=section))


@pytest.mark.parametrize("level", [0, 1])
def test_the_mask_of_a_file_or_of_each_band_keeps_its_pixels(tmp_path: Path, level: int) -> None:
    source = masked_map(tmp_path / "a.tif", tile=(16, 16))
    result, kept = denoised(source, level=level), KEPT[:: 2**level, :: 2**level]
    assert (result[:, ~kept] == 60_000).all()
    assert result[:, kept].max() < 60_000 - 1000 == result[:, ~kept].min() - 1000
    assert np.array_equal(open_source(source, dataset="mask", level=level)[:], kept)
    bands = np.stack([KEPT, np.ones_like(KEPT)], -1).astype("uint8") * 255  # each may have its mask
    one, other = denoised(masked_map(tmp_path / "b.tif", bands))
    assert (one[~KEPT] == 60_000).all()
    assert (other[~KEPT] != 60_000).any()


def test_another_mask_or_none_can_be_written_and_not_both(tmp_path: Path) -> None:
    source = masked_map(tmp_path / "a.tif")
    np.save(tmp_path / "all.npy", np.ones_like(KEPT))
    further = {"sides": {"mask": str(tmp_path / "all.npy")}}

    def sides_of(**given: Any) -> Any:
        job = job_of(source, tmp_path / "o.zarr", "gaussian", {"sigma": 3.0}, input=given)
        return make_plan(job).identity["sides"]

    assert sides_of()["mask"]["series"] == sides_of(nodata=7)["mask"]["series"] == "mask"
    assert sides_of(nodata="none") == {}
    assert sides_of(nodata="none", **further)["mask"]["format"] == "npy"
    with pytest.raises(ConfigError, match=r"a mask of its own\. Leave yours out; or write one"):
        sides_of(**further)


def test_a_mask_is_no_series_and_one_that_cannot_be_used_is_refused_with_what_does_without(tmp_path: Path) -> None:
    source = masked_map(tmp_path / "a.tif", bands=3)
    facts = describe(str(source))
    assert facts["series"] == [[100, 120, 3]]
    (remark,) = facts["remarks"]
    assert "input.nodata: none" in remark
    volume = {"input": {"axes": "yxz"}, "tile": {"axes": "zyx"}}
    with pytest.raises(InputError, match=r"own mask.*nodata: none"):
        make_plan(job_of(source, tmp_path / "o.zarr", "gaussian", {"sigma": 1.0}, **volume))


def test_a_mask_beside_the_file_is_named(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", noisy_image(KEPT.shape, "uint16"))
    beside = tmp_path / "a.tif.msk"
    with tifffile.TiffWriter(beside) as file:
        file.write(KEPT, photometric="mask", subfiletype=MASK, metadata=None)
    (remark,) = describe(str(tmp_path / "a.tif"))["remarks"]
    assert f"input: {{sides: {{mask: {beside}}}}}" in remark
    assert np.array_equal(open_source(beside)[:], KEPT)
