"""Programs that denoise, each measured in a process of its own: ``python denoising.py NAME FOLDER EDGE``.

Every program prints one line of JSON: ``seconds`` of wall time with its cluster up and its imports
done, and ``peak_bytes`` where memory is the question. Ours and its peers get the same
image, the same function and two workers of one thread.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.data import BOX, CNN, CNN_REACH, box, image, network, our_network, weights
from tests.benchmarks.measuring import Result, fresh, in_two_processes, main, warm, watched_memory

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
    from halotile.graphs.clusters import local
    from halotile.graphs.clusters.base import Order
    from halotile.graphs.jobs.denoise.job import Denoising
    from halotile.graphs.kinds.sections import Cluster, Input, Output, Run, Tile
    from halotile.graphs.plans.plan import make_plan
    from halotile.graphs.runs.driver import run

    job = Denoising(
        input=Input(path=str(source)),
        # Peers write full resolution alone.
        output=Output(path=str(output), format="ome-zarr" if levels else "zarr"),
        denoiser=denoiser,
        tile=Tile() if block is None else Tile(block=block),
        run=Run(workers=workers),
        cluster=Cluster(),
        allow_import=True,
    )
    watching = watched_memory() if watch else nullcontext(lambda: 0)
    with local.start(Order(workers=workers, memory_bytes=8 * 2**30)) as cluster, watching as peak:
        warm(cluster.client)
        before(cluster.client)
        began = time.perf_counter()
        outcome = run(make_plan(job), cluster=cluster)
        seconds = time.perf_counter() - began
        after(cluster.client)
    assert outcome.done == outcome.total
    return {"seconds": seconds, "blocks": outcome.total, "peak_bytes": peak()}


def ours_box(folder: Path, edge: int) -> Result:
    """The box filter as a job."""
    from halotile.tasks.denoisers.function import GivenFunction

    choice = GivenFunction(call=box, depth=BOX // 2)
    return run_job(image(folder, edge), fresh(folder / "ours-box.zarr"), choice)


def ours_cnn(folder: Path, edge: int, workers: int = 2, squares: int = 1, *, levels: bool = False) -> Result:
    """The network as a job."""
    from halotile.graphs.kinds.sections import DenoiserChoice

    choice = DenoiserChoice(name="dncnn", options={"weights": str(weights(folder)), **CNN})
    source = image(folder, edge, squares=squares)
    return run_job(source, fresh(folder / "ours-cnn.zarr"), choice, workers=workers, levels=levels)


def ours_cnn_one_worker(folder: Path, edge: int) -> Result:
    """The same by one worker."""
    return ours_cnn(folder, edge, workers=1)


def ours_cnn_two_squares(folder: Path, edge: int) -> Result:
    """Twice the pixels by two workers."""
    return ours_cnn(folder, edge, squares=2)


def copied(folder: Path, edge: int, *, levels: bool = False) -> Result:
    """A copy as a job: no denoiser."""
    from halotile.graphs.kinds.sections import DenoiserChoice

    output = fresh(folder / "copied.zarr")
    return run_job(image(folder, edge), output, DenoiserChoice(name="none"), levels=levels)


def copied_in_levels(folder: Path, edge: int) -> Result:
    """The same in resolution levels."""
    return copied(folder, edge, levels=True)


def ours_cnn_in_levels(folder: Path, edge: int) -> Result:
    """The network as a job, its output in resolution levels."""
    return ours_cnn(folder, edge, levels=True)


def ours_gaussian(folder: Path, edge: int) -> Result:
    """A gaussian as a job, in super-blocks of one size: the case whose memory must not grow."""
    from halotile.graphs.kinds.sections import DenoiserChoice

    choice = DenoiserChoice(name="gaussian", options={"sigma": 2.0})
    return run_job(image(folder, edge), fresh(folder / "ours-gaussian.zarr"), choice, block=1024, watch=True)


def ours_noop(folder: Path, blocks: int) -> Result:
    """Blocks that do nothing, through the stream and the journal: what orchestration costs."""
    import psutil

    from halotile.graphs.clusters import local
    from halotile.graphs.clusters.base import Order
    from halotile.graphs.runs.passes.stream import Grouping, Stream
    from halotile.storage.run_directory.journal import Journal
    from tests.benchmarks.denoising import do_nothing  # by reference, as a job's own function travels

    journal = Journal.create(fresh(folder / "noop-journal"), "noop", blocks)
    process = psutil.Process()
    with local.start(Order(workers=2, memory_bytes=8 * 2**30)) as cluster:
        everyone = [process, *process.children(recursive=True)]
        before = sum(one.memory_info().rss for one in everyone)
        most = before
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
        seconds = time.perf_counter() - began
        grown = max(most, sum(one.memory_info().rss for one in everyone)) - before
    assert len(journal.done) == blocks
    return {"seconds": seconds, "per_block_ms": 1e3 * seconds / blocks, "first_s": first, "grown_mb": grown / 1e6}


def do_nothing(numbers: tuple[int, ...]) -> Any:
    """A receipt for no work."""
    from halotile.tasks.block import Receipt

    return Receipt(done=list(numbers), seconds=1e-7)


# --- peers ----------------------------------------------------------------------------------------


@contextmanager
def plain_cluster() -> Iterator[Any]:
    """Two worker processes as Dask starts them when it is told nothing more."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", host="127.0.0.1") as cluster,
        Client(cluster) as client,
    ):
        warm(client)
        yield client


def stock(folder: Path, edge: int, function: Callable[..., Any], depth: int, boundary: str, name: str) -> Result:
    """dask.array.map_overlap, from Zarr to Zarr."""
    import dask.array as da
    import zarr

    source = image(folder, edge)
    output = fresh(folder / f"stock-{name}.zarr")
    with plain_cluster():
        began = time.perf_counter()
        array = da.from_zarr(str(source))
        target = zarr.create_array(output, shape=array.shape, dtype=array.dtype, chunks=array.chunksize)
        array.map_overlap(function, depth=depth, boundary=boundary, dtype=array.dtype, meta=array._meta).store(
            target, lock=False, compute=True
        )
        seconds = time.perf_counter() - began
    return {"seconds": seconds}


def stock_box(folder: Path, edge: int) -> Result:
    """The box filter under stock map_overlap."""
    return stock(folder, edge, box, BOX // 2, "nearest", "box")


def stock_cnn(folder: Path, edge: int) -> Result:
    """The network under stock map_overlap."""
    return stock(folder, edge, partial(forward_numpy, folder=folder), CNN_REACH, "none", "cnn")


_models: dict[Path, Any] = {}


def forward_numpy(pixels: NDArray[Any], folder: Path) -> NDArray[Any]:
    """The network on one NumPy block, loaded once for each process, one thread, channels last."""
    import torch

    if folder not in _models:
        torch.set_num_threads(1)
        _models[folder] = network(folder)
    with torch.inference_mode():
        batch = torch.from_numpy(np.ascontiguousarray(pixels))[None, None]
        batch = batch.contiguous(memory_format=torch.channels_last)
        return np.asarray(_models[folder](batch)[0, 0].numpy())


def copy(folder: Path, edge: int) -> Result:
    """A plain copy in one process, into the layout and codecs of our output."""
    import zarr

    from halotile.storage.sharded.shards import LEVELS

    source = zarr.open_array(image(folder, edge), mode="r")
    target = zarr.create_array(
        fresh(folder / "copy.zarr"),
        shape=source.shape,
        dtype=source.dtype,
        chunks=(256, 256),
        shards=(1024, 1024),
        compressors=[
            zarr.codecs.BloscCodec(cname="lz4", clevel=LEVELS["lz4"], shuffle="shuffle"),
            zarr.codecs.Crc32cCodec(),
        ],
        fill_value=np.nan,
    )
    began = time.perf_counter()
    for y in range(0, edge, 1024):
        for x in range(0, edge, 1024):
            target[y : y + 1024, x : x + 1024] = source[y : y + 1024, x : x + 1024]
    return {"seconds": time.perf_counter() - began}


def bare_cnn(folder: Path, edge: int) -> Result:
    """The network alone, over tiles of an image in memory: two processes of one thread, or one of two.

    As plain torch and as halotile builds it; the best of all counts. No storage, no scheduler.
    """
    import zarr

    pixels = zarr.open_array(image(folder, edge), mode="r")[...]
    np.save(folder / "bare.npy", pixels)
    rows = range(0, edge, TILE)
    halves = [range(0, edge // 2, TILE), range(edge // 2, edge, TILE)]
    ways = [(parts, built) for parts in ([rows], halves) for built in ("plain", "ours")]
    return {"seconds": min(_bare_spawn(folder, edge, parts, built) for parts, built in ways)}


def bare_tiles(folder: Path, edge: int, rows: range, threads: int, built: str) -> float:
    """Seconds that one process takes over these rows of tiles, its imports and a warm-up apart."""
    import torch

    torch.set_num_threads(threads)
    pixels = np.load(folder / "bare.npy", mmap_mode="r")
    pixels = np.array(pixels)
    model = network(folder) if built == "plain" else our_network(folder)
    result = np.empty_like(pixels)
    with torch.inference_mode():
        for _ in range(2):
            began = time.perf_counter()
            for y in rows:
                for x in range(0, edge, TILE):
                    y0, x0 = max(0, y - CNN_REACH), max(0, x - CNN_REACH)
                    window = pixels[y0 : y + TILE + CNN_REACH, x0 : x + TILE + CNN_REACH]
                    batch = torch.from_numpy(np.ascontiguousarray(window))[None, None]
                    batch = batch.contiguous(memory_format=torch.channels_last)
                    done = model(batch)[0, 0].numpy()
                    result[y : y + TILE, x : x + TILE] = done[y - y0 : y - y0 + TILE, x - x0 : x - x0 + TILE]
            seconds = time.perf_counter() - began
    return seconds


def _bare_spawn(folder: Path, edge: int, parts: list[range], built: str) -> float:
    import subprocess

    from halotile.graphs.clusters.workers.settings import WORKER_ENVIRONMENT

    threads = 2 // len(parts)
    environment = os.environ | WORKER_ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from pathlib import Path; "
        "from tests.benchmarks.denoising import bare_tiles; "
        "a = [int(v) for v in sys.argv[3:]]; "
        "print(bare_tiles(Path(sys.argv[1]), a[0], range(a[1], a[2], a[3]), a[4], sys.argv[2]))"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder), built]
            + [str(v) for v in (edge, part.start, part.stop, part.step, threads)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for part in parts
    ]
    return max(float(process.communicate()[0].strip().splitlines()[-1]) for process in running)


def monai_cnn(folder: Path, edge: int, overlap: float = 2 * CNN_REACH / TILE) -> Result:
    """MONAI's sliding window over an image in memory, two threads, channels last."""
    import torch
    import zarr
    from monai.inferers import sliding_window_inference

    torch.set_num_threads(2)
    model = network(folder)
    pixels = zarr.open_array(image(folder, edge), mode="r")[...]
    batch = torch.from_numpy(pixels)[None, None]

    def forward(windows: Any) -> Any:
        return model(windows.contiguous(memory_format=torch.channels_last))

    with torch.inference_mode():
        sliding_window_inference(batch[..., :1024, :1024], (TILE, TILE), 1, forward, overlap=overlap)
        began = time.perf_counter()
        sliding_window_inference(batch, (TILE, TILE), 1, forward, overlap=overlap)
        return {"seconds": time.perf_counter() - began}


def monai_cnn_default(folder: Path, edge: int) -> Result:
    """The same at MONAI's default overlap of a quarter."""
    return monai_cnn(folder, edge, overlap=0.25)


def deepinv_cnn(folder: Path, edge: int, patch: int = 256, overlap: int = 32) -> Result:
    """deepinv.distributed with two processes of one thread, the image in memory."""
    image(folder, edge)
    weights(folder)
    return in_two_processes(folder, _deepinv_rank, folder, edge, patch, overlap)


def deepinv_cnn_default(folder: Path, edge: int) -> Result:
    """The same at deepinv's default patch of 256 with overlap 64."""
    return deepinv_cnn(folder, edge, 256, 64)


def _deepinv_rank(folder: Path, edge: int, patch: int, overlap: int) -> Result:
    import torch
    import zarr
    from deepinv.distributed import DistributedContext, distribute
    from deepinv.models import Denoiser

    inner = network(folder)

    class Wrapped(Denoiser):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any, sigma: Any = None, **_: Any) -> Any:
            return self.inner(x.contiguous(memory_format=torch.channels_last))

    with DistributedContext(backend="gloo", device_mode="cpu") as context, torch.no_grad():
        denoiser = distribute(Wrapped(), context, patch_size=patch, overlap=overlap)
        pixels = torch.from_numpy(zarr.open_array(image(folder, edge), mode="r")[...])[None, None]
        denoiser(pixels[..., :1024, :1024], 0.1)
        began = time.perf_counter()
        denoiser(pixels, 0.1)
        return {"seconds": time.perf_counter() - began}


if __name__ == "__main__":
    main(globals())
