"""Files that are not what their format allows, or that the system does not give, end a command with exit code 4."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import zarr

from halotile.cli.exits import BAD_DATA
from tests.cli.engine import MonkeyPatch, ask, printed, refused
from tests.storage.fuzzing import ODD_HDF5, write_cxi, write_ptyd

PIXELS = np.zeros((20, 33), np.float32)


def _tiff(folder: Path, **options: Any) -> Path:
    tifffile.imwrite(folder / "a.tif", PIXELS, metadata=None, **options)
    return folder / "a.tif"


def _tiff_of_resolution(folder: Path) -> Path:
    """The unit of an ImageJ file stands, and a resolution of no number at all."""
    path = folder / "a.tif"
    tifffile.imwrite(path, PIXELS, imagej=True, resolution=(5, 5), metadata={"unit": "um"})
    with tifffile.TiffFile(path, mode="r+b") as file:
        tag = file.pages[0].tags["XResolution"]
        file.filehandle.seek(tag.offset + 4)
        file.filehandle.write(b"\0\0\0\0")
    return path


def _npy(folder: Path) -> Path:
    np.save(folder / "a.npy", PIXELS)
    content = (folder / "a.npy").read_bytes()
    (folder / "a.npy").write_bytes(content.replace(b"(20, 33), }  ", b"(-20, -33), }"))
    return folder / "a.npy"


def _ome(folder: Path, transformations: Any) -> Path:
    group = zarr.open_group(folder / "a.zarr", mode="w")
    group.create_array("0", data=PIXELS, chunks=(16, 16))
    entry = {"path": "0", "coordinateTransformations": transformations}
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"datasets": [entry]}]}
    return folder / "a.zarr"


def _zarr(folder: Path, zarr_format: Any, **changes: Any) -> Path:
    path = folder / "a.zarr"
    zarr.create_array(path, shape=(20, 33), chunks=(16, 16), dtype="u1", zarr_format=zarr_format)
    document = path / ("zarr.json" if zarr_format == 3 else ".zarray")
    document.write_text(json.dumps(json.loads(document.read_text()) | changes))
    return path


ODD: dict[str, Callable[[Path], Path]] = {
    "JSON of a TIFF that does not parse": lambda folder: _tiff(folder, description='{"shape": [20, 33'),
    "shape of a TIFF that is no number": lambda folder: _tiff(folder, description='{"shape": [20, "x"]}'),
    "shape of a TIFF that is text": lambda folder: _tiff(folder, description='{"shape": "ab", "axes": 3}'),
    "ImageJ's words": lambda folder: _tiff(folder, description="ImageJ=1.11a\nimages=x\nslices=a\n"),
    "negative shape": _npy,
    "fill value that its type has not": lambda folder: _zarr(folder, 3, fill_value=-1),
    "the same in v2": lambda folder: _zarr(folder, 2, fill_value=-1),
    "chunks without pixels": lambda folder: _zarr(folder, 2, chunks=[0, 16]),
}
PLACES = {
    "a.cxi": ("entry_1/data_1/data", "entry_1/data_1/translation", "entry_1/instrument_1/detector_1/mask", "entry_1/instrument_1/detector_1/data_dark"),
    "a.ptyd": ("chunks/0/data", "chunks/1/positions", "chunks/0/weights", "meta/energy"),
}  # fmt: skip


@pytest.mark.parametrize("odd", ["compound", "bytes", "references"])
@pytest.mark.parametrize(("file", "name"), [(file, name) for file in PLACES for name in PLACES[file]])
def test_a_dataset_without_numbers_is_named(tmp_path: Path, file: str, name: str, odd: str) -> None:
    path = tmp_path / file
    (write_cxi if file == "a.cxi" else write_ptyd)(path)
    with h5py.File(path, "r+") as opened:
        shape = opened[name].shape
        del opened[name]
        ODD_HDF5[odd](opened, name, shape)
    assert f"{path}: {name} is no array of numbers" in _refused(path)


STEPS: list[Any] = ["text", True, 3, ["text"], [None], [[]], {"scale": [1, 1]}, [{"type": "scale", "scale": ["a", 1]}]]


@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_transformations_that_are_none_are_refused(tmp_path: Path, steps: Any) -> None:
    _refused(_ome(tmp_path, steps))


@pytest.mark.parametrize("odd", ODD)
def test_a_file_that_is_not_as_its_format_wants_it_is_refused(tmp_path: Path, odd: str) -> None:
    _refused(ODD[odd](tmp_path))


def _refused(path: Path) -> str:
    result = ask("info", path)
    assert (result.exit_code, result.stderr[:7]) == (BAD_DATA, "error: ")
    assert path.name in result.stderr
    assert "unexpected" not in result.stderr
    return result.stderr


@pytest.mark.parametrize(
    "make",
    [_tiff_of_resolution, lambda folder: _ome(folder, None), lambda folder: _ome(folder, [])],
    ids=["a resolution without numbers", "no transformations", "an empty list of them"],
)
def test_a_pixel_size_that_is_not_told_is_unknown(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    assert json.loads(printed("info", make(tmp_path), "--json"))["scale"][-1] == 1.0


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    np.save(tmp_path / "a.npy", PIXELS)
    before = Path.open

    def forbidden(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == "a.npy":
            raise PermissionError(13, "Permission denied")
        return before(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", forbidden)
    assert "a.npy: its format cannot be determined: [Errno 13] Permission denied" in refused(
        "info", tmp_path / "a.npy", code=BAD_DATA
    )


def test_a_link_to_nothing_in_a_job_is_told_as_that(config: Path) -> None:
    image = config.with_name("noisy.npy")
    image.unlink()
    image.symlink_to("moved.npy")
    assert f"input.path: {image} does not exist: {image} is a link to moved.npy, where nothing is" in refused(
        "validate", config, code=BAD_DATA
    )
