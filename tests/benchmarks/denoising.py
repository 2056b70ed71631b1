"""Programs that denoise, each measured in a process of its own.

Every program prints one line of JSON: ``seconds`` of wall time with its cluster up and its imports
done, and ``peak_bytes`` where memory is the question. Ours and its peers get the same
image, the same function and two workers of one thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.data import BOX, CNN, CNN_REACH, box, image, network, our_network, pixels_of, weights
from tests.benchmarks.measuring import (
    PROGRAM,
    Result,
    chosen,
    deepinv_denoiser,
    fresh,
    in_two_processes,
    seconds,
    seconds_spent,
    started,
    timed,
    warm,
    watched_memory,
)

TILE = 512


# --- ours -----------------------------------------------------------------------------------------


def run_job(
    source: Path,
    output: Path,
    denoiser: Any,
    block: int | None = None,
    *,
    workers: int = 2,
    watch: bool = False,
    levels: bool = False,
    before: Callable[[Any], Any] = lambda client: None,
    after: Callable[[Any], Any] = lambda client: None,
) -> Result:
    """One job on a cluster that is up: plan, run, everything on disk and synced.

    Watching the memory of all processes takes a few per cent of a core: it is left to the case that asks for it.
    """
    from halotile.graphs.jobs.denoise.job import Denoising
    from halotile.graphs.kinds.sections import Cluster, Input, Output, Run, Tile
    from halotile.graphs.plans.plan import make_plan
    from halotile.graphs.runs.driver import run

    job = Denoising(
        input=Input(path=str(source)),
        # Peers write full resolution alone.
        output=Output(path=str(fresh(output)), format="ome-zarr" if levels else "zarr"),
        denoiser=denoiser,
        tile=Tile() if block is None else Tile(block=block),
        run=Run(workers=workers),
        cluster=Cluster(),
        allow_import=True,
    )
    with started(workers) as cluster, watched_memory() if watch else nullcontext(lambda: 0) as peak:
        before(cluster.client)
        began = time.perf_counter()
        outcome = run(make_plan(job), cluster=cluster)
        spent = time.perf_counter() - began
        after(cluster.client)
    assert outcome.done == outcome.total
    return {"seconds": spent, "blocks": outcome.total, "peak_bytes": peak()}


def ours_box(folder: Path, edge: int) -> Result:
    """The box filter as a job."""
    from halotile.tasks.denoisers.function import GivenFunction

    return run_job(image(folder, edge), folder / "ours-box.zarr", GivenFunction(call=box, depth=BOX // 2))


def ours_cnn(folder: Path, edge: int, workers: str = "2", squares: str = "1", levels: str = "") -> Result:
    """The network as a job: of some workers, on one square or more, at full resolution alone or in resolution levels."""
    choice = chosen("dncnn", weights=str(weights(folder)), **CNN)
    source = image(folder, edge, squares=int(squares))
    return run_job(source, folder / "ours-cnn.zarr", choice, workers=int(workers), levels=bool(levels))


def copied(folder: Path, edge: int, levels: str = "") -> Result:
    """A copy as a job: no denoiser."""
    return run_job(image(folder, edge), folder / "copied.zarr", chosen("none"), levels=bool(levels))


def ours_gaussian(folder: Path, edge: int) -> Result:
    """A gaussian as a job, in super-blocks of one size: the case whose memory must not grow."""
    choice = chosen("gaussian", sigma=2.0)
    return run_job(image(folder, edge), folder / "ours-gaussian.zarr", choice, block=1024, watch=True)


def ours_noop(folder: Path, blocks: int) -> Result:
    """Blocks that do nothing, through the stream and the journal: what orchestration costs."""
    import psutil

    from halotile.graphs.runs.passes.stream import Grouping, Stream
    from halotile.storage.run_directory.journal import Journal

    journal = Journal.create(fresh(folder / "noop-journal"), "noop", blocks)
    process = psutil.Process()
    with started(2, is_warm=False) as cluster:
        everyone = [process, *process.children(recursive=True)]
        before = most = sum(one.memory_info().rss for one in everyone)
        began = time.perf_counter()
        first, next_look = None, began
        stream = Stream(cluster.client, do_nothing, name="noop", grouping=Grouping(2))
        for answers in stream.answers(iter(range(blocks)), blocks):
            for answer in answers:
                first = first or time.perf_counter() - began
                journal.mark(dict.fromkeys(answer.result.done, b"none"))
            if time.perf_counter() > next_look:
                next_look += 0.2
                most = max(most, sum(one.memory_info().rss for one in everyone))
        spent = time.perf_counter() - began
        grown = max(most, sum(one.memory_info().rss for one in everyone)) - before
    assert len(journal.done) == blocks
    return {"seconds": spent, "per_block_ms": 1e3 * spent / blocks, "first_s": first, "grown_mb": grown / 1e6}


def do_nothing(numbers: tuple[int, ...]) -> Any:
    """A receipt for no work."""
    from halotile.tasks.block import Receipt

    return Receipt(done=list(numbers), seconds=1e-7)


# --- peers ----------------------------------------------------------------------------------------


def stock(folder: Path, edge: int, name: str) -> Result:
    """dask.array.map_overlap, from Zarr to Zarr, on two worker processes as Dask starts them when it is told nothing more."""
    import dask.array as da
    import zarr
    from distributed import Client, LocalCluster

    function, depth, boundary = {
        "box": (box, BOX // 2, "nearest"),
        "cnn": (partial(forward_numpy, folder=folder), CNN_REACH, "none"),
    }[name]
    source, output = image(folder, edge), fresh(folder / f"stock-{name}.zarr")
    options: Any = {"dashboard_address": "127.0.0.1:0", "host": "127.0.0.1"}
    with LocalCluster(n_workers=2, threads_per_worker=1, **options) as cluster, Client(cluster) as client:
        warm(client)

        def store() -> None:
            array = da.from_zarr(str(source))
            target = zarr.create_array(output, shape=array.shape, dtype=array.dtype, chunks=array.chunksize)
            done = array.map_overlap(function, depth=depth, boundary=boundary, dtype=array.dtype, meta=array._meta)
            done.store(target, lock=False, compute=True)

        return {"seconds": seconds(store)}


_models: dict[Path, Any] = {}


def forward_numpy(pixels: NDArray[Any], folder: Path) -> NDArray[Any]:
    """The network on one NumPy block, loaded once for each process, one thread, channels last."""
    import torch

    if folder not in _models:
        torch.set_num_threads(1)
        _models[folder] = network(folder)
    with torch.inference_mode():
        batch = torch.from_numpy(np.ascontiguousarray(pixels))[None, None]
        return np.asarray(_models[folder](batch.contiguous(memory_format=torch.channels_last))[0, 0].numpy())


def copy(folder: Path, edge: int) -> Result:
    """A plain copy in one process, into the layout and codecs of our output."""
    import zarr

    from halotile.storage.sharded.shards import LEVELS

    source, codecs = zarr.open_array(image(folder, edge), mode="r"), zarr.codecs
    blosc = codecs.BloscCodec(cname="lz4", clevel=LEVELS["lz4"], shuffle="shuffle")
    layout: Any = {"chunks": (256, 256), "shards": (1024, 1024), "compressors": [blosc, codecs.Crc32cCodec()]}
    output = fresh(folder / "copy.zarr")
    target = zarr.create_array(output, shape=source.shape, dtype=source.dtype, fill_value=np.nan, **layout)

    def copy_all() -> None:
        for y in range(0, edge, 1024):
            for x in range(0, edge, 1024):
                target[y : y + 1024, x : x + 1024] = source[y : y + 1024, x : x + 1024]

    return {"seconds": seconds(copy_all)}


def bare_cnn(folder: Path, edge: int) -> Result:
    """The network alone, over tiles of an image in memory: two processes of one thread, or one of two.

    As plain torch and as halotile builds it; the best of all counts. No storage, no scheduler.
    """
    np.save(folder / "bare.npy", pixels_of(folder, edge))
    rows = range(0, edge, TILE)
    halves = [range(0, edge // 2, TILE), range(edge // 2, edge, TILE)]
    ways = [(parts, built) for parts in ([rows], halves) for built in ("plain", "ours")]
    return {"seconds": min(_bare_spawn(folder, edge, parts, built) for parts, built in ways)}


def bare_tiles(folder: Path, edge: int, start: str, stop: str, threads: str, built: str) -> Result:
    """Seconds that one process takes over some rows of tiles, its imports and a warm-up apart."""
    import torch

    torch.set_num_threads(int(threads))
    pixels = np.array(np.load(folder / "bare.npy", mmap_mode="r"))
    model = network(folder) if built == "plain" else our_network(folder)
    result = np.empty_like(pixels)

    def all_tiles() -> None:
        for y in range(int(start), int(stop), TILE):
            for x in range(0, edge, TILE):
                y0, x0 = max(0, y - CNN_REACH), max(0, x - CNN_REACH)
                window = pixels[y0 : y + TILE + CNN_REACH, x0 : x + TILE + CNN_REACH]
                batch = torch.from_numpy(np.ascontiguousarray(window))[None, None]
                done = model(batch.contiguous(memory_format=torch.channels_last))[0, 0].numpy()
                result[y : y + TILE, x : x + TILE] = done[y - y0 : y - y0 + TILE, x - x0 : x - x0 + TILE]

    with torch.inference_mode():
        all_tiles()
        return {"seconds": seconds(all_tiles)}


def _bare_spawn(folder: Path, edge: int, parts: list[range], built: str) -> float:
    from halotile.graphs.clusters.workers.settings import WORKER_ENVIRONMENT

    threads = 2 // len(parts)
    environment = os.environ | WORKER_ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
    running = []
    for part in parts:
        words = map(str, (folder, edge, part.start, part.stop, threads, built))
        command = [*PROGRAM, "denoising.bare_tiles", *words]
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    return max(float(json.loads(process.communicate()[0])["seconds"]) for process in running)


def monai_cnn(folder: Path, edge: int, overlap: str = str(2 * CNN_REACH / TILE)) -> Result:
    """MONAI's sliding window over an image in memory, two threads, channels last; its default overlap is a quarter."""
    import torch
    from monai.inferers import sliding_window_inference

    torch.set_num_threads(2)
    model, batch = network(folder), torch.from_numpy(pixels_of(folder, edge))[None, None]

    def forward(windows: Any) -> Any:
        return model(windows.contiguous(memory_format=torch.channels_last))

    def slide(given: Any) -> Any:
        return sliding_window_inference(given, (TILE, TILE), 1, forward, overlap=float(overlap))

    with torch.inference_mode():
        slide(batch[..., :1024, :1024])
        return {"seconds": seconds(lambda: slide(batch))}


def deepinv_cnn(folder: Path, edge: int, patch: str = "256", overlap: str = "32") -> Result:
    """deepinv.distributed with two processes of one thread, the image in memory; its defaults are 256 and 64."""
    image(folder, edge)
    weights(folder)
    return in_two_processes(folder, _deepinv_rank, folder, edge, int(patch), int(overlap))


def _deepinv_rank(folder: Path, edge: int, patch: int, overlap: int) -> Result:
    import torch
    from deepinv.distributed import DistributedContext, distribute

    model = network(folder)
    wrapped = deepinv_denoiser(lambda x: model(x.contiguous(memory_format=torch.channels_last)))
    with DistributedContext(backend="gloo", device_mode="cpu") as context, torch.no_grad():
        denoiser = distribute(wrapped, context, patch_size=patch, overlap=overlap)
        pixels = torch.from_numpy(pixels_of(folder, edge))[None, None]
        denoiser(pixels[..., :1024, :1024], 0.1)
        return {"seconds": seconds(lambda: denoiser(pixels, 0.1))}


def share(folder: Path, edge: int) -> Result:
    """Per cent of the job's time: the driver's seconds, and those of the workers side by side."""
    from halotile.graphs.runs.held_output import HeldOutputs
    from halotile.tasks.denoisers.function import GivenFunction

    HeldOutputs._is_checked = timed("checks", HeldOutputs._is_checked)  # type: ignore[method-assign]
    in_workers: list[float] = []
    job = run_job(
        image(folder, edge),
        folder / "safe-copy.zarr",
        GivenFunction(call=same, depth=0),
        before=lambda client: client.run(time_digests),
        after=lambda client: in_workers.extend(sum(each.values()) for each in client.run(seconds_spent).values()),
    )
    driver = sum(seconds_spent().values())
    assert driver
    assert all(in_workers)
    return {"percent": 100 * (driver + sum(in_workers) / len(in_workers)) / job["seconds"]}


def same(window: NDArray[Any]) -> NDArray[Any]:
    """The same pixels."""
    return window


def time_digests() -> None:
    """Time what a worker does for digests from now on."""
    from halotile.storage.sharded import shards

    shards.digest_of = timed("digests", shards.digest_of)
