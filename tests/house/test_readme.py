"""The README leaves nothing out of what a job file can say."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from halotile import registry
from halotile.cli.fields import field_types
from halotile.cli.kinds import JOBS, NAMED
from halotile.cli.schema import config_schema
from halotile.cli.yaml_source import read_text
from halotile.tasks.options import job_key, required_keys

README = (Path(__file__).parents[2] / "README.md").read_text()
SECTIONS = JOBS["denoise"].sections


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The job file that says everything."""
    found = re.search(r"```yaml\n# every-key\.yaml\n(.*?)```", README, re.DOTALL)
    assert found
    tree: dict[str, Any] = read_text(found[1], "README.md").tree
    return tree


def test_the_example_has_every_section(example: dict[str, Any]) -> None:
    assert list(example) == list(config_schema()["properties"])


@pytest.mark.parametrize("section", SECTIONS)
def test_the_example_has_every_key_with_its_default(example: dict[str, Any], section: str) -> None:
    written, schema = dict(example[section]), SECTIONS[section]
    if schema in NAMED:
        schema = NAMED[schema].find(written.pop("name"))
    assert set(written) == set(field_types(schema))
    for field in dataclasses.fields(schema):
        if (key := job_key(field.name)) not in required_keys(schema):
            usual = {} if field.default is dataclasses.MISSING else field.default
            assert written[key] == usual, key


@pytest.mark.parametrize("name", registry.names("denoisers"))
def test_the_table_has_every_option_and_marks_those_that_must_be_written(name: str) -> None:
    row = re.search(rf"^\| `{name}` \| (.*?) \|", README, re.MULTILINE)
    assert row, f"the table of denoisers has no {name}"
    schema = registry.find("denoisers", name).DENOISER
    assert set(re.findall(r"`(\w+)`", row[1])) == set(field_types(schema))
    assert set(re.findall(r"\*\*`(\w+)`\*\*", row[1])) == set(required_keys(schema))
