"""PNG: decoded whole and once, with all of its bits, refused when damaged."""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import imagecodecs
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from halotile.errors import DamagedData, InputError, MissingPackage
from halotile.storage.arrays import open_source
from halotile.storage.grid import Region
from tests.storage.test_bombs import little_taken

Array = NDArray[Any]
COLOURS: Array = np.random.default_rng(2).integers(0, 256, (40, 53, 4), "u1")
MAGIC = b"\x89PNG\r\n\x1a\n"
ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))


def write(path: Path, pixels: Array) -> Path:
    path.write_bytes(imagecodecs.png_encode(np.ascontiguousarray(pixels)))
    return path


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of(height: int, width: int, rows: bytes, *, interlaced: bool = False) -> bytes:
    """A grey PNG of 8 bits with these rows, each after its filter."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, interlaced)
    return MAGIC + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("dtype", ["u1", "u2"])
@pytest.mark.parametrize("samples", [1, 2, 3, 4])
def test_every_bit_is_kept(tmp_path: Path, dtype: str, samples: int) -> None:
    pixels = np.random.default_rng(samples).integers(0, np.iinfo(dtype).max, (40, 53, samples), dtype)
    pixels = pixels[..., 0] if samples == 1 else pixels
    source = open_source(write(tmp_path / "a.png", pixels))
    assert (source.format, source.dtype.str[1:], "".join(source.axes)) == ("png", dtype, "yxc"[: pixels.ndim])
    assert source.chunks == pixels.shape
    np.testing.assert_array_equal(source[:], pixels)
    np.testing.assert_array_equal(source[3:17, 50:], pixels[3:17, 50:])
    assert ("opacity" in "".join(source.remarks)) == (samples in (2, 4))
    named = ["red", "green", "blue", "opacity"][:samples] if samples > 2 else []
    assert [channel["label"] for channel in source.channels] == named


@pytest.mark.parametrize(
    ("mode", "options", "as_mode", "remark"),
    [
        ("P", {}, "RGB", "palette"),
        ("P", {"transparency": 3}, "RGBA", "palette"),
        ("L", {"transparency": 3}, "LA", "opacity"),
        ("RGB", {"transparency": (1, 2, 3)}, "RGBA", "opacity"),
        ("1", {}, "1", None),
    ],
)
def test_palettes_and_transparency_are_read_as_what_they_show(
    tmp_path: Path, mode: str, options: dict[str, Any], as_mode: str, remark: str | None
) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(COLOURS[..., :3]).convert(mode).save(path, **options)
    source = open_source(path)
    with Image.open(path) as image:
        np.testing.assert_array_equal(source[:], np.asarray(image.convert(as_mode)))
    assert source.dtype == ("bool" if mode == "1" else "uint8")
    assert any(str(remark) in one for one in source.remarks) == (remark is not None)


def test_of_an_animation_the_first_image_is_read(tmp_path: Path) -> None:
    image = Image.fromarray(COLOURS[..., :3])
    image.save(tmp_path / "a.png", save_all=True, append_images=[image.rotate(180)])
    source = open_source(tmp_path / "a.png")
    np.testing.assert_array_equal(source[:], COLOURS[..., :3])
    assert "animation: its first image is read" in source.remarks[0]


def test_an_interlaced_image_reads_the_same(tmp_path: Path) -> None:
    grey = COLOURS[..., 0]
    passes = [grey[y::down, x::right] for y, x, down, right in ADAM7]
    rows = b"".join(b"\0" + row.tobytes() for part in passes for row in part)
    (tmp_path / "a.png").write_bytes(png_of(40, 53, rows, interlaced=True))
    np.testing.assert_array_equal(open_source(tmp_path / "a.png")[:], grey)


def test_dots_per_inch_are_no_size_of_pixels(tmp_path: Path) -> None:
    Image.fromarray(COLOURS).save(tmp_path / "a.png", dpi=(300, 300))
    source = open_source(tmp_path / "a.png")
    assert (source.scale, source.units) == ((1.0,) * 3, (None,) * 3)


def test_the_content_counts_and_not_the_suffix(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "a.tif", COLOURS))
    assert source.format == "png"
    np.testing.assert_array_equal(source[:], COLOURS)


def test_the_file_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Mock(wraps=imagecodecs.png_decode)
    monkeypatch.setattr(imagecodecs, "png_decode", decode)
    source = open_source(write(tmp_path / "a.png", COLOURS))
    decode.assert_not_called()
    for row in range(5):
        np.testing.assert_array_equal(source[row : row + 1], COLOURS[row : row + 1])
    decode.assert_called_once()


@pytest.mark.parametrize("keep", [8, 20, 32, 33, 500, -13, -12, -1])
def test_a_truncated_file_is_damage(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "a.png", COLOURS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DamagedData, match=r"a\.png: the PNG is cut short.*Copy it again"):
        open_source(path)


@pytest.mark.parametrize("content", [chunk(b"IEND", b""), chunk(b"IHDR", b"") + chunk(b"IEND", b"")])
def test_a_file_without_a_header_is_damage(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.png").write_bytes(MAGIC + content)
    with pytest.raises(DamagedData, match="the PNG has no valid header"):
        open_source(tmp_path / "a.png")


@pytest.mark.parametrize("place", [17, 24, 25, 200, 2000])
def test_a_flipped_bit_is_damage(tmp_path: Path, place: int) -> None:
    content = bytearray(write(tmp_path / "a.png", COLOURS[..., 0]).read_bytes())
    content[place] ^= 1
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(DamagedData, match=r"a\.png"):
        open_source(tmp_path / "a.png")[:]


def test_a_size_that_no_disk_holds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png_of(2**31 - 1, 2**31 - 1, b"\0" * 100))
    with pytest.raises(InputError, match="no disk holds so many pixels"):
        open_source(tmp_path / "a.png")


def test_a_bomb_is_described_without_its_memory(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png_of(100_000, 100_000, b"\0" * 100_001))
    with little_taken():
        assert open_source(tmp_path / "a.png").chunks == (100_000, 100_000)


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.png", COLOURS)
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    with pytest.raises(MissingPackage, match=r'pip install "halotile\[images\]"'):
        open_source(path)


@pytest.mark.parametrize("options", [{"level": 1}, {"dataset": "a"}])
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"one image at one resolution\. Leave .* out for a PNG file"):
        open_source(write(tmp_path / "a.png", COLOURS), **options)


def test_the_axes_of_the_user_count(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "a.png", COLOURS), axes="yxq")
    assert "".join(source.axes) == "yxq"
    np.testing.assert_array_equal(source.read(Region((0, 0, 1), (40, 53, 2))), COLOURS[..., 1:2])
