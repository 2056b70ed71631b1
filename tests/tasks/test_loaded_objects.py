"""Every call on a worker finds its objects as they were loaded, with random numbers of its own."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from halotile.tasks.distributed.tiling.processor_call import ProcessorCall
from halotile.tasks.distributed.transport.calls import Derivative
from halotile.tasks.distributed.transport.objects import Packer
from halotile.tasks.distributed.transport.random_state import Draw

X = torch.ones(1, 1, 6, 6)


def processed(thing: Any, folder: Path, draw: Draw | None = None) -> ProcessorCall:
    return ProcessorCall(Packer(thing, folder).pack(), None, draw=draw)


class Counting(torch.nn.Module):  # type: ignore[misc]
    """A network that adds the number of its calls, which it stores in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.seen: list[int] = []
        self.count = 0
        self.lately: torch.Tensor
        self.register_buffer("lately", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.count + len(self.seen) + float(self.lately)
        if self.how == "attribute":
            self.count += 1
        if self.how == "list":
            self.seen.append(1)
        if self.how == "new buffer":
            self.lately = self.lately + 1
        if self.how == "buffer":
            self.lately += 1
        if self.how == "attribute that was not there":
            before += getattr(self, "later", 0)
            self.later = 1
        return x + before


def counter() -> Callable[[torch.Tensor], torch.Tensor]:
    count = 0

    def add(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x + count - 1

    return add


def inside(x: torch.Tensor, net: Any) -> torch.Tensor:
    result: torch.Tensor = net(x)
    return result


STORAGE = ("attribute", "list", "new buffer", "buffer", "attribute that was not there")
STATEFUL: dict[str, Callable[[], Any]] = {
    **{how: functools.partial(Counting, how) for how in STORAGE},
    "closure": counter,
    "network in a closure": lambda: (lambda net: lambda x: net(x))(Counting("attribute")),
    "network in a partial": lambda: functools.partial(inside, net=Counting("attribute")),
    "method": lambda: Counting("list").forward,
    "generator": lambda: functools.partial(
        lambda x, rng: x + torch.rand(1, generator=rng), rng=torch.Generator().manual_seed(3)
    ),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_call_finds_an_object_as_it_was_loaded(name: str, tmp_path: Path) -> None:
    call = processed(STATEFUL[name](), tmp_path)
    (first,), (second,) = call(X), call(X)
    assert first is not None
    assert torch.equal(first, second)


def test_an_error_leaves_an_object_as_it_was_loaded(tmp_path: Path) -> None:
    call = processed(Counting("attribute"), tmp_path)
    with pytest.raises(TypeError):
        call("text")
    assert torch.equal(call(X)[0], X)


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(x.shape)


def noisy_by(seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return lambda x: x * torch.rand(x.shape, generator=rng)


@pytest.mark.parametrize("thing", [noisy, noisy_by(3)], ids=["global", "own"])
def test_random_numbers_belong_to_the_call(thing: Any, tmp_path: Path) -> None:
    draws = [Draw(1, 0, 0, 0), Draw(1, 0, 0, 1), Draw(1, 0, 1, 0), Draw(1, 1, 0, 0)]
    state = torch.get_rng_state()
    found = [processed(thing, tmp_path, draw)(X)[0] for draw in draws + draws[::-1]]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(found[:4], found[:3:-1], strict=True))
    assert len({float(each.sum()) for each in found if each is not None}) == 4


def test_a_generator_depends_on_its_own_seed_and_not_on_the_context(tmp_path: Path) -> None:
    cases = [(3, 1), (3, 2), (4, 1)]
    one, same, other = (
        processed(noisy_by(own), tmp_path, Draw(of_context, 0, 0))(X)[0] for own, of_context in cases
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("keeps", [True, False], ids=["it keeps", "it draws"])
def test_threads_do_not_affect_each_other(keeps: bool, tmp_path: Path) -> None:
    def slow(x: torch.Tensor, kept: dict[str, Any]) -> torch.Tensor:
        kept["x"] = x
        first = torch.rand(1)
        time.sleep(0.02)
        result: torch.Tensor = kept["x"] if keeps else first + torch.rand(1)
        return result

    packed = Packer(functools.partial(slow, kept={}), tmp_path).pack()
    calls = [ProcessorCall(packed, None, draw=Draw(1, 0, number)) for number in range(4)]
    inputs = [X * number for number in range(4)]
    alone = [call(x)[0] for call, x in zip(calls, inputs, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda call, x: call(x)[0], calls, inputs))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


MEETING = threading.Barrier(2)


def meet(x: torch.Tensor) -> torch.Tensor:
    """Return the image once two bright images are here at the same time."""
    if x.any():
        MEETING.wait(timeout=10)
    return x


def test_pure_functions_run_in_several_threads(tmp_path: Path) -> None:
    call = processed(meet, tmp_path, Draw(1, 0, 0))
    call(0 * X)
    with ThreadPoolExecutor(2) as pool:
        assert all(torch.equal(value, X) for (value,) in pool.map(call, [X, X]))


def test_a_derivative_has_the_random_numbers_of_its_function(tmp_path: Path) -> None:
    call = processed(lambda x: torch.nn.functional.dropout(x, 0.5, training=True), tmp_path, Draw(1, 0, 0))
    (value,) = call(X)
    (slope,) = Derivative(call, (True,), (True,))(X, X)
    assert value is not None
    assert 0 < int((value == 0).sum()) < X.numel()
    assert torch.equal(value, slope)
