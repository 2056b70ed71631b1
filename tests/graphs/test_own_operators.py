"""Operators of the user's own: imported where that is allowed, tried before the job, and kernels that fit their image."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halotile.errors import ConfigError, MemoryRefused
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.reconstruct import measurements
from halotile.graphs.jobs.reconstruct.job import OperatorChoice, Reconstruction, SolverChoice
from halotile.graphs.jobs.simulate.job import NoiseChoice, simulation_of
from halotile.graphs.kinds.sections import Output, Run
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run as reconstruct
from tests.support import read_zarr, write_zarr

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
        options = {key: value for key, value in written.items() if key != "name"}
        choices.append(OperatorChoice(name=written["name"], data=str(data), options=options))
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


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Twice", {}, r"<A x, y> is \S+ and <x, A\^T y> \S+, a relative difference of 0\.\d+"),
        ("AtTheRim", {}, "a relative difference of"),
        ("Failing", {}, "were tried on an image of shape .* and failed: TypeError"),
        ("Narrower", {}, r"the result has shape \[3, 3\]"),
        ("Columns", {"width": 3}, "failed: TypeError: .*width"),
        ("Nothing", {}, "without kind and reach and measured and forward and adjoint"),
        ("Missing", {}, "has no attribute 'Missing'"),
        ("Leaving", {}, r"^operators\[0\] \(\w+:Leaving\) ended its process with exit code 3 while it was tried"),
        ("Hungry", {}, r"memory_per_worker is 3 GiB, and operators\[0\] \(\w+:Hungry\) needs more than that to be tried"),
    ],
)  # fmt: skip
def test_an_operator_that_is_none_is_refused_in_words_and_tried_apart(
    tmp_path: Path, module: str, name: str, options: dict[str, Any], message: str
) -> None:
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


@pytest.mark.thorough
@pytest.mark.cluster
def test_own_operators_near_and_far_are_inverted(tmp_path: Path, module: str, cluster: RunningCluster) -> None:
    truth = np.random.default_rng(1).random(SHAPE).astype("float32")
    gains = 1 + 0.3 * np.cos(np.arange(SHAPE[1]))
    write_zarr(tmp_path / "y0.zarr", (truth * gains).astype("float32"))
    write_zarr(tmp_path / "y1.zarr", (2 * truth[::-1]).astype("float32"))
    job = job_with(tmp_path, own(module, "Columns"), own(module, "Turned"))
    reconstruct(make_plan(job), cluster=cluster)
    assert np.abs(read_zarr(tmp_path / "x.zarr") - truth).max() < 1e-3


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
