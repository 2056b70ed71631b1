"""Programs of CAREamics, which has an environment of its own: ``python careamics_side.py NAME REQUEST``, the request as JSON.

N2V with its defaults but for the limit of the training, on patches of 64 × 64 pixels in batches of 16, with its one process that reads;
the main process has one or two threads, whichever is faster.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from careamics import CAREamist
from careamics.config import create_advanced_n2v_config
from lightning.pytorch import Callback

PATCH, BATCH = 64, 16
THREADS = (1, 2)
TILES = (128, 256, 512)
WARM, PROBE = 3, 10
SEED = 1


class StepTimes(Callback):  # type: ignore[misc]
    """Times at which steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *arguments: Any, **options: Any) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())

    def seconds(self) -> float:
        """The median step."""
        return statistics.median(b - a for a, b in itertools.pairwise(self.ends[WARM:]))


def trained(data: Any, folder: Path, kind: str = "array", **limit: Any) -> tuple[Any, StepTimes]:
    """A trained network, and the times of its steps; the limit is one of Lightning's trainer."""
    times = StepTimes()
    given: dict[str, Any] = {"trainer_params": {"accelerator": "cpu", **limit}, "num_epochs": -1, "seed": SEED}
    config = create_advanced_n2v_config("n2v", kind, "YX", [PATCH, PATCH], BATCH, **given)
    careamist = CAREamist(config, work_dir=folder, callbacks=[times], enable_progress_bar=False)
    careamist.train(train_data=data)
    return careamist, times


def predicted(careamist: Any, pixels: Any, folder: Path, tile: int) -> Any:
    """The image by the network as it is now: by itself, CAREamics takes that of every tenth epoch."""
    now = folder / "now.ckpt"
    careamist.trainer.save_checkpoint(now)
    (result,), _ = careamist.predict(pixels, tile_size=(tile, tile), checkpoint=now)
    return np.squeeze(result)


def step(source: str, folder: Path, steps: int) -> dict[str, float]:
    """Seconds of a step with the better number of threads."""
    pixels, seconds = zarr.open_array(source, mode="r")[...], {}
    for threads in THREADS:
        torch.set_num_threads(threads)
        seconds[threads] = trained(pixels, folder, max_steps=steps)[1].seconds()
    best = min(THREADS, key=seconds.__getitem__)
    return {"seconds": seconds[best], "threads": best}


def denoise(source: str, folder: Path, seconds: float, result: str) -> dict[str, float]:
    """An image that is denoised after so many seconds of training."""
    torch.set_num_threads(int(step(source, folder, PROBE)["threads"]))
    pixels = zarr.open_array(source, mode="r")[...]
    careamist, times = trained(pixels, folder, max_time={"seconds": seconds})
    np.save(result, predicted(careamist, pixels, folder, TILES[1]))
    return {"steps": len(times.ends), "trained_seconds": times.ends[-1] - times.ends[0]}


def predict(source: str, folder: Path) -> dict[str, float]:
    """Seconds of a prediction with the best tiles and number of threads."""
    pixels, seconds = zarr.open_array(source, mode="r")[...], {}
    careamist, _ = trained(pixels[: PATCH * 8, : PATCH * 8], folder, max_steps=1)
    for threads in THREADS:
        torch.set_num_threads(threads)
        for tile in TILES:
            began = time.perf_counter()
            predicted(careamist, pixels, folder, tile)
            seconds[time.perf_counter() - began] = (threads, tile)
    best = min(seconds)
    return {"seconds": best, "threads": seconds[best][0], "tile": seconds[best][1]}


def train(source: str, folder: Path, steps: int, kind: str) -> dict[str, float]:
    """Some steps with the image in memory (array), or read as they go (zarr)."""
    if kind == "array":
        trained(zarr.open_array(source, mode="r")[...], folder, max_steps=steps)
        return {}
    group = folder / "group.zarr"  # it reads arrays in groups alone
    zarr.create_group(group)
    (group / "image").symlink_to(source)
    trained(group, folder, kind, max_steps=steps)
    return {}


if __name__ == "__main__":
    request = json.loads(sys.argv[2])
    print(json.dumps(globals()[sys.argv[1]](folder=Path(request.pop("folder")), **request)), flush=True)
