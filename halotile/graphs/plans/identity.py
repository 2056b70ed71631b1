"""Identity of a job: everything that can change a bit of the output, or its place in a shard."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import halotile

if TYPE_CHECKING:
    from halotile.graphs.kinds.base import JobKind, Revision
    from halotile.storage.run_directory.directory import RunDirectory


@cache
def package_version(name: str) -> str:
    """Return the installed version of a package, found without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def code_versions() -> dict[str, str]:
    """Return the versions of the code whose rounding the result depends on."""
    return {"halotile": halotile.__version__, "torch": package_version("torch"), "numpy": package_version("numpy")}


def as_stored(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity as it is read back from a plan, so that the two can be compared.

    >>> as_stored({"transform": (10.0, 0.0)})
    {'transform': [10.0, 0.0]}
    """
    stored: dict[str, Any] = json.loads(json.dumps(identity, default=str))
    return stored


# Changes of an identity, from and to, that leave every finished block as it is.
HARMLESS = (("on_nan", "fail", "propagate"),)


GPU_KEYS = ("tile", "batch", "channels_last")  # keys that affect bits on GPUs only


def fingerprint(identity: Mapping[str, Any], without: Revision | None = None) -> str:
    """Return a digest of an identity: equal for equal values, regardless of the order of their keys.

    Parts that may change harmlessly are left out, and so is one that may change while a run is not finished.
    """
    free = {name for name, _, _ in HARMLESS} | ({without.key} if without else set())
    strict = {key: value for key, value in identity.items() if key not in free}
    text = json.dumps(_plain(strict), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    """Return a value with 1 for 1.0, which mean the same in a job.

    >>> _plain({"strength": 1.0, "range": [0, 0.5]})
    {'strength': 1, 'range': [0, 0.5]}
    """
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Names in a job file of identity parts that several kinds share, where the names differ.
KEYS = {
    "layout": "output",
    "block": "tile.block",
    "boundary": "tile.boundary",
    "depth": "tile.depth",
    "tiled_axes": "tile.axes",
    "on_nan": "run.on_nan",
    "precision": "run.precision",
    "device": "run.device",
    "tile": "tile.size",
    "batch": "tile.batch",
    "channels_last": "tile.channels_last",
}


MOST_NUMBERS = 8  # numbers of a list that a difference shows; of more it shows half as many


NO_WORDS: Mapping[str, str] = {}


def identity_words(own: Mapping[str, str] = NO_WORDS) -> Mapping[str, str]:
    """Return the names in a job file of the parts of an identity; a kind may have names of its own."""
    return {**KEYS, **own}


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], own: Mapping[str, str] = NO_WORDS, path: str = ""
) -> list[str]:
    """Return the differences of two identities, one line each, with the names of a job file.

    >>> differences({"depth": [7], "layout": {"codec": "lz4"}}, {"depth": [9], "layout": {"codec": "lz4"}})
    ['tile.depth was [7], is [9]']
    >>> differences({"stages": [{"lr": 1}, {"lr": 2}]}, {"stages": [{"lr": 1}, {"lr": 3}]})
    ['stages[1].lr was 2, is 3']
    >>> differences({}, {"device": "cuda", "tile": [64, 64], "batch": 4})
    ['run.device was "cpu", is "cuda"']
    >>> differences({}, {"noise": {"gain": [[29.01083, 28.5], [30.1, 31.0]] * 4, "estimated": True}})
    ['noise was absent, is {"gain": [29.01, 28.5, 30.1, 31, ... 16 numbers], "estimated": true}']
    """
    lines, words = [], identity_words(own)
    if not path and before.get("device") != now.get("device"):
        before, now = _on_any_device(before), _on_any_device(now)
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        name = f"{path}{key}" if path else words.get(key, key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += differences(old, new, own, f"{name}.")
        elif entries := _entries_of(old, new):
            for number, pair in enumerate(entries):
                lines += differences(*pair, own, f"{name}[{number}].")
        elif old != new and (key, old, new) not in HARMLESS:
            lines.append(f"{name} was {_word(old)}, is {_word(new)}")
    return lines


def differences_of_runs(
    kind: JobKind, directory: RunDirectory, before: Mapping[str, Any], now: Mapping[str, Any]
) -> list[str]:
    """Return the differences between the job of a run and one that would go on with it."""
    if (revision := kind.revision) and revision.kept(directory, fingerprint(now, revision), now):
        before = {**before, revision.key: now[revision.key]}
    return differences(before, now, kind.identity_words)


def _entries_of(old: Any, new: Any) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return the entries of two lists of as many mappings in pairs, none for anything else."""
    if not (isinstance(old, list) and isinstance(new, list) and len(old) == len(new)):
        return []
    are_mappings = all(isinstance(entry, Mapping) for entry in (*old, *new))
    return list(zip(old, new, strict=True)) if are_mappings else []


def _on_any_device(identity: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an identity that names its device (on CPUs it does not), without the keys of GPUs."""
    return {key: value for key, value in identity.items() if key not in GPU_KEYS} | {
        "device": identity.get("device", "cpu")
    }


def may_be_same(before: Mapping[str, Any], now: Mapping[str, Any], inputs: Sequence[str]) -> bool:
    """Return True where two jobs may read the same images, repaired or moved: equal shape, type and axes.

    ``before, now``: identities of the jobs; ``inputs``: keys that describe the input: each an image, or images by name. Without any, nothing can be
    the same.

    >>> before = {"input": {"shape": [9, 9], "dtype": "uint8", "axes": "yx", "mtime_ns": 1}}
    >>> may_be_same(before, {"input": before["input"] | {"mtime_ns": 2}}, ["input"])
    True
    >>> may_be_same(before, {"input": before["input"] | {"shape": [9, 8]}}, ["input"])
    False
    """
    return bool(inputs) and all(_forms(before.get(key)) == _forms(now.get(key)) for key in inputs)


def _forms(images: Any) -> Any:
    """Return the shape, type and axes of an image, or of each image of a mapping."""
    if not isinstance(images, Mapping):
        return images
    if "shape" not in images:
        return {name: _forms(image) for name, image in images.items()}
    return [images.get(key) for key in ("shape", "dtype", "axes")]


def _word(value: Any) -> str:
    return "absent" if value is None else _json(value)


def _json(value: Any) -> str:
    """Return a value as JSON; of many numbers the first ones."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {_json(part)}" for key, part in value.items()) + "}"
    flat = _flat(value)
    if len(flat) <= MOST_NUMBERS or not all(isinstance(part, int | float) for part in flat):
        return json.dumps(value, default=str)
    first = ", ".join(f"{number:.4g}" for number in flat[: MOST_NUMBERS // 2])
    return f"[{first}, ... {len(flat)} numbers]"


def _flat(value: Any) -> list[Any]:
    return [part for each in value for part in _flat(each)] if isinstance(value, list | tuple) else [value]
