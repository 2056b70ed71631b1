"""Type in is type out: what methods on tensors do with NumPy arrays, and with images that lie on the disk."""

from __future__ import annotations

import functools
import math
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch

from halotile.storage.arrays import open_source
from halotile.storage.disk.place import ZARR_FILES
from halotile.storage.grid import Grid, Region
from halotile.storage.sharded.layout import Layout
from halotile.storage.sharded.output import ShardWriter, create_output
from halotile.tasks.distributed.transport.engine import Engine
from halotile.tasks.distributed.transport.tensors import kind_of, to_array, to_tensor

IN_MEMORY_BYTES = 2**26
"""Images that are put together are kept in memory up to this size, and in a file above."""
SHARD = 512
IMAGE_AXES = 4

Method = TypeVar("Method", bound=Callable[..., Any])


def typed(method: Method) -> Method:
    """Let a method of an object with a context take and give NumPy arrays and paths as well.

    The first argument decides. Of arrays and paths no gradients are kept. Numbers that are no image are arrays for both.
    """

    @functools.wraps(method)
    def called(self: Any, first: Any, *args: Any, **words: Any) -> Any:
        example = first[0] if isinstance(first, list | tuple) and len(first) else first
        if isinstance(example, np.ndarray):
            give: Callable[..., Any] = to_array
        elif isinstance(example, str | os.PathLike):
            stem = self.ctx.result_path(getattr(self, "result_name", method.__name__))
            give = Writer(stem, lead=missing_axes(open_source(example).shape))
            first = (
                [read(self.ctx, each) for each in first] if example is not first else read(self.ctx, first)
            )
        else:
            return method(self, first, *args, **words)
        take = functools.partial(_taken, self.ctx)
        with torch.no_grad():
            result = method(self, take(first), *map(take, args), **{key: take(w) for key, w in words.items()})
        return _mapped(result, give)

    return cast(Method, called)


def _taken(ctx: Engine, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return to_tensor(value, str(value.dtype), ctx.device)
    if isinstance(value, os.PathLike) or (isinstance(value, str) and _names_a_store(value)):
        return read(ctx, value)
    if isinstance(value, list | tuple):
        return [_taken(ctx, each) for each in value]
    return value


def _names_a_store(word: str) -> bool:
    """Whether a word is a path: other arguments, such as the name of a solver, are words as well."""
    path = Path(word)
    return path.exists() and (bool(path.suffix) or any((path / name).exists() for name in ZARR_FILES))


def missing_axes(shape: tuple[int, ...]) -> int:
    """How many axes of length 1 make a stored image one that deepinv takes: (batch, channel, y, x).

    Examples
    --------
    >>> missing_axes((300, 400)), missing_axes((1, 3, 300, 400)), missing_axes((1, 1, 9, 300, 400))
    (2, 0, 0)
    """
    return max(0, IMAGE_AXES - len(shape))


def _mapped(result: Any, give: Callable[..., Any]) -> Any:
    if isinstance(result, torch.Tensor):  # a number, or one for each image of a batch, is no image
        return to_array(result) if result.dim() < 2 else give(result)
    if isinstance(give, Writer):
        return [give(each, number) for number, each in enumerate(result)]
    return [give(each) for each in result]


def empty(ctx: Engine, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """A tensor to put results into: in a file that the system may write out and forget, if it is large."""
    if math.prod(shape) * like.element_size() < IN_MEMORY_BYTES or like.device.type != "cpu":
        return like.new_empty(shape)
    return _in_a_file(ctx, shape, to_array(like.new_empty(())).dtype, kind_of(like))


def _in_a_file(ctx: Engine, shape: tuple[int, ...], dtype: Any, kind: str) -> torch.Tensor:
    path = ctx.folder / f"image-{uuid.uuid4().hex}.npy"
    pixels = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    path.unlink()
    return to_tensor(pixels, kind)


def read(ctx: Engine, path: str | os.PathLike[str]) -> torch.Tensor:
    """A stored image as a tensor whose numbers lie in a file, with axes of length 1 in front where it has fewer than four."""
    source = open_source(path)
    dtype = np.dtype(source.dtype)
    tensor = _in_a_file(ctx, tuple(source.shape), dtype, str(dtype))
    pixels = tensor.numpy()
    for region in _regions(tuple(source.shape)):
        pixels[region.slices] = source.read(region)
    return tensor.reshape((1,) * missing_axes(tuple(source.shape)) + tuple(source.shape))


@dataclass
class Writer:
    """Writes the results of one call: ``A-0001.zarr``, or ``A-0001-0.zarr`` and so on where there are several.

    Images lose as many axes of length 1 as were put in front of what went in.
    """

    stem: Path
    lead: int = 0

    def __call__(self, tensor: torch.Tensor, number: int | None = None) -> str:
        """The path of a new Zarr with these numbers."""
        if tensor.dim() == IMAGE_AXES and all(length == 1 for length in tensor.shape[: self.lead]):
            tensor = tensor.reshape(tensor.shape[self.lead :])
        ending = "" if number is None else f"-{number}"
        return written(self.stem.with_name(f"{self.stem.name}{ending}.zarr"), tensor)


def written(path: Path, tensor: torch.Tensor) -> str:
    """A new Zarr with these numbers; its path."""
    pixels = to_array(tensor)
    shape = pixels.shape or (1,)
    shard = _shard(shape)
    front = len(shape)
    layout = Layout(
        shape=shape,
        dtype=str(pixels.dtype),
        shard=shard,
        chunk=shard,
        codec="none",
        axes=tuple(f"d{axis}" for axis in range(front)),
        scale=(1.0,) * front,
        units=(None,) * front,
        ome=False,
    )
    create_output(path, layout)
    writer = ShardWriter(path, layout)
    for region in _regions(shape):
        writer.write(region, np.ascontiguousarray(pixels.reshape(shape)[region.slices]))
    return str(path)


def _shard(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if axis < len(shape) - 2 else min(SHARD, n) for axis, n in enumerate(shape))


def _regions(shape: tuple[int, ...]) -> list[Region]:
    grid = Grid(shape, _shard(shape), ((0, 0),) * len(shape))
    return [block.core for block in grid]
