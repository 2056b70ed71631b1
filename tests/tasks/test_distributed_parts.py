"""Parts of distributed calls: tiles that fill the image once, linear systems, rewritten blurs, and objects that every call finds as they were loaded."""

from __future__ import annotations

import functools
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.errors import ConfigError, InputError
from halotile.tasks.distributed.stacks.blockwise import OperatorMethod, rewrite
from halotile.tasks.distributed.tiling.processor_call import ProcessorCall
from halotile.tasks.distributed.tiling.tiles import BLENDINGS, Tiles, blend_axis, cut_axis, make_tiles
from halotile.tasks.distributed.transport.calls import Derivative
from halotile.tasks.distributed.transport.objects import Packer
from halotile.tasks.distributed.transport.tensors import Draw
from halotile.tasks.krylov import conjugate_gradients, largest_eigenvalue
from tests.cases import in_folders

lengths, patches, overlaps = st.integers(1, 60), st.integers(1, 20), st.integers(0, 12)


@given(length=lengths, patch=patches, overlap=overlaps)
def test_cores_fill_an_axis_once_and_windows_are_equally_long(length: int, patch: int, overlap: int) -> None:
    cuts = cut_axis(length, patch, overlap)
    assert [at for cut in cuts for at in range(*cut.core)] == list(range(length))
    assert len({cut.window[1] - cut.window[0] for cut in cuts}) == 1
    assert all(cut.inner[0] <= cut.core[0] < cut.core[1] <= cut.inner[1] for cut in cuts)


@pytest.mark.parametrize("kind", BLENDINGS)
@given(length=lengths, patch=patches, overlap=overlaps, scale=st.integers(1, 3))
def test_weights_add_up_to_1_everywhere(kind: str, length: int, patch: int, overlap: int, scale: int) -> None:
    cuts, total = cut_axis(length, patch, overlap), np.zeros(length * scale)
    for cut, weights in zip(cuts, blend_axis(cuts, length, overlap, kind, scale), strict=True):
        start, stop = max(0, cut.window[0]) * scale, min(length, cut.window[1]) * scale
        assert len(weights) == stop - start
        assert weights.min() >= 0
        total[start:stop] += weights
    np.testing.assert_allclose(total, 1, rtol=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 9)),
    patch=st.integers(1, 9),
    overlap=st.integers(0, 12),
    blending=st.sampled_from([None, *BLENDINGS]),
)
def test_joining_undoes_cutting(shape: tuple[int, ...], patch: int, overlap: int, blending: str | None) -> None:
    tiles = make_tiles((2, *shape), patch, overlap, (1, 2), blending)
    image = torch.rand(2, *shape, dtype=torch.float64)
    made = [tiles.trim(tiles.window(image, number)) for number in range(len(tiles))]
    torch.testing.assert_close(tiles.join(made), image)


def test_windows_are_mirrored_as_torch_pads() -> None:
    image, tiles = torch.rand(1, 1, 12, 10), Tiles((1, 1, 12, 10), (2, 3), (6, 5), (3, 3))
    padded = torch.nn.functional.pad(image, (3, 3, 3, 3), mode="reflect")
    assert torch.equal(tiles.window(image, 0), padded[..., :12, :11])
    assert torch.equal(tiles.window(image, len(tiles) - 1), padded[..., -12:, -11:])


def test_invalid_tiles_and_a_processor_that_changes_the_size_by_a_fraction_are_refused() -> None:
    for options, message in [
        ((8, 2, (2, 7), None), "tiling_dims is"),
        (((8, 8, 8), 2, (2, 3), None), "patch_size is"),
        ((0, 2, None, None), "patch_size is"),
        ((8, 2, None, "cubic"), "blending is 'cubic'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make_tiles((1, 1, 16, 16), *options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="do not fit together"):
        make_tiles((1, 1, 16, 16), 8, 2, None, None).trim(torch.zeros(1, 1, 9, 12))


def test_a_linear_system_that_cannot_be_solved_is_reported_and_a_singular_one_is_solved_where_it_can_be() -> None:
    one, nan = torch.ones(1, 3), float("nan")
    with pytest.raises(InputError, match="NaN or infinities in the right-hand side: check the measurements"):
        conjugate_gradients(lambda x: x, torch.tensor([[1.0, nan]]), 1e-3, 9)
    for solve in (conjugate_gradients, largest_eigenvalue):
        with pytest.raises(InputError, match="the result of the operators for a finite image"):
            solve(lambda x: x * nan, one, 1e-3, 9)
    with pytest.raises(ConfigError, match="A_adjoint is not the adjoint of A"):
        conjugate_gradients(lambda x: -x, one, 1e-3, 9)
    seen = torch.tensor([[1.0, 0.0, 2.0]])
    x, residual = conjugate_gradients(lambda x: seen * x, torch.tensor([[1.0, 0.0, 4.0]]), 1e-6, 9)
    assert residual <= 1e-6
    torch.testing.assert_close(x, torch.tensor([[1.0, 0.0, 2.0]]))


X = torch.ones(1, 1, 6, 6)


def processed(thing: Any, folder: Path, draw: Draw | None = None) -> ProcessorCall:
    return ProcessorCall(Packer(thing, folder).pack(), None, draw=draw)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda net: setattr(net, "count", net.count + 1),
    "list": lambda net: net.seen.append(1),
    "new buffer": lambda net: setattr(net, "lately", net.lately + 1),
    "buffer": lambda net: net.lately.add_(1),
    "attribute that was not there": lambda net: setattr(net, "later", 1),
}


class Counting(torch.nn.Module):  # type: ignore[misc]
    """A network that adds the number of its calls, which it stores in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.change, self.count, self.seen = CHANGES[how], 0, list[int]()
        self.register_buffer("lately", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.count + len(self.seen) + float(self.lately) + getattr(self, "later", 0)
        self.change(self)
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


STATEFUL: dict[str, Callable[[], Any]] = {
    **{how: functools.partial(Counting, how) for how in CHANGES},
    "closure": counter,
    "network in a closure": lambda: (lambda net: lambda x: net(x))(Counting("attribute")),
    "network in a partial": lambda: functools.partial(inside, net=Counting("attribute")),
    "method": lambda: Counting("list").forward,
    "generator": lambda: functools.partial(lambda x, rng: x + torch.rand(1, generator=rng), rng=torch.Generator().manual_seed(3)),
}  # fmt: skip


def test_a_call_finds_an_object_as_it_was_loaded_after_an_error_too(tmp_path: Path) -> None:
    for folder, name in in_folders(tmp_path, STATEFUL):
        call = processed(STATEFUL[name](), folder)
        (first,) = call(X)
        with pytest.raises(TypeError):
            call("text")
        assert first is not None
        assert torch.equal(first, call(X)[0])


def noisy_by(seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return lambda x: x * torch.rand(x.shape, generator=rng)


def test_random_numbers_belong_to_the_call(tmp_path: Path) -> None:
    rows: list[Any] = [lambda x: x * torch.rand(x.shape), noisy_by(3)]
    for folder, thing in in_folders(tmp_path, rows):
        draws = [Draw(1, 0, 0, 0), Draw(1, 0, 0, 1), Draw(1, 0, 1, 0), Draw(1, 1, 0, 0)]
        state = torch.get_rng_state()
        found = [processed(thing, folder, draw)(X)[0] for draw in draws + draws[::-1]]
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(a, b) for a, b in zip(found[:4], found[:3:-1], strict=True))
        assert len({float(each.sum()) for each in found if each is not None}) == 4
    cases = [(3, 1), (3, 2), (4, 1)]  # a generator depends on its own seed and not on the context
    one, same, other = (processed(noisy_by(own), tmp_path, Draw(of_context, 0, 0))(X)[0] for own, of_context in cases)
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


def test_a_derivative_has_the_random_numbers_of_its_function(tmp_path: Path) -> None:
    call = processed(lambda x: torch.nn.functional.dropout(x, 0.5, training=True), tmp_path, Draw(1, 0, 0))
    (value,) = call(X)
    (slope,) = Derivative(call, (True,), (True,))(X, X)
    assert value is not None
    assert 0 < int((value == 0).sum()) < X.numel()
    assert torch.equal(value, slope)


NEAR = 1e-6


@pytest.fixture
def physics() -> Iterator[Any]:
    """Yield the physics of deepinv, which warn of their own defaults."""
    module = pytest.importorskip("deepinv.physics")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield module


def kernel(edge: int) -> torch.Tensor:
    return torch.rand(1, 1, edge, edge, generator=torch.Generator().manual_seed(edge)) / edge**2


PADDINGS = ("circular", "reflect", "constant", "replicate", "valid")


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square error, relative to that of the expected result."""
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("padding", [*PADDINGS, "downsampling"])
def test_a_rewritten_blur_has_the_results_and_derivatives_of_the_physics(padding: str, physics: Any) -> None:
    plain = physics.Downsampling(**{"img_size": (1, 24, 20), "filter": "gaussian", "factor": 2, "padding": "circular"})
    if padding != "downsampling":
        plain = physics.Blur(filter=kernel(5), padding=padding)
    ours, exact = rewrite(plain), rewrite(plain, exact=True)
    assert isinstance(ours.A, OperatorMethod)
    x = torch.randn((2, 1, 24, 20), generator=torch.Generator().manual_seed(1))
    y = plain.A(x.flip(-1))
    assert error(ours.A(x), plain.A(x)) < NEAR
    # deepinv's own is not the transpose for every padding
    adjoint = torch.autograd.functional.vjp(plain.A, x, y)[1]
    assert error(ours.A_adjoint(y), adjoint) < NEAR
    assert error(ours.A_vjp(x, y), adjoint) < NEAR
    assert torch.equal(exact.A_adjoint_A(x), exact.A_adjoint(exact.A(x)))
    assert error(exact.A_adjoint_A(x), ours.A_adjoint_A(x)) < NEAR
    found = []
    for each in (ours, plain):
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad((each.A(given) - y).square().square().sum(), given, create_graph=True)
        found.append((slope.detach(), torch.autograd.grad(slope.square().sum(), given)[0]))
    assert max(map(error, *found)) < 3 * NEAR


@pytest.mark.parametrize("padding", PADDINGS)
def test_super_resolution_equals_deepinv_on_images_of_any_size(padding: str, physics: Any) -> None:
    filters = (None, "gaussian", "bilinear", "bicubic")
    for size, factor, filter_ in itertools.product([(32, 36), (35, 29), (33, 40)], [2, 3], filters):
        plain = physics.Downsampling(img_size=(1, *size), factor=factor, filter=filter_, padding=padding)
        ours, x = rewrite(plain), torch.randn((2, 1, *size), generator=torch.Generator().manual_seed(1))
        y = plain.A(x.flip(-1))
        seen, back = ours.A(x), ours.A_adjoint(y)
        assert back.shape == x.shape
        assert error(seen, plain.A(x)) < NEAR
        assert error(back, torch.autograd.functional.vjp(plain.A, x, y)[1]) < NEAR
        assert error(ours.A_adjoint_A(x), ours.A_adjoint(plain.A(x))) < NEAR
    mask = physics.Inpainting(img_size=(1, 8, 8), mask=torch.ones(1, 8, 8))
    assert rewrite(mask) is mask


@pytest.mark.parametrize("size", [(24, 24), (25, 17)])
@pytest.mark.parametrize("padding", ["circular", "reflect"])
def test_images_of_another_size_are_left_to_deepinv(size: tuple[int, int], padding: str, physics: Any) -> None:
    kwargs = {"factor": 2, "filter": "gaussian", "padding": padding}
    x = torch.randn((1, 1, *size), generator=torch.Generator().manual_seed(1))
    for declared in ((1, 26, 18), (1, 32, 32), None):
        plain = physics.Downsampling(img_size=declared, **kwargs)
        y = plain.A(x)
        assert error(rewrite(plain).A(x), y) < NEAR
        try:
            wanted = plain.A_adjoint(y)
        except RuntimeError:
            with pytest.raises(RuntimeError, match="size"):
                rewrite(plain).A_adjoint(y)
        else:
            assert error(rewrite(plain).A_adjoint(y), wanted) < NEAR
