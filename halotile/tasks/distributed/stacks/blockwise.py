"""A stack of local operators block by block: a task reads a block once, and adds what every operator makes of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from halotile.errors import ConfigError
from halotile.storage.grid import Region
from halotile.storage.rim import Readable
from halotile.tasks.distributed.stacks.maps import Linear, Many, image_measured_as, is_measured, is_real, own
from halotile.tasks.distributed.stacks.operators import pack
from halotile.tasks.distributed.stacks.windows import Late, windows
from halotile.tasks.distributed.transport.calls import Call, Tensors
from halotile.tasks.distributed.transport.engine import Engine
from halotile.tasks.distributed.transport.evaluate import Batch
from halotile.tasks.distributed.transport.packing import Packed
from halotile.tasks.distributed.transport.typed import empty
from halotile.tasks.fidelity import Gradient, NormalImage, Term, share_of
from halotile.tasks.operators.base import InMemory, Operator, Shape, with_engine
from halotile.tasks.operators.deepinv import DeepInv
from halotile.tasks.operators.normal import Normal, can_fold
from halotile.tasks.operators.sum import Total

LARGE = 2**19
"""Pixels of an image from which it is worth while to cut it: smaller ones cost less than a task."""
BLOCK = 1024
SINGLE = np.dtype(np.float32)
"""What the way of computing a convolution is chosen for."""
Wants = Literal["forward", "adjoint", "normal", "gradient", "misfit"]


@dataclass(frozen=True)
class Piece:
    """One block of ``A x``, ``A^T y``, ``A^T A x`` or ``sum_i w_i A_i^T (A_i x - y_i)``, or its share of the misfit.

    Parameters
    ----------
    operators : Packed
        A tuple of them.
    wants : str
        Which of these.
    image : tuple of int
        Shape of the image.
    region : Region
        The block, in pixels of the image; of measurements the part that it answers for.
    weights : tuple of float
        ``w_i``: of gradient and misfit.
    """

    operators: Packed
    wants: Wants
    image: Shape
    region: Region
    weights: tuple[float, ...] = ()

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        return self.of([InMemory(tensor.numpy()) for tensor in tensors])

    def of(self, given: Sequence[Readable]) -> Tensors:
        """The same of arrays of which only what is read has to be there."""
        operators: tuple[Operator, ...] = self.operators.get()
        if self.wants == "normal":
            terms = tuple(Term(operator, given[0]) for operator in operators)
            return (own(NormalImage(given[0], terms).read(self.region)),)
        if self.wants == "adjoint":
            parts = (o.adjoint(source, self.image) for o, source in zip(operators, given, strict=True))
            return (own(Total(tuple(parts), (1.0,) * len(operators)).read(self.region)),)
        shares = tuple(share_of(self.region, self.image, o.measured(self.image)) for o in operators)
        if self.wants == "gradient":
            weighted = zip(operators, given[1:], self.weights, strict=True)
            return (own(Gradient(given[0], tuple(Term(*each) for each in weighted)).read(self.region)),)
        seen = [o.forward(given[0]).read(share) for o, share in zip(operators, shares, strict=True)]
        if self.wants == "misfit":
            return (
                self._misfit(
                    seen, [source.read(share) for source, share in zip(given[1:], shares, strict=True)]
                ),
            )
        return tuple(own(pixels) for pixels in seen)

    def _misfit(self, seen: Sequence[Any], measured: Sequence[Any]) -> torch.Tensor:
        """``sum_i w_i |A_i x - y_i|² / 2`` of each image of a batch, over what the block answers for."""
        squares = (
            weight * np.square(np.subtract(a, b, dtype=np.float64)).reshape(len(a), -1).sum(1) / 2
            for a, b, weight in zip(seen, measured, self.weights, strict=True)
        )
        return own(np.sum(list(squares), axis=0))


class LocalStack:
    """Operators that look a few pixels far, on images that are never whole anywhere.

    Parameters
    ----------
    engine : Engine
        Who computes the blocks.
    operators : tuple of Operator
        The stack.
    exact : bool
        Whether every convolution is a direct sum, and ``A^T A`` is taken as it is written.
    told : tuple of tuple of int
        For each operator the shape (C, H, W) of the images that it is told to have, or None.
    """

    def __init__(
        self,
        engine: Engine,
        operators: tuple[Operator, ...],
        exact: bool = False,
        told: tuple[Shape | None, ...] = (),
    ) -> None:
        self.engine = engine
        self.operators = tuple(with_engine(operator, SINGLE, exact) for operator in operators)
        self.packed = pack(engine, self.operators)
        self._folded = None if exact else _folded(engine, operators)
        self._told = told

    def takes(self, image: Shape) -> bool:
        """Whether every operator takes an image of this shape."""
        return is_measured(self.operators, image)

    def forward(self, x: torch.Tensor) -> Many:
        """``(A_1 x, ..., A_n x)``."""
        image = tuple(x.shape)
        return Linear(lambda t: self._run("forward", t, image), lambda t: self._run("adjoint", t, image))([x])

    def adjoint(self, y: Sequence[torch.Tensor], image: Shape) -> torch.Tensor:
        """``sum_i A_i^T y_i``."""
        linear = Linear(lambda t: self._run("adjoint", t, image), lambda t: self._run("forward", t, image))
        return linear(y)[0]

    def normal(self, x: torch.Tensor) -> torch.Tensor:
        """``sum_i A_i^T A_i x``."""
        image = tuple(x.shape)
        if self._folded is not None:
            return self._folded.adjoint([x], image)

        def apply(tensors: Many) -> Many:
            return self._run("normal", tensors, image)

        return Linear(apply, apply)([x])[0]

    def gradient(
        self, x: torch.Tensor, y: Sequence[torch.Tensor], weights: tuple[float, ...]
    ) -> torch.Tensor:
        """``sum_i w_i A_i^T (A_i x - y_i)``, a linear map of all of them."""
        image = tuple(x.shape)

        def apply(tensors: Many) -> Many:
            return self._run("gradient", tensors, image, weights)

        def transpose(cotangents: Many) -> Many:
            (slope,) = cotangents
            nothing = [torch.zeros_like(part) for part in y]
            seen = self._run("forward", [slope], image)
            return [*apply([slope, *nothing]), *(-w * part for w, part in zip(weights, seen, strict=True))]

        return Linear(apply, transpose)([x, *y])[0]

    def misfit(self, x: torch.Tensor, y: Sequence[torch.Tensor], weights: tuple[float, ...]) -> torch.Tensor:
        """``sum_i w_i |A_i x - y_i|² / 2`` of each image of a batch; no gradients are kept."""
        image = tuple(x.shape)
        places = tuple(range(1 + len(y)))
        calls = tuple(
            Call(Piece(self.packed, "misfit", image, region, weights), places, (0,), number)
            for number, region in enumerate(blocks_of(image))
        )
        (total,) = Batch(self.engine, "forward", calls, 1, "block").values([x, *y])
        assert total is not None
        return total.to(x.dtype)

    def image_of(self, y: Sequence[torch.Tensor]) -> Shape | None:
        """Shape of the image that has such measurements; None where none is found."""
        return image_measured_as(self.operators, [tuple(part.shape) for part in y], self._told)

    def later(self, wants: Wants, arrays: Sequence[Any], image: Shape) -> list[Any]:
        """The same of arrays that are not computed yet: each block when its windows are."""
        if wants == "normal" and self._folded is not None:
            return self._folded.later("adjoint", arrays, image)
        shapes = [o.measured(image) for o in self.operators] if wants == "forward" else [image]
        given = [tuple(array.shape) for array in arrays]
        lates, places = [], []
        for region in blocks_of(image):
            piece = Piece(self.packed, wants, image, region)
            near = tuple(
                windows(share_of(region, image, shape), self._margin(given), shape) for shape in given
            )
            lates.append(Late(piece, tuple(given), near))
            places.append([share_of(region, image, shape) for shape in shapes])
        return self.engine.blocks_later("forward" if wants == "forward" else "adjoint", lates, places, arrays)

    def _margin(self, shapes: Sequence[Shape]) -> int:
        """How far from a block it may read: there and back, a fold at the rim, and to the edge of a cell of transforms."""
        is_aligned = all(o.measured(shape) == shape for o in self.operators for shape in shapes)
        return 3 * max(operator.reach for operator in self.operators) + (64 if is_aligned else 512)

    def _run(self, wants: Wants, tensors: Many, image: Shape, weights: tuple[float, ...] = ()) -> Many:
        regions = list(blocks_of(image))
        shapes = [o.measured(image) for o in self.operators] if wants == "forward" else [image]
        count = len(shapes)
        calls = tuple(
            Call(
                Piece(self.packed, wants, image, region, weights),
                tuple(range(len(tensors))),
                tuple(range(number * count, (number + 1) * count)),
                number,
            )
            for number, region in enumerate(regions)
        )
        phase = "forward" if wants == "forward" else "adjoint"
        pieces = Batch(self.engine, phase, calls, len(calls) * count, "block").values(tensors)
        whole = [empty(self.engine, shape, tensors[0]) for shape in shapes]
        for number, region in enumerate(regions):
            for k, shape in enumerate(shapes):
                place = share_of(region, image, shape) if wants == "forward" else region
                whole[k][place.slices] = pieces[number * count + k]
        return whole


def blocks_of(image: Shape) -> list[Region]:
    """The blocks of an image, with all of its other axes; smaller ones where there would be fewer than four.

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


def is_large(x: Any) -> bool:
    """Whether an image is worth cutting, and of a type that blocks are computed in."""
    return is_real(x) and math.prod(x.shape[-2:]) > LARGE


def is_large_later(engine: Engine, x: Any) -> bool:
    """The same of an array that is not computed yet."""
    return (
        engine.is_lazy(x)
        and x.ndim == 4
        and x.dtype in (np.float32, np.float64)
        and math.prod(x.shape[-2:]) > LARGE
    )


def _folded(engine: Engine, operators: tuple[Operator, ...]) -> LocalStack | None:
    """``A^T A`` as a stack of one operator, its own adjoint, where a single kernel does the work of all."""
    blurs = tuple(operator for operator in operators if can_fold(operator))
    if len(blurs) != len(operators):
        return None
    normal = Normal(operators=blurs, weights=(1.0,) * len(blurs)).with_engine(SINGLE, exact=False)
    return LocalStack(engine, (normal,), exact=True)


def local_stack(
    engine: Engine, things: Sequence[Any], exact: bool = False, reach: int | Literal["auto"] | None = None
) -> LocalStack | None:
    """The stack as local operators; None where one of them sees more than a neighbourhood."""
    found: list[Operator] = []
    told: list[Shape | None] = []
    for thing in things:
        try:
            operator = DeepInv(physics=thing, reach_=reach)
            if operator.kind != "local":
                return None
        except (ConfigError, ValueError, RuntimeError):
            return None
        found.append(operator.replacement or operator)
        told.append(operator.fixed_shape)
    return LocalStack(engine, tuple(found), exact, tuple(told)) if found else None
