"""The error hierarchy of halotile.

::

    HalotileError                     every error raised on purpose
    ├── ConfigError (ValueError)      an invalid key or value in a job; nothing was changed
    │   ├── UnknownName (LookupError) a name that matches no built-in module and no plug-in
    │   ├── WrongKind (TypeError)     an object of the wrong kind
    │   ├── OutputRefused             the output may not (or may no longer) be written: not halotile's, same as the input
    │   │   └── OutputInUse           another run, or a worker of an earlier run, still uses it
    │   └── ResumeRefused             the run directory belongs to a different job
    ├── MissingPackage (ImportError)  an optional package is needed; the message names the extra
    ├── WeightsError (ValueError)     weights are missing, have the wrong checksum, or are not safe to load
    ├── InputError (ValueError)       the input data cannot be used
    │   ├── DamagedData (OSError)     stored bytes do not match their checksum, or are truncated
    │   └── InputUnreadable (OSError) the system cannot read stored bytes: a failing disk, no permission
    ├── Refused                       the plan exceeds the available resources; nothing was started
    │   ├── MemoryRefused (MemoryError)
    │   └── DiskRefused (OSError)
    ├── BlockFailed (RuntimeError)    blocks failed after their retries
    │   └── BlockInputFailed          all of them because of their input (an InputError as well)
    ├── TaskFailed (RuntimeError)     an operator or a tile of a distributed object failed on a worker
    │   ├── WorkerDied (ConnectionError) the worker that ran the task died
    │   ├── RankFailed                a rank of a torch program failed; the message begins with its traceback
    │   └── PeerLost (ConnectionError) another rank of a torch program ended, or did not answer in time
    ├── Diverged (ArithmeticError)    a solver's numbers grow without bound; its last good state is kept
    ├── ClusterFailed (RuntimeError)  no worker could be started
    ├── Stalled (TimeoutError)        the cluster stopped making progress
    └── Stopped (RuntimeError)        drained on request; the run can be resumed

Every message states what was requested with its values, why it is impossible, and what to write instead.
All errors survive pickling, because they cross process boundaries.
"""

import re

# Name and password in an address. A password may contain slashes; before the @ of abfs:// is the container.
_USER = re.compile(r"(?<!\babfs)(?<!\babfss)(:/{1,2})([^/@\s]*|[^/@:\s]*:(?!\d+/)[^@\s]*)@")
_QUERY = re.compile(r"(:/[^\s?]*)\?[^\s'\"]*[^\s'\",.:;]")

WINDOWS = (
    "halotile does not run on Windows, which lacks the file locks and signals that protect its runs. Install the "
    "Windows Subsystem for Linux (WSL; in a terminal: wsl --install), and halotile inside it."
)


def redacted(text: str) -> str:
    """Return a text whose addresses have neither a name and password nor a query, which may hold a key.

    >>> redacted("https://me:key@host:80/a@2.zarr?sig=secret: nothing is there")
    'https://host:80/a@2.zarr: nothing is there'
    """
    return _QUERY.sub(r"\1", _USER.sub(r"\1", text))


class HalotileError(Exception):
    """Base class of every error that halotile raises on purpose; no message has credentials in it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(redacted(arg) if isinstance(arg, str) else arg for arg in args))

    def __reduce__(self) -> tuple[object, ...]:
        # Explicit, because tblib, with which Dask pickles errors, cannot rebuild an error with two built-in base classes.
        return type(self), self.args, self.__dict__


class ConfigError(HalotileError, ValueError):
    """An invalid key or value in a job; nothing was changed."""


class UnknownName(ConfigError, LookupError):
    """A name that matches no built-in module and no installed plug-in."""


class WrongKind(ConfigError, TypeError):
    """An object of the wrong kind."""


class OutputRefused(ConfigError):
    """The output path may not be written, or no longer: data written before it was moved or replaced are kept."""


class OutputInUse(OutputRefused):
    """Another run, or a worker of an earlier run, still uses the output."""


class ResumeRefused(ConfigError):
    """The run directory belongs to a different job."""


class MissingPackage(HalotileError, ImportError):
    """An optional package is needed; the message names the extra that brings it."""


class WeightsError(HalotileError, ValueError):
    """Weights are missing, have the wrong checksum, or are not safe to load."""


class InputError(HalotileError, ValueError):
    """The input data cannot be used."""


class DamagedData(InputError, OSError):
    """Stored bytes do not match their checksum, or are truncated."""


class InputUnreadable(InputError, OSError):
    """The system cannot read stored bytes; another attempt may succeed."""


class Refused(HalotileError):
    """The plan exceeds the resources of this machine; nothing was started."""


class MemoryRefused(Refused, MemoryError):
    """The plan needs more memory than its limit."""


class DiskRefused(Refused, OSError):
    """The plan needs more disk than is free."""


class BlockFailed(HalotileError, RuntimeError):
    """Blocks failed after their retries."""


class BlockInputFailed(BlockFailed, InputError):
    """Blocks failed after their retries, all of them because of unusable input."""


class TaskFailed(HalotileError, RuntimeError):
    """An operator or a tile of a distributed object failed on a worker; the message contains its number."""


class WorkerDied(TaskFailed, ConnectionError):
    """The worker that ran a task died. A run restarts its pass; a distributed object raises this error."""


class JobNotLoaded(TaskFailed):
    """A worker cannot load the job. Its arguments are the address of the worker, its host, and the error that is the cause."""


class RankFailed(TaskFailed):
    """A rank of a torch program failed. ``rank`` is its number."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class PeerLost(TaskFailed, ConnectionError):
    """Another rank of a torch program ended, or did not answer in time: its error is the cause."""


class Diverged(HalotileError, ArithmeticError):
    """A solver's numbers grow without bound; an earlier image is kept."""


class ClusterFailed(HalotileError, RuntimeError):
    """No worker could be started; the message contains the batch system's reason."""


class Stalled(HalotileError, TimeoutError):
    """The cluster stopped making progress."""


class Stopped(HalotileError, RuntimeError):
    """Drained on request; the run can be resumed. ``requested_by`` is the name of the signal."""

    def __init__(self, message: str, requested_by: str = "") -> None:
        super().__init__(message)
        self.requested_by = requested_by
