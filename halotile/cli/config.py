"""A configuration file as a checked job: read, overridden from the command line, checked.

Only the command line can allow a job to import code: a file from somebody else must not.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from halotile.cli.kinds import VERSION
from halotile.cli.problems import KeyPath, raise_problems
from halotile.cli.sections import check_config
from halotile.cli.yaml_source import Document, read_file, read_text
from halotile.errors import ConfigError
from halotile.graphs.job import AnyJob


def read_config(path: Path, overrides: Iterable[str] = (), *, workers: int | None = None) -> Document:
    """A configuration file with what the command line sets over it.

    Parameters
    ----------
    path : Path
        The YAML file.
    overrides : iterable of str
        Such as ``tile.size=256`` or ``operators[0].noise_sigma=0.05``; values are YAML.
    workers : int, optional
        Replaces ``run.workers``.

    Raises
    ------
    ConfigError
        When the file or an override cannot be read.
    """
    document, mistakes = _with_top(read_file(path)), []
    for override in overrides:
        try:
            document = _override(document, override)
        except ConfigError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    if workers is not None:
        document = document.put(("run", "workers"), workers, "--workers")
    return document


def _with_top(document: Document) -> Document:
    if document.tree is None:
        raise ConfigError(f"{document.place_of(())}: the file is empty. Begin with `version: {VERSION}`.")
    if not isinstance(document.tree, dict):
        raise ConfigError(f"{document.place_of(())}: not a mapping. Begin with `version: {VERSION}`.")
    return document


def _override(document: Document, text: str) -> Document:
    key, equals, value = text.partition("=")
    path = _key_path(key.strip())
    if not equals or path is None:
        raise ConfigError(
            f"--set {text}: not a key and a value. Write it as --set tile.size=256, or for an entry of a list "
            'as --set "operators[0].noise_sigma=0.05".'
        )
    place = f"--set {key.strip()}"
    parsed = read_text(value, place)
    if parsed.problems:
        raise ConfigError(f"{place}: {parsed.problems[0].message}.")
    return document.put(path, parsed.tree, place)


def _key_path(key: str) -> KeyPath | None:
    """A place in a configuration as it is written on the command line; None when it is none.

    Examples
    --------
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


def load_job(
    path: Path,
    overrides: Iterable[str] = (),
    *,
    workers: int | None = None,
    allow_import: bool = False,
    dashboard: bool = True,
    makes_data: bool = False,
) -> AnyJob:
    """Read and check a configuration file.

    Parameters
    ----------
    path : Path
        The YAML file.
    overrides : iterable of str
        As for :func:`read_config`.
    workers : int, optional
        Replaces ``run.workers``.
    allow_import : bool
        Whether the job may run the user's code.
    dashboard : bool
        Whether Dask's dashboard is served.
    makes_data : bool
        Whether the measurements are yet to be written: they need not be there.

    Raises
    ------
    ConfigError
        With every problem of the file, one a line.
    InputError
        When the only problem is that the input is not there.
    """
    document = read_config(path, overrides, workers=workers)
    job = _finish(document, path.parent, str(path), allow_import, dashboard, makes_data)
    return dataclasses.replace(job, import_folder=os.path.abspath(path.parent)) if allow_import else job


def load_saved_job(
    path: Path, *, workers: int | None = None, allow_import: bool = False, dashboard: bool = True
) -> AnyJob:
    """Read the job that a run directory keeps as JSON.

    Raises
    ------
    ConfigError
        When the file is missing, damaged, or not a job.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}). Is {path.parent} a run directory?"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: damaged ({error}). Run the configuration again instead.") from None
    document = _with_top(Document(str(path), tree))
    # What was allowed once is asked for again: a run directory may come from somebody else, too.
    document.tree.pop("allow_import", None)
    folder = document.tree.pop("import_folder", None)
    if workers is not None:
        document = document.put(("run", "workers"), workers, "--workers")
    job = _finish(document, path.parent, str(path), allow_import, dashboard)
    return dataclasses.replace(job, import_folder=folder) if allow_import and isinstance(folder, str) else job


def _finish(
    document: Document, base: Path, name: str, allow_import: bool, dashboard: bool, makes_data: bool = False
) -> AnyJob:
    job, problems = check_config(document, base, makes_data=makes_data)
    raise_problems(name, problems)
    assert job is not None
    if not dashboard:
        job = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, dashboard=False))
    return dataclasses.replace(job, allow_import=allow_import)
