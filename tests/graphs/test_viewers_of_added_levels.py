"""Images that other programs wrote, to which levels are added, in the libraries that viewers open images with.

requirements-oracles.txt installs them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from halotile.storage.arrays import open_source
from halotile.storage.images.added_levels import add_levels
from tests.support import Image, noisy_image

pytestmark = pytest.mark.filterwarnings("ignore")  # of these libraries

PIXELS = noisy_image((2, 3, 150, 213), "uint16")
SCALE = {"c": 1.0, "z": 2.0, "y": 0.5, "x": 0.5}
SHAPES = [(2, 3, 150, 213), (2, 3, 75, 107), (2, 3, 38, 54)]


def by_ome_zarr(version: str, path: Path) -> None:
    writer, form = pytest.importorskip("ome_zarr.writer"), pytest.importorskip("ome_zarr.format")
    chosen = form.FormatV04() if version == "0.4" else form.FormatV05()
    group = zarr.open_group(path, mode="w", zarr_format=2 if version == "0.4" else 3)
    writer.write_image(
        PIXELS,
        group,
        scale_factors=[],
        axes="czyx",
        fmt=chosen,
        scale=SCALE,
        storage_options={"chunks": (1, 1, 64, 64)},
    )


def by_ngff_zarr(version: str, path: Path) -> None:
    ngff = pytest.importorskip("ngff_zarr")
    image = ngff.to_ngff_image(PIXELS, dims=list("czyx"), scale=SCALE)
    ngff.to_ngff_zarr(path, ngff.to_multiscales(image, scale_factors=[], chunks=64), version=version)


def by_bioformats2raw(version: str, path: Path) -> None:
    """Its layout: the image is a group of a group, in Zarr v2 with nested folders."""
    zarr.open_group(path, mode="w", zarr_format=2, attributes={"bioformats2raw.layout": 3})
    group = zarr.open_group(path / "0", mode="w", zarr_format=2)
    options: Any = {"chunk_key_encoding": {"name": "v2", "separator": "/"}, "chunks": (1, 1, 64, 64)}
    group.create_array("0", shape=PIXELS.shape, dtype=PIXELS.dtype, **options)[...] = PIXELS
    axes = [{"name": "c", "type": "channel"}, *({"name": a, "type": "space", "unit": "micrometer"} for a in "zyx")]
    steps = [{"type": "scale", "scale": list(SCALE.values())}]
    group.attrs["multiscales"] = [
        {"version": version, "axes": axes, "datasets": [{"path": "0", "coordinateTransformations": steps}]}
    ]


@pytest.fixture(
    params=[
        (by_ome_zarr, "0.4"),
        (by_ome_zarr, "0.5"),
        (by_ngff_zarr, "0.4"),
        (by_ngff_zarr, "0.5"),
        (by_bioformats2raw, "0.4"),
    ],
    ids=lambda case: f"{case[0].__name__}-{case[1]}",
)
def image(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, str, list[Image]]:
    """An image with three levels, its version and its pixels."""
    monkeypatch.setattr("halotile.storage.sharded.layout.LARGEST_TOP", 60)
    write: Callable[[str, Path], None]
    write, version = request.param
    path = tmp_path / "cells.ome.zarr"
    write(version, path)
    path = path / "0" if write is by_bioformats2raw else path
    assert add_levels(path)[0] == 3
    levels: list[Image] = [open_source(path, level=level)[...] for level in range(3)]
    np.testing.assert_array_equal(levels[0], PIXELS)
    np.testing.assert_array_equal(
        levels[1][..., :75, :106], np.rint(PIXELS[..., :212].reshape(2, 3, 75, 2, 106, 2).mean((3, 5)))
    )
    return path, version, levels


def check(levels: Any, expected: list[Image]) -> None:
    assert [level.shape for level in levels] == SHAPES
    for level, wanted in zip(levels, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(level), wanted)


def test_the_models_of_ome_zarr_accept_them(image: tuple[Path, str, list[Image]]) -> None:
    from ome_zarr_models.v04.image import Image as Old
    from ome_zarr_models.v05.image import Image as New

    path, version, _ = image
    group = zarr.open_group(path, mode="r")
    model: Any = Old.from_zarr(group).attributes if version == "0.4" else New.from_zarr(group).ome_attributes
    assert len(model.multiscales[0].datasets) == 3


def test_ome_zarr_py_reads_them(image: tuple[Path, str, list[Image]]) -> None:
    io, reader = pytest.importorskip("ome_zarr.io"), pytest.importorskip("ome_zarr.reader")
    (node,) = reader.Reader(io.parse_url(image[0]))()
    check(node.data, image[2])
    assert [step[0]["scale"] for step in node.metadata["coordinateTransformations"]] == [
        [1.0, 2.0, 0.5 * n, 0.5 * n] for n in (1, 2, 4)
    ]


def test_ngff_zarr_reads_and_validates_them(image: tuple[Path, str, list[Image]]) -> None:
    ngff = pytest.importorskip("ngff_zarr")
    images = ngff.from_ngff_zarr(str(image[0]), validate=True).images
    check([one.data for one in images], image[2])
    assert [one.translation["x"] for one in images] == [0.0, 0.25, 0.75]


def test_bioio_reads_them(image: tuple[Path, str, list[Image]]) -> None:
    bioio = pytest.importorskip("bioio_ome_zarr")
    opened = bioio.Reader(str(image[0]))
    found = []
    for level in opened.resolution_levels:
        opened.set_resolution_level(level)
        found.append(opened.data)
    check(found, image[2])


@pytest.mark.thorough
def test_napari_shows_them(image: tuple[Path, str, list[Image]]) -> None:
    napari = pytest.importorskip("napari_ome_zarr")
    ((data, _, kind),) = napari.napari_get_reader(str(image[0]))(str(image[0]))
    assert kind == "image"
    check(data, image[2])
