"""Reconstructions whose prior denoises on a GPU: the image of the CPU, the same bits each time, within the planned GPU memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.reconstruct.job import OperatorChoice, PriorChoice, Reconstruction, SolverChoice
from halotile.graphs.kinds.sections import Cluster as Choice
from halotile.graphs.kinds.sections import DenoiserChoice, Output, Run, Tile
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.runs.driver import Outcome
from halotile.graphs.runs.driver import run as reconstruct
from tests.graphs.solving import kernel
from tests.support import Image, dncnn_weights, noisy_image, read_zarr, work_of, write_zarr

pytestmark = [pytest.mark.gpu, pytest.mark.cluster]


def job(folder: Path, output: str, device: str, tile: Tile) -> Reconstruction:
    """A deblurring with a network, of nine blocks."""
    data, weights = folder / "y.zarr", folder / "w.safetensors"
    if not data.exists():
        write_zarr(data, noisy_image((700, 610), "float32"), chunk=128)
        dncnn_weights(weights, 5, 8)
    network = DenoiserChoice(name="dncnn", options={"weights": str(weights), "depth": 5, "width": 8})
    return Reconstruction(
        output=Output(path=str(folder / output), shard=256, chunk=128),
        operators=(OperatorChoice(name="blur", data=str(data), options={"kernel": kernel(5)}),),
        prior=PriorChoice(name="pnp", options={"denoiser": network}),
        solver=SolverChoice(name="pgd", step=0.5, iterations=3),
        tile=tile,
        run=Run(device=device, workers=2),  # type: ignore[arg-type]
        cluster=Choice(kind="local"),
    )


def done(wanted: Reconstruction, cluster: RunningCluster) -> tuple[Plan, Outcome, Image]:
    """Its plan, how it ended, and what it wrote."""
    plan = make_plan(wanted)
    outcome = reconstruct(plan, cluster=cluster)
    return plan, outcome, read_zarr(plan.output)


@pytest.mark.thorough
def test_a_reconstruction_agrees_with_the_cpu_and_with_itself(
    gpu: str, cluster: RunningCluster, tmp_path: Path
) -> None:
    # What a trial of a GPU chooses may be another tile each time, and so other last bits.
    tile = Tile(block=256, size=128, batch=4, channels_last=False)
    _, _, want = done(job(tmp_path, "cpu.zarr", "cpu", tile), cluster)
    _, _, got = done(job(tmp_path, "gpu.zarr", gpu, tile), cluster)
    _, _, again = done(job(tmp_path, "again.zarr", gpu, tile), cluster)
    assert np.abs(want).max() > 0
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    np.testing.assert_array_equal(again, got)


def test_it_holds_what_was_planned_of_the_gpu(gpu: str, cluster: RunningCluster, tmp_path: Path) -> None:
    plan, outcome, _ = done(job(tmp_path, "x.zarr", gpu, Tile(block=256)), cluster)
    assert outcome.done == outcome.total
    if gpu == "cuda":
        assert work_of(plan).tuned is not None
        assert 0.5 < outcome.device_peak_bytes / work_of(plan).tuned.device_bytes < 1.1
