"""A block of lazy images: read once for several readers, their pixels on its core, which are written, and sums over it; a denoised image as one of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self
from weakref import WeakSet, WeakValueDictionary

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from halotile.storage.grid import Block, Grid, Region
from halotile.storage.rim import Pixels, Readable, Rim, read_window
from halotile.storage.sharded.output import ShardWriter, to_dtype
from halotile.tasks.block import Receipt
from halotile.tasks.convolution.overlap_save import snapped
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.devices.device import unless_lost
from halotile.tasks.devices.gpu import open_device
from halotile.tasks.exact_sums import distance, dot
from halotile.tasks.inner_tiles import Roles, TileRunner, Tiling, spanned
from halotile.tasks.trials.probe import check_purity
from halotile.tasks.trials.provenance import build_sealed


class Scope:
    """The context in which one block is processed. What is read in it is kept until it ends.

    ``cells``: the shards of the block's core: sums are reported for each of them, so that they do not depend on how shards are grouped into blocks.

    Attributes
    ----------
    read_bytes : int
        Bytes read from shared images.

    Examples
    --------
    >>> from halotile.tasks.operators.base import InMemory
    >>> image = Shared(InMemory(np.arange(100.0).reshape(10, 10)), margin=2)
    >>> with Scope([]) as scope:
    ...     first = image.read(Region((4, 4), (5, 6)))
    ...     second = image.read(Region((3, 3), (4, 5)))
    >>> first.tolist(), second.tolist(), scope.read_bytes
    ([[44.0, 45.0]], [[33.0, 34.0]], 240)
    """

    def __init__(self, cells: Sequence[Region] = ()) -> None:
        self.cells = tuple(cells)
        self.read_bytes = 0
        self.written: dict[int, tuple[Region, Pixels]] = {}
        """The images computed for the block so far, by their place in the output."""
        self.at: int | None = None
        """The cell being computed, where each is computed by itself: notes for other cells are dropped."""
        self._parts: dict[int, list[tuple[Region, Pixels]]] = {}
        self._computed: set[int] = set()
        self._notes: dict[str, dict[tuple[int, int], float]] = {}
        self._tokens: list[Token[Scope | None]] = []

    def __enter__(self) -> Self:
        self._tokens.append(_scope.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _scope.reset(self._tokens.pop())

    @staticmethod
    def current() -> Scope | None:
        """The scope of the block that this thread processes."""
        return _scope.get()

    def note(self, name: str, cell: int, part: int, value: float) -> None:
        """Note one part of a sum over one cell. Noting it again replaces it."""
        if self.at is None or self.at == cell:
            self._notes.setdefault(name, {})[cell, part] = value

    def sums(self) -> dict[str, list[float]]:
        """Every noted sum for each cell, its parts added in order."""
        return {
            name: [sum(notes[key] for key in sorted(notes) if key[0] == cell) for cell in range(len(self.cells))]
            for name, notes in self._notes.items()
        }

    def read(self, image: Shared, region: Region) -> Pixels:
        """Return a region of a shared image; do not write to it."""
        for there, pixels in self._parts.get(id(image), ()):
            if region.inside(there):
                return pixels[region.relative_to(there).slices]
        wide = region.widen(image.margin).clip(Region.whole(image.shape))
        return self.hold(image, wide)[region.relative_to(wide).slices]

    def hold(self, image: Shared, region: Region) -> Pixels:
        """Read exactly this region of a shared image now, and keep it."""
        pixels = image.source.read(region)
        self.read_bytes += 0 if image.computed else pixels.nbytes
        self._parts.setdefault(id(image), []).append((region, pixels))
        if image.computed:
            self._computed.add(id(image))
        return pixels

    def forget_computed(self) -> None:
        """Drop computed pixels, so that the next region is computed independently of earlier ones."""
        for number in self._computed:
            del self._parts[number]
        self._computed.clear()


_scope: ContextVar[Scope | None] = ContextVar("scope", default=None)


@dataclass(frozen=True, eq=False)
class Shared:
    """An image with several readers: inside a :class:`Scope` each region is read once."""

    source: Readable  # image
    # extra pixels read on each side of the last two axes: the operators of a stack read nearly the same window one
    # after the other, and a periodic one reads a slab on either side
    margin: int = 0
    computed: bool = False  # whether the image is computed when it is read: then it does not count as read

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return self.source.dtype

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``; do not write to them."""
        scope = Scope.current()
        return self.source.read(region) if scope is None else scope.read(self, region)

    def hold(self, region: Region) -> None:
        """Read ``region`` into the current scope now, so that no part of it is read again."""
        scope = Scope.current()
        assert scope is not None
        scope.hold(self, region)


# The runners of this process that are in use or cached.
_runners: WeakValueDictionary[bytes, TileRunner] = WeakValueDictionary()
_cached: dict[bytes, TileRunner] = {}
_lock = threading.Lock()
_MAX_CACHED = 2  # a solver has one model, and another solver may follow on the same workers


def keep_on_gpus(parts: Collection[Denoised]) -> None:
    """Drop all other models from the GPU: what an earlier job left there is not planned for."""
    wanted = {part.key for part in parts}
    with _lock:
        for key, runner in list(_cached.items()):
            if runner.device.kind != "cpu" and key not in wanted:
                del _cached[key]


@dataclass(frozen=True, eq=False)
class Denoised:
    """``D(x)``, tile by tile."""

    source: Readable  # `x`
    # `D`, with one output pixel for each input pixel. Its model is built once in a process
    denoiser: Denoiser
    tiling: Tiling  # cut into tiles
    roles: Roles  # roles of the axes
    grid: Grid  # blocks with their halo: see `window_of`
    rim: Rim  # boundary rules of the array edges
    device: str = "cpu"  # device, precision: as `run.device` and `run.precision` of a job
    precision: str = "float32"
    channels_last: bool = False  # whether the activations of a network are laid out channels last
    records: bool = False  # whether a GPU records the launches of a batch: see `Gpu`
    # digests of the files and the code that the denoiser must be built from: see `seals_of`
    seals: Mapping[str, str] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.source.dtype

    def read(self, region: Region) -> Pixels:
        window = self.grid.window_of(region)
        pixels = read_window(self.source, window, self.rim)
        arranged = self.roles.arrange(pixels)
        runner = self.runner()
        with unless_lost(runner.device):
            result = runner(
                arranged,
                self.roles.spatial_part(self.rim.reach(window, self.shape)),
                self.roles.spatial_part(region),
                arranged.shape[len(self.roles.looped)],
                {},
            )
        return np.ascontiguousarray(to_dtype(self.roles.restore(result), self.dtype))

    @property
    def key(self) -> bytes:
        """Key of the model with its tiling in the cache of a process."""
        # Plain pickle cannot find a function of a script by name.
        key: bytes = cloudpickle.dumps((self.denoiser, self.tiling, *self._device_options, sorted(self.seals.items())))
        return key

    def runner(self) -> TileRunner:
        """The model with its tiling, built on first use."""
        key = self.key
        with _lock:
            runner = _runners.get(key) or self._build()
            _runners[key] = _cached[key] = runner
            while len(_cached) > _MAX_CACHED:
                del _cached[next(iter(_cached))]
            return runner

    @property
    def _device_options(self) -> tuple[str, str, bool, bool]:
        """Arguments of :func:`~halotile.tasks.devices.gpu.open_device`."""
        return self.device, self.precision, self.channels_last, self.records

    def _build(self) -> TileRunner:
        device = open_device(*self._device_options)
        return TileRunner(build_sealed(self.denoiser, self.seals), device, self.tiling, self.denoiser.title)


_checked: WeakSet[TileRunner] = WeakSet()  # models of this process that an earlier pass has checked


@dataclass(frozen=True, eq=False)
class Written:
    """Image number ``place`` of the current block, which is computed already; no other pixels can be read."""

    place: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``, which is in the core of the current block."""
        scope = Scope.current()
        assert scope is not None
        core, pixels = scope.written[self.place]
        return pixels[region.relative_to(core).slices]


@dataclass(frozen=True, eq=False)
class Sum:
    """``sum left * right`` or ``sum (left - right)²`` over the image, in double precision."""

    name: str
    kind: Literal["dot", "distance"]
    left: Readable
    right: Readable

    def over(self, region: Region) -> float:
        left = self.left.read(region)
        right = left if self.right is self.left else self.right.read(region)
        return dot(left, right) if self.kind == "dot" else distance(left, right)


@dataclass(frozen=True, slots=True)
class View:
    """The window that is read around a core, inside the image.

    >>> View(halo=2, reach=3, times=2).span(100, 200, 205)
    (92, 205)
    >>> View(reach=12, cells=True).span(1024, 2048, 9000)
    (980, 2092)
    >>> View(halo=2, reach=3, repeats=2).span(100, 200, 205)
    (90, 205)
    """

    halo: int = 0  # depth of the denoiser that acts on the result of the operators, in pixels
    reach: int = 0  # reach of the operators, in pixels
    times: int = 1  # number of operators in turn: 2 for forward and adjoint
    cells: bool = False  # whether the operators compute whole cells of Fourier transforms
    repeats: int = 1  # number of steps in turn, each on the result of the one before

    def span(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """The span that is read for a span of an axis of this length."""
        for _ in range(self.repeats):
            start, stop = max(0, start - self.halo), min(length, stop + self.halo)
            for _ in range(self.times):
                if self.cells:
                    start, stop = snapped(start, stop, 0, length)
                start, stop = max(0, start - self.reach), min(length, stop + self.reach)
        return start, stop

    def window(self, core: Region, shape: tuple[int, ...]) -> Region:
        """The window that is read for a core; it is wider on the last two axes."""
        axes = zip(core.start, core.stop, shape, strict=True)
        spans = [self.span(*axis) if place >= len(shape) - 2 else axis[:2] for place, axis in enumerate(axes)]
        return spanned(spans)


@dataclass(frozen=True, eq=False)
class ImageTask:
    """Lazy images to compute and write, as a worker needs them for any block; pickles to a few kilobytes."""

    grid: Grid  # blocks
    images: tuple[tuple[ShardWriter, Readable], ...]  # writers with the images to compute, in this order
    sums: tuple[Sum, ...] = ()  # sums to compute over images that were read or written
    stored: tuple[Shared, ...] = ()  # stored images to read ahead
    view: View = View()  # window around the core in which they are read ahead
    denoised: tuple[Denoised, ...] = ()  # all denoised images in `images`
    overlap: bool = False  # whether the next read and the last write run during the computation
    # whether each shard is computed by itself: for images whose bits depend on the region that is read
    by_shard: bool = False
    io_threads: int = 1  # threads that read and write the chunks of a block in parallel

    @property
    def batch(self) -> int:
        """Tiles that are denoised at once at first; 0 without a denoiser."""
        return self.denoised[0].tiling.batch if self.denoised else 0

    def stages(self) -> ImageStages:
        return ImageStages(self)


class ImageStages:
    """Read ahead, compute, write."""

    def __init__(self, task: ImageTask) -> None:
        self.task = task
        if task.denoised:
            keep_on_gpus(task.denoised)
        self.runners = [part.runner() for part in task.denoised]
        for runner in self.runners:
            runner.device.reset_peak()

    def check(self) -> None:
        for part, runner in zip(self.task.denoised, self.runners, strict=True):
            if runner not in _checked:
                dims, dtype = len(part.roles.spatial), part.tiling.work_dtype
                check_purity(part.denoiser, dims, runner.cpu_model, dtype=dtype)
                _checked.add(runner)

    def read(self, block: Block) -> Scope:
        """Read the stored images around the core."""
        with Scope(list(cells_of(block.core, self.task.images[0][0].layout.shard))) as scope:
            for image in self.task.stored:
                image.hold(self.task.view.window(block.core, image.shape))
        return scope

    def compute(self, block: Block, scope: Scope, receipt: Receipt) -> list[NDArray[Any]]:
        """Compute the new images on the core; the sums go into the receipt."""
        began = time.perf_counter()
        with scope:
            for place, (writer, image) in enumerate(self.task.images):
                pixels = to_dtype(self._read_core(image, block.core, scope), writer.layout.dtype)
                scope.written[place] = block.core, pixels
            for wanted in self.task.sums:
                for number, cell in enumerate(scope.cells):
                    scope.note(wanted.name, number, 0, wanted.over(cell))
        receipt.sums[block.number] = scope.sums()
        receipt.compute_seconds += time.perf_counter() - began
        receipt.read_bytes += scope.read_bytes
        receipt.pixels += block.core.size
        return [scope.written[place][1] for place in range(len(self.task.images))]

    def _read_core(self, image: Readable, core: Region, scope: Scope) -> Pixels:
        """Read, and so compute, an image on the core."""
        if not self.task.by_shard or len(scope.cells) == 1:
            return image.read(core)
        pixels = np.empty(core.shape, image.dtype)
        for number, cell in enumerate(scope.cells):
            scope.at = number
            pixels[cell.relative_to(core).slices] = image.read(cell)
            scope.forget_computed()
        scope.at = None
        return pixels

    def write(self, block: Block, result: list[NDArray[Any]], receipt: Receipt) -> None:
        images = zip(self.task.images, result, strict=True)
        receipt.enter(block.number, [writer.write(block.core, pixels) for (writer, _), pixels in images])

    def finish(self, receipt: Receipt) -> None:
        for runner in reversed(self.runners):  # the batch is the first one's
            runner.finish(receipt)


def cells_of(core: Region, shard: tuple[int, ...]) -> Iterator[Region]:
    """The shards of a core, in C order.

    >>> [cell.shape for cell in cells_of(Region((0, 4), (4, 10)), (4, 4))]
    [(4, 4), (4, 2)]
    """
    for index in np.ndindex(*(-(-n // s) for n, s in zip(core.shape, shard, strict=True))):
        start = tuple(a + i * s for a, i, s in zip(core.start, index, shard, strict=True))
        yield Region(start, tuple(a + s for a, s in zip(start, shard, strict=True))).clip(core)
