"""Inputs of a job: apart from its output, finished, and small enough to decode."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from halotile.errors import ConfigError, DamagedData, MemoryRefused
from halotile.graphs.amounts import bytes_text
from halotile.graphs.kinds.sections import Run, parse_bytes
from halotile.graphs.words import shown
from halotile.storage.arrays import Source
from halotile.storage.disk import place
from halotile.storage.disk.object_path import OutputPath, path_of
from halotile.storage.images.planes import channel_number
from halotile.storage.run_directory.object_claim import check_finished
from halotile.storage.sharded.local_reader import lost_by_name
from halotile.storage.stored_array import StoredArray, read_error


def with_selected(source: Source, channels: Sequence[str | int]) -> Source:
    """Return an image with the channels that ``input.channels`` selects; all where it names none."""
    numbers = [channel_number(source, channel, "input.channels") for channel in channels]
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"input.channels is {shown(channels)}, which has a channel twice. Write each once.")
    return source.with_channels(numbers) if numbers else source


def check_paths(path: str, output: OutputPath) -> None:
    """Refuse an output that is an input, is inside it, or contains it."""
    check_whole(path)
    place.check_apart(path_of(path), output)


def check_whole(path: str) -> None:
    """Refuse an input that a run has begun to write and not finished, or that has lost a shard since: some pixels are missing."""
    outputs = (path_of(path), path_of(path).parent)  # the input may be a level of an OME-Zarr group
    digests = [check_finished(output) for output in outputs if output.name]
    if any(digests) or not isinstance(image := path_of(path), Path):
        return
    try:
        lost = lost_by_name(image)
    except Exception as error:  # of a damaged zip, among others
        raise read_error(f"{path}: it cannot be read", error) from error
    if lost:
        raise DamagedData(f"{lost}. Otherwise restore the file from a copy.")


def kept_bytes(sources: Iterable[Source | StoredArray], most: int | None = None) -> int:
    """Return the memory of the decoded chunks that a worker keeps between its blocks: of so many sources at most, the largest ones."""
    sizes = (math.prod(s.chunks) * s.dtype.itemsize for s in sources if s.keeps_chunk)
    return sum(sorted(sizes, reverse=True)[:most])


def check_decoding(sources: Iterable[Source], run: Run) -> None:
    """Refuse inputs whose single chunk takes more memory than a worker has, before any is decoded."""
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
