"""Variational inference: dense autograd, the covariance of linear draws, the equation of bent ones, bits on ranks, resume, and coverage of the truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from halotile import posterior
from halotile.errors import ConfigError, DamagedData, Diverged, HalotileError, InputError
from halotile.storage.disk.durable import DISK, Disk
from halotile.tasks.groups.group import SharedMemory, TorchGroup
from halotile.tasks.posterior.residuals import Draws, Inference, Linearized
from tests.tasks.poisson_field import transfer

Latent = dict[str, Any]
FIELD = posterior.CorrelatedField((8, 8), 2.0, zero_mode=(1.0, 0.3), fluctuations=(0.5, 0.2), slope=(-3.0, 0.3))
EXACT: Any = {"sampling": {"tol": 0.0, "steps": 400}, "bending": {"tol": 0.0, "steps": 100, "inner": 400}}


def rate(latent: Latent) -> torch.Tensor:
    """A blurred field, and the same once more on the right."""
    field = FIELD(latent)
    return (field + 0.5 * field.roll(1, -1))[1:, 2:] + 0.1


def truth(seed: int = 3) -> Latent:
    generator = torch.Generator().manual_seed(seed)
    start, double = FIELD.start(), torch.float64
    return {name: torch.randn(part.shape, generator=generator, dtype=double) for name, part in start.items()}


COUNTS = torch.poisson(rate(truth()), generator=torch.Generator().manual_seed(5))
NOISE = torch.linspace(0.5, 3.0, 6, dtype=torch.float64).expand(7, 6)
LIKELIHOODS: dict[str, Any] = {
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
def test_metric_root_gradient_and_the_slope_of_the_transformation_are_those_of_dense_autograd(name: str) -> None:
    of, row = inference(name)
    jacobian, root = dense(of, row)
    metric = torch.eye(len(row), dtype=row.dtype) + jacobian.T @ torch.diag(root**2) @ jacobian
    close(Linearized(of, row.expand(len(row), -1)).metric(torch.eye(len(row), dtype=row.dtype)), metric, 1e-12)
    one = Linearized(of, row.expand(len(root), -1))
    white = torch.eye(len(root), dtype=row.dtype).reshape(-1, *one.signal.shape[1:])
    close(one.back(one.root * white), (jacobian * root[:, None]), 1e-12)

    def energy(x: torch.Tensor) -> torch.Tensor:
        return of.likelihood.energy(of.model(of.tree(x))) + x.square().sum() / 2

    (gradient,) = torch.autograd.grad(energy(row.requires_grad_()), row)
    close((one.positions + one.back(one.slopes[1]))[0].detach(), gradient, 1e-12)
    close(one.energies()[0], energy(row).detach(), 1e-14)
    signal = (1 + COUNTS).requires_grad_()
    (slope,) = torch.autograd.grad(of.likelihood.transformation(signal).sum(), signal)
    close(slope, of.likelihood.metric_root(signal).detach(), 1e-14)


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
    found = Unit(of, row, kept, range(len(root) + len(row)), 0, 0, kept).linear(**EXACT["sampling"])
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


def check_ranks(ranks: int, alone: list[Any], **given: Any) -> None:
    """Assert that ranks have the bits of one alone: all maps and figures, and together its samples."""
    found = on_ranks(ranks, lambda group: digits(last(group=group, **given)))
    assert [each[:-1] for each in found] == [alone[:-1]] * ranks
    assert [part for each in found for part in each[-1]] == alone[-1]


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


pytestmark = pytest.mark.filterwarnings("ignore:iteration .* do not reach the tolerance:UserWarning")


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    return digits(last(**VARYING))


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_any_number_of_ranks_gives_the_same_bits_with_few_pairs_too(ranks: int, alone: list[Any]) -> None:
    check_ranks(ranks, alone, **VARYING)
    for pairs in (0, 1) if ranks < 5 else ():
        given = options(samples=pairs, iterations=1)
        expected = digits(last(**given))[:-1]
        for found in on_ranks(ranks, lambda group: digits(last(group=group, **given))):  # noqa: B023 - called at once
            assert found[:-1] == expected


def test_without_samples_the_mean_is_the_maximum_of_the_posterior() -> None:
    state = last(samples=0, iterations=1, minimizing={"tol": 0.0, "steps": 50})
    of, _ = inference()
    point = Linearized(of, torch.cat([part.reshape(-1) for part in state.mean.values()])[None])
    assert float((point.positions.detach() + point.back(point.slopes[1])).abs().max()) < 1e-4
    assert (len(state.samples), float(state.samples.mean_and_std()[1].max())) == (1, 0)


class Killed(Exception):
    """The end of a process, at the worst moment."""


@pytest.mark.parametrize(("writes", "ranks"), [(2, 2), (5, 1), (5, 2), (8, 2)])
def test_killed_it_goes_on(writes: int, ranks: int, alone: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """It ends before a file is written: of a batch, or the record that names them."""
    left, write = [writes], type(DISK).write_file

    def interrupted(disk: Disk, *given: Any, **options: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return write(disk, *given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(type(DISK), "write_file", interrupted)
        with pytest.raises(Killed):
            last(folder=tmp_path, **VARYING)
    check_ranks(ranks, alone, folder=tmp_path, **VARYING)
    assert digits(last(folder=tmp_path, **VARYING)) == alone  # nothing is left to do
    batches = [f"samples-00003-0000{batch}.safetensors" for batch in range(3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*batches, "state.json"]


def test_further_iterations_continue_a_finished_run(tmp_path: Path) -> None:
    last(iterations=1, folder=tmp_path)
    copy = tmp_path / "samples-00001-00000.safetensors.bak"
    copy.write_bytes(b"of the user")
    states = list(posterior.optimize_kl(rate, LIKELIHOODS["poisson"], **options(iterations=3, folder=tmp_path)))
    assert [state.iteration for state in states] == [2, 3]
    assert copy.exists()
    assert digits(states[-1]) == digits(last(iterations=3))


def test_the_spectrum_of_a_field_is_written(tmp_path: Path) -> None:
    likelihood = posterior.Poisson(torch.poisson(FIELD(truth()), generator=torch.Generator().manual_seed(5)))
    on_ranks(2, lambda group: last(likelihood, FIELD, folder=tmp_path, iterations=2, group=group))
    head, *lines = (tmp_path / "spectrum.csv").read_text().splitlines()
    numbers, powers, deviations = np.array([line.split(",") for line in lines], float).T
    assert (head, numbers.tolist()) == ("wave number,power,std", [1, 2, 3, 4])
    slopes = np.diff(np.log(powers)) / np.diff(np.log(numbers))
    assert np.abs(slopes + 3).max() < 1  # the slope of the prior, and its deviation of 0.3
    assert (deviations > 0).all()


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"samples": 2}, r"samples is 3 there in iteration 0, and 2 here\. Write what is there, or another folder"),
    ({"samples": lambda i: 3 - i}, "samples is 3 there in iteration 1, and 2 here"),
    ({"seed": 1}, "seed is 0 there, and 1 here"),
    ({"chunk": 2}, "chunk is 1 there, and 2 here"),
    ({"mode": "geometric"}, "mode is 'linear' there"),
    ({"minimizing": {"steps": 3}}, "minimizing is .* there in iteration 0"),
    ({"constants": ["slope"]}, r"constants is \[\] there, and \['slope'\] here"),
    ({"start": FIELD.start(seed=9)}, "checksum of the start is"),
    ({"model": lambda latent: 1.01 * rate(latent)}, "figures of model and data is"),
    ({"likelihood": posterior.Poisson(COUNTS + 1)}, "checksums of the data is"),
    ({"likelihood": posterior.Poisson(COUNTS.flip(0))}, "checksums of the data is"),
    ({"model": lambda at: rate(at) + 50 * at["slope"] ** 2}, "figures of model and data is"),  # 0 at the start
    ({"vmap": False}, "vmap is True there, and False here"),
    ({"iterations": 1}, r"has 2 iterations\. Write as many or more"),
]


def test_another_run_is_refused_by_what_differs(tmp_path: Path) -> None:
    last(iterations=2, folder=tmp_path)
    for given, message in OTHERS:
        with pytest.raises(ConfigError, match=message):
            last(**{"iterations": 2, "folder": tmp_path, **given})


def test_damaged_files_and_a_record_of_another_program_are_refused(tmp_path: Path) -> None:
    last(iterations=1, folder=tmp_path)
    file = tmp_path / "samples-00001-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(DamagedData, match="is damaged or missing"):
        last(iterations=2, folder=tmp_path)
    for content in ("{}", '{"iteration": 3}'):
        (tmp_path / "state.json").write_text(content)
        with pytest.raises(DamagedData, match=r"state\.json has no .*: it is damaged, or of another program"):
            last(folder=tmp_path)


def test_a_folder_that_some_ranks_do_not_see_and_other_arguments_of_a_rank_are_refused_on_all(tmp_path: Path) -> None:
    last(iterations=2, folder=tmp_path / "0")

    def refusal(group: TorchGroup, **given: Any) -> str:
        with pytest.raises(ConfigError) as refused:
            last(group=group, **given)
        return str(refused.value)

    for message in on_ranks(2, lambda group: refusal(group, folder=tmp_path / str(group.rank))):
        assert "is not the same for all ranks: rank 1 sees iteration 0, rank 0 iteration 2. Write a folder" in message
    for message in on_ranks(2, lambda group: refusal(group, seed=group.rank)):
        assert message == "rank 1 has other arguments than rank 0. Write the same on all ranks."


@pytest.mark.parametrize(
    ("given", "name"),
    [({"sampling": {"steps": 2}}, "sampling"), ({"mode": "geometric", "bending": {"steps": 1}}, "bending")],
)
def test_samples_that_do_not_reach_their_tolerance_are_counted(given: dict[str, Any], name: str) -> None:
    for ranks in (1, 2):
        with pytest.warns(UserWarning, match=rf"iteration 1: 6 of 6 samples do not .* {name}={{'tol': 0.002, 'steps'"):
            found = on_ranks(ranks, lambda group: last(iterations=1, group=group, **given).unfinished)
        assert found == [6] * ranks
    assert last(iterations=1).unfinished == 0


def test_callers_may_change_what_they_get_and_functions_may_be_complex_or_whole() -> None:
    def callback(state: posterior.VariationalState) -> None:
        state.samples.mean_and_std(lambda latent: latent["white"].zero_())
        state.mean["white"].zero_()

    expected = last()
    assert last(callback=callback).energy == expected.energy
    start = FIELD.start()
    start["slope"] += 1
    assert float(start["zero_mode"]) == 0
    mean, std = expected.samples.mean_and_std(lambda latent: latent["slope"])
    torch.testing.assert_close(expected.samples.mean_and_std(lambda latent: 1j * latent["slope"]), (1j * mean, std))
    share, spread = expected.samples.mean_and_std(lambda latent: latent["white"] > 0)
    assert share.dtype == spread.dtype == torch.float64
    torch.testing.assert_close(spread, (share * (1 - share)).sqrt())


def test_data_of_any_kind(tmp_path: Path) -> None:
    """Counts of other bytes, numbers without dimensions, short ones, an empty part, options of other types."""
    start = {"x": torch.zeros(3), "none": torch.zeros(0)}
    common: Any = {"start": start, "samples": 1, "sampling": {"tol": np.float32(0.001), "steps": 1e2}}
    plain: Any = [1, 2, 3]

    def energies(likelihood: Any, model: Any, **given: Any) -> list[float]:
        return on_ranks(2, lambda group: last(likelihood, model, group=group, **common, **given).energy)

    kinds = plain, np.array(plain, np.uint16), np.array(plain, ">f4"), torch.tensor(plain)
    found = set()
    for number, counts in enumerate(kinds):
        for iterations in (1, 2):
            given = {"iterations": iterations, "folder": tmp_path / str(number)}
            last_ones = energies(posterior.Poisson(counts), lambda x: x["x"].exp(), **given)
        found |= {*last_ones}
    assert len(found) == 1
    energies(posterior.Gaussian(2.0, std=1.0), lambda x: x["x"].sum())
    energies(posterior.Gaussian(torch.arange(3, dtype=torch.float32), std=1.0), lambda x: x["x"], dtype=torch.float32)


def bad(**given: Any) -> Callable[[], object]:
    return lambda: last(**given)


BAD: list[tuple[Callable[[], object], type[HalotileError], str]] = [
    (lambda: posterior.Gaussian([1.0, torch.nan], std=1.0), InputError, r"nan at \[1\].* std=inf or weights=0"),
    (lambda: posterior.Gaussian([1.0], std=0.0), ConfigError, "not above 0"),
    (lambda: posterior.Gaussian([1.0], std=torch.nan), ConfigError, "not above 0"),
    (lambda: posterior.Gaussian([1.0], weights=-1.0), ConfigError, "below 0"),
    (lambda: posterior.Gaussian([1.0]), ConfigError, "Write one of them"),
    (lambda: posterior.Gaussian([1.0], std=[1.0, 2.0]), ConfigError, r"noise has shape \[2\], and the data \[1\]"),
    (lambda: posterior.Poisson([[3, -1]]), InputError, r"-1 at \[0, 1\].* counts of 0 or more"),
    (lambda: posterior.Poisson([torch.nan]), InputError, r"nan at \[0\]"),
    (lambda: posterior.CorrelatedField((1,)), ConfigError, "two pixels or more"),
    (lambda: posterior.CorrelatedField((8,), fluctuations=(0.0, 1.0)), ConfigError, "above 0"),
    (bad(likelihood=posterior.Poisson(COUNTS[1:])), ConfigError, r"shapes \[\[7, 6\], \[6, 6\], \[7, 6\]\]"),
    (bad(model=lambda latent: rate(latent) - 1e3), ConfigError, "not finite at the start"),
    (bad(model=lambda latent: rate(latent).detach()), ConfigError, "Use torch in the model"),
    (bad(model=lambda latent: rate(latent) if float(latent["slope"]) > -9 else None), ConfigError, "vmap=False"),
    (bad(start={"white": [torch.inf]}), ConfigError, "Write finite numbers"),
    (bad(start={}), ConfigError, "Write finite numbers"),
    (bad(start={"a": {"b": [0.0]}, "a.b": [0.0]}), ConfigError, "Write other names: .* two are alike"),
    (bad(model=lambda latent: {"rate": rate(latent)}), ConfigError, "the model returns a dict. Return one tensor"),
    (lambda: posterior.CorrelatedField(8), ConfigError, r"shape is 8\. Write the pixels along each axis"),  # type: ignore[arg-type]
    (bad(samples=-1), ConfigError, "samples is -1. Write the number of pairs"),
    (bad(mode="nonlinear_resample"), ConfigError, "mode is 'nonlinear_resample'. Write one of geometric, linear"),
    (bad(redraw="update"), ConfigError, "mode='geometric'"),
    (bad(redraw="never"), ConfigError, "Write one of new, same, update"),
    (bad(sampling={"maxiter": 3}), ConfigError, "numbers of 0 or more for tol, steps"),
    (bad(minimizing={"tol": -1.0}), ConfigError, "minimizing is {'tol': -1.0}"),
    (bad(constants=["slop"]), ConfigError, "a list of some of fluctuations, slope, zero_mode, white"),
    (bad(point_estimates="slope"), ConfigError, "point_estimates"),
    (bad(iterations=0), ConfigError, "iterations is 0. Write a whole number of 1 or more"),
    (bad(chunk=0), ConfigError, "chunk is 0"),
    (bad(seed=-1), ConfigError, "seed is -1"),
    (bad(start={"white": torch.zeros(2) + 1j}), ConfigError, "numbers are complex"),
    (bad(dtype=torch.int64), ConfigError, "dtype is torch.int64. Write torch.float64 or"),
    (bad(folder=__file__), ConfigError, "a folder; this is a file"),
    (bad(sampling=None), ConfigError, "sampling is None. Write a dictionary with numbers"),
    (bad(minimizing={"steps": 1.5}), ConfigError, "those of steps are whole"),
    (bad(minimizing={"tol": math.nan}), ConfigError, "minimizing is {'tol': nan}"),
    (bad(model=lambda at: rate(at) + torch.rand(7, 6), vmap=False), ConfigError, "Leave out dropout"),
]


def test_bad_input_is_refused_in_words() -> None:
    for call, error, message in BAD:
        with pytest.raises(error, match=message):
            call()


def test_an_energy_that_is_not_finite_ends_the_run_before_the_folder_changes(tmp_path: Path) -> None:
    center = FIELD.start()["white"][0, 0]

    def model(latent: Latent) -> torch.Tensor:
        return rate(latent) * torch.where((latent["white"][0, 0] - center).abs() > 1e-6, torch.nan, 1.0)

    with pytest.raises(Diverged, match=r"energy is nan in iteration 1 \(batches \[.*\] of rank 0\). Write a tighter"):
        last(model=model, folder=tmp_path)
    assert not (tmp_path / "state.json").exists()


def test_constants_stay_and_point_estimates_have_no_deviations() -> None:
    state = last(mode="geometric", constants=["slope"], point_estimates=["slope", "zero_mode"], iterations=2)
    assert float(state.mean["slope"]) == 0
    assert float(state.mean["zero_mode"]) != 0
    for sample in state.samples:
        assert float(sample["slope"]) == 0
        assert float(sample["zero_mode"]) == float(state.mean["zero_mode"])
        assert float(sample["fluctuations"]) != float(state.mean["fluctuations"])


def test_ways_of_computing_give_the_same_samples_but_for_rounding() -> None:
    exact: Any = {"sampling": {"tol": 1e-9, "steps": 400}, "minimizing": {"tol": 1e-8, "steps": 40}}
    exact |= {"iterations": 1, "samples": 2}
    expected, ways = last(**exact), ({"vmap": False}, {"recompute": True}, {"chunk": 2})
    for given in ways:
        for one, other in zip(last(**exact, **given).samples, expected.samples, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_positions_may_be_nested_and_numbers_short() -> None:
    likelihood = posterior.Gaussian(torch.arange(4.0), std=0.1)
    start = {"sky": {"left": torch.zeros(2), "right": torch.zeros(2)}}
    seen: list[int] = []
    given: Any = {"dtype": torch.float32, "constants": ["sky.left"], "callback": lambda s: seen.append(s.iteration)}
    state = last(likelihood, lambda at: 5 * torch.cat([at["sky"]["left"], at["sky"]["right"]]), start=start, **given)
    assert (seen, state.mean["sky"]["left"].tolist()) == ([1, 2, 3], [0, 0])
    torch.testing.assert_close(state.mean["sky"]["right"], torch.tensor([0.4, 0.6]), rtol=0, atol=1e-3)
    assert list(state.reduced_chi2_latent) == ["sky.left", "sky.right"]


@pytest.mark.parametrize("mode", ["linear", "geometric"])
def test_a_linear_model_has_its_exact_posterior(mode: str) -> None:
    """Then linear and bent samples are draws of the posterior, whose mean is found in one iteration."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    data = torch.randn(6, generator=generator, dtype=torch.float64)
    covariance = torch.linalg.inv(torch.eye(4) + matrix.T @ matrix / 0.25)
    given: Any = {"start": {"x": torch.zeros(4)}, "samples": 2000, "chunk": 2000, "iterations": 1, "mode": mode}
    state = last(posterior.Gaussian(data, std=0.5), lambda latent: matrix @ latent["x"], **given)
    torch.testing.assert_close(state.mean["x"], covariance @ matrix.T @ data / 0.25, rtol=0, atol=1e-3)
    mean, std = state.samples.mean_and_std(lambda latent: latent["x"])
    torch.testing.assert_close(mean, state.mean["x"], rtol=0, atol=1e-12)
    torch.testing.assert_close(std, covariance.diagonal().sqrt(), rtol=0.05, atol=0)


@pytest.mark.parametrize("name", ["poisson", "gaussian"])
def test_the_truth_is_where_the_posterior_says(name: str) -> None:
    """Truths drawn from the prior: deviations of the logarithm of each pixel, in standard deviations, which few samples would leave uncertain."""
    field = posterior.CorrelatedField((16, 16), offset=3.0, fluctuations=(0.6, 0.2), slope=(-3.0, 0.3))
    scores = []
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        latent = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in field.start().items()}
        clean = field(latent)
        noise = torch.randn(clean.shape, generator=generator, dtype=clean.dtype)
        likelihood: Any = posterior.Gaussian(clean + 5 * noise, std=5.0)
        if name == "poisson":
            likelihood = posterior.Poisson(torch.poisson(clean, generator=generator))
        state = last(likelihood, field, start=field.start(), samples=30, chunk=30, mode="geometric")
        assert 0.7 < state.reduced_chi2 < 1.3
        mean, std = state.samples.mean_and_std(field.logarithm)
        scores.append((field.logarithm(latent) - mean) / std)
    z = torch.stack(scores)
    assert 0.9 < float(z.square().mean().sqrt()) < 1.1
    assert 0.92 < float((z.abs() < 2).double().mean()) < 0.98


def test_a_field_has_the_deviations_that_its_prior_names() -> None:
    field = posterior.CorrelatedField((32, 16), fluctuations=(0.7, 1e-6), zero_mode=(0.3, 1e-6), slope=(-2.0, 1e-6))
    generator = torch.Generator().manual_seed(1)
    latents = [{**field.start(), "white": torch.randn(32, 16, generator=generator).double()} for _ in range(400)]
    fields = torch.stack([field.logarithm(latent) for latent in latents])
    assert float(fields.var((1, 2)).mean().sqrt()) == pytest.approx(0.7, rel=0.02)
    assert float(fields.mean((1, 2)).std()) == pytest.approx(0.3, rel=0.1)
    halves = field.amplitudes(latents[0])[[1, 2], 0]
    assert float(halves[0] / halves[1]) == pytest.approx(2.0)  # the root of 2 ** 2


@pytest.mark.parametrize("mode", ["linear", "nonlinear"])
def test_samples_scatter_as_those_of_nifty_at_its_position(mode: str) -> None:
    """``nifty_side.py`` made them."""
    with np.load(Path(__file__).with_name("nifty_samples.npz")) as file:
        kept = {name: torch.from_numpy(file[name]).double() for name in file.files}
    n = len(kept["data"])
    field = posterior.CorrelatedField((n, n), math.log(20), (0.3, 0.1), (1.0, 0.3), (-4.0, 0.3))
    blur = torch.from_numpy(transfer(n))

    def blurred(latent: Latent) -> torch.Tensor:
        return torch.fft.irfft2(torch.fft.rfft2(field(latent)) * blur, s=(n, n)).clamp(min=1e-6)

    names = {"fluctuations": "fluctuations", "loglogavgslope": "slope", "zeromode": "zero_mode", "xi": "white"}
    start = {ours: kept[f"position_{theirs}"] for theirs, ours in names.items()}
    close(blurred(start), kept["rate"], 1e-10)
    given: Any = {"start": start, "iterations": 1, "samples": 100, "chunk": 25, "minimizing": {"steps": 0}}
    state = last(posterior.Poisson(kept["data"]), blurred, mode="geometric" if mode == "nonlinear" else mode, **given)
    mean, std = state.samples.mean_and_std(field.logarithm)
    ratio = std / kept[f"{mode}_std"]
    assert 0.93 < float(ratio.mean()) < 1.07
    assert 0.8 < float(ratio.quantile(0.05)) < float(ratio.quantile(0.95)) < 1.25  # of 200 samples each
    assert float(((mean - kept[f"{mode}_mean"]) / std).square().mean().sqrt()) < 0.15
