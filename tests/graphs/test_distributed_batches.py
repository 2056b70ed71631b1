"""Batches of images spread over the workers: results, gradients and running statistics of the program in one process."""

from __future__ import annotations

import copy
from typing import Any

import dask.array as da
import pytest
import torch

from halotile import DistributedContext
from halotile.errors import ConfigError, TaskFailed
from tests.cases import all_of
from tests.graphs.distributing import Smooth, difference, image, tiled

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]

NEAR = {torch.float32: 1e-5, torch.float64: 1e-10}


class Normed(torch.nn.Module):  # type: ignore[misc]
    """A network with batch norms of all kinds, used in another order than they are held in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.last = torch.nn.BatchNorm2d(3, affine=False, momentum=None)
        self.first = torch.nn.BatchNorm2d(4, momentum=0.3)
        self.middle = torch.nn.BatchNorm2d(3, track_running_stats=False)
        self.convolutions = torch.nn.ModuleList(
            torch.nn.Conv2d(a, b, 3, padding=1) for a, b in ((1, 4), (4, 3), (3, 3), (3, 1))
        )
        self.unused = torch.nn.BatchNorm2d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three, four = self.convolutions
        x = torch.relu(self.first(one(x)))
        x = torch.tanh(self.middle(two(x)))
        return four(self.last(three(x)))


def spread(ctx: DistributedContext, net: Any, images: int = 2, **options: Any) -> Any:
    return tiled(ctx, net, patch_size=64, images_per_task=images, **options)


def gradients(net: Any, call: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    result = call(*inputs)
    loss = (result * result).sum()
    found = torch.autograd.grad(loss, [*net.parameters(), *inputs], allow_unused=True)
    return [result.detach(), *(each for each in found if each is not None)]


@pytest.mark.parametrize("patch", [64, 16], ids=["whole images", "tiles"])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (5, 1, 30, 28), (1, 1, 30, 28)], ids=str)
def test_images_with_what_goes_with_each_equal_the_network(
    ctx: DistributedContext, shape: tuple[int, ...], dtype: torch.dtype, patch: int
) -> None:
    net = Smooth().to(dtype)
    x = image(5, 1, 30, 28, dtype=dtype).requires_grad_()
    level = (image(*shape, dtype=dtype).abs() + 0.5).requires_grad_()
    call = tiled(ctx, net, patch_size=patch, images_per_task=2)
    # At the rim of the image tiles are mirrored, and the network pads with zeros.
    truth = net if patch == 64 else tiled(ctx, net, patch_size=patch)
    found, expected = gradients(net, call, [x, level]), gradients(net, truth, [x, level])
    assert difference(found, expected) < NEAR[dtype]
    with torch.no_grad():
        assert difference(call(x, level), truth(x, level)) < NEAR[dtype]


def test_each_task_has_some_images(ctx: DistributedContext, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    run = type(ctx).run

    def noting(self: Any, phase: str, calls: Any, inputs: Any, what: str) -> Any:
        seen.append(len(calls))
        return run(self, phase, calls, inputs, what)

    monkeypatch.setattr(type(ctx), "run", noting)
    with torch.no_grad():
        for images in (2, 5, 9):
            spread(ctx, Smooth(), images)(image(5, 1, 30, 28))
    assert seen == [3, 1, 1]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", all_of(NEAR, thorough=[torch.float64]), ids=str)
@pytest.mark.parametrize("images", [1, 2, 5])
def test_training_with_batch_norm_follows_the_program_in_one_process(
    ctx: DistributedContext, images: int, dtype: torch.dtype
) -> None:
    x, y = image(5, 1, 12, 14, dtype=dtype), image(5, 1, 12, 14, dtype=dtype).flip(-1)
    plain = Normed().to(dtype)
    ours = copy.deepcopy(plain)
    losses = []
    for net, call in ((ours, spread(ctx, ours, images)), (plain, plain)):
        steps = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        for _ in range(4):
            steps.zero_grad()
            loss = (call(x) - y).square().mean()
            loss.backward()
            steps.step()
            losses.append(loss.detach())
    assert difference(losses[:4], losses[4:]) < NEAR[dtype]
    for (name, found), expected in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
        # A bias before a layer that takes the mean away has no gradient but rounding.
        assert float((found - expected).abs().max()) < 10 * NEAR[dtype], name
    assert int(ours.first.num_batches_tracked) == 4
    assert int(ours.unused.num_batches_tracked) == 0
    with torch.no_grad():
        assert difference(spread(ctx, ours.eval(), images)(x), plain.eval()(x)) < 10 * NEAR[dtype]


def test_the_bits_do_not_depend_on_the_number_of_workers(
    counts: list[DistributedContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halotile.graphs.tree_sum.SMALL_BYTES", 0)  # a task for each batch
    found = []
    for each in counts:
        net = Normed().requires_grad_()
        x = image(9, 1, 12, 14).requires_grad_()
        found.append([*gradients(net, spread(each, net, 1), [x]), *net.buffers()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_statistics_keep_their_digits_where_images_are_far_from_zero(ctx: DistributedContext) -> None:
    """As counts on a pedestal are: sums of squares would lose twice the digits."""
    x = image(5, 1, 12, 14, dtype=torch.float64) + 1e4
    plain = torch.nn.BatchNorm2d(1).double()
    ours = copy.deepcopy(plain)
    assert difference(spread(ctx, ours)(x).detach(), plain(x).detach()) < 1e-10
    assert difference(ours.running_var, plain.running_var) < 1e-10


class Forked(torch.nn.Module):  # type: ignore[misc]
    """A network whose way depends on its image."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = torch.nn.ModuleList(torch.nn.BatchNorm2d(1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        way: torch.Tensor = self.ways[int(x.mean() > 0)](x)
        return way


def normed(x: torch.Tensor, net: Any = torch.nn.BatchNorm2d(1, affine=False)) -> Any:
    return net(x)


class Twice(torch.nn.Module):  # type: ignore[misc]
    """A layer that sees two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.norm(x) + 1)


def test_statistics_that_would_not_be_those_of_the_batch_are_refused(ctx: DistributedContext) -> None:
    x = image(3, 1, 20, 20)
    refused = pytest.raises(
        ConfigError, match=r"training mode.*normalise by all pixels of a batch.*eval\(\).*GroupNorm"
    )
    norm = torch.nn.BatchNorm2d(1)
    with refused:
        tiled(ctx, torch.nn.Sequential(norm))(x)  # tiles of 16
    for net in (torch.nn.InstanceNorm2d(1, track_running_stats=True), normed):
        with refused:
            spread(ctx, net)(x)
    with refused:
        spread(ctx, norm)(da.from_array(x.numpy()))
    with pytest.raises(TaskFailed, match=r"used twice in a call.*two layers, or eval\(\)"):
        spread(ctx, Twice())(x)
    with pytest.raises(ConfigError, match=r"different layers of batch norm.*eval\(\)"):
        spread(ctx, Forked(), 1)(torch.stack([x[0] - 9, x[1] + 9]))
    with pytest.raises(ConfigError, match=r"single pixel has no statistics"):
        spread(ctx, norm)(x[:1, :, :1, :1])
    assert int(norm.num_batches_tracked) == 0
    with pytest.raises(ConfigError, match=r"images_per_task is 0.*Write 1 or more"):
        spread(ctx, norm, 0)
    with torch.no_grad():
        assert difference(spread(ctx, norm.eval())(x), x / (1 + 1e-5) ** 0.5) < 1e-5
