"""Contexts, what they accept and return, and that no torch tensor crosses a border; distributed fidelities in deepinv's algorithms and networks."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import dask.array as da
import numpy as np
import pytest
import torch
import zarr
from distributed import Client, LocalCluster, default_client

from halotile import DistributedContext, distribute
from halotile.errors import ConfigError, MemoryRefused, OutputRefused, TaskFailed, WrongKind
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.distributed.context import task_bytes
from halotile.graphs.plans.needs import IMPORTS_BYTES
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from tests.cases import all_of, thorough
from tests.graphs.distributing import NEAR, STACKS, Patch, Smooth, difference, image, models, optim, physics, tiled
from tests.graphs.trials import deblurring
from tests.support import IN_THREADS, dncnn_weights, job_of, noisy_image, write_zarr

peer = pytest.importorskip("deepinv.distributed")

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]


def blurs(count: int = 3) -> list[Any]:
    return STACKS["circular blurs"]()[:count]


def refuse_bright(batch: torch.Tensor) -> torch.Tensor:
    if batch.max() > 8:
        raise ValueError("too bright")
    return batch


# --- contexts -------------------------------------------------------------------------------------


def test_a_context_joins_the_cluster_of_the_environment_and_a_client_of_the_user_stays_the_default() -> None:
    x = image(1, 1, 20, 20)
    with LocalCluster(n_workers=1, **IN_THREADS) as theirs, Client(theirs) as client:
        array = da.ones((10, 10), chunks=5).persist()
        with LocalCluster(n_workers=1, **IN_THREADS) as other:
            with Patch.context() as patched:
                patched.setenv("DASK_SCHEDULER_ADDRESS", other.scheduler_address)
                with DistributedContext(device_mode="cpu") as joined:
                    assert joined.world_size == 1
                    assert torch.equal(tiled(joined, torch.nn.ReLU())(x), x.relu())
                    assert default_client() is client
                    assert float(array.sum().compute()) == 100.0
                    assert joined.client is not client
            with other.get_client() as given, DistributedContext(cluster=given, device_mode="cpu"):
                assert default_client() is given
        assert default_client() is client


def test_an_unreachable_scheduler_is_reported_with_its_address(monkeypatch: Patch) -> None:
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tcp://127.0.0.1:9")
    monkeypatch.setattr("halotile.graphs.clusters.scheduler.CONNECT_SECONDS", 1)
    words = r"tcp://127\.0\.0\.1:9.*or remove DASK_SCHEDULER_ADDRESS to have workers on this machine"
    with pytest.raises(ConfigError, match=words), DistributedContext():
        pass


def test_an_error_names_its_operator_or_tile_and_leaves_the_cluster_usable(ctx: DistributedContext) -> None:
    stack, x = distribute(blurs(4), ctx), image(1, 1, 20, 24)
    y = list(stack.A(x))
    with pytest.raises(TaskFailed, match=r"adjoint of operator 2 failed on a worker: \w+"):
        stack.A_adjoint([*y[:2], torch.ones(3), y[3]])
    bright = torch.zeros(1, 1, 40, 16)
    bright[..., 20, 8] = 9  # in the second of three tiles
    picky = physics.LinearPhysics(A=refuse_bright, A_adjoint=refuse_bright)
    calm = physics.LinearPhysics(A=lambda x: 0 * x, A_adjoint=lambda x: 0 * x)
    tiles = tiled(ctx, refuse_bright, max_batch_size=1, overlap=0)
    for given in (bright, da.from_array(bright.numpy())):
        with pytest.raises(TaskFailed, match="denoise of tile 1 failed on a worker: ValueError: too bright"):
            da.compute(tiles(given))
        with pytest.raises(TaskFailed, match="forward of operator 1 failed on a worker: ValueError: too bright"):
            da.compute(distribute([calm, picky], ctx).A(given))
    assert len(stack.A(x)) == 4


@pytest.mark.parametrize("deaths", [1, 99])
def test_a_worker_that_dies_is_replaced_and_one_that_dies_often_is_an_error(tmp_path: Path, deaths: int) -> None:
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
        stack = distribute(blurs(), opened)
        before = sorted(folder.rglob("*"))
        stack.A_adjoint_A(image(1, 1, 20, 24))
        assert sorted(folder.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="not open"):
        stack.A(image(1, 1, 20, 24))


def denoiser(**options: Any) -> tuple[Any, dict[str, Any]]:
    return torch.nn.ReLU(), {"type_object": "denoiser", **options}


INVALID: list[tuple[tuple[Any, dict[str, Any]], type[Exception], str]] = [
    ((3, {}), ConfigError, "the object is a int"),
    ((lambda x: x, {}), ConfigError, "that can be called: its kind is not clear"),
    (([], {}), ConfigError, "holds nothing"),
    (([torch.nn.ReLU(), 3], {}), ConfigError, "holds ReLU, int"),
    ((torch.nn.ReLU(), {}), ConfigError, "Cannot auto-detect generic torch.nn.Module: ReLU"),
    ((lambda *_: None, {"type_object": "physics"}), ConfigError, "num_operators is None"),
    (denoiser(type_object="what"), ConfigError, "type_object is 'what'"),
    (denoiser(tiling_strategy="smart"), ConfigError, "tiling_strategy is 'smart'"),
    (denoiser(blending="cubic"), ConfigError, "blending is 'cubic'"),
    (denoiser(pach_size=3), ConfigError, "no keyword 'pach_size'"),
    (([3], {"type_object": "physics"}), WrongKind, "holds int"),
    (([physics.Physics()], {"type_object": "linear_physics"}), WrongKind, r"holds Physics\. Write LinearPhysics objects"),
    ((lambda *_: 3, {"type_object": "linear_physics", "num_operators": 1}), TaskFailed, "must return LinearPhysics"),
]  # fmt: skip


def test_invalid_arguments_are_refused_with_their_values(ctx: DistributedContext) -> None:
    for (thing, options), kind, message in INVALID:
        with pytest.raises(kind, match=message):
            distribute(thing, ctx, **options)(torch.ones(1, 1, 4, 4))


def test_images_that_do_not_fit_into_a_worker_are_refused(ctx: DistributedContext, monkeypatch: Patch) -> None:
    assert task_bytes(ctx.client) == 4 * 2**30, "the share of a thread"
    stack, x = distribute(STACKS["seven"](), ctx), image(1, 1, 100, 100)
    needed = 7 * (4 * x.numel() + 128)  # the image mapped, three of it and three measurements as large
    monkeypatch.setattr(ctx, "task_bytes", IMPORTS_BYTES + needed)
    assert len(stack.A(x)) == 7
    monkeypatch.setattr(ctx, "task_bytes", IMPORTS_BYTES + needed - 1)
    with pytest.raises(MemoryRefused, match=r"operator 0 works on whole images: .*memory_per_worker='70\dMiB'"):
        stack.A(x)
    assert tiled(ctx, torch.nn.ReLU())(x).shape == x.shape


# --- types ----------------------------------------------------------------------------------------


def as_numpy(result: Any) -> Any:
    """The pixels of a result of any type, or of each of several."""
    if isinstance(result, str | Path):
        return zarr.open_array(result, mode="r")[...]
    if isinstance(result, torch.Tensor | np.ndarray | da.Array):
        return np.asarray(result)
    return [as_numpy(part) for part in result]


CALLS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "A": lambda stack, data, net, x: stack.A(x),
    "A_adjoint": lambda stack, data, net, x: stack.A_adjoint(stack.A(x)),
    "A_adjoint_A": lambda stack, data, net, x: stack.A_adjoint_A(x),
    "grad": lambda stack, data, net, x: data.grad(x, stack.A(x), stack),
    "denoise": lambda stack, data, net, x: net(x),
}


@pytest.mark.parametrize("kind", ["array", "dask", "path", "path of two axes"])
def test_objects_return_the_type_that_they_are_given(ctx: DistributedContext, tmp_path: Path, kind: str) -> None:
    x: Any = image(1, 1, 40, 24)
    stack, data = distribute(blurs(), ctx), distribute(optim.L2(), ctx)
    net, given = tiled(ctx, Smooth(2).requires_grad_(False)), x.numpy()
    if kind == "dask":
        given = da.from_array(x.numpy(), chunks=(1, 1, 16, 16))
    elif kind != "array":  # one with a suffix, and one without
        name, pixels = ("x.zarr", x) if kind == "path" else ("x", x[0, 0])
        given = str(write_zarr(tmp_path / name, pixels.numpy()))
    for name, call in CALLS.items():
        found, expected = call(stack, data, net, given), call(stack, data, net, x)
        several = [found, expected] if name == "A" else [[found], [expected]]
        for ours, truth in zip(*several, strict=True):
            assert isinstance(ours, str | Path if "path" in kind else type(given)), name
            truth = truth.numpy()[0, 0] if "axes" in kind else truth.numpy()
            np.testing.assert_allclose(as_numpy(ours), truth, atol=1e-5)
    if "path" in kind:
        misfit = data.fn(given, stack.A(given), stack)
        assert isinstance(misfit, np.ndarray), "a number, not the path of one"
        assert misfit == pytest.approx(0, abs=1e-6)
        norms = [float(stack.compute_norm(each, verbose=False)) for each in (given, torch.zeros(1, 1, 40, 24))]
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)


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


def test_results_of_paths_stay_in_their_folder_or_end_with_the_context(cluster: RunningCluster, tmp_path: Path) -> None:
    source, kept = write_zarr(tmp_path / "x.zarr", noisy_image((1, 1, 20, 24))), tmp_path / "kept"
    for _ in range(2):
        with DistributedContext(cluster=cluster, device_mode="cpu", results=kept) as opened:
            stack = distribute(blurs(2), opened)
            stack.A_adjoint(stack.A(source))
            tiled(opened, torch.nn.Tanh())(source)
    wanted = {f"{name}-000{k}" for k in (1, 2) for name in ("A_adjoint", "denoised", "A")}
    assert {path.stem.removesuffix("-0").removesuffix("-1") for path in kept.iterdir()} == wanted
    assert zarr.open_array(kept / "A-0002-1.zarr", mode="r").shape == (1, 1, 20, 24)
    with DistributedContext(cluster=cluster, device_mode="cpu") as opened:
        found = Path(tiled(opened, torch.nn.Tanh())(source))
        assert found.name == "denoised-0001.zarr"
        assert found.is_dir()
    assert not found.exists()
    (tmp_path / "taken").write_text("")
    refused = pytest.raises(OutputRefused, match=r"results is .*taken, which cannot be a folder")
    with DistributedContext(cluster=cluster, device_mode="cpu", results=tmp_path / "taken") as opened, refused:
        tiled(opened, torch.nn.Tanh())(source)


# --- fidelities -----------------------------------------------------------------------------------

FIDELITIES: dict[str, Callable[[], Any]] = {
    "l2": lambda: optim.L2(sigma=0.5),
    "l1": optim.L1,
    "poisson": lambda: optim.PoissonLikelihood(gain=0.5),
    "log-poisson": optim.LogPoissonLikelihood,
    "amplitude": optim.AmplitudeLoss,
    "zero": optim.ZeroFidelity,
}


def given(form: str, make: Callable[[], Any], ctx: DistributedContext) -> Any:
    """A distributed fidelity of three operators in one of the accepted forms."""
    if form == "factory":
        return distribute(lambda *_, made=make(): made, ctx, num_operators=3, type_object="data_fidelity")
    several = [make() for _ in range(3)]
    forms = {"single": make(), "list": several, "stacked": optim.StackedPhysicsDataFidelity(several)}
    return distribute(forms[form], ctx)


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(found, wanted) or difference(found, wanted) < NEAR


NONLINEAR = "nonlinear "
FORMS: list[Any] = [
    *itertools.product(FIDELITIES, ("single", "stacked")),
    *(thorough(*case) for case in itertools.product(FIDELITIES, ("list", "factory"))),
    *itertools.product((NONLINEAR + "l2", NONLINEAR + "l1"), ("single", "list")),
]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_value_gradient_and_prox_equal_the_plain_stack(ctx: DistributedContext, name: str, form: str) -> None:
    make, kwargs = FIDELITIES[name.removeprefix(NONLINEAR)], {"gamma": 0.2, "stepsize_inter": 0.3, "max_iter_inter": 4}
    plain = optim.StackedPhysicsDataFidelity([make() for _ in range(3)])
    x, operators = image(2, 1, 20, 24).abs() + 0.1, physics.StackedLinearPhysics(blurs())
    if name.startswith(NONLINEAR):
        parts = [physics.Physics(A=torch.square), physics.Physics(A=torch.exp), physics.Denoising()]
        x, operators = image(2, 1, 20, 24), physics.StackedPhysics(parts)
        kwargs = {"gamma": 0.01, "stepsize_inter": 0.1, "max_iter_inter": 3}
    y, stack, fidelity = operators.A(x.flip(-1)), distribute(operators, ctx), given(form, make, ctx)
    assert near(fidelity.fn(x, y, stack), plain.fn(x, y, operators))
    assert near(fidelity.grad(x, y, stack), plain.grad(x, y, operators))
    assert near(plain.grad(x, y, stack), plain.grad(x, y, operators))
    if name != "l2":
        assert near(fidelity.prox(x, y, stack, **kwargs), plain.prox(x, y, operators, **kwargs))


@pytest.mark.parametrize("form", ["single", "list", "factory"])
def test_the_prox_of_squares_solves_its_equation(ctx: DistributedContext, form: str) -> None:
    def made(index: int, device: Any, shared: Any) -> Any:
        return optim.L2(sigma=(0.1, 0.3)[index])

    forms: dict[str, Any] = {"single": optim.L2(), "list": [made(n, None, None) for n in range(2)], "factory": made}
    weights = [1.0, 1.0] if form == "single" else [1 / 0.1**2, 1 / 0.3**2]
    parts, z = blurs(2), image(1, 1, 20, 24).flip(-1)
    y = [part.A(z.flip(-2)) for part in parts]
    fidelity = distribute(forms[form], ctx, num_operators=2, type_object="data_fidelity")
    x = fidelity.prox(z, y, distribute(parts, ctx), gamma=0.7)
    left = x + 0.7 * sum(w * part.A_adjoint_A(x) for w, part in zip(weights, parts, strict=True))
    right = z + 0.7 * sum(w * part.A_adjoint(each) for w, part, each in zip(weights, parts, y, strict=True))
    assert difference(left, right) < NEAR


class Quartic(optim.Distance):  # type: ignore[misc]
    def fn(self, x: torch.Tensor, y: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return (x - y).pow(4).flatten(1).sum(1) / 4

    def grad(self, x: torch.Tensor, y: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return (x - y).pow(3)


def test_a_prox_that_diverges_is_refused_and_one_that_has_not_converged_reported(ctx: DistributedContext) -> None:
    stack, x = distribute([physics.Denoising()], ctx), image(1, 1, 20, 24)
    quartic = distribute(optim.DataFidelity(Quartic()), ctx)
    with pytest.raises(ConfigError, match=r"prox: the descent diverged.* Write a smaller stepsize_inter"):
        quartic.prox(x, [x + 3], stack, gamma=1.0, max_iter_inter=5)
    with pytest.warns(UserWarning, match="prox: the descent did not converge: the residual of its equation is"):
        distribute(optim.L1(), ctx).prox(x, [x + 0.01], stack, gamma=0.1, max_iter_inter=3)
    with pytest.raises(ConfigError, match="Distribute both by halotile"):
        peer.distribute(optim.L2(), ctx).grad(x, stack.A(x), stack)


# --- deepinv's algorithms and networks ------------------------------------------------------------


class L2OfStacks(optim.L2):  # type: ignore[misc]
    """deepinv's L2, whose value fails on a stack."""

    def fn(self, x: torch.Tensor, y: Any, physics: Any, *args: Any, **kwargs: Any) -> Any:
        return sum(super(L2OfStacks, self).fn(x, part, one) for part, one in zip(y, physics, strict=True))


ALGORITHMS: dict[str, dict[str, Any]] = {
    "GD": {}, "PGD": {}, "FISTA": {"a": 3}, "HQS": {}, "ADMM": {"beta": 1.0}, "DRS": {"beta": 1.0}, "OSEM": {}, "BSREM": {},
}  # fmt: skip


@pytest.mark.parametrize("distributed", ["physics", "all"])
@pytest.mark.parametrize("algorithm", all_of(ALGORITHMS, thorough=["GD", "DRS"]))
def test_algorithms_of_deepinv_accept_our_objects(ctx: DistributedContext, algorithm: str, distributed: str) -> None:
    plain, x = physics.StackedLinearPhysics(blurs()), image(2, 1, 20, 24).abs() + 0.1
    y = plain.A(x.flip(-1))
    plain.solver, plain.tol, plain.max_iter = "CG", 3e-7, 40  # its own prox ends at 1e-4
    stack, fidelity = distribute(plain, ctx), L2OfStacks()
    prior = optim.PnP(models.MedianFilter(3)) if algorithm != "GD" else optim.Tikhonov()
    tiles = prior
    if distributed == "all":
        fidelity = distribute(optim.L2(), ctx)
        tiles = distribute(prior, ctx, patch_size=32) if algorithm != "GD" else prior
    kwargs = {"stepsize": 0.3, "lambda": 0.1, "g_param": 0.05, **ALGORITHMS[algorithm]}

    def run(data_fidelity: Any, used: Any, operators: Any) -> torch.Tensor:
        if algorithm in ("OSEM", "BSREM"):
            found: torch.Tensor = getattr(optim, algorithm)(num_subsets=3, max_iter=2)(y, operators)
            return found
        model = optim.optim_builder(
            algorithm, max_iter=3, data_fidelity=data_fidelity, prior=used, params_algo=dict(kwargs), early_stop=False
        )
        found = model(y, operators, init=(x, x))
        return found

    assert difference(run(fidelity, tiles, stack), run(L2OfStacks(), prior, plain)) < NEAR


def test_a_single_physics_keeps_its_interface(ctx: DistributedContext) -> None:
    x, nonlinear = image(1, 1, 20, 24), physics.Physics(A=torch.square)
    for plain in (blurs()[0], nonlinear):
        one = distribute(plain, ctx)
        for each in (x, x.numpy()):
            assert type(one(each)) is type(each)
        assert difference(one(x), plain(x)) < NEAR
    assert len(distribute([nonlinear], ctx)(x)) == 1
    one, y = distribute(blurs()[0], ctx), blurs()[0].A(x)
    assert difference(one.A_adjoint(y), blurs()[0].A_adjoint(y)) < NEAR
    assert torch.equal(one.A_adjoint([y]), one.A_adjoint(y))
    assert one.A_A_adjoint(y).shape == one.A_dagger(y).shape == y.shape
    fidelity = FIDELITIES["poisson"]()
    for used in (distribute(fidelity, ctx), fidelity):
        assert near(used.fn(x.abs(), y.abs(), one), fidelity.fn(x.abs(), y.abs(), blurs()[0]))
        assert near(used.grad(x.abs(), y.abs(), one), fidelity.grad(x.abs(), y.abs(), blurs()[0]))
    lazy = one.A_adjoint(one.A(da.from_array(x.numpy())))
    assert difference(torch.from_numpy(lazy.compute()), blurs()[0].A_adjoint_A(x)) < NEAR


# --- no torch tensor crosses the border of a task: Dask takes its size for 80 bytes, and some hang


def watch_tensors() -> None:
    """From now on this process notes each tensor that Dask serialises, however deep inside of something it is."""
    import importlib
    import sys

    import torch

    families = importlib.import_module("distributed.protocol.serialize").dask_serialize
    own, reduce = families.dispatch(torch.Tensor), torch.Tensor.__reduce_ex__
    torch._crossed = []

    def noted(tensor: Any, *protocol: Any) -> Any:
        frame: Any = sys._getframe()
        while frame and not frame.f_globals.get("__name__", "").startswith("distributed.protocol."):
            frame = frame.f_back
        torch._crossed += [tuple(tensor.shape)] * bool(frame)
        return reduce(tensor, *protocol) if protocol else own(tensor)

    def undo() -> None:
        torch.Tensor.__reduce_ex__ = reduce
        families.register(torch.Tensor)(own)

    torch.Tensor.__reduce_ex__, torch._watched = noted, undo
    families.register(torch.Tensor)(noted)


Tensors = Callable[[], list[tuple[int, ...]]]


@pytest.fixture
def tensors(cluster: RunningCluster) -> Iterator[Tensors]:
    """What crossed a border since the beginning of the test, here and in every worker."""
    watch_tensors()
    cluster.client.run(watch_tensors)
    yield lambda: sum(cluster.client.run(lambda: [*torch._crossed]).values(), [*torch._crossed])
    cluster.client.run(lambda: torch._watched())
    torch._watched()


def test_no_tensor_crosses_in_runs(cluster: RunningCluster, tensors: Tensors, tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", noisy_image((300, 260), "uint16"))
    options: dict[str, Any] = {"weights": str(dncnn_weights(tmp_path / "w.safetensors")), "depth": 5, "width": 8}
    for job in (job_of(source, tmp_path / "out.zarr", "dncnn", options), deblurring(tmp_path, "cpu")):
        outcome = run(make_plan(job), cluster=cluster)
        assert outcome.done == outcome.total > 1
    assert tensors() == []


def test_none_crosses_between_distributed_objects_and_any_is_noticed(cluster: RunningCluster, tensors: Tensors) -> None:
    with DistributedContext(cluster=cluster, device_mode="cpu") as ctx:
        stack, x = distribute(STACKS["circular blurs"](), ctx), image(1, 1, 20, 24)
        assert stack.A_adjoint(stack.A(x)).shape == x.shape
        smooth = distribute(torch.nn.AvgPool2d(3, 1, 1), ctx, type_object="denoiser", patch_size=8, overlap=1)
        assert smooth(x).shape == x.shape
    assert tensors() == []
    gives: tuple[Callable[[], Any], ...] = (lambda: torch.zeros(3, 5), lambda: {"a": [torch.zeros(7)]})
    for number, give in enumerate(gives, 1):  # else what is above would say nothing
        cluster.client.submit(give, pure=False).result()
        assert len(tensors()) == number


def test_a_cluster_has_the_memory_of_a_control_group_and_patience(monkeypatch: Patch) -> None:
    started = Mock(side_effect=ConfigError("enough"))
    monkeypatch.setattr("halotile.graphs.distributed.context.machine_bytes", lambda: 2**30)
    monkeypatch.setattr("halotile.graphs.clusters.local.start", started)
    with pytest.raises(ConfigError), DistributedContext(workers=2, cluster="local", stall_seconds=3600.0):
        pass
    (order,) = started.call_args.args
    assert (order.workers, order.memory_bytes, order.scheduler_options["worker_ttl"]) == (2, 2**29, 3600)
