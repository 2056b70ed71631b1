"""Tests marked thorough are left out, unless all are requested or one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import conftest
from tests.cases import all_of, thorough

TESTS = """
import pytest
from tests.cases import thorough

@pytest.mark.parametrize("case", [1, thorough(2)])
def test_a(case): ...

@pytest.mark.thorough
def test_b(): ...
"""


SETTINGS = """
[pytest]
addopts = --import-mode=importlib
markers = thorough
"""


class Collected:
    """The names of the tests that would run, and the number of those that are left out."""

    names: tuple[str, ...] = ()
    left_out = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Keep the names."""
        self.names = tuple(item.name for item in session.items)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Count them."""
        self.left_out += len(items)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tests; one for all, for a process imports a module of one name once."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text(SETTINGS)
    return folder


@pytest.mark.parametrize(
    ("words", "names", "left_out"),
    [
        (["test_it.py"], ("test_a[1]",), 2),
        (["test_it.py", "--thorough"], ("test_a[1]", "test_a[2]", "test_b"), 0),
        (["test_it.py::test_b"], ("test_b",), 0),
        (["./test_it.py::test_a"], ("test_a[1]", "test_a[2]"), 0),
        (["test_it.py::test_a[2]"], ("test_a[2]",), 0),
    ],
)
def test_what_is_marked_runs_where_it_is_requested_or_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], names: tuple[str, ...], left_out: int
) -> None:
    monkeypatch.chdir(here)
    collected = Collected()
    options = ("--collect-only", "-q", "-p", "no:faulthandler", "-p", "no:cacheprovider")
    ended = pytest.main([*words, *options], plugins=[conftest, collected])
    assert ended == pytest.ExitCode.OK
    assert (collected.names, collected.left_out) == (names, left_out)


def test_cases_of_a_table_are_marked_by_their_value() -> None:
    assert all_of([1, 2, 3], thorough=[2]) == [1, thorough(2), 3]
    with pytest.raises(AssertionError):
        all_of([1, 2], thorough=[4])
