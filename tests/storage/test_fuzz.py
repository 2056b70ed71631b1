"""Any file content is read correctly or refused, without other errors or crashes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import all_of
from tests.storage.fuzzing import FORMATS, ODD_HDF5, edited_hdf5

EXAMPLES = 1_000
FEW = ("zarr-v3",)
"""Formats that are tried each time."""


@pytest.mark.parametrize("name", all_of(FORMATS, thorough=FORMATS.keys() - FEW))
def test_a_randomly_changed_file_is_read_correctly_or_refused(tmp_path: Path, name: str) -> None:
    if name == "czi":
        for package in ("bioio_czi", "pylibCZIrw"):
            pytest.importorskip(package, reason=f"{package} is not installed: pip install 'halotile[bioio]'")
    last = tmp_path / "last"
    child = subprocess.run(
        [sys.executable, "-m", "tests.storage.fuzzing", name, str(EXAMPLES), str(last)],
        capture_output=True,
        text=True,
        timeout=280,
    )
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
