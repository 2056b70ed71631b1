"""Stages of a run that is not finished: those after the ones that its checkpoints are of may change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halotile.graphs.amounts import counted
from halotile.graphs.iterations.rank_programs import ProgramFiles
from halotile.graphs.kinds.revision import Revision
from halotile.graphs.plans.identity import fingerprint
from halotile.graphs.plans.stages import Begun
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.ptychography.recipe import checkpoints_of


def kept_stages(directory: RunDirectory, digest: str, identity: Mapping[str, Any]) -> int:
    """Return the number of stages, the first ones, of whose last one a run has a checkpoint."""
    checkpoint = ProgramFiles.of(directory, digest).checkpoint
    paths = checkpoints_of(checkpoint, identity["stages"])
    return max((number for number, path in enumerate(paths, 1) if path.is_file()), default=0)


def note_of_stages(begun: Begun, revision: Revision | None, identity: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note where an earlier run goes on with other stages."""
    if begun.previous is None or begun.previous["identity"]["stages"] == identity["stages"]:
        return ()
    kept = counted(kept_stages(begun.directory, fingerprint(identity, revision), identity), "stage")
    return (
        f"stages are not those of the earlier run: it goes on from what that computed of the first {kept}",
    )
