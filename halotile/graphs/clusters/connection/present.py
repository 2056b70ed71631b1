"""The workers that a scheduler has now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Client


def present_workers(client: Client) -> dict[str, dict[str, Any]]:
    """Description of each worker of a scheduler, by address.

    ``Client.scheduler_info`` keeps the answer where an update in the background may replace it by one without workers.
    """
    workers: dict[str, dict[str, Any]] = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return workers
