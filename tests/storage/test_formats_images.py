"""Images in one file each, PNG, JPEG and NumPy's, decoded once, and planes of microscope files, decoded one by one; damage is refused."""

from __future__ import annotations

import io
import itertools
import logging
import mmap
import pickle
import struct
import sys
import zlib
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
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
from tests.storage.test_localread import little_taken

Array = NDArray[Any]


COLOURS: Array = np.random.default_rng(2).integers(0, 256, (40, 53, 4), "u1")


MAGIC = b"\x89PNG\r\n\x1a\n"


ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))


Y, X = np.mgrid[:48, :80]


IMAGE = Image.fromarray(np.stack([Y * 4, X * 3, Y + X], -1).astype("u1"))


def write(path: Path, pixels: Array) -> Path:
    path.write_bytes(imagecodecs.png_encode(np.ascontiguousarray(pixels)))
    return path


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of(height: int, width: int, rows: bytes, *, interlaced: bool = False) -> bytes:
    """A grey PNG of 8 bits with these rows, each after its filter."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, interlaced)
    return MAGIC + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_a_bomb_is_described_without_its_memory(tmp_path: Path) -> None:
    jpeg, png = tmp_path / "a.jpg", tmp_path / "a.png"
    IMAGE.convert("L").save(jpeg)
    content = bytearray(jpeg.read_bytes())
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = struct.pack(">HH", 65_000, 65_000)
    jpeg.write_bytes(content)
    png.write_bytes(png_of(100_000, 100_000, b"\0" * 100_001))
    with little_taken():
        assert (open_source(jpeg).chunks, open_source(png).chunks) == ((65_000, 65_000), (100_000, 100_000))
    png.write_bytes(png_of(2**31 - 1, 2**31 - 1, b"\0" * 100))
    with pytest.raises(InputError, match="no disk holds so many pixels"):
        open_source(png)


def test_every_bit_of_a_png_is_kept(tmp_path: Path) -> None:
    for samples, dtype in itertools.product((1, 2, 3, 4), ("u1", "u2")):
        pixels = np.random.default_rng(samples).integers(0, np.iinfo(dtype).max, (40, 53, samples), dtype)
        pixels = pixels[..., 0] if samples == 1 else pixels
        source = open_source(write(tmp_path / "a.png", pixels))
        assert (source.format, source.dtype.str[1:], source.chunks) == ("png", dtype, pixels.shape)
        np.testing.assert_array_equal(source[3:17, 50:], pixels[3:17, 50:])
        assert ("opacity" in "".join(source.remarks)) == (samples in (2, 4))
        named = ["red", "green", "blue", "opacity"][:samples] if samples > 2 else []
        assert [channel["label"] for channel in source.channels] == named


THUMBNAIL = io.BytesIO()
IMAGE.resize((16, 16)).save(THUMBNAIL, "jpeg")
UPRIGHT = [b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0" + bytes([n]) + bytes(6) for n in range(1, 9)]
SHOWN: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("png", "P", {}, "RGB", "palette"), ("png", "P", {"transparency": 3}, "RGBA", "palette"),
    ("png", "L", {"transparency": 3}, "LA", "opacity"), ("png", "RGB", {"transparency": (1, 2, 3)}, "RGBA", "opacity"),
    ("png", "1", {}, "1", ""), ("png", "RGB", {"dpi": (300, 300)}, "RGB", ""),
    ("png", "RGB", {"save_all": True, "append_images": [IMAGE.rotate(180)]}, "RGB", "animation: its first image is read"),
    *(("jpg", mode, options, mode, "") for mode in ("L", "RGB") for options in ({"dpi": (300, 300)}, {"progressive": True}, {"subsampling": 0})),
    *(("jpg", "RGB", {"exif": exif}, "RGB", "upright" if n else "") for n, exif in enumerate(UPRIGHT)),
    ("jpg", "RGB", {"comment": THUMBNAIL.getvalue()}, "RGB", ""),
]  # fmt: skip


def test_an_image_is_read_as_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for form, mode, options, as_mode, remark in SHOWN:
        path = tmp_path / f"a.{form}"
        IMAGE.convert(mode).save(path, **options)
        with Image.open(path) as image:
            expected = np.asarray(ImageOps.exif_transpose(image).convert(as_mode))
        with monkeypatch.context() as patch:
            patch.setattr(Image, "MAX_IMAGE_PIXELS", 10)  # larger than Pillow likes
            source = open_source(path)
            np.testing.assert_array_equal(source[:], expected)
        np.testing.assert_array_equal(source[5:9, 20:], expected[5:9, 20:])
        assert source.dtype == ("bool" if mode == "1" else "uint8")
        assert (source.scale, set(source.units)) == ((1.0,) * expected.ndim, {None}), "dots per inch are no size"
        assert (remark in "".join(source.remarks), bool(source.remarks)) == (True, bool(remark)), (mode, options)


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


def test_a_flipped_bit_and_a_missing_header_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    for place in (17, 24, 25, 200, 2000):
        content = bytearray(write(path, COLOURS[..., 0]).read_bytes())
        content[place] ^= 1
        path.write_bytes(content)
        with pytest.raises(DamagedData, match=r"a\.png"):
            open_source(path)[:]
    whole = write(path, COLOURS[..., 0]).read_bytes()
    cuts = [(whole[:keep], r"a\.png: the PNG is cut short.*Copy it again") for keep in (8, 20, 32, 33, -13, -12, -1)]
    ends = (chunk(b"IEND", b""), chunk(b"IHDR", b"") + chunk(b"IEND", b""))
    for short, words in cuts + [(MAGIC + end, "the PNG has no valid header") for end in ends]:
        path.write_bytes(short)
        with pytest.raises(DamagedData, match=words):
            open_source(path)


def test_the_axes_of_the_user_count_and_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"level": 1}, {"dataset": "a"}]
    for options in rows:
        with pytest.raises(InputError, match=r"one image at one resolution\. Leave .* out for a PNG file"):
            open_source(write(tmp_path / "a.png", COLOURS), **options)
    source = open_source(write(tmp_path / "a.png", COLOURS), axes="yxq")
    assert "".join(source.axes) == "yxq"
    np.testing.assert_array_equal(source.read(Region((0, 0, 1), (40, 53, 2))), COLOURS[..., 1:2])


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


def test_the_end_of_a_thumbnail_is_not_that_of_the_image_and_a_damaged_exif_is_none(tmp_path: Path) -> None:
    IMAGE.save(tmp_path / "a.jpg", comment=THUMBNAIL.getvalue())
    content, whole = (tmp_path / "a.jpg").read_bytes(), open_source(tmp_path / "a.jpg")[:]
    (tmp_path / "a.jpg").write_bytes(content + b"what a phone adds")
    np.testing.assert_array_equal(open_source(tmp_path / "a.jpg")[:], whole)
    (tmp_path / "a.jpg").write_bytes(content[:-200])
    with pytest.raises(DamagedData, match="the JPEG is cut short"):
        open_source(tmp_path / "a.jpg")[:]
    IMAGE.save(tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert open_source(tmp_path / "a.jpg").shape == (48, 80, 3), "a damaged EXIF counts as none"


def test_a_npy_file_is_mapped_of_known_header_versions_and_never_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    for version in ((1, 0), (2, 0), (3, 0)):
        with path.open("wb") as file:
            np.lib.format.write_array(file, COLOURS, version)
        with nullcontext() if version[0] < 3 else pytest.raises(InputError, match="version"):
            assert np.array_equal(open_source(path)[...], COLOURS)
    np.save(path, np.ones((300, 400)))
    source, reader = open_source(path), NpyReader(str(path), axes=None)
    assert source.read(Region((0, 0), (1, 1))) == 1
    assert isinstance(reader.pixels.base, mmap.mmap)
    assert reader.header.chunks == (1, 1)
    np.save(path, np.ones((2, 2)))
    with pytest.raises(DamagedData, match="cut short"):
        source.read(Region((200, 0), (300, 400)))

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    np.save(path, np.array([[Trap(), Trap()]], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="object"):
        open_source(path)
    assert not (tmp_path / "sprung").exists()


plugins = pytest.importorskip("bioio.plugins", reason='needs pip install "halotile[bioio]"')


da = pytest.importorskip("dask.array")


import xarray  # noqa: E402
from bioio_base import exceptions  # noqa: E402
from bioio_base.reader import Reader  # noqa: E402
from bioio_base.types import PhysicalPixelSizes  # noqa: E402

PIXELS: NDArray[Any] = np.random.default_rng(4).integers(0, 60_000, (2, 3, 4, 30, 42), "u2")
"""Two scenes of three channels and four planes."""


class FakeReader(Reader):  # type: ignore[misc]
    """A plug-in of bioio for the suffix .lif, whose file is the letters of its axes, or else not its own."""

    _scenes = ("left", "right")
    decoded: list[tuple[int, ...]]
    time_interval = timedelta(milliseconds=1500)
    physical_pixel_sizes = PhysicalPixelSizes(Z=0.5, Y=0.1, X=None)

    def __init__(self, image: str, chunk_dims: list[str] | None = None, fs_kwargs: Any = None) -> None:
        self.letters, self.chunk_dims = Path(image).read_text(), chunk_dims
        if not self.letters.isupper():
            raise exceptions.UnsupportedFileFormatError("fake", str(image), "no letters")

    @staticmethod
    def _is_supported_image(*_: Any, **__: Any) -> bool:
        return True

    @property
    def scenes(self) -> tuple[str, ...]:
        return self._scenes

    def _read_delayed(self) -> Any:
        letters, pixels = self.letters, PIXELS[self.current_scene_index]
        if "S" in letters:
            pixels = np.moveaxis(pixels[:, :1], 0, -1)
        if "T" in letters:
            pixels = pixels[None].repeat(2, 0)
        chunks = tuple(n if a in "YXS" else 1 for a, n in zip(letters, pixels.shape, strict=True))
        assert self.chunk_dims == ["Y", "X"]

        def decode(block: Any, block_id: tuple[int, ...]) -> Any:
            type(self).decoded.append(block_id)
            return block

        data = da.map_blocks(decode, da.from_array(pixels, chunks), dtype=pixels.dtype, meta=pixels[:0])
        coords = {"C": ["red", "green", "blue"]} if "C" in letters else {}
        return xarray.DataArray(data, dims=list(letters), coords=coords)

    def _read_immediate(self) -> Any:
        pytest.fail("the whole image was read")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeReader]:
    plug_in = SimpleNamespace(metadata=SimpleNamespace(get_reader=lambda: FakeReader))
    plug_in.entrypoint = SimpleNamespace(name="fake")
    monkeypatch.setattr(plugins, "get_plugins", lambda use_cache: {".lif": [plug_in]})
    FakeReader.decoded = []
    return FakeReader


def write_lif(path: Path, letters: str = "CZYX") -> Path:
    path.write_text(letters)
    return path


def test_a_plane_is_decoded_when_it_is_read_and_once(tmp_path: Path, fake: type[FakeReader]) -> None:
    source = open_source(write_lif(tmp_path / "a.lif"))
    assert (source.format, "".join(source.axes), source.shape) == ("bioio", "czyx", PIXELS[0].shape)
    assert (source.chunks, source.keeps_chunk, fake.decoded) == ((1, 1, 30, 42), True, [])
    for top in range(0, 30, 10):
        np.testing.assert_array_equal(source[1, 2, top : top + 10, 5:40], PIXELS[0][1, 2, top : top + 10, 5:40])
    assert fake.decoded == [(1, 2, 0, 0)]
    np.testing.assert_array_equal(source[:], PIXELS[0])
    assert len(fake.decoded) == 13


def test_a_scene_is_chosen_by_name_or_number(tmp_path: Path, fake: type[FakeReader]) -> None:
    path, scenes = write_lif(tmp_path / "a.lif"), ("left", "right")
    for dataset, number in ((None, 0), ("left", 0), ("right", 1), ("1", 1)):
        source, one, other = open_source(path, dataset=dataset), scenes[number], scenes[1 - number]
        said = f"the file has 2 scenes, left, right: this is {one}. For another, write input.dataset: {other}"
        assert (source.remarks, source.fingerprint()["scene"]) == ((said,), one)
        for each in (source, pickle.loads(pickle.dumps(source))):
            np.testing.assert_array_equal(each[0, 0], PIXELS[number][0, 0])
    rows: list[dict[str, Any]] = [{"dataset": "2"}, {"dataset": "-1"}, {"dataset": "middle"}, {"level": 1}]
    for options in rows:
        level = "level" in options
        words = r"at full resolution\. Leave level out" if level else "has no such scene. Write one of left, right"
        with pytest.raises(InputError, match=words):
            open_source(path, **options)


def test_sizes_time_and_names_are_taken_over(tmp_path: Path, fake: type[FakeReader]) -> None:
    source = open_source(write_lif(tmp_path / "a.lif", "TCZYX"))
    assert ("".join(source.axes), source.scale) == ("tczyx", (1.5, 1.0, 0.5, 0.1, 1.0))
    assert source.units == ("second", None, "micrometer", "micrometer", None)
    assert (source.ome and source.ome.name) == "left"
    assert [channel["label"] for channel in source.channels] == ["red", "green", "blue"]
    source = open_source(write_lif(tmp_path / "b.lif", "ZYXS"))  # axes of length 1 are left out, samples are channels
    assert ("".join(source.axes), source.shape) == ("yxc", (30, 42, 3))
    np.testing.assert_array_equal(source[:], np.moveaxis(PIXELS[0][:, 0], 0, -1))


def test_a_refused_file_is_damage_and_a_missing_plug_in_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: type[FakeReader]
) -> None:
    with pytest.raises(DamagedData, match=r"a\.lif: bioio cannot read it: .*no letters.*Copy it again"):
        open_source(write_lif(tmp_path / "a.lif", "not mine"))
    with pytest.raises(MissingPackage, match=r"bioio has no plug-in for \.oir here. Install"):
        open_source(write_lif(tmp_path / "a.OIR"))
    monkeypatch.setitem(sys.modules, "bioio", None)
    with pytest.raises(MissingPackage, match=r'a \.czi file .*pip install "halotile\[bioio\]"'):
        open_source(write_lif(tmp_path / "a.czi"))


@pytest.fixture
def czi(tmp_path: Path) -> Path:
    """A real CZI of two channels and three planes."""
    writing = pytest.importorskip("pylibCZIrw.czi", reason="pylibCZIrw, which writes CZI, is not installed")
    pytest.importorskip("bioio_czi", reason="bioio-czi, which reads CZI, is not installed")
    path = tmp_path / "a.czi"
    with writing.create_czi(str(path)) as file:
        for c, z in np.ndindex(2, 3):
            file.write(data=PIXELS[0][c, z][..., None], plane={"C": c, "Z": z})
        file.write_metadata(channel_names={0: "DAPI", 1: "GFP"}, scale_x=0.1e-6, scale_y=0.2e-6, scale_z=0.3e-6)
    return path


def test_a_czi_reads_and_what_bioio_logs_is_left_to_programs(czi: Path) -> None:
    source = open_source(czi)
    assert ("".join(source.axes), source.shape, source.chunks) == ("czyx", (2, 3, 30, 42), (1, 1, 30, 42))
    np.testing.assert_allclose(source.scale[1:], (0.3, 0.2, 0.1))
    assert source.units == (None, "micrometer", "micrometer", "micrometer")
    region = Region((0, 1, 3, 5), (2, 3, 30, 40))
    np.testing.assert_array_equal(source.read(region), PIXELS[0][:2, :3][region.slices])
    assert [channel["label"] for channel in source.channels] == ["DAPI", "GFP"]
    assert logging.getLogger("bioio").level == logging.NOTSET


def test_a_truncated_czi_is_damage(czi: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content = czi.read_bytes()
    for keep in (0.0, 0.1, 0.5, 0.9):
        czi.write_bytes(content[: int(len(content) * keep)])
        with pytest.raises(DamagedData, match=r"a\.czi"):
            open_source(czi)[:]
    assert capfd.readouterr().err == ""
