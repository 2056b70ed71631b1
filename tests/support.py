"""Small images, whole-picture references and jobs for the tests.

What workers import of the tests imports this: torch is left to the functions that need it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from halotile.cli.config.loading import load_job
from halotile.graphs.jobs.denoise.job import Denoising, NoiseModel
from halotile.graphs.kinds.base import Footprint
from halotile.graphs.kinds.sections import DenoiserChoice, Input, Output, Run, Tile
from halotile.graphs.plans.choices import make_chosen
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.storage.disk.object_path import OutputPath
from halotile.storage.sharded.output import create_output, to_dtype
from halotile.storage.sharded.ownership import mark_complete
from halotile.tasks.block import BlockRunner

Image = NDArray[Any]

DTYPES = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "float32", "float64", ">u2", ">f4")
"""Types of pixels that an image may have."""

IN_THREADS: dict[str, Any] = {
    "processes": False,
    "threads_per_worker": 1,
    "dashboard_address": "127.0.0.1:0",
    "worker_dashboard_address": "127.0.0.1:0",
}
"""Options of a LocalCluster in this process. Without addresses, Dask serves its dashboard on all interfaces."""


def noisy_image(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Image:
    """Smooth waves with noise on them, in [0, 1] for floats and over the whole range for integers."""
    rng = np.random.default_rng(seed)
    waves = np.zeros(shape)
    for axis, length in enumerate(shape):
        position = np.arange(length).reshape([-1 if i == axis else 1 for i in range(len(shape))])
        waves = waves + np.sin(position / (7.0 + axis)) / len(shape)
    pixels = np.clip(0.5 + 0.35 * waves + 0.1 * rng.standard_normal(shape), 0, 1)
    kind = np.dtype(dtype)
    return (pixels * np.iinfo(kind).max).astype(kind) if kind.kind in "iu" else pixels.astype(kind)


def write_zarr(path: Path, pixels: Image, chunk: int = 64, axes: str | None = None) -> Path:
    """The image as a plain Zarr array."""
    chunks, names = tuple(min(chunk, n) for n in pixels.shape), list(axes) if axes else None
    array = zarr.create_array(path, shape=pixels.shape, dtype=pixels.dtype, chunks=chunks, dimension_names=names)
    array[...] = pixels
    return path


def job_of(
    source: str | Path,
    output: Path,
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    shard: Any = 128,
    chunk: Any = 32,
    tile: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    **parts: Mapping[str, Any],
) -> Denoising:
    """A job on small images, with small shards."""
    return Denoising(
        input=Input(path=str(source), **parts.get("input", {})),
        output=Output(path=str(output), shard=shard, chunk=chunk, **parts.get("output", {})),
        denoiser=DenoiserChoice(name=name, options=dict(options or {})),
        tile=Tile(**(tile or {})),
        noise=NoiseModel(**parts.get("noise", {})),
        run=Run(**(run or {})),
        allow_import=True,
    )


def load_denoising(path: Path, *arguments: Any, **options: Any) -> Denoising:
    """The denoising job of a configuration."""
    job = load_job(path, *arguments, **options)
    assert isinstance(job, Denoising)
    return job


def whole_picture(job: Denoising, pixels: Image, depth: int, spatial: int = 2) -> Image:
    """What the denoiser gives on the whole image at once: the truth that tiles must meet, bit by bit.

    ``pixels`` has the tiled axes last; all others are looped over.
    """
    import torch

    denoiser = make_chosen(job.denoiser, job)
    model: Any = denoiser.build()
    if denoiser.convolutional:
        model = model.to(memory_format=torch.channels_last)
    mode = {"reflect": "symmetric", "cut": None}[denoiser.boundary]
    depth = -(-depth // denoiser.alignment) * denoiser.alignment  # its pixels are pooled by the same groups
    low, high = (0, np.iinfo(pixels.dtype).max) if pixels.dtype.kind in "iu" else (0, 1)
    result = np.empty_like(pixels)
    for plane in np.ndindex(pixels.shape[: pixels.ndim - spatial]):
        values = pixels[plane].astype("float64" if pixels.dtype.itemsize >= 8 else "float32")
        values = (values - values.dtype.type(low)) / values.dtype.type(high - low)
        if mode:
            values = np.pad(values, depth, mode=mode)  # type: ignore[call-overload]
        image = torch.from_numpy(values)[None, None]
        if denoiser.convolutional:
            image = image.contiguous(memory_format=torch.channels_last)
        with torch.inference_mode():
            done = model(image)[0, 0].numpy()
        if mode:
            done = done[(slice(depth, -depth),) * spatial]
        done = done * done.dtype.type(high - low) + done.dtype.type(low)
        result[plane] = to_dtype(done, pixels.dtype)
    return result


def run_inline(job: Denoising) -> Image:
    """The job in this process, block by block, without a cluster; returns the output's pixels."""
    plan = make_plan(job)
    create_output(plan.output, plan.layout, overwrite=True)
    receipt = BlockRunner(work_of(plan).task).run(range(len(plan.grid)))
    assert not receipt.bad, receipt.bad[0].traceback
    mark_complete(plan.output, plan.layout)
    return read_zarr(plan.output)


def read_zarr(path: str | OutputPath) -> Image:
    """The pixels of a Zarr array, or of the finest level of an OME-Zarr."""
    node: Any = zarr.open(str(path), mode="r")
    pixels: Image = (node["0"] if isinstance(node, zarr.Group) else node)[...]
    return pixels


def dncnn_weights(path: Path, depth: int = 5, width: int = 8, channels: tuple[int, int] = (1, 1)) -> Path:
    """Random weights of a small DnCNN."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    sizes = [channels[0], *[width] * (depth - 1), channels[1]]
    state = {}
    for layer, (into, out) in enumerate(itertools.pairwise(sizes)):
        state[f"layers.{layer}.weight"] = torch.randn((out, into, 3, 3), generator=generator) / (3 * into**0.5)
        state[f"layers.{layer}.bias"] = torch.randn(out, generator=generator) * 0.01
    save_file(state, path)
    return path


def footprint_of(plan: Plan) -> Footprint:
    """The memory that a worker of a denoising plan needs, by what it is for."""
    from halotile.graphs.jobs.denoise import cutting

    (source, *_), work = plan.sources, work_of(plan)
    found = cutting.footprint_of(work.task, source.chunks if not source.mapped else (1,), work.tuned)
    assert sum(found.values()) == plan.memory_bytes
    return found


def work_of(plan: Plan) -> Any:
    """The work of a plan, as the class of its kind."""
    return plan.work
