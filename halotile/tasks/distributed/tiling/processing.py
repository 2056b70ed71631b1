"""A denoiser, or any function of images, run on tiles by workers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from halotile.errors import ConfigError
from halotile.tasks.distributed.stacks.operators import pack_note, packer
from halotile.tasks.distributed.tiling.custom import CUSTOM, CustomTiles
from halotile.tasks.distributed.tiling.processed import CutOut, Processed
from halotile.tasks.distributed.tiling.tileable import Looking, is_triable, lent_to_windows, refusal
from halotile.tasks.distributed.tiling.tiles import Tiles, tiles_of
from halotile.tasks.distributed.tiling.training_notes import name_of, remarks
from halotile.tasks.distributed.transport.arguments import Argument, tensors_of
from halotile.tasks.distributed.transport.calls import Call
from halotile.tasks.distributed.transport.contents import contents_of, running_statistics
from halotile.tasks.distributed.transport.engine import Engine
from halotile.tasks.distributed.transport.evaluate import Batch, evaluate
from halotile.tasks.distributed.transport.random_state import Draws
from halotile.tasks.distributed.transport.typed import empty, typed

STRATEGIES = ("overlap_tiling", "basic")
BATCH_PIXELS = 2**18
"""Numbers in a batch, about, where its size is not given: small tiles share a task."""
PHASE = "denoise"


@dataclass(frozen=True)
class TilingOptions:
    """How images are cut, in deepinv's words.

    Parameters
    ----------
    strategy : str or object
        ``overlap_tiling``; ``basic``, without overlap; or an object with the methods of deepinv's strategies.
    patch_size, overlap : int or tuple of int
        Of the tiles without their halo, and of the halo.
    tiling_dims : int or tuple of int, optional
        Axes that are cut; all but the first two when left out.
    max_batch_size : int, optional
        Tiles that are processed at once. Left out, small tiles are put together.
    blending : str, optional
        ``linear`` or ``hann``: neighbours are mixed where they overlap.
    unsafe : bool
        Whether a processor that looks at all of an image is cut as well.
    """

    strategy: Any = "overlap_tiling"
    patch_size: int | Sequence[int] = 256
    overlap: int | Sequence[int] = 64
    tiling_dims: int | Sequence[int] | None = None
    max_batch_size: int | None = None
    blending: str | None = None
    unsafe: bool = False

    def __post_init__(self) -> None:
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise ConfigError(
                f"max_batch_size is {self.max_batch_size}: a task needs a tile. Write 1 or more, or leave it out."
            )
        if isinstance(self.strategy, str):
            if self.strategy not in STRATEGIES:
                raise ConfigError(
                    f"tiling_strategy is {self.strategy!r}. Write one of {', '.join(STRATEGIES)}, or an object of your own."
                )
        elif missing := [name for name in CUSTOM if not hasattr(self.strategy, name)]:
            raise ConfigError(f"tiling_strategy is a {type(self.strategy).__name__} without {missing[0]}().")

    def tiles(self, shape: Sequence[int]) -> Tiles:
        """The tiles of an image of this shape."""
        overlap = 0 if self.strategy == "basic" else self.overlap
        return tiles_of(shape, self.patch_size, overlap, self.tiling_dims, self.blending)

    def batches(self, tiles: Tiles) -> list[tuple[int, ...]]:
        """The tiles of each batch. It depends on the image and the options alone."""
        size = self.max_batch_size or max(1, BATCH_PIXELS // tiles.window_pixels)
        return [
            tuple(range(start, min(start + size, len(tiles)))) for start in range(0, len(tiles), max(1, size))
        ]


class DistributedProcessing(torch.nn.Module):  # type: ignore[misc]
    """``D(x)``, tile by tile on workers.

    Weights that want gradients get them: the backward pass computes the tiles once more.

    Parameters
    ----------
    ctx : Engine
        The context.
    processor : callable
        ``processor(batch, *args, **kwargs)``, a network or a function. A network is sent again when it has changed.
    options : TilingOptions
        How images are cut.
    """

    result_name = "denoised"
    """How files of results begin."""

    def __init__(self, ctx: Engine, processor: Any, options: TilingOptions | None = None) -> None:
        torch.nn.Module.__init__(self)  # and not that of deepinv's class, which may come between
        self.ctx = ctx
        self.processor = processor
        self.options = options or TilingOptions()
        self.max_batch_size = self.options.max_batch_size
        self._packer = packer(ctx, processor)
        self._draws = Draws(ctx.seed, ctx.stream())
        self._told: set[str] = set()
        self._asked: set[tuple[bool, bool]] = set()
        self._strides: dict[tuple[int, ...], float] = {}
        """What :class:`Looking` said, by the number of axes and those that are cut."""

    @typed
    def forward(self, x: torch.Tensor, *args: Any, gather: bool = True, **kwargs: Any) -> torch.Tensor:
        """The processed image, ``scale`` times as large if the processor upscales.

        Parameters
        ----------
        x : Tensor, shape (B, C, ...)
            The images.
        *args, **kwargs
            For the processor. A tensor as large as the image is cut as the image is, such as a noise level for each
            pixel; one whose first axis is that of the batch goes with its images, whatever its other axes are.
        gather : bool
            Accepted for deepinv's sake.
        """
        if isinstance(self.options.strategy, str):
            return self._tiled(x, args, kwargs)
        return self._custom(x, args, kwargs)

    def _tiled(self, x: torch.Tensor, args: tuple[Any, ...], words: dict[str, Any]) -> torch.Tensor:
        tiles = self.options.tiles(x.shape)
        arguments, tensors = tensors_of(args, words, tiles.shape, tiles.axes)
        processed, weights = self._processed(args, words, arguments, tiles)
        cut = [a for a, cuts in zip(tiles.axes, tiles.cuts, strict=True) if len(cuts) > 1]
        tiles = replace(tiles, stride=self._stride(x, processed, tensors, cut))
        processed = replace(processed, tiles=tiles)
        batches = self.options.batches(tiles)
        if self.ctx.is_lazy(x) and tensors:
            raise ConfigError(
                "a tensor came with an image that is not computed yet: how it goes with the tiles is not clear. Write a number, "
                "or compute() the image first."
            )
        if self.ctx.is_lazy(x):
            return self.ctx.tiles_later(PHASE, x, processed, tiles)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *tensors, *weights)):
            results = self._differentiable(x, processed, tensors, weights, tiles, batches)
        else:
            inputs = tuple(range(1 + len(tensors)))
            calls = tuple(
                Call(CutOut(processed.of(numbers[0]), tiles, numbers), inputs, (slot,), numbers[0])
                for slot, numbers in enumerate(batches)
            )
            results = evaluate(Batch(self.ctx, PHASE, calls, len(calls), "tile"), [x, *tensors])
        made = [
            part
            for result, numbers in zip(results, batches, strict=True)
            for part in torch.chunk(result, len(numbers))
        ]
        return tiles.joined(made, lambda shape, like: empty(self.ctx, shape, like))

    def _differentiable(
        self,
        x: torch.Tensor,
        processed: Processed,
        tensors: list[torch.Tensor],
        weights: list[torch.Tensor],
        tiles: Tiles,
        batches: list[tuple[int, ...]],
    ) -> list[torch.Tensor]:
        """The windows are cut here, so that autograd sees how they lie in the image."""
        inputs: list[torch.Tensor] = list(weights)
        calls = []
        for slot, numbers in enumerate(batches):
            first = len(inputs)
            inputs.append(torch.cat([tiles.window(x, number) for number in numbers]))
            inputs += [a.of(t, tiles, numbers) for a, t in zip(processed.arguments, tensors, strict=True)]
            used = (*range(first, len(inputs)), *range(len(weights)))
            calls.append(Call(processed.of(numbers[0]), used, (slot,), numbers[0]))
        return evaluate(Batch(self.ctx, PHASE, tuple(calls), len(calls), "tile"), inputs)

    def _custom(self, x: torch.Tensor, args: tuple[Any, ...], words: dict[str, Any]) -> torch.Tensor:
        """By a strategy of the caller's own, whose windows are cut here."""
        by = CustomTiles(self.options.strategy, tuple(x.shape), self.options.max_batch_size)
        batches = by.cut(x)
        arguments, tensors = tensors_of(args, words, x.shape, by.axes)
        processed, weights = self._processed(args, words, arguments, None)
        self._stride(x, processed, tensors, by.axes if len(by.numbers) > 1 else ())
        beside = [by.beside(a, t, batches) for a, t in zip(arguments, tensors, strict=True)]
        inputs: list[torch.Tensor] = list(weights)
        calls = []
        for slot, given in enumerate(zip(batches, *beside, strict=True)):
            used = (*range(len(inputs), len(inputs) + len(given)), *range(len(weights)))
            calls.append(Call(processed.of(slot), used, (slot,), slot))
            inputs += given
        results = evaluate(Batch(self.ctx, PHASE, tuple(calls), len(calls), "batch of tiles"), inputs)
        return by.joined(x, batches, results)

    def _stride(
        self, x: Any, processed: Processed, tensors: Sequence[torch.Tensor], axes: Sequence[int]
    ) -> int:
        """Multiple on which tiles have to begin that are cut along these axes; tried once for such axes, on a worker.

        Raises
        ------
        ConfigError
            When no tiles can do.
        """
        # In training mode a layer that normalises a batch is one that eval() makes local: that is told elsewhere.
        learns = any(True for each in contents_of(self.processor) for _ in running_statistics(each))
        if self.options.unsafe or learns or not is_triable(x, axes):
            return 1
        name = f"the denoiser ({name_of(self.processor)})"
        cut = (len(x.shape), *axes)
        if cut not in self._strides:
            found = self._looking(x, processed, tensors, axes)
            self._strides[cut] = found
            if not math.isfinite(found):
                why = "fails on" if math.isnan(found) else "runs out of memory on"
                warnings.warn(
                    f"{name} {why} small windows of random pixels: whether its tiles give what the whole image gives is not "
                    "known. This is said once.",
                    stacklevel=3,
                )
        found = self._strides[cut]
        if found <= 0:
            raise refusal(name, found)
        return int(found) if math.isfinite(found) else 1

    def _looking(
        self, x: Any, processed: Processed, tensors: Sequence[torch.Tensor], axes: Sequence[int]
    ) -> float:
        """What :class:`Looking` says of these axes."""
        arguments = processed.arguments
        like = x.new_zeros(1) if isinstance(x, torch.Tensor) else torch.from_numpy(np.zeros(1, x.dtype))
        lent = [lent_to_windows(a, t.detach()) for a, t in zip(arguments, tensors, strict=True)]
        looking = Looking(
            replace(processed, parameters=(), tiles=None, draw=None),
            channels=x.shape[1],
            dims=len(x.shape) - 2,
            axes=tuple(axis - 2 for axis in axes),
            # Beyond its share the worker would be ended from outside, and nothing learned.
            limit_bytes=self.ctx.task_bytes and self.ctx.task_bytes * 9 // 10,
        )
        call = Call(looking, tuple(range(1 + len(lent))), (0,), 0)
        (found,) = Batch(self.ctx, PHASE, (call,), 1, "tile").values([like, *lent])
        assert found is not None
        return float(found)

    def _tell(self) -> None:
        """Say once what these tiles do not do; a network is looked through once for each mode that it is in."""
        state = (torch.is_grad_enabled(), getattr(self.processor, "training", False))
        if state in self._asked:
            return
        self._asked.add(state)
        for about, remark in remarks(self.processor, with_gradients=state[0]).items():
            if about not in self._told:
                self._told.add(about)
                warnings.warn(f"{remark} This is said once.", stacklevel=2)

    def _processed(
        self,
        args: tuple[Any, ...],
        words: dict[str, Any],
        arguments: tuple[Argument, ...],
        tiles: Tiles | None,
    ) -> tuple[Processed, list[torch.Tensor]]:
        """What is called on the workers, and the weights that want gradients."""
        named = dict(self.processor.named_parameters()) if isinstance(self.processor, torch.nn.Module) else {}
        wanted = {n: p for n, p in named.items() if p.requires_grad and torch.is_grad_enabled()}
        rest = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        keywords = {key: value for key, value in words.items() if not isinstance(value, torch.Tensor)}
        packed = pack_note(self.ctx, (rest, keywords) if rest or keywords else None)
        self._tell()
        draw = self._draws.next()
        processed = Processed(self._packer.packed(), packed, arguments, tuple(wanted), tiles, draw)
        return processed, list(wanted.values())
