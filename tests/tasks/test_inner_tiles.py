"""Tiles of a block, read ahead and written behind: they cover the core, keep their halo, share one shape; pixels that cannot be denoised are refused by place."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.errors import BlockFailed, InputError
from halotile.storage.grid import Block, Grid, Region
from halotile.storage.rim import Rim, read_window
from halotile.storage.sharded.output import to_dtype
from halotile.tasks import inner_tiles
from halotile.tasks.block import Prefetch
from halotile.tasks.denoise_block import check_image, check_side
from halotile.tasks.denoisers.base import Pixelwise
from halotile.tasks.denoisers.gaussian import Gaussian
from halotile.tasks.denoisers.median import Median
from halotile.tasks.denoisers.none import NoDenoising
from halotile.tasks.devices.device import Device
from halotile.tasks.inner_tiles import PlaneRunner, TileRunner, Tiling, cut_evenly, windows_of
from halotile.tasks.operators.base import InMemory
from tests.support import noisy_image


def tiling(**changes: Any) -> Tiling:
    return replace(Tiling((32, 32), ((3, 3), (3, 3)), (1, 1), (1, 1), (100, 120), 1, 4, None, "float32"), **changes)


def blur(batch: torch.Tensor) -> torch.Tensor:
    """Mean over 7x7, zero outside the window: looks 3 pixels far."""
    return torch.nn.functional.avg_pool2d(batch, 7, 1, 3)


def run(pixels: Any, model: Any, settings_: Tiling, core: Region | None = None) -> Any:
    whole = Region.whole(pixels.shape[-2:])
    core, runner = core or whole, TileRunner(model, Device(), settings_, "blur")
    return to_dtype(runner(pixels, whole, core, pixels.shape[-3], {}), pixels.dtype)


@given(
    st.tuples(st.integers(1, 150), st.integers(1, 150)),
    st.integers(1, 64),
    st.integers(0, 20),
    st.sampled_from([1, 2, 8]),
)
@settings(deadline=None, max_examples=60)
def test_windows_hold_what_their_tile_needs(image: tuple[int, int], edge: int, depth: int, align: int) -> None:
    whole, edge = Region.whole(image), -(-edge // align) * align
    form = tiling(tile=(edge, edge), depth=((depth, depth),) * 2, align=(align,) * 2, image=image)
    covered = np.zeros(image, int)
    for window in windows_of(whole, whole, (), form):
        covered[window.core.slices] += 1
        assert window.core.grow(form.depth).clip(whole).inside(window.reach)
        assert window.reach.inside(whole)
        assert all(a % align == 0 for a in window.reach.start)
        assert all(b % align == 0 or b == n for b, n in zip(window.reach.stop, image, strict=True))
    assert (covered == 1).all()


def test_windows_share_one_shape_and_are_never_shorter_than_the_least() -> None:
    whole = Region.whole((100, 120))
    assert len({window.reach.shape for window in windows_of(whole, whole, (2,), tiling())}) == 1
    assert cut_evenly(0, 100, 64, 8) == [(0, 56), (56, 100)]  # the fewest
    for least in (1, 40, 90, 500):
        for window in windows_of(whole, whole, (), tiling(least=(least, least))):
            assert window.reach.shape >= (min(least, 100), min(least, 120))
            assert window.reach.inside(whole)


def test_tiles_give_the_whole_image_and_a_core_its_own_pixels() -> None:
    pixels = np.random.default_rng(0).random((2, 3, 100, 120), dtype=np.float32)
    want = blur(torch.from_numpy(pixels)).numpy()
    for tile, batch in itertools.product((16, 33, 200), (1, 3, 100)):
        np.testing.assert_allclose(run(pixels, blur, tiling(tile=(tile, tile), batch=batch)), want, atol=1e-6)
    core = Region((20, 30), (90, 80))
    np.testing.assert_allclose(run(pixels, blur, tiling(), core), want[..., 20:90, 30:80], atol=1e-6)


def test_scaled_results_land_where_they_belong() -> None:
    pixels = np.random.default_rng(0).random((1, 40, 50), dtype=np.float32)

    def double(batch: torch.Tensor) -> torch.Tensor:
        return batch.repeat_interleave(2, 2).repeat_interleave(2, 3)

    assert np.array_equal(run(pixels, double, tiling(scale=2, image=(40, 50))), pixels.repeat(2, 1).repeat(2, 2))


def test_the_batch_is_halved_when_memory_runs_out_and_stays_small_and_one_tile_without_room_is_an_error() -> None:
    pixels, batches = np.random.default_rng(0).random((1, 100, 120), dtype=np.float32), list[int]()

    def hungry(batch: torch.Tensor, most: int = 2) -> torch.Tensor:
        batches.append(len(batch))
        if len(batch) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch

    runner, whole = TileRunner(hungry, Device(), tiling(batch=8), "hungry"), Region.whole((100, 120))
    assert np.array_equal(runner(pixels, whole, whole, 1, {}), pixels)
    assert (batches[:3], runner.batch) == ([8, 4, 2], 2)
    runner(pixels, whole, whole, 1, {})
    assert max(batches[3:]) == 2
    with pytest.raises(torch.OutOfMemoryError):
        run(np.zeros((1, 40, 40), np.float32), lambda batch: hungry(batch, 0), tiling(image=(40, 40)))


def test_a_wrong_shape_and_nan_on_finite_pixels_are_errors_and_nan_in_the_input_passes() -> None:
    pixels = np.zeros((1, 100, 120), np.float32)
    with pytest.raises(BlockFailed, match=r"blur returned shape \(4, 1, 29, 34\)"):
        run(pixels, lambda b: b[..., 1:-1, 1:-1], tiling())
    with pytest.raises(BlockFailed, match="NaN or infinity for finite pixels"):
        run(pixels, lambda b: b / 0, tiling())
    pixels[0, 50, 50] = np.nan
    assert np.isnan(run(pixels, lambda b: b * 1, tiling())[0, 50, 50])


@pytest.mark.parametrize(
    ("dtype", "values"),
    [("float32", None), ("uint16", (0.0, 65535.0)), ("uint16", None), ("int8", (-128, 127)), (">f4", (0.1, 99.7))],
)
@pytest.mark.parametrize(
    "denoiser",
    [Gaussian(sigma=1.5), Gaussian(sigma=0.3), *(Median(size=size) for size in (3, 5, 7)), NoDenoising()],
    ids=str,
)
def test_planes_are_filtered_to_the_bits_of_tiles(
    monkeypatch: pytest.MonkeyPatch, denoiser: Pixelwise, dtype: str, values: tuple[float, float] | None
) -> None:
    monkeypatch.setattr(inner_tiles, "STRIP", 30)
    reach = denoiser.receptive_field() or 0
    options = tiling(depth=((reach, reach),) * 2, range=values)
    pixels = np.random.default_rng(0).normal(50, 20, (2, 3, 100, 120)).clip(0, 127).astype(dtype)
    whole, core = Region((0, 0), (100, 120)), Region((10, 0), (90, 101))
    filter_plane = denoiser.plane_filter()
    assert filter_plane is not None
    runner = PlaneRunner(filter_plane, pytest.fail, options, pixels.dtype.name)  # no tile is needed
    with runner.launch(runner.stage(pixels, {}), whole, core, 3).borrowed() as got:
        want = TileRunner(denoiser.build(), Device(), options, "filter")(pixels, whole, core, 3, {})
        assert got.dtype == pixels.dtype.name
        np.testing.assert_array_equal(got, to_dtype(want, got.dtype))


@pytest.mark.parametrize("hurt", ["nan", "side"])
def test_planes_that_need_more_than_a_filter_are_cut_into_tiles(hurt: str) -> None:
    denoiser = Median(size=3)
    pixels = np.random.default_rng(0).normal(50, 20, (1, 100, 120)).astype("float32")
    sides = {"valid": (pixels > 40).astype("uint8")} if hurt == "side" else {}
    if hurt == "nan":
        pixels[0, 50, 60] = np.nan
    whole = Region.whole((100, 120))

    def make_tiles() -> TileRunner:
        return TileRunner(denoiser.build(), Device(), tiling(), "median")

    filter_plane = denoiser.plane_filter()
    assert filter_plane is not None
    runner = PlaneRunner(filter_plane, make_tiles, tiling(), "float32")
    with runner.launch(runner.stage(pixels, sides), whole, whole, 1).borrowed() as got:
        np.testing.assert_array_equal(got, make_tiles()(pixels, whole, whole, 1, sides))


BLOCKS = list(Grid((5,), (1,), ((0, 0),)))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_every_block_is_read_and_written_in_order_and_errors_belong_to_theirs(overlap: bool, fails: bool) -> None:
    prefetch, written, unread = Prefetch(overlap), list[int](), list[int]()

    def read(block: Block) -> int:
        if fails and block.number == 1:
            raise OSError("cannot read 1")
        return block.number * 10

    def write(block: Block) -> None:
        if fails and block.number == 3:
            raise OSError("cannot write 3")
        written.append(block.number)

    ended: list[tuple[Block, BaseException | None]] = []
    for block, fetched in prefetch.ahead(BLOCKS, read):
        try:
            assert fetched() == block.number * 10
        except OSError:
            unread.append(block.number)
            continue
        prefetch.behind(block, partial(write, block))
        ended += prefetch.written()
    prefetch.finish()
    ended += prefetch.written()
    assert (unread, written) == (([1], [0, 2, 4]) if fails else ([], [0, 1, 2, 3, 4]))
    assert [block.number for block, _ in ended] == [n for n in range(5) if n not in unread]
    assert [block.number for block, error in ended if error is not None] == ([3] if fails else [])


def test_the_next_read_and_the_last_write_go_on_while_a_block_is_computed() -> None:
    prefetch, begun, may_end = Prefetch(overlap=True), [threading.Event() for _ in BLOCKS], threading.Event()
    for block, fetched in prefetch.ahead(BLOCKS, lambda b: begun[b.number].set()):
        fetched()
        if block.number + 1 < len(BLOCKS):
            assert begun[block.number + 1].wait(5)

    def write() -> None:
        may_end.wait(5)

    prefetch.behind(BLOCKS[0], write)
    assert prefetch.written() == []
    may_end.set()
    prefetch.finish()
    assert [error for _, error in prefetch.written()] == [None]


def with_one(value: float, at: tuple[int, ...], shape: tuple[int, ...] = (70, 90)) -> InMemory:
    pixels = noisy_image(shape)
    pixels[at] = value
    return InMemory(pixels)


def test_the_first_bad_pixel_is_named_by_its_place_in_the_image_other_axes_by_their_letters() -> None:
    rules = ("reflect", "nearest", "periodic", "constant", "cut")
    for at, rule in itertools.product(((0, 3), (69, 89), (31, 40)), rules):
        source, rim, window = with_one(np.inf, at), Rim.everywhere(rule, 2), Region((-20, -20), (90, 110))
        message = rf"rows 0–69, columns 0–89; the first is at row {at[0]}, column {at[1]}\. .*on_nan: propagate"
        with pytest.raises(InputError, match=message):
            check_image(read_window(source, window, rim), source, window, rim, ("y", "x"))
    source, rim = with_one(np.nan, (2, 5, 6), (4, 30, 30)), Rim.everywhere("cut", 3)
    window = Region((1, 0, 0), (4, 20, 20))
    with pytest.raises(InputError, match="z 1–3, rows 0–19, columns 0–19; the first is at z 2, row 5, column 6"):
        check_image(read_window(source, window, rim), source, window, rim, ("z", "y", "x"))


def test_a_side_input_with_invalid_pixels_is_refused() -> None:
    rows: list[tuple[str, float, str]] = [
        ("sigma", np.nan, "sigma holds NaN, infinity or negative values"),
        ("sigma", -0.5, "sigma holds NaN, infinity or negative values"),
        ("mask", np.inf, "mask holds NaN or infinity"),
    ]
    rim, window, axes = Rim.everywhere("reflect", 2), Region((-9, -9), (50, 50)), ("y", "x")
    for name, value, words in rows:
        source = with_one(value, (7, 8))
        with pytest.raises(InputError, match=f"the side input {words} in .* row 7, column 8"):
            check_side(name, read_window(source, window, rim), source, window, rim, axes)
    source = with_one(-1.0, (7, 8))
    check_side("mask", read_window(source, window, rim), source, window, rim, axes)


def test_a_noise_map_in_counts_is_refused_for_a_image_that_is_mapped() -> None:
    counts = np.full((8, 8), 150, np.uint16)
    place = InMemory(counts), Region.whole((8, 8)), Rim.everywhere("cut", 2), ("y", "x")
    check_side("sigma", counts, *place)
    check_side("mask", counts, *place, (0.0, 4095.0))
    with pytest.raises(InputError, match=r"holds 150. The image's 0 to 4095 .* as 0 to 1.*Divide the map by 4095"):
        check_side("sigma", counts, *place, (0.0, 4095.0))
