"""Dask's performance report of a run, kept in its directory."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.task_stream import TaskStreamPlugin

from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.names import REPORT

if TYPE_CHECKING:
    from distributed import Client

TASKS = 5000
"""Number of the last tasks that are in the report: some 150 bytes each."""
LEAST_SECONDS = 10.0
"""Age of a cluster from which it has a report, which takes a second: most of it to import Dask's pages."""
REPORT_SECONDS = 20.0
"""Time that it may take."""
CODE = "Run by halotile. Every task is a handful of blocks; config.json, beside this report, says what was done to them."


def keep_tasks(scheduler: Any) -> None:
    """Have a scheduler record its last tasks, unless it does."""
    with suppress(Exception):  # the report is lost, and nothing else
        if TaskStreamPlugin.name not in scheduler.plugins:
            scheduler.add_plugin(TaskStreamPlugin(scheduler, maxlen=TASKS))


def write_report(client: Client, directory: RunDirectory, began: float) -> bool:
    """Write the report of a cluster since ``began`` (Unix time), unless that is short; return True where it is there.

    An error costs the report, and nothing else.
    """
    if client.status != "running" or time.time() - began < LEAST_SECONDS:
        return False
    with suppress(Exception):
        html = client.sync(
            client.scheduler.performance_report,
            start=began,
            last_count=0,
            code=CODE,
            mode="inline",  # its reader may have no network
            callback_timeout=REPORT_SECONDS,
        )
        directory.write_html(REPORT, html)
        return True
    return False
