"""A denoiser, or any function of images, applied tile by tile on workers."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from halotile.errors import ConfigError
from halotile.tasks.distributed.tiling import processor_call
from halotile.tasks.distributed.tiling.tiles import Tiles, make_tiles
from halotile.tasks.distributed.transport import objects
from halotile.tasks.distributed.transport.calls import Call, Engine, call_on_arrays, compute, evaluate
from halotile.tasks.distributed.transport.tensors import DrawSequence
from halotile.tasks.distributed.transport.type_conversion import convert_types, empty_tensor


def training_warnings(processor: Any, with_gradients: bool) -> dict[str, str]:
    """List the differences between a call of this processor on tiles and on the whole image, by topic.

    ``processor``: network or a function; ``with_gradients``: true if gradients are wanted.

    >>> net = torch.nn.Linear(1, 1)
    >>> list(training_warnings(net, True))
    []
    >>> [list(training_warnings(lambda x: net(x), with_gradients)) for with_gradients in (True, False)]
    [['weights'], []]
    """
    messages = {}
    contents = objects.contents_of(processor)
    name = f"the denoiser ({processor_name(processor)})"
    if with_gradients and (weight := _unknown_weight(processor, contents)):
        messages["weights"] = (
            f"{name} holds weights that want gradients ({weight}), and distribute knows the weights of a network only: these get "
            "none. Write distribute(network, ...) with the network itself, or requires_grad_(False)."
        )
    if generator := _foreign_generator(contents):
        messages["random numbers"] = (
            f"{name} holds a random number generator ({generator}) that is none of torch: its numbers depend on which worker "
            "computes which tile. Write torch.randn and the like, which are the same for any number of workers."
        )
    layers = [layer for held in contents for layer, _ in objects.running_statistics(held)]
    if layers:
        messages["statistics"] = (
            f"{name} is in training mode, and has layers with running statistics ({layers[0]}): each batch of tiles is normalised "
            "by its own statistics, and those that eval() uses are not updated. Write eval(), for the network or for these "
            "layers, or use layers without them, such as GroupNorm."
        )
    return messages


def _unknown_weight(processor: Any, contents: list[Any]) -> str | None:
    """Name of a weight that wants a gradient and is not a parameter of the network itself."""
    known = {id(p) for p in processor.parameters()} if isinstance(processor, torch.nn.Module) else set()
    tensors = [held for held in contents if isinstance(held, torch.Tensor) and held.requires_grad]
    unknown = [id(tensor) for tensor in tensors if id(tensor) not in known]
    if not unknown:
        return None
    networks = [held for held in contents if isinstance(held, torch.nn.Module)]
    names = {id(p): f"{type(net).__name__}.{name}" for net in networks for name, p in net.named_parameters()}
    return next((names[key] for key in unknown if key in names), "a tensor")


def _foreign_generator(contents: list[Any]) -> str | None:
    """Type of a NumPy or Python generator among the contents."""
    for held in contents:
        for entry in objects.direct_contents(held) or ():
            if isinstance(entry, np.random.Generator | np.random.RandomState | random.Random):
                return f"{type(entry).__module__.split('.')[0]}'s {type(entry).__name__}"
    return None


def processor_name(processor: Any) -> str:
    """Name of a processor in messages."""
    return str(getattr(processor, "__name__", type(processor).__name__))


STRATEGY_METHODS = (
    "get_num_patches", "get_local_patches", "reduce_patches", "apply_batching", "unpack_batched_results",
)  # fmt: skip
"""Methods of a user's strategy: those of ``deepinv.distributed.strategies.DistributedSignalStrategy``."""


@dataclass
class CustomTiles:
    """The tiles of images of one shape."""

    strategy: Any  # object with the methods of deepinv's strategies
    shape: tuple[int, ...]  # shape of the image
    max_batch_size: int | None  # batch size for the strategy

    def __post_init__(self) -> None:
        self.numbers = list(range(self.strategy.get_num_patches()))
        if not self.numbers:
            raise ConfigError(f"{self._name} makes no patches of an image of shape {self.shape}.")

    @property
    def axes(self) -> tuple[int, ...]:
        """Axes that the strategy may cut; it does not report which of them it does cut."""
        return tuple(range(2, len(self.shape)))

    def cut(self, image: torch.Tensor) -> list[torch.Tensor]:
        """Cut an image into batches of tiles."""
        patches = [patch for _, patch in self.strategy.get_local_patches(image, self.numbers)]
        return list(self.strategy.apply_batching(patches, max_batch_size=self.max_batch_size))

    def cut_argument(
        self, argument: processor_call.Argument, tensor: torch.Tensor, batches: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the part of an argument that goes with each batch of an image."""
        if argument.role == "image":
            return self.cut(tensor.expand(self.shape[0], *tensor.shape[1:]))
        return [argument.repeat(tensor, len(batch) // self.shape[0]) for batch in batches]

    def join(
        self, image: torch.Tensor, batches: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Assemble the image from processed batches."""
        for batch, result in zip(batches, results, strict=True):
            if result.shape != batch.shape:
                raise ConfigError(
                    f"the processor returned {tuple(result.shape)} for tiles of shape {tuple(batch.shape)}, and {self._name} joins "
                    "tiles of the size it cut. Write tiling_strategy='overlap_tiling', which allows other sizes and channels."
                )
        tiles = self.strategy.unpack_batched_results(results, len(self.numbers))
        whole = torch.zeros_like(image)
        self.strategy.reduce_patches(whole, list(zip(self.numbers, tiles, strict=True)))
        return whole

    @property
    def _name(self) -> str:
        return type(self.strategy).__name__


STRATEGIES = ("overlap_tiling", "basic")
BATCH_PIXELS = 2**18  # approximate size of a batch without max_batch_size: small tiles share a task
PHASE = "denoise"


@dataclass(frozen=True)
class TilingOptions:
    """Tiling of images, in deepinv's terms."""

    # `overlap_tiling`; `basic`, without overlap; or an object with the methods of deepinv's strategies
    strategy: Any = "overlap_tiling"
    # patch_size, overlap: size of the tiles without their halo, and width of the halo
    patch_size: int | Sequence[int] = 256
    overlap: int | Sequence[int] = 64
    tiling_dims: int | Sequence[int] | None = None  # axes that are cut; all but the first two when left out
    # tiles that are processed at once. Left out, small tiles are put together
    max_batch_size: int | None = None
    blending: str | None = None  # `linear` or `hann` blends neighbours where they overlap
    unsafe: bool = False  # tile a processor that depends on the whole image as well
    # images of a batch that are processed at once; all of them when left out
    images_per_task: int | None = None

    def __post_init__(self) -> None:
        for name in ("images_per_task", "max_batch_size"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise ConfigError(f"{name} is {size}: a task needs one at least. Write 1 or more, or leave it out.")
        if isinstance(self.strategy, str):
            if self.strategy not in STRATEGIES:
                raise ConfigError(
                    f"tiling_strategy is {self.strategy!r}. Write one of {', '.join(STRATEGIES)}, or an object of your own."
                )
        elif missing := [name for name in STRATEGY_METHODS if not hasattr(self.strategy, name)]:
            raise ConfigError(f"tiling_strategy is a {type(self.strategy).__name__} without {missing[0]}().")

    def tiles(self, shape: Sequence[int]) -> Tiles:
        """Cut an image of this shape."""
        overlap = 0 if self.strategy == "basic" else self.overlap
        return make_tiles(shape, self.patch_size, overlap, self.tiling_dims, self.blending)

    def batches(self, tiles: Tiles) -> list[tuple[processor_call.Images, tuple[int, ...]]]:
        """Group images, and their tiles, into batches, which depend on the images and the options alone."""
        count = tiles.shape[0]
        step = count if self.images_per_task is None or 0 in tiles.axes else self.images_per_task
        pixels = -(-tiles.window_pixels * min(step, count) // count)
        size = self.max_batch_size or max(1, BATCH_PIXELS // pixels)
        numbers = range(len(tiles))
        return [
            ((first, min(first + step, count)), tuple(numbers[start : start + size]))
            for first in range(0, count, step)
            for start in range(0, len(tiles), size)
        ]


class DistributedProcessing(torch.nn.Module):  # type: ignore[misc]
    """``D(x)``, tile by tile on workers.

    Weights that require gradients get them: the backward pass computes the tiles once more.

    ``ctx``: the context; ``processor``: ``processor(batch, *args, **kwargs)``, a network or a function. A network is sent again when it has
    changed; ``options``: tiling of the images.
    """

    result_name = "denoised"  # prefix of the files of results

    def __init__(self, ctx: Engine, processor: Any, options: TilingOptions | None = None) -> None:
        torch.nn.Module.__init__(self)  # not super(): deepinv's class may come between
        self.ctx = ctx
        self.processor = processor
        self.options = options or TilingOptions()
        self.max_batch_size = self.options.max_batch_size
        self._packer = objects.make_packer(processor, ctx.folder, ctx.device)
        self._draws = DrawSequence(ctx.seed, next(ctx.streams))
        self._warned: set[str] = set()
        self._checked_modes: set[tuple[bool, bool]] = set()
        self._strides: dict[tuple[int, ...], float] = {}
        """Results of :class:`StrideTrial`, by the number of axes and those that are cut."""

    @convert_types
    def forward(self, x: torch.Tensor, *args: Any, gather: bool = True, **kwargs: Any) -> torch.Tensor:
        """Return the processed image, ``scale`` times as large if the processor upscales.

        Parameters
        ----------
        x : Tensor, shape (B, C, ...)
            The images.
        *args, **kwargs
            Arguments of the processor. A tensor as large as the image is cut like it, such as a noise level
            for each pixel; one whose first axis is the batch axis goes with its images, whatever its other
            axes are.
        gather : bool
            Accepted for compatibility with deepinv.
        """
        if isinstance(self.options.strategy, str):
            return self._forward_tiled(x, args, kwargs)
        return self._forward_custom(x, args, kwargs)

    def _forward_tiled(self, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        tiles = self.options.tiles(x.shape)
        arguments, tensors = processor_call.find_tensors(args, kwargs, tiles.shape, tiles.axes)
        call, weights = self._make_call(args, kwargs, arguments)
        cut = [axis for axis, parts in zip(tiles.axes, tiles.axis_tiles, strict=True) if len(parts) > 1]
        tiles = replace(tiles, stride=self._stride(x, call, tensors, cut))
        call = replace(call, tiles=tiles)
        batches = self.options.batches(tiles)
        norms = self._batch_norms(bool(cut), self.ctx.is_lazy(x))
        if self.ctx.is_lazy(x) and tensors:
            raise ConfigError(
                "a tensor was given with an image that is not computed yet: its parts for the tiles are not known. Write a number, "
                "or compute() the image first."
            )
        if self.ctx.is_lazy(x):
            return self._forward_lazy(x, call, tiles)
        # The number of a batch: that of its first tile, counted on from image to image.
        firsts = [images[0] * len(tiles) + numbers[0] for images, numbers in batches]
        called = [
            processor_call.ImageCall(call.for_batch(first), tiles, numbers, images)
            for first, (images, numbers) in zip(firsts, batches, strict=True)
        ]
        if norms or (torch.is_grad_enabled() and any(t.requires_grad for t in (x, *tensors, *weights))):
            # The windows are cut here, so that autograd knows their places in the image.
            columns = list(zip(*(each.inputs(x, *tensors) for each in called), strict=True))
            results = self._evaluate_with(norms, call, weights, columns, firsts)
        else:
            inputs = tuple(range(1 + len(tensors)))
            calls = [
                Call(each, inputs, (slot,), first)
                for slot, (each, first) in enumerate(zip(called, firsts, strict=True))
            ]
            results = evaluate(self.ctx, PHASE, calls, [x, *tensors], len(calls), "tile")
        parts: list[list[torch.Tensor]] = [[] for _ in range(len(tiles))]
        for result, (_, numbers) in zip(results, batches, strict=True):
            for number, part in zip(numbers, torch.chunk(result, len(numbers)), strict=True):
                parts[number].append(part)
        joined = [part[0] if len(part) == 1 else torch.cat(part) for part in parts]
        return tiles.join(joined, lambda shape, like: empty_tensor(self.ctx, shape, like))

    def _forward_lazy(self, x: Any, call: processor_call.ProcessorCall, tiles: Tiles) -> Any:
        """Process an image that is not computed yet: each task reads the window of its tile alone."""
        windows = [tiles.window(x, number) for number in range(len(tiles))]
        calls = [Call(call.for_batch(n), (n,), (n,), n) for n in range(len(tiles))]
        like = call_on_arrays(call, np.zeros(windows[0].shape, x.dtype)) * len(tiles)
        return tiles.join_lazily(self.ctx.run_lazily(PHASE, calls, windows, like, "tile"))

    def _batch_norms(self, is_cut: bool, is_lazy: bool) -> list[torch.nn.Module]:
        """Return the layers that normalise by the statistics of all images."""
        found = [pair for held in objects.contents_of(self.processor) for pair in objects.running_statistics(held)]
        trained = {id(layer): name for name, layer in reversed(found)}
        norms = processor_call.batch_norms(self.processor)
        if self.options.unsafe or not (trained or norms):
            return []
        if is_cut or is_lazy or not trained.keys() <= {id(layer) for layer in norms}:
            raise ConfigError(
                f"the denoiser ({processor_name(self.processor)}) is in training mode, and has layers with running statistics "
                f"({next(iter(trained.values()), 'batch norm')}), which normalise by all pixels of a batch: a tile has only its own. Write eval(), for the network "
                "or for these layers; layers without them, such as GroupNorm; images that fit into patch_size, of a network of "
                "BatchNorm layers; or unsafe=True to normalise each batch of tiles by itself."
            )
        return norms

    def _evaluate_with(
        self,
        norms: Sequence[torch.nn.Module],
        call: processor_call.ProcessorCall,
        weights: Sequence[torch.Tensor],
        columns: Sequence[Sequence[torch.Tensor]],
        numbers: Sequence[int],
    ) -> list[torch.Tensor]:
        """Evaluate the call on every batch, with the statistics of all of them: each layer is measured after those before it."""
        if not norms:
            return self._evaluate(call, weights, columns, numbers)
        statistics: list[torch.Tensor] = []
        found: list[tuple[Any, torch.Tensor, torch.Tensor, float]] = []
        measuring = replace(call, normalises="measured")
        while len(found) < len(norms):
            measured = self._evaluate(measuring, [*weights, *statistics], columns, numbers)
            if (pooled := processor_call.pool(measured)) is None:
                break  # the others are not used
            number, mean, variance, pixels = pooled
            statistics += [mean, variance]
            found.append((norms[number], mean, variance, pixels))
        results = self._evaluate(replace(call, normalises="fixed"), [*weights, *statistics], columns, numbers)
        for each in found:
            processor_call.update_running(*each)
        return results

    def _forward_custom(self, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Apply the processor by a user's strategy, whose windows are cut here."""
        tiles = CustomTiles(self.options.strategy, tuple(x.shape), self.options.max_batch_size)
        batches = tiles.cut(x)
        arguments, tensors = processor_call.find_tensors(args, kwargs, x.shape, tiles.axes)
        call, weights = self._make_call(args, kwargs, arguments)
        self._stride(x, call, tensors, tiles.axes if len(tiles.numbers) > 1 else ())
        self._batch_norms(is_cut=True, is_lazy=False)
        columns = [batches, *(tiles.cut_argument(a, t, batches) for a, t in zip(arguments, tensors, strict=True))]
        results = self._evaluate(call, weights, columns, range(len(batches)), "batch of tiles")
        return tiles.join(x, batches, results)

    def _evaluate(
        self,
        call: processor_call.ProcessorCall,
        weights: Sequence[torch.Tensor],
        columns: Sequence[Sequence[torch.Tensor]],
        numbers: Sequence[int],
        what: str = "tile",
    ) -> list[torch.Tensor]:
        """Evaluate the call on every batch; each column holds one input, batch by batch."""
        inputs: list[torch.Tensor] = list(weights)
        calls = []
        for slot, (number, *row) in enumerate(zip(numbers, *columns, strict=True)):
            used = (*range(len(inputs), len(inputs) + len(row)), *range(len(weights)))
            calls.append(Call(call.for_batch(number), used, (slot,), number))
            inputs += row
        return evaluate(self.ctx, PHASE, calls, inputs, len(calls), what)

    def _stride(
        self, x: Any, call: processor_call.ProcessorCall, tensors: Sequence[torch.Tensor], axes: Sequence[int]
    ) -> int:
        """Return the multiple on which tiles along these axes have to begin, tried once on a worker."""
        # A layer that normalises a batch in training mode is local after eval(): there is a warning for that.
        trains = any(objects.running_statistics(held) for held in objects.contents_of(self.processor))
        if self.options.unsafe or trains or not processor_call.has_trial(x, axes):
            return 1
        name = f"the denoiser ({processor_name(self.processor)})"
        key = (len(x.shape), *axes)
        if key not in self._strides:
            self._strides[key] = self._try_stride(x, call, tensors, axes)
            if not math.isfinite(self._strides[key]):
                failure = "fails on" if math.isnan(self._strides[key]) else "runs out of memory on"
                warnings.warn(
                    f"{name} {failure} small windows of random pixels: it is not known if its tiles give the result of the whole "
                    "image. This warning is given once.",
                    stacklevel=3,
                )
        stride = self._strides[key]
        if stride <= 0:
            raise processor_call.tiling_error(name, stride)
        return int(stride) if math.isfinite(stride) else 1

    def _try_stride(
        self, x: Any, call: processor_call.ProcessorCall, tensors: Sequence[torch.Tensor], axes: Sequence[int]
    ) -> float:
        """Run :class:`StrideTrial` for these axes."""
        like = x.new_zeros(1) if isinstance(x, torch.Tensor) else torch.from_numpy(np.zeros(1, x.dtype))
        small = [processor_call.shrink_argument(a, t.detach()) for a, t in zip(call.arguments, tensors, strict=True)]
        trial = processor_call.StrideTrial(
            replace(call, weights=(), tiles=None, draw=None),
            channels=x.shape[1],
            dims=len(x.shape) - 2,
            axes=tuple(axis - 2 for axis in axes),
            # Beyond its share the worker would be ended from outside, and nothing learned.
            limit_bytes=self.ctx.task_bytes and self.ctx.task_bytes * 9 // 10,
        )
        trial_call = Call(trial, tuple(range(1 + len(small))), (0,), 0)
        (stride,) = compute(self.ctx, PHASE, [trial_call], [like, *small], 1, "tile")
        assert stride is not None
        return float(stride)

    def _warn(self) -> None:
        """Warn once about effects of tiling; a network is searched once for each of its modes."""
        mode = (torch.is_grad_enabled(), getattr(self.processor, "training", False))
        if mode in self._checked_modes:
            return
        self._checked_modes.add(mode)
        for topic, message in training_warnings(self.processor, with_gradients=mode[0]).items():
            is_reported = topic != "statistics" or self.options.unsafe  # otherwise tiles are refused
            if is_reported and topic not in self._warned:
                self._warned.add(topic)
                warnings.warn(f"{message} This warning is given once.", stacklevel=2)

    def _make_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: tuple[processor_call.Argument, ...]
    ) -> tuple[processor_call.ProcessorCall, list[torch.Tensor]]:
        """Return the call for the workers, and the weights that require gradients."""
        named = dict(self.processor.named_parameters()) if isinstance(self.processor, torch.nn.Module) else {}
        weights = {n: p for n, p in named.items() if p.requires_grad and torch.is_grad_enabled()}
        positional = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        keywords = {key: value for key, value in kwargs.items() if not isinstance(value, torch.Tensor)}
        constants, live = objects.pack_arguments(
            (positional, keywords) if positional or keywords else None,
            self.ctx.folder,
            self.ctx.device,
            keeps_live=torch.is_grad_enabled(),
        )
        if live:
            raise ConfigError(
                f"a tensor of shape {tuple(live[0].shape)} wants a gradient inside another argument of a denoiser, where it would get "
                "none. Give the tensor itself as an argument, or write detach()."
            )
        self._warn()
        packed, draw = self._packer.pack(), self._draws.next()
        return processor_call.ProcessorCall(packed, constants, arguments, tuple(weights), None, draw), list(
            weights.values()
        )
