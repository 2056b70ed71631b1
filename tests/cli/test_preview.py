"""`recon-cli preview` makes any image viewable, and refuses what cannot be in plain words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr
from PIL import Image

import halotile
from halotile.errors import HalotileError
from tests.cli.engine import MonkeyPatch, ask, printed, refused

PIXELS = np.random.default_rng(0).integers(0, 4000, (70, 90), "u2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    np.save(tmp_path / "a.npy", PIXELS)
    np.save(tmp_path / "stack.npy", np.stack([PIXELS, PIXELS[::-1]]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_png(path: Path) -> Any:
    return np.asarray(Image.open(path))


def test_the_whole_is_drawn_small(folder: Path) -> None:
    result = ask("preview", "a.npy", "a.png", "--size", "30")
    assert (result.exit_code, read_png(folder / "a.png").shape) == (0, (24, 30))
    assert result.stdout.startswith("a.png: 30 × 24 pixels (width × height), each the mean of 3 × 3; black is ")
    assert result.stderr == ""


def test_a_region_is_drawn_with_the_contrast_asked_for(folder: Path) -> None:
    printed("preview", "a.npy", "a.png", "--region", "10:30,5:50", "--range", "-1000", "4000")
    part = PIXELS[10:30, 5:50].astype(float)
    assert np.array_equal(read_png(folder / "a.png"), ((part + 1000) / 5000 * 255).round())


def test_two_pictures_are_laid_side_by_side(folder: Path) -> None:
    np.save(folder / "b.npy", PIXELS // 2)
    assert ask("preview", "a.npy", "a.png", "--against", "b.npy", "--range", "0", "4000").exit_code == 0
    both = read_png(folder / "a.png").astype(int)
    assert np.abs(both[:, :90] - 2 * both[:, -90:]).max() <= 2


def test_modulus_and_phase_of_complex_pixels_are_drawn(folder: Path) -> None:
    phases = np.tile([np.pi - 0.1, -np.pi + 0.1], (70, 45))
    np.save(folder / "wave.npy", (PIXELS * np.exp(1j * phases)).astype("complex64"))
    result = ask("preview", "wave.npy", "wave.png", "--range", "0", "4000", "--region", "0:70,0:90")
    assert (result.exit_code, result.stdout.count("modulus and phase, the phase from -π to π")) == (0, 1)
    modulus, phase = read_png(folder / "wave.png")[:, :90], read_png(folder / "wave.png")[:, -90:]
    assert np.abs(modulus - PIXELS * (255 / 4000)).max() < 0.6
    np.testing.assert_array_equal(phase[0, :2], np.rint((phases[0, :2] / np.pi + 1) * 127.5))
    assert ask("preview", "wave.npy", "small.png", "--size", "45").exit_code == 0
    small = read_png(folder / "small.png")[:, -45:].astype(int)
    assert np.minimum(small, 255 - small).max() < 10, "angles on both sides of ±π were averaged"


def test_a_plane_is_chosen_by_its_axis(folder: Path) -> None:
    first, second = (ask("preview", "stack.npy", f"{z}.png", "--plane", f"q={z}", "--range", "0", "4000") for z in "01")
    assert first.stdout.endswith("; plane q=0\n")
    assert second.stdout.endswith("; plane q=1\n")
    assert np.array_equal(read_png(folder / "0.png"), read_png(folder / "1.png")[::-1])
    assert ask("preview", "stack.npy", "default.png").stdout.endswith("; plane q=0\n")


@pytest.mark.parametrize("name", ["a.zarr", "a.png"])
def test_what_stands_there_is_replaced_only_when_asked(folder: Path, name: str) -> None:
    if name == "a.zarr":
        zarr.create_array(folder / name, shape=(3, 3), dtype="u1")
        refused("preview", "a.npy", name, "--overwrite")
        assert (folder / name / "zarr.json").exists()
        return
    (folder / name).write_text("mine")
    assert (
        refused("preview", "a.npy", name)
        == f"error: the path is {name}: something stands there. Write another path, or --overwrite.\n"
    )
    assert (folder / name).read_text() == "mine"
    assert ask("preview", "a.npy", name, "--overwrite").exit_code == 0
    assert (folder / name).stat().st_size > 100


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["a.npy", "a.jpg"], 2, "a.jpg: a preview is a PNG. Write a name that ends in .png."),
        (["a.npy", "a"], 2, "a: a preview is a PNG"),
        (["a.npy", "a.TIFF"], 2, "For a TIFF of every pixel write: recon-cli export a.npy a.TIFF"),
        (["a.npy", "no/a.png"], 2, "there is no folder no"),
        (["a.npy", "a.png", "--region", "1:2"], 2, "--region 1:2: not rows and columns"),
        (["a.npy", "a.png", "--region", "0:71,0:9"], 2, "the image has 70 rows and 90 columns"),
        (["a.npy", "a.png", "--region", "0:7,0:9", "--size", "5"], 2, "Leave one of them out"),
        (["a.npy", "a.png", "--size", "0"], 2, "--size 0: an image needs a pixel"),
        (["a.npy", "a.png", "--plane", "z"], 2, "--plane z: not a number for each axis"),
        (["a.npy", "a.png", "--plane", "z=0"], 2, "the image's axes are yx"),
        (["stack.npy", "a.png", "--plane", "q=0,q=1"], 2, "each axis once"),
        (["stack.npy", "a.png", "--plane", "q=2"], 2, "Write 0 to 1"),
        (["a.npy", "a.png", "--range", "5", "5"], 2, "--range 5 5: the black level must be below"),
        (
            ["a.npy", "a.png", "--against", "small.npy"],
            2,
            "9 × 8 pixels (width × height) cannot be laid beside 90 × 70",
        ),
        (["a.png", "a.png", "--overwrite"], 2, "it is the image a.png, or inside it"),
        (["p.zarr", "p.zarr/a.png"], 2, "it is the image p.zarr, or inside it"),
        (["gone.npy", "a.png"], 4, "nothing is there"),
        (["damaged.zarr", "a.png"], 4, "damaged"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, words: list[str], code: int, said: str) -> None:
    np.save(folder / "small.npy", PIXELS[:8, :9])
    tifffile.imwrite(folder / "scan.tif", PIXELS)
    zarr.create_array(folder / "p.zarr", data=PIXELS)
    zarr.create_array(folder / "damaged.zarr", data=PIXELS, chunks=(70, 90))
    (folder / "damaged.zarr/c/0/0").write_bytes(b"x")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    result = refused("preview", *words, code=code)
    assert result.startswith("error: ")
    assert said in result
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize(
    ("file", "arguments", "said"),
    [
        ("there.png", {}, r"something stands there\. Write another path, or overwrite=True\.$"),
        ("a.png", {"size": 0}, "^size 0: an image"),
        ("a.png", {"size": 1, "region": "0:1,0:1"}, "^size and region: "),
        ("a.png", {"region": "1:2"}, "^region 1:2: not rows"),
        ("a.png", {"region": "0:71,0:9"}, "^region 0:71,0:9: the image has"),
        ("a.png", {"plane": "z"}, "^plane z: .*Write it as plane t=0,c=1"),
        ("a.png", {"plane": "z=0"}, "^plane z=0: the image's axes"),
        ("a.png", {"values": (5, 5)}, "^values 5 5: "),
        ("a.png", {"against": "small.npy"}, "^against small.npy: "),
        ("a.tif", {}, r"For a TIFF of every pixel write: halotile\.export\(\.\.\.\)$"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_script_is_told_of_arguments(file: str, arguments: dict[str, Any], said: str) -> None:
    np.save("small.npy", PIXELS[:8, :9])
    Path("there.png").touch()
    with pytest.raises(HalotileError, match=said) as refusal:
        halotile.preview("a.npy", file, **arguments)
    assert "--" not in str(refusal.value)


@pytest.mark.parametrize("form", ["zarr", "tif", "npy", "h5"])
def test_every_format_is_drawn_alike(folder: Path, form: str) -> None:
    pixels = np.full((70, 90), np.nan, np.float32)
    pixels[:, 10:] = np.linspace(0, 1, 80)
    if form == "zarr":
        zarr.create_array(folder / "b.zarr", data=pixels, chunks=(32, 32))
    elif form == "tif":
        tifffile.imwrite(folder / "b.tif", pixels, compression="zlib", tile=(32, 32))
    elif form == "npy":
        np.save(folder / "b.npy", pixels)
    else:
        import h5py

        with h5py.File(folder / "b.h5", "w") as file:
            file["image"] = pixels
    assert ask("preview", f"b.{form}", "b.png").exit_code == 0
    image = read_png(folder / "b.png")
    assert (image[:, :10] == 0).all()
    assert (np.diff(image[0, 10:].astype(int)) >= 0).all()
    assert image[0, -1] == 255


def test_quiet_says_nothing(folder: Path) -> None:
    result = ask("preview", "a.npy", "a.png", "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("words", [["preview", "scan.tif", "a.png"], ["export", "scan.tif", "a.tif"]])
def test_no_extra_package_is_needed(folder: Path, words: list[str]) -> None:
    tifffile.imwrite(folder / "scan.tif", PIXELS, compression="zlib", predictor=True)
    code = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(['PIL', 'imagecodecs', 'matplotlib', 'imageio', 'skimage', 'torch', 'dask'])\n"
        "from halotile.cli.main import main\n"
        f"sys.argv = ['recon-cli', *{words!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / words[-1]).exists()


def test_channels_are_drawn_in_their_colours_and_contrasts(folder: Path) -> None:
    ramp = np.tile(np.arange(50, dtype="u2") * 10, (40, 1))
    stack = np.stack([ramp, ramp[:, ::-1]])
    names: dict[str, Any] = {"Name": ["DAPI", "GFP"], "Color": [0x0000FFFF, 0x00FF00FF]}
    tifffile.imwrite("c.tif", stack, ome=True, metadata={"axes": "CYX", "Channel": names})
    whole = ("--region", "0:40,0:50", "--range", "0", "490")
    assert "channels DAPI, GFP in their colours" in printed("preview", "c.tif", "c.png", *whole)
    drawn, level = read_png(folder / "c.png"), (ramp / 490 * 255).round()
    assert [np.abs(drawn[..., n] - want).max() <= 1 for n, want in enumerate((0, level[:, ::-1], level))] == [True] * 3
    printed("preview", "c.tif", "own.png", "--region", "0:40,0:50")
    assert read_png(folder / "own.png")[0, -1].tolist() == [0, 0, 255]
    assert printed("preview", "c.tif", "g.png", "--plane", "c=GFP", *whole).rstrip().endswith("plane c=1")
    assert np.abs(read_png(folder / "g.png") - level[:, ::-1]).max() <= 1
    assert "no channel GFPP, but DAPI (0), GFP (1). Did you mean GFP?" in refused(
        "preview", "c.tif", "x.png", "--plane", "c=GFPP"
    )
