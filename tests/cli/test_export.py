"""`recon-cli export`, `preview` and `levels` make any image viewable, say what they did, and refuse what cannot be in plain words."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import rasterio
import tifffile
import zarr
from PIL import Image

import halotile
from halotile.cli.config.loading import load_job
from halotile.cli.screens import screen
from halotile.cli.screens.scan_views import draw_result
from halotile.errors import ConfigError, HalotileError, OutputRefused
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.claim import claim
from halotile.storage.io_threads import IO_THREADS
from halotile.storage.lengths import AT_BEST, AT_WORST, MEASURED
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.scans.scan import PatternComparison, ScanResult
from tests.cli.engine import MonkeyPatch, ask, printed, refused
from tests.faults import run_python
from tests.support import load_denoising, run_inline

PIXELS = np.random.default_rng(0).integers(0, 4000, (2, 3, 600, 90), "u2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    array = zarr.create_array(tmp_path / "a.zarr", data=PIXELS, dimension_names=("t", "c", "y", "x"))
    array.attrs["spatial:transform"] = [10, 0, 500, 0, -10, 900]
    np.save(tmp_path / "b.npy", PIXELS)
    np.save(tmp_path / "wave.npy", np.zeros((9, 9), "complex64"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_plane_and_level_is_written_or_a_part_also_by_a_script(folder: Path) -> None:
    said = printed("export", "a.zarr", "a.ome.tif")
    assert said.startswith("a.ome.tif: 2 × 3 planes of 90 × 600 pixels (width × height), 2 levels, ")
    with tifffile.TiffFile(folder / "a.ome.tif") as file:
        assert [level.shape for level in file.series[0].levels] == [(2, 3, 600, 90), (2, 3, 300, 45)]
        assert np.array_equal(file.asarray(), PIXELS)
    assert printed("export", "a.zarr", "a.tif", "--region", "10:500,20:90", "--plane", "c=1", "--quiet") == ""
    assert np.array_equal(tifffile.imread(folder / "a.tif"), PIXELS[:, 1, 10:500, 20:])
    assert halotile.export("a.zarr", "b.tif", plane="t=0", cog=True) == Path("b.tif")
    with rasterio.open("b.tif") as file:
        assert (file.count, file.shape) == (3, (600, 90))
    with pytest.raises(OutputRefused, match=r"Write another path, or overwrite=True\.$"):
        halotile.export("a.zarr", folder / "b.tif")
    with pytest.raises(ConfigError, match=r"^cog=True: b\.npy says nothing .* Leave cog=True out"):
        halotile.export("b.npy", "c.tif", cog=True)
    zarr.create_array(folder / "packed.zarr", data=PIXELS[0, 0], attributes={"scale_factor": 0.01, "add_offset": 273})
    said = "note: packed.zarr: values are packed with scale_factor 0.01 and add_offset 273"
    assert said in ask("export", "packed.zarr", "packed.tif").stderr


def test_times_and_positions_of_planes_are_those_of_the_file_that_was_denoised(folder: Path) -> None:
    values: dict[str, Any] = {"ExposureTimeUnit": ["ms"] * 6, "DeltaT": [float(n) for n in range(6)]}
    values |= {"ExposureTime": [0.1 * n for n in range(6)], "PositionX": [100.0 + n // 3 for n in range(6)]}
    tifffile.imwrite("in.ome.tif", PIXELS[..., :64, :], ome=True, metadata={"axes": "TCYX", "Plane": values})
    job = "version: 1\njob: denoise\ninput: {path: in.ome.tif}\noutput: {path: o.zarr}\n"
    (folder / "job.yaml").write_text(job + "denoiser: {name: gaussian, sigma: 1.0}\nrun: {workers: 1}\n")
    assert ask("run", "job.yaml").exit_code == 0
    assert ask("export", "o.zarr", "out.ome.tif").exit_code == 0
    assert ask("export", "o.zarr", "part.ome.tif", "--plane", "c=1").exit_code == 0
    assert ask("export", "a.zarr", "none.ome.tif").exit_code == 0
    kept = {name: _plane_values(name) for name in ("in.ome.tif", "out.ome.tif", "part.ome.tif", "none.ome.tif")}
    assert kept["out.ome.tif"] == kept["in.ome.tif"]
    assert kept["part.ome.tif"] == [kept["in.ome.tif"][1], kept["in.ome.tif"][4]]
    assert not any(kept["none.ome.tif"])


def _plane_values(path: str) -> list[dict[str, str]]:
    """The attributes of each plane besides its place."""
    with tifffile.TiffFile(path) as file:
        elements = ElementTree.fromstring(file.ome_metadata or "").findall(".//{*}Plane")
        return [{key: text for key, text in plane.attrib.items() if key[:3] != "The"} for plane in elements]


NOT_EXPORTED = [
    (["a.zarr", "a.png"], "a.png: what is written is a TIFF. Write a name that ends in .tif or .tiff."),
    (["a.zarr", "no/a.tif"], "there is no folder no"),
    (["a.zarr", "a.zarr/a.tif"], "it is the image a.zarr, or inside it"),
    (["a.zarr", "there.tif"], "it already exists. Write another path, or --overwrite."),
    (["a.zarr", "a.tif", "--plane", "z=1"], "the image's axes are tcyx"),
    (["a.zarr", "a.tif", "--region", "0:601,0:5"], "the image has 600 rows and 90 columns"),
    (["wave.npy", "a.tif"], "a.tif: the pixels of wave.npy are complex"),
    (["b.npy", "a.tif", "--cog"], "--cog: b.npy says nothing of its place on Earth"),
    (["a.zarr", "a.tif", "--cog"], "--cog: a.zarr has planes along t, c, and a GeoTIFF has one row of bands"),
]


@pytest.mark.parametrize(("words", "said"), NOT_EXPORTED)
def test_what_cannot_be_is_refused(folder: Path, words: list[str], said: str) -> None:
    (folder / "there.tif").write_text("mine")
    before = sorted(folder.rglob("*"))
    result = refused("export", *words)
    assert result.startswith("error: ")
    assert said in result
    assert (sorted(folder.rglob("*")), (folder / "there.tif").read_text()) == (before, "mine")
    assert ask("export", "a.zarr", "there.tif", "--overwrite").exit_code == 0


def test_an_unfinished_output_is_refused(folder: Path) -> None:
    (folder / "job.yaml").write_text(
        "version: 1\njob: denoise\ninput: {path: b.npy}\noutput: {path: out.zarr}\ndenoiser: {name: none}\n"
    )
    plan = make_plan(load_job(folder / "job.yaml"))
    with claim(plan):
        pass
    assert "left to do" in refused("export", "out.zarr", "out.tif", code=4)
    assert not (folder / "out.tif").exists()


@pytest.mark.parametrize("bound", [MEASURED, AT_WORST, AT_BEST])
def test_no_text_of_a_drawn_result_is_cut_off(bound: float, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    Figure = pytest.importorskip("matplotlib.figure").Figure
    outside: list[str] = []
    save = Figure.savefig

    def look(figure: Any, *args: Any, **options: Any) -> None:
        save(figure, *args, **options)
        for axes in figure.axes:
            box = axes.xaxis.label.get_window_extent()
            if axes.axison and (box.x0 < 0 or box.x1 > figure.bbox.x1 or box.y0 < 0):
                outside.append(axes.get_xlabel())

    rings: dict[str, Any] = {f"ring_{name}": np.ones(9) for name in ("correlation", "threshold")}
    rings |= {"ring_frequency": np.arange(9) * 3e5}
    rings |= {"resolution": np.float64(1.8214e-7), "resolution_bound": np.float64(bound)}
    places, whole = np.arange(8.0).reshape(4, 2) * 1e-7, (slice(None), slice(None))
    pixels = np.exp(1j * np.arange(64.0).reshape(8, 8))
    counts = np.abs(pixels)[None].repeat(3, 0)
    compared = PatternComparison(np.array([123456, 7, 9]), counts, counts, np.full(3, -1.2345e-7))
    result = ScanResult(pixels, pixels[None], (1e-8, 1e-8), np.ones(3), places, places, whole, rings, compared)
    monkeypatch.setattr(Figure, "savefig", look)
    draw_result(tmp_path / "sheet.png", result)
    assert outside == []


@pytest.mark.parametrize(("labels", "axes"), [(("dapi", "gfp", "rfp"), "CYX"), (("Red", "Green", "Blue"), "YXS")])
def test_channels_keep_names_of_their_own(folder: Path, labels: tuple[str, ...], axes: str) -> None:
    described = {"Name": labels, "Color": [-0x00FFFF01, 0x00FF00FF, 0x0000FFFF]}
    tifffile.imwrite(folder / "in.tif", PIXELS[0], ome=True, metadata={"axes": "CYX", "Channel": described})
    printed("export", "in.tif", "named.tif")
    with tifffile.TiffFile("named.tif") as file:
        assert file.series[0].axes == axes
        assert all(f'Name="{label}"' in str(file.ome_metadata) for label in labels) == (axes == "CYX")


PICTURE = np.random.default_rng(0).integers(0, 4000, (70, 90), "u2")


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    np.save(tmp_path / "a.npy", PICTURE)
    np.save(tmp_path / "stack.npy", np.stack([PICTURE, PICTURE[::-1]]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_png(path: Path) -> Any:
    return np.asarray(Image.open(path))


def test_the_whole_is_drawn_small_a_region_with_the_contrast_asked_for_and_two_side_by_side(pictures: Path) -> None:
    result = ask("preview", "a.npy", "a.png", "--size", "30")
    assert (result.exit_code, result.stderr, read_png(pictures / "a.png").shape) == (0, "", (24, 30))
    assert result.stdout.startswith("a.png: 30 × 24 pixels (width × height), each the mean of 3 × 3; black is ")
    said = "error: the path is a.png: it already exists. Write another path, or --overwrite.\n"
    assert refused("preview", "a.npy", "a.png") == said
    words = ("--region", "10:30,5:50", "--range", "-1000", "4000", "--overwrite", "--quiet")
    assert printed("preview", "a.npy", "a.png", *words) == ""
    (run := RunDirectory.beside(pictures / "a.npy")).create()
    run.write_status({"state": "running"})
    missing = "; the run of a.npy is not finished, and its missing blocks are 0\n"
    assert printed("preview", "a.npy", "a.png", *words[:-1]).endswith(missing)
    part = PICTURE[10:30, 5:50].astype(float)
    assert np.array_equal(read_png(pictures / "a.png"), ((part + 1000) / 5000 * 255).round())
    np.save(pictures / "b.npy", PICTURE // 2)
    printed("preview", "a.npy", "b.png", "--against", "b.npy", "--range", "0", "4000")
    both = read_png(pictures / "b.png").astype(int)
    assert np.abs(both[:, :90] - 2 * both[:, -90:]).max() <= 2


def test_modulus_and_phase_of_complex_pixels_are_drawn(pictures: Path) -> None:
    phases = np.tile([np.pi - 0.1, -np.pi + 0.1], (70, 45))
    np.save(pictures / "wave.npy", (PICTURE * np.exp(1j * phases)).astype("complex64"))
    result = ask("preview", "wave.npy", "wave.png", "--range", "0", "4000", "--region", "0:70,0:90")
    assert (result.exit_code, result.stdout.count("modulus and phase, the phase from -π to π")) == (0, 1)
    modulus, phase = read_png(pictures / "wave.png")[:, :90], read_png(pictures / "wave.png")[:, -90:]
    assert np.abs(modulus - PICTURE * (255 / 4000)).max() < 0.6
    np.testing.assert_array_equal(phase[0, :2], np.rint((phases[0, :2] / np.pi + 1) * 127.5))
    assert ask("preview", "wave.npy", "small.png", "--size", "45").exit_code == 0
    small = read_png(pictures / "small.png")[:, -45:].astype(int)
    assert np.minimum(small, 255 - small).max() < 10, "angles on both sides of ±π were averaged"


def test_a_plane_is_chosen_by_its_axis(pictures: Path) -> None:
    first, second = (ask("preview", "stack.npy", f"{z}.png", "--plane", f"q={z}", "--range", "0", "4000") for z in "01")
    assert first.stdout.endswith("; plane q=0\n")
    assert second.stdout.endswith("; plane q=1\n")
    assert np.array_equal(read_png(pictures / "0.png"), read_png(pictures / "1.png")[::-1])
    assert ask("preview", "stack.npy", "default.png").stdout.endswith("; plane q=0\n")


CANNOT: list[tuple[str, int, str]] = [
    ("a.npy a.jpg", 2, "a.jpg: a preview is a PNG. Write a name that ends in .png."),
    ("a.npy a", 2, "a: a preview is a PNG"),
    ("a.npy a.TIFF", 2, "For a TIFF of every pixel write: recon-cli export a.npy a.TIFF"),
    ("a.npy no/a.png", 2, "there is no folder no"),
    ("a.npy a.png --region 1:2", 2, "--region 1:2: not rows and columns"),
    ("a.npy a.png --region 0:71,0:9", 2, "the image has 70 rows and 90 columns"),
    ("a.npy a.png --region 0:7,0:9 --size 5", 2, "Leave one of them out"),
    ("a.npy a.png --size 0", 2, "--size 0: an image needs a pixel"),
    ("a.npy a.png --plane z", 2, "--plane z: not a number for each axis"),
    ("a.npy a.png --plane z=0", 2, "the image's axes are yx"),
    ("stack.npy a.png --plane q=0,q=1", 2, "each axis once"),
    ("stack.npy a.png --plane q=2", 2, "Write 0 to 1"),
    ("a.npy a.png --range 5 5", 2, "--range 5 5: the black level must be below"),
    ("a.npy a.png --against small.npy", 2, "9 × 8 pixels (width × height) cannot be laid beside 90 × 70"),
    ("a.png a.png --overwrite", 2, "it is the image a.png, or inside it"),
    ("p.zarr p.zarr/a.png", 2, "it is the image p.zarr, or inside it"),
    ("a.npy p.zarr --overwrite", 2, "p.zarr"),
    ("gone.npy a.png", 4, "nothing is there"),
    ("damaged.zarr a.png", 4, "damaged"),
]


def test_a_preview_that_cannot_be_is_refused(pictures: Path) -> None:
    np.save(pictures / "small.npy", PICTURE[:8, :9])
    zarr.create_array(pictures / "p.zarr", data=PICTURE)
    zarr.create_array(pictures / "damaged.zarr", data=PICTURE, chunks=(70, 90))
    (pictures / "damaged.zarr/c/0/0").write_bytes(b"x")
    before = {path: path.stat().st_mtime_ns for path in pictures.rglob("*")}
    for words, code, said in CANNOT:
        result = refused("preview", *words.split(), code=code)
        assert result.startswith("error: ")
        assert said in result
        assert {path: path.stat().st_mtime_ns for path in pictures.rglob("*")} == before


@pytest.mark.parametrize(
    ("terminal", "part"), [("kitty", r"\x1b_G[^;]*;([^\x1b]*)\x1b\\"), ("WezTerm", r"inline=1;size=\d+:(.*)\a")]
)
def test_a_terminal_that_can_draws_the_preview(
    pictures: Path, monkeypatch: MonkeyPatch, terminal: str, part: str
) -> None:
    np.save(pictures / "grain.npy", np.random.default_rng(0).standard_normal((120, 120)))
    monkeypatch.setattr(screen, "is_terminal", lambda: True)
    monkeypatch.setenv("TERM", f"xterm-{terminal}")
    monkeypatch.setenv("TERM_PROGRAM", terminal)
    text = printed("preview", "grain.npy", "grain.png", "--inline")
    assert base64.b64decode("".join(re.findall(part, text))) == (pictures / "grain.png").read_bytes()
    monkeypatch.setenv("TERM_PROGRAM", "none")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("LC_TERMINAL", raising=False)
    assert "Leave --inline out" in refused("preview", "grain.npy", "other.png", "--inline")
    monkeypatch.undo()
    monkeypatch.chdir(pictures)
    assert "not into a file" in refused("preview", "grain.npy", "other.png", "--inline")
    assert not (pictures / "other.png").exists()


ARGUMENTS: list[tuple[str, dict[str, Any], str]] = [
    ("there.png", {}, r"it already exists\. Write another path, or overwrite=True\.$"),
    ("a.png", {"size": 0}, "^size 0: an image"),
    ("a.png", {"size": 1, "region": "0:1,0:1"}, "^size and region: "),
    ("a.png", {"region": "1:2"}, "^region 1:2: not rows"),
    ("a.png", {"plane": "z"}, "^plane z: .*Write it as plane t=0,c=1"),
    ("a.png", {"values": (5, 5)}, "^values 5 5: "),
    ("a.png", {"against": "small.npy"}, "^against small.npy: "),
    ("a.tif", {}, r"For a TIFF of every pixel write: halotile\.export\(\.\.\.\)$"),
]


@pytest.mark.usefixtures("pictures")
def test_a_script_is_told_of_arguments() -> None:
    np.save("small.npy", PICTURE[:8, :9])
    Path("there.png").touch()
    for file, arguments, said in ARGUMENTS:
        with pytest.raises(HalotileError, match=said) as refusal:
            halotile.preview("a.npy", file, **arguments)
        assert "--" not in str(refusal.value)


@pytest.mark.parametrize("words", [["preview", "scan.tif", "a.png"], ["export", "scan.tif", "a.tif"]])
def test_no_extra_package_is_needed(pictures: Path, words: list[str]) -> None:
    tifffile.imwrite(pictures / "scan.tif", PICTURE, compression="zlib", predictor=True)
    without = (
        "sys.modules |= dict.fromkeys(['PIL', 'imagecodecs', 'matplotlib', 'imageio', 'skimage', 'torch', 'dask'])"
    )
    argv = f"sys.argv = ['recon-cli', *{words!r}]"
    done = run_python("-c", f"import sys; {without}; {argv}\nfrom halotile.cli.main import main\nmain()", cwd=pictures)
    assert (done.returncode, done.stderr) == (0, "")
    assert (pictures / words[-1]).exists()


def test_channels_are_drawn_in_their_colours_and_contrasts(pictures: Path) -> None:
    ramp = np.tile(np.arange(50, dtype="u2") * 10, (40, 1))
    stack = np.stack([ramp, ramp[:, ::-1]])
    names: dict[str, Any] = {"Name": ["DAPI", "GFP"], "Color": [0x0000FFFF, 0x00FF00FF]}
    tifffile.imwrite("c.tif", stack, ome=True, metadata={"axes": "CYX", "Channel": names})
    whole = ("--region", "0:40,0:50", "--range", "0", "490")
    assert "channels DAPI, GFP in their colours" in printed("preview", "c.tif", "c.png", *whole)
    drawn, level = read_png(pictures / "c.png"), (ramp / 490 * 255).round()
    assert [np.abs(drawn[..., n] - want).max() <= 1 for n, want in enumerate((0, level[:, ::-1], level))] == [True] * 3
    printed("preview", "c.tif", "own.png", "--region", "0:40,0:50")
    assert read_png(pictures / "own.png")[0, -1].tolist() == [0, 0, 255]
    assert printed("preview", "c.tif", "g.png", "--plane", "c=GFP", *whole).rstrip().endswith("plane c=1")
    assert np.abs(read_png(pictures / "g.png") - level[:, ::-1]).max() <= 1
    assert "no channel GFPP, but DAPI (0), GFP (1). Did you mean GFP?" in refused(
        "preview", "c.tif", "x.png", "--plane", "c=GFPP"
    )


TALL = np.random.default_rng(0).integers(0, 4000, (2100, 1500), "u2")


def save_image(path: Path, pixels: Any = TALL) -> Path:
    group = zarr.open_group(path, mode="w")
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"datasets": [{"path": "0"}]}]}
    group.create_array("0", data=pixels, chunks=(256, 256))
    return path


@pytest.fixture
def levelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_image(tmp_path / "cells.zarr")
    zarr.create_array(tmp_path / "bare.zarr", data=TALL, chunks=(256, 256))
    tifffile.imwrite(tmp_path / "scan.tif", TALL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_levels_are_added_once_also_by_a_script(levelled: Path) -> None:
    assert printed("levels", "cells.zarr") == "cells.zarr: 2 levels added, down to 525 × 375\n"
    assert printed("levels", "cells.zarr") == "cells.zarr has 3 levels down to 525 × 375: nothing to do\n"
    assert halotile.info("cells.zarr")["levels"] == [[2100, 1500], [1050, 750], [525, 375]]
    assert ask("levels", "cells.zarr", "--quiet").output == ""
    assert IO_THREADS.count == 1
    assert halotile.add_levels("cells.zarr") == []
    save_image(levelled / "cells.zarr")
    assert halotile.add_levels(levelled / "cells.zarr" / "0") == [(1050, 750), (525, 375)]


def test_axes_that_nothing_names_are_to_be_written(levelled: Path) -> None:
    zarr.create_array(levelled / "stack.zarr", data=TALL[:40].reshape(3, 20, 1000))
    words, _, job = refused("levels", "stack.zarr").partition("\n\n")
    assert words.endswith("write this, with the right axes, to levels.yaml and type `recon-cli run levels.yaml`:")
    (levelled / "levels.yaml").write_text(job.replace("axes: qyx", "axes: zyx"))
    run_inline(load_denoising(levelled / "levels.yaml"))
    assert halotile.info("stack.levels.zarr")["axes"] == "zyx"


@pytest.mark.parametrize("path", ["bare.zarr", "scan.tif"])
def test_another_image_gets_the_job_that_writes_it_with_levels(levelled: Path, path: str) -> None:
    words, _, job = refused("levels", path).partition("\n\n")
    assert re.match(
        rf"error: {path} is .*: levels cannot be added to it\. To write it as an image with levels, ", words
    )
    (levelled / "levels.yaml").write_text(job)
    run_inline(load_denoising(levelled / "levels.yaml"))
    (output,) = levelled.glob("*.levels.zarr")
    assert halotile.info(output)["levels"] == [[2100, 1500], [1050, 750], [525, 375]]
    np.testing.assert_array_equal(zarr.open_group(output)["0"][...], TALL)
    halotile.add_levels("cells.zarr")
    for level in ("1", "2"):
        np.testing.assert_array_equal(zarr.open_group(output)[level][...], zarr.open_group("cells.zarr")[level][...])


def test_levels_of_no_image_are_refused(levelled: Path) -> None:
    for name in ("", "A", "B"):
        zarr.open_group(levelled / "wells.zarr" / name, mode="w")
    for name in ("A", "B"):
        save_image(levelled / "wells.zarr" / name / "1")
    several = "wells.zarr contains several images: A/1, B/1. Write the path of one, such as wells.zarr/A/1."
    rows = [("nothing.zarr", 4, "nothing.zarr: nothing is there"), ("wells.zarr", 2, several)]
    for path, code, said in [*rows, (".", 4, "a directory without Zarr metadata of its own")]:
        assert said in refused("levels", path, code=code)


def test_a_url_is_refused_with_a_job_that_reads_it(monkeypatch: pytest.MonkeyPatch, levelled: Path) -> None:
    from halotile.storage import arrays

    here = arrays.open_source("cells.zarr")
    monkeypatch.setattr(arrays, "open_source", lambda _: here)
    with pytest.raises(
        ConfigError,
        match=r"^s3://bucket/a\.zarr is at a URL: levels cannot be added(.|\n)*path: \"?s3://bucket/a\.zarr",
    ):
        halotile.add_levels("s3://bucket/a.zarr")
