"""Importing halotile costs nothing until something is used."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("heavy", ["torch", "dask", "distributed", "zarr", "numpy"])
def test_importing_the_package_does_not_load(heavy: str) -> None:
    code = f"import sys, halotile; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
