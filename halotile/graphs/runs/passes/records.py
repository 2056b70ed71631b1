"""Records of a pass over scratch arrays: its journal and the sums of its blocks, stored beside those arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halotile.errors import DamagedData, ResumeRefused
from halotile.graphs.kinds.base import Records, Sums
from halotile.graphs.runs.damage import RecordedImage, output_grid
from halotile.storage.grid import Grid
from halotile.storage.run_directory.journal import Journal
from halotile.storage.run_directory.json_files import Ledger
from halotile.tasks.exact_sums import add_exactly


@dataclass(frozen=True)
class OpenRecords:
    """Journal and ledger of a pass in progress."""

    journal: Journal
    ledger: Ledger
    arrays: int = 0
    """Number of arrays that the pass writes."""

    def sums(self) -> Sums:
        """Return the totals of the finished pass."""
        digests = tuple(self.journal.image_digest(number).hex() for number in range(self.arrays))
        return Sums(add_up(self.ledger.sums), digests)


@contextmanager
def open_records(records: Records, grid: Grid, fingerprint: str) -> Iterator[OpenRecords]:
    """Open the records of a pass over the blocks of ``grid``; damaged entries are removed.

    Nothing of them has to survive a power cut: a pass without records starts again. So they are synced only where the
    pass is interrupted, and an iteration waits for the disk once, for its checkpoint.

    ``records``: folder and name of the records; ``grid``: blocks; ``fingerprint``: fingerprint of the job.
    """
    images = max(1, len(records.arrays))
    path, owner = records.folder / f"journal.{records.name}", f"{fingerprint}-{records.name}"
    records.folder.mkdir(parents=True, exist_ok=True)
    try:
        journal = Journal.open(path, owner, len(grid), images=images)
    except ResumeRefused:  # it is of the job as it was before it was changed
        remove_records(records.folder, records.name)
        journal = Journal.create(path, owner, len(grid), images=images, sync=False)
    except (FileNotFoundError, DamagedData):
        journal = Journal.create(path, owner, len(grid), images=images, sync=False)
    ledger = Ledger(records.folder / f"sums.{records.name}")
    _strike(records, journal, ledger, grid)
    try:
        yield OpenRecords(journal, ledger, len(records.arrays))
    except BaseException:
        with suppress(OSError):  # what the disk loses is computed again
            ledger.sync()
            journal.sync()
        raise


def _strike(records: Records, journal: Journal, ledger: Ledger, grid: Grid) -> None:
    """Remove blocks from the records that are marked, and have lost their sums or a shard."""
    if not journal.done:
        return
    lost = {number for number in journal.done if number not in ledger.sums}
    for image, path in enumerate(records.arrays):
        assert records.layout is not None
        blocks = output_grid(records.layout, grid.shape, grid.block)
        lost.update(RecordedImage(path, records.layout, blocks, journal, image=image).damaged())
    journal.unmark(sorted(lost))


def remove_records(folder: Path, name: str) -> None:
    """Remove the records of a finished pass, and those of its stages."""
    for kind in ("journal", "sums"):
        for pattern in (f"{kind}.{name}", f"{kind}.{name}.*"):
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)


def add_up(sums: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the totals of the sums of blocks, exact regardless of the order in which the blocks were done.

    A sum over a block is a list with an entry for each of its shards: a number, or nested lists for an array.

    >>> add_up({0: {"misfit": [0.5, 2.0]}, 1: {"misfit": [0.25]}})
    {'misfit': 2.75}
    >>> add_up({0: {"histogram": [[1.0, 2.0]]}, 1: {"histogram": [[3.0, 4.0], [5.0, 6.0]]}})["histogram"].tolist()
    [9.0, 12.0]
    """
    entries: dict[str, list[Any]] = {}
    for number in sorted(sums):
        for name, values in sums[number].items():
            entries.setdefault(name, []).extend(values)
    return {name: _total(values) for name, values in entries.items()}


def _total(values: list[Any]) -> Any:
    if not isinstance(values[0], list):
        return add_exactly(values)
    columns = np.asarray(values, np.float64).reshape(len(values), -1)
    total = np.array([add_exactly(column) for column in columns.T])
    return total.reshape(np.shape(values[0]))
