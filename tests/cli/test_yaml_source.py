"""Files that are no configuration are refused quickly, with one message."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.cli.config.yaml_source import MAX_BYTES, read_file, read_text
from halotile.errors import ConfigError

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
DOUBLING = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} {{l: *a{i - 1}, b: *a{i - 1}}}\n" for i in range(1, 6))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "aliases that expand to so many"),
        ("a: &x [*x]\n", "aliases that expand to so many"),
        ("[" * 30 + "]" * 30, "c.yaml:1: nested deeper than 20 levels"),
        ("a: [" + "1, " * 30_000 + "]", "more than 20,000 entries"),
        ("tile:\n\tsize: 1\n", "c.yaml:2: a tab stands where YAML needs spaces"),
        ("a: {b: [1,\n", "c.yaml:2: not YAML"),
        ("a: b: c\n", "c.yaml:1: not YAML: mapping values are not allowed here"),
        ("a: 'x\n", "not YAML"),
        ("a: 1\n--- \nb: 1\n", "c.yaml:2: a second document begins"),
        ("%YAML 1.1\n---\na: NO\n", "c.yaml:2: %YAML 1.1 is not read"),
        ("a: 1\nb: \x07\n", "c.yaml:2: not YAML"),
        ("? [a]\n: 1\n", "cannot be a key"),
    ],
)
def test_what_is_no_configuration_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_text(text, "c.yaml")
    assert message in str(caught.value)


def test_a_few_aliases_are_read() -> None:
    document = read_text("a: &size [1, 2]\nb: *size\nc: *size\n", "c.yaml")
    assert document.tree == {"a": [1, 2], "b": [1, 2], "c": [1, 2]}
    assert document.place_of(("c",)) == "c.yaml:3"


def test_aliases_count_each_time_they_are_met() -> None:
    assert read_text(DOUBLING, "c.yaml").tree["a5"]["l"]["b"]["l"]["b"]["l"] == ["x", "x"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("1.5", 1.5), ("12", 12), ("0o17", 15), ("0x1f", 31), ("-.inf", float("-inf")),
        ("NO", "NO"), ("yes", "yes"), ("on", "on"), ("true", True), ("False", False), ("null", None), ("~", None),
        ("", None), ("2026-01-02", "2026-01-02"), ("1:30", "1:30"), ("'7'", "7"), ("4GiB", "4GiB"),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = read_text(f"a: {text}\n", "c.yaml").tree["a"]
    assert found == value
    assert type(found) is type(value)


def test_a_key_written_twice_keeps_the_first_and_is_told() -> None:
    document = read_text("a: 1\nb: {c: 1, c: 2}\na: 3\n", "c.yaml")
    assert document.tree == {"a": 1, "b": {"c": 1}}
    assert [str(problem) for problem in document.problems] == [
        "c.yaml:2: b.c: written twice, first on line 2; keep one",
        "c.yaml:3: a: written twice, first on line 1; keep one",
    ]


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 1,000,000 bytes"):
        read_file(tmp_path / "c.yaml")


def test_bytes_that_are_not_utf8_are_refused_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"version: 1\njob: d\xe9noise\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:2: not UTF-8 text"):
        read_file(tmp_path / "c.yaml")


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\xef\xbb\xbfversion: 1\r\njob: denoise\r\n")
    assert read_file(tmp_path / "c.yaml").tree == {"version": 1, "job": "denoise"}


@pytest.mark.parametrize(("name", "message"), [("gone.yaml", "no such file"), (".", "this is a directory")])
def test_a_path_that_is_no_file_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_file(tmp_path / name)


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet=st.sampled_from("ab: -{}[]&*!|>'\"\n\t#%,?1~<@`"), max_size=40))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    refused = ""
    try:
        read_text(text, "c.yaml")
    except ConfigError as error:
        refused = str(error)
    assert not refused or refused.startswith("c.yaml:")
