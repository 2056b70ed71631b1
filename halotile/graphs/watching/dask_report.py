"""Dask's own report of a run, kept in its directory: what each worker did when, and what the machine did."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.task_stream import TaskStreamPlugin

from halotile.storage.run_directory.directory import RunDirectory

if TYPE_CHECKING:
    from distributed import Client

TASKS = 5000
"""The last so many tasks are in the report: some 150 bytes each."""
REPORT_SECONDS = 20.0
"""How long it may take. With all of its tasks it takes half a second."""
CODE = "Run by halotile. Every task is a handful of blocks; config.json, beside this report, says what was done to them."


def keep_tasks(scheduler: Any) -> None:
    """Have a scheduler note when its last tasks began and ended, unless it does."""
    with suppress(Exception):  # the report is lost, and no more
        if TaskStreamPlugin.name not in scheduler.plugins:
            scheduler.add_plugin(TaskStreamPlugin(scheduler, maxlen=TASKS))


def write_report(client: Client, directory: RunDirectory, began: float) -> None:
    """Write the report of what a cluster did since ``began`` (Unix time). Whatever goes wrong costs the report."""
    if client.status != "running":
        return
    with suppress(Exception):
        html = client.sync(
            client.scheduler.performance_report,
            start=began,
            last_count=0,
            code=CODE,
            mode="inline",  # it is read where there may be no network
            callback_timeout=REPORT_SECONDS,
        )
        directory.write_report(html)
