"""Priors, fidelities and solvers from packages of their own, each with options that a job writes beside its name."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from halotile import registry
from halotile.cli.config.loading import load_job
from halotile.cli.config.schema import config_schema
from halotile.errors import ConfigError
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.reconstruct.job import PriorChoice
from halotile.graphs.kinds.sections import DenoiserChoice
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.graphs.solvers.base import Problem, ReadVector, State, Step
from halotile.graphs.solvers.pgd import ProximalGradient
from halotile.storage.rim import Readable
from halotile.tasks.fidelities.l2 import L2
from halotile.tasks.options import check_above_zero
from halotile.tasks.priors.l1 import Sparse
from tests.cases import thorough
from tests.support import noisy_image, read_zarr

EDGE = 96


@dataclass(frozen=True, kw_only=True)
class Scaled(L2):
    """Squares, each times a factor, whose gradient is not folded."""

    name: ClassVar[str] = "scaled"
    is_square: ClassVar[bool] = False

    factor: float = 1.0

    def __post_init__(self) -> None:
        check_above_zero("factor", self.factor)

    def slope(self, seen: NDArray[Any], measured: NDArray[Any]) -> NDArray[Any]:
        slope: NDArray[Any] = super().slope(seen, measured) * seen.dtype.type(self.factor)
        return slope


@dataclass(frozen=True, kw_only=True)
class Halves(Sparse):
    """Half of a sparse prior."""

    name: ClassVar[str] = "halves"

    def prox(self, image: Readable, step: float) -> Readable:
        return super().prox(image, step / 2)


@dataclass(frozen=True)
class Slowed(ProximalGradient):
    """Proximal gradient descent with a part of the step."""

    name: ClassVar[str] = "slowed"

    part: float = 0.5

    def step(self, problem: Problem, state: State, read: ReadVector) -> Step:
        return super().step(replace(problem, step_size=problem.step_size * self.part), state, read)

    def next(self, problem: Problem, state: State, sums: Mapping[str, float]) -> State:
        return super().next(problem, state, sums)


FIDELITY, PRIOR, SOLVER = Scaled, Halves, Slowed
OFFERED = {"fidelities": "scaled", "priors": "halves", "solvers": "slowed"}

JOB = """
version: 1
job: reconstruct
output: {path: x.zarr, shard: 32, chunk: 32, overwrite: true}
operators:
  - {name: blur, kernel: k.npy, data: y.npy}
fidelity: FIDELITY
prior: PRIOR
solver: SOLVER
"""
OURS = {"FIDELITY": "{name: l2}", "PRIOR": "{name: l1, weight: 0.01}", "SOLVER": "{iterations: 3, step: 0.25}"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Measurements of a blur, where a package offers one of each."""
    offered = {
        kind: (importlib.metadata.EntryPoint(name, __name__, f"halotile.{kind}"),) for kind, name in OFFERED.items()
    }
    found = registry._plug_ins
    monkeypatch.setattr(registry, "_plug_ins", lambda kind: offered.get(kind) or found(kind))
    np.save(tmp_path / "y.npy", noisy_image((EDGE, EDGE)))
    np.save(tmp_path / "k.npy", np.full((3, 3), 1 / 9, np.float32))
    return tmp_path


def job_with(folder: Path, **parts: str) -> Any:
    text = JOB
    for word, part in (OURS | parts).items():
        text = text.replace(word, part)
    (folder / "job.yaml").write_text(text)
    return load_job(folder / "job.yaml")


def image_of(folder: Path, cluster: RunningCluster, **parts: str) -> NDArray[np.float32]:
    run(make_plan(job_with(folder, **parts), fresh=True), cluster=cluster)
    pixels: NDArray[np.float32] = read_zarr(folder / "x.zarr")
    return pixels


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            {"PRIOR": "{name: halves, weight: 0.02}", "FIDELITY": "{name: scaled}"},
            {"FIDELITY": "{name: scaled, factor: 1}"},
        ),
        (
            {"SOLVER": "{name: slowed, part: 0.25, iterations: 3, step: 1.0}"},
            {"SOLVER": "{name: pgd, iterations: 3, step: 0.25}"},
        ),
        thorough(
            {"FIDELITY": "{name: scaled, factor: 4}", "SOLVER": "{iterations: 3, step: 0.0625}"},
            {"FIDELITY": "{name: scaled}", "PRIOR": "{name: l1, weight: 0.0025}"},
        ),
    ],
    ids=["prior", "solver", "fidelity"],
)
def test_options_reach_what_is_named(
    folder: Path, cluster: RunningCluster, theirs: dict[str, str], ours: dict[str, str]
) -> None:
    first, second = image_of(folder, cluster, **theirs), image_of(folder, cluster, **ours)
    np.testing.assert_allclose(first, second, rtol=0, atol=2e-6)
    assert not np.allclose(first, image_of(folder, cluster, SOLVER="{iterations: 1, step: 0.25}"))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"FIDELITY": "{name: scaled, factor: 0}"}, "fidelity.factor: factor is 0"),
        ({"FIDELITY": "{name: scaled, facter: 2}"}, "fidelity.facter: unknown key; did you mean factor?"),
        ({"PRIOR": "{name: halfs}"}, "prior.name: no prior is called halfs; did you mean halves?"),
        ({"SOLVER": "{name: pgd, part: 0.1}"}, "solver.part: is for solver slowed, and the name is pgd"),
        ({"SOLVER": "{name: slowed, part: fast}"}, 'solver.part: "fast" is not a number'),
        (
            {"FIDELITY": "{name: scaled}", "PRIOR": "{name: none}", "SOLVER": "{name: cg}"},
            "scaled with solver cg, which works on l2 alone",
        ),
    ],
)
def test_what_is_wrong_with_them_is_told_as_of_ours(folder: Path, part: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        job_with(folder, **part)


def test_options_are_part_of_the_identity_and_of_the_schema(folder: Path) -> None:
    plans = [
        make_plan(job_with(folder, SOLVER=f"{{name: slowed, part: {part}, iterations: 2}}", **parts))
        for part, parts in (
            (0.5, {}),
            (0.25, {}),
            (0.5, {"PRIOR": "{name: halves}"}),
            (0.5, {"FIDELITY": "{name: scaled, factor: 2}"}),
        )
    ]
    assert len({repr(plan.identity) for plan in plans}) == 4
    (schema,) = [kind for kind in config_schema()["anyOf"] if kind["title"] == "reconstruct"]
    for section, name in (("fidelity", "scaled"), ("prior", "halves"), ("solver", "slowed")):
        assert name in {each["properties"]["name"]["const"] for each in schema["properties"][section]["anyOf"]}


@pytest.mark.parametrize("form", ["choice", "mapping"])
def test_a_denoiser_of_a_prior_is_stored_as_a_file_has_it(folder: Path, form: str) -> None:
    given = {"name": "gaussian", "sigma": 0.7}
    denoiser: Any = given if form == "mapping" else DenoiserChoice(name="gaussian", options={"sigma": 0.7})
    job = job_with(folder, PRIOR="{name: none}")
    job = replace(job, prior=PriorChoice(name="pnp", options={"denoiser": denoiser}))
    assert make_plan(job).documents.asked["prior"] == {"name": "pnp", "denoiser": given}
    with pytest.raises(ConfigError, match="denoiser has no name"):
        make_plan(replace(job, prior=PriorChoice(name="pnp", options={"denoiser": {"name": 7}})))
