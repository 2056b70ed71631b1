"""The reference pages list every key, option and default of a job file."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from halotile import registry
from halotile.cli.config.fields import field_types
from halotile.cli.config.kinds import JOBS, NAMED
from halotile.cli.config.schema import config_schema
from halotile.cli.config.yaml_source import read_text
from halotile.graphs.jobs.reconstruct.job import OperatorChoice
from halotile.tasks.options import job_key, required_keys

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = {
    "denoise": ("job-file.md", "every-key.yaml"),
    "reconstruct": ("reconstruction.md", "every-key-of-a-reconstruction.yaml"),
}
SHARED = ("output", "tile", "run", "cluster")
"""Sections of a reconstruction that are those of a denoising job."""
SECTIONS = [
    (job, name)
    for job, kind in JOBS.items()
    for name in kind.sections
    if job == "denoise" or name not in SHARED
]


@pytest.fixture(scope="module")
def examples() -> dict[str, dict[str, Any]]:
    """The job files with every key, by kind of job."""
    found = {}
    for job, (page, name) in EXAMPLES.items():
        text = (DOCS / page).read_text()
        block = re.search(rf"```yaml\n# {re.escape(name)}\n(.*?)```", text, re.DOTALL)
        assert block
        found[job] = read_text(block[1], page).tree
    return found


def test_the_examples_have_every_part(examples: dict[str, dict[str, Any]]) -> None:
    for job, part in zip(JOBS, config_schema()["anyOf"], strict=True):
        left_out = {"tile", "run", "cluster"} if job == "reconstruct" else set()
        assert set(examples[job]) == set(part["properties"]) - left_out


def check_values(written: dict[str, Any], schema: type) -> None:
    """Assert that every key is there with its default."""
    assert set(written) == set(field_types(schema))
    for field in dataclasses.fields(schema):
        if (key := job_key(field.name)) not in required_keys(schema):
            usual = {} if field.default is dataclasses.MISSING else field.default
            assert written[key] == (list(usual) if isinstance(usual, tuple) else usual), key


@pytest.mark.parametrize(("job", "section"), SECTIONS)
def test_the_examples_have_every_key_with_its_default(
    examples: dict[str, dict[str, Any]], job: str, section: str
) -> None:
    written, schema = dict(examples[job][section]), JOBS[job].sections[section]
    if schema in NAMED:
        schema = NAMED[schema].find(written.pop("name"))
    check_values(written, schema)


def test_a_reconstruction_has_every_key_outside_of_its_sections(examples: dict[str, dict[str, Any]]) -> None:
    tree = examples["reconstruct"]
    check_values({field.name: tree[field.name] for field in dataclasses.fields(Aim)}, Aim)
    (operator,) = tree["operators"]
    named = NAMED[OperatorChoice]
    check_values(
        {k: v for k, v in operator.items() if k != "name"}, named.written(named.find(operator["name"]))
    )


@pytest.mark.parametrize("name", registry.names("denoisers"))
def test_the_table_has_every_option_and_marks_those_that_must_be_written(name: str) -> None:
    check_row("denoisers.md", name, registry.find("denoisers", name).DENOISER)


@pytest.mark.parametrize("name", NAMED[OperatorChoice].names)
def test_the_table_has_every_operator(name: str) -> None:
    check_row("operators.md", name, NAMED[OperatorChoice].find(name))


def check_row(page: str, name: str, schema: type) -> None:
    """Assert that a row of a page's table has every option, and marks those that must be written."""
    found = re.search(rf"^\| `{name}` \| (.*?) \|", (DOCS / page).read_text(), re.MULTILINE)
    assert found, f"the table of {page} has no {name}"
    row = found[1]
    assert set(re.findall(r"`(\w+)`", row)) == set(field_types(schema))
    assert set(re.findall(r"\*\*`(\w+)`\*\*", row)) == set(required_keys(schema))
