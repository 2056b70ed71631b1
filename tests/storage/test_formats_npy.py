"""NumPy files: memory-mapped, not loaded."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from halotile.errors import DamagedData, InputError
from halotile.storage.arrays import open_source
from halotile.storage.formats.npy import NpyReader
from halotile.storage.grid import Region

PICTURE = np.arange(30 * 40, dtype="float32").reshape(30, 40)


def test_the_file_is_mapped(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", PICTURE)
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
    np.save(tmp_path / "a.npy", np.asfortranarray(PICTURE))
    pixels = open_source(tmp_path / "a.npy").read(Region((1, 2), (9, 30)))
    assert pixels.flags.c_contiguous
    assert np.array_equal(pixels, PICTURE[1:9, 2:30])


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_header_versions(tmp_path: Path, version: tuple[int, int]) -> None:
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array(file, PICTURE, version)
    assert np.array_equal(open_source(tmp_path / "a.npy").read(Region((0, 0), (30, 40))), PICTURE)


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array(file, PICTURE, (3, 0))
    with pytest.raises(InputError, match="version"):
        open_source(tmp_path / "a.npy")


@pytest.mark.parametrize("keep_bytes", [6, 9, 60, 128, 4000, 4927])
def test_a_truncated_file_is_damage(tmp_path: Path, keep_bytes: int) -> None:
    np.save(tmp_path / "a.npy", PICTURE)
    whole = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(whole[:keep_bytes])
    with pytest.raises(DamagedData, match=r"a\.npy"):
        open_source(tmp_path / "a.npy")


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    np.save(tmp_path / "a.npy", np.array([[Trap(), Trap()]], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="object"):
        open_source(tmp_path / "a.npy")
    assert not (tmp_path / "sprung").exists()
