"""The interface of sums over terms: computations with numbers, and the functions that compute and add them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from halotile.tasks.contributions import Part


class Numbered(Protocol):
    """A computation with its number and its totals."""

    @property
    def number(self) -> int:
        """Its place in the order."""

    @property
    def slots(self) -> tuple[int, ...]:
        """The totals that it is part of."""


class SumFunctions(Protocol):
    """The functions that workers call to compute and to add up."""

    @property
    def phase(self) -> str:
        """Name of the tasks on the dashboard."""

    @property
    def what(self) -> str:
        """The unit that a number counts: operator, tile."""

    @property
    def compute(self) -> Callable[..., Any]:
        """``compute(calls, after)`` returns the result of several calls; it only waits for ``after``."""

    @property
    def add(self) -> Callable[[list[Any]], Any]:
        """``add(results)`` returns their sum."""


class TermWork(SumFunctions, Protocol):
    """Work of the workers on the terms of one sum; pickles to a few kilobytes."""

    @property
    def keep(self) -> Callable[[Part], Part]:
        """Function that writes the total; it is durable on return."""
