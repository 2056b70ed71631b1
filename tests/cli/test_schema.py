"""Editors get a schema that says what the command line accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from halotile import registry
from halotile.cli.config.schema import config_schema
from halotile.cli.config.sections import keys_of_job
from halotile.cli.config.yaml_source import read_text
from halotile.graphs.kinds.base import kind_names
from halotile.graphs.kinds.sections import NamedChoice
from halotile.graphs.rules.keys import keys_of
from tests.cli.engine import ask


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return config_schema()


def test_it_is_written_as_json(schema: dict[str, Any]) -> None:
    assert json.loads(ask("schema").stdout) == schema


def of(schema: dict[str, Any], job: str) -> dict[str, Any]:
    """The part of the schema that a kind of job has."""
    found: dict[str, Any] = schema["anyOf"][kind_names().index(job)]
    return found


SECTIONS = [
    (job, name)
    for job in kind_names()
    for name, section in keys_of_job(job).sections.items()
    if not issubclass(section, NamedChoice)
]


@pytest.mark.parametrize(("job", "section"), SECTIONS)
def test_every_key_is_described_and_no_other_allowed(schema: dict[str, Any], job: str, section: str) -> None:
    part = of(schema, job)["properties"][section]
    assert set(part["properties"]) == set(keys_of(keys_of_job(job).sections[section]))
    assert all(entry["description"] for entry in part["properties"].values())
    assert part["additionalProperties"] is False


def test_every_denoiser_is_a_choice_by_its_name(schema: dict[str, Any]) -> None:
    priors = {
        each["properties"]["name"]["const"]: each for each in of(schema, "reconstruct")["properties"]["prior"]["anyOf"]
    }
    assert set(priors) == set(registry.names("priors"))
    assert set(priors["tv"]["properties"]) == {"name", "weight", "iterations"}
    nested = priors["pnp"]["properties"]["denoiser"]
    for choice in (of(schema, "denoise")["properties"]["denoiser"], nested):
        choices = {each["properties"]["name"]["const"]: each for each in choice["anyOf"]}
        assert set(choices) == set(registry.names("denoisers"))
        for name, each in choices.items():
            options = keys_of(registry.find("denoisers", name).DENOISER)
            assert set(each["properties"]) == {"name", *options}
            assert all(entry["description"] for entry in each["properties"].values())
            assert each["additionalProperties"] is False
            assert "name" in each["required"]


def test_every_operator_is_a_choice_with_its_measurement(schema: dict[str, Any]) -> None:
    entries = of(schema, "reconstruct")["properties"]["operators"]["items"]["anyOf"]
    choices = {entry["properties"]["name"]["const"]: entry for entry in entries}
    assert set(choices) == set(registry.names("operators")) - {"normal"}
    for name, choice in choices.items():
        options = keys_of(registry.find("operators", name).OPERATOR)
        assert set(choice["properties"]) == {"name", "data", "noise_sigma", *options}
        assert all(entry["description"] for entry in choice["properties"].values())
        assert {"name", "data"} <= set(choice["required"])
    assert choices["blur"]["properties"]["kernel"]["type"] == "string", "an array is written as its file"


def test_what_must_be_written_is_required(schema: dict[str, Any]) -> None:
    assert of(schema, "denoise")["required"] == ["version", "job", "input", "output", "denoiser"]
    assert of(schema, "denoise")["properties"]["input"]["required"] == ["path"]
    assert of(schema, "reconstruct")["required"] == ["version", "job", "output", "operators"]
    assert of(schema, "denoise")["additionalProperties"] is False


@pytest.mark.parametrize(
    "wrong",
    [
        {"tile": {"size": 0}},
        {"tile": {"size": [64, 0]}},
        {"tile": {"depth": -1}},
        {"run": {"workers": 0}},
        {"run": {"stall_seconds": 0}},
    ],
)
def test_too_small_numbers_do_not_fit(schema: dict[str, Any], config: Any, wrong: dict[str, Any]) -> None:
    tree = read_text(config.read_text(), "config.yaml").tree
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree | wrong, schema)


def test_the_config_of_the_readme_fits_and_a_wrong_one_does_not(schema: dict[str, Any], config: Any) -> None:
    tree = read_text(config.read_text(), "config.yaml").tree
    jsonschema.validate(tree, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree | {"tile": {"siez": 1}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree | {"denoiser": {"name": "tv", "strenght": 1}}, schema)


def test_a_reconstruction_fits_and_a_wrong_one_does_not(schema: dict[str, Any], reconstruction: Path) -> None:
    tree = read_text(reconstruction.read_text(), "reconstruct.yaml").tree
    jsonschema.validate(tree, schema)
    blur = tree["operators"][0]
    wrong: list[dict[str, Any]] = [
        {"operators": []},
        {"operators": [blur | {"kernle": "k.npy"}]},
        {"operators": [blur | {"noise_sigma": 0}]},
        {"prior": {"name": "pnp", "denoiser": {"name": "tv", "strenght": 1}}},
        {"solver": {"name": "lanczos"}},
        {"exact": "no"},
        {"input": {"path": "y0.npy"}},
    ]
    for parts in wrong:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(tree | parts, schema)
