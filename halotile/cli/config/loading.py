"""A configuration file as a checked job: read, overridden from the command line, checked.

Only the command line can allow a job to import code: a file that somebody else wrote must not.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from halotile.cli.arguments import Flags
from halotile.cli.config.sections import VERSION, check_cluster, check_config
from halotile.cli.config.yaml_source import Document, raise_problems, read_file, read_text
from halotile.cli.status import check_here, run_of
from halotile.errors import ConfigError
from halotile.graphs.kinds.sections import Cluster, Job, for_its_image, takes_many
from halotile.graphs.words import KeyPath
from halotile.storage.disk.object_path import ObjectPath, OutputPath, full_path
from halotile.storage.run_directory.directory import RunDirectory


def read_config(path: Path, overrides: Iterable[str] = ()) -> Document:
    """Read a configuration file with overrides from the command line.

    ``path``: the YAML file; ``overrides``: overrides such as `tile.size=256` or `operators[0].noise_sigma=0.05`; values are YAML.
    """
    document, mistakes = _with_top(read_file(path)), []
    for override in overrides:
        try:
            document = _override(document, override)
        except ConfigError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return document


def _with_top(document: Document) -> Document:
    if document.tree is None:
        raise ConfigError(f"{document.place_of(())}: the file is empty. Begin with `version: {VERSION}`.")
    if not isinstance(document.tree, dict):
        raise ConfigError(f"{document.place_of(())}: not a mapping. Begin with `version: {VERSION}`.")
    return document


def _with_flags(document: Document, flags: Flags) -> Document:
    """Return a document with the options of a command applied."""
    overrides: list[tuple[KeyPath, Any, str]] = [
        (("run", "workers"), flags.workers, "--workers"),
        (("cluster", "kind"), flags.cluster, "--cluster"),
        (("cluster", "dashboard"), False if flags.no_dashboard else None, "--no-dashboard"),
        (("cluster", "tls"), False if flags.no_tls else None, "--no-tls"),
    ]
    for path, value, origin in overrides:
        if value is not None:
            document = document.put(path, value, origin)
    return document


def _override(document: Document, text: str) -> Document:
    key, equals, value = text.partition("=")
    path = _key_path(key.strip())
    if not equals or path is None:
        raise ConfigError(
            f"--set {text}: not a key and a value. Write it as --set tile.size=256, or for an entry of a list "
            'as --set "operators[0].noise_sigma=0.05".'
        )
    origin = f"--set {key.strip()}"
    # {stem}.zarr is a file name, not a mapping.
    parsed = read_text(json.dumps(value) if value.startswith("{stem}") else value, origin)
    if parsed.problems:
        raise ConfigError(f"{origin}: {parsed.problems[0].message}.")
    return document.put(path, parsed.tree, origin)


def _key_path(key: str) -> KeyPath | None:
    """Parse a place in a configuration as it is written on the command line; None when it is not valid.

    >>> _key_path("tile.size"), _key_path("operators[1].kernel"), _key_path("tile..size")
    (('tile', 'size'), ('operators', 1, 'kernel'), None)
    """
    path: list[str | int] = []
    for part in key.split("."):
        word = re.fullmatch(r"([^\[\]]+)((?:\[\d+\])*)", part)
        if word is None:
            return None
        path += [word[1], *map(int, re.findall(r"\d+", word[2]))]
    return tuple(path)


def is_config(path: Path) -> bool:
    """Return True for a configuration file, by its suffix."""
    return path.suffix.lower() in (".yaml", ".yml") and path.is_file()


def load_job(
    path: Path,  # the YAML file
    overrides: Iterable[str] = (),  # as for `read_config`
    flags: Flags = Flags(),  # options of the command
    *,
    makes_data: bool = False,  # the measurements will be written by the job: they need not exist
) -> Job:
    """Read and check a configuration file."""
    document = _with_flags(read_config(path, overrides), flags)
    job = _finish(document, path.parent, str(path), flags, makes_data)
    return dataclasses.replace(job, import_folder=os.path.abspath(path.parent)) if flags.allow_import else job


def load_saved_job(path: Path, flags: Flags = Flags(), *, has_begun: bool = False) -> Job:
    """Read the job that a run directory keeps as JSON; one that has begun does not overwrite its own result."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Is {path.parent} a run directory?") from None
    except ValueError as error:
        raise ConfigError(f"{path}: damaged ({error}). Run the configuration again instead.") from None
    if has_begun and isinstance(tree, dict):
        for section in tree.values():
            if isinstance(section, dict):
                section.pop("overwrite", None)
    return check_saved_job(tree, path.parent, str(path), flags)


def check_saved_job(tree: Any, base: Path, name: str, flags: Flags = Flags()) -> Job:
    """Return a stored job."""
    document = _with_top(Document(name, tree))
    # Permission to import is asked for each time: a run directory may come from somebody else, too.
    document.tree.pop("allow_import", None)
    folder = document.tree.pop("import_folder", None)
    job = _finish(_with_flags(document, flags), base, name, flags)
    allowed = flags.allow_import and isinstance(folder, str)
    return dataclasses.replace(job, import_folder=folder) if allowed else job


def saved_job(directory: Path, flags: Flags = Flags()) -> Job:
    """Return the job of a run directory, with new paths where that was moved together with its output."""
    run = RunDirectory(directory)
    job = load_saved_job(run.job_path, flags, has_begun=run.read_valid_plan() is not None)
    place = full_path(job.place)
    if isinstance(place, ObjectPath):
        check_here(directory, place)
        return job
    belongs = RunDirectory.beside(place).path
    if os.path.realpath(belongs) == os.path.realpath(directory):
        return job
    real_path = Path(os.path.realpath(directory))
    output = real_path.with_name(real_path.name.removesuffix(".run"))
    was_moved = f"{directory} belongs to the output {job.place}: it was moved or copied"
    if output == real_path or not output.is_dir():
        raise ConfigError(f"{was_moved}. Move both back, or run the configuration with the new output.path.")
    if os.path.lexists(job.place) or os.path.lexists(belongs):  # two runs of one journal
        raise ConfigError(
            f"{was_moved}, and something still stands at the old place. Move that away to go on here, "
            f"or run the configuration with output.path: {output}."
        )
    run = RunDirectory(real_path)
    with run.lock():  # a later file at the old place may belong to another job
        run.write_job(moved(run.read_job(), job.place, str(output)))
    return job.moved_to(str(output))


def moved(part: Any, before: str, place: str) -> Any:
    """Return a stored job, or a part of it, with another path wherever it names the path of its first output.

    >>> moved({"job": "denoise", "output": {"path": "/a.zarr"}}, "/a.zarr", "/b.zarr")
    {'job': 'denoise', 'output': {'path': '/b.zarr'}}
    """
    if isinstance(part, dict):
        return {key: moved(value, before, place) for key, value in part.items()}
    if isinstance(part, list):
        return [moved(value, before, place) for value in part]
    return place if part == before else part


def saved_job_of(output: OutputPath, *, allow_import: bool = False) -> Job | None:
    """Return the job that wrote an output; None where it has no run directory."""
    directory = run_of(output)
    if not RunDirectory(directory).job_path.is_file():
        return None
    return saved_job(directory, Flags(allow_import=allow_import))


def load_cluster(path: Path | None, flags: Flags = Flags()) -> Cluster:
    """Return the cluster section of a configuration file, with the options of a command applied."""
    document = _with_flags(read_config(path) if path else Document("the options", {}), flags)
    cluster, problems = check_cluster(document, path.parent if path else Path())
    raise_problems(document.name, problems)
    assert cluster is not None
    return cluster


def _finish(document: Document, base: Path, name: str, flags: Flags, makes_data: bool = False) -> Job:
    job, problems = check_config(document, base, makes_data=makes_data)
    raise_problems(name, problems)
    assert job is not None
    job = dataclasses.replace(job, allow_import=flags.allow_import)
    return job if takes_many(job) else for_its_image(job)
