"""Blocks that a run has given up, read from the events in its directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halotile.graphs.amounts import first_line
from halotile.graphs.kinds.base import Row
from halotile.storage.run_directory.directory import RunDirectory

NAMED = 5
"""Number of blocks that are shown to people; `--json` has all."""
_OF_INPUT = ("InputError:", "DamagedData:")


@dataclass(frozen=True)
class GivenUp:
    """A block that could not be computed, with the reason."""

    number: int
    index: tuple[int, ...]
    error: str
    output: str | None = None
    """Path of its output, where the run has several."""

    @property
    def is_of_input(self) -> bool:
        """True where the image is the cause, not the denoiser or the machine."""
        return self.error.startswith(_OF_INPUT)

    def to_json(self) -> dict[str, Any]:
        """Return the block for programs, with the keys of `recon-cli run --json`."""
        block = {"number": self.number, "index": list(self.index), "error": self.error}
        return block if self.output is None else block | {"output": self.output}

    @property
    def name(self) -> str:
        """The block in words."""
        return f"block {self.number}" + (f" of {Path(self.output).name}" if self.output else "")


def blocks_given_up(run: RunDirectory) -> tuple[GivenUp, ...]:
    """Return the blocks that the last run has given up, by output and number; it tried those of earlier runs again."""
    blocks: dict[tuple[str, int], GivenUp] = {}
    for event in run.read_events():
        # A full disk or a power cut may have left an incomplete line.
        kind = event.get("event")
        number = event.get("block") if kind == "bad block" else None
        if kind == "begin":
            blocks.clear()
        elif isinstance(number, int):
            index, output = event.get("index"), event.get("output")
            blocks[str(output), number] = GivenUp(
                number,
                tuple(index) if isinstance(index, list) else (),
                str(event.get("error", "?")),
                output if isinstance(output, str) else None,
            )
    return tuple(blocks[key] for key in sorted(blocks))


def rows_of(bad: Sequence[GivenUp]) -> list[Row]:
    """Return the first few as rows, each with its reason, for people."""
    lines = [f"{b.name} (index {b.index}): {first_line(b.error)}" for b in bad[:NAMED]]
    if len(bad) > NAMED:
        lines.append(f"and {len(bad) - NAMED:,} more, in events.jsonl with their tracebacks")
    elif bad:
        lines.append("tracebacks are in events.jsonl")
    return [("" if number else "bad blocks", line) for number, line in enumerate(lines)]
