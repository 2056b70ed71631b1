"""A configuration is read whole or refused quickly, every mistake in it is told with its line, and editors get a schema of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile import registry
from halotile.cli.arguments import Flags
from halotile.cli.config.loading import load_job, load_saved_job, read_config
from halotile.cli.config.schema import config_schema
from halotile.cli.config.sections import check_config, keys_of_job
from halotile.cli.config.yaml_source import MAX_BYTES, read_file, read_text
from halotile.errors import ConfigError, InputError
from halotile.graphs.kinds.base import kind_names
from halotile.graphs.kinds.sections import NamedChoice
from halotile.graphs.rules.keys import keys_of
from tests.cli.engine import MonkeyPatch, ask, check_lie
from tests.support import load_denoising


def test_the_config_of_the_readme_becomes_a_job_with_whole_paths(config: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    job, folder = load_denoising(config), config.parent
    assert (job.input.path, job.output.path) == (str(folder / "noisy.npy"), str(folder / "clean.zarr"))
    assert (job.output.chunk, job.denoiser.name, job.denoiser.options) == (256, "tv", {"strength": 0.1})
    assert (job.run.workers, job.run.memory_per_worker, job.allow_import) == (2, "4GiB", False)
    (folder / "net.safetensors").write_bytes(b"")
    (folder / "a" / "deep").mkdir(parents=True)
    (folder / "link").symlink_to(folder / "a" / "deep")
    tiles = "{size: auto, depth: auto, boundary: auto, batch: auto}"
    text = config.read_text().replace("strength: 0.1", "strength: 1e-3").replace(tiles, "")
    config.write_text(text.replace("path: clean.zarr", "path: link/../clean.zarr"))
    job = load_denoising(config, ["run.memory_per_worker=4000000000"])
    assert job.output.path == str(folder.resolve() / "a" / "clean.zarr"), "where the file system says"
    assert (job.denoiser.options["strength"], job.tile.size) == (1e-3, "auto"), "an empty section has its defaults"
    assert job.run.memory_per_worker == 4_000_000_000
    job = load_denoising(config, ["denoiser={name: dncnn, weights: net.safetensors}", "input.path=s3://bucket/a.zarr"])
    assert job.denoiser.options["weights"] == str(folder / "net.safetensors")
    assert job.input.path == "s3://bucket/a.zarr"


WITH_URLS = [
    ("denoise", "input: URL\ndenoiser: {name: torch, weights: URL, sigma: URL}"),
    ("denoise", 'input: {path: "a.npy", sides: {mask: URL}, pth: URL}\ndenoiser: {name: none}'),
    ("reconstruct", "operators: [{name: blur, kernel: URL, data: URL}]\nstart: URL\nsolver: {name: gd}"),
    ("train", "input: {path: URL}\nsecond: URL"),
    ("ptychography", "input: {path: URL, start: URL}"),
]


@pytest.mark.parametrize(("kind", "body"), WITH_URLS)
@pytest.mark.parametrize("url", ["s3://me:sesame@b/a.zarr", "https://h/a.zarr?sig=sesame"])
def test_no_credentials_are_taken_or_shown(tmp_path: Path, kind: str, body: str, url: str) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(f"version: 1\njob: {kind}\n{body}\noutput: {{path: URL}}\n".replace("URL", f'"{url}"'))
    for arguments in (["validate", str(config)], ["validate", "--json", str(config)], ["run", str(config)]):
        shown = ask(*arguments)
        assert shown.exit_code == 2
        assert shown.stderr.count("holds a name or a password") == body.count("URL") + 1
        assert "sesame" not in shown.output
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


@pytest.mark.parametrize("command", ["info", "levels", "run", "status", "verify", "resume", "cancel", "convert"])
def test_no_command_shows_credentials(command: str) -> None:
    pytest.importorskip("obstore")
    url = "https://me:sesame@127.0.0.1:9/a.zarr?sig=sesame"
    shown = ask(command, url, *(["o.zarr"] if command == "convert" else []))
    assert shown.exit_code != 0
    assert "127.0.0.1:9/a.zarr" in shown.output
    assert "sesame" not in shown.output + repr(shown.exception)


# What stands in the README's file, what is written instead, the line, and words of the message.
LIES = [
    ("version: 1", "version: 2", 1, "version: 2 is not known here; write 1"),
    ("version: 1", "version: 1.0", 1, "write 1"),
    ("version: 1", "version: true", 1, "write 1"),
    ("version: 1\n", "", 1, "version: missing"),
    ("job: denoise", "job: denoize", 2, "did you mean denoise?"),
    ("job: denoise\n", "", 1, "job: missing; write `job: denoise`"),
    ("input: ", "inptu: ", 3, "inptu: unknown key; did you mean input?"),
    ("input:    {path: noisy.npy, level: 0}\n", "", 1, "input: missing; write `input: {path: ...}`"),
    ("{path: noisy.npy, level: 0}", "noisy.npy", 3, 'write `input: {path: "noisy.npy"}`'),
    ("{path: noisy.npy, level: 0}", "{level: 0}", 3, "input.path: missing; write a path"),
    ("{name: tv, strength: 0.1}", "{name: unet, weights: gone.safetensors}", 5, "gone.safetensors does not exist"),
    ("{name: tv, strength: 0.1}", "{name: dncnn}", 5, "denoiser.weights: missing; write the path"),
    ("{size: auto, depth: auto,", "{size: auto,\n\n   depth: bg,", 8, "tile.depth: "),
    ("path: noisy.npy", "pth: noisy.npy", 3, "input.pth: unknown key; did you mean path?"),
    ("path: noisy.npy", "path: 12", 3, "input.path: 12 is not a path; put it in quotes"),
    ("path: noisy.npy", 'path: ""', 3, "input.path: is empty"),
    ("level: 0", "level: -1", 3, "input.level: -1 is too small; write at least 0"),
    ("level: 0", "axes: yy", 3, 'input.axes: "yy" does not name axes'),
    ("level: 0", "range: [1, 0]", 3, "input.range: [1, 0] runs backwards"),
    ("level: 0", "range: [0, .inf]", 3, "input.range: [0, Infinity] is not finite"),
    ("level: 0", "stripes: {axis: z}", 3, 'input.stripes: {"axis": "z"} names no axis'),
    ("level: 0", "stripes: {axes: x}", 3, "write {axis: x} if columns have offsets"),
    ("level: 0", "stripes: y", 3, 'input.stripes: "y" is not auto, none or a mapping; write {axis: y}'),
    ("level: 0", "stripes: {axis: x, gian: true}", 3, "{axis: y} if rows do; add gain: true"),
    ("level: 0", "range: [0, 1, 2]", 3, "not auto or a list of 2 numbers"),
    ("level: 0", "sides: {sigma: 3}", 3, "input.sides.sigma: 3 is not a path"),
    ("overwrite: false", "overwrite: NO", 4, 'overwrite: "NO" is not true or false; in YAML 1.2 that is text: write false'),
    ("codec: lz4", "codec: lz44", 4, "is not lz4, zstd or none; did you mean lz4?"),
    ("codec: lz4", "dtype: complex64", 4, "cannot hold a denoised image"),
    ("codec: lz4", "depth: 3", 4, "output.depth: unknown key; did you mean tile.depth?"),
    ("chunk: 256", "chunk: 256.0", 4, "256.0 is not auto, a whole number or a list of whole numbers; write 256"),
    ("chunk: 256", "chunk: 0", 4, "0 is too small; write at least 1"),
    ("name: tv", "name: tvv", 5, "no denoiser is called tvv; did you mean tv?"),
    ("name: tv", "name: 3", 5, "denoiser.name: 3 is not text"),
    ("name: tv, ", "", 5, "denoiser.name: missing; write one of"),
    ("strength: 0.1", "strenght: 0.1", 5, "denoiser.strenght: unknown key; did you mean strength?"),
    ("strength: 0.1", 'strength: "0.1"', 5, "write it without quotes"),
    ("strength: 0.1", "strength: -1", 5, "denoiser.strength: strength is -1"),
    ("strength: 0.1", "strength: 0.1, iterations: 2.5", 5, "2.5 is not a whole number"),
    ("size: auto", "size: [256, 0]", 6, "[256, 0] is too small; write at least 1"),
    ("depth: auto", "depth: []", 6, "tile.depth: [] is too small; write at least 0"),
    ("batch: auto", "batch: true", 6, "true is not auto or a whole number"),
    ("workers: 2", "workers: ", 7, "is empty; write auto or a whole number, or leave the key out for its default"),
    ("strength: 0.1", "strength: null", 5, "denoiser.strength: is empty; write a number"),
    ("path: clean.zarr", "path: https://b/clean.zarr", 4, "write a place in a store, such as s3://bucket/clean.zarr"),
    ("workers: 2", "<<: {workers: 2}", 7, "run.<<: merge keys are not read; write the keys out"),
    ("size: auto", "size: !pixels [4, 4]", 6, "tile.size: the tag !pixels is not allowed"),
    ("kind: local", "!mine kind: local", 8, "the tag !mine is not allowed; write a plain key"),
    ("workers: 2", "workers: two", 7, '"two" is not auto or a whole number'),
    ("memory_per_worker: 4GiB", "memory_per_worker: 4 gigs", 7, '"4 gigs" is not a size'),
    ("memory_per_worker: 4GiB", 'memory_per_worker: "4"', 7, "less than a worker needs"),
    ("on_bad_block: fail", "on_bad_block: quarantaine", 7, "did you mean quarantine?"),
    ("cluster: ", "workers: 3\ncluster: ", 8, "workers: unknown key; did you mean run.workers?"),
    ("cluster: ", "allow_import: true\ncluster: ", 8, "add --allow-import"),
    ("cluster: ", "job: denoise\ncluster: ", 8, "job: written twice, first on line 2; keep one"),
    ("level: 0", "level: !!python/name:os.system x", 3, "is not allowed; write a plain value"),
    ("cluster: ", "noise: {model: poisson}\ncluster: ", 8, "did you mean poisson-gaussian?"),
    ("cluster: ", "noise: {model: poisson-gaussian}\ncluster: ", 5, "write sigma: auto"),
    ("cluster: ", "noise: {gain: 3}\ncluster: ", 8, "noise.gain: is for model: poisson-gaussian"),
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=[lie[1].strip() or lie[0].strip() for lie in LIES])
def test_a_lie_is_told_with_its_line(config: Path, lie: tuple[str, str, int, str]) -> None:
    check_lie(config, *lie)


WRONG_DENOISERS = [
    ("{name: tv, strength: -1, iterations: 0, sigma: -1}", "strength iterations sigma"),
    ("{name: tv, strength: x, iterations: 0}", "strength iterations"),
    ("{name: tv, iterations: 0, sigam: 1}", "strength iterations sigam"),
    ("{name: nlm, strength: 1, patch: 4, distance: 0}", "patch distance"),
    ("{name: dncnn, depth: 0, width: 0, residual: x}", "weights depth width residual"),
    ("{name: torch, sigma: -1, scale: 0, alignment: 0}", "import sigma scale alignment"),
]


@pytest.mark.parametrize(("denoiser", "keys"), WRONG_DENOISERS)
def test_every_wrong_option_of_a_denoiser_is_told_to_programs_too(config: Path, denoiser: str, keys: str) -> None:
    config.write_text(config.read_text().replace("{name: tv, strength: 0.1}", denoiser))
    result = ask("validate", config, "--json")
    problems = json.loads(result.stdout)["problems"]
    assert sorted(one["key"] for one in problems) == sorted(f"denoiser.{key}" for key in keys.split())
    assert {(one["file"], one["line"]) for one in problems} == {(str(config), 5)}
    assert (result.exit_code, json.loads(result.stdout)["ok"]) == (2, False)


def test_what_is_inside_a_misspelt_section_is_checked_too(config: Path) -> None:
    text = config.read_text()
    text = text.replace("input:    {path: noisy.npy, level: 0}", "inptu: {path: gone.npy, level: -1}")
    text = text.replace("denoiser: {name: tv, strength: 0.1}", "denoser: {nmae: tvv, strenght: 1}")
    config.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_job(config)
    told = {line.split(": ")[1]: line.split(": ", 2)[2] for line in str(caught.value).splitlines()[1:]}
    assert told == {
        "inptu": "unknown key; did you mean input?",
        "inptu.level": "-1 is too small; write at least 0",
        "inptu.path": f"{config.parent / 'gone.npy'} does not exist",
        "denoser": "unknown key; did you mean denoiser?",
        "denoser.nmae": "unknown key; did you mean name?",
        "denoser.strenght": "unknown key; did you mean strength?",
    }


WRONG_OUTPUTS = [
    ("scans/out.tif", r"write scans/out\.zarr, and `recon-cli export scans/out\.zarr scans/out\.tif` makes a TIFF"),
    ("out.OME.TIFF", "makes a TIFF"),
    ("out.png", r"`recon-cli preview out\.zarr out\.png` makes a PNG"),
    ("out.npy", r"`recon-cli export out\.zarr out\.tif` makes a TIFF"),
    ("out.h5", r"write out\.zarr"),
    ("x" * 300, "a name of 300 bytes; write one of at most 230"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "words"), WRONG_OUTPUTS)
def test_a_name_of_an_output_that_cannot_be_is_refused(config: Path, path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_denoising(config, [f"output.path={path}"])


def test_set_replaces_values_in_order_and_makes_or_replaces_sections(config: Path) -> None:
    config.write_text(config.read_text().replace("cluster:  {kind: local}\n", ""))
    sets = ["tile.size=128", "tile.size=[256, 512]", "run.on_bad_block=quarantine", "cluster.dashboard=false"]
    job = load_denoising(config, [*sets, "denoiser={name: gaussian, sigma: 2}"], Flags(workers=7))
    assert (job.tile.size, job.run.on_bad_block, job.run.workers) == ((256, 512), "quarantine", 7)
    assert (job.denoiser.name, job.denoiser.options, job.cluster.dashboard) == ("gaussian", {"sigma": 2}, False)


OVERRIDES = [
        ("foo;tile.size=128;=3", "--set =3: not"),
        ("run.workers=0;run.memory_per_worker=4", "4 is 4 bytes, less than a worker needs to start"),
        ("tile.siez=3", "--set tile.siez: unknown key; did you mean size?"),
        ("tile.size=big", '--set tile.size: "big" is not auto'),
        ("denoiser.strength=-1", "--set denoiser.strength: strength is -1"),
        ("run.workers=0", "--set run.workers: 0 is too small"),
        ("input.path=gone.npy", "--set input.path: "),
        ("tile.size", "--set tile.size: not a key and a value"),
        ("version.x=1", "--set version.x: version is 1, not a section"),
        ("tile.size=[1", "--set tile.size:1: not YAML"),
        ("tile={size: 1, size: 2}", "written twice"),
        ("output.chunk.x=3", "--set output.chunk.x: output.chunk is 256, not a section"),
        ("tile.axes.x=3", '--set tile.axes.x: tile.axes: {"x": 3} is not'),
        ("tile={sise: 1}", "--set tile: tile.sise: unknown key; did you mean size?"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), OVERRIDES)
def test_a_wrong_override_is_named_as_it_was_typed(config: Path, overrides: str, message: str) -> None:
    with pytest.raises((ConfigError, InputError)) as caught:
        load_job(config, overrides.split(";"))
    assert message in str(caught.value)


SIZES = [
    (["output.shard=1000"], ["--set output.shard: 1000 is no multiple of output.chunk 256; a shard holds whole"]),
    (["output.shard=[512, 300]"], ["write [512, 512]"]),
    (["output.shard=512", "tile.block=700"], ["--set tile.block: 700 is no multiple of output.shard 512"]),
    (["tile.depth=5"], ["--set tile.depth: 5 is less than tv's receptive field 20: seams would show; write 20"]),
    (["tile.depth=5", "output.shard=1000"], ["--set tile.depth", "--set output.shard"]),
    (["tile.depth=5", "tile.seams=allow"], []),
    (["tile.depth=5", "denoiser.strength=-1"], ["--set denoiser.strength"]),
    (["output.shard=512", "tile.block=[1024, 512]"], []),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "messages"), SIZES)
def test_sizes_that_do_not_fit_are_told_with_the_rest(config: Path, overrides: list[str], messages: list[str]) -> None:
    _, problems = check_config(read_config(config, overrides), config.parent)
    assert len(problems) == len(messages)
    for message in messages:
        assert any(message in str(problem) for problem in problems), message


def test_only_the_command_line_allows_imports_from_the_folder(config: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(config.parent)
    job = load_job(Path(config.name), flags=Flags(allow_import=True))
    assert (job.allow_import, job.import_folder) == (True, str(config.parent))
    assert load_job(config).import_folder is None
    for override, words in (("allow_import=true", "--allow-import"), ("import_folder=/tmp", "import_folder")):
        with pytest.raises(ConfigError, match=words):
            load_job(config, [override], flags=Flags(allow_import=override.startswith("import")))
    saved = config.with_name("job.json")
    paths = {"input": {"path": "noisy.npy"}, "output": {"path": "c.zarr"}, "import_folder": "/elsewhere"}
    sections = paths | {"denoiser": {"name": "tv", "strength": 1}}
    saved.write_text(json.dumps({"version": 1, "job": "denoise", "allow_import": True} | sections))
    for allowed in (False, True):
        job = load_saved_job(saved, flags=Flags(allow_import=allowed))
        assert (job.allow_import, job.import_folder) == (allowed, "/elsewhere" if allowed else None)
    for text in ("", "{", "[1]", '"a"'):
        saved.write_text(text)
        with pytest.raises(ConfigError, match=r"job\.json"):
            load_saved_job(saved)


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))


UNREADABLE = [
    (BOMB, "aliases that expand to so many"),
    ("a: &x [*x]\n", "aliases that expand to so many"),
    ("[" * 30 + "]" * 30, "c.yaml:1: nested deeper than 20 levels"),
    ("a: [" + "1, " * 20_100 + "]", "more than 20,000 entries"),
    ("tile:\n\tsize: 1\n", "c.yaml:2: a tab stands where YAML needs spaces"),
    ("a: {b: [1,\n", "c.yaml:2: not YAML"),
    ("a: b: c\n", "c.yaml:1: not YAML: mapping values are not allowed here"),
    ("a: 'x\n", "not YAML"),
    ("a: 1\n--- \nb: 1\n", "c.yaml:2: a second document begins"),
    ("%YAML 1.1\n---\na: NO\n", "c.yaml:2: %YAML 1.1 is not read"),
    ("a: 1\nb: \x07\n", "c.yaml:2: not YAML"),
    ("? [a]\n: 1\n", "cannot be a key"),
]


@pytest.mark.parametrize(("text", "message"), UNREADABLE)
def test_what_is_no_configuration_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_text(text, "c.yaml")
    assert message in str(caught.value)


def test_a_few_aliases_are_read_and_a_key_written_twice_keeps_the_first() -> None:
    document = read_text("a: &size [1, 2]\nb: *size\nc: *size\n", "c.yaml")
    assert document.tree == {"a": [1, 2], "b": [1, 2], "c": [1, 2]}
    assert document.place_of(("c",)) == "c.yaml:3"
    doubling = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} {{l: *a{i - 1}, b: *a{i - 1}}}\n" for i in range(1, 6))
    assert read_text(doubling, "c.yaml").tree["a5"]["l"]["b"]["l"]["b"]["l"] == ["x", "x"]
    document = read_text("a: 1\nb: {c: 1, c: 2}\na: 3\n", "c.yaml")
    assert document.tree == {"a": 1, "b": {"c": 1}}
    assert [str(problem) for problem in document.problems] == [
        "c.yaml:2: b.c: written twice, first on line 2; keep one",
        "c.yaml:3: a: written twice, first on line 1; keep one",
    ]


SCALARS = [
    ("1e-3", 1e-3), ("1.5", 1.5), ("12", 12), ("0o17", 15), ("0x1f", 31), ("-.inf", float("-inf")),
    ("NO", "NO"), ("yes", "yes"), ("on", "on"), ("true", True), ("False", False), ("null", None), ("~", None),
    ("", None), ("2026-01-02", "2026-01-02"), ("1:30", "1:30"), ("'7'", "7"), ("4GiB", "4GiB"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = read_text(f"a: {text}\n", "c.yaml").tree["a"]
    assert found == value
    assert type(found) is type(value)


def test_a_file_that_cannot_be_read_as_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    rows: list[tuple[bytes | None, str]] = [
        (None, "no such file"),
        (b"#" * (MAX_BYTES + 1), "larger than 1,000,000 bytes"),
        (b"version: 1\njob: d\xe9noise\n", r"c\.yaml:2: not UTF-8 text"),
    ]
    for content, words in rows:
        if content:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            read_file(path)
    with pytest.raises(ConfigError, match="this is a directory"):
        read_file(tmp_path)
    path.write_bytes(b"\xef\xbb\xbfversion: 1\r\njob: denoise\r\n")  # a mark of the byte order is no part of a key
    assert read_file(path).tree == {"version": 1, "job": "denoise"}


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet=st.sampled_from("ab: -{}[]&*!|>'\"\n\t#%,?1~<@`"), max_size=40))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    refused = ""
    try:
        read_text(text, "c.yaml")
    except ConfigError as error:
        refused = str(error)
    assert not refused or refused.startswith("c.yaml:")


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return config_schema()


def of(schema: dict[str, Any], job: str) -> dict[str, Any]:
    """The part of the schema that a kind of job has."""
    found: dict[str, Any] = schema["anyOf"][kind_names().index(job)]
    return found


@pytest.mark.parametrize("job", kind_names())
def test_every_key_is_described_and_no_other_allowed(schema: dict[str, Any], job: str) -> None:
    assert set(keys_of_job(job).sections) <= set(keys_of_job(job).schema.__dataclass_fields__)
    assert of(schema, job)["additionalProperties"] is False
    for name, section in keys_of_job(job).sections.items():
        if issubclass(section, NamedChoice):
            continue
        part = of(schema, job)["properties"][name]
        assert set(part["properties"]) == set(keys_of(section))
        assert all(entry["description"] for entry in part["properties"].values())
        assert part["additionalProperties"] is False


def test_every_denoiser_and_operator_is_a_choice_by_its_name(schema: dict[str, Any]) -> None:
    found = of(schema, "reconstruct")["properties"]
    priors = choices_of(found["prior"])
    assert set(priors) == set(registry.names("priors"))
    assert set(priors["tv"]["properties"]) == {"name", "weight", "iterations"}
    denoisers = of(schema, "denoise")["properties"]["denoiser"], priors["pnp"]["properties"]["denoiser"]
    kinds: list[Any] = [(one, "denoisers", ["name"], ["name"], set()) for one in denoisers]
    kinds += [(found["operators"]["items"], "operators", ["name", "data", "noise_sigma"], ["name", "data"], {"normal"})]
    for part, kind, usual, required, left_out in kinds:
        choices = choices_of(part)
        assert set(choices) == set(registry.names(kind)) - left_out
        for name, each in choices.items():
            module = registry.find(kind, name)
            options = keys_of(module.OPERATOR if kind == "operators" else module.DENOISER)
            assert set(each["properties"]) == {*usual, *options}
            assert all(entry["description"] for entry in each["properties"].values())
            assert set(required) <= set(each["required"])
            assert each["additionalProperties"] is False
    assert choices["blur"]["properties"]["kernel"]["type"] == "string", "an array is written as its file"


def choices_of(part: dict[str, Any]) -> dict[str, Any]:
    return {each["properties"]["name"]["const"]: each for each in part["anyOf"]}


WRONG: list[dict[str, Any]] = [
    {"tile": {"size": 0}}, {"tile": {"size": [64, 0]}}, {"tile": {"depth": -1}}, {"run": {"workers": 0}}, {"run": {"stall_seconds": 0}},
    {"tile": {"siez": 1}}, {"denoiser": {"name": "tv", "strenght": 1}},
]  # fmt: skip
BLUR = {"name": "blur", "kernel": "k0.npy", "data": "y0.npy"}
WRONG_RECONSTRUCTIONS: list[dict[str, Any]] = [
    {"operators": []}, {"operators": [BLUR | {"kernle": "k.npy"}]}, {"operators": [BLUR | {"noise_sigma": 0}]}, {"solver": {"name": "lanczos"}},
    {"prior": {"name": "pnp", "denoiser": {"name": "tv", "strenght": 1}}}, {"exact": "no"}, {"input": {"path": "y0.npy"}},
]  # fmt: skip


def test_configurations_fit_and_wrong_ones_do_not(schema: dict[str, Any], config: Path, reconstruction: Path) -> None:
    assert json.loads(ask("schema").stdout) == schema
    validator = jsonschema.validators.validator_for(schema)(schema)
    for path, wrong in ((config, WRONG), (reconstruction, WRONG_RECONSTRUCTIONS)):
        tree = read_text(path.read_text(), "config.yaml").tree
        validator.validate(tree)
        left_out = [{key: value for key, value in tree.items() if key != name} for name in ("version", "job", "output")]
        for one in [tree | parts for parts in wrong] + left_out:
            assert not validator.is_valid(one)
