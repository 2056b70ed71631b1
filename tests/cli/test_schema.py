"""Editors get a schema that says what the command line accepts."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from halotile import registry
from halotile.cli.fields import field_types
from halotile.cli.main import app
from halotile.cli.schema import config_schema
from halotile.cli.sections import JOBS
from halotile.cli.yaml_source import read_text


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return config_schema()


def test_it_is_written_as_json(schema: dict[str, Any]) -> None:
    assert json.loads(CliRunner().invoke(app, ["schema"]).stdout) == schema


@pytest.mark.parametrize("section", [name for name in JOBS["denoise"].sections if name != "denoiser"])
def test_every_key_is_there_with_a_description_and_no_other_is_allowed(
    schema: dict[str, Any], section: str
) -> None:
    part = schema["properties"][section]
    assert set(part["properties"]) == set(field_types(JOBS["denoise"].sections[section]))
    assert all(entry["description"] for entry in part["properties"].values())
    assert part["additionalProperties"] is False


def test_every_denoiser_is_a_choice_by_its_name(schema: dict[str, Any]) -> None:
    choices = {
        choice["properties"]["name"]["const"]: choice for choice in schema["properties"]["denoiser"]["anyOf"]
    }
    assert set(choices) == set(registry.names("denoisers"))
    for name, choice in choices.items():
        options = field_types(registry.find("denoisers", name).DENOISER)
        assert set(choice["properties"]) == {"name", *options}
        assert choice["additionalProperties"] is False
        assert "name" in choice["required"]


def test_what_must_be_written_is_required(schema: dict[str, Any]) -> None:
    assert schema["required"] == ["version", "job", "input", "output", "denoiser"]
    assert schema["properties"]["input"]["required"] == ["path"]
    assert schema["additionalProperties"] is False


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
def test_numbers_that_are_too_small_do_not_fit(
    schema: dict[str, Any], config: Any, wrong: dict[str, Any]
) -> None:
    tree = read_text(config.read_text(), "config.yaml").tree
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree | wrong, schema)


def test_the_config_of_the_readme_fits_and_a_misspelt_one_does_not(
    schema: dict[str, Any], config: Any
) -> None:
    tree = read_text(config.read_text(), "config.yaml").tree
    jsonschema.validate(tree, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree | {"tile": {"siez": 1}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree | {"denoiser": {"name": "tv", "strenght": 1}}, schema)
