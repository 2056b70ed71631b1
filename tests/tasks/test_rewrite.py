"""Rewritten blurs give the results and derivatives of deepinv's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from halotile.tasks.distributed.stacks.blockwise import OperatorMethod, rewrite

physics = pytest.importorskip("deepinv.physics")

pytestmark = pytest.mark.filterwarnings("ignore")  # deepinv warns of its own defaults

NEAR = 1e-6


def kernel(edge: int) -> torch.Tensor:
    return torch.rand(1, 1, edge, edge, generator=torch.Generator().manual_seed(edge)) / edge**2


def blur(padding: str) -> Any:
    return physics.Blur(filter=kernel(5), padding=padding)


def downsampling() -> Any:
    return physics.Downsampling(img_size=(1, 24, 20), filter="gaussian", factor=2, padding="circular")


BLURS: dict[str, Callable[[], Any]] = {
    **{each: partial(blur, each) for each in ("circular", "reflect", "constant", "replicate", "valid")},
    "downsampling": downsampling,
}


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square error, relative to that of the expected result."""
    return float((found - wanted).norm() / wanted.norm())


def images(plain: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn((2, 1, 24, 20), generator=torch.Generator().manual_seed(1))
    return x, plain.A(x.flip(-1))


@pytest.mark.parametrize("name", BLURS)
def test_a_rewritten_blur_has_the_results_and_derivatives_of_the_physics(name: str) -> None:
    plain = BLURS[name]()
    ours, exact = rewrite(plain), rewrite(plain, exact=True)
    assert isinstance(ours.A, OperatorMethod)
    x, y = images(plain)
    assert error(ours.A(x), plain.A(x)) < NEAR
    # deepinv's own is not the transpose for every padding
    adjoint = torch.autograd.functional.vjp(plain.A, x, y)[1]
    assert error(ours.A_adjoint(y), adjoint) < NEAR
    assert error(ours.A_vjp(x, y), adjoint) < NEAR
    assert torch.equal(exact.A_adjoint_A(x), exact.A_adjoint(exact.A(x)))
    assert error(exact.A_adjoint_A(x), ours.A_adjoint_A(x)) < NEAR
    found = []
    for each in (ours, plain):
        x = images(plain)[0].requires_grad_()
        loss = (each.A(x) - y).square().square().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        found.append((slope.detach(), torch.autograd.grad(slope.square().sum(), x)[0]))
    assert max(map(error, *found)) < 3 * NEAR


def test_other_physics_are_not_rewritten() -> None:
    mask = physics.Inpainting(img_size=(1, 8, 8), mask=torch.ones(1, 8, 8))
    assert rewrite(mask) is mask


@pytest.mark.parametrize("padding", ["circular", "reflect", "replicate", "constant", "valid"])
def test_super_resolution_equals_deepinv_on_images_of_any_size(padding: str) -> None:
    filters = (None, "gaussian", "bilinear", "bicubic")
    for size, factor, filter_ in itertools.product([(32, 36), (35, 29), (33, 40)], [2, 3], filters):
        plain = physics.Downsampling(img_size=(1, *size), factor=factor, filter=filter_, padding=padding)
        ours = rewrite(plain)
        x = torch.randn((2, 1, *size), generator=torch.Generator().manual_seed(1))
        y = plain.A(x.flip(-1))
        seen, back = ours.A(x), ours.A_adjoint(y)
        assert back.shape == x.shape
        assert error(seen, plain.A(x)) < NEAR
        assert error(back, torch.autograd.functional.vjp(plain.A, x, y)[1]) < NEAR
        assert error(ours.A_adjoint_A(x), ours.A_adjoint(plain.A(x))) < NEAR
        gap = (seen.double() * y).sum() - (x.double() * back).sum()
        assert float(gap.abs() / (seen.norm() * y.norm())) < NEAR


@pytest.mark.parametrize("size", [(24, 24), (25, 17)])
@pytest.mark.parametrize("padding", ["circular", "reflect"])
def test_images_of_another_than_the_declared_size_are_left_to_deepinv(size: tuple[int, int], padding: str) -> None:
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
