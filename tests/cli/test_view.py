"""Images in a browser: what is drawn there, and who gets to see it."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from PIL import Image

from halotile.cli.viewing import BACKGROUND, ImageServer, panels_of
from halotile.errors import ConfigError
from halotile.storage.grid import Region
from halotile.storage.images.planes import HOLE, ServedImage
from tests.browsing import chromium, needs_browser
from tests.support import write_zarr

GPU = ("--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--window-size=1300,800")


@contextmanager
def shown(paths: Sequence[Path], against: Path | None = None) -> Iterator[ImageServer]:
    with ImageServer(panels_of([*map(str, paths)], str(against) if against else None)) as server:
        yield server


def answer(server: ImageServer, path: str, host: str = "") -> tuple[int, bytes, Any]:
    """Status, content and headers."""
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=20)) as connection:
        connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.port}"})
        response = connection.getresponse()
        return response.status, response.read(), response.headers


@pytest.fixture
def images(tmp_path: Path) -> dict[str, Path]:
    """Half of the image is dark, half bright, a part of it a hole; the noisy one differs by 20 in the bright half."""
    clean = np.full((1500, 1500), 40.0, np.float32)
    clean[:, 750:] = 200
    clean[600:900, 200:500] = np.nan
    noisy = clean + 20 * (clean > 100)
    channels = np.zeros((2, 3, 64, 64), np.uint16)
    channels[1, 0, :32], channels[1, 1, 32:] = 1000, 1000
    described = {"Name": ["DAPI", "GFP", "Cy5"], "Color": [0x0000FFFF, 0x00FF00FF, -0x00FFFF01]}
    tifffile.imwrite(tmp_path / "cells.tif", channels, ome=True, metadata={"axes": "ZCYX", "Channel": described})
    np.save(tmp_path / "noisy.npy", noisy)
    clean_path = write_zarr(tmp_path / "clean.zarr", clean)
    return {"clean": clean_path, "noisy": tmp_path / "noisy.npy", "cells": tmp_path / "cells.tif"}


def test_a_stranger_gets_nothing(images: dict[str, Path]) -> None:
    with shown([images["clean"]]) as server:
        root = f"/v/{server.token}"
        for host in (None, f"localhost:{server.port}"):
            assert answer(server, f"{root}/0/.zattrs", host or "")[0] == 200
        for host in ("example.org", f"example.org:{server.port}", "::1"):
            assert answer(server, f"{root}/0/.zattrs", host)[:2] == (403, b"")
        for path in ("/", "/v/", "/v/0/.zattrs", f"{root[:-1]}/", "/open/", "/events/", f"/v/{'x' * 32}/0/.zattrs"):
            assert answer(server, path)[:2] == (403, b"")
        outside = ("/1/.zattrs", "/../clean.zarr/zarr.json", "/0/../../clean.zarr", "/etc/passwd")
        for name in (*outside, "/0/0/-1/0", "/0/9/.zarray", "/index.htm"):
            assert answer(server, root + name)[0] == 404
        assert server.token not in repr(server)
    with pytest.raises(ConnectionRefusedError):
        answer(server, root)
    with pytest.raises(ConfigError, match="1500 × 1500 pixels"):
        panels_of([str(images["cells"])], str(images["noisy"]))


def test_the_address_opens_the_panels_wherever_a_tunnel_ends(images: dict[str, Path]) -> None:
    with shown([images["clean"]], images["noisy"]) as server:
        status, _, headers = answer(server, server.address.partition(str(server.port))[2], "localhost:9999")
        assert status == 302
        state = json.loads(unquote(headers["Location"].partition("#!")[2]))
        assert [layer["name"] for layer in state["layers"]] == ["noisy.npy", "clean.zarr", "residual"]
        assert {layer["source"]["url"].partition("/v/")[0] for layer in state["layers"]} == {
            "zarr2://http://localhost:9999"
        }
        first, second, residual = (layer["shader"] for layer in state["layers"])
        assert first == second != residual
        assert "range=[-20, 20]" in residual
        assert server.address in server._repr_html_()


def test_an_image_of_another_range_has_its_own_contrast(images: dict[str, Path], tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).uniform(0, 1000, (64, 64))
    for name, image in {
        "mean": pixels,
        "alike": 1.5 * pixels,
        "deviation": 0.01 * pixels,
        "colours": pixels.astype("u1").repeat(3).reshape(64, 64, 3),
    }.items():
        np.save(tmp_path / f"{name}.npy", image)
    mean, alike, deviation, colours = panels_of(
        [str(tmp_path / f"{name}.npy") for name in ("mean", "alike", "deviation", "colours")], None
    )
    assert mean.shader == alike.shader != deviation.shader
    assert colours.shader.count("range=[0, 255]") == 3
    (names,) = {tuple(panel.name for panel in panels_of([str(images["clean"])] * 1, str(images["clean"])))}
    assert len(set(names)) == len(names)


def ranges(shader: str) -> list[list[float]]:
    return [json.loads(each) for each in re.findall(r"range=(\[.*?\])", shader)]


def test_windows_are_what_the_viewer_accepts(tmp_path: Path) -> None:
    """Whole numbers within the type, never equal; the difference around 0, in grey."""
    dark = np.random.default_rng(0).integers(0, 3, (3, 64, 64)).astype(np.uint8)
    for name, image in {"dark": dark, "result": dark - np.float32(0.05), "flat": np.full((64, 64), 255, "u1")}.items():
        tifffile.imwrite(tmp_path / f"{name}.tif", image, ome=True, metadata={"axes": "CYX"[-image.ndim :]})
    before, after, residual = panels_of([str(tmp_path / "result.tif")], str(tmp_path / "dark.tif"))
    assert ranges(before.shader) == [[0, 2]] * 3
    assert all(low < 0 for low, _ in ranges(after.shader))
    assert all(low == -high for low, high in ranges(residual.shader))
    assert "vec3(0.5)" in residual.shader
    (flat,) = panels_of([str(tmp_path / "flat.tif")], None)
    assert ranges(flat.shader) == [[254, 255]]


def test_pixel_sizes_are_those_that_one_of_both_images_knows(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).uniform(size=(2, 64, 64)).astype("f4")
    metadata = {"axes": "TYX", "PhysicalSizeX": 0.13, "PhysicalSizeY": 0.13, "TimeIncrement": 0.1}
    tifffile.imwrite(tmp_path / "known.tif", pixels, ome=True, metadata=metadata)
    tifffile.imwrite(tmp_path / "unknown.tif", pixels, ome=True, metadata={"axes": "TYX"})
    for path, against in (("known", "unknown"), ("unknown", "known")):
        panels = panels_of([str(tmp_path / f"{path}.tif")], str(tmp_path / f"{against}.tif"))
        (sizes,) = {panel.image.sizes for panel in panels}
        assert sizes == pytest.approx((1.0, 1.3e-7, 1.3e-7))
    alone = panels_of([str(tmp_path / "known.tif"), str(tmp_path / "unknown.tif")], None)
    assert {panel.image.sizes for panel in alone} == {(1.0, 1.0, 1.0)}


def test_photographs_of_floats_are_in_colour_and_large_images_cost_little(tmp_path: Path) -> None:
    np.save(tmp_path / "photo.npy", np.random.default_rng(0).uniform(size=(64, 64, 3)))
    (photo,) = panels_of([str(tmp_path / "photo.npy")], None)
    assert photo.image.is_colour
    assert "vec3(1.000, 0.000, 0.000)" in photo.shader
    write_zarr(tmp_path / "large.zarr", np.zeros((4, 4), np.uint16), chunk=4)
    large = ServedImage.open(str(tmp_path / "large.zarr"))
    read: list[int] = []

    class Large:
        shape, dtype = (100_000, 100_000), np.dtype(np.uint16)

        def read(self, region: Region) -> NDArray[Any]:
            read.append(region.size)
            return np.ones(region.shape, np.uint16)

    large = replace(large, levels=(Large(),))
    large.sample(1024)
    assert large.file(f"{large.halvings}/0/0")
    assert max(read) <= 2**22


def test_levels_that_a_file_lacks_are_means_of_measured_pixels(images: dict[str, Path]) -> None:
    image = ServedImage.open(str(images["noisy"]))
    assert json.loads(image.file("2/.zarray") or b"")["shape"] == [375, 375]
    pixels = np.frombuffer(image.file("2/0/0") or b"", "<f4").reshape(256, 256)
    assert (pixels[0, 0], pixels[160, 60]) == (40, np.float32(HOLE))
    assert (np.frombuffer(image.file("2/1/1") or b"", "<f4").reshape(256, 256)[:119, :119] == 220).all()
    scales = json.loads(image.file(".zattrs") or b"")["multiscales"][0]["datasets"]
    found = [each["coordinateTransformations"] for each in scales]
    assert [each[0]["scale"] for each in found] == [[1, 1], [2, 2], [4, 4], [8, 8]]
    assert [each[1]["translation"] for each in found[1:]] == [[0.5, 0.5], [1.5, 1.5], [3.5, 3.5]]


ZOOM = (
    r"location.hash = location.hash.replace(/(crossSectionScale%22(?::|%3A)(?:%20)?)[0-9.]+/, (_, key) => key + '0.5')"
)
"""Half a pixel of the image for one of the screen: its hole is outside then."""


def picture(browser: Any) -> NDArray[np.int64]:
    return np.asarray(Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")).astype(np.int64)


def until_drawn(browser: Any, place: tuple[int, int], colour: Sequence[int]) -> NDArray[np.int64]:
    """Wait until a pixel has a colour, about; return the screen."""
    deadline = time.monotonic() + 60
    while np.abs((found := picture(browser))[place] - colour).max() > 4:
        assert time.monotonic() < deadline, f"{found[place]} at {place}"
        time.sleep(0.3)
    return found


@pytest.mark.browser
@needs_browser
def test_both_images_are_drawn_at_two_zooms_and_channels_in_their_colours(images: dict[str, Path]) -> None:
    hole = [*bytes.fromhex(BACKGROUND[1:])]
    with chromium(*GPU) as browser:
        with shown([images["clean"]], images["noisy"]) as server:
            browser.get(server.address)
            low, high = 40, 220
            grey = round((200 - low) / (high - low) * 255)
            screen = until_drawn(browser, (350, 700), [grey] * 3)
            height = screen.shape[0] // 2
            assert [*screen[height, 130]] == hole
            browser.execute_script(ZOOM)
            screen = until_drawn(browser, (height, 130), [0, 0, 0])
            assert np.abs(screen[350, 700] - grey).max() <= 4
        with shown([images["cells"]]) as server:
            browser.get(server.address)
            until_drawn(browser, (200, 650), [0, 0, 255])
            until_drawn(browser, (600, 650), [0, 255, 0])
