"""Stacks of local operators, block by block: a task reads a block once and applies all operators to it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch

from halotile.errors import ConfigError
from halotile.storage.grid import Region
from halotile.storage.rim import Readable
from halotile.tasks.distributed.engine import Engine
from halotile.tasks.distributed.stacks.linear_map import (
    LinearMap,
    find_image_shape,
    is_supported,
    measured_shapes,
)
from halotile.tasks.distributed.stacks.operators import make_packer
from halotile.tasks.distributed.stacks.windows import LazyBlock, wrapped_windows
from halotile.tasks.distributed.transport.calls import Call, Tensors
from halotile.tasks.distributed.transport.evaluate import Batch
from halotile.tasks.distributed.transport.packing import Packed
from halotile.tasks.distributed.transport.tensors import to_tensor
from halotile.tasks.distributed.transport.type_conversion import empty_tensor
from halotile.tasks.operators.base import InMemory, Operator, Shape, with_engine
from halotile.tasks.operators.deepinv import DeepInv
from halotile.tasks.operators.normal import Normal, can_fold
from halotile.tasks.operators.sum import Total
from halotile.tasks.terms import Gradient, NormalImage, Term, share_of

LARGE = 2**19
"""Size in pixels from which an image is cut into blocks: smaller ones cost less than a task."""
BLOCK = 1024
SINGLE = np.dtype(np.float32)
"""Dtype that the way of computing a convolution is chosen for."""
OutputName = Literal["forward", "adjoint", "normal", "gradient", "misfit"]


@dataclass(frozen=True)
class BlockCall:
    """One block of ``A x``, ``A^T y``, ``A^T A x``, the gradient or the misfit.

    The gradient is ``sum_i w_i A_i^T (A_i x - y_i)``.
    """

    operators: tuple[Packed, ...]
    output: OutputName  # result to compute
    image: Shape
    region: Region  # block, in pixels of the image; for measurements, the block's share of them
    weights: tuple[float, ...] = ()  # `w_i`, for gradient and misfit

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        return self.compute([InMemory(tensor.numpy()) for tensor in tensors])

    def compute(self, sources: Sequence[Readable]) -> Tensors:
        """Compute the block from arrays of which only parts are read."""
        operators: list[Operator] = [packed.get() for packed in self.operators]
        if self.output == "normal":
            terms = tuple(Term(operator, sources[0]) for operator in operators)
            return (to_tensor(NormalImage(sources[0], terms).read(self.region)),)
        if self.output == "adjoint":
            images = (o.adjoint(source, self.image) for o, source in zip(operators, sources, strict=True))
            return (to_tensor(Total(tuple(images), (1.0,) * len(operators)).read(self.region)),)
        if self.output == "gradient":
            weighted = zip(operators, sources[1:], self.weights, strict=True)
            terms = tuple(Term(*parts) for parts in weighted)
            return (to_tensor(Gradient(sources[0], terms).read(self.region)),)
        shares = [share_of(self.region, self.image, o.measured(self.image)) for o in operators]
        predicted = [o.forward(sources[0]).read(share) for o, share in zip(operators, shares, strict=True)]
        if self.output == "forward":
            return tuple(to_tensor(pixels) for pixels in predicted)
        measured = [source.read(share) for source, share in zip(sources[1:], shares, strict=True)]
        squares = [
            weight * np.square(np.subtract(a, b, dtype=np.float64)).reshape(len(a), -1).sum(1) / 2
            for a, b, weight in zip(predicted, measured, self.weights, strict=True)
        ]
        return (to_tensor(np.sum(squares, axis=0)),)


@dataclass(frozen=True)
class LocalOperator:
    """An operator with a small reach, where workers can read it."""

    written: Operator  # operator as it was written
    operator: Operator  # same with the way that its convolutions are computed
    packed: Packed  # its files
    declared: Shape | None = None  # declared shape (C, H, W) of its images


class LocalStack:
    """Operators with a small reach, on images that no task holds whole.

    Parameters
    ----------
    engine : Engine
        The engine that computes the blocks.
    parts : sequence of LocalOperator
        The operators.
    exact : bool
        Compute ``A^T A`` as it is written.
    """

    def __init__(self, engine: Engine, parts: Sequence[LocalOperator], exact: bool = False) -> None:
        self.engine = engine
        self.exact = exact
        self.written = tuple(part.written for part in parts)
        self.operators = tuple(part.operator for part in parts)
        self.packed = tuple(part.packed for part in parts)
        self._declared = tuple(part.declared for part in parts)

    @cached_property
    def _folded(self) -> LocalStack | None:
        """``A^T A`` as a stack of one self-adjoint operator, if a single kernel can replace all of them."""
        blurs = tuple(operator for operator in self.written if can_fold(operator))
        if self.exact or len(blurs) != len(self.written):
            return None
        normal = Normal(operators=blurs, weights=(1.0,) * len(blurs)).with_engine(SINGLE, exact=False)
        return LocalStack(self.engine, (pack_local(self.engine, normal, exact=True),), exact=True)

    def accepts(self, image: Shape) -> bool:
        """Return True if every operator accepts an image of this shape."""
        return measured_shapes(self.operators, image) is not None

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """``(A_1 x, ..., A_n x)``."""
        return self._linear(tuple(x.shape))([x])

    def adjoint(self, y: Sequence[torch.Tensor], image: Shape) -> torch.Tensor:
        """``sum_i A_i^T y_i``."""
        return self._linear(image).transposed(y)[0]

    def normal(self, x: torch.Tensor) -> torch.Tensor:
        """``sum_i A_i^T A_i x``."""
        image = tuple(x.shape)
        if self._folded is not None:
            return self._folded.adjoint([x], image)
        apply = partial(self._run, "normal", image)
        return LinearMap(apply, apply)([x])[0]

    def gradient(
        self, x: torch.Tensor, y: Sequence[torch.Tensor], weights: tuple[float, ...]
    ) -> torch.Tensor:
        """``sum_i w_i A_i^T (A_i x - y_i)``, a linear map of ``x`` and all ``y_i``."""
        image = tuple(x.shape)
        apply = partial(self._run, "gradient", image, weights=weights)

        def transpose(cotangents: list[torch.Tensor]) -> list[torch.Tensor]:
            zeros = [torch.zeros_like(part) for part in y]
            images = self._run("forward", image, cotangents)
            return [*apply([*cotangents, *zeros]), *(-w * v for w, v in zip(weights, images, strict=True))]

        return LinearMap(apply, transpose)([x, *y])[0]

    def misfit(self, x: torch.Tensor, y: Sequence[torch.Tensor], weights: tuple[float, ...]) -> torch.Tensor:
        """``sum_i w_i |A_i x - y_i|² / 2`` of each image of a batch, without gradients."""
        image = tuple(x.shape)
        places = tuple(range(1 + len(y)))
        calls = tuple(
            Call(BlockCall(self.packed, "misfit", image, region, weights), places, (0,), number)
            for number, region in enumerate(blocks_of(image))
        )
        (total,) = Batch(self.engine, "forward", calls, 1, "block").values([x, *y])
        assert total is not None
        return total.to(x.dtype)

    def image_shape(self, y: Sequence[torch.Tensor]) -> Shape | None:
        """Shape of the image that has such measurements; None if there is none."""
        return find_image_shape(self.operators, [tuple(part.shape) for part in y], self._declared)

    def lazy(self, output: OutputName, arrays: Sequence[Any], image: Shape) -> list[Any]:
        """Return lazy results of lazy arrays: each block is computed once its windows are."""
        if output == "normal" and self._folded is not None:
            return self._folded.lazy("adjoint", arrays, image)
        inputs = tuple(tuple(array.shape) for array in arrays)
        shapes = self._output_shapes(output, image)
        margin = self._margin(inputs)
        blocks, places = [], []
        for region in blocks_of(image):
            near = tuple(wrapped_windows(share_of(region, image, shape), margin, shape) for shape in inputs)
            blocks.append(LazyBlock(BlockCall(self.packed, output, image, region), inputs, near))
            places.append([share_of(region, image, shape) for shape in shapes])
        return self.engine.lazy_blocks(_phase(output), blocks, places, arrays)

    def _margin(self, shapes: Sequence[Shape]) -> int:
        """Largest distance that a block reads.

        It covers forward and adjoint, a fold at the rim, and the rest of a transform's cell.
        """
        is_aligned = all(o.measured(shape) == shape for o in self.operators for shape in shapes)
        return 3 * max(operator.reach for operator in self.operators) + (64 if is_aligned else 512)

    def _linear(self, image: Shape) -> LinearMap:
        return LinearMap(partial(self._run, "forward", image), partial(self._run, "adjoint", image))

    def _output_shapes(self, output: OutputName, image: Shape) -> list[Shape]:
        return [o.measured(image) for o in self.operators] if output == "forward" else [image]

    def _run(
        self, output: OutputName, image: Shape, tensors: list[torch.Tensor], weights: tuple[float, ...] = ()
    ) -> list[torch.Tensor]:
        regions = blocks_of(image)
        shapes = self._output_shapes(output, image)
        count = len(shapes)
        calls = tuple(
            Call(
                BlockCall(self.packed, output, image, region, weights),
                tuple(range(len(tensors))),
                tuple(range(number * count, (number + 1) * count)),
                number,
            )
            for number, region in enumerate(regions)
        )
        blocks = iter(Batch(self.engine, _phase(output), calls, len(calls) * count, "block").values(tensors))
        results = [empty_tensor(self.engine, shape, tensors[0]) for shape in shapes]
        for region in regions:
            for result, shape in zip(results, shapes, strict=True):
                place = region if shape == image else share_of(region, image, shape)
                result[place.slices] = next(blocks)
        return results


def _phase(output: OutputName) -> str:
    return "forward" if output == "forward" else "adjoint"


def blocks_of(image: Shape) -> list[Region]:
    """List the blocks of an image, whole along leading axes; smaller ones if there would be fewer than four.

    Examples
    --------
    >>> [region.shape for region in blocks_of((1, 2, 600, 512))]
    [(1, 2, 512, 512), (1, 2, 88, 512)]
    """
    front, (rows, columns) = image[:-2], image[-2:]
    side = BLOCK if rows * columns >= 4 * BLOCK**2 else BLOCK // 2
    corners = itertools.product(range(0, rows, side), range(0, columns, side))
    return [
        Region((*(0 for _ in front), y, x), (*front, min(y + side, rows), min(x + side, columns)))
        for y, x in corners
    ]


def is_large(engine: Engine, x: Any) -> bool:
    """Return True for an image, lazy or not, that is worth cutting and of a dtype that blocks support."""
    is_lazy = engine.is_lazy(x) and x.ndim == 4 and x.dtype in (np.float32, np.float64)
    return (is_lazy or is_supported(x)) and math.prod(x.shape[-2:]) > LARGE


def local_operator(
    engine: Engine, physics: Any, exact: bool = False, reach: int | Literal["auto"] | None = None
) -> LocalOperator | None:
    """Return a physics as a local operator; None if it depends on more than a neighbourhood."""
    try:
        operator = DeepInv(physics=physics, reach_=reach)
        if operator.kind != "local":
            return None
    except (ConfigError, ValueError, RuntimeError):
        return None
    return pack_local(engine, operator.replacement or operator, exact, operator.fixed_shape)


def pack_local(
    engine: Engine, operator: Operator, exact: bool, declared: Shape | None = None
) -> LocalOperator:
    """Send an operator to the workers; ``exact``: with convolutions as direct sums."""
    chosen = with_engine(operator, SINGLE, exact)
    return LocalOperator(operator, chosen, make_packer(engine, chosen).pack(), declared)
