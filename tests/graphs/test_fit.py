"""Training by the ranks of a group: the same bits for any number of ranks, and after an interruption."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from halotile import DistributedContext, torch_group
from halotile.errors import ConfigError, DamagedData, Diverged
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.groups.training.traffic import received_bytes
from tests.graphs import fitting

Trained = tuple[list[float], dict[str, torch.Tensor]]


def on_workers(test: Callable[..., None]) -> Any:
    """Mark a test that needs the workers."""
    return pytest.mark.cluster(pytest.mark.filterwarnings("ignore")(test))


@pytest.fixture(scope="module")
def expected(four: DistributedContext) -> Trained:
    """Losses and network of a single rank."""
    (alone,) = four.run_torch(fitting.trained, ranks=1)
    losses: list[float] = alone[0]
    assert losses[-1] < 0.5 * losses[0]
    return losses, alone[1]


def assert_same(found: Trained, expected: Trained) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], tensor) for name, tensor in expected[1].items())


@on_workers
@pytest.mark.parametrize("count", [2, 3, 4])
def test_losses_and_weights_have_the_same_bits_for_any_number_of_ranks(
    four: DistributedContext, expected: Trained, count: int
) -> None:
    for found in four.run_torch(fitting.trained, ranks=count):
        assert_same(found, expected)


@on_workers
def test_a_killed_rank_does_not_change_a_bit(
    four: DistributedContext, expected: Trained, tmp_path: Path
) -> None:
    program = partial(fitting.trained, killed=str(tmp_path))
    for found in four.run_torch(program, ranks=2, retries=1):
        assert_same(found, expected)
    assert (tmp_path / "killed").exists()


@on_workers
def test_the_fast_mode_differs_by_rounding(four: DistributedContext, expected: Trained) -> None:
    for losses, _ in four.run_torch(partial(fitting.trained, mode="fast"), ranks=3):
        assert losses != expected[0]
        assert losses[:10] == pytest.approx(expected[0][:10], rel=1e-4)


def exchanged(group: TorchGroup, mode: Any) -> tuple[int, int]:
    """Bytes that a rank counts in a training, and those in its messages."""
    import torch.distributed as dist

    messages, real = [0], dist.all_to_all_single

    def watched(
        received: torch.Tensor, sent: torch.Tensor, sizes: list[int], *others: Any, **options: Any
    ) -> Any:
        messages[0] += (sum(sizes) - sizes[group.rank]) * received.itemsize
        return real(received, sent, sizes, *others, **options)

    before = received_bytes()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_to_all_single", watched)
        fitting.trained(group, 3, mode=mode)
    return received_bytes() - before, messages[0]


@on_workers
def test_bytes_from_other_ranks_are_counted(four: DistributedContext) -> None:
    for counted, messages in four.run_torch(exchanged, "exact", ranks=3):
        assert counted == messages > 0
    (exact, _), *_ = four.run_torch(exchanged, "exact", ranks=2)
    (fast, _), *_ = four.run_torch(exchanged, "fast", ranks=2)
    numbers = sum(parameter.numel() for parameter in fitting.network().parameters())
    assert fast == pytest.approx(3 * 4 * numbers, rel=0.3)
    assert exact == pytest.approx(3 * 4 * numbers * 1.5, rel=0.3)
    assert four.run_torch(exchanged, "exact", ranks=1) == [(0, 0)]


def losses_of(steps: int, **options: Any) -> list[float]:
    """Losses of a small training in this process."""
    return fitting.trained(TorchGroup(), steps, **options)[0]


def test_a_step_is_that_of_plain_torch() -> None:
    module = torch.nn.Linear(3, 2)
    twin = torch.nn.Linear(3, 2)
    twin.load_state_dict(module.state_dict())
    points = torch.randn(8, 3)
    torch_group.fit(
        TorchGroup(), module, lambda step, slot: points[2 * slot : 2 * slot + 2], lambda f, x: f(x).square().mean(),
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), steps=3,
    )  # fmt: skip
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        plain.zero_grad()
        twin(points).square().mean().backward()
        plain.step()
    torch.testing.assert_close(module.weight, twin.weight)


def partly_used() -> torch.nn.ParameterDict:
    """Parameters of which one has a gradient everywhere, one in the last slot alone, and one nowhere."""
    return torch.nn.ParameterDict({name: torch.ones(2) for name in ("used", "rare", "unused")})


def loss_of_slot(module: torch.nn.ParameterDict, slot: int) -> torch.Tensor:
    """Their loss."""
    value = module["used"] + module["rare"] if slot == 3 else module["used"]
    loss: torch.Tensor = value.square().mean()
    return loss


def decayed(group: TorchGroup, mode: Any) -> tuple[dict[str, list[float]], bool]:
    """The parameters after some steps of an optimizer that lets them decay, and True where one has a gradient of its own."""
    module = partly_used()
    torch_group.fit(
        group, module, lambda step, slot: slot, loss_of_slot,
        torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1), steps=5, mode=mode,
    )  # fmt: skip
    return {name: value.tolist() for name, value in module.items()}, module["unused"].grad is not None


@on_workers
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_parameter_without_a_gradient_is_left_alone_as_by_plain_torch(
    four: DistributedContext, mode: str
) -> None:
    plain = partly_used()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        torch.stack([loss_of_slot(plain, slot) for slot in range(4)]).mean().backward()
        optimizer.step()
    for values, has_gradient in [decayed(TorchGroup(), mode), *four.run_torch(decayed, mode, ranks=3)]:
        assert (values["unused"], has_gradient) == ([1.0, 1.0], False)
        assert all(values[name] == pytest.approx(plain[name].tolist(), rel=1e-5) for name in values)


def test_what_a_network_keeps_and_does_not_change_stays_to_the_bit() -> None:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("mean", torch.tensor([0.1, 1 / 3]))
    torch_group.fit(
        TorchGroup(), module, lambda step, slot: torch.ones(1, 2), lambda f, x: f(x - f.mean).square().mean(),
        torch.optim.SGD(module.parameters(), lr=0.01), steps=20, slots=7,
    )  # fmt: skip
    assert torch.equal(module.mean, torch.tensor([0.1, 1 / 3]))


def test_complex_parameters_are_trained() -> None:
    module = torch.nn.ParameterList([torch.zeros(2, dtype=torch.complex64)])
    torch_group.fit(
        TorchGroup(), module, lambda step, slot: torch.tensor([1 + 2j, 3j]), lambda f, x: (f[0] - x).abs().square().mean(),
        torch.optim.SGD(module.parameters(), lr=0.5), steps=60,
    )  # fmt: skip
    assert module[0].tolist() == pytest.approx([1 + 2j, 3j], abs=1e-3)


def test_the_random_numbers_of_the_program_go_on_as_before() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    module = torch.nn.Dropout()
    module.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    torch_group.fit(
        TorchGroup(), module, lambda step, slot: torch.ones(4), lambda f, x: (f(x) * f.scale).mean(),
        torch.optim.SGD(module.parameters(), lr=0.1), steps=2,
    )  # fmt: skip
    assert torch.equal(torch.rand(1), expected)


def test_a_checkpoint_that_is_damaged_or_of_another_network_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    losses_of(2, checkpoint=path)
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="another network"):
        torch_group.fit(
            TorchGroup(), layer, fitting.batch, fitting.loss, torch.optim.SGD(layer.parameters(), lr=1.0), steps=1, checkpoint=path
        )  # fmt: skip
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedData, match="Remove it"):
        losses_of(3, checkpoint=path)


def test_a_training_that_is_finished_does_nothing_more(tmp_path: Path) -> None:
    first = losses_of(4, checkpoint=tmp_path / "state")
    seen: list[int] = []
    again = losses_of(4, checkpoint=tmp_path / "state", report=lambda step, _: seen.append(step))
    assert (again, seen) == (first, [])


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_an_optimizer_that_needs_a_closure_is_refused(is_scheduled: bool) -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(layer.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if is_scheduled else None
    with pytest.raises(ConfigError, match=r"LBFGS needs a closure .* Write another optimizer"):
        torch_group.fit(
            TorchGroup(), layer, fitting.batch, fitting.loss, optimizer, steps=1, scheduler=scheduler
        )


def test_too_few_slots_a_loss_of_many_numbers_and_one_that_is_not_finite_are_refused() -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)

    def fit(group: TorchGroup, loss: Any) -> None:
        torch_group.fit(group, layer, lambda step, slot: torch.ones(3, 2), loss, optimizer, steps=9)

    with pytest.raises(ConfigError, match="Write slots=5 or more"):
        fit(TorchGroup(0, 5), lambda f, x: f(x).mean())
    with pytest.raises(ConfigError, match=r"shape \[3, 2\]"):
        fit(TorchGroup(), lambda f, x: f(x))
    with pytest.raises(Diverged, match="step 1 of 9"):
        fit(TorchGroup(), lambda f, x: f(x).mean() * torch.inf)
