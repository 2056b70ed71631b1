"""Training by the ranks of a group: the same bits for any number of ranks, and after an interruption."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from halotile import DistributedContext, torch_group
from halotile.errors import ConfigError, DamagedData, Diverged
from halotile.tasks.groups.group import TorchGroup
from tests.cases import thorough

Trained = tuple[list[float], dict[str, torch.Tensor]]
STEPS = 20


def network() -> torch.nn.Sequential:
    """Convolutions with running statistics, random numbers, and a parameter that no loss sees."""
    torch.manual_seed(3)
    there, back = torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.Conv2d(8, 1, 3, padding=1)
    layers = torch.nn.Sequential(there, torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Dropout(0.2), back)
    layers.register_parameter("unused", torch.nn.Parameter(torch.ones(2)))
    return layers


def batch(step: int, slot: int) -> torch.Tensor:
    """The images of a slot."""
    return torch.randn(3, 1, 16, 16, generator=torch.Generator().manual_seed(100 * step + slot))


def loss(module: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Distance from the images themselves."""
    distance: torch.Tensor = (module(images) - images).square().mean()
    return distance


def trained(group: TorchGroup, steps: int = STEPS, killed: str = "", **options: Any) -> Trained:
    """Losses and the network after so many steps; rank 1 is killed in step 12, once, where there is a folder for a mark."""
    module = network()
    if group.rank:
        with torch.no_grad():
            module[0].weight.zero_()  # those of rank 0 count

    def next_batch(step: int, slot: int) -> torch.Tensor:
        mark = Path(killed, "killed")
        if killed and step == 12 and group.rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch(step, slot)

    optimizer = torch.optim.Adam(module.parameters(), lr=3e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    if killed:
        options |= {"checkpoint": Path(killed, "state"), "checkpoint_seconds": 0.0}
    options |= {"steps": steps, "slots": 4, "seed": 7, "scheduler": scheduler}
    return torch_group.fit(group, module, next_batch, loss, optimizer, **options), module.state_dict()


def on_workers(test: Callable[..., None]) -> Any:
    """Mark a test that needs the workers."""
    return pytest.mark.cluster(pytest.mark.filterwarnings("ignore")(test))


@pytest.fixture(scope="module")
def expected(four: DistributedContext) -> Trained:
    """Losses and network of a single rank."""
    (alone,) = four.run_torch(trained, ranks=1)
    losses: list[float] = alone[0]
    assert losses[-1] < 0.5 * losses[0]
    return losses, alone[1]


def assert_same(found: Trained, expected: Trained) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], tensor) for name, tensor in expected[1].items())


@on_workers
@pytest.mark.parametrize("count", [2, thorough(3), thorough(4)])
def test_training_has_the_same_bits_on_any_ranks(four: DistributedContext, expected: Trained, count: int) -> None:
    for found in four.run_torch(trained, ranks=count):
        assert_same(found, expected)


@on_workers
def test_a_killed_rank_does_not_change_a_bit(four: DistributedContext, expected: Trained, tmp_path: Path) -> None:
    program = partial(trained, killed=str(tmp_path))
    for found in four.run_torch(program, ranks=2, retries=1):
        assert_same(found, expected)
    assert (tmp_path / "killed").exists()


def fit_alone(module: Any, batch: Any, loss: Any = None, lr: float = 0.01, **options: Any) -> list[float]:
    """Losses of a training in this process."""
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(module.parameters(), lr=lr)
    default: Callable[[Any, Any], Any] = lambda f, x: f(x).square().mean()  # noqa: E731
    given = batch if callable(batch) else lambda step, slot: batch
    return torch_group.fit(TorchGroup(), module, given, loss or default, optimizer, **{"steps": 2, **options})


def test_complex_numbers_are_fitted() -> None:
    numbers = torch.nn.ParameterList([torch.zeros(2, dtype=torch.complex64)])
    fit_alone(numbers, torch.tensor([1 + 2j, 3j]), lambda f, x: (f[0] - x).abs().square().mean(), 0.5, steps=60)
    assert numbers[0].tolist() == pytest.approx([1 + 2j, 3j], abs=1e-3)


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
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
    torch_group.fit(group, module, lambda step, slot: slot, loss_of_slot, optimizer, steps=5, mode=mode)
    return {name: value.tolist() for name, value in module.items()}, module["unused"].grad is not None


@on_workers
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_parameter_without_a_gradient_is_left_alone_as_by_plain_torch(four: DistributedContext, mode: str) -> None:
    plain = partly_used()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        torch.stack([loss_of_slot(plain, slot) for slot in range(4)]).mean().backward()
        optimizer.step()
    for values, has_gradient in [decayed(TorchGroup(), mode), *four.run_torch(decayed, mode, ranks=3)]:
        assert (values["unused"], has_gradient) == ([1.0, 1.0], False)
        assert all(values[name] == pytest.approx(plain[name].tolist(), rel=1e-5) for name in values)


class Keeping(torch.nn.Linear):  # type: ignore[misc]
    """Keeps numbers that may follow from what it sees."""

    def __init__(self, inputs: int, change: Callable[[Any, torch.Tensor], Any], **kept: torch.Tensor) -> None:
        super().__init__(inputs, inputs)
        self.change = change
        for name, numbers in kept.items():
            self.register_buffer(name, numbers.clone(), persistent=name != "running")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs."""
        self.change(self, x.detach())
        return super().forward(x - self.running if hasattr(self, "running") else x)


def test_what_a_network_keeps_and_does_not_change_stays_to_the_bit_also_infinities() -> None:
    """It has a mask and a mean, and keeps the least value that it has seen, infinity before the first."""
    mask, mean = torch.tensor([[0.0, -torch.inf], [torch.nan, torch.inf]]), torch.tensor([0.1, 1 / 3])
    least = torch.full((2,), torch.inf)
    module: Any = Keeping(2, lambda f, x: f.least[:1].clamp_(max=x.min()), mean=mean, mask=mask, least=least)
    fit_alone(module, lambda step, slot: torch.full((1, 2), 1.0 + slot), steps=1)
    assert module.least.tolist() == [2.5, torch.inf], "successors of infinities are averaged"
    fit_alone(module, torch.ones(1, 2), steps=20, slots=7)
    torch.testing.assert_close(module.mask, mask, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(module.mean, mean)


def note_all(layer: Any, x: torch.Tensor) -> None:
    """Change some numbers in their place, replace others."""
    layer.seen += int(x.sum())
    layer.last = layer.last + x.to(torch.int32).flatten()
    layer.above = x.flatten() > layer.mean.new_tensor([1, 3, 9])
    layer.phase += 1j * x.flatten()
    layer.mean = 0.5 * layer.mean + 0.5 * x.flatten()


def kept(group: TorchGroup, mode: Any) -> dict[str, list[Any]]:
    """The numbers that the network keeps after two steps; a slot sees twice its number."""
    module = Keeping(
        1, note_all, above=torch.zeros(3, dtype=torch.bool), seen=torch.zeros((), dtype=torch.int64),
        last=torch.zeros(2, dtype=torch.int32), phase=torch.zeros(2, dtype=torch.complex64), mean=torch.zeros(2),
    )  # fmt: skip
    torch_group.fit(
        group, module, lambda step, slot: torch.full((1, 1), 2.0 * slot), lambda f, x: f(x).square().mean(),
        torch.optim.SGD(module.parameters(), lr=0.01), steps=2, mode=mode,
    )  # fmt: skip
    return {name: buffer.tolist() for name, buffer in module.named_buffers()}


@on_workers
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_all_that_a_network_keeps_is_the_same_for_any_number_of_ranks(four: DistributedContext, mode: str) -> None:
    """What has a mean has that of the slots, and what has none is that of the last slot."""
    numbers = {"seen": 12, "last": [12, 12], "phase": [6j, 6j], "mean": [2.25, 2.25]}
    expected = {"above": [True, True, False], **numbers}
    assert kept(TorchGroup(), mode) == expected
    for count in (2, 3, 4):
        assert four.run_torch(kept, mode, ranks=count) == [expected] * count


def test_random_numbers_of_slots_differ_and_those_of_the_program_go_on_as_before() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    seen: list[Any] = []

    def noted(module: Any, x: torch.Tensor) -> Any:
        seen.append(module(x))
        return seen[-1].mean()

    fit_alone(torch.nn.Sequential(torch.nn.PReLU(), torch.nn.Dropout()), torch.ones(40), noted, 0.1)
    assert torch.equal(torch.rand(1), expected)
    assert len({tuple((each > 0).tolist()) for each in seen}) == 8


# --- checkpoints ----------------------------------------------------------------------------------


def fit_layer(
    checkpoint: Path, make: Callable[..., Any] = torch.optim.Adam, schedule: Any = None, inputs: int = 2, **options: Any
) -> list[float]:  # fmt: skip
    """Losses of a training of a layer by an optimizer and a scheduler."""
    layer = torch.nn.Linear(inputs, 2)
    optimizer = make(layer.parameters(), lr=0.01)
    scheduler = schedule and schedule(optimizer)
    batch = torch.ones(1, inputs)
    return fit_alone(layer, batch, optimizer=optimizer, scheduler=scheduler, checkpoint=checkpoint, **options)


def stepwise(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.StepLR(optimizer, 1)


def joined(optimizer: torch.optim.Optimizer, second: Any = stepwise) -> Any:
    return schedulers.SequentialLR(optimizer, [schedulers.ConstantLR(optimizer), second(optimizer)], [2])


SGD, POLYNOMIAL = {"make": torch.optim.SGD}, partial(joined, second=schedulers.PolynomialLR)
SETTINGS: dict[str, Any] = {"slots": 4, "seed": 0, "mode": "exact"}
OTHERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, SGD, "it has optimizer Adam, and this training optimizer SGD"),
    (SGD, {}, "it has optimizer SGD, and this training optimizer Adam"),
    ({}, {"schedule": stepwise}, "it has scheduler None, and this training scheduler StepLR"),
    ({"schedule": stepwise}, {}, "it has scheduler StepLR, and this training scheduler None"),
    ({"schedule": stepwise}, {"schedule": joined}, r"scheduler SequentialLR\(ConstantLR, StepLR\)"),
    ({"schedule": joined}, {"schedule": POLYNOMIAL}, r"this training scheduler SequentialLR\(ConstantLR, PolynomialLR\)"),
    ({}, {"inputs": 3}, "Write another path, or remove it"),
    *(
        (SETTINGS, SETTINGS | {name: value}, rf"it has {name} {SETTINGS[name]}, and this training {name} {value}\. Write what it has")
        for name, value in (("slots", 2), ("seed", 1), ("mode", "fast"))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "differs"), OTHERS)
def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path, first: Any, second: Any, differs: str) -> None:
    path = tmp_path / "state"
    fit_layer(path, **first)
    with pytest.raises(ConfigError, match=rf"of another network or optimizer.* {differs}"):
        fit_layer(path, **second, steps=4)
    assert len(fit_layer(path, **first, steps=4)) == 4


def test_a_training_goes_on_from_its_checkpoint_and_from_no_other_or_damaged_one(tmp_path: Path) -> None:
    path, seen = tmp_path / "state", list[int]()

    def centred(steps: int, checkpoint: Path | None = path, **options: Any) -> list[float]:
        torch.manual_seed(0)
        module = Keeping(2, lambda f, x: f.running.lerp_(x.mean(0), 0.5), running=torch.zeros(2))
        options |= {"lr": 0.1, "steps": steps, "checkpoint": checkpoint}
        return fit_alone(module, lambda step, slot: torch.randn(4, 2), **options)

    centred(3)
    with pytest.raises(ConfigError, match=r"has 3 steps already, and steps is 2\. Write steps=3 or more"):
        centred(2)
    first = centred(5, seed=np.int64(0))
    assert first == centred(5, None), "buffers that are not persistent go on as well"
    assert centred(5, report=lambda step, _: seen.append(step)) == first
    assert seen == []
    assert len(centred(6)) == 6
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedData, match="Remove it"):
        centred(7)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mode": "quick"}, "mode is 'quick'. Write one of exact, fast"),
    ({"seed": -1}, "seed is -1. Write 0 or more"),
    ({"schedule": schedulers.ReduceLROnPlateau}, "ReduceLROnPlateau needs a metric .* Write a scheduler"),
    ({"checkpoint": Path("/")}, "/ is a folder. Write the path of a file"),
    ({"make": torch.optim.LBFGS}, r"LBFGS needs a closure .* Write another optimizer"),
    ({"make": torch.optim.LBFGS, "schedule": stepwise}, r"LBFGS needs a closure .* Write another optimizer"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_mean_nothing_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_layer(**({"checkpoint": tmp_path / "state"} | options))


def test_too_few_slots_and_losses_that_are_not_one_finite_number_are_refused() -> None:
    losses: list[tuple[Any, type[Exception], str]] = [
        (lambda f, x: f(x), ConfigError, r"shape \[3, 2\]"),
        (lambda f, x: f(x).mean().item(), ConfigError, r"the loss is a float\. Return a tensor with one number"),
        (lambda f, x: f(x).mean() * torch.inf, Diverged, "step 1 of 9"),
    ]
    for loss, kind, words in losses:
        with pytest.raises(kind, match=words):
            fit_alone(torch.nn.Linear(2, 2), torch.ones(3, 2), loss, steps=9)
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="Write slots=5 or more"):
        torch_group.fit(TorchGroup(0, 5), layer, batch, loss, torch.optim.Adam(layer.parameters()), steps=9)
