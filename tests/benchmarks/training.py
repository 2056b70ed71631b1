"""Training of a U-Net on a noisy image against CAREamics, each in processes of its own."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.storage.run_directory.directory import RunDirectory
from tests.benchmarks.bars import REPOSITORY
from tests.benchmarks.data import image
from tests.benchmarks.measuring import Result, chosen, fresh, job_command, printed, watched_memory

CAREAMICS = Path(sys.prefix) / "careamics" / "bin" / "python"
"""The Python that `make bench ARGS=training` installs CAREamics for."""
STEPS = 30
"""Steps where their time or their memory is measured."""
STRENGTHS = (0.5, 0.7, 1.0, 1.4, 2.0)
IMAGES = ("retina", "immunohistochemistry")
LEVEL, PEAK = 0.1, 20
BARRED = 3
"""Minutes of training from which a bar holds."""
NOISES = {"gaussian": f"noise of {LEVEL}", "photons": f"photon noise at a peak of {PEAK}"}
NOISE_MODELS: dict[str, dict[str, Any]] = {"gaussian": {}, "photons": {"model": "poisson-gaussian", "gain": 1 / PEAK}}


def clean(name: str, edge: int) -> NDArray[np.float32]:
    """The green channel of an image of scikit-image in [0, 1], or its middle."""
    import skimage.data

    green = getattr(skimage.data, name)()[..., 1]
    green = green[tuple(slice(start := max(0, n - edge) // 2, start + edge) for n in green.shape)]
    return np.asarray(green, np.float32) / np.float32(255)


def noisy(folder: Path, name: str, noise: str, edge: int) -> Path:
    """The same with noise, as a plain Zarr."""
    from tests.support import write_zarr

    path = folder / f"{name}-{noise}-{edge}.zarr"
    if not path.exists():
        pixels, rng = clean(name, edge), np.random.default_rng(0)
        if noise == "photons":
            pixels = (rng.poisson(PEAK * pixels) / PEAK).astype(np.float32)
        else:
            pixels = pixels + np.float32(LEVEL) * rng.standard_normal(pixels.shape, dtype=np.float32)
        write_zarr(path, pixels, chunk=256)
    return path


def decibels(result: NDArray[Any], truth: NDArray[Any]) -> float:
    """PSNR of an image whose range is 1."""
    return float(-10 * np.log10(np.mean((result - truth) ** 2, dtype=np.float64)))


# --- ours -----------------------------------------------------------------------------------------


def train(source: Path, weights: Path, *, seconds: float = 0.0, steps: int = STEPS, **sections: Any) -> Result:
    """Train for about so many seconds, or else steps, as a job, of two workers unless its sections say otherwise; return the seconds of a step, and those after the first."""
    folder = fresh(weights.with_suffix(".job"))
    folder.mkdir()
    length = {"minutes": seconds / 60} if seconds else {"steps": steps}
    places = {"input": {"path": str(source)}, "output": {"path": str(folder / weights.name)}}
    document = {"job": "train", **places, **length, "run": {"workers": 2}, **sections}
    command = job_command(folder / "train.yaml", **document)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    directory, written = RunDirectory.beside(folder / weights.name), set()
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as job:
        while job.poll() is None:
            with suppress(FileNotFoundError):  # the curve is written after the first step, and after the last
                written.add((directory.state_path / "curve.json").stat().st_mtime)
            time.sleep(0.02)
    if job.returncode:
        raise SystemExit(f"the training ended with {job.returncode}")
    os.replace(folder / weights.name, weights)
    rows = [json.loads(line) for line in directory.iterations_path.read_text().splitlines()]
    counted = sum(float(row["seconds"]) for row in rows[1:])
    per_step = counted / float(rows[-1]["iteration"] - rows[0]["iteration"])
    return {"seconds": per_step, "trained_seconds": max(written) - min(written)}


def denoised(source: Path, folder: Path, denoiser: str, options: dict[str, Any], noise: str) -> NDArray[Any]:
    """The image as a job denoises it."""
    from tests.support import job_of, run_inline

    job = job_of(source, folder / "ours.zarr", denoiser, options, shard=512, chunk=256, noise=NOISE_MODELS[noise])
    return run_inline(job)


def ours(folder: Path, edge: int, name: str, noise: str, minutes: str) -> Result:
    """PSNR after some minutes of training."""
    source, weights = noisy(folder, name, noise, edge), folder / "ours.safetensors"
    trained = train(source, weights, seconds=60 * float(minutes))
    _taken(folder, name, noise, minutes).write_text(json.dumps(trained["trained_seconds"]))
    result = denoised(source, folder, "unet", {"weights": str(weights)}, "gaussian")
    return {"decibels": decibels(result, clean(name, edge)), **trained}


def _taken(folder: Path, name: str, noise: str, minutes: str) -> Path:
    """Where it is written how many seconds our training took."""
    return folder / f"taken-{name}-{noise}-{minutes}.json"


def untrained(folder: Path, edge: int, name: str, noise: str, denoiser: str) -> Result:
    """PSNR of a denoiser at the best of its strengths, with the noise that there is."""
    source, truth = noisy(folder, name, noise, edge), clean(name, edge)
    found = {
        decibels(denoised(source, folder, denoiser, options, noise), truth): strength
        for strength in STRENGTHS
        for options in [{"strength": strength, "sigma": "auto"}]
    }
    return {"decibels": max(found), "strength": found[max(found)]}


def ours_step(folder: Path, edge: int) -> Result:
    """Seconds of a step of training."""
    return train(noisy(folder, "retina", "gaussian", edge), folder / "step.safetensors")


def ours_predict(folder: Path, edge: int) -> Result:
    """Seconds of a job that applies the network, from Zarr to Zarr."""
    from safetensors.torch import save_file

    from halotile.tasks.denoisers.common.layers import BlindUNet
    from tests.benchmarks.denoising import run_job

    weights = folder / "random.safetensors"
    if not weights.exists():
        save_file(BlindUNet(1, 32, 2).state_dict(), weights)
    return run_job(image(folder, edge), folder / "predicted.zarr", chosen("unet", weights=str(weights)))


def ours_memory(folder: Path, edge: int, workers: str) -> Result:
    """Peak memory of a training by some workers."""
    source = image(folder, edge)
    with watched_memory("pss", with_this=False) as peak:  # the job is a command of its own
        train(source, folder / "memory.safetensors", run={"workers": int(workers)})
    return {"peak_bytes": peak()}


# --- CAREamics ------------------------------------------------------------------------------------


def _careamics(task: str, **request: Any) -> Result:
    if not CAREAMICS.exists():
        raise SystemExit(f"there is no {CAREAMICS}. Write: make bench ARGS=training")
    with tempfile.TemporaryDirectory() as folder:
        command = [str(CAREAMICS), str(Path(__file__).with_name("careamics_side.py")), task]
        figures: Result = json.loads(printed("CAREamics", [*command, json.dumps({"folder": folder, **request})]))
    return figures


def careamics(folder: Path, edge: int, name: str, noise: str, minutes: str) -> Result:
    """PSNR after some minutes of training; after as long as ours took, if that was longer."""
    source, result = noisy(folder, name, noise, edge), fresh(folder / "careamics.npy")
    seconds, taken = 60 * float(minutes), _taken(folder, name, noise, minutes)
    if taken.exists():
        seconds = max(seconds, json.loads(taken.read_text()))
    figures = _careamics("denoise", source=str(source), seconds=seconds, result=str(result))
    return {"decibels": decibels(np.load(result), clean(name, edge)), **figures}


def careamics_step(folder: Path, edge: int) -> Result:
    """Seconds of a step of training."""
    return _careamics("step", source=str(noisy(folder, "retina", "gaussian", edge)), steps=STEPS)


def careamics_predict(folder: Path, edge: int) -> Result:
    """Seconds of a prediction, from memory to memory."""
    return _careamics("predict", source=str(image(folder, edge)))


def careamics_memory(folder: Path, edge: int, kind: str) -> Result:
    """Peak memory of a training, from an array in memory or from the Zarr."""
    source = image(folder, edge)
    with watched_memory("pss") as peak:
        _careamics("train", source=str(source), steps=STEPS, kind=kind)
    return {"peak_bytes": peak()}


# --- rows -----------------------------------------------------------------------------------------


Row = tuple[str, str, str, str, int, float | None, int, str]
"""Case, title, our program, the peer's, edge of the image, bar, repeats, figure."""


@dataclass(frozen=True)
class Size:
    """Edges of images in pixels, and minutes of training."""

    suffix: str
    real: int
    minutes: tuple[float, ...]
    predicted: int = 0
    large: int = 0
    repeats: int = 1

    def rows(self) -> list[Row]:
        """The rows of the table."""
        rows = self._costs() if self.large else []
        for name, noise in itertools.product(IMAGES, NOISES):
            rows += self._errors(name, noise)
        prefix, suffix = "training", self.suffix
        return [(f"{prefix}-{c}{suffix}", t, f"{prefix}.{o}", f"{prefix}.{p}", e, b, n, f) for c, t, o, p, e, b, n, f in rows]  # fmt: skip

    def _costs(self) -> list[Row]:
        """Time and memory."""
        in_memory, from_zarr = "image in memory", "patches from Zarr"
        kinds = {in_memory: "array", from_zarr: "zarr"}
        memory: list[Row] = [
            ("memory" if edge == self.large else "memory-large", f"peak memory of training on {edge}², {workers} / CAREamics, {where}",
             f"ours_memory {workers[0]}", f"careamics_memory {kinds[where]}", edge, bar, 1, "peak_bytes")
            for edge, where, workers, bar in (
                (self.large, in_memory, "1 worker", 0.5),
                (self.large, in_memory, "2 workers", 0.5),
                (self.large, from_zarr, "1 worker", 0.5),
                (self.large, from_zarr, "2 workers", 0.5),
                (2 * self.large, in_memory, "2 workers", None),
            )
        ]  # fmt: skip
        predict = f"the U-Net on {self.predicted}², a job from Zarr to Zarr / CAREamics, its best tiles, in memory"
        step = "a step of training, 16 patches of 64², 2 cores / CAREamics"
        return [
            ("step", step, "ours_step", "careamics_step", self.real, 0.8, self.repeats, "seconds"),
            ("predict", predict, "ours_predict", "careamics_predict", self.predicted, 0.5, self.repeats, "seconds"),
            *memory,
        ]

    def _errors(self, name: str, noise: str) -> list[Row]:
        """The PSNR of others less ours, for one image with one noise."""
        most = self.minutes[-1]
        others: list[tuple[float, str, str, float | None]] = [
            (minutes, "CAREamics", f"careamics {name} {noise} {minutes:g}", None if minutes < BARRED else 0.1)
            for minutes in self.minutes
        ]
        others += [
            (most, f"`{denoiser}` at its best strength", f"untrained {name} {noise} {denoiser}", None)
            for denoiser in ("tv", "nlm")
        ]
        title = f"{name}, {NOISES[noise]}, {{:g}} min of training: PSNR of {{}} less ours"
        ours = f"ours {name} {noise} {{:g}}"
        return [
            (f"{name}-{noise}", title.format(minutes, other), ours.format(minutes), program, self.real, bar, 1, "decibels")
            for minutes, other, program, bar in others
        ]  # fmt: skip


FULL = Size("", 1411, (1, 3), 2048, 8192, repeats=3)
LONG = Size("-long", 1411, (15,))
QUICK = Size("-quick", 256, (0.1,), 512, 1024)
