"""Filters of halotile and of the libraries that people use for them: thread for thread in memory, and as whole jobs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.bars import filter_run
from tests.benchmarks.data import image, pixels_of
from tests.benchmarks.denoising import run_job
from tests.benchmarks.measuring import Result, chosen, fresh, in_two_processes, seconds

SIGMA = 1.5
STEPS = 20
NOISE = 0.1
OPTIONS: dict[str, dict[str, Any]] = {
    "gaussian": {"sigma": SIGMA},
    "tv": {"strength": 0.1, "iterations": STEPS},
    "nlm": {"strength": 0.8, "sigma": NOISE, "patch": 5, "distance": 6},
}
MEDIANS = (3, 5, 7, 9, 11, 13, 15)
OPTIONS |= {f"median{size}": {"size": size} for size in MEDIANS}


def _fastest(call: Callable[[], Any]) -> Result:
    """The fastest of all calls in a second, five at least, after one that is not counted."""
    call()
    spent: list[float] = []
    while len(spent) < 5 or sum(spent) < 1:
        spent.append(seconds(call))
    return {"seconds": min(spent)}


def ours_alone(folder: Path, edge: int, name: str) -> Result:
    """One of our filters on a tile in memory, one thread."""
    import torch

    from halotile.tasks.denoisers import gaussian, median, nlm, tv

    torch.set_num_threads(1)
    batch = torch.from_numpy(pixels_of(folder, edge))[None, None]
    modules = {"gaussian": gaussian, "tv": tv, "nlm": nlm}
    filtered: Any = modules.get(name, median).DENOISER(**OPTIONS[name]).build()
    with torch.inference_mode():
        return _fastest(lambda: filtered(batch))


def opencv_alone(folder: Path, edge: int, name: str) -> Result:
    """OpenCV's, one thread."""
    import cv2

    cv2.setNumThreads(1)
    pixels = pixels_of(folder, edge)
    out = np.empty_like(pixels)
    if name == "gaussian":
        return _fastest(lambda: cv2.GaussianBlur(pixels, (0, 0), SIGMA, dst=out))
    return _fastest(lambda: cv2.medianBlur(pixels, OPTIONS[name]["size"], dst=out))


def scipy_alone(folder: Path, edge: int, name: str) -> Result:
    """scipy's median, one thread."""
    from scipy.ndimage import median_filter

    pixels = pixels_of(folder, edge)
    return _fastest(lambda: median_filter(pixels, OPTIONS[name]["size"]))


def ours(folder: Path, edge: int, name: str) -> Result:
    """One of our filters as a job of two workers, from Zarr to Zarr."""
    return run_job(image(folder, edge), folder / f"ours-{name}.zarr", chosen(name, **OPTIONS[name]))


def skimage(folder: Path, edge: int, name: str) -> Result:
    """skimage's filter in two processes of one thread, half of an image in memory each."""
    image(folder, edge)
    return in_two_processes(folder, _skimage_half, folder, edge, name)


def _skimage_half(folder: Path, edge: int, name: str) -> Result:
    from skimage.restoration import denoise_nl_means, denoise_tv_chambolle

    half = np.array_split(pixels_of(folder, edge), 2)[int(os.environ["RANK"])]
    if name == "tv":
        strength = OPTIONS["tv"]["strength"]
        return {"seconds": seconds(lambda: denoise_tv_chambolle(half, weight=strength, eps=0, max_num_iter=STEPS + 1))}
    given = OPTIONS["nlm"]
    h, patch, distance = given["strength"] * NOISE, given["patch"], given["distance"]
    return {"seconds": seconds(lambda: denoise_nl_means(half, patch, distance, h, fast_mode=True, sigma=NOISE))}


def raw_copy(folder: Path, edge: int) -> Result:
    """The array's bytes, copied from one file to another and synced."""
    plain = folder / f"bytes-{edge}.raw"
    if not plain.exists():
        pixels_of(folder, edge).tofile(plain)
    copied = fresh(folder / "bytes-copied.raw")

    def copy() -> None:
        shutil.copyfile(plain, copied)
        with copied.open("rb+") as file:
            os.fsync(file.fileno())

    return {"seconds": seconds(copy)}


def ours_as_command(folder: Path, edge: int, dtype: str, name: str) -> Result:
    """One of our filters as `recon-cli run` with two workers, from Zarr to Zarr."""
    options = ", ".join(f"{key}: {value}" for key, value in OPTIONS[name].items())
    kind = "median" if name.startswith("median") else name
    return {"seconds": filter_run(folder, image(folder, edge, dtype=dtype), f"{kind}, {options}")}


VIPS = """
import pyvips, sys
source, target, name = sys.argv[1:]
image = pyvips.Image.new_from_file(source, access="sequential")
precision = "float" if image.format == "float" else "integer"
image = image.gaussblur(1.5, precision=precision, min_ampl=0.001) if name == "gaussian" else image.median(int(name[6:]))
image.tiffsave(target, bigtiff=True)
"""


def vips_as_command(folder: Path, edge: int, dtype: str, name: str) -> Result:
    """The filter of libvips on two threads, from TIFF to TIFF, both uncompressed; without fsync. Its gaussian is cut where it is 0.001 of its height, ours at 6 pixels."""
    import tifffile
    import zarr

    plain = folder / f"image-{edge}-{dtype}.tif"
    if not plain.exists():
        stored = zarr.open_array(image(folder, edge, dtype=dtype), mode="r")
        mapped = tifffile.memmap(plain, shape=stored.shape, dtype=stored.dtype, bigtiff=True)
        for row in range(0, edge, 512):
            mapped[row : row + 512] = stored[row : row + 512]
        mapped.flush()
    command = [sys.executable, "-c", VIPS, str(plain), str(fresh(folder / "filtered.tif")), name]
    environment = os.environ | {"VIPS_CONCURRENCY": "2"}
    return {"seconds": seconds(lambda: subprocess.run(command, env=environment, check=True))}


FILTER_ROWS = [
    ("kernels", "gaussian σ 1.5, one thread: kernel / OpenCV's", "filters.ours_alone gaussian", "filters.opencv_alone gaussian", 1024, 2.5),
    *(
        ("kernels", f"median {size} × {size}, one thread: kernel / OpenCV's", f"filters.ours_alone median{size}", f"filters.opencv_alone median{size}", 1024, 1.43)
        for size in (3, 5)
    ),
    *(
        ("large-medians", f"median {size} × {size}, one thread: kernel / scipy's", f"filters.ours_alone median{size}", f"filters.scipy_alone median{size}", 1024, 0.2)
        for size in MEDIANS[2:]
    ),
    ("gaussian", "gaussian σ 1.5 of 16384², job of two workers / copying the bytes to a synced file", "filters.ours gaussian", "filters.raw_copy", 16384, 2.5),
    *(
        ("vips", f"{name} of {edge}² {dtype}, `recon-cli run`, Zarr → Zarr / libvips, two threads, TIFF → TIFF without fsync", f"filters.ours_as_command {dtype} {name}", f"filters.vips_as_command {dtype} {name}", edge, bar)
        for name, edge, dtype, bar in (
            ("gaussian", 16384, "float32", 1.0),
            ("gaussian", 32768, "float32", 0.8),
            ("gaussian", 16384, "uint16", 0.9),
            ("median3", 16384, "uint16", 0.4),
        )
    ),
    *(
        ("filters", f"{name} of 6144², job of two workers / skimage in two processes", f"filters.ours {name}", f"filters.skimage {name}", 6144, 0.25)
        for name in ("tv", "nlm")
    ),
]  # fmt: skip
"""Case, title, ours, the peer's, edge and bar, as for :class:`~tests.benchmarks.bars.Ratio`."""
