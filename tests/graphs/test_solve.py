"""Reconstructions from Python: in the words of a job file, from any folder, with functions of one's own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import halotile
from halotile.errors import ConfigError, InputError
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.reconstruct.job import OperatorChoice
from halotile.graphs.plans.plan import Plan
from halotile.graphs.runs import driver
from halotile.graphs.runs.driver import run as reconstruct
from halotile.tasks.operators.blur import Blur
from tests.graphs.solving import kernel
from tests.support import read_zarr


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OperatorChoice:
    """A blurred image, named as a script in its folder would."""
    monkeypatch.chdir(tmp_path)
    np.save("y.npy", np.random.default_rng(0).random((64, 48), np.float32))
    np.save("psf.npy", kernel(3))
    return halotile.measurement("blur", "y.npy", kernel="psf.npy", noise_sigma=0.1)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, cluster: RunningCluster) -> list[Plan]:
    """The plans that are run, on the cluster that stands."""
    made: list[Plan] = []

    def run(plan: Plan, **options: Any) -> Any:
        made.append(plan)
        return reconstruct(plan, **options | {"cluster": cluster})

    monkeypatch.setattr(driver, "run", run)
    return made


@pytest.mark.cluster
def test_a_job_from_python_keeps_whole_paths_from_the_folder_of_the_script(
    tmp_path: Path, seen: OperatorChoice, plans: list[Plan]
) -> None:
    psf = str(tmp_path / "psf.npy")
    assert (seen.data, seen.options) == (str(tmp_path / "y.npy"), {"kernel": psf})
    parts = [{"name": "blur", "kernel": "psf.npy"}, {"name": "downsample"}]
    assert halotile.measurement("composition", "y.npy", operators=parts).options["operators"][0]["kernel"] == psf
    solver = {"name": "pgd", "iterations": 1, "step": 0.01}
    outcome = halotile.reconstruct([seen], "x.zarr", solver=solver, reference="y.npy", start="y.npy")
    assert outcome.output == str(tmp_path / "x.zarr")
    kept = json.loads((tmp_path / "x.zarr.run/job.json").read_text())
    assert {kept["reference"], kept["start"], kept["operators"][0]["data"]} == {seen.data}
    assert plans[0].job.solver.iterations == 1


@pytest.mark.cluster
@pytest.mark.usefixtures("plans")
def test_a_lambda_is_a_prior(seen: OperatorChoice) -> None:
    strength = 0.5
    denoiser = {"name": "function", "call": lambda image: strength * image, "depth": 0}
    solver = {"name": "pgd", "iterations": 2, "step": 0.01}
    outcome, again = (
        halotile.reconstruct([seen], "x.zarr", prior={"name": "pnp", "denoiser": denoiser}, solver=solver)
        for _ in range(2)
    )
    assert outcome.figures["iteration"] == 2
    assert again.resumed == again.total


@pytest.mark.cluster
@pytest.mark.usefixtures("seen", "plans")
def test_operators_that_give_0_for_every_image_are_told_before_the_first_iteration() -> None:
    dark = halotile.measurement("sum", "y.npy", operators=[{"name": "blur", "kernel": "psf.npy"}], weights=[0.0])
    with pytest.raises(ConfigError, match="the operators give 0 for every image"):
        halotile.reconstruct([dark], "x.zarr", solver={"name": "pgd", "iterations": 2})
    for solver in ({"name": "pgd", "iterations": 2, "step": 0.1}, {"name": "cg", "iterations": 2}):
        outcome = halotile.reconstruct([dark], f"{solver['name']}.zarr", solver=solver)
        assert not read_zarr(outcome.output).any()  # what it began with


@pytest.mark.cluster
@pytest.mark.usefixtures("plans")
def test_a_map_of_the_noise_weighs_pixels_and_its_holes_are_not_read(seen: OperatorChoice) -> None:
    y, sigma = np.load("y.npy"), np.where(np.arange(48) < 24, 0.1, 0.2) * np.ones((64, 1))
    hole = np.zeros(y.shape, bool)
    hole[20:30, 10:22] = True
    np.save("sigma.npy", np.where(hole, 0, sigma))
    np.save("weights.npy", np.where(hole, 0, 0.1 / sigma))
    np.save("holed.npy", np.where(hole, np.nan, y))
    np.save("weighted.npy", np.where(hole, 0, y * 0.1 / sigma))
    mapped = halotile.measurement("blur", "holed.npy", kernel="psf.npy", noise_sigma="sigma.npy")
    parts = [{"name": "blur", "kernel": "psf.npy"}, {"name": "mask", "mask": "weights.npy"}]
    masked = halotile.measurement("composition", "weighted.npy", operators=parts, noise_sigma=0.1)
    prior, solver = {"name": "tv", "weight": 5.0}, {"name": "fista", "iterations": 8}
    found, expected = (
        read_zarr(halotile.reconstruct([each], f"{name}.zarr", prior=prior, solver=solver).output)
        for name, each in (("a", mapped), ("b", masked))
    )
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    for words, choice, fidelity in (
        (r"noise_sigma: auto is for job: samples; write", replace(seen, noise_sigma="auto"), "l2"),
        (r"is a map, and fidelity poisson has none; write a number", mapped, "poisson"),
    ):
        with pytest.raises(ConfigError, match=words):
            halotile.reconstruct([choice], "c.zarr", fidelity=fidelity, start="y.npy")
    with pytest.raises(ConfigError, match="noise is simulated with one level; write a number"):
        halotile.simulate([replace(mapped, data="z.zarr")], "y.npy")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prior": {"name": "tv", "wieght": 3}}, "prior.wieght: unknown key; did you mean weight"),
        ({"prior": 3}, "prior is 3: that is neither a name nor a mapping"),
        ({"prior": "pnp"}, "prior pnp: write denoiser, which has no default. denoiser is a denoiser: {name: dncnn"),
        ({"prior": {"name": "pnp", "denoiser": "tv"}}, "denoiser is 'tv', without its options"),
        ({"prior": {"name": "pnp", "denoiser": {"size": 3}}}, "denoiser has no name"),
        ({"prior": {"name": "pnp", "denoiser": {"call": np.sort}}}, "a function needs depth"),
        ({"solver": "newton"}, "solver.name: no solver is called newton"),
        ({"solver": {"name": "pgd", "iterations": 0}}, "solver.iterations: 0 is too small"),
        ({"fidelity": {"name": "l2", "background": 3.0}}, "fidelity.background: is for fidelity poisson"),
        ({"workers": 0}, "run.workers: 0 is too small"),
        ({"reference": "gone.npy"}, "gone.npy: nothing is there"),
        ({"shape": 3}, "shape: 3 is not auto or a list of whole numbers"),
        ({"measurements": "y.npy"}, 'measurements is "y.npy": that is no list of measurements. Write [halotile.measurement('),
        ({"measurements": OperatorChoice(name="blur", data="y.npy")}, "that is no list of measurements. Write [halotile.measurement("),
        ({"shape": (9, 9)}, "y.npy has shape [64, 48], but blur of an image of shape [9, 9] gives [9, 9]"),
    ],
)  # fmt: skip
def test_words_that_cannot_be_are_refused(seen: OperatorChoice, options: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, InputError)) as caught:
        halotile.reconstruct(**{"measurements": [seen], "output": "x.zarr"} | options)
    assert words in str(caught.value)
    assert not Path("x.zarr").exists()


@pytest.mark.parametrize(
    ("operator", "given", "words"),
    [
        ("blurr", {}, "blurr"),
        ("blur", {"kernle": 3}, "operator blur has no option 'kernle'"),
        ("blur", {}, "write kernel, which has no default"),
        ("blur", {"kernel": "gone.npy"}, "gone.npy: nothing is there"),
        ("blur", {"kernel": [[np.nan]]}, "kernel has 1 of 1 numbers that are NaN or infinite"),
        (Blur(kernel=np.ones((1, 1))), {"boundary": "zero"}, "boundary is given beside an operator"),
        (3, {}, "operator is 3: that is neither a name nor an operator"),
        (torch.nn.Identity(), {}, "that is neither a name nor an operator, nor a physics of deepinv. Write a name"),
    ],
    ids=str,
)
def test_a_measurement_that_cannot_be_is_refused(operator: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, InputError)) as caught:
        halotile.measurement(operator, "y.zarr", **given)
    assert words in str(caught.value)


def test_a_physics_of_deepinv_is_an_operator_and_data_have_to_be_a_path(seen: OperatorChoice) -> None:
    physics = pytest.importorskip("deepinv.physics")
    mri = physics.MRI(img_size=(2, 8, 8))
    made = halotile.measurement(mri, "y.zarr", noise_sigma=0.1, reach=2)
    assert (made.name, made.options) == ("deepinv", {"physics": mri, "reach": 2})
    calls: list[tuple[Any, str]] = [
        (lambda: halotile.measurement(mri, "y.zarr", raech=2), "operator deepinv has no option 'raech'"),
        (lambda: halotile.measurement("blur", np.ones((3, 3)), kernel=[[1.0]]), "data is of type ndarray, and the work goes from disk"),  # type: ignore[arg-type]
        (lambda: halotile.simulate(seen, "y.npy"), r"that is no list of measurements\. Write \[halotile\.measurement\("),  # type: ignore[arg-type]
    ]  # fmt: skip
    for made_of, words in calls:
        with pytest.raises(ConfigError, match=words):
            made_of()
