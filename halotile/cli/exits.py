"""Exit codes, and the message for an error."""

import traceback

from halotile.errors import ConfigError, HalotileError, InputError, MissingPackage, Refused, Stopped, WeightsError

OK = 0
FAILED = 1
USAGE = 2
QUARANTINED = 3
BAD_DATA = 4
REFUSED = 5
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: batch systems interpret it as "submit again"
INTERRUPTED = 130


class StoppedEarly(BaseException):
    """A signal asked the command to stop before a run had begun, or after it was over."""


_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (ConfigError, USAGE),
    (MissingPackage, USAGE),
    (WeightsError, USAGE),
    (InputError, BAD_DATA),
    (Refused, REFUSED),
    (MemoryError, REFUSED),
    (Stopped, STOPPED),
    (StoppedEarly, STOPPED),
    (KeyboardInterrupt, INTERRUPTED),
)


def exit_code(error: BaseException) -> int:
    """Return the exit code for an error.

    >>> from halotile.errors import DamagedData, OutputRefused
    >>> exit_code(OutputRefused("in use")), exit_code(DamagedData("cut short")), exit_code(OSError())
    (2, 4, 1)
    """
    if _is_dask_settings_error(error):
        return USAGE
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)


def message_of(error: BaseException, *, resumable: bool = False) -> str:
    """Return the message for an error; ``resumable`` if the same command, typed again, resumes the run."""
    if isinstance(error, KeyboardInterrupt | StoppedEarly):
        stopped = str(error) or "stopped"
        return f"{stopped}; run again to resume" if resumable else stopped
    if isinstance(error, Stopped):
        return str(error)
    if isinstance(error, HalotileError):
        return f"error: {error}"
    if isinstance(error, MemoryError):
        return (
            "error: memory ran out. If the input is a small file, it may be damaged and declare a size that is too large: restore it from "
            "its origin. Else end other programs, or use a machine with more memory."
        )
    text = " ".join(str(error).split())
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if _is_dask_settings_error(error):
        return f"error: Dask cannot read its settings ({named}). Correct them: ~/.config/dask, variables DASK_..."
    return f"error: unexpected {named}\nrun again with --debug for the traceback"


def _is_dask_settings_error(error: BaseException) -> bool:
    """Return True where Dask, which reads the user's settings when it is first imported, could not read them."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename.endswith(("/dask/config.py", "/distributed/config.py")) for frame in frames)
