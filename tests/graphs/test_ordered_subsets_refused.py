"""Jobs on subsets of the operators that cannot be run as they are: what is refused, with the place to look at."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halotile.errors import ConfigError, HalotileError, InputError
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.reconstruct.job import FidelityChoice, PriorChoice
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run as reconstruct
from halotile.graphs.solvers._subsets import PASSES_EACH
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.operators.sum import Multiplied
from tests.cases import thorough
from tests.graphs.test_ordered_subsets import measured, reconstruction
from tests.support import read_zarr, write_zarr

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "squares": ("osem", {"fidelity": FidelityChoice()}, r"fidelity\.name: l2 with solver osem.*write poisson"),
    "a prior": ("osem", {"prior": PriorChoice(name="l1", options={"weight": 1.0})}, r"l1 with solver osem, which knows no prior"),
    "too many subsets": ("sgd", {"subsets": 6}, r"solver\.subsets: 6, and there are 5 operators"),
    "no subsets": ("sgd", {"subsets": 0}, r"subsets is 0: write a whole number of at least 1"),
    "half a subset": ("sgd", {"subsets": 2.5}, r"subsets is 2\.5: write a whole number"),
    "an order": ("svrg", {"order": "backwards"}, r"order is 'backwards': write one of cyclic, random"),
    "a seed": ("svrg", {"seed": -1}, r"seed is -1"),
    "a decay": ("sgd", {"decay": -0.5}, r"decay is -0\.5"),
    "no epochs": ("svrg", {"epochs": 0}, r"epochs is 0"),
    "half an epoch": ("svrg", {"epochs": 1.5}, r"epochs is 1\.5"),
    "a step": ("osem", {"step": 0.5}, r"osem finds its own"),
    "many iterations in a pass": ("sgd", {"checkpoint_every": 7}, r"checkpoint_every"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_a_run(tmp_path: Path, name: str) -> None:
    solver, changes, words = REFUSED[name]
    job = reconstruction(tmp_path, solver, "float32", 7)
    for key, value in changes.items():
        if key in ("fidelity", "prior"):
            job = replace(job, **{key: value})
        elif key in ("step", "checkpoint_every"):
            job = replace(job, solver=replace(job.solver, **{key: value}))
        else:
            job = replace(job, solver=replace(job.solver, options={**job.solver.options, key: value}))
    with pytest.raises(ConfigError, match=words):
        make_plan(job)


def test_a_kernel_below_zero_is_refused_before_osem(tmp_path: Path) -> None:
    job = reconstruction(tmp_path, "osem", "float32", 3)
    sharp = np.array([[-0.5, 2.0, -0.5]], dtype="float32")
    operators = (*job.operators[:4], replace(job.operators[4], options={"kernel": sharp, "boundary": "circular"}))
    with pytest.raises(ConfigError, match=r"operators\[4\] \(blur\) has numbers below 0.*fista"):
        make_plan(replace(job, operators=operators))


@pytest.mark.cluster
def test_data_below_zero_are_refused_by_osem(tmp_path: Path, cluster: RunningCluster) -> None:
    job = reconstruction(tmp_path, "osem", "float32", 3)
    pixels = measured("float32")[0][2]
    pixels[40, 50] = -1
    write_zarr(tmp_path / "low.zarr", pixels)
    operators = (*job.operators[:2], replace(job.operators[2], data=str(tmp_path / "low.zarr")), *job.operators[3:])
    with pytest.raises(HalotileError, match=r"operators\[2\]\.data has pixels below 0"):
        reconstruct(make_plan(replace(job, operators=operators)), cluster=cluster)


def changed(path: str, value: float) -> None:
    """Write an image anew with a pixel of this value."""
    pixels = read_zarr(Path(path))
    pixels[40, 50] = value
    shutil.rmtree(path)
    write_zarr(Path(path), pixels)


@pytest.mark.cluster
@pytest.mark.parametrize("where", ["data", thorough("mask")])
def test_a_pixel_that_is_no_number_is_found_whichever_subset_has_it(
    tmp_path: Path, cluster: RunningCluster, where: str
) -> None:
    """It is no divergence, of which a shorter step would be the end."""
    job = reconstruction(tmp_path, "sgd", "float32", 7, order="cyclic")
    if where == "data":
        changed(job.operators[3].data, np.nan)
    else:
        write_zarr(tmp_path / "mask.zarr", np.full((70, 90), np.nan, "float32"))
        masked = replace(job.operators[3], name="mask", options={"mask": str(tmp_path / "mask.zarr")})
        operators = (*job.operators[:3], masked, job.operators[4])
        job = replace(job, operators=operators, solver=replace(job.solver, step="auto"))
    passes = {"data": 4, "mask": 3 * PASSES_EACH + 1}
    words = rf"pass {passes[where]} gave .* nan: some pixel of the data, of start, or of what an operator reads"
    with pytest.raises(InputError, match=words):
        reconstruct(make_plan(job), cluster=cluster)


@pytest.mark.cluster
def test_a_start_of_zeros_is_refused_by_osem(tmp_path: Path, cluster: RunningCluster) -> None:
    job = reconstruction(tmp_path, "osem", "float32", 7)
    assert job.start is not None
    shutil.rmtree(job.start)
    write_zarr(Path(job.start), np.zeros((70, 90), "float32"))
    with pytest.raises(InputError, match=r"the first image is 0 everywhere.*Write a start above 0"):
        reconstruct(make_plan(job), cluster=cluster)


def test_a_start_or_an_adjoint_below_zero_is_refused_when_it_shows() -> None:
    x, one = InMemory(np.ones((2, 2))), InMemory(np.ones((2, 2)))
    for slope, sensitivity in (
        (np.full((2, 2), 1.5), np.ones((2, 2))),
        (np.zeros((2, 2)), np.array([[1.0, -1], [1, 1]])),
    ):
        with pytest.raises(InputError, match=r"corrections.*below 0"):
            read_all(Multiplied(x, InMemory(slope), InMemory(sensitivity)))
    zeros = InMemory(np.zeros((2, 2)))
    with pytest.raises(InputError, match="a start without"):
        read_all(Multiplied(InMemory(np.array([[1.0, 2], [3, -1]])), zeros, one))
    assert np.array_equal(read_all(Multiplied(x, zeros, one)), np.ones((2, 2)))
