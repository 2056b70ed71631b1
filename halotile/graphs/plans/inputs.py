"""Inputs of a job: apart from its output, finished, and small enough to decode."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from halotile.errors import DamagedData, InputError, MemoryRefused, OutputRefused, ResumeRefused
from halotile.graphs.amounts import bytes_text, counted
from halotile.graphs.kinds.sections import Run, parse_bytes
from halotile.storage.arrays import Source
from halotile.storage.disk.object_path import ObjectPath, OutputPath, path_of
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.object_claim import check_finished
from halotile.storage.sharded.local_reader import lost_by_name
from halotile.storage.sharded.ownership import is_marked, stored_digest
from halotile.storage.stored_array import StoredArray, read_error


def check_paths(source: Source, output: OutputPath, key: str = "output.path") -> None:
    """Refuse an output that is the input, lies in it, or contains it."""
    check_apart(source.path, output, key)


def check_apart(path: str, output: OutputPath, key: str = "output.path") -> None:
    """As :func:`check_paths`, of a file that is no image."""
    check_whole(path)
    read, written = path_of(path).resolve(), output.resolve()
    if read == written:
        raise OutputRefused(f"{key} is {output}: that is the input. Write another path.")
    if read in written.parents:
        raise OutputRefused(f"{key} is {output}: that is inside the input {read}. Write it elsewhere.")
    if written in read.parents:
        raise OutputRefused(f"{key} is {output}: the input {read} is inside it. Write it elsewhere.")


def check_whole(path: str) -> None:
    """Refuse an input that a run has begun to write and not finished, or that has lost a shard since: some pixels are missing."""
    digest = b""
    for output in (path_of(path), path_of(path).parent):  # the input may be a level of an OME-Zarr group
        if isinstance(output, ObjectPath):
            check_finished(output)
            continue
        if not output.name:
            continue
        if not (directory := RunDirectory.beside(output)).journal_path.is_file():
            if is_marked(output):
                digest += stored_digest(output)
            continue
        with suppress(DamagedData, ResumeRefused):  # damaged or of another version: its state is unknown
            journal = Journal.open_any(directory.journal_path)
            if remaining := journal.total - len(journal.done):
                raise InputError(
                    f"{output} is the output of a run that has {remaining:,} of {counted(journal.total, 'block')} left to do. "
                    f"`recon-cli resume {shlex.quote(str(output))}` finishes it; move {directory.path} away to read it as it is."
                )
        digest += stored_digest(output)
    if digest or not isinstance(place := path_of(path), Path):
        return
    try:
        lost = lost_by_name(place)
    except Exception as error:  # of a damaged zip, among others
        raise read_error(f"{path}: it cannot be read", error) from error
    if lost:
        raise DamagedData(f"{lost}. Otherwise restore the file from a copy.")


def kept_bytes(sources: Iterable[Source | StoredArray], most: int | None = None) -> int:
    """Return the memory of the decoded chunks that a worker keeps between its blocks: of so many sources at most, the largest ones."""
    sizes = (math.prod(s.chunks) * s.dtype.itemsize for s in sources if s.keeps_chunk)
    return sum(sorted(sizes, reverse=True)[:most])


def check_decoding(sources: Iterable[Source], run: Run) -> None:
    """Refuse inputs of which a single chunk takes more memory than a worker has, before any is decoded."""
    for source in sources:
        chunk = 1 if source.mapped else math.prod(source.chunks) * source.dtype.itemsize
        # It is in memory both encoded and decoded, or in two forms.
        if 2 * chunk > parse_bytes(run.memory_per_worker):
            raise MemoryRefused(
                f"run.memory_per_worker is {run.memory_per_worker}; {source.path} is stored in pieces of "
                f"{' × '.join(map(str, source.chunks))} pixels, {bytes_text(chunk)} each, and one can only be decoded whole, which takes "
                f"{bytes_text(2 * chunk)}. Write more than that, or convert the image to a Zarr or a TIFF in small chunks first. "
                "A file that is far smaller is damaged: restore it from its origin."
            )
