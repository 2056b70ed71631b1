"""Methods on tensors that also take NumPy arrays and stored images, and return what they were given."""

from __future__ import annotations

import functools
import math
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch

from halotile.storage.arrays import open_source
from halotile.storage.disk.place import ZARR_FILES
from halotile.storage.grid import Grid, Region
from halotile.storage.sharded.layout import Layout
from halotile.storage.sharded.output import ShardWriter, create_output
from halotile.tasks.distributed.transport.calls import Engine
from halotile.tasks.distributed.transport.tensors import dtype_name, to_array, to_tensor

IN_MEMORY_BYTES = 2**26  # assembled images up to this size are kept in memory, larger ones in a file
SHARD = 512
IMAGE_AXES = 4

Method = TypeVar("Method", bound=Callable[..., Any])


def convert_types(method: Method) -> Method:
    """Let a method of an object with a context take arrays and paths as well, and return the same type.

    The type of the first argument decides. Gradients are not kept for arrays and paths. Results that are not
    images are arrays in both cases.
    """

    @functools.wraps(method)
    def converted(self: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
        example = first[0] if isinstance(first, list | tuple) and len(first) else first
        if isinstance(example, np.ndarray):
            output: Callable[..., Any] = _array_of
        elif isinstance(example, str | os.PathLike):
            stem = self.ctx.result_path(getattr(self, "result_name", method.__name__))
            output = functools.partial(write_result, stem, missing_axes(open_source(example).shape))
            first = read_image(self.ctx, first) if example is first else [read_image(self.ctx, p) for p in first]
        else:
            return method(self, first, *args, **kwargs)
        convert = functools.partial(_to_tensors, self.ctx)
        with torch.no_grad():
            keywords = {key: convert(value) for key, value in kwargs.items()}
            result = method(self, convert(first), *map(convert, args), **keywords)
        return _convert_result(result, output)

    return cast(Method, converted)


def _to_tensors(ctx: Engine, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return to_tensor(value, device=ctx.device)
    if isinstance(value, os.PathLike) or (isinstance(value, str) and _is_store_path(value)):
        return read_image(ctx, value)
    if isinstance(value, list | tuple):
        return [_to_tensors(ctx, entry) for entry in value]
    return value


def _is_store_path(value: str) -> bool:
    """Return True for the path of a stored array: other arguments, such as a solver, are strings too."""
    path = Path(value)
    return path.exists() and (bool(path.suffix) or any((path / name).exists() for name in ZARR_FILES))


def missing_axes(shape: tuple[int, ...]) -> int:
    """Number of axes of length 1 that make a stored image one for deepinv: (batch, channel, y, x).

    >>> missing_axes((300, 400)), missing_axes((1, 3, 300, 400)), missing_axes((1, 1, 9, 300, 400))
    (2, 0, 0)
    """
    return max(0, IMAGE_AXES - len(shape))


def _convert_result(result: Any, output: Callable[..., Any]) -> Any:
    if isinstance(result, torch.Tensor):  # a scalar, or one for each image of a batch, is not an image
        return to_array(result) if result.dim() < 2 else output(result)
    return [output(tensor, f"-{number}") for number, tensor in enumerate(result)]


def _array_of(tensor: torch.Tensor, ending: str = "") -> Any:
    return to_array(tensor)


def empty_tensor(ctx: Engine, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Allocate a tensor for results: a large one in a file, whose pages the system may write out."""
    if math.prod(shape) * like.element_size() < IN_MEMORY_BYTES or like.device.type != "cpu":
        return like.new_empty(shape)
    return _in_a_file(ctx, shape, to_array(like.new_empty(())).dtype, dtype_name(like))


def _in_a_file(ctx: Engine, shape: tuple[int, ...], dtype: Any, kind: str | None = None) -> torch.Tensor:
    path = ctx.folder / f"image-{uuid.uuid4().hex}.npy"
    pixels = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    path.unlink()
    return to_tensor(pixels, kind)


def read_image(ctx: Engine, path: str | os.PathLike[str]) -> torch.Tensor:
    """Read a stored image into a file-backed tensor, with leading axes of length 1 up to four axes."""
    source = open_source(path)
    shape = tuple(source.shape)
    tensor = _in_a_file(ctx, shape, np.dtype(source.dtype))
    pixels = tensor.numpy()
    for region in _regions(shape):
        pixels[region.slices] = source.read(region)
    return tensor.reshape((1,) * missing_axes(shape) + shape)


def write_result(stem: Path, added_axes: int, tensor: torch.Tensor, ending: str = "") -> str:
    """Write a tensor to a new Zarr array, such as ``A-0001.zarr`` or ``A-0001-0.zarr``, and return its path.

    The axes of length 1 that were added to the inputs are removed from images.
    """
    if tensor.dim() == IMAGE_AXES and all(length == 1 for length in tensor.shape[:added_axes]):
        tensor = tensor.reshape(tensor.shape[added_axes:])
    path = stem.with_name(f"{stem.name}{ending}.zarr")
    pixels = to_array(tensor)
    shape = pixels.shape or (1,)
    axes, shard = len(shape), _shard(shape)
    layout = Layout(
        shape=shape,
        dtype=str(pixels.dtype),
        shard=shard,
        chunk=shard,
        codec="none",
        axes=tuple(f"d{axis}" for axis in range(axes)),
        scale=(1.0,) * axes,
        units=(None,) * axes,
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
    return [block.core for block in Grid(shape, _shard(shape), ((0, 0),) * len(shape))]
