"""What a machine without a package index is given: complete, pinned, and fetched as the page says."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
ON_LINUX = {"extra": "", "python_version": "3.12", "sys_platform": "linux", "platform_machine": "x86_64"}
PAGE = (ROOT / "docs/gpu.md").read_text()


def names() -> list[str]:
    """The packages that are fetched."""
    lines = (ROOT / "requirements-gpu-wheels.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_every_package_has_a_version_in_the_tested_set() -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert [name for name in names() if name not in pinned] == []
    assert names() == sorted(names())


def taken_to_be_there() -> set[str]:
    """The packages that the page says are on the machine."""
    listed = re.search(r"Assumed to be there: (.*?), with their dependencies", PAGE, re.DOTALL)
    assert listed
    return {word.split()[0] for word in re.split(r",\s+|\s+and\s+", listed[1])}


def needs_of(name: str) -> set[str]:
    """What a package requires, as far as it is installed here to be asked."""
    try:
        wanted = [Requirement(line) for line in metadata.requires(name) or []]
    except metadata.PackageNotFoundError:
        return set()
    return {canonicalize_name(each.name) for each in wanted if not each.marker or each.marker.evaluate(ON_LINUX)}


def test_what_halotile_needs_is_fetched_or_taken_to_be_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]
    # The settings of pytest-timeout are in pyproject.toml, and pytest refuses those of a plug-in that is not there.
    needed = {canonicalize_name(Requirement(line).name) for line in wanted} | {"pytest-timeout"}
    for name in names():
        needed |= needs_of(name)
    assert needed - set(names()) - taken_to_be_there() == set()
    assert taken_to_be_there() & set(names()) == set()


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
