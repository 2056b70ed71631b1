"""Functions that run as ranks of a torch program in the tests; some of them have a U-Net of layers and functions, on rows that are cut among ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halotile import collectives, torch_group
from halotile.errors import ConfigError, PeerLost
from halotile.graphs.clusters.workers.fork_server import ensure_forks
from halotile.tasks.groups import opening
from halotile.tasks.groups.group import TorchGroup

SLOTS = 12


class Ended(NamedTuple):
    """End of a process: its exit code, and the result of its function."""

    code: int | None
    result: Any


def launched(function: Callable[..., Any], environments: Sequence[Mapping[str, str]], *args: Any) -> list[Ended]:
    """Call a function in processes as those of a launcher, each with variables of its own."""
    ensure_forks()  # with torch, whose import takes seconds
    context = multiprocessing.get_context("forkserver")
    started = []
    for own in environments:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_launched, args=(sender, dict(own), function, args))
        process.start()
        sender.close()
        started.append((process, receiver))
    ended = []
    for process, receiver in started:
        result = None
        with suppress(EOFError):
            result = receiver.recv() if receiver.poll(120) else None
        process.join(60)
        ended.append(Ended(process.exitcode, result))
    return ended


def _launched(sender: Connection, own: Mapping[str, str], function: Callable[..., Any], args: Sequence[Any]) -> None:
    os.environ.update(own)
    sender.send(function(*args))


def turns() -> list[list[str]]:
    """Join the ranks of a launcher three times; return rank, size, a sum and the addresses listened at of each."""
    said = []
    for turn in range(3):
        with torch_group.join(device_mode="cpu", timeout_seconds=60) as group:
            total = float(group.all_reduce(torch.tensor(group.rank + 10.0 * turn)))
            places = _listened_at()
            said.append([str(group.rank), str(group.world_size), str(total), ",".join(places)])
    return said


def waited_for() -> float | None:
    """Seconds for which rank 0 waits at its end for another that is killed."""
    try:
        with torch_group.join(device_mode="cpu") as group:
            if group.rank == 1:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.monotonic()
    except PeerLost:
        return time.monotonic() - began
    return None


def left_at_once(meeting: str) -> None:
    """Meet, and end without torch, which removes the file with its last rank."""
    with opening.opened(opening.Rendezvous(int(os.environ["RANK"]), 2, meeting=meeting, device_mode="cpu")):
        kept = dist.distributed_c10d._get_default_store()
    os._exit(kept is None)


def own_group(meeting: str) -> list[tuple[Any, ...]]:
    """Join the groups of a program that made them itself: all ranks, and those along two axes of a mesh."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(os.environ.pop("RANK")), world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "space"))
    found = []
    for given in (None, mesh.get_group("space"), mesh.get_group("data")):
        with torch_group.join(device_mode="cpu", process_group=given) as group:
            total = float(group.all_reduce(torch.tensor(dist.get_rank() + 1.0)))
            part = collectives.all_gather_v(torch.ones(1), group, [1] * group.world_size)
            group.barrier()
            inner = group.mesh({"left": 1, "rest": -1})["rest"].world_size
        found.append((group.rank, group.world_size, total, len(part), inner))
    dist.barrier()
    dist.destroy_process_group()
    return found


def _listened_at() -> list[str]:
    """Addresses at which this process listens for TCP."""
    found = psutil.Process().net_connections("tcp")
    return sorted({entry.laddr.ip for entry in found if entry.status == psutil.CONN_LISTEN})


def slot(number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The tensor of a slot; its sums depend on their order."""
    numbers = torch.randn(7, 143, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return (numbers * 10.0 ** (number % 5)).to(dtype)


def slot_sums(group: TorchGroup) -> list[torch.Tensor]:
    """Sums over slots in several types."""
    return [
        group.sum_slots({number: slot(number, dtype) for number in group.slots(SLOTS)}, SLOTS)
        for dtype in (torch.float32, torch.float64, torch.complex64, torch.int64)
    ]


def everything(group: TorchGroup) -> dict[str, Any]:
    """Every method once."""
    x = torch.tensor([1.0, -2.0]) * (group.rank + 1)
    group.barrier()
    return {
        "rank": (group.rank, group.world_size, group.local_rank, group.device.type),
        **{op: group.all_reduce(x, op).tolist() for op in ("sum", "mean", "min", "max", "product")},
        "copy": group.broadcast(x, group.world_size - 1).tolist(),
        "left as it was": x.tolist(),
        "mean of integers": group.all_reduce(torch.tensor([3, group.rank]), "mean"),
    }


def along_mesh(group: TorchGroup) -> dict[str, Any]:
    """Ranks of the own groups of a mesh, by their sums; and those of a mesh within one of them."""
    number = torch.tensor(10.0**group.rank)
    mesh = group.mesh({"data": 2, "space": -1})
    wide = group.mesh({"left": 1, "all": group.world_size})
    inner = wide["all"].mesh({"rows": 2, "columns": 2})["columns"].mesh({"rows": 2, "columns": 1})
    return {
        **{name: (part.rank, float(part.all_reduce(number))) for name, part in mesh.items()},
        "inner": [float(part.all_reduce(number)) for part in inner.values()],
        "copied": float(mesh["data"].broadcast(number, 1)),
    }


def late(group: TorchGroup, rank: int, seconds: float) -> float:
    """One rank comes to a barrier late, and ends late; both times it is longer than the timeout of the group."""
    if group.rank == rank:
        time.sleep(seconds)
    group.barrier(60.0)
    if group.rank == rank:
        time.sleep(seconds)
    return time.monotonic()


def barrier_without(group: TorchGroup, rank: int, folder: str) -> None:
    """One rank never comes to a barrier; the others write how long they waited there."""
    if group.rank == rank:
        time.sleep(3)  # it ends by itself: no worker has to be started anew
        return
    began = time.monotonic()
    try:
        group.barrier(0.5)
    except PeerLost:
        Path(folder, str(group.rank)).write_text(str(time.monotonic() - began))
        raise


def place_of(place: opening.Rendezvous) -> tuple[int, int | None, list[str]]:
    """Mode of the folder in which ranks meet, the number of a rank's GPU, and the addresses at which it listens beside Dask.

    Also for what connects ranks on GPUs beside nccl.
    """
    with opening.opened(place) as group:
        opening._beside(group).barrier()
        return stat.S_IMODE(Path(place.meeting).parent.stat().st_mode), place.gpu, _listened_at()


def fail(group: TorchGroup, way: str, rank: int) -> Any:
    """One rank ends in some way while the others wait for it."""
    if group.rank != rank:
        return group.barrier() if way == "returns a lock" else group.all_reduce(torch.ones(3))
    match way:
        case "raises":
            raise ValueError("the seventh patch is empty")
        case "exits":
            sys.exit("no such data")
        case "is interrupted":
            raise KeyboardInterrupt
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            time.sleep(600)
        case "returns a lock":
            group.barrier()
            return threading.Lock()
    return None


def once_killed(group: TorchGroup, folder: str) -> tuple[int, float]:
    """A loop with a checkpoint, one rank of which is killed in the first attempt."""
    kept = Path(folder, "checkpoint")
    step, total = torch.load(kept) if kept.exists() else (0, torch.zeros(()))
    first = step
    for number in range(step, 6):
        total = total + group.all_reduce(torch.tensor(float(number)))
        if group.rank == 0:
            torch.save((number + 1, total), kept.with_suffix(".new"))
            os.replace(kept.with_suffix(".new"), kept)
        group.barrier()
        if number == 3 and first == 0 and group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return first, float(total)


def exchanged(group: TorchGroup) -> tuple[bool, list[str]]:
    """Whether the ranks share memory, and what they exchange that has other bits without it: lengths and types that change, and none."""
    apart, faults = replace(group, shared=None), []
    for turn, dtype in enumerate((torch.float32, torch.complex128, torch.int64, torch.bool, torch.float16) * 2):
        for length in (5, 0, 70_001 * (turn + 1)):
            sizes = [(rank * length + turn) * (rank != 1) for rank in range(group.world_size)]
            own = torch.arange(sizes[group.rank]).add(group.rank).to(dtype)
            found, expected = (each.gather_parts(own, sizes) for each in (group, apart))
            parts = [own[rank:] for rank in range(group.world_size)]
            ours = [max(0, size - group.rank) for size in sizes]
            found += group._exchange(parts, ours)
            expected += apart._exchange(parts, ours)
            if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                faults.append(f"{dtype} {length}")
    ones = {number: torch.ones(3, requires_grad=True) for number in group.slots(5)}
    if any(each.sum_slots(ones, 5).requires_grad for each in (group, apart)):
        faults.append("a gradient of the own slots alone")
    return group.shared is not None, faults


def memory_files() -> int:
    """Number of files of this process that are memory of ranks."""
    links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return sum("memfd:halotile" in os.readlink(link) for link in links if link.is_symlink())


def gathering_without(group: TorchGroup, rank: int, how: str) -> None:
    """One rank ends before an exchange, or comes too late for it."""
    if group.rank == rank:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raised":
            raise RuntimeError("no such pattern")
        time.sleep(3)
    group.gather_parts(torch.ones(1), [1] * group.world_size)


# --- rows of an image that are cut among ranks ---


class UNet(nn.Module):  # type: ignore[misc]
    """Convolutions of several kinds, pooling, upsampling, skips, and every norm."""

    def __init__(self, mode: str = "zeros") -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, padding_mode=mode), nn.GroupNorm(2, 8), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(8, 8, 4, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(2)
        dilated, norm = nn.Conv2d(8, 8, 3, padding="same", dilation=2, groups=2), nn.InstanceNorm2d(8, affine=True)
        self.middle = nn.Sequential(dilated, norm, nn.LeakyReLU())
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")
        self.transposed = nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1)
        self.attention = nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(16, 1, 5, padding=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        half = self.down(first)
        half = half * torch.softmax(self.attention(half), dim=1)
        quarter = self.middle(F.avg_pool2d(half, 2) + self.pool(half))
        back = self.transposed(torch.cat([half, self.up(quarter)], 1))
        smooth = F.interpolate(F.max_pool2d(first, 2), scale_factor=2, mode="nearest")
        residual: torch.Tensor = self.last(torch.cat([F.relu(back), first - 0.5 * smooth], dim=1))
        return x - residual


def compared(group: TorchGroup, rows: int, padding_mode: str, training: bool) -> dict[str, float]:
    """Largest relative differences from the whole image: of the output, and of the gradients of image and weights."""
    return network_gaps(group, partial(UNet, padding_mode), rows, stride=4, training=training)


def network_gaps(
    group: TorchGroup, make: Callable[[], nn.Module], rows: int, stride: int, training: bool = False, scale: int = 1
) -> dict[str, float]:
    """The same of any network, whose result has so many rows for each of the image."""
    torch.manual_seed(2)
    whole, cut = make().double().train(training), make().double().train(training)
    cut.load_state_dict(whole.state_dict())
    x = torch.randn(2, 1, rows, 24, dtype=torch.float64, requires_grad=True)
    expected = whole(x)
    v = torch.randn(expected.shape, dtype=torch.float64)
    sizes = torch_group.aligned_sizes(rows, group.world_size, stride)
    made = [scale * n for n in sizes]
    part = x.detach().split(sizes, -2)[group.rank].clone().requires_grad_()
    collectives.mark_shared(cut, group)
    actual = torch_group.spatial(cut, group)(part)
    expected.backward(v)
    actual.backward(v.split(made, -2)[group.rank])
    assert x.grad is not None
    assert part.grad is not None

    def gap(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).abs().max() / b.abs().max().clamp_min(1e-2))

    parameters = zip(cut.named_parameters(), whole.parameters(), strict=True)
    buffers = zip(cut.named_buffers(), whole.buffers(), strict=True)
    return {
        "output": gap(actual, expected.split(made, -2)[group.rank]),
        "image": gap(part.grad, x.grad.split(sizes, -2)[group.rank]),
        **{name: gap(p.grad, q.grad) for (name, p), q in parameters},
        **{name: gap(a, b) for (name, a), b in buffers if a.is_floating_point()},
    }


def said_of_parts(group: TorchGroup, sizes: list[int]) -> list[str]:
    """Errors of networks that begin with a norm or with nothing but functions of pixels, on parts of such sizes."""
    part = torch.randn(2, 3, sizes[group.rank], 24)
    said = []
    for network in (nn.BatchNorm2d(3), nn.InstanceNorm2d(3), nn.Sequential(nn.ReLU(), nn.GroupNorm(3, 3)), UNet()):
        try:
            torch_group.spatial(network, group)(part)
        except ConfigError as error:
            said.append(str(error))
    return said


def pools(group: TorchGroup) -> list[float]:
    """Differences of average pools with their options from those of the whole image."""
    x = torch.randn(1, 2, 16, 11, generator=torch.Generator().manual_seed(1))
    sizes = torch_group.aligned_sizes(16, group.world_size, 2)
    gaps = []
    for pool in (
        nn.AvgPool2d(2, divisor_override=1),
        nn.AvgPool2d((2, 3), padding=(0, 1), count_include_pad=False),
        nn.MaxPool2d((2, 3), padding=(0, 1)),
    ):
        cut = torch_group.spatial(pool, group)(x.split(sizes, -2)[group.rank])
        gaps.append(float((cut - pool(x).split([n // 2 for n in sizes], -2)[group.rank]).abs().max()))
    return gaps


TRANSPOSED = (
    {"kernel_size": 4, "stride": 4, "padding": 1, "output_padding": 2},
    {"kernel_size": 5, "stride": 4, "padding": 2, "output_padding": 3},
    {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    {"kernel_size": 6, "stride": 4, "padding": 2, "output_padding": 2},
    {"kernel_size": 2, "stride": 3, "output_padding": 1},
    {"kernel_size": 1, "padding": 1, "output_padding": 2, "dilation": 3},
)
"""Transposed convolutions with output_padding: less than the padding, as much, and more; the last one looks at later rows alone."""


def transposed(group: TorchGroup) -> list[float]:
    """Largest differences of transposed convolutions from the whole image: of outputs, and of gradients of image, weight and bias."""
    made = [(partial(nn.ConvTranspose2d, 1, 3, **options), options.get("stride", 1)) for options in TRANSPOSED]
    return [max(network_gaps(group, make, 9, 1, scale=scale).values()) for make, scale in made]


ACCEPTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cat(tensors=)": lambda x: torch.cat(tensors=[x, x], dim=1),
    "mean(input=)": lambda x: torch.mean(input=x, dim=1, keepdim=True),
    "zeros": lambda x: x + torch.zeros(1) + torch.full((1, 1, 1, 1), 2.0),
    "columns": lambda x: x * torch.arange(x.shape[-1]),
    "columns left out": lambda x: x[..., 1:] + x[:, :, :, :-1],
    "dropout2d": nn.Dropout2d().eval(),
    "no_grad": torch.no_grad()(nn.Conv2d(2, 1, 1)),
}


def accepted(group: TorchGroup) -> dict[str, bool]:
    """True for functions that give the numbers of the whole image."""
    x = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(1))
    sizes = torch_group.aligned_sizes(8, group.world_size, 1)
    own = x.split(sizes, -2)[group.rank]
    return {
        name: torch.equal(torch_group.spatial(function, group)(own), function(x).split(sizes, -2)[group.rank])
        for name, function in ACCEPTED.items()
    }


class Doubled(torch.autograd.Function):  # type: ignore[misc]
    """A function of single pixels with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


class Blurred(Doubled):
    """A convolution with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return F.conv2d(x, x, padding=1)


def checkpointed_gaps(group: TorchGroup, is_reentrant: bool) -> list[float]:
    """Differences of the gradients of a network, halves of which the backward pass computes again, from those of the whole image."""
    torch.manual_seed(4)
    first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Upsample(scale_factor=2, mode="bilinear"), nn.ReLU())
    second = nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 1, 3, padding=1))
    halves = first.double(), second.double()

    def network(x: torch.Tensor, among: TorchGroup) -> torch.Tensor:
        for half in halves:
            x = checkpoint(torch_group.spatial(half, among), Doubled.apply(x), use_reentrant=is_reentrant)
        with torch.no_grad():
            frozen = F.avg_pool2d(x, 2)
        return x + F.interpolate(frozen, scale_factor=2)

    def gradients(x: torch.Tensor, apply: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        x, weight = x.clone().requires_grad_(), first[0].weight
        weight.grad = None
        apply(x).square().sum().backward()
        return [x.grad, weight.grad]

    x = torch.randn(1, 1, 12, 7, dtype=torch.float64)
    sizes = torch_group.aligned_sizes(12, group.world_size, 1)
    image, weight = gradients(x, lambda whole: network(whole, TorchGroup()))
    own, part = gradients(x.split(sizes, -2)[group.rank], torch_group.spatial(lambda rows: network(rows, group), group))
    pairs = (own, image.split(sizes, -2)[group.rank]), (group.all_reduce(part), weight)
    return [float((a - b).abs().max()) for a, b in pairs]


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "flip": lambda x: torch.flip(x, (-2,)),
    "mean": lambda x: x.mean((-2, -1)),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "softmax": lambda x: torch.softmax(x, -2),
    "interpolate": lambda x: F.interpolate(x, size=(8, 8)),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 1, 1),
    "matmul": lambda x: torch.matmul(x.new_ones(x.shape[-2], x.shape[-2]), x),
    "transpose": lambda x: x.transpose(-1, -2),
    "roll": lambda x: torch.roll(x, 1, -2),
    "cumsum": lambda x: x.cumsum(-2),
    "getitem": lambda x: x[..., 1:, :],
    "ceil_mode": lambda x: nn.AvgPool2d(2, ceil_mode=True)(x),
    "max ceil_mode": lambda x: torch.max_pool2d(x, 2, 2, 0, 1, True),
    "even kernel": lambda x: nn.Conv2d(1, 1, 4, padding="same")(x),
    "property": lambda x: x.mT,
    "three axes": lambda x: x[0].mean(1),
    "index of three axes": lambda x: x[0][0, 1],
    "flip(input=)": lambda x: torch.flip(input=x, dims=(-2,)),
    "mean(input=)": lambda x: torch.mean(input=x, dim=2),
    "cat(tensors=)": lambda x: torch.cat(tensors=[x, x], dim=2),
    "randn": lambda x: x + torch.randn(1),
    "dropout2d": nn.Dropout2d(),
    "dropout1d": lambda x: F.dropout1d(x[0]),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.5, True),
    "as many rows as are reflected": nn.Conv2d(1, 1, 9, padding=4, padding_mode="reflect"),
    "own gradient": lambda x: Blurred.apply(x.requires_grad_()),
    "checkpoint": lambda x: checkpoint(nn.Conv2d(1, 1, 3), x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(nn.Conv2d(1, 1, 3), x, use_reentrant=True),
    "other ranks": lambda x: torch_group.spatial(F.relu, TorchGroup(0, 2))(x),
    "padded average": lambda x: nn.AvgPool2d(3, 1, 1)(x),
    "align_corners": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
    "pixel_unshuffle": nn.PixelUnshuffle(2),
    "weight_norm": nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 1, 3)),
    "spectral_norm": nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, 1, 3)),
    "layer_norm": nn.LayerNorm(4),
    "conv3d": lambda x: nn.Conv3d(1, 1, 1)(x[None]),
}


def refusals(group: TorchGroup) -> dict[str, str]:
    """Errors of functions that mix rows."""
    found, image = {}, torch.ones(1, 1, 4, 4)
    convolution = nn.Conv2d(1, 1, 3, padding=1)
    compiled = {"script": torch.jit.script(convolution), "trace": torch.jit.trace(convolution, image)}
    for name, function in {**REFUSED, **compiled}.items():
        try:
            torch_group.spatial(function, group)(image)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
