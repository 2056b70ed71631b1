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
"""The runners of this process that are in use or cached."""
_cached: dict[bytes, TileRunner] = {}
_lock = threading.Lock()
_MAX_CACHED = 2
"""A solver has one model, and another solver may follow on the same workers."""


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
        """Shape in pixels."""
        return self.source.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of one pixel."""
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
        key: bytes = cloudpickle.dumps(
            (self.denoiser, self.tiling, *self._device_options, sorted(self.seals.items()))
        )
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
