"""Overlapping blocks of stores give the same bits as stock Dask, with one task per block."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import h5py
import numpy as np
import pytest
import tifffile
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.errors import ConfigError, InputError
from halotile.graphs.map_overlap import map_overlap
from halotile.storage.grid import Region
from tests.cases import thorough
from tests.graphs.overlapping import Pixels, Stored, box, compute, neighbours, noise, running_sum, same, stored

PAD = {"reflect": "symmetric", "nearest": "edge", "periodic": "wrap"}


def through_the_whole(func: Callable[[Pixels], Pixels], store: Stored, depth: Any, rules: list[Any]) -> Pixels:
    """Reference where stock Dask refuses: pad the whole array with NumPy, and cut windows out of it."""
    before, after = zip(*depth, strict=True)
    padded = store.pixels
    for axis, rule in enumerate(rules):
        width = [(0, 0)] * padded.ndim
        width[axis] = depth[axis]
        if isinstance(rule, str) and rule in PAD:
            padded = np.pad(padded, width, mode=PAD[rule])  # type: ignore[call-overload]
        else:
            padded = np.pad(padded, width, constant_values=0 if rule in ("none", "cut") else rule)
    result = np.empty(store.shape, func(store.pixels).dtype)
    counts = [-(-n // c) for n, c in zip(store.shape, store.chunks, strict=True)]
    for index in np.ndindex(*counts):
        window, inner, core = [], [], []
        for i, c, n, b, a, rule in zip(index, store.chunks, store.shape, before, after, rules, strict=True):
            start, stop = i * c, min(i * c + c, n)
            first, last = start - b, stop + a
            if rule in ("none", "cut"):
                first, last = max(first, 0), min(last, n)
            window.append(slice(first + b, last + b))
            inner.append(slice(start - first, stop - first))
            core.append(slice(start, stop))
        result[tuple(core)] = func(padded[tuple(window)])[tuple(inner)]
    return result


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Cases that stock Dask accepts without rechunking: no chunk, the last one included, is smaller than the depth."""
    shape, chunks, depth, boundary = [], [], {}, {}
    for axis in range(draw(st.integers(1, 3))):
        chunk = draw(st.integers(1, 7))
        last = draw(st.integers(1, chunk))
        shape.append(chunk * draw(st.integers(0, 3)) + last)
        chunks.append(chunk)
        depth[axis] = draw(st.integers(0, min(last, 4)))
        boundary[axis] = draw(st.sampled_from(["reflect", "periodic", "nearest", "none", 0, 3, 200]))
    dtype = draw(st.sampled_from(["uint8", "int16", "float32", "float64"]))
    return {"store": stored(tuple(shape), tuple(chunks), dtype), "depth": depth, "boundary": boundary}


@pytest.mark.parametrize("func", [neighbours, running_sum, box])
@pytest.mark.parametrize("trim", [True, thorough(False)])
@given(case=cases())
@settings(deadline=None, max_examples=30)
def test_the_bits_equal_stock_dask(func: Callable[[Pixels], Pixels], trim: bool, case: dict[str, Any]) -> None:
    store, kwargs = case["store"], {"depth": case["depth"], "boundary": case["boundary"], "trim": trim}
    stock = da.map_overlap(func, da.from_array(store.pixels, chunks=store.chunks), allow_rechunk=False, **kwargs)
    ours = map_overlap(func, store, **kwargs)
    assert ours.chunks == stock.chunks
    assert ours.dtype == stock.dtype
    got, wanted = (array.compute(scheduler="synchronous") for array in (ours, stock))
    np.testing.assert_array_equal(got, wanted, strict=True)


@st.composite
def deep_cases(draw: st.DrawFn) -> dict[str, Any]:
    """Cases that stock Dask refuses or rechunks: any depth, asymmetric, under any rule."""
    axes = draw(st.integers(1, 2))
    sizes = st.tuples(*[st.integers(1, 9)] * axes)
    depth = tuple(draw(st.tuples(st.integers(0, 12), st.integers(0, 12))) for _ in range(axes))
    rules = [draw(st.sampled_from(["reflect", "periodic", "nearest", "none", "cut", 5])) for _ in range(axes)]
    return {"store": stored(draw(sizes), draw(sizes)), "depth": depth, "rules": rules}


@pytest.mark.parametrize("func", [neighbours, running_sum])
@given(case=deep_cases())
@settings(deadline=None, max_examples=60)
def test_any_depth_works_where_stock_refuses(func: Callable[[Pixels], Pixels], case: dict[str, Any]) -> None:
    store, depth, rules = case["store"], case["depth"], case["rules"]
    ours = map_overlap(func, store, depth=depth, boundary=tuple(rules))
    np.testing.assert_array_equal(compute(ours), through_the_whole(func, store, depth, rules), strict=True)


@pytest.mark.parametrize("depth", [2, (2, 1), {0: 2}, {1: (1, 2)}, ((0, 1), (2, 0)), [1], [(2, 1)], None])
def test_depth_means_the_same_as_in_dask(depth: Any) -> None:
    store = stored((12, 10), (4, 5))
    stock = da.map_overlap(neighbours, da.from_array(store.pixels, chunks=store.chunks), depth=depth)
    same(map_overlap(neighbours, store, depth=depth), stock)


@pytest.mark.parametrize(
    "boundary", [None, "none", "reflect", ("periodic", 3), {1: "nearest"}, [{0: 0.5}], np.nan, np.float32(2)]
)
def test_boundary_means_the_same_as_in_dask(boundary: Any) -> None:
    store = stored((12, 10), (4, 5))
    stock = da.map_overlap(neighbours, da.from_array(store.pixels, chunks=store.chunks), depth=2, boundary=boundary)
    same(map_overlap(neighbours, store, depth=2, boundary=boundary), stock)


@pytest.mark.parametrize(("dtype", "value"), [("uint8", -1), ("int64", 2**62 + 1), ("int16", 2.5), ("bool", 1)])
def test_a_constant_becomes_a_pixel_as_in_numpy(dtype: str, value: Any) -> None:
    store = Stored(np.ones(6, dtype), (3,))
    try:
        pixel = np.full(1, value, dtype)
    except OverflowError:
        with pytest.raises(ConfigError, match="cannot hold"):
            map_overlap(np.array, store, depth=1, boundary=value)
        return
    ours = map_overlap(np.array, store, depth=1, boundary=value, trim=False).compute(scheduler="synchronous")
    assert ours[0] == pixel[0]


def test_cut_means_none() -> None:
    store = stored((12, 10), (4, 5))
    cut, none = (map_overlap(running_sum, store, depth=2, boundary=word) for word in ("cut", "none"))
    same(cut, none)
    array = da.from_array(store.pixels, chunks=store.chunks)
    same(map_overlap(running_sum, array, depth=2, boundary="cut"), none)


def test_one_task_per_block() -> None:
    store = stored((300, 200), (30, 20))
    result = map_overlap(box, store, depth=3, boundary="reflect")
    assert len(dask.optimize(result)[0].__dask_graph__()) == 100
    assert len(dict(result.__dask_graph__())) == 100
    assert len(dask.optimize(result + 1)[0].__dask_graph__()) == 100


def test_nothing_is_read_before_compute_then_each_window_once() -> None:
    store = stored((64, 48), (16, 16))
    result = map_overlap(box, store, depth=2, boundary="reflect")
    assert store.regions == []
    compute(result)
    assert len(store.regions) == 12
    assert sum(region.size for region in store.regions) <= 12 * 20 * 20
    compute(result[:16, :16])
    assert len(store.regions) == 13


def test_a_periodic_window_reads_no_more_than_it_needs() -> None:
    store = stored((64,), (16,))
    compute(map_overlap(neighbours, store, depth=2, boundary="periodic"))
    assert sum(region.size for region in store.regions) == 4 * 20


def test_the_block_size_can_be_chosen() -> None:
    store = stored((20, 20), (4, 4))
    result = map_overlap(neighbours, store, depth=3, boundary="nearest", block=(10, 20))
    assert result.chunks == ((10, 10), (20,))
    stock = da.map_overlap(neighbours, da.from_array(store.pixels, chunks=(10, 20)), depth=3, boundary="nearest")
    same(result, stock)


@pytest.mark.parametrize(
    ("shapes", "chunks"),
    [
        (((12, 8), (12, 8)), ((4, 4), (4, 4))),
        (((12, 8), (12, 8)), ((4, 4), (6, 8))),
        (((12, 8), (8,)), ((6, 4), (4,))),
        (((8,), (12, 8)), ((4,), (6, 4))),
        (((12, 8), (12, 8), (12, 8)), ((6, 4), (12, 2), (3, 8))),
    ],
)
@pytest.mark.parametrize("boundary", ["reflect", "none"])
def test_several_stores_are_aligned_as_dask_does(shapes: Any, chunks: Any, boundary: str) -> None:
    stores = [stored(shape, chunk) for shape, chunk in zip(shapes, chunks, strict=True)]

    def add(*windows: Pixels) -> Pixels:
        return running_sum(sum(windows[1:], windows[0]))

    arrays = [da.from_array(store.pixels, chunks=store.chunks) for store in stores]
    depth = {0: 0, 1: 2} if len(shapes[0]) == len(shapes[1]) else [{}, {}]
    same(
        map_overlap(add, *stores, depth=depth, boundary=boundary),
        da.map_overlap(add, *arrays, depth=depth, boundary=boundary),
    )


def test_each_store_has_its_own_depth_and_an_axis_of_one_pixel_is_broadcast() -> None:
    image, row = stored((12, 8), (4, 4)), stored((1, 8), (1, 4))

    def add(x: Pixels, y: Pixels) -> Pixels:
        return running_sum(x) + y

    result = map_overlap(add, image, row, depth=[{0: 2}, 0])
    same(result, map_overlap(lambda y, x: add(x, y), row, image, depth=[0, {0: 2}]))
    alone = map_overlap(running_sum, image, depth={0: 2})
    np.testing.assert_array_equal(compute(result), compute(alone) + row.pixels)


def test_keys_contain_the_given_name_and_change_with_the_arguments() -> None:
    store = stored((8,), (4,))
    assert map_overlap(box, store, depth=1, name="tidy").name == "tidy"
    assert map_overlap(box, store, depth=1, token="tidy").name.startswith("tidy-")
    assert map_overlap(box, store, depth=1).name.startswith("box-")
    names = {map_overlap(box, store, depth=d, boundary=b).name for d in (1, 2) for b in ("reflect", "none", 3, 4)}
    assert len(names) == 8


def test_an_overwritten_store_gets_new_keys() -> None:
    class File(Stored):
        version = 1

        def fingerprint(self) -> dict[str, Any]:
            return {"version": self.version}

    store = File(noise((8,)), (4,))
    first, again = (map_overlap(box, store, depth=1).name for _ in range(2))
    store.version = 2
    assert first == again != map_overlap(box, store, depth=1).name


@pytest.mark.parametrize("boundary", ["reflect", "none"])
def test_ordinary_arrays_go_to_stock_dask(boundary: str) -> None:
    store = stored((12, 10), (4, 5))
    array = da.from_array(store.pixels, chunks=store.chunks)
    stock = da.map_overlap(np.add, array, array, depth=2, boundary=boundary)
    for other in (array, store.pixels, store):
        mixed = map_overlap(np.add, array, other, depth=2, boundary=boundary)
        np.testing.assert_array_equal(compute(mixed), compute(stock), strict=True)


@pytest.mark.parametrize("scheduler", ["threads", "processes"])
def test_other_schedulers_give_the_same_bits(scheduler: str) -> None:
    store = stored((40, 30), (16, 16))
    result = map_overlap(neighbours, store, depth=3, boundary="periodic")
    with dask.config.set(scheduler=scheduler, num_workers=2):
        np.testing.assert_array_equal(result.compute(), compute(result))


@pytest.mark.parametrize("block", [0, (0, 16), -5, (16, -2)])
def test_a_block_without_pixels_is_refused(block: Any) -> None:
    with pytest.raises(ConfigError, match=r"at least 1 pixel long\. Write a size per axis, or -1"):
        map_overlap(neighbours, stored((40, 30), (16, 16)), depth=3, boundary="reflect", block=block)


def test_distributed_workers_give_the_same_bits() -> None:
    from distributed import Client, LocalCluster

    store = stored((40, 30), (16, 16))
    result = map_overlap(neighbours, store, depth=3, boundary="periodic")
    with (
        LocalCluster(
            1,
            threads_per_worker=2,
            processes=False,
            dashboard_address="127.0.0.1:0",
            worker_dashboard_address="127.0.0.1:0",
        ) as cluster,
        Client(cluster) as client,
    ):
        np.testing.assert_array_equal(client.compute(result).result(timeout=60), compute(result))


@pytest.mark.parametrize("dtype", ["int64", "uint64", "complex64", "complex128", "bool", "float32"])
@pytest.mark.parametrize("shape", [(40,), (30, 20)])
def test_a_path_need_not_be_an_image(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    pixels = noise(shape, dtype)
    np.save(tmp_path / "a.npy", pixels)
    zarr.create_array(tmp_path / "a.zarr", data=pixels, chunks=(12,) * len(shape))
    stock = da.map_overlap(np.cumsum, da.from_array(pixels, chunks=12), depth=2, boundary="reflect", axis=-1)
    for path in (tmp_path / "a.npy", str(tmp_path / "a.zarr")):
        same(map_overlap(np.cumsum, path, depth=2, boundary="reflect", block=12, axis=-1), stock)


def test_a_path_without_numbers_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}, None]))
    with pytest.raises(InputError, match=r"a\.npy: its type is object, which is not numeric"):
        map_overlap(neighbours, tmp_path / "a.npy", depth=1)
    with pytest.raises(InputError, match="nothing is there"):
        map_overlap(neighbours, tmp_path / "gone.zarr", depth=1)


def write_hdf5(path: Path, pixels: Pixels) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("image", data=pixels)


write_tiff = partial(tifffile.imwrite, photometric="minisblack")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.npy", np.save),
        ("a.h5", write_hdf5),
        ("a.tif", write_tiff),
        ("a.tif", partial(write_tiff, rowsperstrip=1)),
        ("a.tif", partial(write_tiff, contiguous=False, rowsperstrip=1)),
    ],
)
def test_a_file_without_chunks_is_cut_as_dask_cuts(
    tmp_path: Path, name: str, write: Callable[[Path, Pixels], object]
) -> None:
    write(tmp_path / name, noise((300, 200)))
    assert map_overlap(neighbours, tmp_path / name, depth=2).chunks == ((300,), (200,))


def test_the_graph_holds_no_pixels(tmp_path: Path) -> None:
    np.save(tmp_path / "picture.npy", noise((300, 200)))
    result = map_overlap(np.sqrt, tmp_path / "picture.npy", depth=2, boundary="reflect", block=60)
    assert len(pickle.dumps(result)) < 8000


def test_an_open_zarr_array_is_a_store(tmp_path: Path) -> None:
    pixels = noise((30, 20))
    array = zarr.create_array(tmp_path / "picture.zarr", data=pixels, chunks=(12, 12))
    ours = map_overlap(neighbours, array, depth=2, boundary="reflect")
    assert ours.chunks == ((12, 12, 6), (12, 8))
    assert len(dict(ours.__dask_graph__())) == 6
    same(ours, da.map_overlap(neighbours, da.from_array(pixels, chunks=12), depth=2, boundary="reflect"))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(ours)).compute(), compute(ours))


def test_a_store_without_chunks_is_cut_by_dask() -> None:
    class Plain:
        shape, dtype = (6,), np.dtype("f4")

        def read(self, region: Region) -> Pixels:
            window: Pixels = noise((6,))[region.slices]
            return window

    result = map_overlap(running_sum, Plain(), depth=1)
    assert result.chunks == ((6,),)
    assert math.isclose(result[-1].compute(scheduler="synchronous"), noise((6,)).sum(), rel_tol=1e-6)
