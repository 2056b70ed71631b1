"""A denoised image with the standard deviation of its error: each block is denoised again with more noise."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import numpy as np

from halotile.storage.grid import Block, Region
from halotile.storage.rim import Array, Pixels, Readable
from halotile.storage.sharded.output import ShardWriter
from halotile.storage.views import PlaneValues, Replaced, WithGaps
from halotile.tasks.block import Receipt
from halotile.tasks.denoise_block import CoreImage, DenoiseStages, DenoiseTask, noise_at
from halotile.tasks.noise.simulated import normals

REDRAWN = 2**31 + 2  # role of random numbers: noise that is added to an image


@dataclass(frozen=True, kw_only=True)
class BootstrapTask(DenoiseTask):
    """A denoising job with a map of its error, as a worker needs it for any block."""

    deviation: ShardWriter
    level: PlaneValues  # noise level of each plane, in the units of the file, where the job has no other description
    count: int  # redraws
    seed: int
    factor: float = 1.0  # by which the deviation of the redraws is multiplied

    def stages(self) -> BootstrapStages:  # type: ignore[override]
        return BootstrapStages(self)


@dataclass(frozen=True, slots=True, eq=False)
class Redrawn(WithGaps):
    """An image with more noise, of the strength of its own: by position, whatever region is read."""

    task: BootstrapTask
    draw: int

    def read(self, region: Region) -> Pixels:
        task, pixels = self.task, self.source.read(region)
        noise = noise_at(task, region, task.level.read(region))
        bright = noise.gain * pixels.astype(np.float64) if np.any(noise.gain) else 0.0
        sigma = np.sqrt(np.maximum(bright + noise.variance, 0))
        drawn = pixels + np.nan_to_num(sigma) * normals(region, task.seed, (REDRAWN, 0, self.draw))
        return np.where(task.measured(region, pixels), drawn, pixels).astype(self.dtype)


class BootstrapStages:
    """Read once, denoise, denoise again with more noise, write both maps."""

    def __init__(self, task: BootstrapTask) -> None:
        self.task, self._own = task, DenoiseStages(task)
        self.check, self.finish = self._own.check, self._own.finish

    def read(self, block: Block) -> Replaced:
        source = self.task.source
        window = block.window.clip(Region.whole(source.shape))
        return Replaced(source, window, source.read(window))

    def compute(self, block: Block, image: Replaced, receipt: Receipt) -> tuple[CoreImage, Array, Array]:
        """Denoise the core; return it with its pixels and the standard deviation of their error."""
        task = self.task
        core, denoised = self._denoised(block, image, receipt)
        squares, further = np.zeros(denoised.shape), Receipt()
        for draw in range(task.count):
            again = self._denoised(block, Redrawn(image, task, draw), further)[1]
            squares += np.square(again.astype(np.float64) - denoised)
        receipt.compute_seconds += further.compute_seconds
        measured = task.measured(block.core, image.read(block.core))
        deviation = np.where(task.roles.arrange(measured), task.factor * np.sqrt(squares / task.count), math.nan)
        return core, denoised, deviation

    def write(self, block: Block, result: tuple[CoreImage, Array, Array], receipt: Receipt) -> None:
        core, denoised, deviation = result
        mapped = self.task.deviation.write(block.core, self.task.roles.restore(deviation))
        receipt.enter(block.number, [self._own.written(block, denoised, core, receipt), mapped])

    def _denoised(self, block: Block, source: Readable, receipt: Receipt) -> tuple[CoreImage, Array]:
        """Denoise the core of a block of another image."""
        stages = copy.copy(self._own)
        stages.task = replace(self.task, source=source)
        core = stages.compute(block, stages.read(block), receipt)
        denoised: Array = core.computed.collect()
        receipt.compute_seconds += core.computed.seconds
        return core, denoised
