"""The files of a submitted run in its run directory: the batch job's number, script, log and end marks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halotile.storage.run_directory import validation
from halotile.storage.run_directory.directory import FILE_MODE, RunDirectory
from halotile.storage.run_directory.names import BATCH, FAILED, FINISHED, LOG, SCRIPT

TIME_IS_UP = "SIGUSR1"
"""Signal of the batch system before it ends a job."""
_STATE = (BATCH, SCRIPT, FINISHED, FAILED)


@dataclass(frozen=True)
class BatchFiles:
    """The files of one submitted run."""

    run: RunDirectory  # directory of the files

    @property
    def log_path(self) -> Path:
        """Path of the output of the batch job."""
        return self.run.path / LOG

    @property
    def script_path(self) -> Path:
        """Path of the submitted script."""
        return self.run.path / SCRIPT

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the record of the submission; durable on return."""
        self._write(BATCH, json.dumps(record, indent=2).encode())

    def read(self) -> dict[str, Any] | None:
        """The record of the submission; None when there is none."""
        advice = "Remove it, and submit the configuration again."
        return validation.read_object(self.run.path / BATCH, advice, validation.BATCH)

    def state(self) -> Mapping[str, bytes | None]:
        """Contents of the files, except the log, for :meth:`restore`."""
        paths = {name: self.run.path / name for name in _STATE}
        return {name: path.read_bytes() if path.is_file() else None for name, path in paths.items()}

    def restore(self, state: Mapping[str, bytes | None]) -> None:
        """Restore the contents from before a submission that was rejected."""
        for name, text in state.items():
            if text is None:
                self.run.disk.remove(self.run.path / name)
            else:
                self._write(name, text)
        if self.log_path.is_file() and not self.log_path.stat().st_size:
            self.run.disk.remove(self.log_path)

    def write_script(self, text: str) -> None:
        """Write the script; durable on return."""
        self._write(SCRIPT, text.encode())

    def mark_end(self, reason: str | None) -> None:
        """Mark the run as finished, or as failed for a reason; other programs look for these files."""
        self.clear_end()
        self._write(*((FINISHED, b"") if reason is None else (FAILED, f"{reason}\n".encode())))

    def clear_end(self) -> None:
        """Remove the marks, because the run continues."""
        for name in (FINISHED, FAILED):
            self.run.disk.remove(self.run.path / name)

    def failure(self) -> str | None:
        """The reason of the failure; None when the run is not marked as failed."""
        path = self.run.path / FAILED
        return path.read_text(errors="replace").strip() if path.is_file() else None

    @property
    def finished(self) -> bool:
        """True when the run is marked as finished."""
        return (self.run.path / FINISHED).is_file()

    def _write(self, name: str, text: bytes) -> None:
        self.run.disk.write_file(self.run.path / name, [text], mode=FILE_MODE)
