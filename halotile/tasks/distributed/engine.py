"""The interface between the torch-facing classes and the engine that runs their calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from halotile.storage.grid import Region
from halotile.storage.rim import Array
from halotile.tasks.distributed.stacks.windows import LazyBlock
from halotile.tasks.distributed.tiling.processor_call import ProcessorCall
from halotile.tasks.distributed.tiling.tiles import Tiles
from halotile.tasks.distributed.transport.calls import Call
from halotile.tasks.distributed.transport.stored import Stored


class Engine(Protocol):
    """Evaluates calls on workers; arrays travel as files."""

    device: Any
    """Torch device of the results."""
    seed: int | None
    """Seed of random numbers; None for different ones each time."""
    task_bytes: int | None
    """Memory that one task may use; None without a limit."""
    accumulate: str | None
    """``float64`` where sums over operators are kept in double precision."""

    @property
    def folder(self) -> Path:
        """Folder where arrays and objects are put for the workers."""

    def stream(self) -> int:
        """Return a number for random numbers that no other distributed object of this context has."""

    def put(self, array: Array, kind: str) -> Stored:
        """Write an array where workers can read it."""

    def result_path(self, name: str) -> Path:
        """Path of the next result of this name, without its suffix."""

    def is_lazy(self, value: Any) -> bool:
        """Return True for an array that is computed later."""

    def lazy_totals(self, phase: str, calls: Sequence[Call], arrays: Sequence[Any], slots: int) -> list[Any]:
        """Return the totals of calls on lazy arrays, as lazy arrays."""

    def lazy_blocks(
        self,
        phase: str,
        blocks: Sequence[LazyBlock],
        places: Sequence[Sequence[Region]],
        arrays: Sequence[Any],
    ) -> list[Any]:
        """Return lazy arrays of blocks; ``places`` has the regions of the results of each block."""

    def lazy_tiles(self, phase: str, image: Any, call: ProcessorCall, tiles: Tiles) -> Any:
        """Return a lazy image, processed tile by tile."""

    def run(
        self, phase: str, calls: Sequence[Call], inputs: Sequence[Stored], what: str
    ) -> dict[int, Stored]:
        """Evaluate the calls and add up the values of each slot, in the order of the calls.

        ``phase``: name of the tasks on the dashboard; ``inputs``: arrays that calls refer to by position; ``what``: unit that a call's number counts:
        `operator` or `tile`.
        """
