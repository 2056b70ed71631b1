"""JPEG: decoded whole and upright, refused when truncated or in inks."""

from __future__ import annotations

import io
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from halotile.errors import DamagedData, InputError, MissingPackage
from halotile.storage.arrays import open_source
from tests.storage.test_bombs import little_taken

Y, X = np.mgrid[:48, :80]
IMAGE = Image.fromarray(np.stack([Y * 4, X * 3, Y + X], -1).astype("u1"))


def decoded(path: Path) -> NDArray[Any]:
    with Image.open(path) as image:
        return np.asarray(ImageOps.exif_transpose(image))


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0, "quality": 100}])
def test_an_image_reads(tmp_path: Path, mode: str, options: dict[str, Any]) -> None:
    IMAGE.convert(mode).save(tmp_path / "a.jpg", **options)
    source = open_source(tmp_path / "a.jpg")
    assert (source.format, source.dtype.name, source.remarks) == ("jpeg", "uint8", ())
    assert "".join(source.axes) == ("yx" if mode == "L" else "yxc")
    np.testing.assert_array_equal(source[:], decoded(tmp_path / "a.jpg"))
    np.testing.assert_array_equal(source[5:9, 70:], decoded(tmp_path / "a.jpg")[5:9, 70:])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_read_upright(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    IMAGE.save(tmp_path / "a.jpg", exif=exif)
    source = open_source(tmp_path / "a.jpg")
    np.testing.assert_array_equal(source[:], decoded(tmp_path / "a.jpg"))
    assert ("upright" in "".join(source.remarks)) == (orientation > 1)


def test_a_damaged_exif_counts_as_none(tmp_path: Path) -> None:
    IMAGE.save(tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert open_source(tmp_path / "a.jpg").shape == (48, 80, 3)


def test_dots_per_inch_are_no_size_of_pixels(tmp_path: Path) -> None:
    IMAGE.save(tmp_path / "a.jpg", dpi=(300, 300))
    source = open_source(tmp_path / "a.jpg")
    assert (source.scale, source.units) == ((1.0,) * 3, (None,) * 3)


def test_inks_are_refused(tmp_path: Path) -> None:
    IMAGE.convert("CMYK").save(tmp_path / "a.jpg")
    with pytest.raises(InputError, match=r"a\.jpg: its colours are CMYK.*Convert it to RGB first"):
        open_source(tmp_path / "a.jpg")


def test_more_than_8_bits_are_refused(tmp_path: Path) -> None:
    IMAGE.save(tmp_path / "a.jpg")
    content = bytearray((tmp_path / "a.jpg").read_bytes())
    content[content.index(b"\xff\xc0") + 4] = 12
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(InputError, match=r"12-bit.*Save it again, as a PNG or TIFF"):
        open_source(tmp_path / "a.jpg")


@pytest.mark.parametrize("lost", [0.05, 0.3, 0.6])
def test_a_truncated_file_is_damage(tmp_path: Path, lost: float) -> None:
    IMAGE.save(tmp_path / "a.jpg")
    content = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(content[: -int(len(content) * lost)])
    with pytest.raises(InputError, match=r"a\.jpg") as caught:
        open_source(tmp_path / "a.jpg")[:]
    assert isinstance(caught.value, DamagedData) or "Save it again" in str(caught.value)


def test_the_end_of_a_thumbnail_is_not_that_of_the_image(tmp_path: Path) -> None:
    thumbnail = io.BytesIO()
    IMAGE.resize((16, 16)).save(thumbnail, "jpeg")
    IMAGE.save(tmp_path / "a.jpg", comment=thumbnail.getvalue())
    content = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(content + b"what a phone adds")
    np.testing.assert_array_equal(open_source(tmp_path / "a.jpg")[:], decoded(tmp_path / "a.jpg"))
    (tmp_path / "a.jpg").write_bytes(content[:-200])
    with pytest.raises(DamagedData, match="the JPEG is cut short"):
        open_source(tmp_path / "a.jpg")[:]


def test_an_image_larger_than_pillow_likes_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    IMAGE.save(tmp_path / "a.jpg")
    expected = decoded(tmp_path / "a.jpg")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    np.testing.assert_array_equal(open_source(tmp_path / "a.jpg")[:], expected)


def test_a_bomb_is_described_without_its_memory(tmp_path: Path) -> None:
    IMAGE.convert("L").save(tmp_path / "a.jpg")
    content = bytearray((tmp_path / "a.jpg").read_bytes())
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = struct.pack(">HH", 65_000, 65_000)
    (tmp_path / "a.jpg").write_bytes(content)
    with little_taken():
        assert open_source(tmp_path / "a.jpg").chunks == (65_000, 65_000)


@pytest.mark.parametrize("module", ["PIL.JpegImagePlugin", "imagecodecs"])
def test_a_missing_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    IMAGE.save(tmp_path / "a.jpg")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackage, match=r'pip install "halotile\[images\]"'):
        open_source(tmp_path / "a.jpg")
