"""What a submitted run keeps in its run directory besides: the batch job's number, its script and log, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halotile.errors import DamagedData
from halotile.storage.rundir import BATCH, FAILED, FILE_MODE, FINISHED, LOG, SCRIPT, RunDirectory


@dataclass(frozen=True)
class BatchFiles:
    """The files of one submitted run.

    Parameters
    ----------
    run : RunDirectory
        Where they lie.
    """

    run: RunDirectory

    @property
    def log_path(self) -> Path:
        """What the batch job printed."""
        return self.run.path / LOG

    @property
    def script_path(self) -> Path:
        """The script that was submitted."""
        return self.run.path / SCRIPT

    def write(self, record: Mapping[str, Any]) -> None:
        """Keep what was submitted; durable on return."""
        self._write(BATCH, json.dumps(record, indent=2))

    def read(self) -> dict[str, Any] | None:
        """What was submitted; None when nothing was.

        Raises
        ------
        DamagedData
            When it cannot be read.
        """
        path = self.run.path / BATCH
        try:
            record = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise DamagedData(f"{path} is damaged. Submit the configuration again.")
        return record

    def restore(self, record: Mapping[str, Any] | None) -> None:
        """As it was before something was submitted, which was not taken after all."""
        if record is not None:
            self.write(record)
            return
        for name in (BATCH, SCRIPT, LOG):
            self.run.disk.remove(self.run.path / name)

    def write_script(self, text: str) -> None:
        """Keep the script; durable on return."""
        self._write(SCRIPT, text)

    def mark_end(self, reason: str | None) -> None:
        """Mark the run as finished, or as failed for a reason: other programs look for the files."""
        self.forget_end()
        self._write(*((FINISHED, "") if reason is None else (FAILED, f"{reason}\n")))

    def forget_end(self) -> None:
        """Take the marks away: it goes on."""
        for name in (FINISHED, FAILED):
            self.run.disk.remove(self.run.path / name)

    def failure(self) -> str | None:
        """Why the run failed, if it is marked so."""
        path = self.run.path / FAILED
        return path.read_text().strip() if path.is_file() else None

    def _write(self, name: str, text: str) -> None:
        self.run.disk.write_file(self.run.path / name, [text.encode()], mode=FILE_MODE)
