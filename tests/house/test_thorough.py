"""Tests marked thorough are left out, unless all are requested or one is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.cases import all_of, thorough
from tests.conftest import pytest_collection_modifyitems

MARKED = {"a.py::test_a[1]": False, "a.py::test_a[2]": True, "a.py::test_b": True, "a.py::test_bc": True}


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("a.py", "test_a[1]"),
        ("a.py --thorough", "test_a[1] test_a[2] test_b test_bc"),
        ("a.py::test_b", "test_a[1] test_b"),
        ("./a.py::test_a", "test_a[1] test_a[2]"),
        ("a.py::test_a[2]", "test_a[1] test_a[2]"),
    ],
)
def test_what_is_marked_runs_where_it_is_requested_or_named(words: str, kept: str, tmp_path: Path) -> None:
    config = Mock(args=words.split(), rootpath=tmp_path, getoption=lambda _: "--thorough" in words)
    config.invocation_params.dir = tmp_path
    items: list[Any] = [Mock(nodeid=name, **{"get_closest_marker.return_value": mark}) for name, mark in MARKED.items()]
    pytest_collection_modifyitems(config, items)
    assert [item.nodeid.partition("::")[2] for item in items] == kept.split()
    left_out = sum(len(call.kwargs["items"]) for call in config.hook.pytest_deselected.call_args_list)
    assert left_out == len(MARKED) - len(items)


def test_cases_of_a_table_are_marked_by_their_value() -> None:
    assert all_of([1, 2, 3], thorough=[2]) == [1, thorough(2), 3]
    with pytest.raises(AssertionError):
        all_of([1, 2], thorough=[4])
