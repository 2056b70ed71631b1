"""Files of microscopes: planes of a scene decoded one by one, with sizes and names, refused with advice."""

from __future__ import annotations

import logging
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from halotile.errors import DamagedData, InputError, MissingPackage
from halotile.storage.arrays import open_source
from halotile.storage.grid import Region
from tests.cases import in_folders

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
        letters = self.letters
        pixels = PIXELS[self.current_scene_index]
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


def write(path: Path, letters: str = "CZYX") -> Path:
    path.write_text(letters)
    return path


def test_a_plane_is_decoded_when_it_is_read_and_once(tmp_path: Path, fake: type[FakeReader]) -> None:
    source = open_source(write(tmp_path / "a.lif"))
    assert (source.format, "".join(source.axes), source.shape) == ("bioio", "czyx", PIXELS[0].shape)
    assert (source.chunks, source.keeps_chunk, fake.decoded) == ((1, 1, 30, 42), True, [])
    for top in range(0, 30, 10):
        pixels = source[1, 2, top : top + 10, 5:40]
        np.testing.assert_array_equal(pixels, PIXELS[0][1, 2, top : top + 10, 5:40])
    assert fake.decoded == [(1, 2, 0, 0)]
    np.testing.assert_array_equal(source[:], PIXELS[0])
    assert len(fake.decoded) == 13


def test_a_scene_is_chosen_by_name_or_number(tmp_path: Path, fake: type[FakeReader]) -> None:
    for folder, dataset in in_folders(tmp_path, (None, "left", "right", "1")):
        source = open_source(write(folder / "a.lif"), dataset=dataset)
        number = int(dataset in ("right", "1"))
        np.testing.assert_array_equal(source[0, 0], PIXELS[number][0, 0])
        assert source.remarks == (
            f"the file has 2 scenes, left, right: this is {('left', 'right')[number]}. For another, write input.dataset: "
            f"{('right', 'left')[number]}",
        )
        copy = pickle.loads(pickle.dumps(source))
        np.testing.assert_array_equal(copy[0, 0], source[0, 0])
        assert source.fingerprint()["scene"] == ("left", "right")[number]


def test_a_scene_that_is_not_there_is_refused(tmp_path: Path, fake: type[FakeReader]) -> None:
    for folder, dataset in in_folders(tmp_path, ("2", "-1", "middle")):
        with pytest.raises(InputError, match=r"has no such scene. Write one of left, right"):
            open_source(write(folder / "a.lif"), dataset=dataset)
    with pytest.raises(InputError, match=r"at full resolution\. Leave level out"):
        open_source(write(tmp_path / "a.lif"), level=1)


def test_sizes_time_and_names_are_taken_over(tmp_path: Path, fake: type[FakeReader]) -> None:
    source = open_source(write(tmp_path / "a.lif", "TCZYX"))
    assert "".join(source.axes) == "tczyx"
    assert source.scale == (1.5, 1.0, 0.5, 0.1, 1.0)
    assert source.units == ("second", None, "micrometer", "micrometer", None)
    assert source.ome is not None
    assert source.ome.name == "left"
    assert [channel["label"] for channel in source.channels] == ["red", "green", "blue"]


def test_axes_of_length_1_are_left_out_and_samples_are_channels(tmp_path: Path, fake: type[FakeReader]) -> None:
    source = open_source(write(tmp_path / "a.lif", "ZYXS"))
    assert ("".join(source.axes), source.shape) == ("yxc", (30, 42, 3))
    np.testing.assert_array_equal(source[:], np.moveaxis(PIXELS[0][:, 0], 0, -1))


def test_a_file_that_the_plug_in_refuses_is_damage(
    tmp_path: Path, fake: type[FakeReader], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DamagedData, match=r"a\.lif: bioio cannot read it: .*no letters.*Copy it again"):
        open_source(write(tmp_path / "a.lif", "not mine"))


def test_a_missing_package_or_plug_in_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: type[FakeReader]
) -> None:
    with pytest.raises(MissingPackage, match=r"bioio has no plug-in for \.oir here. Install"):
        open_source(write(tmp_path / "a.OIR"))
    monkeypatch.setitem(sys.modules, "bioio", None)
    with pytest.raises(MissingPackage, match=r'a \.czi file .*pip install "halotile\[bioio\]"'):
        open_source(write(tmp_path / "a.czi"))


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


def test_a_czi_reads(czi: Path) -> None:
    source = open_source(czi)
    assert ("".join(source.axes), source.shape, source.chunks) == ("czyx", (2, 3, 30, 42), (1, 1, 30, 42))
    np.testing.assert_allclose(source.scale[1:], (0.3, 0.2, 0.1))
    assert source.units == (None, "micrometer", "micrometer", "micrometer")
    region = Region((0, 1, 3, 5), (2, 3, 30, 40))
    np.testing.assert_array_equal(source.read(region), PIXELS[0][:2, :3][region.slices])
    assert [channel["label"] for channel in source.channels] == ["DAPI", "GFP"]


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.9])
def test_a_truncated_czi_is_damage(czi: Path, keep: float, capfd: pytest.CaptureFixture[str]) -> None:
    content = czi.read_bytes()
    czi.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(DamagedData, match=r"a\.czi"):
        open_source(czi)[:]
    assert capfd.readouterr().err == ""


def test_what_bioio_logs_is_left_to_programs(czi: Path) -> None:
    open_source(czi)
    assert logging.getLogger("bioio").level == logging.NOTSET
