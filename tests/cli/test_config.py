"""A configuration is read whole, and every mistake in it is told with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import halotile
from halotile.cli.arguments import Flags
from halotile.cli.config.loading import load_job, load_saved_job, read_config
from halotile.cli.config.sections import check_config, keys_of_job
from halotile.errors import ConfigError, InputError
from halotile.graphs.kinds.base import kind_names
from tests.cli.engine import MonkeyPatch, ask, refused
from tests.support import load_denoising


def test_the_config_of_the_readme_becomes_a_job(config: Path) -> None:
    job = load_denoising(config)
    assert job.input.path == str(config.parent / "noisy.npy")
    assert job.output.path == str(config.parent / "clean.zarr")
    assert job.output.chunk == 256
    assert job.denoiser.name == "tv"
    assert job.denoiser.options == {"strength": 0.1}
    assert (job.run.workers, job.run.memory_per_worker, job.allow_import) == (2, "4GiB", False)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("denoise", "input: URL\ndenoiser: {name: torch, weights: URL, sigma: URL}"),
        ("denoise", 'input: {path: "a.npy", sides: {mask: URL}, pth: URL}\ndenoiser: {name: none}'),
        ("reconstruct", "operators: [{name: blur, kernel: URL, data: URL}]\nstart: URL\nsolver: {name: gd}"),
        ("train", "input: {path: URL}\nsecond: URL"),
        ("ptychography", "input: {path: URL, start: URL}"),
    ],
)
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
    ("version: 1", 'version: "1"', 1, "write 1"),
    ("version: 1", "version: 1.0", 1, "write 1"),
    ("version: 1", "version: true", 1, "write 1"),
    ("version: 1\n", "", 1, "version: missing"),
    ("job: denoise", "job: denoize", 2, "did you mean denoise?"),
    ("job: denoise", "job: paint", 2, "write one of denoise"),
    ("job: denoise\n", "", 1, "job: missing; write `job: denoise`"),
    ("input: ", "inptu: ", 3, "inptu: unknown key; did you mean input?"),
    ("input:    {path: noisy.npy, level: 0}\n", "", 1, "input: missing; write `input: {path: ...}`"),
    ("{path: noisy.npy, level: 0}", "noisy.npy", 3, 'write `input: {path: "noisy.npy"}`'),
    ("{path: noisy.npy, level: 0}", "{level: 0}", 3, "input.path: missing; write a path"),
    ("path: noisy.npy", "pth: noisy.npy", 3, "input.pth: unknown key; did you mean path?"),
    ("path: noisy.npy", "path: 12", 3, "input.path: 12 is not a path; put it in quotes"),
    ("path: noisy.npy", 'path: ""', 3, "input.path: is empty"),
    ("level: 0", "level: -1", 3, "input.level: -1 is too small; write at least 0"),
    ("level: 0", "axes: yy", 3, 'input.axes: "yy" does not name axes'),
    ("level: 0", "range: [1, 0]", 3, "input.range: [1, 0] runs backwards"),
    ("level: 0", "range: [0, .inf]", 3, "input.range: [0, Infinity] is not finite"),
    ("level: 0", "stripes: {axis: z}", 3, 'input.stripes: {"axis": "z"} names no lines'),
    ("level: 0", "stripes: {axis: x, gain: 2}", 3, "input.stripes"),
    ("level: 0", "stripes: {axes: x}", 3, "write {axis: x} where columns are off"),
    ("level: 0", "stripes: y", 3, 'input.stripes: "y" is not auto, none or a mapping; write {axis: y}'),
    ("level: 0", "stripes: {axis: x, gian: true}", 3, "{axis: y} for rows; with gain: true beside it"),
    ("level: 0", "range: [0, 1, 2]", 3, "not auto or a list of 2 numbers"),
    ("level: 0", "sides: {sigma: 3}", 3, "input.sides.sigma: 3 is not a path"),
    ("overwrite: false", "overwrite: NO", 4, 'overwrite: "NO" is not true or false; in YAML 1.2 that is text: write false'),
    ("overwrite: false", "overwite: false", 4, "did you mean overwrite?"),
    ("codec: lz4", "codec: lz44", 4, "is not lz4, zstd or none; did you mean lz4?"),
    ("codec: lz4", "dtype: complex64", 4, "cannot hold a denoised image"),
    ("codec: lz4", "dtype: flot32", 4, "did you mean float32?"),
    ("codec: lz4", "depth: 3", 4, "output.depth: unknown key; did you mean tile.depth?"),
    ("chunk: 256", "chunk: 256.0", 4, "256.0 is not auto, a whole number or a list of whole numbers; write 256"),
    ("chunk: 256", "chunk: 0", 4, "0 is too small; write at least 1"),
    ("shard: auto", "shard: automatic", 4, "did you mean auto?"),
    ("name: tv", "name: tvv", 5, "no denoiser is called tvv; did you mean tv?"),
    ("name: tv", "name: 3", 5, "denoiser.name: 3 is not text"),
    ("name: tv, ", "", 5, "denoiser.name: missing; write one of"),
    ("strength: 0.1", "strenght: 0.1", 5, "denoiser.strenght: unknown key; did you mean strength?"),
    ("strength: 0.1", 'strength: "0.1"', 5, "write it without quotes"),
    ("strength: 0.1", "strength: -1", 5, "denoiser.strength: strength is -1"),
    ("strength: 0.1", "strength: 0.1, iterations: 2.5", 5, "2.5 is not a whole number"),
    ("size: auto", "siez: auto", 6, "tile.siez: unknown key; did you mean size?"),
    ("size: auto", "size: [256, 0]", 6, "[256, 0] is too small; write at least 1"),
    ("size: auto", "size: []", 6, "write at least 1"),
    ("depth: auto", "depth: []", 6, "tile.depth: [] is too small; write at least 0"),
    ("level: 0", "range: []", 3, "input.range: [] is not auto or a list of 2 numbers"),
    ("depth: auto", "depth: -3", 6, "-3 is too small; write at least 0"),
    ("boundary: auto", "boundary: refelct", 6, "did you mean reflect?"),
    ("batch: auto", "batch: true", 6, "true is not auto or a whole number"),
    ("workers: 2", "workers: 0", 7, "run.workers: 0 is too small"),
    ("workers: 2", "workers: ", 7, "is empty; write auto or a whole number, or leave the key out for its default"),
    ("strength: 0.1", "strength: null", 5, "denoiser.strength: is empty; write a number"),
    ("path: clean.zarr", "path: https://b/clean.zarr", 4, "write a place in a store, such as s3://bucket/clean.zarr"),
    ("workers: 2", "<<: {workers: 2}", 7, "run.<<: merge keys are not read; write the keys out"),
    ("size: auto", "size: !pixels [4, 4]", 6, "tile.size: the tag !pixels is not allowed"),
    ("{kind: local}", "!mine {kind: local}", 8, "cluster: the tag !mine is not allowed"),
    ("kind: local", "!mine kind: local", 8, "the tag !mine is not allowed; write a plain key"),
    ("workers: 2", "workers: two", 7, '"two" is not auto or a whole number'),
    ("memory_per_worker: 4GiB", "memory_per_worker: 4 gigs", 7, '"4 gigs" is not a size'),
    ("memory_per_worker: 4GiB", 'memory_per_worker: "4"', 7, "less than a worker needs"),
    ("on_bad_block: fail", "on_bad_block: quarantaine", 7, "did you mean quarantine?"),
    ("{kind: local}", "{kind: locale}", 8, "no cluster is called locale; did you mean local?"),
    ("cluster: ", "workers: 3\ncluster: ", 8, "workers: unknown key; did you mean run.workers?"),
    ("cluster: ", "allow_import: true\ncluster: ", 8, "add --allow-import"),
    ("cluster: ", "job: denoise\ncluster: ", 8, "job: written twice, first on line 2; keep one"),
    ("level: 0", "level: !!python/name:os.system x", 3, "is not allowed; write a plain value"),
    ("cluster: ", "noise: {model: poisson}\ncluster: ", 8, "did you mean poisson-gaussian?"),
    ("cluster: ", "noise: {model: poisson-gaussian}\ncluster: ", 5, "write sigma: auto"),
    ("cluster: ", "noise: {gain: 3}\ncluster: ", 8, "noise.gain: is for model: poisson-gaussian"),
    ("cluster: ", "noise: {gain: -3}\ncluster: ", 8, "noise.gain: -3 is too small"),
]  # fmt: skip


@pytest.mark.parametrize(("was", "lie", "line", "words"), LIES, ids=[lie[1].strip() or lie[0].strip() for lie in LIES])
def test_a_lie_is_told_with_its_line(config: Path, was: str, lie: str, line: int, words: str) -> None:
    text = config.read_text()
    assert text.count(was) == 1
    config.write_text(text.replace(was, lie))
    result = refused("validate", config)
    assert result.startswith(f"error: {config}:{line}: ")
    assert words in result
    assert "Traceback" not in result
    assert len(result.splitlines()) == 1


def test_every_mistake_is_told_at_once_in_the_order_of_the_file(config: Path) -> None:
    text = config.read_text()
    lies = {"version: 1": "version: 3", "size:": "siez:", "kind: local": "knd: x", "noisy.npy": "gone.npy"}
    for was, lie in lies.items():
        text = text.replace(was, lie)
    config.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_job(config)
    head, *lines = str(caught.value).splitlines()
    assert head == f"4 problems in {config}; nothing was started"
    assert [line.removeprefix(f"{config}:").partition(":")[0] for line in lines] == ["1", "3", "6", "8"]


@pytest.mark.parametrize(
    ("denoiser", "keys"),
    [
        ("{name: tv, strength: -1, iterations: 0, sigma: -1}", {"strength", "iterations", "sigma"}),
        ("{name: tv, strength: x, iterations: 0}", {"strength", "iterations"}),
        ("{name: tv, iterations: 0, sigam: 1}", {"strength", "iterations", "sigam"}),
        ("{name: nlm, strength: 1, patch: 4, distance: 0}", {"patch", "distance"}),
        ("{name: dncnn, depth: 0, width: 0, residual: x}", {"weights", "depth", "width", "residual"}),
        ("{name: torch, sigma: -1, scale: 0, alignment: 0}", {"import", "sigma", "scale", "alignment"}),
    ],
)
def test_every_wrong_option_of_a_denoiser_is_told(config: Path, denoiser: str, keys: set[str]) -> None:
    config.write_text(config.read_text().replace("{name: tv, strength: 0.1}", denoiser))
    result = ask("validate", config, "--json")
    told = [problem["key"] for problem in json.loads(result.stdout)["problems"]]
    assert sorted(told) == sorted(f"denoiser.{key}" for key in keys)


def test_what_is_inside_a_misspelt_section_is_checked_too(config: Path) -> None:
    text = config.read_text()
    text = text.replace("input:    {path: noisy.npy, level: 0}", "inptu: {path: gone.npy, level: -1}")
    text = text.replace("output:   {path: clean.zarr, overwrite: false", "outptu: {pth: x, overwrit: true")
    text = text.replace("denoiser: {name: tv, strength: 0.1}", "denoser: {nmae: tvv, strenght: 1}")
    config.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_job(config)
    told = {line.split(": ")[1]: line.split(": ", 2)[2] for line in str(caught.value).splitlines()[1:]}
    assert told == {
        "inptu": "unknown key; did you mean input?",
        "inptu.level": "-1 is too small; write at least 0",
        "inptu.path": f"{config.parent / 'gone.npy'} does not exist",
        "outptu": "unknown key; did you mean output?",
        "outptu.pth": "unknown key; did you mean path?",
        "outptu.overwrit": "unknown key; did you mean overwrite?",
        "denoser": "unknown key; did you mean denoiser?",
        "denoser.nmae": "unknown key; did you mean name?",
        "denoser.strenght": "unknown key; did you mean strength?",
    }


def test_memory_may_be_a_number_of_bytes(config: Path) -> None:
    assert load_job(config, ["run.memory_per_worker=4000000000"]).run.memory_per_worker == 4_000_000_000
    with pytest.raises(ConfigError, match="4 is 4 bytes, less than a worker needs to start"):
        load_job(config, ["run.memory_per_worker=4"])


def test_a_value_over_several_lines_is_told_with_the_line_of_its_own_key(config: Path) -> None:
    config.write_text(config.read_text().replace("{size: auto, depth: auto,", "{size: auto,\n\n   depth: bg,"))
    with pytest.raises(ConfigError, match=r"config\.yaml:8: tile\.depth: "):
        load_job(config)


def test_numbers_are_those_of_yaml_1_2_and_an_empty_section_has_its_defaults(config: Path) -> None:
    text = config.read_text().replace("strength: 0.1", "strength: 1e-3")
    config.write_text(text.replace("{size: auto, depth: auto, boundary: auto, batch: auto}", ""))
    job = load_denoising(config)
    assert (job.denoiser.options["strength"], job.tile.size) == (1e-3, "auto")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("scans/out.tif", r"write scans/out\.zarr, and `recon-cli export scans/out\.zarr scans/out\.tif` makes a TIFF"),
        ("out.OME.TIFF", "makes a TIFF"),
        ("out.png", r"`recon-cli preview out\.zarr out\.png` makes a PNG"),
        ("out.npy", r"`recon-cli export out\.zarr out\.tif` makes a TIFF"),
        ("out.h5", r"write out\.zarr"),
        ("x" * 300, "a name of 300 bytes; write one of at most 230"),
    ],
)  # fmt: skip
def test_a_name_of_an_output_that_cannot_be_is_refused(config: Path, path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_denoising(config, [f"output.path={path}"])


def test_weights_that_are_left_out_are_told_with_where_they_come_from(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"denoiser\.weights: missing; write the path .*examples/train_dncnn\.py"):
        load_denoising(config, ["denoiser={name: dncnn}"])
    with pytest.raises(ConfigError, match=r"write weights, .*examples/train_dncnn\.py"):
        halotile.denoise(config.with_name("noisy.npy"), config.with_name("clean.zarr"), "dncnn")


def test_a_missing_input_alone_is_bad_data(config: Path) -> None:
    (config.parent / "noisy.npy").unlink()
    with pytest.raises(InputError, match=r"config\.yaml:3: input\.path: .*noisy\.npy does not exist"):
        load_job(config)
    assert ask("validate", config).exit_code == 4


@pytest.mark.parametrize("name", ["dncnn", "unet"])
def test_missing_weights_are_told_before_anything_starts(config: Path, name: str) -> None:
    denoiser = f"{{name: {name}, weights: gone.safetensors}}"
    text = config.read_text().replace("{name: tv, strength: 0.1}", denoiser)
    config.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml:5: denoiser\.weights: .*gone\.safetensors does not exist"):
        load_job(config)


def test_paths_start_from_the_folder_of_the_file(config: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    (config.parent / "net.safetensors").write_bytes(b"")
    text = config.read_text().replace("{name: tv, strength: 0.1}", "{name: dncnn, weights: net.safetensors}")
    config.write_text(text.replace("path: clean.zarr", "path: ../other/clean.zarr"))
    job = load_denoising(config)
    assert job.input.path == str(config.parent / "noisy.npy")
    assert job.output.path == str(config.parent.parent.resolve() / "other" / "clean.zarr")
    assert job.denoiser.options["weights"] == str(config.parent / "net.safetensors")


def test_two_dots_after_a_link_lead_where_the_file_system_says(config: Path) -> None:
    (config.parent / "a" / "deep").mkdir(parents=True)
    (config.parent / "link").symlink_to(config.parent / "a" / "deep")
    config.write_text(config.read_text().replace("path: clean.zarr", "path: link/../clean.zarr"))
    assert load_denoising(config).output.path == str(config.parent.resolve() / "a" / "clean.zarr")


def test_addresses_are_not_paths(config: Path) -> None:
    config.write_text(config.read_text().replace("path: noisy.npy", "path: 's3://bucket/noisy.zarr'"))
    assert load_denoising(config).input.path == "s3://bucket/noisy.zarr"


def test_set_replaces_values_in_order(config: Path) -> None:
    job = load_denoising(
        config, ["tile.size=128", "tile.size=[256, 512]", "run.on_bad_block=quarantine"], Flags(workers=7)
    )
    assert (job.tile.size, job.run.on_bad_block, job.run.workers) == ((256, 512), "quarantine", 7)


def test_set_makes_a_section_that_is_not_written(config: Path) -> None:
    config.write_text(config.read_text().replace("cluster:  {kind: local}\n", ""))
    assert load_job(config, ["cluster.dashboard=false"]).cluster.dashboard is False


def test_set_replaces_a_whole_section(config: Path) -> None:
    job = load_denoising(config, ["denoiser={name: gaussian, sigma: 2}"])
    assert (job.denoiser.name, job.denoiser.options) == ("gaussian", {"sigma": 2})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tile.siez=3", "--set tile.siez: unknown key; did you mean size?"),
        ("tile.size=big", '--set tile.size: "big" is not auto'),
        ("denoiser.strength=-1", "--set denoiser.strength: strength is -1"),
        ("run.workers=0", "--set run.workers: 0 is too small"),
        ("input.path=gone.npy", "--set input.path: "),
        ("tile.size", "--set tile.size: not a key and a value"),
        ("=3", "--set =3: not a key and a value"),
        ("version.x=1", "--set version.x: version is 1, not a section"),
        ("tile.size=[1", "--set tile.size:1: not YAML"),
        ("tile={size: 1, size: 2}", "written twice"),
        ("output.chunk.x=3", "--set output.chunk.x: output.chunk is 256, not a section"),
        ("tile.axes.x=3", '--set tile.axes.x: tile.axes: {"x": 3} is not'),
        ("tile={sise: 1}", "--set tile: tile.sise: unknown key; did you mean size?"),
    ],
)
def test_a_wrong_override_is_named_as_it_was_typed(config: Path, override: str, message: str) -> None:
    with pytest.raises((ConfigError, InputError)) as caught:
        load_job(config, [override])
    assert message in str(caught.value)


def test_every_wrong_override_is_told(config: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(config, ["foo", "tile.size=128", "=3"])
    assert [line.split(": not")[0] for line in str(caught.value).splitlines()] == ["--set foo", "--set =3"]


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["output.shard=1000"], ["--set output.shard: 1000 is no multiple of output.chunk 256; a shard holds whole"]),
        (["output.shard=[512, 300]"], ["write [512, 512]"]),
        (["output.shard=512", "tile.block=700"], ["--set tile.block: 700 is no multiple of output.shard 512"]),
        (["tile.depth=5"], ["--set tile.depth: 5 is less than tv's receptive field 20: seams would show; write 20"]),
        (["tile.depth=5", "output.shard=1000"], ["--set tile.depth", "--set output.shard"]),
        (["tile.depth=5", "tile.seams=allow"], []),
        (["tile.depth=5", "denoiser.strength=-1"], ["--set denoiser.strength"]),
        (["output.shard=512", "tile.block=[1024, 512]"], []),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_told_with_the_rest(config: Path, overrides: list[str], messages: list[str]) -> None:
    document = read_config(config, overrides)
    _, problems = check_config(document, config.parent)
    assert len(problems) == len(messages)
    for message in messages:
        assert any(message in str(problem) for problem in problems), message


def test_workers_are_checked_like_the_key_they_replace(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--workers: 0 is too small; write at least 1$"):
        load_job(config, flags=Flags(workers=0))


def test_problems_are_given_to_programs(config: Path) -> None:
    config.write_text(config.read_text().replace("size:", "siez:"))
    result = ask("validate", config, "--json")
    assert result.exit_code == 2
    problem = {"file": str(config), "line": 6, "key": "tile.siez", "message": "unknown key; did you mean size?"}
    assert json.loads(result.stdout) == {"ok": False, "problems": [problem]}


def test_only_the_command_line_allows_imports(config: Path) -> None:
    assert load_job(config, flags=Flags(allow_import=True)).allow_import
    with pytest.raises(ConfigError, match="--allow-import"):
        load_job(config, ["allow_import=true"])


def test_a_saved_job_does_not_allow_imports_by_itself(config: Path) -> None:
    saved = config.with_name("job.json")
    paths = {"input": {"path": "noisy.npy"}, "output": {"path": "c.zarr"}}
    sections = paths | {"denoiser": {"name": "tv", "strength": 1}}
    saved.write_text(json.dumps({"version": 1, "job": "denoise", "allow_import": True} | sections))
    assert not load_saved_job(saved).allow_import
    assert load_saved_job(saved, flags=Flags(allow_import=True)).allow_import


@pytest.mark.parametrize("text", ["", "{", "[1]", '"a"'])
def test_a_damaged_saved_job_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(ConfigError, match=r"job\.json"):
        load_saved_job(tmp_path / "job.json")


@pytest.mark.parametrize("kind", kind_names())
def test_the_sections_of_a_job_are_fields_of_its_dataclass(kind: str) -> None:
    assert set(keys_of_job(kind).sections) <= set(keys_of_job(kind).schema.__dataclass_fields__)
