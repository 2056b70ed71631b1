"""Parts of a run that all of its passes share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halotile.graphs.plans.plan import Plan
    from halotile.graphs.runs.outputs.held_output import HeldOutputs
    from halotile.graphs.runs.signals import Signals
    from halotile.graphs.runs.status import Status
    from halotile.storage.run_directory.directory import RunDirectory


@dataclass(frozen=True)
class RunContext:
    """A run as its passes see it."""

    plan: Plan
    outputs: HeldOutputs
    """The outputs, which are checked during the run."""
    directory: RunDirectory
    """The run directory, in which workers look for a request to stop."""
    signals: Signals
    """Requests to the driver."""
    status: Status
    """Progress, reported and written to disk."""
