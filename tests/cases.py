"""Cases of a test of which some are left out unless ``--thorough`` is given."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def all_of(values: Iterable[Any], *, thorough: Collection[Any]) -> list[Any]:
    """Return all values, for ``parametrize``; those that are named here bear the mark ``thorough``."""
    found = list(values)
    assert [value for value in thorough if value not in found] == []
    return [
        pytest.param(value, marks=pytest.mark.thorough) if value in thorough else value for value in found
    ]


def thorough(*values: Any) -> Any:
    """Return one case of several values, for ``parametrize``, that bears the mark ``thorough``."""
    return pytest.param(*values, marks=pytest.mark.thorough)


@contextmanager
def row(*names: object) -> Iterator[None]:
    """Name the row of a table in the failure of what is checked of it."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the row {', '.join(map(str, names))}")
        raise
