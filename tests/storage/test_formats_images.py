"""Images in one file each, PNG, JPEG and NumPy's: every bit is kept, PNG and JPEG are decoded once, and damage is refused."""

from __future__ import annotations

import io
import itertools
import mmap
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
from PIL import Image, ImageOps

from halotile.errors import DamagedData, InputError, MissingPackage
from halotile.storage.arrays import open_source
from halotile.storage.formats.npy import NpyReader
from halotile.storage.grid import Region
from tests.storage.test_bombs import little_taken

Array = NDArray[Any]
COLOURS: Array = np.random.default_rng(2).integers(0, 256, (40, 53, 4), "u1")
MAGIC = b"\x89PNG\r\n\x1a\n"
ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
Y, X = np.mgrid[:48, :80]
IMAGE = Image.fromarray(np.stack([Y * 4, X * 3, Y + X], -1).astype("u1"))
FRAME = np.arange(30 * 40, dtype="float32").reshape(30, 40)


def write(path: Path, pixels: Array) -> Path:
    path.write_bytes(imagecodecs.png_encode(np.ascontiguousarray(pixels)))
    return path


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of(height: int, width: int, rows: bytes, *, interlaced: bool = False) -> bytes:
    """A grey PNG of 8 bits with these rows, each after its filter."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, interlaced)
    return MAGIC + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def decoded(path: Path) -> NDArray[Any]:
    with Image.open(path) as image:
        return np.asarray(ImageOps.exif_transpose(image))


def saved(folder: Path) -> dict[str, Path]:
    """A grey image in each format."""
    np.save(folder / "a.npy", FRAME)
    IMAGE.convert("L").save(folder / "a.jpg")
    return {"png": write(folder / "a.png", COLOURS[..., 0]), "jpg": folder / "a.jpg", "npy": folder / "a.npy"}


def test_a_truncated_file_is_damage(tmp_path: Path) -> None:
    of_png, of_npy = (8, 20, 32, 33, 500, -13, -12, -1), (6, 9, 60, 128, 4000, 4927)
    cuts: dict[str, tuple[float, ...]] = {"png": of_png, "npy": of_npy, "jpg": (0.95, 0.7, 0.4)}
    words = {"png": r"a\.png: the PNG is cut short.*Copy it again", "npy": r"a\.npy", "jpg": r"a\.jpg"}
    for name, path in saved(tmp_path).items():
        whole = path.read_bytes()
        for keep in cuts[name]:
            path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
            with pytest.raises(InputError, match=words[name]) as caught:
                open_source(path)[...]
            of_pillow = name == "jpg" and "Save it again" in str(caught.value)
            assert of_pillow or isinstance(caught.value, DamagedData)


def test_a_bomb_is_described_without_its_memory(tmp_path: Path) -> None:
    path = saved(tmp_path)["jpg"]
    content = bytearray(path.read_bytes())
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = struct.pack(">HH", 65_000, 65_000)
    path.write_bytes(content)
    (tmp_path / "a.png").write_bytes(png_of(100_000, 100_000, b"\0" * 100_001))
    with little_taken():
        assert open_source(path).chunks == (65_000, 65_000)
        assert open_source(tmp_path / "a.png").chunks == (100_000, 100_000)
    (tmp_path / "a.png").write_bytes(png_of(2**31 - 1, 2**31 - 1, b"\0" * 100))
    with pytest.raises(InputError, match="no disk holds so many pixels"):
        open_source(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("name", "module"), [("png", "imagecodecs"), ("jpg", "imagecodecs"), ("jpg", "PIL.JpegImagePlugin")]
)
def test_a_missing_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    path = saved(tmp_path)[name]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackage, match=r'pip install "halotile\[images\]"'):
        open_source(path)


def test_dots_per_inch_are_no_size_of_pixels(tmp_path: Path) -> None:
    for name in ("a.png", "a.jpg"):
        IMAGE.save(tmp_path / name, dpi=(300, 300))
        source = open_source(tmp_path / name)
        assert (source.scale, source.units) == ((1.0,) * 3, (None,) * 3)


def test_every_bit_is_kept(tmp_path: Path) -> None:
    for samples, dtype in itertools.product((1, 2, 3, 4), ("u1", "u2")):
        pixels = np.random.default_rng(samples).integers(0, np.iinfo(dtype).max, (40, 53, samples), dtype)
        pixels = pixels[..., 0] if samples == 1 else pixels
        source = open_source(write(tmp_path / "a.png", pixels))
        assert (source.format, source.dtype.str[1:]) == ("png", dtype)
        assert "".join(source.axes) == "yxc"[: pixels.ndim]
        assert source.chunks == pixels.shape
        np.testing.assert_array_equal(source[:], pixels)
        np.testing.assert_array_equal(source[3:17, 50:], pixels[3:17, 50:])
        assert ("opacity" in "".join(source.remarks)) == (samples in (2, 4))
        named = ["red", "green", "blue", "opacity"][:samples] if samples > 2 else []
        assert [channel["label"] for channel in source.channels] == named


def test_palettes_and_transparency_are_read_as_what_they_show(tmp_path: Path) -> None:
    rows: list[tuple[str, dict[str, Any], str, str | None]] = [
        ("P", {}, "RGB", "palette"),
        ("P", {"transparency": 3}, "RGBA", "palette"),
        ("L", {"transparency": 3}, "LA", "opacity"),
        ("RGB", {"transparency": (1, 2, 3)}, "RGBA", "opacity"),
        ("1", {}, "1", None),
    ]
    for mode, options, as_mode, remark in rows:
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


def test_the_file_is_decoded_once_whatever_its_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Mock(wraps=imagecodecs.png_decode)
    monkeypatch.setattr(imagecodecs, "png_decode", decode)
    source = open_source(write(tmp_path / "a.tif", COLOURS))
    assert source.format == "png"
    decode.assert_not_called()
    for row in range(5):
        np.testing.assert_array_equal(source[row : row + 1], COLOURS[row : row + 1])
    decode.assert_called_once()


def test_a_file_without_a_header_is_damage(tmp_path: Path) -> None:
    for content in (chunk(b"IEND", b""), chunk(b"IHDR", b"") + chunk(b"IEND", b"")):
        (tmp_path / "a.png").write_bytes(MAGIC + content)
        with pytest.raises(DamagedData, match="the PNG has no valid header"):
            open_source(tmp_path / "a.png")


def test_a_flipped_bit_is_damage(tmp_path: Path) -> None:
    for place in (17, 24, 25, 200, 2000):
        content = bytearray(write(tmp_path / "a.png", COLOURS[..., 0]).read_bytes())
        content[place] ^= 1
        (tmp_path / "a.png").write_bytes(content)
        with pytest.raises(DamagedData, match=r"a\.png"):
            open_source(tmp_path / "a.png")[:]


def test_the_axes_of_the_user_count_and_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"level": 1}, {"dataset": "a"}]
    for options in rows:
        with pytest.raises(InputError, match=r"one image at one resolution\. Leave .* out for a PNG file"):
            open_source(write(tmp_path / "a.png", COLOURS), **options)
    source = open_source(write(tmp_path / "a.png", COLOURS), axes="yxq")
    assert "".join(source.axes) == "yxq"
    np.testing.assert_array_equal(source.read(Region((0, 0, 1), (40, 53, 2))), COLOURS[..., 1:2])


def test_a_jpeg_reads(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{}, {"progressive": True}, {"subsampling": 0, "quality": 100}]
    for options, mode in itertools.product(rows, ("L", "RGB")):
        IMAGE.convert(mode).save(tmp_path / "a.jpg", **options)
        source = open_source(tmp_path / "a.jpg")
        assert (source.format, source.dtype.name, source.remarks) == ("jpeg", "uint8", ())
        assert "".join(source.axes) == ("yx" if mode == "L" else "yxc")
        expected = decoded(tmp_path / "a.jpg")
        np.testing.assert_array_equal(source[:], expected)
        np.testing.assert_array_equal(source[5:9, 70:], expected[5:9, 70:])


def test_an_image_is_read_upright(tmp_path: Path) -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[274] = orientation
        IMAGE.save(tmp_path / "a.jpg", exif=exif)
        source = open_source(tmp_path / "a.jpg")
        np.testing.assert_array_equal(source[:], decoded(tmp_path / "a.jpg"))
        assert ("upright" in "".join(source.remarks)) == (orientation > 1)
    IMAGE.save(tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert open_source(tmp_path / "a.jpg").shape == (48, 80, 3), "a damaged EXIF counts as none"


def test_inks_and_more_than_8_bits_are_refused(tmp_path: Path) -> None:
    IMAGE.convert("CMYK").save(tmp_path / "a.jpg")
    with pytest.raises(InputError, match=r"a\.jpg: its colours are CMYK.*Convert it to RGB first"):
        open_source(tmp_path / "a.jpg")
    IMAGE.save(tmp_path / "a.jpg")
    content = bytearray((tmp_path / "a.jpg").read_bytes())
    content[content.index(b"\xff\xc0") + 4] = 12
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(InputError, match=r"12-bit.*Save it again, as a PNG or TIFF"):
        open_source(tmp_path / "a.jpg")


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


def test_the_file_is_mapped(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", FRAME)
    reader = NpyReader(str(tmp_path / "a.npy"), axes=None)
    assert isinstance(reader.pixels.base, mmap.mmap)
    assert reader.header.chunks == (1, 1)
    assert open_source(tmp_path / "a.npy").read(Region((0, 0), (2, 40))).flags.writeable


def test_a_file_that_is_cut_short_after_it_was_opened_is_damage(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((300, 400)))
    source = open_source(tmp_path / "a.npy")
    assert source.read(Region((0, 0), (1, 1))) == 1
    np.save(tmp_path / "a.npy", np.ones((2, 2)))
    with pytest.raises(DamagedData, match="cut short"):
        source.read(Region((200, 0), (300, 400)))


def test_fortran_order_reads_the_same(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.asfortranarray(FRAME))
    pixels = open_source(tmp_path / "a.npy").read(Region((1, 2), (9, 30)))
    assert pixels.flags.c_contiguous
    assert np.array_equal(pixels, FRAME[1:9, 2:30])


def test_header_versions_are_read_and_a_newer_one_is_refused(tmp_path: Path) -> None:
    for version in ((1, 0), (2, 0)):
        with (tmp_path / "a.npy").open("wb") as file:
            np.lib.format.write_array(file, FRAME, version)
        assert np.array_equal(open_source(tmp_path / "a.npy").read(Region((0, 0), (30, 40))), FRAME)
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array(file, FRAME, (3, 0))
    with pytest.raises(InputError, match="version"):
        open_source(tmp_path / "a.npy")


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    np.save(tmp_path / "a.npy", np.array([[Trap(), Trap()]], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="object"):
        open_source(tmp_path / "a.npy")
    assert not (tmp_path / "sprung").exists()
