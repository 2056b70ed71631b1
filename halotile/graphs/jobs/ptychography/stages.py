"""Stages of a run that is not finished: those after the ones that its checkpoints are of may change."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from halotile.errors import DamagedData
from halotile.graphs.amounts import counted
from halotile.graphs.iterations.rank_programs import ProgramFiles
from halotile.graphs.plans.make import Begun
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.tasks.ptychography.recipe import checkpoints_of, stages_begun


def kept_stages(directory: RunDirectory, digest: str, identity: Mapping[str, Any]) -> int:
    """Return the number of stages, the first ones, of whose last one a run without a result has a checkpoint."""
    checkpoint = ProgramFiles.of(directory, digest).checkpoint
    kept = stages_begun(checkpoints_of(checkpoint, identity["stages"]))
    return 0 if kept and _has_result(directory) else kept


def _has_result(directory: RunDirectory) -> bool:
    """Return True where the result was written; whoever was killed then had no time to say so."""
    with suppress(FileNotFoundError, DamagedData):
        if Journal.open_any(directory.journal_path).done:
            return True
    outputs = (directory.read_valid_plan() or {}).get("outputs", [])
    paths = (Path(output["path"]) for output in outputs)
    return any(path.is_file() and path.stat().st_size > 0 for path in paths)


def note_of_stages(begun: Begun, digest: str, identity: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note where an earlier run goes on with other stages."""
    if begun.previous is None or begun.previous["identity"]["stages"] == identity["stages"]:
        return ()
    kept = counted(kept_stages(begun.directory, digest, identity), "stage")
    return (
        f"stages are not those of the earlier run: it goes on from what that computed of the first {kept}",
    )
