"""Digests of everything that a denoiser is built from, to reuse the result of a trial and to detect changes during a job."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halotile.errors import ConfigError, WeightsError
from halotile.tasks.denoisers.base import Denoiser, Model
from halotile.tasks.denoisers.common.weights import file_sha256
from halotile.tasks.denoisers.function import Function
from halotile.tasks.denoisers.torch import UserNetwork
from halotile.tasks.devices.cpu_kind import cpu_kind
from halotile.tasks.options import import_reference
from halotile.tasks.user_code import imported_digest, loaded_code, source_files, whole_digest

_INSTALLED = tuple(
    {*(f"{Path(each).resolve()}/" for each in (sys.prefix, sys.base_prefix)), "/proc/", "/sys/", "/dev/"}
)
"""Places whose files belong to the installed packages or to the machine, which a key has by itself."""
_watching: list[set[str]] = []
_is_heard = False


@contextmanager
def opened_files() -> Iterator[set[str]]:
    """Collect the paths that Python code opens to read in a ``with`` block, in any thread of this process.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file, opened_files() as seen:
    ...     _ = Path(file.name).read_text("utf-8")
    >>> len(seen)
    1
    """
    global _is_heard
    if not _is_heard:
        sys.addaudithook(_hear)  # for ever: Python removes none
        _is_heard = True
    seen: set[str] = set()
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching[:] = [each for each in _watching if each is not seen]  # another may be equal


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _watching or not isinstance(arguments[0], str | bytes | os.PathLike):
        return
    if arguments[2] & os.O_ACCMODE == os.O_WRONLY:  # no result follows from that
        return
    path = os.path.realpath(os.fsdecode(arguments[0]))
    if not path.startswith(_INSTALLED):
        for seen in _watching:
            seen.add(path)


OF_SESSIONS = re.compile(
    "_|PWD|OLDPWD|SHLVL|COLUMNS|LINES|DISPLAY|WINDOWID|.*TERM.*|(TMUX|STY|SSH_|XDG_SESSION|XDG_RUNTIME|DBUS_|VTE_|SLURM_|SBATCH_|PBS_|LSB_|SGE_).*"
)
"""Environment variables that change from command to command, terminal to terminal, or job to job of a batch system."""
_PACKAGE = Path(__file__).resolve().parents[2]
"""The folder of halotile, whose files :func:`_halotile` knows."""
_loaded: dict[str, str] = {}
"""Digests of imported code by name, as of its import in this process, for which it does not change any more."""
_files: dict[Path, str] = {}
"""Digests of the files of that code, which several names may share."""
_CHANGED = (
    "was changed while the job ran, so a new worker would compute with the new version. Restore the old version and "
    "run again to continue, or run with --fresh to start over."
)


def build_digest(denoiser: Denoiser, *question: Any) -> str | None:
    """Digest of a denoiser, as it is built in this process, and of a question about it.

    None if the digest would be incomplete: the network holds an object that cannot be inspected, or the files of
    imported code cannot be read.
    """
    if is_own(denoiser):
        files = [file_sha256(path) for path in denoiser.files()]
        return _joined_digest(denoiser, files, *question)
    network, loaded = whole_digest((denoiser, denoiser.build())), loaded_code()
    if network is None or loaded is None:
        return None
    return _joined_digest(network, loaded, *question)


def is_own(denoiser: Denoiser) -> bool:
    """Return True for a denoiser of halotile without foreign code: its options and its files tell what it builds, without building it."""
    own = type(denoiser).__module__.startswith(f"{__package__.partition('.')[0]}.")
    inner = denoiser.inner
    return own and not denoiser.tried_apart and (inner is denoiser or is_own(inner))


def surroundings(denoiser: Denoiser, read: Collection[str]) -> str | None:
    """Digest of what foreign code may look at again while it computes: the files that were read while it was built, or that its options
    name, and the environment. None where a file cannot be read any more.
    """
    options = denoiser.inner.options.values() if isinstance(denoiser.inner, UserNetwork | Function) else ()
    named = {option for option in options if isinstance(option, str) and os.path.isfile(option)}
    code = {
        os.path.realpath(file)
        for module in list(sys.modules.values())
        if (file := getattr(module, "__file__", None))
    }
    known = (f"{_PACKAGE}{os.sep}", *code)
    data = sorted(
        path for path in {*read, *named} if not path.startswith(known) and not path.endswith(".pyc")
    )
    environment = sorted(item for item in os.environ.items() if not OF_SESSIONS.fullmatch(item[0]))
    try:
        # What is not there now may be there later.
        files = [(path, file_sha256(path) if os.path.isfile(path) else None) for path in data]
    except WeightsError:
        return None
    return _joined_digest(environment, files)


def _joined_digest(*words: Any) -> str:
    return hashlib.sha256(repr((_halotile(), cpu_kind(), *words)).encode()).hexdigest()


def seals_of(denoiser: Denoiser, code: Mapping[str, str]) -> dict[str, str]:
    """Digests of the files of a denoiser by their paths, of the user's own ``code`` that is imported by name, and of the weights that
    it builds. Other parts of what it builds may differ from worker to worker, such as the name of a device.
    """
    files = {str(path): file_sha256(path) for path in denoiser.files()}
    sealed = (_imported(denoiser), _weights(denoiser))
    return files | {name: digest for name, digest in code.items() if name in sealed}


def build_sealed(denoiser: Denoiser, seals: Mapping[str, str]) -> Model:
    """Build the denoiser, from the same files and code that the job was planned with."""
    model, denoiser = denoiser.build(), denoiser.inner
    for name, digest in seals.items():
        if isinstance(denoiser, UserNetwork) and name == denoiser.weights_name:
            if denoiser.weights_digest() != digest:
                raise WeightsError(f"what {denoiser.title} reads its weights from {_CHANGED}")
        elif name == _imported(denoiser):
            if _loaded_digest(name) != digest:
                if imported_digest(name, import_reference(name)) == digest:
                    raise _outdated(name)
                raise ConfigError(f"the code of {name} {_CHANGED}")
        elif file_sha256(name) != digest:
            raise WeightsError(f"{name} {_CHANGED}")
    return model


def _loaded_digest(name: str) -> str:
    """Digest of the code that this process imported under a name."""
    if name not in _loaded:
        for file in source_files(name.partition(":")[0]):
            digest = file_sha256(file)
            if _files.setdefault(file, digest) != digest:
                raise _outdated(name)
        _loaded[name] = imported_digest(name, import_reference(name))
    return _loaded[name]


def _outdated(name: str) -> ConfigError:
    return ConfigError(
        f"the code of {name} was changed since this worker imported it for an earlier job, so it would compute with the old version. "
        "Restart the workers."
    )


def _imported(denoiser: Denoiser) -> str | None:
    """The name by which the user's own code is imported; plug-ins report their code in their own way."""
    return denoiser.import_ if isinstance(denoiser, UserNetwork | Function) else None


def _weights(denoiser: Denoiser) -> str | None:
    """The name of the weights that the user's own code builds."""
    return denoiser.weights_name if isinstance(denoiser, UserNetwork) else None


def _halotile() -> str:
    """Digest of halotile's sources and compiled filters, which may change without a new version in a development installation."""
    digest = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*")):
        if file.suffix in (".py", ".c", ".h", ".so"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
