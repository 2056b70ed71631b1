"""The one error tree of halotile.

::

    HalotileError                     everything raised on purpose
    ├── ConfigError (ValueError)      a wrong word or value in a job; nothing was touched
    │   ├── UnknownName (LookupError) a name that no file here and no plug-in answers to
    │   ├── WrongKind (TypeError)     an object of another kind than is needed
    │   ├── OutputRefused             the output may not be written (not ours, same as the input), or not any more
    │   │   └── OutputInUse           another run holds it, or workers of an earlier one
    │   └── ResumeRefused             the run directory belongs to a different job
    ├── MissingPackage (ImportError)  an optional package is needed; the message names the extra
    ├── WeightsError (ValueError)     weights missing, of the wrong checksum, or not safe to load
    ├── InputError (ValueError)       the input data cannot be used
    │   ├── DamagedData (OSError)     stored bytes do not match their checksum, or are cut short
    │   └── InputUnreadable (OSError) the system does not give stored bytes: a failing disk, no permission
    ├── Refused                       the plan does not fit; nothing was started
    │   ├── MemoryRefused (MemoryError)
    │   └── DiskRefused (OSError)
    ├── BlockFailed (RuntimeError)    blocks failed after their retries
    │   └── BlockInputFailed          all of them for their input (an InputError as well)
    ├── TaskFailed (RuntimeError)     an operator or a tile of a distributed object failed on a worker
    ├── Diverged (ArithmeticError)    a solver's numbers grow without bound; its last good state is kept
    ├── ClusterFailed (RuntimeError)  no worker is to be had
    ├── Stalled (TimeoutError)        the cluster stopped making progress
    └── Stopped (RuntimeError)        drained on request; the run can be resumed

Every message says what was asked with its values, why it cannot be, and what to write instead.
All of them survive pickling: they cross process borders.
"""

from __future__ import annotations

WINDOWS = (
    "halotile does not run on Windows, which lacks the file locks and signals that runs are kept safe with. Install the "
    "Windows Subsystem for Linux (WSL; in a terminal: wsl --install), and halotile inside it."
)


class HalotileError(Exception):
    """Base of every error that halotile raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # Said outright: tblib, by which Dask pickles errors, takes those of two built-in bases apart and cannot put them together.
        return type(self), self.args, self.__dict__


class ConfigError(HalotileError, ValueError):
    """A wrong word or value in a job; nothing was touched."""


class UnknownName(ConfigError, LookupError):
    """A name that no file of halotile and no installed plug-in answers to."""


class WrongKind(ConfigError, TypeError):
    """An object of another kind than is needed."""


class OutputRefused(ConfigError):
    """The output path may not be written, or not any more: what a run had written before it was moved or replaced stays."""


class OutputInUse(OutputRefused):
    """Another run holds the output, or workers of an earlier one do."""


class ResumeRefused(ConfigError):
    """The run directory belongs to a different job."""


class MissingPackage(HalotileError, ImportError):
    """An optional package is needed; the message names the extra that brings it."""


class WeightsError(HalotileError, ValueError):
    """Weights are missing, have the wrong checksum, or are not safe to load."""


class InputError(HalotileError, ValueError):
    """The input data cannot be used."""


class DamagedData(InputError, OSError):
    """Stored bytes do not match their checksum, or are cut short."""


class InputUnreadable(InputError, OSError):
    """The system does not give stored bytes; it may at another try."""


class Refused(HalotileError):
    """The plan does not fit this machine; nothing was started."""


class MemoryRefused(Refused, MemoryError):
    """The plan needs more memory than it may use."""


class DiskRefused(Refused, OSError):
    """The plan needs more disk than is free."""


class BlockFailed(HalotileError, RuntimeError):
    """Blocks failed after their retries."""


class BlockInputFailed(BlockFailed, InputError):
    """Blocks failed after their retries, all of them because their input cannot be used."""


class TaskFailed(HalotileError, RuntimeError):
    """An operator or a tile of a distributed object failed on a worker; the message has its number."""


class WorkerDied(TaskFailed, ConnectionError):
    """The worker that had a task died. A run begins its pass anew; a distributed object tells."""


class Diverged(HalotileError, ArithmeticError):
    """A solver's numbers grow without bound; an image from before is kept."""


class ClusterFailed(HalotileError, RuntimeError):
    """No worker is to be had: the message has the batch system's reason."""


class Stalled(HalotileError, TimeoutError):
    """The cluster stopped making progress."""


class Stopped(HalotileError, RuntimeError):
    """Drained on request; the run can be resumed. ``requested_by`` is the name of the signal."""

    def __init__(self, message: str, requested_by: str = "") -> None:
        super().__init__(message)
        self.requested_by = requested_by
