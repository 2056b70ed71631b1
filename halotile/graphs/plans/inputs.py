"""Inputs of a job: apart from its output, and finished."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

from halotile.errors import DamagedData, InputError, OutputRefused, ResumeRefused
from halotile.graphs.amounts import counted
from halotile.storage.arrays import Source
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import Journal


def check_paths(source: Source, output: Path, key: str = "output.path") -> None:
    """Refuse an output that is the input, lies in it, or contains it."""
    check_whole(source.path)
    read, written = Path(source.path).resolve(), output.resolve()
    if read == written:
        raise OutputRefused(f"{key} is {output}: that is the input. Write another path.")
    if read in written.parents:
        raise OutputRefused(f"{key} is {output}: that lies inside the input {read}. Write it elsewhere.")
    if written in read.parents:
        raise OutputRefused(f"{key} is {output}: the input {read} lies inside it. Write it elsewhere.")


def check_whole(path: str) -> None:
    """Refuse an input that a run has begun to write and not finished: some of its blocks are missing.

    Raises
    ------
    InputError
        With the progress of that run, and how to resume it.
    """
    for output in (Path(path), Path(path).parent):  # the input may be a level of an OME-Zarr group
        if not output.name or not (directory := RunDirectory.beside(output)).journal_path.is_file():
            continue
        with suppress(DamagedData, ResumeRefused):  # damaged or of another version: its state is unknown
            journal = Journal.open_any(directory.journal_path)
            if remaining := journal.total - len(journal.done):
                raise InputError(
                    f"{output} is the output of a run that has {remaining:,} of {counted(journal.total, 'block')} left to do. "
                    f"`recon-cli resume {shlex.quote(str(output))}` finishes it; move {directory.path} away to read it as it is."
                )
