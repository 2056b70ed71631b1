"""What a submitted run keeps in its run directory besides: the batch job's number, its script and log, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halotile.errors import DamagedData
from halotile.storage.run_directory import plausible
from halotile.storage.run_directory.directory import FILE_MODE, RunDirectory
from halotile.storage.run_directory.names import BATCH, FAILED, FINISHED, LOG, SCRIPT

_STATE = (BATCH, SCRIPT, FINISHED, FAILED)


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
        self._write(BATCH, json.dumps(record, indent=2).encode())

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
        except (ValueError, RecursionError, IsADirectoryError):
            record = None
        if not isinstance(record, dict) or not plausible.fits(record, plausible.BATCH):
            raise DamagedData(f"{path} is damaged. Remove it, and submit the configuration again.")
        return record

    def state(self) -> Mapping[str, bytes | None]:
        """What stands in the files, but for the log: to be given back to :meth:`restore`."""
        paths = {name: self.run.path / name for name in _STATE}
        return {name: path.read_bytes() if path.is_file() else None for name, path in paths.items()}

    def restore(self, state: Mapping[str, bytes | None]) -> None:
        """As it was before something was submitted, which was not taken after all."""
        for name, text in state.items():
            if text is None:
                self.run.disk.remove(self.run.path / name)
            else:
                self._write(name, text)
        if self.log_path.is_file() and not self.log_path.stat().st_size:
            self.run.disk.remove(self.log_path)

    def write_script(self, text: str) -> None:
        """Keep the script; durable on return."""
        self._write(SCRIPT, text.encode())

    def mark_end(self, reason: str | None) -> None:
        """Mark the run as finished, or as failed for a reason: other programs look for the files."""
        self.forget_end()
        self._write(*((FINISHED, b"") if reason is None else (FAILED, f"{reason}\n".encode())))

    def forget_end(self) -> None:
        """Take the marks away: it goes on."""
        for name in (FINISHED, FAILED):
            self.run.disk.remove(self.run.path / name)

    def failure(self) -> str | None:
        """Why the run failed, if it is marked so."""
        path = self.run.path / FAILED
        return path.read_text(errors="replace").strip() if path.is_file() else None

    @property
    def finished(self) -> bool:
        """Whether the run is marked as finished."""
        return (self.run.path / FINISHED).is_file()

    def _write(self, name: str, text: bytes) -> None:
        self.run.disk.write_file(self.run.path / name, [text], mode=FILE_MODE)
