"""Digests of everything that a denoiser is built from, to reuse the result of a trial and to detect changes during a job."""

import functools
import hashlib
import os
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from halotile.errors import ConfigError, WeightsError
from halotile.tasks.denoisers.base import Denoiser, Model
from halotile.tasks.denoisers.common.weights import file_sha256
from halotile.tasks.denoisers.function import Function
from halotile.tasks.denoisers.torch import UserNetwork
from halotile.tasks.devices.device import cpu_kind
from halotile.tasks.options import import_reference
from halotile.tasks.user_code import file_digest, imported_digest, loaded_code, whole_digest

_PACKAGE = Path(__file__).resolve().parents[2]  # the folder of halotile, whose files own_digest knows
# Places whose files belong to the installed packages or to the machine, which a key has by itself.
_INSTALLED = tuple(
    {*(f"{Path(each).resolve()}/" for each in (sys.prefix, sys.base_prefix, _PACKAGE)), "/proc/", "/sys/", "/dev/"}
)


@functools.cache
def opened_files() -> set[str]:
    """Return the paths that Python code opens to read from the first call on, in any thread of this process: a set that grows.

    >>> import tempfile
    >>> seen = opened_files()
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = Path(file.name).read_text("utf-8")
    ...     os.path.realpath(file.name) in seen
    True
    """
    seen: set[str] = set()

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        if arguments[2] & os.O_ACCMODE == os.O_WRONLY:  # no result follows from that
            return
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not path.startswith(_INSTALLED):
            seen.add(path)

    sys.addaudithook(hear)  # for ever: Python removes none
    return seen


# Environment variables that change from command to command, terminal to terminal, or job to job of a batch system.
OF_SESSIONS = re.compile(
    "_|PWD|OLDPWD|SHLVL|COLUMNS|LINES|DISPLAY|WINDOWID|.*TERM.*|(TMUX|STY|SSH_|XDG_SESSION|XDG_RUNTIME|DBUS_|VTE_|SLURM_|SBATCH_|PBS_|LSB_|SGE_).*"
)
# Digest of a file of imported code when this process was first asked for it: the code that it imported does not change
# any more.
_digest_at_first = functools.cache(file_digest)
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
    folder = functools.cache(os.path.realpath)  # of each file it would take a tenth of a second
    code = set[str]()
    for module in list(sys.modules.values()):
        if file := getattr(module, "__file__", None):
            where, name = os.path.split(file)
            code.add(os.path.realpath(file) if os.path.islink(file) else os.path.join(folder(where), name))
    known = (f"{_PACKAGE}{os.sep}", *code)
    data = sorted(path for path in {*read, *named} if not path.startswith(known) and not path.endswith(".pyc"))
    environment = sorted(item for item in os.environ.items() if not OF_SESSIONS.fullmatch(item[0]))
    try:
        # What is not there now may be there later.
        files = [(path, file_sha256(path) if os.path.isfile(path) else None) for path in data]
    except WeightsError:
        return None
    return _joined_digest(environment, files)


def _joined_digest(*words: Any) -> str:
    return hashlib.sha256(repr((own_digest(), cpu_kind(), *words)).encode()).hexdigest()


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
            code = import_reference(name)
            if imported_digest(name, code, _digest_at_first) != digest:
                if imported_digest(name, code) != digest:
                    raise ConfigError(f"the code of {name} {_CHANGED}")
                raise ConfigError(
                    f"the code of {name} was changed since this worker imported it for an earlier job, so it would compute with the old version. "
                    "Restart the workers."
                )
        elif file_sha256(name) != digest:
            raise WeightsError(f"{name} {_CHANGED}")
    return model


def _imported(denoiser: Denoiser) -> str | None:
    """The name by which the user's own code is imported; plug-ins report their code in their own way."""
    return denoiser.import_ if isinstance(denoiser, UserNetwork | Function) else None


def _weights(denoiser: Denoiser) -> str | None:
    """The name of the weights that the user's own code builds."""
    return denoiser.weights_name if isinstance(denoiser, UserNetwork) else None


@functools.cache
def own_digest() -> str:
    """Digest of halotile's sources and compiled filters, which may change without a new version in a development installation."""
    digest = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*")):
        if file.suffix in (".py", ".c", ".h", ".so"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
