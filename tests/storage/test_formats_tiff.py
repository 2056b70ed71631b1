"""TIFF, BigTIFF and OME-TIFF: read in parts, refused when truncated; tags and XML about sizes of pixels, and about how viewers show them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr
from numpy.typing import NDArray

from halotile.errors import DamagedData, InputError, MissingPackage
from halotile.storage import arrays, grid, spacing
from halotile.storage.formats.tiff import MappedPages, TiffReader

STACK: NDArray[np.generic] = np.random.default_rng(5).integers(0, 60000, (4, 70, 90), "u2")


PAGES = np.zeros((2, 3, 4, 5), "uint8")


KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "bigtiff": {"bigtiff": True}, "big-endian": {"byteorder": ">"},
    "big-endian bigtiff": {"byteorder": ">", "bigtiff": True}, "tiled": {"tile": (32, 16)},
    "zlib": {"compression": "zlib"}, "zlib strips": {"compression": "zlib", "rowsperstrip": 9},
    "zlib tiles, predictor": {"compression": "zlib", "tile": (32, 32), "predictor": True},
    "strips": {"rowsperstrip": 9}, "ome": {"ome": True, "metadata": {"axes": "ZYX"}},
    "imagej": {"imagej": True, "metadata": {"axes": "ZYX"}}, "separate pages": {"contiguous": False, "metadata": None},
}  # fmt: skip


def _write(path: Path, image: NDArray[np.generic] = STACK, **options: Any) -> Path:
    if options.get("contiguous") is False:
        with tifffile.TiffWriter(path) as file:
            for page in image:
                file.write(page, photometric="minisblack", **options)
    else:
        tifffile.imwrite(path, image, **{"photometric": "minisblack", **options})
    return path


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_region_reads_and_a_truncated_file_is_damage(tmp_path: Path, options: dict[str, Any]) -> None:
    path = _write(tmp_path / "a.tif", **options)
    whole, source = path.read_bytes(), arrays.open_source(path)
    assert (source.shape, source.dtype.name) == ((4, 70, 90), "uint16")
    whole_image, corner = grid.Region.whole(source.shape), grid.Region((2, 69, 0), (3, 70, 1))
    for region in (grid.Region((1, 3, 5), (3, 60, 80)), whole_image, corner):
        assert np.array_equal(source.read(region), STACK[region.slices])
    for keep in (0.0, 0.01, 0.3, 0.6, 0.95):
        path.write_bytes(whole[: max(int(len(whole) * keep), 8)])
        with pytest.raises(DamagedData, match=r"a\.tif: .*cut short"):
            arrays.open_source(path)
    refused = 0
    for lost_bytes in (1, 2, 4, 8, 16, 40, 100, 200, 400, 800):  # some writers pad the end
        path.write_bytes(whole[:-lost_bytes])
        try:
            source = arrays.open_source(path)
        except DamagedData:
            refused += 1
        else:
            assert np.array_equal(source.read(grid.Region.whole(STACK.shape)), STACK)
    assert refused >= 3


def test_uncompressed_pages_are_mapped_and_compressed_ones_decoded_in_parts(tmp_path: Path) -> None:
    mapped = ("plain", "big-endian", "ome", "imagej", "separate pages", "strips")
    decoded = {"zlib strips": (1, 9, 90), "zlib tiles, predictor": (1, 32, 32)}
    for kind, chunks in {**dict.fromkeys(mapped, (1, 1, 1)), **decoded}.items():
        reader = TiffReader(str(_write(tmp_path / f"{kind}.tif", **KINDS[kind])), level=0, series=0, axes=None)
        assert isinstance(reader.pixels, zarr.Array if kind in decoded else MappedPages), kind
        assert reader.header.chunks == chunks, kind


def test_axes(tmp_path: Path) -> None:
    rows: list[tuple[tuple[int, ...], dict[str, Any], str]] = [
        ((20, 30, 3), {"photometric": "rgb"}, "yxc"),
        ((3, 20, 30), {"photometric": "rgb", "planarconfig": "separate"}, "cyx"),
        ((4, 20, 30), {}, "qyx"),
        ((2, 3, 20, 30), {}, "qayx"),
        ((2, 20, 30), {"metadata": {"axes": "TYX"}}, "tyx"),
        ((5, 20, 30, 3), {"photometric": "rgb", "metadata": {"axes": "ZYXS"}}, "zyxc"),
        ((2, 3, 8, 9), {"ome": True, "metadata": {"axes": "TCYX"}, "rowsperstrip": 3}, "tcyx"),
    ]
    for shape, options, axes in rows:
        image = np.random.default_rng(2).integers(0, 255, shape, "u1")
        source = arrays.open_source(_write(tmp_path / "a.tif", image, **options))
        assert "".join(source.axes) == axes
        assert np.array_equal(source.read(grid.Region.whole(shape)), image)
        assert np.array_equal(source[1:, ..., 1:3], image[1:, ..., 1:3])


def _pyramid(path: Path, **options: Any) -> None:
    with tifffile.TiffWriter(path, ome=True) as file:
        file.write(STACK[0], photometric="minisblack", tile=(16, 16), subifds=2, **options)
        for step in (2, 4):
            file.write(STACK[0, ::step, ::step], subfiletype=1, photometric="minisblack", tile=(16, 16))


def test_levels_of_a_pyramid(tmp_path: Path) -> None:
    _pyramid(tmp_path / "a.ome.tif", metadata={"axes": "YX", "PhysicalSizeX": 0.5, "PhysicalSizeY": 2.0})
    for level in range(3):
        source = arrays.open_source(tmp_path / "a.ome.tif", level=level)
        assert np.array_equal(source.read(grid.Region.whole(source.shape)), STACK[0, :: 2**level, :: 2**level])
        # Not 70 / 18 and 90 / 23: these lengths were rounded after division by a whole factor.
        assert (source.scale, source.units) == ((2.0 * 2**level, 0.5 * 2**level), ("micrometer", "micrometer"))
    with pytest.raises(InputError, match=r"level is 3.*0 \(70, 90\); 1 \(35, 45\); 2 \(18, 23\)"):
        arrays.open_source(tmp_path / "a.ome.tif", level=3)


def test_a_palette_of_increasing_greys_is_an_image_and_others_are_refused(tmp_path: Path) -> None:
    greys = np.broadcast_to(np.arange(256) * 257, (3, 256)).astype("u2")
    for colours in (greys, greys[:, ::-1], np.random.default_rng(0).integers(0, 65535, (3, 256), "u2")):
        path = tmp_path / "a.tif"
        tifffile.imwrite(path, np.zeros((4, 5), "u1"), photometric="palette", colormap=colours)
        with nullcontext() if colours is greys else pytest.raises(InputError, match="Convert to RGB first"):
            assert arrays.open_source(path).shape == (4, 5)


def test_the_series_is_chosen_by_number_and_has_its_own_size_of_pixels(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for image, per_cm in ((STACK[0], 10000), (STACK[1, :20], 500)):
            place: Any = {"resolution": (per_cm, per_cm), "resolutionunit": "CENTIMETER"}
            file.write(image, photometric="minisblack", **place)
    for dataset, image, size in ((0, STACK[0], 1), ("1", STACK[1, :20], 20)):
        source = arrays.open_source(tmp_path / "a.tif", dataset=dataset)
        assert np.array_equal(source.read(grid.Region.whole(source.shape)), image)
        assert source.scale == pytest.approx((size, size))


def test_physical_sizes(tmp_path: Path) -> None:
    um, of_ome = "micrometer", {"PhysicalSizeX": 3.0, "PhysicalSizeXUnit": "nm"}
    of_imagej = {"unit": "um", "spacing": 5.0}
    others = {"axes": "TZYX", "unit": "micron", "zunit": "nm", "spacing": 300.0, "tunit": "ms", "finterval": 250.0}
    per_cm, per_inch = {"resolutionunit": "CENTIMETER"}, {"resolutionunit": "INCH"}
    rows: list[tuple[dict[str, Any], dict[str, Any], tuple[float, ...], tuple[str | None, ...]]] = [
        ({"ome": True}, of_ome, (1.0, 1.0, 3.0), (None, None, "nanometer")),
        ({"imagej": True, "resolution": (4, 2)}, of_imagej, (5.0, 0.5, 0.25), (um, um, um)),
        ({"imagej": True, "resolution": (10, 10)}, others, (250, 300, 0.1, 0.1), ("millisecond", "nanometer", um, um)),
        ({"resolution": (20000, 10000), **per_cm}, {}, (1.0, 1.0, 0.5), (None, um, um)),
        ({"resolution": (72, 72), **per_inch}, {}, (1.0,) * 3, (None,) * 3),
    ]
    for options, words, scale, units in rows:
        pixels = PAGES if words is others else STACK
        source = arrays.open_source(_write(tmp_path / "a.tif", pixels, metadata={"axes": "ZYX"} | words, **options))
        assert source.scale == pytest.approx(scale)
        assert (source.units, source.ome is not None) == (units, "ome" in options)


def test_a_flipped_byte_in_a_compressed_tile_is_damage(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.tif", **KINDS["zlib tiles, predictor"])
    source = arrays.open_source(path)
    with tifffile.TiffFile(path) as file:
        place = file.pages[0].dataoffsets[0]
    whole = bytearray(path.read_bytes())
    whole[place + 40] ^= 255
    path.write_bytes(whole)
    with pytest.raises(DamagedData, match=r"from \(0, 0, 0\) to \(1, 10, 10\)"):
        source.read(grid.Region((0, 0, 0), (1, 10, 10)))
    assert np.array_equal(source.read(grid.Region((1, 0, 0), (4, 70, 90))), STACK[1:])


def test_a_missing_plane_of_a_set_of_files_is_damage(tmp_path: Path) -> None:
    names = [tmp_path / f"{n}.ome.tif" for n in range(2)]
    plane = '<TiffData IFD="0" FirstZ="{0}" PlaneCount="1"><UUID FileName="{0}.ome.tif">urn:uuid:{0}</UUID></TiffData>'
    planes = "".join(plane.format(n) for n in range(2))
    for n, name in enumerate(names):
        text = (
            f'<?xml version="1.0"?><OME UUID="urn:uuid:{n}" xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0">'
            '<Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint16" SizeX="90" SizeY="70" SizeC="1" SizeT="1" '
            f'SizeZ="2">{planes}</Pixels></Image></OME>'
        )
        _write(name, STACK[n], description=text, metadata=None)
    source = arrays.open_source(names[0])
    assert np.array_equal(source.read(grid.Region.whole(source.shape)), STACK[:2])
    whole = names[1].read_bytes()
    assert source.change() == ""
    names[1].write_bytes(whole)
    assert source.change() == "was written to"
    names[1].write_bytes(whole[:-200])
    with pytest.raises(DamagedData, match="cut short"):
        arrays.open_source(names[0])
    names[1].unlink()
    with pytest.raises(DamagedData, match="1 of the 2 planes"):
        arrays.open_source(names[0])


def test_a_compression_that_needs_a_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "a.tif", **KINDS["zlib"])
    monkeypatch.setattr(tifffile.TIFF, "DECOMPRESSORS", {})
    with pytest.raises(MissingPackage, match=r'pip install "halotile\[tiff\]"'):
        arrays.open_source(path)


def test_a_header_without_directories_is_damage(tmp_path: Path) -> None:
    for content in (b"II*\0", b"II*\0\x08\0\0\0", b"MM\0*\0\0\0\x08\xff\xff" + b"\xff" * 40):
        (tmp_path / "a.tif").write_bytes(content)
        with pytest.raises(DamagedData, match="cut short"):
            arrays.open_source(tmp_path / "a.tif")


def test_a_cycle_of_directories_ends(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.tif", STACK[0], metadata=None)
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        place = page.offset + 2 + 12 * len(page.tags)
    whole = bytearray(path.read_bytes())
    whole[place : place + 4] = page.offset.to_bytes(4, "little")
    path.write_bytes(whole)
    assert np.array_equal(arrays.open_source(path).read(grid.Region.whole((70, 90))), STACK[0])


def test_pixels_whose_place_is_not_named_are_no_zeros(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"tile": (64, 64)}, {"rowsperstrip": 16}, {"tile": (64, 64), "compression": "zlib"}]
    for layout in rows:
        pixels = np.random.default_rng(1).integers(1, 60000, (150, 170)).astype("u2")
        path = tmp_path / "t.tif"
        tifffile.imwrite(path, pixels, **layout)
        codes = (324, 325) if "tile" in layout else (273, 279)
        with tifffile.TiffFile(path) as file:
            offsets, lengths = (file.pages[0].tags[code] for code in codes)
        whole = path.read_bytes()
        size_of_length = (lengths.valueoffset, 2 if lengths.dtype == 3 else 4)
        for start, size in ((offsets.offset, 2), (offsets.valueoffset, 4), size_of_length):
            path.write_bytes(whole[:start] + bytes(size) + whole[start + size :])
            with pytest.raises(DamagedData, match="the TIFF is damaged"):
                arrays.open_source(path)


def test_tiles_that_a_sparse_image_leaves_out_are_zeros(tmp_path: Path) -> None:
    pixels = np.ones((128, 128), "u2")
    path = _write(tmp_path / "t.tif", pixels, tile=(64, 64))
    with tifffile.TiffFile(path) as file:
        tags = [file.pages[0].tags[code] for code in (324, 325)]
    content = bytearray(path.read_bytes())
    for tag in tags:
        size = 2 if tag.dtype == 3 else 4
        content[tag.valueoffset : tag.valueoffset + size] = bytes(size)
    path.write_bytes(content)
    pixels[:64, :64] = 0
    np.testing.assert_array_equal(arrays.open_source(path)[:], pixels)


PLACES = {"PositionX": [1500.0] * 6, "PositionY": [-2.0] * 6, "PositionZ": [7.0, 7.0, 8.0, 8.0, 9.0, 9.0]}
POSITIONS: dict[str, Any] = PLACES | {f"Position{axis}Unit": ["mm" if axis == "Y" else "µm"] * 6 for axis in "XYZ"}


def test_positions_that_all_planes_share_are_kept_and_those_of_a_level_are_of_its_first_pixel(tmp_path: Path) -> None:
    rows: list[tuple[dict[str, Any], tuple[float, ...]]] = [
        ({}, (0.0, 7.0, -2000.0, 1500.0)),
        ({"PositionX": [1500.0] * 5 + [1501.0]}, (0.0, 7.0, -2000.0, 0.0)),
        ({"PositionZ": [7.0, 7.5, 8.0, 8.0, 9.0, 9.0]}, (0.0, 0.0, -2000.0, 1500.0)),
        ({"PositionYUnit": ["reference frame"] * 6}, (0.0, 7.0, 0.0, 1500.0)),
        ({f"Position{axis}Unit": ["reference frame"] * 6 for axis in "XYZ"}, ()),
    ]
    path = tmp_path / "a.ome.tif"
    for change, expected in rows:
        words: Any = {"axes": "ZCYX", **{f"PhysicalSize{axis}": 0.5 for axis in "XYZ"}, "Plane": POSITIONS | change}
        _write(path, np.zeros((3, 2, 40, 30), "u1"), ome=True, metadata=words)
        ome = arrays.open_source(path).ome
        assert ome is not None
        assert ome.translation == expected
    place: Any = {"Plane": {"PositionX": [10.0], "PositionXUnit": ["µm"]}}
    words = {"axes": "YX", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5} | place
    # The second is no whole factor coarser: it has the ratio of the shapes.
    for width, shape, at, scale in ((80, (30, 40), (0.25, 10.25), 1.0), (90, (40, 60), (0.125, 10.125), 0.75)):
        with tifffile.TiffWriter(path, ome=True) as file:
            file.write(np.zeros((60, width), "u1"), photometric="minisblack", subifds=1, metadata=words)
            file.write(np.zeros(shape, "u1"), photometric="minisblack", subfiletype=1)
        source = arrays.open_source(path, level=1)
        assert source.ome is not None
        assert source.ome.translation == pytest.approx(at, abs=1e-4)
        assert source.scale == (scale, scale)


UNITS: list[tuple[str, float, str]] = [
    ("thou", 25.4, "micrometer"), ("li", 25.4 / 12, "millimeter"), ("pt", 25.4 / 72, "millimeter"), ("dam", 10, "meter"),
    ("ua", 1.495978707e8, "kilometer"), ("ly", 9.4607304725808e12, "kilometer"), ("km", 1, "kilometer"), ("Mm", 1, "megameter"),
    ("mm", 1, "millimeter"), ("feet", 1, "foot"), ("inches", 1, "inch"), ("Microns", 1, "micrometer"),
    ("micrometres", 1, "micrometer"), ("\\u00B5m", 1, "micrometer"), ("\u03bcm", 1, "micrometer"), ("\u00b5s", 1, "microsecond"),
    ("das", 10, "second"), ("hours", 1, "hour"), ("h", 1, "hour"),
]  # fmt: skip


def test_a_unit_in_the_words_of_any_program_is_one_of_ome_zarr() -> None:
    for word, factor, unit in UNITS:
        size, name = spacing.in_known_unit(3.0, word)
        assert size == pytest.approx(3 * factor), word
        assert name == unit, word


def test_a_word_that_is_no_unit_is_left_out_with_a_remark(tmp_path: Path) -> None:
    for word in ("pixel", "AU", "grid", "reference frame", "M"):
        ours: dict[str, Any] = {"metadata": {"axes": "ZYX", "PhysicalSizeX": 0.2, "PhysicalSizeXUnit": word}}
        for options in (ours, {"imagej": True, "resolution": (5, 5), "metadata": {"unit": word}}):
            tifffile.imwrite(tmp_path / "a.ome.tif", PAGES[0], **options)
            source = arrays.open_source(tmp_path / "a.ome.tif")
            assert source.units[-1] is None
            said = any("no unit of space" in remark and word in remark for remark in source.remarks)
            assert said is (word != "pixel"), word


def test_tags_that_only_change_what_viewers_show_are_remarked_on(tmp_path: Path) -> None:
    turned, upright = ({"extratags": [(274, "H", 1, n, True)]} for n in (6, 1))
    rows: dict[str, Any] = {"0 as white": {"photometric": "miniswhite"}, "turns it": turned, "": upright}
    for word, options in rows.items():
        tifffile.imwrite(tmp_path / "a.tif", np.zeros((4, 5), "uint8"), **options)
        source = arrays.open_source(tmp_path / "a.tif")
        assert len(source.remarks) == bool(word)
        assert word in "".join(source.remarks)


def test_damaged_ome_xml_and_a_size_in_it_that_is_none_have_a_remark(tmp_path: Path) -> None:
    size = 'PhysicalSizeX="0.7"'
    odd = ("0", "-1", "nan", "inf", "0,5", "")
    rows = [(size, size.replace("0.7", value), f"{value!r} as the size along x") for value in odd]
    rows += [(damage, damage.replace("<", "{"), "OME-XML is damaged") for damage in ("<Pixels", "</OME>")]
    path = tmp_path / "a.ome.tif"
    for old, new, said in rows:
        _write(path, PAGES[0, 0], ome=True, metadata={"axes": "YX", "PhysicalSizeX": 0.7, "PhysicalSizeY": 0.5})
        with tifffile.TiffFile(path) as file:
            text = file.pages.first.description
        assert old in text
        tifffile.tiffcomment(path, text.replace(old, new).encode())
        source = arrays.open_source(path)
        assert source.shape[-2:] == (4, 5)
        assert any(said in remark for remark in source.remarks), new
        if old == size:
            assert (source.scale, source.units) == ((0.5, 1.0), ("micrometer", None))
