"""`recon-cli export` writes any image as one TIFF with levels, and refuses what cannot be in plain words."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import rasterio
import tifffile
import zarr

import halotile
from halotile.cli.config.loading import load_job
from halotile.cli.screens.scan_views import draw_result
from halotile.errors import ConfigError, OutputRefused
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.claim import claim
from halotile.storage.scans.lengths import AT_BEST, AT_WORST, MEASURED
from halotile.storage.scans.scan import PatternComparison, ScanResult
from tests.cli.engine import MonkeyPatch, ask, printed, refused

PIXELS = np.random.default_rng(0).integers(0, 4000, (2, 3, 600, 90), "u2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    array = zarr.create_array(tmp_path / "a.zarr", data=PIXELS, dimension_names=("t", "c", "y", "x"))
    array.attrs["spatial:transform"] = [10, 0, 500, 0, -10, 900]
    np.save(tmp_path / "b.npy", PIXELS)
    np.save(tmp_path / "wave.npy", np.zeros((9, 9), "complex64"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_plane_and_level_is_written(folder: Path) -> None:
    result = ask("export", "a.zarr", "a.ome.tif")
    assert result.stdout.startswith("a.ome.tif: 2 × 3 planes of 90 × 600 pixels (width × height), 2 levels, "), (
        result.stderr
    )
    with tifffile.TiffFile(folder / "a.ome.tif") as file:
        assert [level.shape for level in file.series[0].levels] == [(2, 3, 600, 90), (2, 3, 300, 45)]
        assert np.array_equal(file.asarray(), PIXELS)


def test_a_part_of_some_planes_is_written(folder: Path) -> None:
    assert ask("export", "a.zarr", "a.tif", "--region", "10:500,20:90", "--plane", "c=1", "--quiet").stdout == ""
    assert np.array_equal(tifffile.imread(folder / "a.tif"), PIXELS[:, 1, 10:500, 20:])


def test_times_and_positions_of_planes_are_those_of_the_file_that_was_denoised(folder: Path) -> None:
    values: dict[str, Any] = {
        "ExposureTime": [0.1 * n for n in range(6)],
        "ExposureTimeUnit": ["ms"] * 6,
        "PositionX": [100.0 + n // 3 for n in range(6)],
        "DeltaT": [float(n) for n in range(6)],
    }
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a.zarr", "a.png"], "a.png: what is written is a TIFF. Write a name that ends in .tif or .tiff."),
        (["a.zarr", "no/a.tif"], "there is no folder no"),
        (["a.zarr", "a.zarr/a.tif"], "it is the image a.zarr, or inside it"),
        (["a.zarr", "there.tif"], "something stands there. Write another path, or --overwrite."),
        (["a.zarr", "a.tif", "--plane", "z=1"], "the image's axes are tcyx"),
        (["a.zarr", "a.tif", "--region", "0:601,0:5"], "the image has 600 rows and 90 columns"),
        (["wave.npy", "a.tif"], "a.tif: the pixels of wave.npy are complex"),
        (["b.npy", "a.tif", "--cog"], "--cog: b.npy says nothing of its place on Earth"),
        (["a.zarr", "a.tif", "--cog"], "--cog: a.zarr has planes along t, c, and a GeoTIFF has one row of bands"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, words: list[str], said: str) -> None:
    (folder / "there.tif").write_text("mine")
    before = sorted(folder.rglob("*"))
    result = refused("export", *words)
    assert result.startswith("error: ")
    assert said in result
    assert (sorted(folder.rglob("*")), (folder / "there.tif").read_text()) == (before, "mine")
    assert ask("export", "a.zarr", "there.tif", "--overwrite").exit_code == 0


def test_a_script_is_told_of_arguments(folder: Path) -> None:
    assert halotile.export("a.zarr", "a.tif", plane="t=0", cog=True) == Path("a.tif")
    with rasterio.open("a.tif") as file:
        assert (file.count, file.shape) == (3, (600, 90))
    with pytest.raises(OutputRefused, match=r"Write another path, or overwrite=True\.$"):
        halotile.export("a.zarr", folder / "a.tif")
    with pytest.raises(ConfigError, match=r"^cog=True: b\.npy says nothing .* Leave cog=True out"):
        halotile.export("b.npy", "b.tif", cog=True)


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

    rings: dict[str, Any] = {
        "ring_frequency": np.arange(9) * 3e5,
        "ring_correlation": np.ones(9),
        "ring_threshold": np.ones(9),
    }
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
    group = zarr.open_group(folder / "named.zarr", mode="w")
    group.create_array("0", data=PIXELS[0])
    window = {"min": 0, "max": 4000, "start": 0, "end": 4000}
    named = zip(labels, ("FF0000", "00FF00", "0000FF"), strict=True)
    channels = [{"label": label, "color": color, "active": True, "window": window} for label, color in named]
    steps = [{"type": "scale", "scale": [1, 1, 1]}]
    image = {
        "axes": [{"name": "c", "type": "channel"}, *({"name": axis, "type": "space"} for axis in "yx")],
        "datasets": [{"path": "0", "coordinateTransformations": steps}],
    }
    group.attrs["ome"] = {"version": "0.5", "multiscales": [image], "omero": {"channels": channels}}
    printed("export", "named.zarr", "named.tif")
    with tifffile.TiffFile("named.tif") as file:
        assert file.series[0].axes == axes
        assert all(f'Name="{label}"' in str(file.ome_metadata) for label in labels) == (axes == "CYX")


def test_the_packing_of_values_that_a_tiff_does_not_have_is_noted(folder: Path) -> None:
    zarr.create_array(folder / "packed.zarr", data=PIXELS[0, 0], attributes={"scale_factor": 0.01, "add_offset": 273})
    done = ask("export", "packed.zarr", "packed.tif")
    assert done.exit_code == 0
    assert "note: packed.zarr: values are packed with scale_factor 0.01 and add_offset 273" in done.stderr
