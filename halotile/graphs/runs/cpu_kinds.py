"""Kinds of CPUs that have computed blocks of a run."""

from __future__ import annotations

from contextlib import suppress

from halotile.storage.run_directory.directory import RunDirectory

KEY = "processors"


def record_cpu_kind(cpu_kind: str, directory: RunDirectory) -> str:
    """Record a kind of CPU with the run; return a warning where blocks of another kind stand beside its own, else nothing.

    Parameters
    ----------
    processor : str
        From :func:`halotile.tasks.devices.cpu_kind.cpu_kind`, on the worker.
    directory : RunDirectory
        That of the run.
    """
    known = (directory.read_valid_plan() or {}).get(KEY, [])
    if cpu_kind in known:
        return ""
    with suppress(OSError):  # a full disk is reported where blocks are written
        directory.update_plan(**{KEY: [*known, cpu_kind]})
    if not known:
        return ""
    return (
        f"blocks of this run come from {len(known) + 1} kinds of CPUs, and their last bits may differ: "
        f"{cpu_kind}; before: {'; '.join(known)}"
    )
