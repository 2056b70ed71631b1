"""Tags of TIFF files about the size of pixels, and about how viewers show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from halotile.storage.arrays import open_source
from halotile.storage.spacing import in_known_unit

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


UNITS: list[tuple[str, float, str]] = [
    ("thou", 25.4, "micrometer"),
    ("li", 25.4 / 12, "millimeter"),
    ("pt", 25.4 / 72, "millimeter"),
    ("dam", 10, "meter"),
    ("ua", 1.495978707e8, "kilometer"),
    ("ly", 9.4607304725808e12, "kilometer"),
    ("km", 1, "kilometer"),
    ("Mm", 1, "megameter"),
    ("mm", 1, "millimeter"),
    ("feet", 1, "foot"),
    ("inches", 1, "inch"),
    ("Microns", 1, "micrometer"),
    ("micrometres", 1, "micrometer"),
    ("\\u00B5m", 1, "micrometer"),
    ("\u03bcm", 1, "micrometer"),
    ("\u00b5s", 1, "microsecond"),
    ("das", 10, "second"),
    ("hours", 1, "hour"),
    ("h", 1, "hour"),
]


def test_a_unit_in_the_words_of_any_program_is_one_of_ome_zarr() -> None:
    for word, factor, unit in UNITS:
        assert in_known_unit(3.0, word) == (pytest.approx(3 * factor), unit), word


def test_a_word_that_is_no_unit_is_left_out_with_a_remark(tmp_path: Path) -> None:
    for word in ("pixel", "AU", "grid", "reference frame", "M"):
        sizes = {"PhysicalSizeX": 0.2, "PhysicalSizeXUnit": word}
        ours: dict[str, Any] = {"metadata": {"axes": "ZYX", **sizes}}
        for options in (ours, {"imagej": True, "resolution": (5, 5), "metadata": {"unit": word}}):
            tifffile.imwrite(tmp_path / "a.ome.tif", STACK[0], **options)
            source = open_source(tmp_path / "a.ome.tif")
            assert source.units[-1] is None
            said = any("no unit of space" in remark and word in remark for remark in source.remarks)
            assert said is (word != "pixel"), word


def test_each_series_has_its_own_size_of_pixels(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for edge, per_centimeter in ((5, 10000), (9, 500)):
            resolution = (per_centimeter, per_centimeter)
            file.write(np.zeros((edge, edge), "uint8"), resolution=resolution, resolutionunit="CENTIMETER")
    assert open_source(tmp_path / "a.tif", dataset=0).scale == pytest.approx((1, 1))
    assert open_source(tmp_path / "a.tif", dataset=1).scale == pytest.approx((20, 20))


def test_tags_that_only_change_what_viewers_show_are_remarked_on(tmp_path: Path) -> None:
    rows: dict[str, dict[str, Any]] = {
        "0 as white": {"photometric": "miniswhite"},
        "turns it": {"extratags": [(274, "H", 1, 6, True)]},
        "": {"extratags": [(274, "H", 1, 1, True)]},
    }
    for word, options in rows.items():
        tifffile.imwrite(tmp_path / "a.tif", np.zeros((4, 5), "uint8"), **options)
        source = open_source(tmp_path / "a.tif")
        assert len(source.remarks) == bool(word)
        assert word in "".join(source.remarks)
