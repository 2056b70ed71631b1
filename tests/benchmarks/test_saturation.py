"""The model of one scheduler with many workers: its simulation agrees with its formulas, and with common sense."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halotile.graphs.runs.passes.stream import least_task_seconds
from tests.benchmarks.saturation import Cost, Machine, Simulation

MACHINE = Machine(Cost(0.001, 3e-7), Cost(0.0004, 5e-7), heartbeat=0.05)
"""One process that bears about 680 tasks a second."""
APART = replace(MACHINE, together=False)
"""The same in two."""
WORKERS = 200


def busy(machine: Machine, task_seconds: float, blocks: int = 1, workers: int = WORKERS) -> float:
    return Simulation(machine, workers, blocks, task_seconds).busy(60 * workers)


@pytest.mark.parametrize("machine", [MACHINE, APART], ids=["one process", "two"])
@pytest.mark.parametrize(("blocks", "share"), [(1, 0.2), (1, 0.8), (256, 0.5)])
def test_workers_that_wait_for_the_scheduler_are_busy_as_the_formula_says(
    machine: Machine, blocks: int, share: float
) -> None:
    seconds = machine.least_task_seconds(WORKERS, blocks, share)
    assert busy(machine, seconds, blocks) == pytest.approx(share, rel=0.03)


def test_long_tasks_keep_all_workers_busy() -> None:
    assert busy(MACHINE, 3 * MACHINE.least_task_seconds(WORKERS, 1)) > 0.95


def test_a_slow_driver_is_as_bad_as_a_slow_scheduler() -> None:
    swapped = Machine(Cost(0.0002, 0), Cost(0.001, 0), together=False)
    assert swapped.tasks_per_second(1) == pytest.approx(1000)
    assert busy(swapped, WORKERS / 2000) == pytest.approx(0.5, rel=0.03)


def test_without_tasks_in_hand_every_message_is_waited_for() -> None:
    patient = Machine(MACHINE.scheduler, MACHINE.driver, latency=0.05, in_flight=1)
    seconds = 2 * MACHINE.least_task_seconds(WORKERS, 1)
    assert busy(patient, seconds) < 0.8 < busy(MACHINE, seconds)


def test_groups_make_do_with_smaller_blocks() -> None:
    edges = [MACHINE.least_pixels(1000, blocks, 2e8) ** 0.5 for blocks in (1, 16, 256)]
    assert edges == sorted(edges, reverse=True)
    assert edges[0] / edges[1] == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("workers", [100, 1000, 10_000])
def test_tasks_last_so_long_that_one_scheduler_keeps_its_workers_busy(workers: int) -> None:
    # As measured: what the choice of a worker costs grows with their number.
    machine = Machine(Cost(0.001 + 0.9e-6 * workers, 0), Cost(0.0006, 0), heartbeat=0.12)
    assert machine.least_task_seconds(workers, 1) < max(1.0, least_task_seconds(workers))
