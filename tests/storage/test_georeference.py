"""Georeferences of GeoTIFFs and GeoZarrs, as rasterio reads and writes them."""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr

from halotile.errors import ConfigError, DiskRefused, MissingPackage
from halotile.storage.arrays import Source, open_source
from halotile.storage.grid import Region
from halotile.storage.images.planes import choose_planes
from halotile.storage.images.tiff_export import write_tiff
from halotile.storage.sharded.output import Layout, create_output, open_output
from halotile.storage.spacing import Georeference, read_georeference
from tests.cases import in_folders
from tests.support import job_of, noisy_image, run_inline

rasterio = pytest.importorskip("rasterio")


copying = pytest.importorskip("rasterio.shutil")


UTM, DEGREES = (10, 0, 500_000, 0, -10, 5_000_000), (0.001, 0, 8.5, 0, -0.002, 47.5)


ROTATED, SOUTH_UP = (8, 6, 500_000, 6, -8, 5_000_000), (10, 0, 500_000, 0, 10, 5_000_000)


OWN = "+proj=laea +lat_0=10 +lon_0=20 +x_0=5 +y_0=7 +ellps=GRS80 +units=m"


def geotiff(path: Path, crs: str | None, transform: Any, pixels: Any = None, **options: Any) -> Path:
    pixels = noisy_image((60, 90), "uint16") if pixels is None else pixels
    bands = pixels.reshape(-1, *pixels.shape[-2:])
    shape = dict(zip(("count", "height", "width"), bands.shape, strict=True))
    creation = {"nodata": options.pop("nodata", None), **options.pop("creation", {})}
    place = {"crs": crs, "transform": rasterio.Affine(*transform)}
    with rasterio.open(path, "w", driver="GTiff", dtype=bands.dtype, **shape, **place, **creation) as file:
        file.write(bands)
        file.update_tags(**options)
    return path


def said_by_rasterio(path: Path) -> tuple[Any, ...]:
    with rasterio.open(path) as file:
        place = file.tags().get("AREA_OR_POINT", "Area")
        return file.crs, np.round(file.transform[:6], 7).tolist(), file.nodata, place


CASES: list[tuple[str | None, Any, dict[str, str], tuple[float, float], str | None]] = [
    ("EPSG:32632", UTM, {}, (10, 10), "meter"), ("EPSG:4326", DEGREES, {}, (0.002, 0.001), "degree"),
    ("EPSG:7844", DEGREES, {"AREA_OR_POINT": "Point"}, (0.002, 0.001), "degree"),
    ("EPSG:2056", ROTATED, {}, (10, 10), "meter"), ("EPSG:2263", UTM, {}, (10, 10), "foot"),
    ("EPSG:3857", SOUTH_UP, {"AREA_OR_POINT": "Point"}, (10, 10), "meter"),
    (OWN, UTM, {}, (10, 10), "meter"), (None, UTM, {}, (1, 1), None),
]  # fmt: skip


@pytest.mark.parametrize(("crs", "transform", "options", "size", "unit"), CASES)
def test_a_place_is_kept(tmp_path: Path, crs: str | None, transform: Any, options: Any, size: Any, unit: Any) -> None:
    path = geotiff(tmp_path / "a.tif", crs, transform, nodata=0, **options)
    source = open_source(path)
    assert source.scale == pytest.approx(size)
    assert source.units == (unit, unit)
    place = place_of(source)
    assert place.transform == pytest.approx(transform, rel=1e-12)
    code = crs if crs and crs.startswith("EPSG") else None
    assert place.crs.get("proj:code") == code
    assert sum("no EPSG code" in remark for remark in source.remarks) == (crs == OWN)
    for cog in (False, True):
        write_tiff(tmp_path / "b.tif", choose_planes(source, {}, None), cog=cog)
        assert said_by_rasterio(tmp_path / "b.tif") == said_by_rasterio(path)
    write_tiff(tmp_path / "b.tif", choose_planes(source, {}, Region((20, 30), (60, 90))), cog=True)
    with rasterio.open(tmp_path / "b.tif") as file:
        a, b, c, d, e, f = transform
        corner = (a * 30 + b * 20 + c, d * 30 + e * 20 + f)
        assert (file.transform.c, file.transform.f) == pytest.approx(corner, rel=1e-12)
    path = geotiff(tmp_path / "c.tif", crs, transform, **options)
    for folder, ome in in_folders(tmp_path, (True, False)):
        check_output(folder, path, place_of(open_source(path)), ome=ome)
    if code and transform in (UTM, DEGREES):
        check_geozarr(tmp_path, code, Georeference(tuple(map(float, transform)), {"proj:code": code}))


def place_of(source: Source) -> Georeference:
    assert source.georeference is not None
    return source.georeference


def check_geozarr(folder: Path, code: str, place: Georeference) -> None:
    """Assert that a GeoZarr of another program becomes a GeoTIFF."""
    group = zarr.open_group(folder / "g.zarr", mode="w")
    group.create_array("b", data=noisy_image((3, 60, 90)), dimension_names=("band", "y", "x"))
    group["b"].attrs.update(place.attributes((60, 90)))
    source = open_source(folder / "g.zarr", axes="cyx")
    write_tiff(folder / "g.tif", choose_planes(source, {}, None), cog=True)
    with rasterio.open(folder / "g.tif") as file:
        assert (file.crs.to_string(), file.count) == (code, 3)
        assert file.transform[:6] == pytest.approx(place.transform)
        assert np.isnan(file.nodata)
        assert np.array_equal(file.read(), source[...])


def check_output(folder: Path, path: Path, place: Georeference, *, ome: bool) -> None:
    """Assert that an output keeps the place of a file at every level."""
    axes, scale = ("y", "x"), (1.0, 1.0)
    layout = Layout((130, 70), "uint8", (16, 16), (8, 8), "lz4", axes, scale, (None, None), ome, georeference=place)
    layout = replace(layout, levels=3, factor=(2, 2), block=(64, 64)) if ome else layout
    create_output(folder / "a.zarr", layout)
    assert open_output(folder / "a.zarr").georeference == place
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    for level in range(3 if ome else 1):
        assert place_of(open_source(folder / "a.zarr", level=level)) == place.resampled(2**level, 2**level)
    write_tiff(folder / "b.tif", choose_planes(open_source(folder / "a.zarr"), {}, None), cog=True)
    (crs_before, *before), (crs_after, *after) = map(said_by_rasterio, (path, folder / "b.tif"))
    assert (crs_after, after) == (crs_before, before)


def test_what_is_not_kept_is_said(tmp_path: Path) -> None:
    corners = ((0, 0), (0, 9), (9, 0))
    points = [rasterio.control.GroundControlPoint(row, col, col * 2, row * 3) for row, col in corners]
    path = tmp_path / "a.tif"
    options: Any = {"driver": "GTiff", "height": 20, "width": 20, "count": 1, "dtype": "uint8"}
    with rasterio.open(path, "w", gcps=points, crs="EPSG:4326", **options) as file:
        file.write(np.zeros((1, 20, 20), "uint8"))
    source = open_source(path)
    assert source.georeference is None
    assert any("ground control points are not kept" in remark for remark in source.remarks)


def test_attributes_that_say_nothing_are_left_alone_and_centres_of_pixels_are_moved_to_the_corner() -> None:
    rows: list[dict[str, Any]] = [
        {}, *({"spatial:transform": one} for one in (None, [1, 0, 0, 0, "a", 0], [1, 0, 0, 0, -1], [0, 0, 0, 0, -1, 0], [float("nan"), 0, 0, 0, -1, 0])),
        *({"spatial:transform": UTM, **more} for more in (
            {"spatial:transform_type": "rpc"}, {"spatial:shape": [0, 9]}, {"spatial:shape": [9]}, {"halotile": {"geokeys": 3}})),
    ]  # fmt: skip
    for attributes in rows:
        assert read_georeference(attributes, (9, 9)) is None
    place = read_georeference({"spatial:transform": [2, 0, 10, 0, -2, 50], "spatial:registration": "node"}, (5, 5))
    assert place is not None
    assert place.transform == (2, 0, 9, 0, -2, 51)


def test_a_crs_without_an_epsg_code_is_not_written_to_a_geotiff(tmp_path: Path) -> None:
    rows: list[dict[str, str]] = [{"proj:code": "IAU_2015:30100"}, {"proj:wkt2": "PROJCRS[]"}]
    for folder, crs in in_folders(tmp_path, rows):
        array = zarr.create_array(folder / "a.zarr", data=noisy_image((60, 90)))
        array.attrs.update(Georeference(tuple(map(float, UTM)), crs).attributes((60, 90)))
        with pytest.raises(ConfigError, match="a GeoTIFF names it by an EPSG code"):
            write_tiff(folder / "b.tif", choose_planes(open_source(folder / "a.zarr"), {}, None), cog=True)
        assert [path.name for path in folder.iterdir()] == ["a.zarr"]
        write_tiff(folder / "b.tif", choose_planes(open_source(folder / "a.zarr"), {}, None))
        assert open_source(folder / "b.tif").georeference is None


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1300, 901), "uint16"), ((4, 700, 800), "float32"), ((3, 30, 20), "uint8")]
)
def test_a_cog_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: str) -> None:
    pixels = noisy_image(shape, dtype)
    path = geotiff(tmp_path / "a.tif", "EPSG:32632", UTM, pixels)
    write_tiff(tmp_path / "b.tif", choose_planes(open_source(path), {}, None), cog=True)
    assert layout_problems(tmp_path / "b.tif") == []
    with rasterio.open(tmp_path / "b.tif") as file:
        assert np.array_equal(file.read(), pixels.reshape(-1, *shape[-2:]))
        counts = {(1300, 901): [2, 4], (4, 700, 800): [2], (3, 30, 20): []}
        assert file.overviews(1) == counts[shape]
        for level, factor in enumerate(counts[shape]):
            with rasterio.open(tmp_path / "b.tif", overview_level=level) as overview:
                ours = open_source(tmp_path / "b.tif", level=level + 1)
                assert np.array_equal(np.moveaxis(overview.read(), 0, -1).squeeze(), ours[...])
            # Larger pixels at the same corner.
            assert place_of(ours).transform == (10 * factor, 0, 500_000, 0, -10 * factor, 5_000_000)
            assert ours.scale[:2] == (10 * factor, 10 * factor)
    write_tiff(tmp_path / "c.tif", choose_planes(open_source(path), {}, None))
    assert layout_problems(tmp_path / "c.tif") or max(shape) < 512, "the check tells other TIFFs apart"
    monkeypatch.setitem(sys.modules, "rasterio", None)
    with pytest.raises(MissingPackage, match=r'rasterio, .* Write: pip install "halotile\[geo\]"'):
        write_tiff(tmp_path / "d.tif", choose_planes(open_source(path), {}, None), cog=True)
    assert not (tmp_path / "d.tif").exists()


@pytest.mark.parametrize("kept_bytes", [1000, -100])
def test_what_gdal_leaves_short_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int) -> None:
    path = geotiff(tmp_path / "a.tif", "EPSG:32632", UTM, noisy_image((300, 200), "uint8"))
    copy = copying.copy

    def short(source: Path, target: Path, **options: Any) -> None:
        copy(source, target, **options)
        os.truncate(target, target.stat().st_size + kept_bytes if kept_bytes < 0 else kept_bytes)

    monkeypatch.setattr("rasterio.shutil.copy", short)
    monkeypatch.setattr("halotile.storage.images.tiff_export.disk_usage", lambda _: SimpleNamespace(free=0))
    (tmp_path / "b.tif").write_text("old")
    with pytest.raises(DiskRefused, match=r"b\.tif cannot be written"):
        write_tiff(tmp_path / "b.tif", choose_planes(open_source(path), {}, None), cog=True)
    assert (tmp_path / "b.tif").read_text() == "old"


def test_a_photograph_of_the_ground_stays_one_and_a_fourth_band_is_no_opacity(tmp_path: Path) -> None:
    rows: list[tuple[str, int, dict[str, str]]] = [
        ("uint8", 3, {"photometric": "rgb"}),
        ("uint8", 3, {"photometric": "ycbcr", "compress": "jpeg", "interleave": "pixel"}),
        ("uint8", 4, {"photometric": "rgb", "alpha": "yes"}),
        ("uint16", 4, {"photometric": "rgb", "alpha": "premultiplied"}),
    ]
    for folder, (dtype, samples, creation) in in_folders(tmp_path, rows):
        pixels = noisy_image((samples, 60, 90), dtype)
        path = geotiff(folder / "a.tif", "EPSG:32632", UTM, pixels, creation=creation)
        names = [channel["label"] for channel in open_source(path).channels]
        assert names == ["red", "green", "blue", "opacity"][:samples]
        run_inline(job_of(path, folder / "b.zarr", "gaussian", {"sigma": 1.0}))
        write_tiff(folder / "c.tif", choose_planes(open_source(folder / "b.zarr"), {}, None), cog=True)
        with rasterio.open(folder / "c.tif") as file:
            assert [band.name for band in file.colorinterp] == ["red", "green", "blue", "alpha"][:samples]
            assert file.dtypes[0] == dtype
        assert any("transparent" in remark for remark in open_source(path).remarks) == (samples == 4)
        if samples == 4:
            plain = {"photometric": "minisblack", "alpha": "no"}
            path = geotiff(folder / "a.tif", "EPSG:32632", UTM, pixels, creation=plain)
            write_tiff(folder / "b.tif", choose_planes(open_source(path), {}, None), cog=True)
            with rasterio.open(folder / "b.tif") as file:
                assert "alpha" not in [band.name for band in file.colorinterp]
                assert (file.dataset_mask() == 255).all()
    for photometric in ("rgb", "minisblack"):  # JPEG that is stored band by band
        pixels = np.add.outer([0, 40, 80], np.add.outer(np.arange(70), np.arange(61))).astype("uint8")
        layout = {"compress": "jpeg", "interleave": "band", "photometric": photometric}
        read = open_source(geotiff(tmp_path / "a.tif", None, UTM, pixels, creation=layout))[:, 5:60, 7:50]
        assert np.abs(read.astype(int) - pixels[:, 5:60, 7:50]).max() < 4


def layout_problems(path: Path) -> list[str]:
    """The rules by which GDAL calls a GeoTIFF cloud optimized."""
    with tifffile.TiffFile(path) as file:
        pages: list[Any] = list(file.pages)
    directories, pixels = [page.offset for page in pages], [page.dataoffsets[0] for page in pages]
    # GDAL notes the layout of the file before its first directory.
    starts = directories[0] <= 300 and directories == sorted(directories)
    rules = {
        f"directories at {directories}: not the finest first, from the start of the file": starts,
        f"pixels at {pixels}: not the coarsest first": pixels == sorted(pixels, reverse=True),
        "pixels before directories": min(pixels) >= max(directories),
        "not tiled": all(page.is_tiled for page in pages),
        "levels are missing": max(pages[-1].shape[-2:]) <= 512,
        "levels are not marked": all(page.subfiletype == (n > 0) for n, page in enumerate(pages)),
    }
    return [problem for problem, is_kept in rules.items() if not is_kept]


def test_scale_offset_and_names_of_bands_are_written_back_as_gdal_shows_them(tmp_path: Path) -> None:
    path = geotiff(tmp_path / "a.tif", "EPSG:32632", UTM, noisy_image((2, 60, 90), "int16"), MISSION="Sentinel")
    with rasterio.open(path, "r+") as file:
        file.scales, file.offsets, file.units = (0.1, 0.2), (-273.15, 5.0), ("°C", "m")
        file.descriptions = ("B2", "B3")
        file.update_tags(1, STATISTICS_MEAN="7")
    run_inline(job_of(path, tmp_path / "a.zarr", "none", {}))
    sources = open_source(path), open_source(tmp_path / "a.zarr")
    for source, (at, bands) in itertools.product(sources, (({}, [0, 1]), ({"c": 1}, [1]))):
        write_tiff(tmp_path / "b.tif", choose_planes(source, at, None), cog=True)
        with rasterio.open(path) as expected, rasterio.open(tmp_path / "b.tif") as found:
            for name in ("scales", "offsets", "units", "descriptions"):
                assert getattr(found, name) == tuple(getattr(expected, name)[band] for band in bands)
            assert found.tags()["MISSION"] == "Sentinel"
            assert "STATISTICS_MEAN" not in found.tags(1)
    for name in ("R&D", "<x>", '5" band', "it's", "B8 > B4", "&amp; plain", "Ñ é"):
        with rasterio.open(path, "r+") as file:
            file.set_band_description(1, name)
        assert open_source(path).channels[0]["label"] == name
        write_tiff(tmp_path / "b.tif", choose_planes(open_source(path).with_channels([1, 0]), {"c": 1}, None))
        with rasterio.open(tmp_path / "b.tif") as file:
            assert file.descriptions == (name,)


SIZE = (33550, "d", 3, (10.0, 10.0, 0.0), True)
PLACE_TAGS: list[Any] = [SIZE, (33922, "d", 6, (0.0, 0.0, 0.0, 5e5, 5e6, 0.0), True)]


def test_geokeys_of_another_type_and_texts_of_any_bytes_are_carried(tmp_path: Path) -> None:
    numbers = (1, 1, 0, 2, 1024, 0, 1, 1, 3072, 0, 1, 32632)
    wrong = (*numbers[:-1], 1e9)
    rows: list[Any] = [
        ([(34735, "d", 12, tuple(map(float, keys)), True)], keys is numbers) for keys in (numbers, wrong)
    ]
    for text in (b"Syst\xe8me 5\xb0|", "Système 5°|".encode(), b"bad\x81\x8d|"):
        named: Any = (1, 1, 0, 3, 1024, 0, 1, 1, 1026, 34737, len(text), 0, 3072, 0, 1, 32632)
        rows.append(([(34735, "H", 16, named, True), (34737, 2, len(text) + 1, text + b"\0", True)], True))
    for tags, is_place in rows:
        tifffile.imwrite(tmp_path / "a.tif", noisy_image((60, 90), "uint16"), extratags=[*PLACE_TAGS, *tags])
        source = open_source(tmp_path / "a.tif")
        assert (source.georeference is not None) == is_place
        for cog in (False, True) if is_place else ():
            assert place_of(source).crs == {"proj:code": "EPSG:32632"}
            assert json.loads(json.dumps(place_of(source).geokeys)) == place_of(source).geokeys
            write_tiff(tmp_path / "b.tif", choose_planes(source, {}, None), cog=cog)
            with rasterio.open(tmp_path / "b.tif") as found:
                assert found.crs.to_epsg() == 32632
