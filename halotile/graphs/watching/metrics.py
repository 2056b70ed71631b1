"""The figures of a job for Prometheus, on the page where Dask has its own."""

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
    "blocks_planned": ("total", "Blocks of the whole job, each counted once for every sweep"),
    "blocks_finished": ("done", "Blocks done so far, each counted once for every sweep"),
    "peak_memory_bytes": ("peak_memory_bytes", "The most memory that a worker has had"),
    "device_peak_bytes": ("device_peak_bytes", "The most memory that a worker has held on its GPU"),
    "eta_seconds": ("eta_seconds", "Time left at the rate so far"),
}
PREFIX = "halotile"


class Metrics:
    """A collector in the registry that Dask serves, where prometheus_client is installed; without it, nothing.

    Parameters
    ----------
    told : callable
        Gives what is known of the job.
    """

    def __init__(self, told: Callable[[], Mapping[str, Any]]) -> None:
        self.told = told
        self._registry: Any = None
        # Not there, of another release, or another job's figures are there already.
        with suppress(Exception):
            from prometheus_client import REGISTRY

            REGISTRY.register(self)
            self._registry = REGISTRY

    def end(self) -> None:
        """Tell nothing any more."""
        registry, self._registry = self._registry, None
        with suppress(Exception):
            if registry is not None:
                registry.unregister(self)

    def describe(self) -> Iterator[Any]:
        """Names are given with the figures."""
        return iter(())

    def collect(self) -> Iterator[Any]:
        """The figures now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        told = self.told()
        progress = told.get("progress", {})
        for name, (key, text) in COUNTERS.items():
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=progress.get(key, 0))
        for name, (key, text) in GAUGES.items():
            if progress.get(key) is not None:
                yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=progress[key])
        if iterations := told.get("curve", {}).get("iteration"):
            yield GaugeMetricFamily(
                f"{PREFIX}_iteration", "Iterations of the solver so far", value=iterations[-1]
            )
        blocks = GaugeMetricFamily(f"{PREFIX}_blocks", "Blocks of the sweep at hand", labels=["state"])
        for state, count in told.get("blocks", {}).items():
            blocks.add_metric([state], count)
        yield blocks
