"""A context joins or starts a cluster, reports failures at once, and leaves nothing behind."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import dask.array as da
import pytest
import torch
from distributed import Client, LocalCluster, default_client

from halotile import DistributedContext, distribute
from halotile.errors import ConfigError, MemoryRefused, TaskFailed, WrongKind
from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.distributed import context
from halotile.graphs.distributed.context import task_bytes
from halotile.graphs.plans.needs import IMPORTS_BYTES
from tests.graphs.distributing import STACKS, image, one_bright_pixel, refuse_bright, tiled
from tests.support import IN_THREADS

physics = pytest.importorskip("deepinv.physics")
optim = pytest.importorskip("deepinv.optim")

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]


def test_a_context_joins_the_cluster_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(n_workers=1, **IN_THREADS) as running:
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", running.scheduler_address)
        with DistributedContext(device_mode="cpu") as joined:
            assert joined.world_size == 1
            assert torch.equal(tiled(joined, torch.nn.ReLU())(image(1, 1, 20, 20)), image(1, 1, 20, 20).relu())


def test_a_client_of_the_user_stays_the_default() -> None:
    with LocalCluster(n_workers=1, **IN_THREADS) as theirs, Client(theirs) as client:
        array = da.ones((10, 10), chunks=5).persist()
        with LocalCluster(n_workers=1, **IN_THREADS) as other:
            address = other.scheduler_address
            with pytest.MonkeyPatch.context() as patched:
                patched.setenv("DASK_SCHEDULER_ADDRESS", address)
                with DistributedContext(device_mode="cpu") as joined:
                    assert default_client() is client
                    assert float(array.sum().compute()) == 100.0
                    assert joined.client is not client
            with other.get_client() as given, DistributedContext(cluster=given, device_mode="cpu"):
                assert default_client() is given
        assert default_client() is client


def test_an_unreachable_scheduler_is_reported_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tcp://127.0.0.1:9")
    monkeypatch.setattr("halotile.graphs.clusters.scheduler.CONNECT_SECONDS", 1)
    with (
        pytest.raises(ConfigError, match=r"tcp://127\.0\.0\.1:9.*leave DASK_SCHEDULER_ADDRESS out"),
        DistributedContext(),
    ):
        pass


def test_a_cluster_has_the_memory_of_a_control_group_and_the_patience_of_its_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(order: Order) -> None:
        silent = order.scheduler_options["worker_ttl"]
        raise ConfigError(f"{order.workers} workers of {order.memory_bytes} bytes, silent for {silent:g} s")

    monkeypatch.setattr(context, "machine_bytes", lambda: 2**30)
    monkeypatch.setattr(local, "start", start)
    with (
        pytest.raises(ConfigError, match=f"2 workers of {2**29} bytes, silent for 3600 s"),
        DistributedContext(workers=2, cluster="local", stall_seconds=3600.0),
    ):
        pass


def test_an_error_names_its_operator_and_leaves_the_cluster_usable(ctx: DistributedContext) -> None:
    stack = distribute(STACKS["circular blurs"](), ctx)
    x = image(1, 1, 20, 24)
    y = list(stack.A(x))
    with pytest.raises(TaskFailed, match=r"adjoint of operator 2 failed on a worker: \w+"):
        stack.A_adjoint([*y[:2], torch.ones(3), y[3]])
    assert len(stack.A(x)) == 4


def test_an_error_names_its_tile(ctx: DistributedContext) -> None:
    with pytest.raises(TaskFailed, match="denoise of tile 1 failed on a worker: ValueError: too bright"):
        tiled(ctx, refuse_bright, max_batch_size=1, overlap=0)(one_bright_pixel())


@pytest.mark.parametrize("deaths", [1, 99])
def test_a_worker_that_dies_is_replaced_and_one_that_dies_again_and_again_is_an_error(
    tmp_path: Path, deaths: int
) -> None:
    log = tmp_path / "log"

    def die(batch: torch.Tensor) -> torch.Tensor:
        before = log.read_text() if log.exists() else ""
        if len(before) < deaths:
            log.write_text(before + "x")
            os._exit(3)
        return 2 * batch

    with DistributedContext(workers=1, device_mode="cpu") as fresh:
        if deaths > 1:
            with pytest.raises(TaskFailed, match=r"the worker that had task denoise-\w+-tiles?-0.* died"):
                tiled(fresh, die)(torch.ones(1, 1, 20, 20))
            assert len(log.read_text()) == 3
        else:
            assert torch.equal(tiled(fresh, die)(torch.ones(1, 1, 20, 20)), 2 * torch.ones(1, 1, 20, 20))


def test_the_folder_is_private_and_deleted_with_the_context(cluster: RunningCluster, tmp_path: Path) -> None:
    with DistributedContext(cluster=cluster, scratch=tmp_path, device_mode="cpu") as opened:
        folder = opened.folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        stack = distribute(STACKS["one"](), opened)
        before = sorted(folder.rglob("*"))
        stack.A_adjoint_A(image(1, 1, 20, 24))
        assert sorted(folder.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="not open"):
        stack.A(image(1, 1, 20, 24))


def test_collectives_of_a_single_rank(ctx: DistributedContext) -> None:
    x = torch.ones(2)
    assert (ctx.rank, ctx.world_size, ctx.use_dist, ctx.get_backend()) == (0, 2, False, "dask")
    assert ctx.local_indices(5) == [0, 1, 2, 3, 4]
    assert ctx.all_reduce(x) is x
    assert ctx.broadcast(x) is x
    assert ctx.all_gather(x).shape == (1, 2)


@pytest.mark.parametrize(
    ("thing", "options", "message"),
    [
        (3, {}, "the object is a int"),
        (lambda x: x, {}, "that can be called: its kind is not clear"),
        ([], {}, "holds nothing"),
        ([torch.nn.ReLU(), 3], {}, "holds ReLU, int"),
        (torch.nn.ReLU(), {}, "Cannot auto-detect generic torch.nn.Module: ReLU"),
        (lambda *_: None, {"type_object": "physics"}, "num_operators is None"),
        (torch.nn.ReLU(), {"type_object": "what"}, "type_object is 'what'"),
        (torch.nn.ReLU(), {"type_object": "denoiser", "tiling_strategy": "smart"}, "tiling_strategy is 'smart'"),
        (torch.nn.ReLU(), {"type_object": "denoiser", "blending": "cubic"}, "blending is 'cubic'"),
        (torch.nn.ReLU(), {"type_object": "denoiser", "pach_size": 3}, "no keyword 'pach_size'"),
    ],
)
def test_invalid_arguments_are_refused_with_their_values(
    ctx: DistributedContext, thing: Any, options: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        distribute(thing, ctx, **options)(torch.ones(1, 1, 4, 4))


def test_operators_of_another_kind_are_refused(ctx: DistributedContext) -> None:
    with pytest.raises(WrongKind, match="holds int"):
        distribute([3], ctx, type_object="physics")
    with pytest.raises(WrongKind, match=r"holds Physics\. Write LinearPhysics objects"):
        distribute([physics.Physics()], ctx, type_object="linear_physics")
    stack = distribute(lambda *_: 3, ctx, type_object="linear_physics", num_operators=1)
    with pytest.raises(TaskFailed, match="must return LinearPhysics"):
        stack.A(image(1, 1, 8, 8))


def test_whole_images_that_do_not_fit_into_a_worker_are_refused(
    ctx: DistributedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, x = distribute(STACKS["seven"](), ctx), image(1, 1, 100, 100)
    file_bytes = 4 * x.numel() + 128
    needed = 7 * file_bytes  # the image mapped, three of it and three measurements as large
    monkeypatch.setattr(ctx, "task_bytes", IMPORTS_BYTES + needed)
    assert len(stack.A(x)) == 7
    monkeypatch.setattr(ctx, "task_bytes", IMPORTS_BYTES + needed - 1)
    with pytest.raises(MemoryRefused, match=r"operator 0 works on whole images: .*memory_per_worker='70\dMiB'"):
        stack.A(x)
    assert tiled(ctx, torch.nn.ReLU())(x).shape == x.shape


def test_the_memory_of_a_task_is_the_share_of_a_thread(ctx: DistributedContext) -> None:
    assert task_bytes(ctx.client) == 4 * 2**30
