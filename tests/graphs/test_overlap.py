"""Overlapping blocks of stores give the same bits as stock Dask, with its arguments, and one task per block."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
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
from numpy.typing import NDArray
from scipy.ndimage import uniform_filter

from halotile.errors import ConfigError, InputError
from halotile.graphs.map_overlap import map_overlap
from halotile.storage.grid import Region
from tests.cases import thorough

Pixels = NDArray[Any]
PAD = {"reflect": "symmetric", "nearest": "edge", "periodic": "wrap"}


@dataclass
class Stored:
    """Pixels that can only be read region by region; it records the regions."""

    pixels: Pixels
    chunks: tuple[int, ...]
    version: int = 1
    regions: list[Region] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pixels.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.pixels.dtype

    @property
    def in_dask(self) -> da.Array:
        return da.from_array(self.pixels, chunks=self.chunks)

    def read(self, region: Region) -> Pixels:
        assert region.inside(Region.whole(self.shape))
        self.regions.append(region)
        return np.array(self.pixels[region.slices])

    def fingerprint(self) -> dict[str, Any]:
        return {"pixels": dask.base.tokenize(self.pixels), "version": self.version}


def noise(shape: tuple[int, ...], dtype: str = "float32") -> Pixels:
    return np.random.default_rng(7).normal(40, 20, shape).clip(0, 250).astype(dtype)


def stored(shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str = "float32") -> Stored:
    return Stored(noise(shape, dtype), chunks)


def neighbours(window: Pixels) -> Pixels:
    """Weighted shifted sums: the left neighbours have other weights than the right ones."""
    result = window.astype("float64")
    for axis in range(window.ndim):
        result = result + 0.5 * np.roll(result, 1, axis) - 0.25 * np.roll(result, -2, axis)
    return result


def running_sum(window: Pixels) -> Pixels:
    """A sum that depends on the position in the window, and on everything before it."""
    for axis in range(window.ndim):
        window = np.cumsum(window, axis=axis)
    return window


def box(window: Pixels) -> Pixels:
    return np.asarray(uniform_filter(window, 3, mode="nearest"))


def column_sum(window: Pixels) -> Pixels:
    return np.asarray(window.sum(axis=1))


def slope(window: Pixels) -> Pixels:
    return np.asarray(np.hypot(*np.gradient(window)))


def mark(window: Pixels, block_id: Any = None, block_info: Any = None) -> Pixels:
    """Pixels that depend on the place of the block, and on the dtype that the function is given."""
    text = repr((block_id, sorted(block_info.items(), key=repr))) if block_info else ""
    return window + np.float32(sum(map(ord, text)) % 99991)


def compute(array: da.Array) -> Pixels:
    return np.asarray(array.compute(scheduler="synchronous"))


def same(ours: da.Array, stock: da.Array) -> None:
    assert (ours.chunks, ours.dtype) == (stock.chunks, stock.dtype)
    np.testing.assert_array_equal(compute(ours), compute(stock), strict=True)


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
    for index in np.ndindex(*(-(-n // c) for n, c in zip(store.shape, store.chunks, strict=True))):
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
def cases(draw: st.DrawFn) -> tuple[Stored, dict[str, Any]]:
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
    return stored(tuple(shape), tuple(chunks), dtype), {"depth": depth, "boundary": boundary}


@pytest.mark.parametrize("func", [neighbours, running_sum, box])
@pytest.mark.parametrize("trim", [True, thorough(False)])
@given(case=cases())
@settings(deadline=None, max_examples=30)
def test_the_bits_equal_stock_dask(func: Callable[[Pixels], Pixels], trim: bool, case: Any) -> None:
    store, kwargs = case
    stock = da.map_overlap(func, store.in_dask, allow_rechunk=False, trim=trim, **kwargs)
    same(map_overlap(func, store, trim=trim, **kwargs), stock)


@st.composite
def deep_cases(draw: st.DrawFn) -> tuple[Stored, Any, list[Any]]:
    """Cases that stock Dask refuses or rechunks: any depth, asymmetric, under any rule."""
    axes = draw(st.integers(1, 2))
    sizes = st.tuples(*[st.integers(1, 9)] * axes)
    depth = tuple(draw(st.tuples(st.integers(0, 12), st.integers(0, 12))) for _ in range(axes))
    rules = [draw(st.sampled_from(["reflect", "periodic", "nearest", "none", "cut", 5])) for _ in range(axes)]
    return stored(draw(sizes), draw(sizes)), depth, rules


@pytest.mark.parametrize("func", [neighbours, running_sum])
@given(case=deep_cases())
@settings(deadline=None, max_examples=60)
def test_any_depth_works_where_stock_refuses(func: Callable[[Pixels], Pixels], case: Any) -> None:
    store, depth, rules = case
    ours = map_overlap(func, store, depth=depth, boundary=tuple(rules))
    np.testing.assert_array_equal(compute(ours), through_the_whole(func, store, depth, rules), strict=True)


REFLECTED: dict[str, Any] = {"depth": 2, "boundary": "reflect"}
AS_IN_DASK: list[tuple[Any, dict[str, Any]]] = [
    *((neighbours, {"depth": d}) for d in (2, (2, 1), {0: 2}, {1: (1, 2)}, ((0, 1), (2, 0)), [1], [(2, 1)], None)),
    *((neighbours, {"depth": 2, "boundary": b}) for b in (None, "none", "reflect", ("periodic", 3), {1: "nearest"})),
    *((neighbours, {"depth": 2, "boundary": b}) for b in ([{0: 0.5}], np.nan, np.float32(2))),
    *((mark, {"depth": d, "boundary": b}) for d in (0, 2) for b in ("reflect", "none")),
    *((mark, {**REFLECTED, "dtype": d}) for d in ("float32", np.float32)),
    (mark, {**REFLECTED, "meta": np.ones((0, 0), "f4")}),
    (column_sum, {"depth": {0: 1}, "boundary": "nearest", "drop_axis": 1}),
    (column_sum, {**REFLECTED, "depth": {0: 2}, "drop_axis": -1, "trim": False, "chunks": ((8, 8, 8),)}),
    (partial(np.expand_dims, axis=0), {**REFLECTED, "new_axis": 0}),
    (partial(np.repeat, repeats=2, axis=0), {**REFLECTED, "trim": False, "chunks": ((16, 16, 16), (9, 9))}),
    (np.sqrt, {**REFLECTED, "dtype": "float32"}),
    (np.sqrt, {**REFLECTED, "meta": np.empty((0, 0), "float32")}),
]


@pytest.mark.parametrize(("func", "kwargs"), AS_IN_DASK, ids=[str(n) for n in range(len(AS_IN_DASK))])
def test_arguments_mean_the_same_as_in_dask(func: Any, kwargs: dict[str, Any]) -> None:
    store = stored((12, 10), (4, 5))
    same(map_overlap(func, store, **kwargs), da.map_overlap(func, store.in_dask, **kwargs))


def test_a_constant_becomes_a_pixel_as_in_numpy() -> None:
    constants: dict[str, Any] = {"int64": 2**62 + 1, "int16": 2.5, "bool": 1}
    for dtype, value in constants.items():
        store, pixel = Stored(np.ones(6, dtype), (3,)), np.full(1, value, dtype)
        assert compute(map_overlap(np.array, store, depth=1, boundary=value, trim=False))[0] == pixel[0]
    with pytest.raises(ConfigError, match="cannot hold"):
        map_overlap(np.array, Stored(np.ones(6, "uint8"), (3,)), depth=1, boundary=-1)


def test_cut_means_none_and_negative_axes_count_from_the_last() -> None:
    store, row = stored((20, 30), (6, 7)), stored((30,), (7,))
    none = map_overlap(running_sum, store, depth=2, boundary="none")
    for array in (store, store.in_dask):
        same(map_overlap(running_sum, array, depth=2, boundary="cut"), none)
    same(
        map_overlap(running_sum, store, depth={-1: 3, 0: 1}, boundary={-1: "reflect", -2: 5}),
        map_overlap(running_sum, store, depth=(1, 3), boundary=(5, "reflect")),
    )
    same(
        map_overlap(np.add, store, row, depth={-1: 2}, boundary="reflect"),
        map_overlap(np.add, store, row, depth=[{1: 2}, {0: 2}], boundary="reflect"),
    )


def test_each_window_is_read_once_by_one_task_and_only_when_it_is_computed() -> None:
    store = stored((64, 48), (16, 16))
    result = map_overlap(box, store, depth=2, boundary="reflect")
    for graph in (result, *(dask.optimize(each)[0] for each in (result, result + 1))):
        assert len(dict(graph.__dask_graph__())) == 12
    assert store.regions == []
    compute(result)
    assert len(store.regions) == 12
    assert sum(region.size for region in store.regions) <= 12 * 20 * 20
    compute(result[:16, :16])
    assert len(store.regions) == 13
    line = stored((64,), (16,))
    compute(map_overlap(neighbours, line, depth=2, boundary="periodic"))
    assert sum(region.size for region in line.regions) == 4 * 20


def test_several_stores_are_aligned_as_dask_does() -> None:
    def add(*windows: Pixels) -> Pixels:
        return running_sum(sum(windows[1:], windows[0]))

    for shapes, chunks in (
        (((12, 8), (12, 8)), ((4, 4), (4, 4))),
        (((12, 8), (12, 8)), ((4, 4), (6, 8))),
        (((12, 8), (8,)), ((6, 4), (4,))),
        (((8,), (12, 8)), ((4,), (6, 4))),
        (((12, 8), (12, 8), (12, 8)), ((6, 4), (12, 2), (3, 8))),
    ):
        stores = list(map(stored, shapes, chunks))
        depth: Any = {0: 0, 1: 2} if len(shapes[0]) == len(shapes[1]) else [{}, {}]
        for rule in ("reflect", "none"):
            kwargs: dict[str, Any] = {"depth": depth, "boundary": rule}
            same(map_overlap(add, *stores, **kwargs), da.map_overlap(add, *[s.in_dask for s in stores], **kwargs))


def test_each_store_has_its_own_depth_and_an_axis_of_one_pixel_is_broadcast() -> None:
    image, row = stored((12, 8), (4, 4)), stored((1, 8), (1, 4))

    def add(x: Pixels, y: Pixels) -> Pixels:
        return running_sum(x) + y

    result = map_overlap(add, image, row, depth=[{0: 2}, 0])
    same(result, map_overlap(lambda y, x: add(x, y), row, image, depth=[0, {0: 2}]))
    np.testing.assert_array_equal(compute(result), compute(map_overlap(running_sum, image, depth={0: 2})) + row.pixels)


def test_keys_contain_the_given_name_and_change_with_arguments_and_content() -> None:
    store = stored((8,), (4,))
    assert map_overlap(box, store, depth=1, name="tidy").name == "tidy"
    assert map_overlap(box, store, depth=1, token="tidy").name.startswith("tidy-")
    names = [map_overlap(box, store, depth=d, boundary=b).name for d in (1, 1, 2) for b in ("reflect", "none", 3, 4)]
    assert len(set(names)) == 8
    store.version = 2
    assert map_overlap(box, store, depth=1, boundary="reflect").name not in names


def test_ordinary_arrays_go_to_stock_dask() -> None:
    store = stored((12, 10), (4, 5))
    for boundary in ("reflect", "none"):
        stock = da.map_overlap(np.add, store.in_dask, store.in_dask, depth=2, boundary=boundary)
        for other in (store.in_dask, store.pixels, store):
            mixed = map_overlap(np.add, store.in_dask, other, depth=2, boundary=boundary)
            np.testing.assert_array_equal(compute(mixed), compute(stock), strict=True)


def test_a_path_need_not_be_an_image(tmp_path: Path) -> None:
    for number, dtype in enumerate(("int64", "uint64", "complex64", "complex128", "bool", "float32")):
        pixels = noise((30, 20) if number % 2 else (40,), dtype)
        np.save(tmp_path / f"{dtype}.npy", pixels)
        zarr.create_array(tmp_path / f"{dtype}.zarr", data=pixels, chunks=(12,) * pixels.ndim)
        stock = da.map_overlap(np.cumsum, da.from_array(pixels, chunks=12), **REFLECTED, axis=-1)
        image = zarr.open_array(tmp_path / f"{dtype}.zarr")
        for source in (tmp_path / f"{dtype}.npy", str(tmp_path / f"{dtype}.zarr"), image):
            ours = map_overlap(np.cumsum, source, block=12, axis=-1, **REFLECTED)
            same(ours, stock)
            assert len(pickle.dumps(ours)) < 8000, "the graph holds no pixels"
    np.save(tmp_path / "a.npy", np.array([{}, None]))
    for name, words in (("a.npy", r"a\.npy: its type is object, which is not numeric"), ("gone", "nothing is there")):
        with pytest.raises(InputError, match=words):
            map_overlap(neighbours, tmp_path / name, depth=1)


def test_a_file_without_chunks_is_cut_as_dask_cuts(tmp_path: Path) -> None:
    pixels, strips = noise((300, 200)), {"rowsperstrip": 1}
    np.save(tmp_path / "a.npy", pixels)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["image"] = pixels
    for number, options in enumerate(({}, strips, strips | {"contiguous": False})):
        tifffile.imwrite(tmp_path / f"{number}.tif", pixels, photometric="minisblack", **options)
    for path in tmp_path.iterdir():
        result = map_overlap(neighbours, path, depth=2)
        assert result.chunks == ((300,), (200,))
        assert len(pickle.dumps(result)) < 8000, "the graph holds no pixels"


def test_the_number_of_axes_may_change() -> None:
    store = stored((8, 10), (4, 5))
    for axis in (0, 1, 2):
        result = map_overlap(partial(np.expand_dims, axis=axis), store, new_axis=axis, **REFLECTED)
        np.testing.assert_array_equal(compute(result), np.expand_dims(store.pixels, axis))
    assert compute(map_overlap(lambda x: x + 1, Stored(np.array(41), ()), depth=1)) == 42


def add_keywords(window: Pixels, **kwargs: Any) -> Pixels:
    return np.asarray(window + sum(kwargs.values()))


def test_keywords_of_the_function_are_passed_on() -> None:
    rows: list[str] = ["func", "adjust_chunks", "new_axes", "concatenate", "array", "source", "words", "kwargs", "task"]
    for keyword in rows:
        store = stored((8,), (4,))
        kwargs: dict[str, Any] = {keyword: 3}
        for source in (store, store.in_dask):
            result = map_overlap(add_keywords, source, depth=1, boundary=0, **kwargs)
            np.testing.assert_array_equal(compute(result), store.pixels + 3)
        func = partial(add_keywords, name=1, depth=2, dtype=4)
        np.testing.assert_array_equal(compute(map_overlap(func, store, depth=1)), store.pixels + 7)


STORE = stored((8, 8), (4, 4))
NO_LENGTH = r"at least 1 pixel long\. Write a size per axis, or -1"


def test_invalid_arguments_are_refused_with_their_values() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"depth": -1}, "depth is -1"),
        ({"depth": 1.5}, "depth is 1.5"),
        ({"depth": {0: (1, 2, 3)}}, r"depth is \(1, 2, 3\)"),
        ({"depth": {2: 1}}, r"depth names the axes \[2\]"),
        ({"depth": (1, 1, 1)}, r"depth names the axes \[2\]"),
        ({"depth": [1, 1]}, "depth is a list of 2 entries for 1 array"),
        ({"boundary": "mirror"}, "boundary is 'mirror'"),
        ({"boundary": {-3: "none"}}, r"boundary names the axes \[-3\]"),
        ({"boundary": np.nan, "depth": 1, "arrays": [stored((8,), (4,), "uint8")]}, "boundary is nan"),
        ({"block": (4,)}, "it has 1 entry for 2 axes"),
        ({"block": "many"}, "block is 'many'"),
        *(({"block": block}, NO_LENGTH) for block in (0, (0, 16), -5, (16, -2))),
        ({"block": 4, "arrays": [da.ones(4)]}, "it is for stores only"),
        ({"drop_axis": 2}, r"drop_axis is \(2,\)"),
        ({"drop_axis": 1, "depth": 1}, "pixels would be counted twice"),
        ({"chunks": (1, 1), "depth": 2, "boundary": 0}, "too short to trim"),
        ({"arrays": []}, "no array was given"),
        ({"arrays": [3]}, "an array is a int"),
        ({"arrays": [stored((0, 4), (1, 4))]}, "no pixels to map"),
        ({"arrays": [STORE, stored((8, 6), (4, 3))]}, "cannot be broadcast together"),
        ({"arrays": [STORE, stored((8, 8), (4, 8))], "align_arrays": False}, "align_arrays is False"),
        ({"func": STORE}, "cannot be called"),
        *(
            ({"func": slope, "arrays": [array], **REFLECTED}, r'slope fails on .* at least .* such as dtype="float32"')
            for array in (STORE, da.ones((20, 20), chunks=8))
        ),
    ]
    for kwargs, message in rows:
        kwargs = {"func": neighbours, "arrays": [STORE], **kwargs}
        with pytest.raises(ConfigError, match=message) as caught:
            map_overlap(kwargs.pop("func"), *kwargs.pop("arrays"), **kwargs)
        assert "Traceback" not in str(caught.value)


def test_a_function_that_fails_on_a_single_pixel_needs_a_dtype() -> None:
    store = stored((40, 30), (16, 16))
    stock = da.map_overlap(slope, store.in_dask, dtype="float32", **REFLECTED)
    for array in (store, store.in_dask):
        same(map_overlap(slope, array, dtype="float32", **REFLECTED), stock)
        with pytest.raises(ValueError, match="Provided chunks have 1 dims"):
            map_overlap(neighbours, array, chunks=((1, 2),), **REFLECTED)


def test_enforce_ndim_names_the_function_that_lost_an_axis() -> None:
    result = map_overlap(column_sum, STORE, depth=0, dtype="float32", enforce_ndim=True)
    with pytest.raises(ConfigError, match="column_sum returned an array of 1 axes"):
        compute(result)
