"""Operators, priors, fidelities and solvers of the user's own: allowed, tried before the job, and with options that a job writes beside their names."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from halotile import registry
from halotile.cli.config.loading import load_job
from halotile.cli.config.schema import config_schema
from halotile.errors import ConfigError, MemoryRefused
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.reconstruct import measurements
from halotile.graphs.jobs.reconstruct.job import OperatorChoice, Reconstruction, SolverChoice
from halotile.graphs.jobs.simulate.job import NoiseChoice, simulation_of
from halotile.graphs.kinds.sections import Output, Run
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.graphs.solvers.base import Problem, ReadVector, State, Step
from halotile.graphs.solvers.pgd import ProximalGradient
from halotile.storage.rim import Readable
from halotile.tasks.fidelities.l2 import L2
from halotile.tasks.options import check_above_zero
from halotile.tasks.priors.l1 import Sparse
from tests.support import noisy_image, read_zarr, write_zarr

SHAPE = (96, 80)
CODE = '''
import os
from dataclasses import dataclass
import numpy as np
from halotile.tasks.operators.base import Derived, InMemory, read_all

@dataclass(frozen=True)
class Times(Derived):
    ripple: float
    last_row: float = 1.0
    def read(self, region):
        columns = np.arange(region.start[-1], region.stop[-1])
        gains = np.tile(1 + self.ripple * np.cos(columns), (region.shape[-2], 1))
        if region.stop[-2] == self.shape[-2]:
            gains[-1] *= self.last_row
        return (self.image.read(region) * gains).astype(self.dtype)

@dataclass
class Columns:
    ripple: float = 0.3
    kind, reach, name, last_row = "local", 0, "columns", 1.0
    def measured(self, image):
        return image
    def forward(self, image):
        return Times(image, self.ripple)
    def adjoint(self, measurement, image):
        return Times(measurement, self.ripple, self.last_row)

class Twice(Columns):
    adjoint = lambda self, measurement, image: Times(measurement, 2 * self.ripple)

class AtTheRim(Columns):
    """Wrong in the last row alone."""
    last_row = 0.5

class Failing(Columns):
    forward = lambda self, image: InMemory(np.ones((2, 2)) / None)

class Narrower(Columns):
    adjoint = lambda self, measurement, image: InMemory(np.ones((3, 3)))

class Turned(Columns):
    """Needs all of the image."""
    kind = "whole"
    forward = lambda self, image: InMemory(2 * read_all(image)[::-1])
    adjoint = lambda self, measurement, image: self.forward(measurement)

class Hungry(Columns):
    forward = lambda self, image: InMemory(np.ones((2**16, 2**16)))

class Leaving(Columns):
    forward = lambda self, image: os._exit(3)

class Nothing:
    pass
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Code beside the data, under a name that no other test has imported."""
    name = f"own_ops_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def job_with(folder: Path, *operators: dict[str, Any], **changes: Any) -> Reconstruction:
    """A job for operators, each with measurements of its own unless they are there."""
    choices = []
    if not (folder / "truth.zarr").exists():
        write_zarr(folder / "truth.zarr", np.ones(SHAPE, "float32"))
    for number, written in enumerate(operators):
        data = folder / f"y{number}.zarr"
        if not data.exists():
            write_zarr(data, np.random.default_rng(number).random(SHAPE).astype("float32"))
        name, options = written["name"], {key: value for key, value in written.items() if key != "name"}
        choices.append(OperatorChoice(name=name, data=str(data), options=options))
    job = Reconstruction(
        output=Output(path=str(folder / "x.zarr"), shard=32, chunk=16),
        operators=tuple(choices),
        solver=SolverChoice(name="cg", iterations=12),
        reference=str(folder / "truth.zarr"),
        run=Run(workers=2, memory_per_worker="3GiB"),
        allow_import=True,
        import_folder=str(folder),
    )
    return replace(job, **changes)


def own(module: str, name: str, **options: Any) -> dict[str, Any]:
    return {"name": "own", "import": f"{module}:{name}", "options": options}


@pytest.mark.parametrize("nested", [False, True])
def test_code_of_ones_own_needs_to_be_allowed(tmp_path: Path, module: str, nested: bool) -> None:
    written = own(module, "Columns")
    job = job_with(tmp_path, {"name": "composition", "operators": [written]} if nested else written, allow_import=False)
    with pytest.raises(ConfigError, match=rf"operator own runs code of your own \({module}:Columns\).*--allow"):
        make_plan(job)
    with pytest.raises(ConfigError, match="--allow-import"):
        make_plan(simulation_of(job, NoiseChoice(), overwrite=True))
    assert module not in sys.modules


def test_an_operator_that_is_none_is_refused_in_words_and_tried_apart(tmp_path: Path, module: str) -> None:
    rows: list[tuple[str, dict[str, Any], str]] = [
        ("Twice", {}, r"<A x, y> is \S+ and <x, A\^T y> \S+, a relative difference of 0\.\d+"),
        ("AtTheRim", {}, "a relative difference of"),
        ("Failing", {}, "were tried on an image of shape .* and failed: TypeError"),
        ("Narrower", {}, r"the result has shape \[3, 3\]"),
        ("Columns", {"width": 3}, "failed: TypeError: .*width"),
        ("Nothing", {}, "without kind and reach and measured and forward and adjoint"),
        ("Missing", {}, "has no attribute 'Missing'"),
        ("Leaving", {}, r"^operators\[0\] \(\w+:Leaving\) ended its process with exit code 3 while it was tried"),
        ("Hungry", {}, r"memory_per_worker is 3 GiB, and operators\[0\] \(\w+:Hungry\) needs more than that to be"),
    ]
    for name, options, message in rows:
        with pytest.raises(MemoryRefused if name == "Hungry" else ConfigError, match=message) as caught:
            make_plan(job_with(tmp_path, own(module, name, **options)))
        assert "operators[0]" in str(caught.value)


BLUR = {"name": "blur", "kernel": np.ones((3, 3)) / 9}


def test_a_wrong_part_of_a_composition_is_refused_and_a_whole_that_is_too_large_to_be_tried_noted(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_with(tmp_path, {"name": "composition", "operators": [BLUR, own(module, "Twice")]})
    with pytest.raises(ConfigError, match=r"operators\[0\] \(composition\): adjoint is not"):
        make_plan(job)
    monkeypatch.setattr(measurements, "TRIED", 100)
    plan = make_plan(job_with(tmp_path, own(module, "Turned")))
    assert any("too large to check that its adjoint" in note for note in plan.notes)
    path = tmp_path / f"{module}.py"
    path.write_text(path.read_text() + "\nCHANGED = True\n")
    after = make_plan(job_with(tmp_path, own(module, "Turned")))
    assert after.fingerprint != plan.fingerprint, "code that changed is another job"


@pytest.mark.parametrize("boundary", ["circular", "zero", "replicate"])
@pytest.mark.parametrize("edges", [(97, 3), (3, 81), (3, 21)])
def test_a_kernel_larger_than_its_image_is_refused(tmp_path: Path, boundary: str, edges: tuple[int, int]) -> None:
    """The image of a kernel behind another operator is smaller."""
    blur = {"name": "blur", "kernel": np.ones(edges) / np.prod(edges), "boundary": boundary}
    image = "96 × 80"
    if edges == (3, 21):
        image = "24 × 20"
        write_zarr(tmp_path / "y0.zarr", np.ones((24, 20), "float32"))
        smaller = {"name": "downsample", "factor": 4, "boundary": "reflect"}
        blur = {"name": "composition", "operators": [smaller, blur]}
    job = job_with(tmp_path, blur, shape=SHAPE)
    for each in (job, simulation_of(job, NoiseChoice(), overwrite=True)):
        with pytest.raises(ConfigError, match=f"the kernel is {edges[0]} × {edges[1]} and its image {image}"):
            make_plan(each)


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
        return super().slope(seen, measured) * seen.dtype.type(self.factor)  # type: ignore[no-any-return]


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
    entry = importlib.metadata.EntryPoint
    offered = {kind: (entry(name, __name__, f"halotile.{kind}"),) for kind, name in OFFERED.items()}
    found = registry._plug_ins
    monkeypatch.setattr(registry, "_plug_ins", lambda kind: offered.get(kind) or found(kind))
    np.save(tmp_path / "y.npy", noisy_image((EDGE, EDGE)))
    np.save(tmp_path / "k.npy", np.full((3, 3), 1 / 9, np.float32))
    return tmp_path


def parts_job(folder: Path, **parts: str) -> Any:
    (folder / "job.yaml").write_text(re.sub(r"\b[A-Z]+\b", lambda word: (OURS | parts)[word[0]], JOB))
    return load_job(folder / "job.yaml")


def image_of(folder: Path, cluster: RunningCluster, **parts: str) -> NDArray[np.float32]:
    run(make_plan(parts_job(folder, **parts), fresh=True), cluster=cluster)
    return read_zarr(folder / "x.zarr")


def test_options_reach_what_is_named(folder: Path, cluster: RunningCluster) -> None:
    theirs = {"FIDELITY": "{name: scaled, factor: 4}", "PRIOR": "{name: halves, weight: 0.08}"}
    theirs |= {"SOLVER": "{name: slowed, part: 0.25, iterations: 3, step: 0.25}"}
    ours = {"FIDELITY": "{name: scaled}", "SOLVER": "{name: pgd, iterations: 3, step: 0.25}"}
    first, second = image_of(folder, cluster, **theirs), image_of(folder, cluster, **ours)
    np.testing.assert_allclose(first, second, rtol=0, atol=2e-6)
    assert not np.allclose(first, image_of(folder, cluster, SOLVER="{iterations: 1, step: 0.25}"))


def test_what_is_wrong_with_them_is_told_as_of_ours(folder: Path) -> None:
    wrong: list[tuple[dict[str, str], str]] = [
        ({"FIDELITY": "{name: scaled, factor: 0}"}, "fidelity.factor: factor is 0"),
        ({"FIDELITY": "{name: scaled, facter: 2}"}, "fidelity.facter: unknown key; did you mean factor?"),
        ({"PRIOR": "{name: halfs}"}, "prior.name: no prior is called halfs; did you mean halves?"),
        ({"SOLVER": "{name: pgd, part: 0.1}"}, "solver.part: is for solver slowed, and the name is pgd"),
        ({"SOLVER": "{name: slowed, part: fast}"}, 'solver.part: "fast" is not a number'),
        ({"FIDELITY": "{name: scaled}", "PRIOR": "{name: none}", "SOLVER": "{name: cg}"}, "cg, which works on l2"),
    ]
    for part, words in wrong:
        with pytest.raises(ConfigError, match=words):
            parts_job(folder, **part)


def test_options_are_part_of_the_identity_and_of_the_schema(folder: Path) -> None:
    slowed = {"SOLVER": "{name: slowed, part: 0.5, iterations: 2}"}
    changes: tuple[dict[str, str], ...] = ({}, {"PRIOR": "{name: halves}"}, {"FIDELITY": "{name: scaled, factor: 2}"})
    changes += ({"SOLVER": "{name: slowed, part: 0.25, iterations: 2}"},)
    plans = [make_plan(parts_job(folder, **slowed | change)) for change in changes]
    assert len({repr(plan.identity) for plan in plans}) == 4
    (schema,) = [kind for kind in config_schema()["anyOf"] if kind["title"] == "reconstruct"]
    for section, name in (("fidelity", "scaled"), ("prior", "halves"), ("solver", "slowed")):
        assert name in {each["properties"]["name"]["const"] for each in schema["properties"][section]["anyOf"]}
