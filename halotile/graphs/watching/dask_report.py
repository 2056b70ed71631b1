"""Dask's performance report of a run, kept in its directory."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.task_stream import TaskStreamPlugin

from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.names import REPORT

if TYPE_CHECKING:
    from distributed import Client

TASKS = 5000
"""Number of the last tasks that are in the report: some 150 bytes each."""
REPORT_SECONDS = 20.0
"""Time that it may take. With all of its tasks it takes half a second."""
CODE = "Run by halotile. Every task is a handful of blocks; config.json, beside this report, says what was done to them."


def keep_tasks(scheduler: Any) -> None:
    """Have a scheduler record its last tasks, unless it does."""
    with suppress(Exception):  # the report is lost, and nothing else
        if TaskStreamPlugin.name not in scheduler.plugins:
            scheduler.add_plugin(TaskStreamPlugin(scheduler, maxlen=TASKS))


def write_report(client: Client, directory: RunDirectory, began: float) -> None:
    """Write the report of a cluster since ``began`` (Unix time). An error costs the report, and nothing else."""
    if client.status != "running":
        return
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
