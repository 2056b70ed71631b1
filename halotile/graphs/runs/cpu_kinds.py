"""CPU kinds that have computed blocks of a run."""

from __future__ import annotations

from contextlib import suppress

from halotile.storage.run_directory.directory import RunDirectory

KEY = "processors"


def record_cpu_kind(cpu_kind: str, directory: RunDirectory) -> str:
    """Record a kind of CPU with the run; return a warning where another kind has computed blocks, else "".

    Parameters
    ----------
    cpu_kind : str
        Result of :func:`halotile.tasks.devices.cpu_kind.cpu_kind` on the worker.
    directory : RunDirectory
        Directory of the run.
    """
    recorded = (directory.read_valid_plan() or {}).get(KEY, [])
    if cpu_kind in recorded:
        return ""
    with suppress(OSError):  # a full disk is reported where blocks are written
        directory.update_plan(**{KEY: [*recorded, cpu_kind]})
    if not recorded:
        return ""
    return (
        f"blocks of this run come from {len(recorded) + 1} kinds of CPUs, and their last bits may differ: "
        f"{cpu_kind}; before: {'; '.join(recorded)}"
    )
