"""Files of every format are read with the bits of their libraries; any file content is read correctly or refused, without other errors or crashes."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from halotile.errors import InputError
from halotile.storage.arrays import open_source
from halotile.storage.grid import Region
from tests.cases import all_of
from tests.storage.fuzzing import FORMATS, IMAGES, ODD_HDF5, edited_hdf5, is_json

FEW = ("zarr-v3",)
"""Formats that are tried each time."""


@pytest.mark.parametrize("name", sorted(IMAGES.keys() - {"czi"}))
def test_a_file_reads_with_the_bits_of_its_library_and_is_refused_where_truncated(tmp_path: Path, name: str) -> None:
    write, read = IMAGES[name]
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole")
    for root in sorted((tmp_path / "whole").iterdir()):
        expected, opened = read(root), open_source(root)
        for source in (opened, pickle.loads(pickle.dumps(opened))):
            pixels = source.read(Region.whole(source.shape))
            if pixels.shape == expected.shape:  # a palette is read as what it shows
                assert pixels.tobytes() == expected.astype(pixels.dtype).tobytes()
            assert pixels[1:, 2:].tobytes() == source[1:, 2:].tobytes()
        for keep in (0.0, 0.02, 0.3, 0.6, 0.9):
            (tmp_path / str(keep)).mkdir(exist_ok=True)
            short = tmp_path / str(keep) / root.name
            (shutil.copytree if root.is_dir() else shutil.copy)(root, short)
            files = [file for file in short.rglob("*") if file.is_file() and not is_json(file)]
            largest = max(files or [short], key=lambda file: file.stat().st_size)
            os.truncate(largest, int(keep * largest.stat().st_size))
            with pytest.raises(InputError, match=root.name):
                open_source(short)[...]


@pytest.mark.parametrize("name", all_of(FORMATS, thorough=FORMATS.keys() - FEW))
def test_a_randomly_changed_file_is_read_correctly_or_refused(tmp_path: Path, name: str) -> None:
    if name == "czi":
        for package in ("bioio_czi", "pylibCZIrw"):
            pytest.importorskip(package, reason=f"{package} is not installed: pip install 'halotile[bioio]'")
    last = tmp_path / "last"
    command = [sys.executable, "-m", "tests.storage.fuzzing", name, str(1_000), str(last)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert child.returncode == 0, f"{child.stderr}\nThe last file that was tried: {last.read_text()}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["cxi", "ptyd", "result"])
def test_an_odd_value_in_a_scan_or_a_result_is_read_or_refused(tmp_path: Path, name: str) -> None:
    write, attempt = FORMATS[name]
    write(tmp_path)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for number, odd in enumerate(ODD_HDF5):
        path.write_bytes(edited_hdf5(content, 5 * number + 3, odd))
        attempt(path)
