"""Requests and results of :mod:`halotile.tasks.trials.gpu_trial`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class TrialRequest:
    """Options of a trial."""

    tiles: tuple[tuple[int, ...], ...]  # edges of the tiles to try, on the tiled axes, in pixels
    batch: int | None = None  # only batch to try
    sharing: int = 1  # number of processes that share the device
    layouts: bool = False  # whether to try the other memory layout
    compare: bool = False  # whether to try all precisions


@dataclass(frozen=True)
class TileTrial:
    """Time and memory of a tile and batch."""

    tile: tuple[int, ...]
    batch: int
    seconds: float  # time for one block, including its halo and the padding of its last batch
    batch_bytes: int  # peak memory of a batch on the device, without the block and the model


@dataclass(frozen=True)
class Precision:
    """Time and error of a precision."""

    name: str  # as in a job
    seconds: float | None = None  # time for one block; None if it does not run here
    # largest difference from float32 on a CPU, relative to the largest pixel; None if unknown
    error: float | None = None
    why_not: str = ""  # reason if it does not run here, or has no error


@dataclass(frozen=True)
class Tuned:
    """Result of a trial."""

    device: str  # name of the device
    tile: tuple[int, ...]  # tile, batch: fastest
    batch: int
    channels_last: bool  # whether activations are faster channels last
    records: bool  # whether recording the launches of a batch pays
    megapixels_per_second: float  # speed of a block with these, without reading and writing
    # peak memory of a worker on the device: model, blocks in flight, one batch. 0 for a CPU
    device_bytes: int
    free_bytes: int | None  # memory that a worker may take on the device; None on a CPU
    host_bytes: int  # resident memory of a process that has opened the device and loaded the model
    block_pixels: int
    tried: tuple[TileTrial, ...]  # all tiles and batches that were tried
    precisions: tuple[Precision, ...] = ()  # all precisions, if they were compared

    @property
    def seconds_per_block(self) -> float:
        """Time for a block, without reading and writing."""
        return self.block_pixels / 1e6 / self.megapixels_per_second

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Restore the result from :meth:`to_json`.

        Examples
        --------
        >>> tuned = Tuned("this CPU", (64, 64), 2, True, False, 9.5, 0, None, 10**9, 4096, (TileTrial((64, 64), 2, 0.1, 0),))
        >>> import json
        >>> Tuned.from_json(json.loads(json.dumps(tuned.to_json()))) == tuned
        True
        """
        tried = tuple(TileTrial(**each | {"tile": tuple(each["tile"])}) for each in values["tried"])
        precisions = tuple(Precision(**each) for each in values["precisions"])
        return cls(**values | {"tile": tuple(values["tile"]), "tried": tried, "precisions": precisions})
