"""A denoised image as a readable: any region of it, computed from the region and its halo."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import cloudpickle
import numpy as np

from halotile.storage.grid import Grid, Region
from halotile.storage.rim import Pixels, Readable, Rim, read_window
from halotile.storage.sharded.output import to_dtype
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.devices.device import unless_lost
from halotile.tasks.devices.gpu import open_device
from halotile.tasks.inner_tiles import TileRunner, Tiling
from halotile.tasks.roles import Roles
from halotile.tasks.trials.provenance import build_sealed

_runners: WeakValueDictionary[bytes, TileRunner] = WeakValueDictionary()
"""Those of this process that are in use, or kept."""
_kept: dict[bytes, TileRunner] = {}
_guard = threading.Lock()
_KEPT = 2
"""Models that a process keeps: a solver has one, and the next may follow it on the same workers."""


def keep_on_gpus(parts: Collection[Denoised]) -> None:
    """Keep nothing else on a GPU: what an earlier job left there is in nobody's plan."""
    wanted = {part.key for part in parts}
    with _guard:
        for key in [key for key, runner in _kept.items() if runner.device.kind != "cpu"]:
            if key not in wanted:
                del _kept[key]


@dataclass(frozen=True, eq=False)
class Denoised:
    """``D(x)``, tile by tile.

    Parameters
    ----------
    source : Readable
        ``x``.
    denoiser : Denoiser
        ``D``: one pixel out for each pixel in. Its model is built once in a process.
    tiling : Tiling
        How the tiles are cut.
    roles : Roles
        Which axes are tiled.
    grid : Grid
        How far around a region has to be read: see :meth:`~halotile.storage.grid.Grid.window_of`.
    rim : Rim
        What is read outside the image.
    device, precision : str
        What computes it, and how exactly, as ``run.device`` and ``run.precision`` of a job.
    channels_last : bool
        Whether a network's activations are laid out so.
    records : bool
        Whether a GPU records what a batch asks of it: see :class:`~halotile.tasks.devices.gpu.Gpu`.
    seals : mapping of str to str
        What the denoiser has to be built of: see :func:`~halotile.tasks.trials.provenance.seals_of`.
    """

    source: Readable
    denoiser: Denoiser
    tiling: Tiling
    roles: Roles
    grid: Grid
    rim: Rim
    device: str = "cpu"
    precision: str = "float32"
    channels_last: bool = False
    records: bool = False
    seals: Mapping[str, str] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in pixels."""
        return self.source.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of one pixel."""
        return self.source.dtype

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
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
        """What the model and its tiling are known by in a process."""
        # A function that a script hands over may have no name that plain pickle finds it by.
        key: bytes = cloudpickle.dumps(
            (self.denoiser, self.tiling, *self._opened, sorted(self.seals.items()))
        )
        return key

    def runner(self) -> TileRunner:
        """The model with its tiling, built when it is first asked for."""
        key = self.key
        with _guard:
            runner = _runners.get(key) or self._build()
            _runners[key] = _kept[key] = runner
            while len(_kept) > _KEPT:
                del _kept[next(iter(_kept))]
            return runner

    @property
    def _opened(self) -> tuple[str, str, bool, bool]:
        """How the device is opened."""
        return self.device, self.precision, self.channels_last, self.records

    def _build(self) -> TileRunner:
        device = open_device(*self._opened)
        return TileRunner(build_sealed(self.denoiser, self.seals), device, self.tiling, self.denoiser.title)
