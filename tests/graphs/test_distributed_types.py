"""Distributed objects return the type they are given: tensors, NumPy arrays, Dask arrays, paths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import torch
import zarr

from halotile import DistributedContext, distribute
from halotile.errors import ConfigError, OutputRefused, TaskFailed
from halotile.graphs.clusters.base import RunningCluster
from tests.graphs.distributing import STACKS, Smooth, image, one_bright_pixel, refuse_bright, tiled
from tests.support import noisy_image, write_zarr

physics = pytest.importorskip("deepinv.physics")
optim = pytest.importorskip("deepinv.optim")

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]


def test_numpy_in_is_numpy_out(ctx: DistributedContext) -> None:
    parts, x = STACKS["circular blurs"](), image(1, 1, 20, 24)
    stack, pixels = distribute(parts, ctx), x.numpy()
    y = stack.A(pixels)
    assert all(isinstance(part, np.ndarray) for part in y)
    np.testing.assert_array_equal(stack.A_adjoint(y), stack.A_adjoint(stack.A(x)).numpy())
    found = tiled(ctx, torch.nn.Tanh())(pixels)
    np.testing.assert_array_equal(found, torch.tanh(x).numpy())
    slope = distribute(optim.L2(), ctx).grad(pixels, y, stack)
    assert isinstance(slope, np.ndarray)


def test_a_dask_array_in_is_a_lazy_one_out(ctx: DistributedContext) -> None:
    parts, x = STACKS["circular blurs"](), image(1, 1, 40, 24)
    stack, lazy = distribute(parts, ctx), da.from_array(x.numpy(), chunks=(1, 1, 16, 16))
    y = stack.A(lazy)
    assert all(isinstance(part, da.Array) for part in y)
    np.testing.assert_allclose(stack.A_adjoint(y).compute(), stack.A_adjoint_A(x).numpy(), atol=1e-5)
    with torch.no_grad():
        for net in (Smooth(), Smooth(scale=2)):
            denoised = tiled(ctx, net)(lazy)
            assert isinstance(denoised, da.Array)
            np.testing.assert_allclose(denoised.compute(), tiled(ctx, net)(x).numpy(), atol=1e-5)


def test_an_error_in_a_lazy_array_names_its_tile_or_operator(ctx: DistributedContext) -> None:
    lazy = da.from_array(one_bright_pixel().numpy())
    with pytest.raises(TaskFailed, match="denoise of tile 1 failed on a worker: ValueError: too bright"):
        tiled(ctx, refuse_bright, max_batch_size=1, overlap=0)(lazy).compute()
    picky = physics.LinearPhysics(A=refuse_bright, A_adjoint=refuse_bright)
    calm = physics.LinearPhysics(A=lambda x: 0 * x, A_adjoint=lambda x: 0 * x)
    with pytest.raises(TaskFailed, match="forward of operator 1 failed on a worker: ValueError: too bright"):
        da.compute(distribute([calm, picky], ctx).A(lazy))


def test_iterations_refuse_lazy_arrays(ctx: DistributedContext) -> None:
    stack = distribute(STACKS["circular blurs"](), ctx)
    lazy = da.zeros((1, 1, 20, 24), dtype="float32")
    refused: list[Callable[[], Any]] = [
        lambda: stack.A_dagger(stack.A(lazy)),
        lambda: stack.compute_sqnorm(lazy),
        lambda: stack.prox_l2(lazy, stack.A(lazy), 1.0),
        lambda: tiled(ctx, Smooth())(lazy, torch.ones(1, 1, 20, 24)),
    ]
    for run in refused:
        with pytest.raises(ConfigError, match=r"not computed yet.* compute\(\)"):
            run()


def test_a_path_in_is_a_path_out(ctx: DistributedContext, tmp_path: Path) -> None:
    parts, pixels = STACKS["circular blurs"](), noisy_image((1, 1, 40, 24))
    source = write_zarr(tmp_path / "x.zarr", pixels)
    stack = distribute(parts, ctx)
    y = stack.A(source)
    back = zarr.open_array(stack.A_adjoint(y), mode="r")
    np.testing.assert_allclose(back[...], stack.A_adjoint_A(pixels), atol=1e-5)
    found = zarr.open_array(tiled(ctx, torch.nn.Tanh())(str(source)), mode="r")
    np.testing.assert_allclose(found[...], np.tanh(pixels), atol=1e-6)


def test_a_stored_image_of_two_axes_comes_out_with_two(ctx: DistributedContext, tmp_path: Path) -> None:
    pixels = noisy_image((40, 24))
    stack = distribute(STACKS["circular blurs"](), ctx)
    write_zarr(tmp_path / "x", pixels)  # a name without a suffix
    y = stack.A(str(tmp_path / "x"))
    assert {zarr.open_array(path, mode="r").shape for path in y} == {(40, 24)}
    back = zarr.open_array(stack.A_adjoint(y), mode="r")[...]
    np.testing.assert_allclose(back, stack.A_adjoint_A(pixels[None, None])[0, 0], atol=1e-5)
    fidelity = distribute(optim.L2(), ctx)
    gradient = zarr.open_array(fidelity.grad(str(tmp_path / "x"), y, stack), mode="r")
    assert gradient.shape == (40, 24)
    misfit = fidelity.fn(str(tmp_path / "x"), y, stack)
    assert isinstance(misfit, np.ndarray), "a number, not the path of one"
    assert misfit == pytest.approx(0, abs=1e-6)
    assert float(stack.compute_norm(str(tmp_path / "x"))) == pytest.approx(
        float(stack.compute_norm(torch.zeros(1, 1, 40, 24))), rel=1e-3
    )
    found = zarr.open_array(tiled(ctx, torch.nn.Tanh())(str(tmp_path / "x")), mode="r")
    np.testing.assert_allclose(found[...], np.tanh(pixels), atol=1e-6)


def spectrum(x: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.fft.fft2(x.to(torch.complex64))


def back(y: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.fft.ifft2(y, norm="forward").real


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_are_kept(ctx: DistributedContext, dtype: torch.dtype) -> None:
    x = image(1, 1, 12, 12, dtype=dtype)
    stack = distribute([physics.Denoising(), physics.LinearPhysics(A=spectrum, A_adjoint=back)], ctx)
    y = stack.A(x)
    assert [part.dtype for part in y] == [dtype, torch.complex64]
    torch.testing.assert_close(y[1], spectrum(x))
    assert stack.A_adjoint(y).dtype == torch.promote_types(dtype, torch.float32)
    assert tiled(ctx, torch.nn.ReLU(), patch_size=8)(x).dtype == dtype


def test_results_of_paths_stay_in_the_folder_of_results(cluster: RunningCluster, tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "x.zarr", noisy_image((1, 1, 20, 24)))
    kept = tmp_path / "kept"
    for _ in range(2):
        with DistributedContext(cluster=cluster, device_mode="cpu", results=kept) as opened:
            stack = distribute(STACKS["circular blurs"]()[:2], opened)
            stack.A_adjoint(stack.A(source))
            tiled(opened, torch.nn.Tanh())(source)
    wanted = {f"{name}-000{k}" for k in (1, 2) for name in ("A_adjoint", "denoised", "A")}
    assert {path.stem.removesuffix("-0").removesuffix("-1") for path in kept.iterdir()} == wanted
    assert zarr.open_array(kept / "A-0002-1.zarr", mode="r").shape == (1, 1, 20, 24)


def test_temporary_results_are_deleted_with_the_context(cluster: RunningCluster, tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "x.zarr", noisy_image((1, 1, 20, 24)))
    with DistributedContext(cluster=cluster, device_mode="cpu") as opened:
        found = Path(tiled(opened, torch.nn.Tanh())(source))
        assert found.name == "denoised-0001.zarr"
        assert found.is_dir()
    assert not found.exists()


def test_a_folder_of_results_that_is_a_file_is_refused(cluster: RunningCluster, tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "x.zarr", noisy_image((1, 1, 20, 24)))
    (tmp_path / "taken").write_text("")
    with (
        DistributedContext(cluster=cluster, device_mode="cpu", results=tmp_path / "taken") as opened,
        pytest.raises(OutputRefused, match=r"results is .*taken, which cannot be a folder"),
    ):
        tiled(opened, torch.nn.Tanh())(source)
