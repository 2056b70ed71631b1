"""Training, ptychography and ranks on a GPU: what they compute on a CPU, and the same bits each time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import halotile
from halotile.cli.main import app
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.scans.convert import write_scan
from halotile.tasks.groups import opening
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.ptychography.opened import SimulatedScan
from tests.cases import all_of
from tests.graphs import test_collectives as collectives
from tests.support import noisy_image, write_zarr

pytestmark = [pytest.mark.gpu, pytest.mark.cluster]


LARGEST_GAP = {"train": 1e-3, "adam": 5e-3, "rpie": 5e-3, "lbfgs": 1e-5}


"""Relative, of a loss after some steps, by the device. Of Adam and rPIE rounding grows: patterns that differ by 1e-7 lead to losses on one CPU that
differ by up to 2e-4 and 9e-4; with L-BFGS, by 1e-8."""


TRAINING: Mapping[str, Any] = {
    "job": "train",
    "input": {"path": "in.zarr"},
    "network": {"name": "unet", "width": 8},
    "steps": 20,
    "patch": 32,
    "batch": 8,
}


SCAN: Mapping[str, Any] = {
    "job": "ptychography",
    "input": {"path": "scan.zarr"},
    "model": {"modes": 2},
    "resolution": True,
}


STAGES = {
    "adam": {"solver": "adam", "epochs": 4, "lr": 0.05, "batch": 16},
    "rpie": {"solver": "rpie", "epochs": 4, "batch": 16},
    "lbfgs": {"solver": "lbfgs", "epochs": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A noisy image and a scan."""
    path = tmp_path_factory.mktemp("programs")
    write_zarr(path / "in.zarr", noisy_image((320, 300)))
    scan = SimulatedScan(raster=(8, 8), pattern=32, step=3.0, modes=2)
    write_scan(str(path / "scan.zarr"), scan.scan, scan)
    return path


def losses(folder: Path, job: Mapping[str, Any], name: str, device: str) -> list[float]:
    """Those of a job on one worker that computes on a device."""
    run = {"workers": 1, "device": device}
    places = {"input": {"path": str(folder / job["input"]["path"])}, "output": {"path": str(folder / name)}}
    content = {"version": 1, **job, **places, "run": run, "cluster": {"kind": "local", "dashboard": False}}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(content, indent=1))
    done = CliRunner().invoke(app, ["run", str(path), "--quiet"])
    assert done.exit_code == 0, done.output
    lines = RunDirectory.beside(folder / name).iterations_path.read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def gap(found: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    return float(np.max(np.abs(np.subtract(found, expected)) / np.abs(expected)))


@pytest.mark.thorough
def test_a_training_on_a_gpu_is_that_of_a_cpu_and_the_same_each_time(folder: Path, gpu: str) -> None:
    expected = losses(folder, TRAINING, "cpu.safetensors", "cpu")
    found = losses(folder, TRAINING, "first.safetensors", gpu)
    assert gap(found, expected) < LARGEST_GAP["train"]
    assert losses(folder, TRAINING, "second.safetensors", gpu) == found
    assert (folder / "first.safetensors").read_bytes() == (folder / "second.safetensors").read_bytes()


@pytest.mark.parametrize("solver", all_of(sorted(STAGES), thorough=["lbfgs", "rpie"]))
def test_a_scan_is_reconstructed_on_a_gpu_as_on_a_cpu_and_the_same_each_time(
    folder: Path, gpu: str, solver: str
) -> None:
    job = {**SCAN, "stages": [STAGES[solver]]}
    expected = losses(folder, job, f"cpu-{solver}.cxi", "cpu")
    found = losses(folder, job, f"first-{solver}.cxi", gpu)
    assert gap(found[:1], expected[:1]) < 1e-3
    assert gap(found, expected) < LARGEST_GAP[solver]
    assert losses(folder, job, f"second-{solver}.cxi", gpu) == found
    objects = []
    for number in ("first", "second"):
        with h5py.File(folder / f"{number}-{solver}.cxi") as file:
            objects.append(file["entry_1/image_1/data"][...])
    np.testing.assert_array_equal(*objects)


@pytest.mark.thorough
def test_epochs_from_python_go_on_where_the_last_call_ended(folder: Path, gpu: str) -> None:
    results = []
    for calls in ((3,), (2, 1)):
        scan = halotile.ptychography.open(folder / "scan.zarr", modes=2)
        context = halotile.DistributedContext(
            workers=1, cluster={"kind": "local"}, device_mode="gpu" if gpu == "cuda" else "cpu"
        )
        with context, halotile.ptychography.Adam(scan, context=context) as adam:
            for epochs in calls:
                list(adam.optimize(epochs, lr=0.01, batch_size=16))
        results.append((scan.losses, scan.object))
    assert results[0][0] == results[1][0]
    np.testing.assert_array_equal(results[0][1], results[1][1])


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect nccl on loopback."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")


def test_every_collective_and_its_gradient_has_the_numbers_of_a_cpu(gpu: str, tmp_path: Path) -> None:
    expected, backend = with_gradients(TorchGroup()), "nccl" if gpu == "cuda" else "gloo"
    opening._connect(opening.Rendezvous(meeting=str(tmp_path / "meeting")), backend)  # with itself
    try:
        group = TorchGroup(device=torch.device(gpu, 0), backend=backend)
        actual = with_gradients(group)
        for each in (group, opening._beside(group)):  # both barriers of ranks on GPUs
            each.barrier()
    finally:
        dist.destroy_process_group()
    assert len(actual) == 55
    for name, tensors in expected.items():
        torch.testing.assert_close(actual[name], tensors, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def with_gradients(group: TorchGroup) -> dict[str, list[torch.Tensor]]:
    """What each gives on the device of a group, and its gradient, brought to the CPU, where all numbers are drawn."""
    found = {}
    for name, (operator, shape, dtype) in collectives.operators(group).items():
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(shape, dtype=dtype, generator=generator).to(group.device).requires_grad_()
        y = operator(x)
        v = torch.randn(y.shape, dtype=y.dtype, generator=generator).to(group.device)
        (gradient,) = torch.autograd.grad(y, x, v)
        assert y.device.type == gradient.device.type == torch.device(group.device).type
        found[name] = [y.detach().cpu(), gradient.cpu()]
    return found
