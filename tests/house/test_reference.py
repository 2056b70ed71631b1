"""The reference pages list every key, option and default of a job file."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from halotile import registry
from halotile.cli.config.schema import config_schema
from halotile.cli.config.sections import keys_of_job
from halotile.cli.config.yaml_source import read_text
from halotile.graphs.jobs.reconstruct.job import OperatorChoice
from halotile.graphs.jobs.samples.job import MeasuredOperator
from halotile.graphs.kinds.base import kind_names
from halotile.graphs.kinds.sections import NamedChoice
from halotile.graphs.rules.keys import Keys, keys_of, written_keys

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = {
    "denoise": ("job-file.md", "every-key.yaml"),
    "reconstruct": ("reconstruction.md", "every-key-of-a-reconstruction.yaml"),
    "simulate": ("reconstruction.md", "every-key-of-a-simulation.yaml"),
    "ptychography": ("ptychography.md", "every-key-of-ptychography.yaml"),
    "samples": ("samples.md", "every-key-of-samples.yaml"),
    "train": ("training.md", "every-key-of-a-training.yaml"),
}
SHARED = {
    "denoise": (),
    "reconstruct": ("output", "tile", "run", "cluster"),
    "simulate": ("run", "cluster"),
    "ptychography": ("run", "cluster"),
    "samples": ("input", "denoiser", "noise", "tile", "run", "cluster"),
    "train": ("input", "run", "cluster"),
}
"""Sections that are those of a denoising job."""
ADVISED = {("denoise", "denoiser"): {"sigma": "auto"}}
"""Values other than the defaults that every example has."""
SECTIONS = [(job, name) for job in kind_names() for name in keys_of_job(job).sections if name not in SHARED[job]]


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
    for job, part in zip(kind_names(), config_schema()["anyOf"], strict=True):
        left_out = {*SHARED[job]} - {"input", "output"}
        assert set(examples[job]) == set(part["properties"]) - left_out


def check_values(where: str, written: dict[str, Any], keys: Keys) -> None:
    """Assert that every key is there with its default."""
    assert set(written) == set(keys), where
    for key, kind in keys.items():
        if not kind.is_required:
            usual = {} if kind.field.default is dataclasses.MISSING else kind.field.default
            assert written[key] == (list(usual) if isinstance(usual, tuple) else usual), (where, key)


def test_the_examples_have_every_key_with_its_default(examples: dict[str, dict[str, Any]]) -> None:
    for job, section in SECTIONS:
        written, schema = dict(examples[job][section]), keys_of_job(job).sections[section]
        for key, value in ADVISED.get((job, section), {}).items():
            assert written[key] == value
            written[key] = None
        keys = keys_of(schema)
        if issubclass(schema, NamedChoice):
            keys = written_keys(schema.declared(written.pop("name")), schema)
        check_values(f"{job}: {section}", written, keys)


def test_the_examples_have_every_key_outside_of_sections(examples: dict[str, dict[str, Any]]) -> None:
    for job in ("ptychography", "reconstruct", "samples", "simulate", "train"):
        keys = keys_of_job(job).values
        assert keys
        check_values(job, {key: examples[job][key] for key in keys}, keys)


def test_the_examples_have_every_key_of_an_operator(examples: dict[str, dict[str, Any]]) -> None:
    for job, choice in (("reconstruct", OperatorChoice), ("samples", MeasuredOperator), ("simulate", OperatorChoice)):
        operator = dict(examples[job]["operators"][0])
        keys = written_keys(choice.declared(operator.pop("name")), choice)
        check_values(job, operator, keys)


def test_tables_have_every_name_with_its_options_and_mark_those_that_must_be_written() -> None:
    for name in registry.names("denoisers"):
        check_row("denoisers.md", name, registry.find("denoisers", name).DENOISER)
    for name in registry.names("networks"):
        check_row("training.md", name, registry.find("networks", name).NETWORK)
    for name in OperatorChoice.accepted():
        check_row("operators.md", name, OperatorChoice.declared(name))


def check_row(page: str, name: str, schema: type) -> None:
    """Assert that a row of a page's table has every option, and marks those that must be written."""
    found = re.search(rf"^\| `{name}` \| (.*?) \|", (DOCS / page).read_text(), re.MULTILINE)
    assert found, f"the table of {page} has no {name}"
    row = found[1]
    assert set(re.findall(r"`(\w+)`", row)) == set(keys_of(schema)), name
    required = {key for key, kind in keys_of(schema).items() if kind.is_required}
    assert set(re.findall(r"\*\*`(\w+)`\*\*", row)) == required, name
