"""Tags of TIFF files about the size of pixels, and about how viewers show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from halotile.storage.arrays import open_source

STACK = np.zeros((2, 3, 4, 5), "uint8")


def test_units_of_imagej_that_differ_from_that_along_x_are_read(tmp_path: Path) -> None:
    tags = {
        "axes": "TZYX",
        "unit": "micron",
        "zunit": "nm",
        "spacing": 300.0,
        "tunit": "ms",
        "finterval": 250.0,
    }
    tifffile.imwrite(tmp_path / "a.tif", STACK, imagej=True, resolution=(10, 10), metadata=tags)
    source = open_source(tmp_path / "a.tif")
    assert source.units == ("millisecond", "nanometer", "micrometer", "micrometer")
    assert source.scale == pytest.approx((250, 300, 0.1, 0.1))


def test_each_series_has_its_own_size_of_pixels(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for edge, per_centimeter in ((5, 10000), (9, 500)):
            resolution = (per_centimeter, per_centimeter)
            file.write(np.zeros((edge, edge), "uint8"), resolution=resolution, resolutionunit="CENTIMETER")
    assert open_source(tmp_path / "a.tif", dataset=0).scale == pytest.approx((1, 1))
    assert open_source(tmp_path / "a.tif", dataset=1).scale == pytest.approx((20, 20))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"photometric": "miniswhite"}, "0 as white"),
        ({"extratags": [(274, "H", 1, 6, True)]}, "turns it"),
        ({"extratags": [(274, "H", 1, 1, True)]}, ""),
    ],
)
def test_tags_that_only_change_what_viewers_show_are_remarked_on(
    tmp_path: Path, options: dict[str, Any], word: str
) -> None:
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((4, 5), "uint8"), **options)
    source = open_source(tmp_path / "a.tif")
    assert len(source.remarks) == bool(word)
    assert word in "".join(source.remarks)
