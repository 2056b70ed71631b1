"""`recon-cli levels` adds levels to an image, says what it did, and refuses what cannot be in plain words."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr

import halotile
from halotile.errors import ConfigError
from halotile.storage.io_threads import IO_THREADS
from tests.cli.engine import ask, refused
from tests.support import load_denoising, run_inline

PIXELS = np.random.default_rng(0).integers(0, 4000, (2100, 1500), "u2")


def save_image(path: Path, pixels: Any = PIXELS) -> Path:
    group = zarr.open_group(path, mode="w")
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"datasets": [{"path": "0"}]}]}
    group.create_array("0", data=pixels, chunks=(256, 256))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_image(tmp_path / "cells.zarr")
    zarr.create_array(tmp_path / "bare.zarr", data=PIXELS, chunks=(256, 256))
    tifffile.imwrite(tmp_path / "scan.tif", PIXELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_levels_are_added_once(folder: Path) -> None:
    result = ask("levels", "cells.zarr")
    assert (result.exit_code, result.stdout) == (0, "cells.zarr: 2 levels added, down to 525 × 375\n")
    result = ask("levels", "cells.zarr")
    assert (result.exit_code, result.stdout) == (0, "cells.zarr has 3 levels down to 525 × 375: nothing to do\n")
    assert halotile.info("cells.zarr")["levels"] == [[2100, 1500], [1050, 750], [525, 375]]
    assert ask("levels", "cells.zarr", "--quiet").output == ""
    assert IO_THREADS.count == 1


def test_a_script_gets_the_shapes(folder: Path) -> None:
    assert halotile.add_levels(folder / "cells.zarr" / "0") == [(1050, 750), (525, 375)]
    assert halotile.add_levels("cells.zarr") == []


def test_axes_that_nothing_names_are_to_be_written(folder: Path) -> None:
    zarr.create_array(folder / "stack.zarr", data=PIXELS[:40].reshape(3, 20, 1000))
    words, _, job = refused("levels", "stack.zarr").partition("\n\n")
    assert words.endswith("write this, with the right axes, to levels.yaml and type `recon-cli run levels.yaml`:")
    (folder / "levels.yaml").write_text(job.replace("axes: qyx", "axes: zyx"))
    run_inline(load_denoising(folder / "levels.yaml"))
    assert halotile.info("stack.levels.zarr")["axes"] == "zyx"


@pytest.mark.parametrize("path", ["bare.zarr", "scan.tif"])
def test_another_image_gets_the_job_that_writes_it_with_levels(folder: Path, path: str) -> None:
    words, _, job = refused("levels", path).partition("\n\n")
    assert re.match(
        rf"error: {path} is .*: levels cannot be added to it\. To write it as an image with levels, ", words
    )
    (folder / "levels.yaml").write_text(job)
    run_inline(load_denoising(folder / "levels.yaml"))
    (output,) = folder.glob("*.levels.zarr")
    assert halotile.info(output)["levels"] == [[2100, 1500], [1050, 750], [525, 375]]
    np.testing.assert_array_equal(zarr.open_group(output)["0"][...], PIXELS)
    halotile.add_levels("cells.zarr")
    for level in ("1", "2"):
        np.testing.assert_array_equal(zarr.open_group(output)[level][...], zarr.open_group("cells.zarr")[level][...])


@pytest.mark.parametrize(
    ("path", "code", "said"),
    [
        ("nothing.zarr", 4, "nothing.zarr: nothing is there"),
        (
            "wells.zarr",
            2,
            "wells.zarr contains several images: A/1, B/1. Write the path of one, such as wells.zarr/A/1.",
        ),
        (".", 4, "a directory without Zarr metadata of its own"),
    ],
)
def test_what_is_no_image_is_named(folder: Path, path: str, code: int, said: str) -> None:
    for name in ("", "A", "B"):
        zarr.open_group(folder / "wells.zarr" / name, mode="w")
    for name in ("A", "B"):
        save_image(folder / "wells.zarr" / name / "1")
    assert said in refused("levels", path, code=code)


def test_a_url_is_refused_with_a_job_that_reads_it(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    from halotile.storage import arrays

    here = arrays.open_source("cells.zarr")
    monkeypatch.setattr(arrays, "open_source", lambda _: here)
    with pytest.raises(
        ConfigError,
        match=r"^s3://bucket/a\.zarr is at a URL: levels cannot be added(.|\n)*path: \"?s3://bucket/a\.zarr",
    ):
        halotile.add_levels("s3://bucket/a.zarr")


def files_in(folder: Path) -> int:
    """Number of files, some of which may go while they are counted."""
    return sum(len(names) for _, _, names in os.walk(folder))


@pytest.mark.thorough
def test_killed_without_warning_it_goes_on(folder: Path) -> None:
    save_image(folder / "large.zarr", np.tile(PIXELS, (4, 5)))
    save_image(folder / "whole.zarr", np.tile(PIXELS, (4, 5)))
    halotile.add_levels("whole.zarr")
    words = [sys.executable, "-m", "halotile", "levels", "large.zarr"]
    for _ in range(2):
        there = files_in(folder / "large.zarr")
        killed = subprocess.Popen(words, start_new_session=True)
        while killed.poll() is None and files_in(folder / "large.zarr") < there + 6:
            time.sleep(0.001)
        killed.kill()
        assert killed.wait() == -signal.SIGKILL
        assert len(halotile.info("large.zarr")["levels"]) == 1
    subprocess.run(words, check=True, capture_output=True)
    for level in ("1", "2", "3", "4"):
        np.testing.assert_array_equal(
            zarr.open_group("large.zarr")[level][...], zarr.open_group("whole.zarr")[level][...]
        )
    assert sorted(os.listdir("large.zarr")) == sorted(os.listdir("whole.zarr"))


def test_neither_dask_nor_torch_is_loaded(folder: Path) -> None:
    code = (
        "import sys, halotile; halotile.add_levels('cells.zarr'); sys.exit(bool({'torch', 'dask'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
