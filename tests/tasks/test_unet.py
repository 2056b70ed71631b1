"""The U-Net denoiser: what it declares follows from its weights, and tiles have the bits of the whole image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from halotile.errors import WeightsError
from halotile.graphs.plans.plan import make_plan
from halotile.tasks.denoisers.common.layers import BlindUNet
from halotile.tasks.denoisers.unet import Architecture, UNet
from tests.support import job_of, noisy_image, run_inline, whole_picture, work_of, write_zarr


def saved(path: Path, channels: int = 1, width: int = 4, levels: int = 2) -> Path:
    torch.manual_seed(levels)
    network = BlindUNet(channels, width, levels)
    network.mean.fill_(0.4)
    network.deviation.fill_(0.2)
    save_file(network.state_dict(), path)
    return path


def test_it_looks_as_far_as_it_declares(tmp_path: Path) -> None:
    for levels in (1, 2, 3):
        denoiser = UNet(weights=str(saved(tmp_path / "w.safetensors", levels=levels)))
        network: Any = denoiser.reference()
        for parameter in network.parameters():
            parameter.data.abs_()  # nothing cancels
        size = 4 * 2**levels * 8
        seen = 0
        for place in range(size // 2, size // 2 + denoiser.alignment):
            image = torch.ones(1, 1, size, 8, requires_grad=True)
            network(image)[0, 0, place].sum().backward()
            assert image.grad is not None
            rows = image.grad[0, 0].abs().sum(1).nonzero()
            seen = max(seen, place - int(rows.min()), int(rows.max()) - place)
        assert denoiser.receptive_field() == seen
        assert denoiser.alignment == 2**levels


def test_an_image_that_is_the_same_everywhere_gets_no_frame(tmp_path: Path) -> None:
    """The network pads with zeros, which are pixels of the mean brightness: at the rim it sees the image continued instead."""
    source = write_zarr(tmp_path / "in.zarr", np.full((150, 130), 5, np.float32))
    weights = saved(tmp_path / "w.safetensors")
    job = job_of(source, tmp_path / "out.zarr", "unet", {"weights": str(weights)}, tile={"size": 64})
    assert not any("differ" in note for note in make_plan(job).notes)
    assert np.ptp(run_inline(job)) < 1e-5


@pytest.mark.parametrize(
    ("shape", "axes", "channels"), [((203, 187), "yx", 1), ((3, 90, 101), "tyx", 1), ((2, 131, 90), "cyx", 2)]
)
def test_tiles_have_the_bits_of_the_whole_image(
    tmp_path: Path, shape: tuple[int, ...], axes: str, channels: int
) -> None:
    pixels = noisy_image(shape, "float32")
    source = write_zarr(tmp_path / "in.zarr", pixels, axes=axes)
    weights = saved(tmp_path / "w.safetensors", channels)
    results = []
    for tile in (48, 64, 256):
        job = job_of(
            source, tmp_path / f"{tile}.zarr", "unet", {"weights": str(weights)}, tile={"size": tile}, shard=64
        )
        results.append(run_inline(job))
    assert all(np.array_equal(result, results[0]) for result in results)
    if channels == 1:
        expected = whole_picture(job, pixels, work_of(make_plan(job)).task.tiling.depth[0][0])
        assert np.array_equal(results[0], expected)


def test_training_has_the_numbers_of_its_use() -> None:
    for levels in (1, 2, 3):
        network = BlindUNet(2, 4, levels).double()
        image, weights = torch.randn(2, 3, 2, 21, 18, dtype=torch.float64)
        results = []
        for training in (True, False):
            network.train(training)
            part = image.clone().requires_grad_()
            result = network(part)
            results.append([result, *torch.autograd.grad(result, [part, *network.parameters()], weights)])
        for trained, used in zip(*results, strict=True):
            assert torch.allclose(trained, used, rtol=0, atol=1e-12 * float(used.detach().abs().max()))


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    save_file({"conv.weight": torch.zeros(3, 1, 3, 3)}, tmp_path / "a.safetensors")
    with pytest.raises(WeightsError, match=r"it has no 'last\.weight'"):
        UNet(weights=str(tmp_path / "a.safetensors")).check()
    for shape, why in (((1, 4), r"last\.weight is \(1, 4\)"), ((1, 4, 1, 1), r"it has no 'up\.0\.0\.weight'")):
        save_file({"last.weight": torch.zeros(shape)}, tmp_path / "c.safetensors")
        with pytest.raises(WeightsError, match=why):
            UNet(weights=str(tmp_path / "c.safetensors")).check()
    tensors = BlindUNet(1, 4, 2).state_dict()
    tensors["down.0.0.weight"] = torch.zeros(5, 1, 3, 3)
    save_file(tensors, tmp_path / "b.safetensors")
    with pytest.raises(WeightsError, match=r"down.0.0.weight is \(5, 1, 3, 3\) instead of \(4, 1, 3, 3\)"):
        UNet(weights=str(tmp_path / "b.safetensors")).build()
    with pytest.raises(WeightsError, match="cannot be opened"):
        _ = UNet(weights=str(tmp_path / "none.safetensors")).channels


def test_a_file_says_how_wide_and_deep_it_is(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.safetensors", channels=3, width=6, levels=3)
    assert UNet(weights=str(path)).architecture == Architecture(3, 6, 3)
