"""Programs of the table of a GPU, each a process of its own.

Every program prints one line of JSON. ``mpix_per_s`` are pixels of the result, in millions, for each second.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halotile.storage.grid import Block, Grid
from halotile.storage.io_threads import IO_THREADS
from halotile.storage.rim import Pixels, Readable
from halotile.storage.sharded.output import ShardWriter
from halotile.tasks.block import BlockRunner, Receipt
from halotile.tasks.devices.device import prepare_process
from tests.benchmarks import ptychography, training, unets
from tests.benchmarks.data import CNN, CNN_REACH, image, network, our_network, pixels_of, weights
from tests.benchmarks.measuring import Result, chosen, deepinv_denoiser, fresh, seconds, started
from tests.support import work_of

SIGMA = 2.0
WORKER_MEMORY = 8 * 2**30
WAYS = {"cnn": ((512, 16), (1024, 4), (2048, 1), (4096, 1)), "unet": ((512, 4), (1024, 4), (2048, 1))}
"""Tiles and batches of which the bare forward takes the best."""
STOPWATCH = "stopwatch"
"""How cuDNN chooses an algorithm, where it is not by rule."""


# --- what is run ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A denoiser of the table.

    Parameters
    ----------
    name : str
        ``cnn``, ``gaussian`` or ``unet``.
    width : int
        Channels of the U-Net at full resolution.
    """

    name: str
    width: int = unets.WIDTH

    @classmethod
    def named(cls, word: str) -> Subject:
        """``unet-16`` and the like."""
        name, _, width = word.partition("-")
        return cls(name, int(width)) if width else cls(name)

    @property
    def reach(self) -> int:
        """How far an output pixel looks."""
        return {"cnn": CNN_REACH, "gaussian": round(4 * SIGMA), "unet": unets.reach()}[self.name]

    def choice(self, folder: Path) -> Any:
        """The denoiser as a job names it."""
        if self.name == "cnn":
            return chosen("dncnn", weights=str(weights(folder)), **CNN)
        if self.name == "gaussian":
            return chosen("gaussian", sigma=SIGMA)
        options: dict[str, Any] = {
            "import": "tests.benchmarks.unets:residual_unet",
            "options": {"width": self.width},
            "receptive_field": self.reach,
            "alignment": unets.STRIDE,
            "bytes_per_pixel": 32.0 * self.width,
        }
        return chosen("torch", **options)

    def models(self, folder: Path) -> dict[str, Any]:
        """The model as plain torch and as halotile builds it, where these are two."""
        if self.name == "cnn":
            return {"plain": network(folder), "ours": our_network(folder)}
        if self.name == "gaussian":
            from halotile.tasks.denoisers.gaussian import Gaussian

            return {"ours": Gaussian(sigma=SIGMA).build()}
        return {"plain": unets.residual_unet(self.width)}


def planned(folder: Path, edge: int, device: str, subject: str, name: str, workers: int = 1) -> Any:
    """The plan of a job whose output has nothing yet."""
    from halotile.graphs.plans.plan import make_plan

    known, output = sizes_of(folder, edge, device, subject, workers), fresh(folder / f"{name}.zarr")
    return make_plan(job_of(Subject.named(subject), image(folder, edge), output, device, workers, known))


def sizes_of(folder: Path, edge: int, device: str, subject: str, workers: int = 1) -> Path:
    """Where the sizes are kept that the first run chose."""
    return folder / f"ours-{subject}-{device}-{edge}-{workers}.json"


def job_of(subject: Subject, source: Path, output: Path, device: str, workers: int, known: Path | None = None) -> Any:
    """The job, on workers of this machine that share its one GPU; with the sizes that an earlier run chose, where it is known."""
    from halotile.graphs.jobs.denoise.job import Denoising
    from halotile.graphs.kinds.sections import Cluster, Input, Output, Run, Tile

    return Denoising(
        input=Input(path=str(source)),
        output=Output(path=str(output), format="zarr"),  # as the peers: full resolution alone
        denoiser=subject.choice(source.parent),
        # The halo is as deep as the network looks, all the same: what is spared is the planner's own comparison of tiles
        # with a whole, which takes a network of this size minutes on one core.
        tile=Tile(seams="allow", **(json.loads(known.read_text()) if known and known.exists() else {})),
        run=Run(workers=workers, memory_per_worker=WORKER_MEMORY, device=device),  # type: ignore[arg-type]
        cluster=Cluster(kind="local"),
        allow_import=True,
    )


def wake(device: str) -> None:
    """Have a process begin with its GPU, as a worker that has been up for a while has."""
    import torch

    if device == "cuda":
        image = torch.zeros(1, 8, 64, 64, device=device)
        torch.nn.functional.conv2d(image, image[:, :, :3, :3].repeat(8, 1, 1, 1))
        torch.cuda.synchronize()
        del image
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# --- ours -------------------------------------------------------------------------------------------


def ours(folder: Path, edge: int, device: str, subject: str, workers: str = "1") -> Result:
    """A job, from Zarr to Zarr, everything on disk and synced; its plan is made before."""
    from halotile.graphs.runs.driver import run

    count = int(workers)
    with started(count) as cluster:
        cluster.client.run(wake, device)
        before = time.perf_counter()
        plan = planned(folder, edge, device, subject, f"ours-{subject}-{workers}", count)
        if device == "cuda" and work_of(plan).tuned is None:
            raise SystemExit("; ".join(plan.notes))
        began = time.perf_counter()
        outcome = run(plan, cluster=cluster)
        spent = time.perf_counter() - began
    assert outcome.done == outcome.total
    summary = plan.summary()
    sizes = {name: summary[name] for name in ("tile", "batch", "block")}
    known = {"size": sizes["tile"], "batch": sizes["batch"], "block": sizes["block"]}
    sizes_of(folder, edge, device, subject, count).write_text(json.dumps(known))
    return {
        "mpix_per_s": edge**2 / 1e6 / spent,
        "streaming_mpix_per_s": edge**2 / 1e6 / outcome.seconds,
        "seconds": spent,
        "plan_seconds": began - before,
        "busy": outcome.compute_seconds / (outcome.seconds * count),
        "peak_bytes": outcome.device_peak_bytes,
        "planned_bytes": summary["device_memory_bytes"] or 0,
        "redundancy": summary["compute_redundancy"],
        **sizes,
    }


def copy(folder: Path, edge: int, device: str, subject: str) -> Result:
    """The blocks of the same job read and written by one worker, with nothing computed."""
    plan = planned(folder, edge, device, subject, "copy")
    grid, task = replace(plan.grid, depth=((0, 0),) * len(plan.grid.shape)), work_of(plan).task
    receipt = done_by_a_worker(plan, Copy(task.source, task.writer, grid, task.io_threads))
    return {"mpix_per_s": edge**2 / 1e6 / receipt.seconds, "seconds": receipt.seconds}


def done_by_a_worker(plan: Any, task: Any) -> Receipt:
    """The receipt of one worker for every block of a task that writes the output of a plan."""
    from halotile.storage.sharded.output import create_output

    create_output(plan.output, plan.layout)
    with started(1) as cluster:
        receipt: Receipt = cluster.client.submit(done, task, pure=False).result()
    assert not receipt.bad, receipt.bad[0].traceback
    return receipt


def lanes(folder: Path, edge: int, device: str, subject: str) -> Result:
    """Milliseconds of each stage of the same job in one worker, for each million pixels."""
    plan = planned(folder, edge, device, subject, "lanes")
    receipt = done_by_a_worker(plan, work_of(plan).task)
    return {
        f"{stage}_ms": 1e9 * getattr(receipt, f"{stage}_seconds") / edge**2 for stage in ("read", "compute", "write")
    }


# --- the bare forward -------------------------------------------------------------------------------


def bare(folder: Path, edge: int, device: str, subject: str, how: str = STOPWATCH) -> Result:
    """The model by itself on pixels that are on the device: no halo, no disk, the best of some tiles, batches and layouts.

    The first run tries them all; the best of it is what the later ones take. cuDNN chooses by stopwatch, or by rule as in a job.
    """
    known = best_of(folder, device, subject, how)
    ways = [tuple(way) for way in json.loads(known.read_text())] if known.exists() else None
    one_precision(benchmark=how == STOPWATCH)
    measured = dict(_bare_rates(folder, edge, device, Subject.named(subject), ways))
    best = max(measured, key=lambda way: measured[way])
    known.write_text(json.dumps([best]))
    built, tile, batch, last = best
    return {"mpix_per_s": measured[best], "way": f"{batch} × {tile}², channels {'last' if last else 'first'}, {built}"}


def best_of(folder: Path, device: str, subject: str, how: str = STOPWATCH) -> Path:
    """Where the best way of the bare forward is kept."""
    return folder / f"bare-{subject}-{device}-{how}.json"


def _bare_rates(
    folder: Path, edge: int, device: str, subject: Subject, ways: list[Any] | None
) -> Iterator[tuple[Any, float]]:
    """Millions of pixels a second of each way; one that does not fit is left out."""
    import torch

    models = subject.models(folder)
    if ways is None:
        sizes = WAYS.get(subject.name, ((2048, 1), (4096, 1)))
        fitting = [size for size in sizes if size[0] <= edge] or [(edge, 1)]
        layouts = (False, True) if subject.name != "gaussian" else (False,)
        ways = [(built, tile, batch, last) for built in models for tile, batch in fitting for last in layouts]
    for built, tile, batch, last in ways:
        layout = torch.channels_last if last else torch.contiguous_format
        model = models[built]
        if isinstance(model, torch.nn.Module):
            model = model.to(device=device, memory_format=layout)
        try:
            pixels = torch.rand(batch, 1, tile, tile, device=device).contiguous(memory_format=layout)
            once = seconds_of(lambda m=model, p=pixels: m(p), device)  # type: ignore[misc]
        except torch.OutOfMemoryError:
            continue
        finally:
            pixels = None
        yield (built, tile, batch, last), batch * tile**2 / 1e6 / once


def one_precision(benchmark: bool) -> None:
    """As a job computes: float32 without TF32, on one thread where it is a CPU."""
    import torch

    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.deterministic = not benchmark


def seconds_of(call: Callable[[], Any], device: str, least_seconds: float = 0.5) -> float:
    """Seconds of one call among many, after two to warm up."""
    import torch

    with torch.inference_mode():
        for _ in range(2):
            once = timed(call, device, 1)
        # One is enough of a CPU, whose figures nobody reads.
        count = min(50, max(3, math.ceil(least_seconds / once))) if device == "cuda" else 1
        return timed(call, device, count)


def timed(call: Callable[[], Any], device: str, count: int) -> float:
    """Seconds of each of so many calls; the device has nothing to do before and after."""
    import torch

    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None

    def calls() -> None:
        for _ in range(count):
            call()
        synchronize()

    synchronize()
    return seconds(calls) / count


# --- peers, training and ptychography --------------------------------------------------------------

PEER_WINDOW = 2048
"""Windows of the peers, where they are not left at their defaults: as large as pays, so that little is computed twice."""


def _peer(folder: Path, edge: int, device: str, subject: str) -> tuple[Any, Any]:
    """The model as plain torch, in the memory layout in which the bare forward is faster, and the whole image, on the device."""
    import torch

    one_precision(benchmark=True)
    model = next(iter(Subject.named(subject).models(folder).values()))
    known = best_of(folder, device, subject)
    last = not known.exists() or json.loads(known.read_text())[0][3]
    layout = torch.channels_last if last else torch.contiguous_format
    model = model.to(device=device, memory_format=layout)
    pixels = torch.from_numpy(pixels_of(folder, edge))[None, None]

    def forward(windows: Any) -> Any:
        return model(windows.contiguous(memory_format=layout))

    return forward, pixels.to(device)


def _peer_rate(call: Callable[[], Any], device: str, edge: int) -> Result:
    """Millions of pixels a second of the second of two calls."""
    import torch

    with torch.inference_mode():
        timed(call, device, 1)
        return {"mpix_per_s": edge**2 / 1e6 / timed(call, device, 1)}


def monai(folder: Path, edge: int, device: str, subject: str, overlap: str) -> Result:
    """MONAI's sliding window with image and result on the device: the least overlap without seams, or its default."""
    from monai.inferers import sliding_window_inference

    forward, pixels = _peer(folder, edge, device, subject)
    window = min(PEER_WINDOW, edge)
    share = (2 * Subject.named(subject).reach / window) if overlap == "least" and window < edge else 0.25
    return _peer_rate(
        lambda: sliding_window_inference(pixels, (window, window), 1, forward, overlap=share), device, edge
    )


def deepinv(folder: Path, edge: int, device: str, subject: str, patches: str) -> Result:
    """deepinv.distributed in one process with image and result on the device: large patches, or its defaults."""
    from deepinv.distributed import DistributedContext, distribute

    forward, pixels = _peer(folder, edge, device, subject)
    reach = math.ceil(Subject.named(subject).reach / 8) * 8
    patch, overlap, batch = 256, 64, 16
    if patches == "large":
        patch, batch = min(PEER_WINDOW, edge // 2), 1
        overlap = min(reach, patch // 2)
    with DistributedContext(device_mode="gpu" if device == "cuda" else "cpu") as context:
        denoiser = distribute(
            deepinv_denoiser(forward),
            context,
            tiling_dims=(-2, -1),
            patch_size=patch,
            overlap=overlap,
            max_batch_size=batch,
        )
        return _peer_rate(lambda: denoiser(pixels, 0.1), device, edge)


EPOCHS = {"cuda": 40, "cpu": 1}
STEPS = {"cuda": 400, "cpu": 10}
BATCH, PATCH = 16, 64
SCANS = {"petra": {"batch": 10, "lr": 0.04}, "far": {"batch": 64, "lr": 0.02}}


def _exact(folder: Path) -> Path:
    """A scan with exact intensities, without the suffix of its files."""
    ptychography.written(folder, "exact")
    return folder / "exact"


def scan(folder: Path, edge: int, device: str, subject: str) -> Result:
    """Seconds of an epoch of a scan, on one worker."""
    import halotile

    if subject == "petra":
        opened = ptychography.petra(folder)
    else:
        opened = halotile.ptychography.open(_exact(folder).with_suffix(".zarr"), modes=2)
    given: Any = {"cluster": {"kind": "local"}, "device_mode": "gpu" if device == "cuda" else "cpu"}
    options = {"lr": SCANS[subject]["lr"], "batch_size": SCANS[subject]["batch"]}
    with halotile.DistributedContext(workers=1, **given) as context:
        adam = halotile.ptychography.Adam(opened, context=context)
        return {"seconds": ptychography.epoch_seconds(adam, EPOCHS[device], **options)}


def cdtools(folder: Path, edge: int, device: str, subject: str) -> Result:
    """The same by CDTools."""
    request: dict[str, Any] = dict(ptychography.PETRA_REQUEST)
    if subject != "petra":
        request = {"cxi": str(_exact(folder).with_suffix(".cxi")), "modes": 2}
    epochs = EPOCHS[device] + ptychography.WARM
    request["device"] = device
    return {"seconds": ptychography.cdtools_seconds(folder, request, SCANS[subject], epochs, 1)}


def step(folder: Path, edge: int, device: str) -> Result:
    """Seconds of a step of training, as a job of one worker."""
    source = training.noisy(folder, "retina", "gaussian", edge)
    weights = folder / f"step-{device}.safetensors"
    return training.train(
        source, weights, steps=STEPS[device], run={"workers": 1, "device": device}, cluster={"kind": "local"}
    )


def loop(folder: Path, edge: int, device: str) -> Result:
    """Seconds of a forward and a backward pass of the same network and of Adam, on pixels that are on the device."""
    import torch

    from halotile.tasks.denoisers.common.layers import BlindUNet

    one_precision(benchmark=True)
    network = BlindUNet(1, 32, 2).to(device)
    adam = torch.optim.Adam(network.parameters())
    pixels = torch.rand(BATCH, 1, PATCH, PATCH, device=device)

    def once() -> None:
        with torch.inference_mode(False), torch.enable_grad():
            adam.zero_grad()
            (network(pixels.clone()) - pixels.clone()).square().mean().backward()
            adam.step()

    return {"seconds": seconds_of(once, device)}


# --- the machine ------------------------------------------------------------------------------------


def gpu(folder: Path, edge: int, device: str) -> Result:
    """What the device is called, and what is installed for it. Asked in a process of its own: the driver never begins with CUDA."""
    import torch

    if device != "cuda":
        return {"name": "the processor"}
    if not torch.cuda.is_available():
        return {"name": None}
    shown = torch.cuda.get_device_properties(0)
    return {
        "name": torch.cuda.get_device_name(0),
        "memory_bytes": shown.total_memory,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


@dataclass(frozen=True)
class Copy:
    """What a copy does to a block: one thread reads the next and another one writes the last, as in a job on a GPU."""

    source: Readable
    writer: ShardWriter
    grid: Grid
    io_threads: int
    overlap = True
    batch = 1

    def stages(self) -> Copy:
        """There is nothing to load."""
        return self

    def check(self) -> None:
        """Nothing is computed."""

    def read(self, block: Block) -> Pixels:
        """The core alone."""
        return self.source.read(block.core)

    def compute(self, block: Block, what_was_read: Any, receipt: Receipt) -> Any:
        """The same pixels."""
        return what_was_read

    def write(self, block: Block, result: Any, receipt: Receipt) -> None:
        """Encoded and durable, as every output is."""
        receipt.enter(block.number, [self.writer.write(block.core, result)])

    def finish(self, receipt: Receipt) -> None:
        """There is no device."""


def done(task: Any) -> Receipt:
    """The receipt of this process for every block."""
    prepare_process(threads=1)
    IO_THREADS.resize(task.io_threads)
    return BlockRunner(task).run(range(len(task.grid)))
