"""Effects that a probe of single pixels misses, and the comparison of tiles with larger windows finds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from halotile.errors import ConfigError, MemoryRefused
from halotile.graphs.kinds.sections import Tile
from halotile.graphs.plans.cutting import Halo, rehearsed, resolve_halo
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.plans.trials import denoiser_trials
from halotile.tasks.denoisers.torch import UserNetwork
from halotile.tasks.trials import rehearsal
from halotile.tasks.trials.rehearsal import rehearse, tile_difference
from tests.cases import thorough
from tests.support import dncnn_weights, job_of, work_of, write_zarr
from tests.tasks.denoising import Calls


class Padded(nn.Module):  # type: ignore[misc]
    """Pads to a multiple of something, convolves, crops: a wrapper as many public networks have one."""

    def __init__(self, multiple: int, *, around: bool = False, mode: str = "reflect", stride: int = 1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.multiple, self.around, self.mode = multiple, around, mode
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        middle = nn.Conv2d(8, 8, 3, padding=1)
        self.inner = nn.Sequential(nn.MaxPool2d(stride), middle, nn.ReLU(), nn.Upsample(scale_factor=stride))
        self.last = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[2:]
        down, right = -height % self.multiple, -width % self.multiple
        top, left = (down // 2, right // 2) if self.around else (0, 0)
        x = functional.pad(x, (left, right - left, top, down - top), mode=self.mode)
        y: torch.Tensor = self.last(self.inner(self.first(x).relu()))
        return y[..., top : top + height, left : left + width].sigmoid()


class Tiring(nn.Module):  # type: ignore[misc]
    """Another network after its first call, on the whole image, before its tiles."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2 if self.calls == 1 else x * 3


def diagonal(x: torch.Tensor) -> torch.Tensor:
    """A pixel looks at another one far up and left, and at none straight up or left."""
    return x + functional.pad(x, (100, 0, 100, 0))[..., :-100, :-100]


def spoiled(x: torch.Tensor) -> torch.Tensor:
    """The first pixel is lost in images that are larger than those of a probe."""
    result = x * 2
    if x[0, 0].numel() > 300:
        result[..., 0, 0] = torch.nan
    return result


def scripted() -> Any:
    with pytest.warns(FutureWarning):  # some have such networks still
        return torch.jit.script(Padded(8))


NETWORKS: dict[str, Any] = {
    "behind": lambda: Padded(8), "behind, strided": lambda: Padded(16, stride=2),
    "around": lambda: Padded(8, around=True),
    "around, strided": lambda: Padded(4, around=True, mode="constant", stride=2),
    "diagonal": lambda: Calls(diagonal), "plain": lambda: Calls(lambda x: x * 2), "tiring": Tiring,
    "spoiled": lambda: Calls(spoiled), "scripted": scripted,
    "deep": lambda: nn.Conv2d(1, 1, 3, padding=170, dilation=170),
}  # fmt: skip


globals().update({f"n{number}": build for number, build in enumerate(NETWORKS.values())})


def network(name: str, **options: Any) -> UserNetwork:
    return UserNetwork(import_=f"{__name__}:n{list(NETWORKS).index(name)}", **options)


def halo_of(denoiser: UserNetwork, image: tuple[int, ...], tile: Tile | None = None) -> Halo:
    tile = tile or Tile()
    return rehearsed(tile, denoiser, resolve_halo(tile, denoiser, len(image)), image)


@pytest.mark.parametrize("image", [(203, 317), (1003, 700), (256, 320)])
@pytest.mark.parametrize("name", ["behind", "behind, strided", "plain"])
def test_tiles_have_the_bits_of_the_whole_after_it(name: str, image: tuple[int, ...]) -> None:
    denoiser = network(name)
    halo = halo_of(denoiser, image)
    assert halo.probed is not None
    assert not halo.remarks
    known = denoiser.probed(*halo.probed)
    for other in (image, tuple(n + 192 for n in image)):
        found = rehearse(known, halo.depth, other, search=False)
        assert (found.alignment, found.difference) == (halo.align, 0.0)


@pytest.mark.parametrize("name", ["around", "around, strided"])
def test_padding_around_is_refused_where_it_acts(name: str) -> None:
    with pytest.raises(ConfigError, match=r"other pixels in tiles .* 203 × 317: .* let it pad at the end only"):
        halo_of(network(name), (203, 317))
    assert halo_of(network(name), (256, 320)).remarks == ()


@pytest.mark.parametrize("image", [(203, 317), (4000, 3000)])
def test_a_look_along_the_diagonal_is_noticed(image: tuple[int, ...]) -> None:
    denoiser = network("diagonal")
    assert resolve_halo(Tile(), denoiser, 2).depth == ((0, 0), (0, 0))
    with pytest.raises(ConfigError, match="looks farther than the probe found"):
        halo_of(denoiser, image)


def test_state_that_shows_late_is_reported_as_state_and_nan_with_the_place_and_one_full_stop() -> None:
    with pytest.raises(ConfigError, match="keeps state or draws random numbers"):
        halo_of(network("tiring", receptive_field_=1, alignment_=1), (203, 317))
    with pytest.raises(ConfigError, match=r"failed on an image of .* returned NaN or infinity for finite") as refused:
        halo_of(network("spoiled", receptive_field_=1, alignment_=1), (203, 317))
    assert re.search(r"[^.]\.$", str(refused.value))


def test_networks_that_look_odd_are_taken() -> None:
    """One that pads behind takes a larger alignment, a scripted one too; one looks farther than the smallest window; seams are allowed."""
    assert resolve_halo(Tile(), network("behind"), 2).align == 1
    assert halo_of(network("behind"), (256, 320)).align == halo_of(network("scripted"), (256, 320)).align == 8
    assert halo_of(network("deep", receptive_field_=170, alignment_=1), (1003, 730)).depth == ((170, 170),) * 2
    assert not halo_of(network("diagonal"), (203, 317), Tile(seams="allow")).remarks


def test_declared_values_are_used_and_the_difference_is_noted() -> None:
    (note,) = halo_of(network("diagonal", receptive_field_=8, alignment_=1), (203, 317)).remarks
    assert "differ from the whole image by 0." in note


def task_of(tmp_path: Path, shape: tuple[int, ...], network: str, tile: Any, **options: Any) -> Any:
    source = write_zarr(tmp_path / "in.zarr", np.zeros(shape, np.float32))
    named = {"import": f"tests.networks:{network}", "options": options}
    return work_of(make_plan(job_of(source, tmp_path / "out.zarr", "torch", named, tile=tile))).task


@pytest.mark.parametrize(
    ("shape", "length", "longer"),
    [((192, 160), 150, (True, True)), thorough((700, 900), 150, (True, True)), ((40, 9000), 600, (False, True))],
    ids=["an image of few tiles", "a larger image", "a long one"],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_rounding_by_length_is_found_out(tmp_path: Path, shape: Any, length: int, longer: Any, axis: int) -> None:
    found = tile_difference(task_of(tmp_path, shape, "rounding_by_length", {"size": 64}, axis=axis - 2, length=length))
    assert (found > 0) == longer[axis]
    assert found < 1e-5


@pytest.mark.parametrize("shape", [(500, 530), thorough((192, 160))])
def test_a_network_of_the_same_bits_in_all_windows_is_not_suspected(tmp_path: Path, shape: tuple[int, int]) -> None:
    assert tile_difference(task_of(tmp_path, shape, "convolutions", {"size": 64})) == 0.0


def test_a_tile_that_sees_past_an_edge_is_not_compared_near_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "TRIED_WHOLE", 1)
    assert tile_difference(task_of(tmp_path, (128, 128), "convolutions", {"size": 64, "boundary": "reflect"})) == 0.0


@pytest.mark.parametrize("size", [thorough(32), 50, thorough(64)])
def test_an_image_of_many_tiles_is_tried_in_one_of_each_kind(tmp_path: Path, size: int) -> None:
    task = task_of(tmp_path, (300, 420), "convolutions", {"size": size})
    every = list(rehearsal._tiles(task))
    some = rehearsal._representatives(every)
    assert len(some) <= len(every) / 4
    for window, core in [(tile.reach, tile.core) for tile in every]:
        assert window.shape in {tile.reach.shape for tile in some}
        for axis in range(2):
            place = core.start[axis] - window.start[axis], core.shape[axis], window.shape[axis]
            tried = [(t.core.start[axis] - t.reach.start[axis], t.core.shape[axis], t.reach.shape[axis]) for t in some]
            assert place in tried


def built_in(tmp_path: Path) -> Any:
    source = write_zarr(tmp_path / "in.zarr", np.zeros((700, 900), np.float32))
    options = {"weights": str(dncnn_weights(tmp_path / "w.safetensors")), "depth": 5, "width": 8}
    return job_of(source, tmp_path / "out.zarr", "dncnn", options, tile={"size": 200})


@pytest.mark.parametrize(("found", "words"), [(0.0, ""), (3e-7, "differ from the whole image by 3e-07")])
def test_our_networks_are_tried_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Any, words: str) -> None:
    monkeypatch.setattr(denoiser_trials, "bounded", lambda *_: found)
    notes = make_plan(built_in(tmp_path)).notes
    assert words in " ".join(notes)
    assert bool(notes) == bool(words)


@pytest.mark.parametrize(
    ("fits", "note"), [(True, ""), (False, "tiles were not compared with larger windows: too large")]
)
def test_what_does_not_fit_comes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool, note: str) -> None:
    requested = []

    def bounded(call: Any, *_: object) -> Any:
        requested.append(call.keywords["at_once"])
        if requested[-1] or not fits:
            raise MemoryRefused("too large")
        return call()

    monkeypatch.setattr(denoiser_trials, "bounded", bounded)
    assert "".join(make_plan(built_in(tmp_path)).notes) == note
    assert requested == [True, False]
