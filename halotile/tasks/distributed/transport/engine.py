"""What the torch-facing classes ask of whoever runs their calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from halotile.storage.grid import Region
from halotile.tasks.distributed.stacks.windows import Late
from halotile.tasks.distributed.tiling.processed import Processed
from halotile.tasks.distributed.tiling.tiles import Tiles
from halotile.tasks.distributed.transport.calls import Call
from halotile.tasks.distributed.transport.stored import Array, Stored


class Engine(Protocol):
    """Evaluates calls, somewhere; arrays go in and come out by files."""

    @property
    def folder(self) -> Path:
        """Where arrays and objects are put for the workers."""
        ...

    @property
    def device(self) -> Any:
        """The torch device that results are given on."""
        ...

    @property
    def seed(self) -> int | None:
        """What random numbers come from; None for others each time."""
        ...

    def stream(self) -> int:
        """A number that no other distributed object of this context has, for its random numbers."""
        ...

    @property
    def task_bytes(self) -> int | None:
        """What a task may hold; None where nobody set a bound."""
        ...

    @property
    def accumulate(self) -> str | None:
        """``float64`` where sums over operators are kept in double precision."""
        ...

    def put(self, array: Array, kind: str) -> Stored:
        """Write an array where workers can read it."""
        ...

    def result_path(self, name: str) -> Path:
        """Where the next result of this name goes, without its suffix."""
        ...

    def is_lazy(self, thing: Any) -> bool:
        """Whether a thing is an array that is computed later."""
        ...

    def later(self, phase: str, calls: Sequence[Call], arrays: Sequence[Any], slots: int) -> list[Any]:
        """The totals of calls on such arrays, as such arrays."""
        ...

    def blocks_later(
        self, phase: str, lates: Sequence[Late], places: Sequence[Sequence[Region]], arrays: Sequence[Any]
    ) -> list[Any]:
        """Such arrays, of blocks that are computed from their windows; ``places`` says where each result of each lies."""
        ...

    def tiles_later(self, phase: str, image: Any, processed: Processed, tiles: Tiles) -> Any:
        """Such an image, processed tile by tile."""
        ...

    def run(
        self, phase: str, calls: Sequence[Call], inputs: Sequence[Stored], what: str
    ) -> dict[int, Stored]:
        """Evaluate the calls and add up what goes to the same slot, in the order of the calls.

        Parameters
        ----------
        phase : str
            What the dashboard calls the tasks.
        calls : sequence of Call
            What is evaluated.
        inputs : sequence of Stored
            The arrays that calls name by their places.
        what : str
            ``operator`` or ``tile``: what a call's number counts.

        Raises
        ------
        TaskFailed
            At once, when a call fails; with its number.
        """
        ...
