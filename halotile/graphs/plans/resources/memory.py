"""Memory of one worker for one block: the model by which plans are refused.

A test compares it with measured peaks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

from halotile.errors import MemoryRefused
from halotile.graphs.amounts import bytes_text
from halotile.graphs.clusters.common.machine import cgroups_of
from halotile.tasks.devices.gpu import BUFFERS

MIB = 1024**2
IMPORTS_BYTES = 700 * MIB
"""Resident memory of a worker before its first block: Python, Dask, zarr, torch."""
SHARED_BYTES = 240 * MIB
"""Part of it that is program files, of which a machine keeps one copy for all its workers."""
GPU_BYTES = 2048 * MIB
"""Allowance for a GPU driver and its libraries in a process that uses a GPU, until a trial has measured them."""
CGROUP_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Limit files of the two versions of control groups."""


def machine_bytes() -> int:
    """Return the memory of this machine, or the part that the control groups of this process allow."""
    import psutil

    limits = [int(psutil.virtual_memory().total)]
    for group, name in product(cgroups_of("memory"), CGROUP_LIMITS):
        with suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int((group / name).read_text("utf-8")))
    return min(limit for limit in limits if limit > 0)


def share_bytes(machine: int, workers: int) -> int:
    """Return the most memory that each worker may need where so many share a machine.

    Examples
    --------
    >>> share_bytes(8 * 2**30, 1) // MIB, share_bytes(8 * 2**30, 4) // MIB
    (8192, 2228)
    """
    return (machine - SHARED_BYTES) // workers + SHARED_BYTES


def workers_that_fit(machine: int, needed: int) -> int:
    """Return the number of workers of this need that a machine has memory for.

    Examples
    --------
    >>> workers_that_fit(8 * 2**30, 1024 * MIB)
    10
    """
    return max(0, (machine - SHARED_BYTES) // (needed - SHARED_BYTES))


def gpu_bytes(measured: int | None) -> int:
    """Return the memory of a GPU's own libraries in a worker: from a trial's measurement, else the allowance.

    Examples
    --------
    >>> gpu_bytes(None) // MIB, gpu_bytes(IMPORTS_BYTES + 900 * MIB) // MIB
    (2048, 900)
    """
    return GPU_BYTES if measured is None else max(0, measured - IMPORTS_BYTES)


def check_share(
    workers: int, machine: int | None, needed: int, what: str, smaller: str, beside: str = ""
) -> None:
    """Refuse more workers than a machine has memory for.

    ``workers``: number of workers wanted; ``machine``: memory that they share, in bytes; None where they run on other machines; ``needed``: need of
    each worker, in bytes; ``what, smaller, beside``: largest part of it, what to write to need less, and a further remark.
    """
    if machine is None or needed <= share_bytes(machine, workers):
        return
    fit = workers_that_fit(machine, needed)
    raise MemoryRefused(
        f"run.workers is {workers}; each needs {bytes_text(needed)}, including {what}. "
        f"{bytes_text(SHARED_BYTES)} of that are one copy for all; this machine has {bytes_text(machine)}."
        f"{beside} " + (f"Write run.workers: {fit}, or {smaller}." if fit else f"Write {smaller}.")
    )


PROCESS, MODEL, TILES = "the program itself", "the model", "the tiles"
READ, WRITTEN, DECODED = "the pixels read", "the pixels written", "one stored piece of the input"
Footprint = Mapping[str, int]
"""Bytes that one worker holds at once, by purpose."""


@dataclass(frozen=True)
class Need:
    """Memory that one worker holds at once in one kind of task."""

    what: str  # task, such as `one block of [512, 512]`
    parts: Footprint  # projected peak, by purpose
    smaller: str = ""  # what to write instead, as the end of a sentence
    remedy: str = ""  # sentences with what to write instead, where these are others
    remark: str = ""  # further remark

    @property
    def total_bytes(self) -> int:
        """The projected peak."""
        return sum(self.parts.values())

    def describe(self) -> str:
        """Describe the largest parts, largest first."""
        largest = sorted(self.parts.items(), key=lambda part: -part[1])[:3]
        return ", ".join(f"{bytes_text(count)} are {purpose}" for purpose, count in largest if count)

    def refusal(self) -> str:
        """Return what is needed, its parts, and what to write instead."""
        remedy = (
            self.remedy
            or f"Write run.memory_per_worker: {-(-self.total_bytes // MIB)}MiB, or {self.smaller}."
        )
        return f"{self.what} needs {bytes_text(self.total_bytes)}, including {self.describe()}.{self.remark} {remedy}"


def pinned(size: int) -> int:
    """Return the bytes that torch allocates for so many bytes of pinned memory.

    Source: PyTorch, ``CachingHostAllocator``: the next power of two.

    Examples
    --------
    >>> pinned(150 * MIB) // MIB, pinned(256 * MIB) // MIB
    (256, 256)
    """
    return 1 << max(0, size - 1).bit_length()


def footprint(
    *,
    # window, core_out, shard: window that a block reads (pixels of the input), the core that it writes and one shard
    # (pixels of the output)
    window: tuple[int, ...],
    core_out: tuple[int, ...],
    shard: tuple[int, ...],
    # tile_window_pixels, batch: pixels of one compute window, all channels, and the number of windows computed at
    # once
    tile_window_pixels: int,
    batch: int,
    # itemsize_in, itemsize_work, itemsize_out: bytes of one pixel as it is read, computed and stored: it has the type
    # of the computation until it is encoded
    itemsize_in: int,
    itemsize_work: int,
    itemsize_out: int,
    # unit of decode of the input, in pixels: it is in memory both encoded and decoded
    stored_piece: tuple[int, ...],
    sides: int,  # number of per-pixel side inputs
    bytes_per_pixel: float,  # denoiser's working memory for each pixel of a window
    weights_bytes: int,  # size of the model
    overlap: bool,  # the next read and the last write run during the computation
    io_threads: int = 1,  # threads that read and write in parallel, each with parts of its own
    coarser: float = 0.0,  # pixels of the next levels for each pixel of the core
    # memory that a GPU's own libraries keep in the worker, where one computes: tiles are then on the GPU, and pixels
    # pass through pinned memory on their way there and back
    gpu_bytes: int | None = None,
) -> dict[str, int]:
    """Return the footprint of a block of this size."""
    read, result = math.prod(window) * itemsize_in, math.prod(core_out) * itemsize_work
    encode = int((io_threads * 2 * math.prod(shard) + coarser * math.prod(core_out)) * itemsize_out)
    common = {MODEL: weights_bytes, DECODED: io_threads * 2 * math.prod(stored_piece) * itemsize_in}
    if gpu_bytes is not None:
        return common | {
            PROCESS: IMPORTS_BYTES + gpu_bytes,
            READ: read * (1 + sides) + BUFFERS * pinned(read),
            WRITTEN: 2 * result + BUFFERS * pinned(result) + encode,
            TILES: 0,
        }
    return common | {
        PROCESS: IMPORTS_BYTES,
        READ: read * (1 + sides) * (1 + overlap),
        # The next window may begin in the space of a result, and the next result finds no room there: one more is counted.
        WRITTEN: result * (2 + overlap) + encode,
        TILES: int(tile_window_pixels * batch * (bytes_per_pixel + 4 * (2 + sides))),
    }
