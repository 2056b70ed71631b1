"""An image is described without being read, with a configuration that works as it stands."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr
from PIL import Image

from halotile.cli.info import describe, info_rows
from halotile.graphs.plans.plan import make_plan
from tests.cli.engine import MonkeyPatch, ask, printed, refused
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


@pytest.mark.parametrize(
    ("inside", "path", "output"),
    [
        ("", "plate.zarr/A/1/0", "plate.zarr.A.1.0.denoised.zarr"),
        ("", "plate.zarr/A/1/*", "{stem}.denoised.zarr"),
        ("plate.zarr/A/1/0", ".", "plate.zarr.A.1.0.denoised.zarr"),
        ("plate.zarr/A/1", "0", "plate.zarr.A.1.0.denoised.zarr"),
        ("plate.zarr/A", "../../alone.zarr/", "alone.denoised.zarr"),
        ("alone.zarr", ".", "alone.denoised.zarr"),
    ],
)
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


def test_sizes_of_channels_are_not_shown_as_sizes_of_pixels(tmp_path: Path) -> None:
    facts = describe(str(save_channels(tmp_path / "c.zarr", [0.5, 0.1, 0.2])))
    assert dict(info_rows(facts))["pixel size"] == "y 0.1 micrometer, x 0.2 micrometer"
    facts = describe(str(save_channels(tmp_path / "d.zarr", [0.5, 1.0, 1.0], unit=None)))
    assert dict(info_rows(facts))["pixel size"] == "not known"


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


def test_the_value_of_holes_is_shown(tmp_path: Path) -> None:
    tag = (42113, "s", 0, "-9999", True)
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((20, 30), np.float32), extratags=[tag])
    assert "pixels of -9999, by the file" in ask("info", tmp_path / "a.tif").stdout
    facts = json.loads(ask("info", tmp_path / "a.tif", "--json").stdout)
    assert facts["nodata"] == -9999


def test_pages_without_a_meaning_are_told_with_what_makes_them_a_volume(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "stack.tif", np.zeros((5, 20, 30), np.uint16))
    text = ask("info", tmp_path / "stack.tif").stdout
    assert "each of 5 planes is by itself. If they are a volume, write input.axes: zyx" in text


def test_pages_are_called_q_however_the_file_came_to_be(tmp_path: Path) -> None:
    for name, options in {"shaped": {}, "plain": {"metadata": None}}.items():
        tifffile.imwrite(tmp_path / f"{name}.tif", np.zeros((5, 20, 30), np.uint16), **options)
        assert describe(str(tmp_path / f"{name}.tif"))["axes"] == "qyx"


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
    rng = np.random.default_rng(0)
    pixels = largest * np.clip(0.5 + 0.1 * rng.standard_normal((200, 180)), 0, 1)
    np.save(tmp_path / "a.npy", pixels.astype(dtype))
    config = tmp_path / "config.yaml"
    config.write_text(describe(str(tmp_path / "a.npy"))["config"])
    plan = make_plan(load_denoising(config))
    scale = 65535 if dtype == "uint16" else 1
    noise: Any = plan.identity["noise_level"]
    assert np.isclose(noise * scale, 0.1 * largest, rtol=0.1)


def test_a_picture_that_is_not_there_is_bad_data(tmp_path: Path) -> None:
    assert refused("info", tmp_path / "gone.tif", code=4).startswith("error: ")


def test_the_series_of_a_tiff_are_listed(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        file.write(np.zeros((20, 30), np.uint8), photometric="minisblack", metadata=None)
        file.write(np.zeros((40, 50), np.uint16), photometric="minisblack", metadata=None)
    text = ask("info", tmp_path / "a.tif").stdout
    assert "2 series, 0 of 20 × 30, 1 of 40 × 50: this is series 0. For another, write input.dataset: 1" in text
    assert "1: 40 × 50" in text
    text = ask("info", tmp_path / "a.tif", "--dataset", "1").stdout
    assert "this is series 1. For another, write input.dataset: 0" in text
    facts = json.loads(ask("info", tmp_path / "a.tif", "--json").stdout)
    assert facts["series"] == [[20, 30], [40, 50]]


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


def test_a_folder_without_images_is_named_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("none")
    assert "a directory of 1 entry without" in refused("info", tmp_path, code=4)


def test_no_library_complains_about_a_value_that_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tag = (42113, "s", 0, "-3.4028234663852886e+38", True)
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((20, 30), np.float32), extratags=[tag])
    assert describe(str(tmp_path / "a.tif"))["nodata"] == np.finfo(np.float32).min
    assert caplog.records == []


def test_axes_of_a_climate_model_are_time_and_space(tmp_path: Path) -> None:
    names = ("time", "lat", "lon")
    zarr.create_array(tmp_path / "a.zarr", data=np.zeros((5, 20, 30), np.float32), dimension_names=names)
    facts = describe(str(tmp_path / "a.zarr"))
    assert (facts["axes"], facts["remarks"]) == ("tyx", [])


def test_a_pixel_size_is_known_or_not_in_the_plan_as_well(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", noisy_image((40, 30)))
    save_channels(tmp_path / "c.zarr", [0.5, 0.1, 0.2])
    config = tmp_path / "config.yaml"
    for name, words in (
        ("a.npy", "float32, pixel size not known"),
        ("c.zarr", "uint16, pixel size y 0.1 micrometer, x 0.2 micrometer"),
    ):
        config.write_text(describe(str(tmp_path / name))["config"])
        assert words in printed("plan", config, "--set", "denoiser={name: none}")
