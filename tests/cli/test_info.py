"""An image is described without being read, with a configuration that works as it stands; files that are not what their format allows end in exit code 4."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import zarr
from PIL import Image

from halotile.cli.exits import BAD_DATA
from halotile.cli.info import describe, info_rows
from halotile.graphs.plans.plan import make_plan
from tests.cases import in_folders
from tests.cli.engine import MonkeyPatch, ask, printed, refused
from tests.storage.fuzzing import ODD_HDF5, write_cxi, write_ptyd
from tests.support import load_denoising, noisy_image


@pytest.mark.parametrize("name", ["noisy.npy", "with space: and #.npy", "123.npy", "[a].npy", "café.npy", "-x.npy"])
def test_the_suggested_configuration_is_valid(tmp_path: Path, name: str) -> None:
    np.save(tmp_path / name, np.zeros((40, 30), np.uint16))
    facts = describe(str(tmp_path / name))
    config = tmp_path / "config.yaml"
    config.write_text(facts["config"])
    job = load_denoising(config)
    assert job.input.path == str(tmp_path / name)
    assert job.output.path == str(tmp_path / name.replace(".npy", ".denoised.zarr"))


SUGGESTED = [
    ("", "plate.zarr/A/1/0", "plate.zarr.A.1.0.denoised.zarr"),
    ("", "plate.zarr/A/1/*", "{stem}.denoised.zarr"),
    ("plate.zarr/A/1/0", ".", "plate.zarr.A.1.0.denoised.zarr"),
    ("plate.zarr/A/1", "0", "plate.zarr.A.1.0.denoised.zarr"),
    ("plate.zarr/A", "../../alone.zarr/", "alone.denoised.zarr"),
    ("alone.zarr", ".", "alone.denoised.zarr"),
]


@pytest.mark.parametrize(("inside", "path", "output"), SUGGESTED)
def test_the_suggested_output_is_beside_the_zarr_that_has_the_image(
    tmp_path: Path, monkeypatch: MonkeyPatch, inside: str, path: str, output: str
) -> None:
    for name in ("plate.zarr/A/1/0", "plate.zarr/A/2/0", "alone.zarr"):
        zarr.create_array(tmp_path / name, data=noisy_image((40, 30), "uint8"))
        for folder in (tmp_path / name).parents[: name.count("/")]:
            zarr.open_group(folder)
    monkeypatch.chdir(tmp_path / inside)
    given = path if inside else str(tmp_path / path)
    (written,) = re.findall(r'output: {path: "?(.+?)"?}\n', describe(given)["config"])
    assert os.path.abspath(written) == str(tmp_path / output)


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.JPEG"])
def test_the_configuration_for_an_image_from_a_camera_can_be_planned(tmp_path: Path, name: str) -> None:
    Image.fromarray(noisy_image((40, 60, 3), "uint8")).save(tmp_path / name)
    facts = describe(str(tmp_path / name))
    assert (facts["axes"], facts["dtype"], facts["remarks"]) == ("yxc", "uint8", [])
    (tmp_path / "config.yaml").write_text(facts["config"])
    job = load_denoising(tmp_path / "config.yaml")
    assert job.output.path == str(tmp_path / "a.denoised.zarr")
    assert make_plan(job).layout.shape == (3, 40, 60)


def test_the_facts_are_given_to_people_and_programs(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((4000, 300), np.uint16))
    facts = json.loads(printed("info", tmp_path / "a.npy", "--json"))
    found = {key: facts[key] for key in ("shape", "axes", "dtype", "bytes")}
    assert found == {"shape": [4000, 300], "axes": "yx", "dtype": "uint16", "bytes": 2_400_000}
    text = printed("info", tmp_path / "a.npy")
    tried = "`recon-cli try config.yaml sheet.png --set denoiser.strength=0.5,1,2`"
    for words in ("4,000 × 300, axes yx", "uint16, 2.3 MiB uncompressed", "version: 1\njob: denoise\n", tried):
        assert words in text


def test_sizes_of_channels_are_not_shown_as_sizes_of_pixels_which_the_plan_knows_too(tmp_path: Path) -> None:
    known, config = "y 0.1 micrometer, x 0.2 micrometer", tmp_path / "config.yaml"
    save_channels(tmp_path / "c.zarr", [0.5, 0.1, 0.2])
    save_channels(tmp_path / "d.zarr", [0.5, 1.0, 1.0], unit=None)
    for name, size in (("c.zarr", known), ("d.zarr", "not known")):
        facts = describe(str(tmp_path / name))
        assert dict(info_rows(facts))["pixel size"] == size
        config.write_text(facts["config"])
        assert f"uint16, pixel size {size}" in printed("plan", config, "--set", "denoiser={name: none}")


def save_channels(path: Path, scale: list[float], unit: str | None = "micrometer") -> Path:
    """An OME-Zarr of two channels."""
    group = zarr.open_group(path, mode="w")
    group.create_array("0", data=np.zeros((2, 40, 30), np.uint16))
    space = [{"name": axis, "type": "space"} | ({"unit": unit} if unit else {}) for axis in "yx"]
    steps = [{"type": "scale", "scale": scale}]
    image = {
        "axes": [{"name": "c", "type": "channel"}, *space],
        "datasets": [{"path": "0", "coordinateTransformations": steps}],
    }
    group.attrs["ome"] = {"version": "0.5", "multiscales": [image]}
    return path


@pytest.mark.parametrize("shape", [(40, 30), (1, 30)])
def test_the_configuration_of_a_mask_can_be_planned(tmp_path: Path, shape: tuple[int, int]) -> None:
    np.save(tmp_path / "mask.npy", np.zeros(shape, bool))
    config = tmp_path / "config.yaml"
    config.write_text(describe(str(tmp_path / "mask.npy"))["config"])
    assert "strength" not in config.read_text()
    result = ask("plan", config, "--json")
    assert (result.exit_code, json.loads(result.stdout)["output_dtype"]) == (0, "float32")


@pytest.mark.parametrize(("dtype", "largest"), [("float32", 1.0), ("float32", 60_000.0), ("uint16", 4095.0)])
def test_the_suggested_strength_suits_any_unit(tmp_path: Path, dtype: str, largest: float) -> None:
    pixels = largest * np.clip(0.5 + 0.1 * np.random.default_rng(0).standard_normal((200, 180)), 0, 1)
    np.save(tmp_path / "a.npy", pixels.astype(dtype))
    config = tmp_path / "config.yaml"
    config.write_text(describe(str(tmp_path / "a.npy"))["config"])
    plan = make_plan(load_denoising(config))
    scale = 65535 if dtype == "uint16" else 1
    noise: Any = plan.identity["noise_level"]
    assert np.isclose(noise * scale, 0.1 * largest, rtol=0.1)


def test_the_series_of_a_tiff_are_listed(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        file.write(np.zeros((20, 30), np.uint8), photometric="minisblack", metadata=None)
        file.write(np.zeros((40, 50), np.uint16), photometric="minisblack", metadata=None)
    text = ask("info", tmp_path / "a.tif").stdout
    assert "2 series, 0 of 20 × 30, 1 of 40 × 50: this is series 0. For another, write input.dataset: 1" in text
    assert "1: 40 × 50" in text
    text = ask("info", tmp_path / "a.tif", "--dataset", "1").stdout
    assert "this is series 1. For another, write input.dataset: 0" in text
    assert json.loads(ask("info", tmp_path / "a.tif", "--json").stdout)["series"] == [[20, 30], [40, 50]]


@pytest.mark.parametrize("asked", ["scans/slice_*.npy", "scans", "scans/"])
def test_several_images_are_shown_by_the_first(tmp_path: Path, monkeypatch: MonkeyPatch, asked: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scans").mkdir()
    for number in (1, 2, 3):
        np.save(tmp_path / f"scans/slice_{number}.npy", noisy_image((40, 30 + number)))
        (tmp_path / f"scans/slice_{number}.txt").write_text("none")
        zarr.create_array(tmp_path / f"scans/slice_{number}.denoised.zarr", data=noisy_image((40, 30)))
        (tmp_path / f"scans/slice_{number}.denoised.zarr.run").mkdir()
    text = ask("info", asked).stdout
    pattern = asked if "*" in asked else "scans/*.npy"
    assert f"3 match {pattern}; what follows is the first, slice_1.npy" in text
    assert "40 × 31, axes yx" in text
    config = tmp_path / "config.yaml"
    config.write_text(json.loads(ask("info", asked, "--json").stdout)["config"])
    job = load_denoising(config)
    assert job.input.path == f"{tmp_path}/{pattern}"
    assert job.output.path == f"{tmp_path}/scans/{{stem}}.denoised.zarr"


@pytest.mark.parametrize("damaged", [("a.tif",), ("a.tif", "b.tif"), ("a.tif", "b.tif", "c.tif")])
def test_damaged_images_of_a_folder_are_named(tmp_path: Path, damaged: tuple[str, ...]) -> None:
    for name in ("a.tif", "b.tif", "c.tif"):
        tifffile.imwrite(tmp_path / name, noisy_image((200, 300)))
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2] if name in damaged else whole)
    result = ask("info", tmp_path)
    assert "a.tif: the TIFF is cut short" in result.output
    assert result.exit_code == (4 if len(damaged) == 3 else 0)
    assert ("1 image after it" in result.stdout) == (len(damaged) == 2)
    if len(damaged) < 3:
        assert f"the first, {'bc'[len(damaged) - 1]}.tif" in result.stdout


def test_images_of_another_kind_are_told(tmp_path: Path) -> None:
    for name in ("a.tif", "b.tif", "a.png", "a.tif.msk", "notes.txt"):
        tifffile.imwrite(tmp_path / name, noisy_image((20, 30), "uint8"))
    (tmp_path / "notes.txt").write_text("none")
    Image.fromarray(noisy_image((20, 30), "uint8")).save(tmp_path / "a.png")
    zarr.create_array(tmp_path / "a.zarr", data=noisy_image((20, 30)))
    (tmp_path / "a.zarr.run").mkdir()
    facts = describe(str(tmp_path))
    assert facts["pattern"] == f"{tmp_path}/*.tif"
    others = [remark for remark in facts["remarks"] if "further" in remark]
    assert others == [f"1 further image in the folder: write another job for {tmp_path}/*.png"]


def test_holes_and_pages_are_shown_and_no_library_complains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.tif"
    for value, nodata in (("-9999", -9999), ("-3.4028234663852886e+38", np.finfo(np.float32).min)):
        tifffile.imwrite(path, np.zeros((20, 30), np.float32), extratags=[(42113, "s", 0, value, True)])
        assert json.loads(printed("info", path, "--json"))["nodata"] == nodata
        assert nodata != -9999 or "pixels of -9999, by the file" in printed("info", path)
    assert caplog.records == []
    for options in ({}, {"metadata": None}):
        tifffile.imwrite(path, np.zeros((5, 20, 30), np.uint16), **options)
        assert describe(str(path))["axes"] == "qyx"
        assert "each of 5 planes is by itself. If they are a volume, write input.axes: zyx" in printed("info", path)


PIXELS = np.zeros((20, 33), np.float32)


def _tiff(folder: Path, **options: Any) -> Path:
    tifffile.imwrite(folder / "a.tif", PIXELS, metadata=None, **options)
    return folder / "a.tif"


def _tiff_of_resolution(folder: Path) -> Path:
    """The unit of an ImageJ file stands, and a resolution of no number at all."""
    path = folder / "a.tif"
    tifffile.imwrite(path, PIXELS, imagej=True, resolution=(5, 5), metadata={"unit": "um"})
    with tifffile.TiffFile(path, mode="r+b") as file:
        file.filehandle.seek(file.pages[0].tags["XResolution"].offset + 4)
        file.filehandle.write(b"\0\0\0\0")
    return path


def _npy(folder: Path) -> Path:
    np.save(folder / "a.npy", PIXELS)
    (folder / "a.npy").write_bytes((folder / "a.npy").read_bytes().replace(b"(20, 33), }  ", b"(-20, -33), }"))
    return folder / "a.npy"


def _ome(transformations: Any, folder: Path) -> Path:
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


STEPS: list[Any] = ["text", True, 3, ["text"], [None], [[]], {"scale": [1, 1]}, [{"type": "scale", "scale": ["a", 1]}]]


ODD: dict[str, Callable[[Path], Path]] = {
    "JSON of a TIFF that does not parse": lambda folder: _tiff(folder, description='{"shape": [20, 33'),
    "shape of a TIFF that is no number": lambda folder: _tiff(folder, description='{"shape": [20, "x"]}'),
    "shape of a TIFF that is text": lambda folder: _tiff(folder, description='{"shape": "ab", "axes": 3}'),
    "ImageJ's words": lambda folder: _tiff(folder, description="ImageJ=1.11a\nimages=x\nslices=a\n"),
    "negative shape": _npy,
    "fill value that its type has not": lambda folder: _zarr(folder, 3, fill_value=-1),
    "the same in v2": lambda folder: _zarr(folder, 2, fill_value=-1),
    "chunks without pixels": lambda folder: _zarr(folder, 2, chunks=[0, 16]),
    **{f"transformations {steps}": partial(_ome, steps) for steps in STEPS},
}


PLACES = {
    "a.cxi": ("entry_1/data_1/data", "entry_1/data_1/translation", "entry_1/instrument_1/detector_1/mask", "entry_1/instrument_1/detector_1/data_dark"),
    "a.ptyd": ("chunks/0/data", "chunks/1/positions", "chunks/0/weights", "meta/energy"),
}  # fmt: skip


@pytest.mark.parametrize(("file", "name"), [(file, name) for file in PLACES for name in PLACES[file]])
def test_a_dataset_without_numbers_is_named(tmp_path: Path, file: str, name: str) -> None:
    path = tmp_path / file
    for odd in ("compound", "bytes", "references"):
        (write_cxi if file == "a.cxi" else write_ptyd)(path)
        with h5py.File(path, "r+") as opened:
            shape = opened[name].shape
            del opened[name]
            ODD_HDF5[odd](opened, name, shape)
        assert f"{path}: {name} is no array of numbers" in _refused(path)


def test_a_file_that_is_not_as_its_format_wants_it_is_refused(tmp_path: Path, config: Path) -> None:
    for folder, make in in_folders(tmp_path, ODD.values()):
        _refused(make(folder))
    untold: list[Callable[[Path], Path]] = [_tiff_of_resolution, partial(_ome, None), partial(_ome, [])]
    for folder, make in in_folders(tmp_path / "0", untold):
        # A pixel size that is not told is unknown.
        assert json.loads(printed("info", make(folder), "--json"))["scale"][-1] == 1.0
    image = config.with_name("noisy.npy")
    image.unlink()
    image.symlink_to("moved.npy")
    said = f"input.path: {image} does not exist: {image} is a link to moved.npy, where nothing is"
    assert said in refused("validate", config, code=BAD_DATA)


def _refused(path: Path) -> str:
    result = ask("info", path)
    assert (result.exit_code, result.stderr[:7]) == (BAD_DATA, "error: ")
    assert path.name in result.stderr
    assert "unexpected" not in result.stderr
    return result.stderr
