"""The arguments of `map_overlap`, and those of its function, are the same as in Dask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
import pytest

from halotile.errors import ConfigError
from halotile.graphs.map_overlap import map_overlap
from tests.graphs.overlapping import Pixels, Stored, box, compute, neighbours, noise, running_sum, same, stored


def mark_location(window: Pixels, block_id: Any = None, block_info: Any = None) -> Pixels:
    text = repr((block_id, sorted(block_info.items(), key=repr))) if block_info else ""
    return window + sum(map(ord, text)) % 99991


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("boundary", ["reflect", "none"])
def test_the_function_gets_its_block_as_in_dask(depth: int, boundary: str) -> None:
    store = stored((12, 10), (4, 5))
    array = da.from_array(store.pixels, chunks=store.chunks)
    kwargs: dict[str, Any] = {"depth": depth, "boundary": boundary}
    same(map_overlap(mark_location, store, **kwargs), da.map_overlap(mark_location, array, **kwargs))


def column_sum(window: Pixels) -> Pixels:
    total: Pixels = window.sum(axis=1)
    return total


@pytest.mark.parametrize(
    ("func", "kwargs"),
    [
        (column_sum, {"drop_axis": 1}),
        (column_sum, {"drop_axis": -1, "trim": False, "chunks": ((8, 8),)}),
        (partial(np.expand_dims, axis=0), {"new_axis": 0}),
        (partial(np.repeat, repeats=2, axis=0), {"trim": False, "chunks": ((16, 16), (14,))}),
        (partial(np.repeat, repeats=2, axis=0), {"chunks": ((16, 16), (14,))}),
        (np.sqrt, {"dtype": "float32"}),
        (np.sqrt, {"meta": np.empty((0, 0), "float32")}),
    ],
)
def test_arguments_of_map_blocks_are_accepted(func: Callable[[Pixels], Pixels], kwargs: dict[str, Any]) -> None:
    store = stored((8, 10), (4, 10))
    array = da.from_array(store.pixels, chunks=store.chunks)
    ours = map_overlap(func, store, depth=2, boundary="reflect", **kwargs)
    stock = da.map_overlap(func, array, depth=2, boundary="reflect", **kwargs)
    assert ours.chunks == stock.chunks
    assert ours.dtype == stock.dtype
    np.testing.assert_array_equal(
        ours.compute(scheduler="synchronous"), stock.compute(scheduler="synchronous"), strict=True
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_new_axis_is_not_trimmed_at_any_position(axis: int) -> None:
    store = stored((8, 10), (4, 5))
    result = map_overlap(partial(np.expand_dims, axis=axis), store, depth=2, boundary="reflect", new_axis=axis)
    np.testing.assert_array_equal(compute(result), np.expand_dims(store.pixels, axis))


def test_a_dropped_axis_is_passed_whole() -> None:
    store = stored((8, 10), (4, 3))
    array = da.from_array(store.pixels, chunks=store.chunks)
    kwargs: dict[str, Any] = {"depth": {0: 1}, "boundary": "nearest", "drop_axis": 1}
    same(map_overlap(column_sum, store, **kwargs), da.map_overlap(column_sum, array, **kwargs))


def test_an_array_of_no_axes_is_one_block() -> None:
    assert compute(map_overlap(lambda x: x + 1, Stored(np.array(41), ()), depth=1)) == 42


def add_keywords(window: Pixels, **kwargs: Any) -> Pixels:
    result: Pixels = window + sum(kwargs.values())
    return result


@pytest.mark.parametrize(
    "keyword", ["func", "adjust_chunks", "new_axes", "concatenate", "array", "source", "words", "kwargs", "task"]
)
def test_keywords_of_the_function_are_passed_on(keyword: str) -> None:
    store = stored((8,), (4,))
    array = da.from_array(store.pixels, chunks=store.chunks)
    for source in (store, array):
        kwargs: dict[str, Any] = {keyword: 3}
        result = map_overlap(add_keywords, source, depth=1, boundary=0, **kwargs)
        np.testing.assert_array_equal(compute(result), store.pixels + 3)


def test_keywords_named_like_parameters_are_bound_by_partial() -> None:
    store = stored((8,), (4,))
    func = partial(add_keywords, name=1, depth=2, dtype=4)
    np.testing.assert_array_equal(compute(map_overlap(func, store, depth=1)), store.pixels + 7)


def test_lazy_keywords_of_the_function_are_computed_first() -> None:
    store = stored((8,), (4,), "float64")
    offset = da.arange(3, chunks=1).sum()
    result = map_overlap(add_keywords, store, depth=1, dtype="float64", offset=offset)
    np.testing.assert_array_equal(compute(result), store.pixels + 3.0)


def test_stock_errors_are_stock_errors() -> None:
    array = da.from_array(noise((12,)), chunks=4)
    with pytest.raises(NotImplementedError, match="Asymmetric"):
        map_overlap(box, array, depth={0: (1, 2)}, boundary="reflect")
    with pytest.raises(ValueError, match="larger"):
        map_overlap(box, array, depth=13, boundary="reflect")


def test_negative_axes_count_from_the_last() -> None:
    store, row = stored((20, 30), (6, 7)), stored((30,), (7,))
    same(
        map_overlap(running_sum, store, depth={-1: 3, 0: 1}, boundary={-1: "reflect", -2: 5}),
        map_overlap(running_sum, store, depth=(1, 3), boundary=(5, "reflect")),
    )
    same(
        map_overlap(np.add, store, row, depth={-1: 2}, boundary="reflect"),
        map_overlap(np.add, store, row, depth=[{1: 2}, {0: 2}], boundary="reflect"),
    )


def mark_dtype(window: Pixels, block_info: Any = None) -> Pixels:
    text = repr(block_info[None]["dtype"]) if block_info else ""
    return np.full(window.shape, sum(map(ord, text)) % 997, "float32")


@pytest.mark.parametrize("kwargs", [{}, {"dtype": "float32"}, {"dtype": np.float32}, {"meta": np.ones((0, 0), "f4")}])
def test_the_function_gets_the_dtype_as_in_dask(kwargs: dict[str, Any]) -> None:
    store = stored((12, 10), (4, 5))
    array = da.from_array(store.pixels, chunks=store.chunks)
    same(
        map_overlap(mark_dtype, store, depth=1, boundary="reflect", **kwargs),
        da.map_overlap(mark_dtype, array, depth=1, boundary="reflect", **kwargs),
    )


STORE = stored((8, 8), (4, 4))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
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
        ({"block": 4, "arrays": [da.ones(4)]}, "it is for stores only"),
        ({"drop_axis": 2}, r"drop_axis is \(2,\)"),
        ({"drop_axis": 1, "depth": 1}, "pixels would be counted twice"),
        ({"chunks": (1, 1), "depth": 2, "boundary": 0}, "too short to trim"),
        ({"arrays": []}, "no array was given"),
        ({"arrays": [3]}, "an array is a int"),
        ({"arrays": [stored((0, 4), (1, 4))]}, "no pixels to map"),
        ({"arrays": [STORE, stored((8, 6), (4, 3))]}, "cannot be broadcast together"),
        ({"arrays": [STORE, stored((8, 8), (4, 8))], "align_arrays": False}, "align_arrays is False"),
    ],
)
def test_invalid_arguments_are_refused_with_their_values(kwargs: dict[str, Any], message: str) -> None:
    kwargs = dict(kwargs)
    arrays = kwargs.pop("arrays", [STORE])
    with pytest.raises(ConfigError, match=message):
        map_overlap(neighbours, *arrays, **kwargs)


def test_a_function_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be called"):
        map_overlap(STORE, neighbours, depth=1)  # type: ignore[arg-type]


def test_enforce_ndim_names_the_function_that_lost_an_axis() -> None:
    result = map_overlap(column_sum, STORE, depth=0, dtype="float32", enforce_ndim=True)
    with pytest.raises(ConfigError, match="column_sum returned an array of 1 axes"):
        result.compute(scheduler="synchronous")


def slope(window: Pixels) -> Pixels:
    rows, columns = np.gradient(window)
    steepness: Pixels = np.hypot(rows, columns)
    return steepness


@pytest.mark.parametrize("stores", [True, False])
def test_a_function_that_fails_on_a_single_pixel_needs_a_dtype(stores: bool) -> None:
    pixels = noise((40, 30))
    array = Stored(pixels, (16, 16)) if stores else da.from_array(pixels, chunks=16)
    with pytest.raises(ConfigError, match=r'slope fails on .* at least .* such as dtype="float32"') as caught:
        map_overlap(slope, array, depth=1, boundary="reflect")
    assert "Traceback" not in str(caught.value)
    same(
        map_overlap(slope, array, depth=1, boundary="reflect", dtype="float32"),
        da.map_overlap(slope, da.from_array(pixels, chunks=16), depth=1, boundary="reflect", dtype="float32"),
    )


@pytest.mark.parametrize("stores", [True, False])
def test_other_errors_keep_their_messages(stores: bool) -> None:
    array = stored((20, 20), (8, 8)) if stores else da.ones((20, 20), chunks=8)
    with pytest.raises(ValueError, match="Provided chunks have 1 dims"):
        map_overlap(neighbours, array, depth=1, boundary="reflect", chunks=((1, 2),))
