"""What is to be tried of a device, and what was found: :mod:`halotile.tasks.trials.gpu_trial` goes from the one to the other."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class TrialRequest:
    """What is to be tried.

    Parameters
    ----------
    tiles : tuple of tuple of int
        Edges of tiles on the tiled axes, in pixels.
    batch : int, optional
        Tiles at once, where that is given.
    sharing : int
        Processes that share the device.
    layouts : bool
        Whether the other memory layout is tried.
    compare : bool
        Whether all precisions are tried.
    """

    tiles: tuple[tuple[int, ...], ...]
    batch: int | None = None
    sharing: int = 1
    layouts: bool = False
    compare: bool = False


@dataclass(frozen=True)
class Tried:
    """A tile and a batch.

    Parameters
    ----------
    tile, batch
        What was tried.
    seconds : float
        For one block, its halo and what fills up its last batch counted in.
    batch_bytes : int
        The most that a batch held on the device, beside the block and the model.
    """

    tile: tuple[int, ...]
    batch: int
    seconds: float
    batch_bytes: int


@dataclass(frozen=True)
class Precision:
    """What a precision costs and gains.

    Parameters
    ----------
    name : str
        As in a job.
    seconds : float or None
        For one block; None where it does not run here.
    error : float or None
        The largest difference from float32 on a CPU, of the largest pixel of that; None where there is none to tell.
    why_not : str
        Why it does not run here, or has no error.
    """

    name: str
    seconds: float | None = None
    error: float | None = None
    why_not: str = ""


@dataclass(frozen=True)
class Tuned:
    """What was found, and what follows from it.

    Parameters
    ----------
    device : str
        Its name.
    tile, batch
        The fastest.
    channels_last : bool
        Whether activations are laid out so.
    records : bool
        Whether recording what a batch asks of the device pays.
    megapixels_per_second : float
        Of a block with these, without reading and writing.
    device_bytes : int
        The most that a worker holds there: model, blocks on their way, one batch. 0 for a CPU.
    free_bytes : int or None
        What a worker may hold there; None on a CPU.
    host_bytes : int
        Resident memory of a process that has opened the device and loaded the model.
    block_pixels : int
        Pixels of a block.
    tried : tuple of Tried
        All of them.
    precisions : tuple of Precision
        If they were wished for.
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
    tried: tuple[Tried, ...]
    precisions: tuple[Precision, ...] = ()

    @property
    def seconds_per_block(self) -> float:
        """Without reading and writing."""
        return self.block_pixels / 1e6 / self.megapixels_per_second

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        """What :meth:`to_json` gave.

        Examples
        --------
        >>> tuned = Tuned("this processor", (64, 64), 2, True, False, 9.5, 0, None, 10**9, 4096, (Tried((64, 64), 2, 0.1, 0),))
        >>> import json
        >>> Tuned.from_json(json.loads(json.dumps(tuned.to_json()))) == tuned
        True
        """
        tried = tuple(Tried(**each | {"tile": tuple(each["tile"])}) for each in found["tried"])
        precisions = tuple(Precision(**each) for each in found["precisions"])
        return cls(**found | {"tile": tuple(found["tile"]), "tried": tried, "precisions": precisions})
