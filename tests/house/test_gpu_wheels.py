"""What a machine without a package index is given: complete, pinned, and fetched as the page says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/gpu.md").read_text()


def names() -> list[str]:
    """The packages that are fetched."""
    lines = (ROOT / "requirements-gpu-wheels.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_every_package_has_a_version_in_the_tested_set() -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert [name for name in names() if name not in pinned] == []
    assert names() == sorted(names())


def test_what_halotile_needs_is_fetched_or_taken_to_be_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]
    needed = {re.split(r"[\[>=]", line)[0].replace(".", "-") for line in wanted}
    # Its settings are in pyproject.toml, and pytest refuses those of a plug-in that is not there.
    needed |= {"pytest-timeout"}
    taken = re.search(r"Taken to be there: (.*?), with what these need", PAGE, re.DOTALL)
    assert taken
    there = {word.split()[0] for word in re.split(r",\s+|\s+and\s+", taken[1])}
    assert needed - set(names()) - there == set()
    assert there & set(names()) == set()


def test_the_page_fetches_as_make_does() -> None:
    commands = {
        " ".join(text.split())
        for text in re.findall(r"^\$ pip ((?:.*\\\n)*.*)$", PAGE.replace("\\\n", " \\\n"), re.MULTILINE)
    }
    recipe = " ".join((ROOT / "Makefile").read_text().split())
    fetching = [command for command in commands if command.startswith(("download", "wheel"))]
    assert len(fetching) == 2
    for command in fetching:
        assert command in recipe
