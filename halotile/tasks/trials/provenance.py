"""What a denoiser is built of: all that the outcome of a trial follows from, and what has to stay as it was while a job runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halotile.errors import ConfigError, WeightsError
from halotile.tasks.denoisers.base import Denoiser, Model
from halotile.tasks.denoisers.function import Function
from halotile.tasks.denoisers.torch import UserNetwork
from halotile.tasks.devices.cpu_kind import cpu_kind
from halotile.tasks.options import import_reference
from halotile.tasks.trials.user_code import imported_digest, loaded_code, source_files, whole_digest
from halotile.tasks.weights import file_sha256

_loaded: dict[str, str] = {}
"""Digests of code by the names that it was imported by, when this process imported it: it stays so until the process ends."""
_files: dict[Path, str] = {}
"""The same of each of the files that it lies in, which other names may share."""
_CHANGED = (
    "was changed while the job ran, and a worker that begins now would compute with what it has become. Put it back as it was and "
    "run again to go on, or run with --fresh to start over."
)


def origin_of(denoiser: Denoiser, *question: Any) -> str | None:
    """Digest of a denoiser, as it is built in this process, and of a question about it.

    None where the digest would not tell everything: the network holds something that cannot be looked into, or the files of what was
    imported cannot be read.
    """
    network, loaded = whole_digest((denoiser, denoiser.build())), loaded_code()
    if network is None or loaded is None:
        return None
    words = [network, loaded, _halotile(), cpu_kind(), *question]
    return hashlib.sha256(repr(words).encode()).hexdigest()


def seals_of(denoiser: Denoiser, code: Mapping[str, str]) -> dict[str, str]:
    """Digests of the files of a denoiser by their paths, and of the user's own ``code`` that is imported by name.

    Raises
    ------
    WeightsError
        When a file cannot be read.
    """
    files = {str(path): file_sha256(path) for path in denoiser.files()}
    return files | {name: digest for name, digest in code.items() if name == _imported(denoiser)}


def build_sealed(denoiser: Denoiser, seals: Mapping[str, str]) -> Model:
    """What the denoiser builds, of the very files and the code that the job was planned with.

    Raises
    ------
    WeightsError, ConfigError
        When one of them was changed since: other blocks are of what it was.
    """
    model = denoiser.build()
    for name, digest in seals.items():
        if name == _imported(denoiser):
            if _loaded_digest(name) != digest:
                if imported_digest(name, import_reference(name)) == digest:
                    raise _outdated(name)
                raise ConfigError(f"the code of {name} {_CHANGED}")
        elif file_sha256(name) != digest:
            raise WeightsError(f"{name} {_CHANGED}")
    return model


def _loaded_digest(name: str) -> str:
    """Digest of the code that this process computes with under a name."""
    if name not in _loaded:
        for file in source_files(name.partition(":")[0]):
            digest = file_sha256(file)
            if _files.setdefault(file, digest) != digest:
                raise _outdated(name)
        _loaded[name] = imported_digest(name, import_reference(name))
    return _loaded[name]


def _outdated(name: str) -> ConfigError:
    return ConfigError(
        f"the code of {name} was changed since this worker imported it for an earlier job, and it would compute with what it was. "
        "Start the workers anew."
    )


def _imported(denoiser: Denoiser) -> str | None:
    """The name by which the user's own code is imported; plug-ins tell of theirs in their own way."""
    return denoiser.import_ if isinstance(denoiser, UserNetwork | Function) else None


def _halotile() -> str:
    """Digest of halotile's sources, which change between two versions where they are worked on."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
