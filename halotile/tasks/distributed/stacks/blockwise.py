"""Stacks of local operators, block by block: a task reads a block once and applies all operators to it; and linear maps whose transpose autograd uses."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch

from halotile.errors import ConfigError, InputError
from halotile.storage.grid import Region
from halotile.storage.rim import Array, Readable
from halotile.tasks.distributed.tiling.tiles import concatenate_grid
from halotile.tasks.distributed.transport.calls import Call, Engine, Tensors, compute
from halotile.tasks.distributed.transport.objects import Packed, make_packer, wants_gradients
from halotile.tasks.distributed.transport.tensors import to_tensor
from halotile.tasks.distributed.transport.type_conversion import empty_tensor
from halotile.tasks.inner_tiles import spanned
from halotile.tasks.operators.base import InMemory, Operator, Shape, read_all, with_engine
from halotile.tasks.operators.deepinv import DeepInv
from halotile.tasks.operators.normal import Normal, can_fold
from halotile.tasks.operators.sum import Total
from halotile.tasks.terms import Gradient, NormalImage, Term, share_of

# Classes of `deepinv.physics` whose adjoint is several times as slow as one by a flipped kernel.
SLOW = ("Blur", "Downsampling")


def rewrite(physics: Any, exact: bool = False) -> Any:
    """Return the same physics with the forward and adjoint of halotile's operator, if there is one.

    Calls that halotile's operator does not support, such as one with another filter or an image of another
    size, go to the physics. ``exact`` keeps to direct sums. A physics with tensors that want gradients stays.

    >>> from deepinv.physics import Blur
    >>> blur = rewrite(Blur(filter=torch.ones(1, 1, 3, 3) / 9, padding="circular"))
    >>> type(blur).__name__, float(blur.A_adjoint_A(torch.ones(1, 1, 8, 8)).mean())
    ('Blur', 1.0)
    """
    if type(physics).__name__ not in SLOW or wants_gradients(physics):
        return physics
    wrapped = DeepInv(physics=physics)
    try:
        operator = wrapped.replacement
    except (ConfigError, ValueError, RuntimeError):
        return physics
    if operator is None:
        return physics
    operator = with_engine(operator, np.dtype(np.float32), exact=exact)
    same = copy.copy(physics)
    same.A = OperatorMethod(physics, operator, "A")
    same.A_adjoint = OperatorMethod(physics, operator, "A_adjoint", wrapped.fixed_shape)
    return same


@dataclass(frozen=True)
class RewritingFactory:
    """A factory of rewritten physics."""

    factory: Callable[..., Any]
    exact: bool

    def __call__(self, index: int, device: Any, shared: Mapping[str, Any] | None) -> Any:
        return rewrite(self.factory(index, device, shared), self.exact)


@dataclass(frozen=True)
class OperatorMethod:
    """``A`` or ``A^T`` of a physics, on tensors on the cpu in single or double precision."""

    physics: Any  # physics for calls that the operator does not support
    operator: Operator
    name: str  # `A` or `A_adjoint`
    declared: Shape | None = None  # declared shape (C, H, W) of the images of the physics

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not args and not kwargs and is_supported(x):
            shape = tuple(x.shape)
            if self.name == "A":
                if measured_shapes([self.operator], shape):
                    return self._linear(shape)([x])[0]
            elif image := find_image_shape([self.operator], [shape], [self.declared]):
                return self._linear(image).transposed([x])[0]
        result: torch.Tensor = getattr(self.physics, self.name)(x, *args, **kwargs)
        return result

    def _linear(self, image: Shape) -> LinearMap:
        """The operator on images of this shape."""

        def forward(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [to_tensor(read_all(self.operator.forward(InMemory(tensors[0].numpy()))))]

        def adjoint(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [to_tensor(read_all(self.operator.adjoint(InMemory(tensors[0].numpy()), image)))]

        return LinearMap(forward, adjoint)


TensorMap = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class LinearMap:
    """A linear map of several tensors to several, with its transpose; differentiable any number of times.

    >>> double = LinearMap(lambda t: [2 * t[0]], lambda t: [2 * t[0]])
    >>> x = torch.ones(1, requires_grad=True)
    >>> double([x])[0].backward()
    >>> x.grad.item()
    2.0
    """

    apply: TensorMap
    transpose: TensorMap

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Apply the map."""
        return list(_LinearFunction.apply(self, *tensors))

    @property
    def transposed(self) -> LinearMap:
        """The transpose, whose transpose is this map."""
        return LinearMap(self.transpose, self.apply)


class _LinearFunction(torch.autograd.Function):  # type: ignore[misc]
    """Autograd function of a linear map: backward is the transpose, whose backward is the map."""

    @staticmethod
    def forward(linear: LinearMap, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(linear.apply(list(tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.linear = inputs[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.linear.transposed(cotangents))


def is_supported(x: Any) -> bool:
    """Return True for a batch of images on the cpu whose dtype halotile's operators support."""
    return (
        isinstance(x, torch.Tensor)
        and x.dim() == 4
        and x.dtype in (torch.float32, torch.float64)
        and x.device.type == "cpu"
    )


def measured_shapes(operators: Sequence[Operator], image: Shape) -> list[Shape] | None:
    """Return the shapes of an image's measurements; None if one of the operators does not accept the image.

    >>> import numpy as np
    >>> from halotile.tasks.operators.blur import Blur
    >>> [measured_shapes([Blur(kernel=np.ones((3, 3)), factor=2)], (1, 1, n, n)) for n in (8, 9)]
    [[(1, 1, 4, 4)], None]
    """
    try:
        return [operator.measured(image) for operator in operators]
    except ConfigError:
        return None


def find_image_shape(
    operators: Sequence[Operator], shapes: Sequence[Shape], declared: Sequence[Shape | None]
) -> Shape | None:
    """Find the shape of the image with measurements of these shapes; None if there is none.

    If several images have measurements of one shape, it is the one that deepinv's adjoints return.

    ``shapes``: shape of each measurement; ``declared``: for each operator the declared shape (C, H, W) of its images, or None.

    >>> import numpy as np
    >>> from halotile.tasks.operators.blur import Blur
    >>> find_image_shape([Blur(kernel=np.ones((3, 3)), boundary="valid")], [(1, 1, 8, 8)], [None])
    (1, 1, 10, 10)
    """
    sizes = {(*shape[:-3], *size) for shape, size in zip(shapes, declared, strict=True) if size}
    if len(sizes) > 1:
        return None
    candidates = sizes or (
        candidate
        for operator, shape in zip(operators, shapes, strict=True)
        for candidate in _candidates(operator, shape)
    )
    return next((image for image in candidates if measured_shapes(operators, image) == list(shapes)), None)


def _candidates(operator: Operator, shape: Shape) -> Iterator[Shape]:
    factor = getattr(operator, "factor", 1)
    taps = getattr(operator, "kernel", None)
    yield (*shape[:-2], *(n * factor for n in shape[-2:]))
    if taps is not None and factor == 1:
        yield (*shape[:-2], *(n + k - 1 for n, k in zip(shape[-2:], taps.shape[-2:], strict=True)))


LARGE = 2**19  # size in pixels from which an image is cut into blocks: smaller ones cost less than a task
BLOCK = 1024
SINGLE = np.dtype(np.float32)  # dtype that the way of computing a convolution is chosen for
OutputName = Literal["forward", "adjoint", "normal", "gradient", "misfit"]
TRANSPOSE: dict[OutputName, OutputName] = {"forward": "adjoint", "adjoint": "forward", "normal": "normal"}


def wrapped_windows(region: Region, margin: int, shape: Sequence[int]) -> tuple[Region, ...]:
    """List the windows up to ``margin`` pixels around a region of a periodic image.

    Near a rim there are several.

    Only the last two axes have margins.

    >>> [(r.start, r.stop) for r in wrapped_windows(Region((0, 4), (4, 8)), 2, (12, 30))]
    [((0, 2), (6, 10)), ((10, 2), (12, 10))]
    """
    front = [[(0, n)] for n in shape[:-2]]
    near = [
        _runs(start - margin, stop + margin, length)
        for start, stop, length in zip(region.start[-2:], region.stop[-2:], shape[-2:], strict=True)
    ]
    return tuple(map(spanned, itertools.product(*front, *near)))


def _runs(start: int, stop: int, length: int) -> list[tuple[int, int]]:
    """Split a span of a periodic axis into runs."""
    if stop - start >= length:
        return [(0, length)]
    inside = (max(0, start), min(length, stop))
    if start < 0 and start + length > stop:
        return [inside, (start + length, length)]
    if stop > length and stop - length < start:
        return [(0, stop - length), inside]
    return [inside] if start >= 0 and stop <= length else [(0, length)]


@dataclass(frozen=True)
class PartialArray:
    """An array with only some windows present."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: tuple[tuple[Region, Array], ...]

    def read(self, region: Region) -> Array:
        """Read the pixels of ``region``."""
        for window, pixels in self.parts:
            if region.inside(window):
                part: Array = pixels[region.relative_to(window).slices]
                return part
        raise InputError(f"{region} was read, but only {[window for window, _ in self.parts]} are present.")


@dataclass(frozen=True)
class BlockFunction:
    """One block of ``A x``, ``A^T y``, ``A^T A x``, the gradient or the misfit.

    The gradient is ``sum_i w_i A_i^T (A_i x - y_i)``.
    """

    operators: tuple[Packed, ...]
    output: OutputName  # result to compute
    image: Shape
    region: Region  # block, in pixels of the image; for measurements, the block's share of them
    weights: tuple[float, ...] = ()  # `w_i`, for gradient and misfit
    # for each input its shape, and the windows of it that take its place among the tensors
    windows: tuple[tuple[Shape, tuple[Region, ...]], ...] | None = None

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        sources: list[Readable] = [InMemory(tensor.numpy()) for tensor in tensors]
        if self.windows is not None:
            pixels = iter(tensor.numpy() for tensor in tensors)
            dtype = sources[0].dtype
            sources = [
                PartialArray(shape, dtype, tuple(zip(near, itertools.islice(pixels, len(near)), strict=True)))
                for shape, near in self.windows
            ]
        operators: list[Operator] = [packed.load().value for packed in self.operators]
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

    ``engine``: the engine that computes the blocks; ``parts``: the operators; ``exact``: compute ``A^T A`` as it is written.
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

    def image_shape(self, output: OutputName, tensors: Sequence[Any]) -> Shape | None:
        """Shape of the image that the operators accept, or that has such measurements; None if there is none."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if output == "adjoint":
            return find_image_shape(self.operators, shapes, self._declared)
        return shapes[0] if measured_shapes(self.operators, shapes[0]) is not None else None

    def apply(self, output: OutputName, tensors: Sequence[Any], image: Shape) -> list[Any]:
        """Apply ``A``, ``A^T`` or ``A^T A`` to tensors, differentiable any number of times, or to lazy arrays."""
        if output == "normal" and self._folded is not None:
            return self._folded.apply("adjoint", tensors, image)
        if self.engine.is_lazy(tensors[0]):
            return self._apply_lazily(output, tensors, image)
        transpose = partial(self._run, TRANSPOSE[output], image)
        return LinearMap(partial(self._run, output, image), transpose)(tensors)

    def gradient(self, x: torch.Tensor, y: Sequence[torch.Tensor], weights: tuple[float, ...]) -> torch.Tensor:
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
        calls = [
            Call(BlockFunction(self.packed, "misfit", image, region, weights), places, (0,), number)
            for number, region in enumerate(cut_blocks(image))
        ]
        (total,) = compute(self.engine, "forward", calls, [x, *y], 1, "block")
        assert total is not None
        return total.to(x.dtype)

    def _apply_lazily(self, output: OutputName, arrays: Sequence[Any], image: Shape) -> list[Any]:
        """Return lazy results of lazy arrays: each block is computed once its windows are."""
        inputs = [tuple(array.shape) for array in arrays]
        shapes, regions = self._output_shapes(output, image), cut_blocks(image)
        margin, count = self._margin(inputs), len(shapes)
        cut: list[Any] = []
        calls, like = [], []
        for number, region in enumerate(regions):
            near = [wrapped_windows(share_of(region, image, shape), margin, shape) for shape in inputs]
            function = BlockFunction(self.packed, output, image, region, windows=tuple(zip(inputs, near, strict=True)))
            pixels = [array[w.slices] for array, windows in zip(arrays, near, strict=True) for w in windows]
            slots = range(number * count, (number + 1) * count)
            calls.append(Call(function, tuple(range(len(cut), len(cut) + len(pixels))), tuple(slots), number))
            cut += pixels
            empty = np.empty((), arrays[0].dtype)
            like += [np.broadcast_to(empty, share_of(region, image, shape).shape) for shape in shapes]
        parts = self.engine.run_lazily(_phase(output), calls, cut, like, "block")
        rows = len({region.start[-2] for region in regions})
        grid = rows, len(regions) // rows
        return [concatenate_grid(parts[slot::count], (-2, -1), grid) for slot in range(count)]

    def _margin(self, shapes: Sequence[Shape]) -> int:
        """Largest distance that a block reads.

        It covers forward and adjoint, a fold at the rim, and the rest of a transform's cell.
        """
        is_aligned = all(measured_shapes([o], shape) == [shape] for o in self.operators for shape in shapes)
        return 3 * max(operator.reach for operator in self.operators) + (64 if is_aligned else 512)

    def _output_shapes(self, output: OutputName, image: Shape) -> list[Shape]:
        return [o.measured(image) for o in self.operators] if output == "forward" else [image]

    def _run(
        self, output: OutputName, image: Shape, tensors: list[torch.Tensor], weights: tuple[float, ...] = ()
    ) -> list[torch.Tensor]:
        regions = cut_blocks(image)
        shapes = self._output_shapes(output, image)
        count = len(shapes)
        calls = [
            Call(
                BlockFunction(self.packed, output, image, region, weights),
                tuple(range(len(tensors))),
                tuple(range(number * count, (number + 1) * count)),
                number,
            )
            for number, region in enumerate(regions)
        ]
        blocks = iter(compute(self.engine, _phase(output), calls, tensors, len(calls) * count, "block"))
        results = [empty_tensor(self.engine, shape, tensors[0]) for shape in shapes]
        for region in regions:
            for result, shape in zip(results, shapes, strict=True):
                place = region if shape == image else share_of(region, image, shape)
                result[place.slices] = next(blocks)
        return results


def _phase(output: OutputName) -> str:
    return "forward" if output == "forward" else "adjoint"


def cut_blocks(image: Shape) -> list[Region]:
    """List the blocks of an image, whole along leading axes; smaller ones if there would be fewer than four.

    >>> [region.shape for region in cut_blocks((1, 2, 600, 512))]
    [(1, 2, 512, 512), (1, 2, 88, 512)]
    """
    front, (rows, columns) = image[:-2], image[-2:]
    side = BLOCK if rows * columns >= 4 * BLOCK**2 else BLOCK // 2
    corners = itertools.product(range(0, rows, side), range(0, columns, side))
    return [
        Region((*(0 for _ in front), y, x), (*front, min(y + side, rows), min(x + side, columns))) for y, x in corners
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


def pack_local(engine: Engine, operator: Operator, exact: bool, declared: Shape | None = None) -> LocalOperator:
    """Send an operator to the workers; ``exact``: with convolutions as direct sums."""
    chosen = with_engine(operator, SINGLE, exact)
    return LocalOperator(operator, chosen, make_packer(chosen, engine.folder, engine.device).pack(), declared)
