"""Requests and results of :mod:`halotile.tasks.trials.gpu_trial`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class TrialRequest:
    """Options of a trial.

    Parameters
    ----------
    tiles : tuple of tuple of int
        Edges of the tiles to try, on the tiled axes, in pixels.
    batch : int, optional
        The only batch to try.
    sharing : int
        Number of processes that share the device.
    layouts : bool
        Whether to try the other memory layout.
    compare : bool
        Whether to try all precisions.
    """

    tiles: tuple[tuple[int, ...], ...]
    batch: int | None = None
    sharing: int = 1
    layouts: bool = False
    compare: bool = False


@dataclass(frozen=True)
class TileTrial:
    """Time and memory of a tile and batch.

    Parameters
    ----------
    tile, batch
        The tile and batch.
    seconds : float
        Time for one block, including its halo and the padding of its last batch.
    batch_bytes : int
        Peak memory of a batch on the device, without the block and the model.
    """

    tile: tuple[int, ...]
    batch: int
    seconds: float
    batch_bytes: int


@dataclass(frozen=True)
class Precision:
    """Time and error of a precision.

    Parameters
    ----------
    name : str
        As in a job.
    seconds : float or None
        Time for one block; None if it does not run here.
    error : float or None
        The largest difference from float32 on a CPU, relative to the largest pixel; None if unknown.
    why_not : str
        The reason if it does not run here, or has no error.
    """

    name: str
    seconds: float | None = None
    error: float | None = None
    why_not: str = ""


@dataclass(frozen=True)
class Tuned:
    """Result of a trial.

    Parameters
    ----------
    device : str
        Name of the device.
    tile, batch
        The fastest.
    channels_last : bool
        Whether activations are faster channels last.
    records : bool
        Whether recording the launches of a batch pays.
    megapixels_per_second : float
        Speed of a block with these, without reading and writing.
    device_bytes : int
        Peak memory of a worker on the device: model, blocks in flight, one batch. 0 for a CPU.
    free_bytes : int or None
        Memory that a worker may take on the device; None on a CPU.
    host_bytes : int
        Resident memory of a process that has opened the device and loaded the model.
    block_pixels : int
        Pixels of a block.
    tried : tuple of TileTrial
        All tiles and batches that were tried.
    precisions : tuple of Precision
        All precisions, if they were compared.
    """

    device: str
    tile: tuple[int, ...]
    batch: int
    channels_last: bool
    records: bool
    megapixels_per_second: float
    device_bytes: int
    free_bytes: int | None
    host_bytes: int
    block_pixels: int
    tried: tuple[TileTrial, ...]
    precisions: tuple[Precision, ...] = ()

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
