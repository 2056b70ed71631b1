"""GDAL's masks in the file of an image, or beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from halotile.cli.info import describe
from halotile.errors import ConfigError, InputError
from halotile.graphs.plans.plan import make_plan
from halotile.storage.arrays import open_source
from tests.support import job_of, noisy_image, run_inline

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
