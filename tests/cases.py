"""Cases of a test of which some are left out unless ``--thorough`` is given."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def all_of(values: Iterable[Any], *, thorough: Collection[Any]) -> list[Any]:
    """Return all values, for ``parametrize``; those that are named here bear the mark ``thorough``."""
    found = list(values)
    assert [value for value in thorough if value not in found] == []
    return [pytest.param(value, marks=pytest.mark.thorough) if value in thorough else value for value in found]


def thorough(*values: Any) -> Any:
    """Return one case of several values, for ``parametrize``, that bears the mark ``thorough``."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def in_folders(parent: Path, rows: Iterable[T]) -> Iterator[tuple[Path, T]]:
    """Yield each row of a table with a new folder of its own."""
    for number, row in enumerate(rows):
        (parent / str(number)).mkdir()
        yield parent / str(number), row
