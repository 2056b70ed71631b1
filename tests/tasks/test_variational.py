"""Variational inference: dense autograd, the covariance of linear draws, the equation of bent ones, bits on ranks, resume, and coverage of the truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from halotile import posterior
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.groups.shared_memory import SharedMemory
from halotile.tasks.posterior.residuals import Draws, Inference, Linearized

Latent = dict[str, Any]
FIELD = posterior.CorrelatedField((8, 8), offset=2.0, fluctuations=(0.5, 0.2), slope=(-3.0, 0.3))
EXACT: Any = {"sampling": {"tol": 0.0, "steps": 400}, "bending": {"tol": 0.0, "steps": 100, "inner": 400}}


def rate(latent: Latent) -> torch.Tensor:
    """A blurred field, and the same once more on the right."""
    field = FIELD(latent)
    return (field + 0.5 * field.roll(1, -1))[1:, 2:] + 0.1


def truth(seed: int = 3) -> Latent:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(part.shape, generator=generator, dtype=torch.float64) for name, part in FIELD.start().items()
    }


COUNTS = torch.poisson(rate(truth()), generator=torch.Generator().manual_seed(5))
NOISE = torch.linspace(0.5, 3.0, 6, dtype=torch.float64).expand(7, 6)
LIKELIHOODS = {
    "poisson": posterior.Poisson(COUNTS),
    "gaussian": posterior.Gaussian(rate(truth()) + 1, std=NOISE),
    "holes": posterior.Gaussian(torch.where(COUNTS > 20, COUNTS, torch.nan), weights=(COUNTS > 20) * 0.3),
}


def inference(name: str = "poisson", model: Callable[[Latent], torch.Tensor] = rate) -> tuple[Inference, torch.Tensor]:
    """A model and a likelihood, and a position."""
    start = FIELD.start(seed=2)
    shapes = {key: tuple(part.shape) for key, part in start.items()}
    made = Inference(model, LIKELIHOODS[name], shapes, pytree.tree_structure(start))
    return made, torch.cat([part.reshape(-1) for part in start.values()])


def close(found: torch.Tensor, expected: torch.Tensor, tol: float) -> None:
    assert float((found - expected).abs().max()) <= tol * float(expected.abs().max())


def dense(of: Inference, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The Jacobian, and the root of the metric of the data, as matrices."""
    jacobian: Any = torch.autograd.functional.jacobian(lambda x: of.model(of.tree(x)), row)
    root = of.likelihood.metric_root(of.model(of.tree(row)))
    return jacobian.flatten(0, 1), root.flatten()


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_metric_root_and_gradient_are_those_of_dense_autograd(name: str) -> None:
    of, row = inference(name)
    jacobian, root = dense(of, row)
    metric = torch.eye(len(row), dtype=row.dtype) + jacobian.T @ torch.diag(root**2) @ jacobian
    at = Linearized(of, row.expand(len(row), -1))
    eye = torch.eye(len(row), dtype=row.dtype)
    close(at.metric(eye), metric, 1e-12)
    one = Linearized(of, row.expand(len(root), -1))
    white = torch.eye(len(root), dtype=row.dtype).reshape(-1, *one.signal.shape[1:])
    close(one.back(one.root * white), (jacobian * root[:, None]), 1e-12)

    def energy(x: torch.Tensor) -> torch.Tensor:
        return of.likelihood.energy(of.model(of.tree(x))) + x.square().sum() / 2

    (gradient,) = torch.autograd.grad(energy(row.requires_grad_()), row)
    close((one.positions + one.back(one.slopes[1]))[0].detach(), gradient, 1e-12)
    close(one.energies()[0], energy(row).detach(), 1e-14)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_transformations_have_the_root_of_the_metric_as_derivative(name: str) -> None:
    likelihood = LIKELIHOODS[name]
    signal = (1 + COUNTS).requires_grad_()
    (slope,) = torch.autograd.grad(likelihood.transformation(signal).sum(), signal)
    close(slope, likelihood.metric_root(signal).detach(), 1e-14)


class Unit(Draws):
    """Draws from unit vectors in place of white noise: the columns of a root of the covariance."""

    def _white(self, shape: Sequence[int], role: int) -> torch.Tensor:
        eye = torch.eye(len(self.numbers), dtype=self.center.dtype)
        data = len(eye) - len(self.center)
        return (eye[:, data:] if role else eye[:, :data]).reshape(-1, *shape)


def test_linear_draws_have_the_inverse_metric_as_covariance() -> None:
    of, row = inference()
    jacobian, root = dense(of, row)
    kept = torch.ones_like(row)
    draws = Unit(of, row, kept, range(len(root) + len(row)), 0, 0, kept)
    found = draws.linear(**EXACT["sampling"])
    assert torch.equal(found[::2], -found[1::2])
    expected = torch.linalg.inv(torch.eye(len(row), dtype=row.dtype) + jacobian.T @ torch.diag(root**2) @ jacobian)
    close(found[::2].T @ found[::2], expected, 1e-10)


@pytest.mark.parametrize("name", ["poisson", "gaussian"])
def test_bent_draws_solve_their_equation(name: str) -> None:
    of, row = inference(name)
    jacobian, root = dense(of, row)
    draws = Draws(of, row, Linearized(of, row[None]).scale(), range(3), 1, 0, torch.ones_like(row))
    start = draws.linear(tol=1e-5, steps=100)
    found = draws.bent(start, **EXACT["bending"])
    assert float((found - start).abs().max()) > 1e-3

    def transformed(x: torch.Tensor) -> torch.Tensor:
        return of.likelihood.transformation(of.model(of.tree(x))).flatten()

    for number, residual in enumerate(found):
        side = draws._sides[number // 2] * (-1) ** number
        path = jacobian.T @ (root * (transformed(row + residual) - transformed(row)))
        assert float((residual + path - side).abs().max()) <= 1e-8


def options(**others: Any) -> Any:
    return {"iterations": 3, "samples": 3, "chunk": 1, "start": FIELD.start(), "mode": "linear"} | others


def last(likelihood: Any = LIKELIHOODS["poisson"], model: Any = rate, **given: Any) -> posterior.VariationalState:
    *_, state = posterior.optimize_kl(model, likelihood, **options(**given))
    return state


def digits(state: posterior.VariationalState) -> list[Any]:
    """All bits of a state, of the samples of its rank, and of the maps of all."""
    samples = [part.numpy().tobytes() for sample in state.samples for part in sample.values()]
    maps = [part.numpy().tobytes() for part in state.samples.mean_and_std()]
    figures = state.energy, state.reduced_chi2, state.reduced_chi2_latent, state.newton_steps, state.products
    return [*(part.numpy().tobytes() for part in state.mean.values()), figures, maps, samples]


def on_ranks(count: int, function: Callable[[TorchGroup], Any]) -> list[Any]:
    """The results of a function on ranks that are threads of this process."""
    memories = [SharedMemory(rank, count, 60.0) for rank in range(count)]
    addresses = [memory.address for memory in memories]
    for memory in memories:
        memory.open(addresses)
    for memory in memories:
        memory.close_given()
    groups = [TorchGroup(rank, count, shared=memory) for rank, memory in enumerate(memories)]
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(function, groups))
    for memory in memories:
        memory.close()
    return found


VARYING: Any = {
    "samples": lambda i: (2, 3, 3)[i],
    "mode": lambda i: ("linear", "geometric", "geometric")[i],
    "redraw": lambda i: ("new", "same", "update")[i],
    "minimizing": lambda i: {"steps": 2 + i, "tol": lambda i: 1e-3 / (i + 1)},
    "bending": {"steps": 2},
}


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    return digits(last(**VARYING))


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_any_number_of_ranks_gives_the_same_bits(ranks: int, alone: list[Any]) -> None:
    found = on_ranks(ranks, lambda group: digits(last(group=group, **VARYING)))
    assert [each[:-1] for each in found] == [alone[:-1]] * ranks
    assert [part for each in found for part in each[-1]] == alone[-1]
