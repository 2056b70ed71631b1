"""The figures of a job for Prometheus, on the same page as Dask's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

COUNTERS = {
    "pixels": ("pixels_done", "Pixels computed by this run"),
    "bytes_read": ("read_bytes", "Bytes read by this run"),
    "bytes_written": ("written_bytes", "Bytes written by this run"),
    "compute_seconds": (
        "compute_seconds",
        "Seconds that workers, or their GPUs, were computing in this run",
    ),
    "retries": ("retried", "Times that a block of this run was tried again"),
}
GAUGES = {
    "blocks_planned": ("total", "Blocks of the whole job, each counted once for every pass"),
    "blocks_finished": ("done", "Blocks done so far, each counted once for every pass"),
    "peak_memory_bytes": ("peak_memory_bytes", "The most memory that a worker has had"),
    "device_peak_bytes": ("device_peak_bytes", "The most memory that a worker has held on its GPU"),
    "eta_seconds": ("eta_seconds", "Time left at the rate so far"),
}
PREFIX = "halotile"


class Metrics:
    """A collector in the registry that Dask serves, where prometheus_client is installed; without it, nothing.

    Parameters
    ----------
    message : callable
        Returns the last message of the job.
    """

    def __init__(self, message: Callable[[], Mapping[str, Any]]) -> None:
        self.message = message
        self._registry: Any = None
        # It is not installed, has another interface, or serves another job's figures already.
        with suppress(Exception):
            from prometheus_client import REGISTRY

            REGISTRY.register(self)
            self._registry = REGISTRY

    def end(self) -> None:
        """Remove the figures."""
        registry, self._registry = self._registry, None
        with suppress(Exception):
            if registry is not None:
                registry.unregister(self)

    def describe(self) -> Iterator[Any]:
        """Describe nothing in advance: names come with the figures."""
        return iter(())

    def collect(self) -> Iterator[Any]:
        """The figures now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        message = self.message()
        progress = message.get("progress", {})
        for name, (key, text) in COUNTERS.items():
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=progress.get(key, 0))
        for name, (key, text) in GAUGES.items():
            if progress.get(key) is not None:
                yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=progress[key])
        if iterations := message.get("curve", {}).get("iteration"):
            yield GaugeMetricFamily(
                f"{PREFIX}_iteration", "Iterations of the solver so far", value=iterations[-1]
            )
        blocks = GaugeMetricFamily(f"{PREFIX}_blocks", "Blocks of the current pass", labels=["state"])
        for state, count in message.get("blocks", {}).items():
            blocks.add_metric([state], count)
        yield blocks
