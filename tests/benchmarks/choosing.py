"""How well `recon-cli try` knows the error of a setting: its estimates against the truth, and what its suggestion costs.

Images of scikit-image with noise of known kind, denoised with five settings of each denoiser. The noise is written in the job, or estimated from the image.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from skimage import color, data
from skimage.transform import downscale_local_mean

from halotile.graphs.jobs.denoise.compare import compare
from halotile.graphs.jobs.denoise.comparison import Comparison, Setting
from tests.benchmarks.bars import Figure
from tests.support import job_of, write_zarr

Values = NDArray[np.float64]
EDGE = 256


def images() -> dict[str, Values]:
    """Images of at most 256² pixels, 0 to 1, of half the size: their own noise, which no estimate can tell from what is added, counts little there."""
    grey = color.rgb2gray
    whole = {
        "camera": data.camera() / 255.0,
        "astronaut": grey(data.astronaut()),
        "cell": data.cell()[100:612, 20:532] / 255.0,
        "coffee": grey(data.coffee()),
        "phantom": data.shepp_logan_phantom(),
        "moon": data.moon() / 255.0,
        "retina": data.retina()[400:912, 400:912, 1] / 255.0,
        "brick": data.brick() / 255.0,
    }
    return {name: downscale_local_mean(image[: 2 * EDGE, : 2 * EDGE], 2).clip(0, 1) for name, image in whole.items()}


class Noise(NamedTuple):
    """Noise of a camera: ``gain P(photons x) + offset + read n``; without photons, ``x + read n``."""

    name: str
    read: float
    photons: float = 0.0
    gain: float = 1.0
    offset: float = 0.0

    def truth(self, image: Values) -> Values:
        return image * self.photons * self.gain + self.offset if self.photons else image

    def variance(self, image: Values) -> Values:
        """Variance of each pixel."""
        return image * self.photons * self.gain**2 + self.read**2

    def draw(self, image: Values, seed: int) -> NDArray[Any]:
        rng = np.random.default_rng(seed)
        if not self.photons:
            return (image + self.read * rng.standard_normal(image.shape)).astype(np.float32)
        counted = self.gain * rng.poisson(image * self.photons) + self.offset
        if not self.read:
            return counted.astype(np.uint16)
        return (counted + self.read * rng.standard_normal(image.shape)).round().clip(0, 65535).astype(np.uint16)


NOISES = (
    *(Noise(f"gaussian {sigma}", sigma) for sigma in (0.02, 0.05, 0.1, 0.3)),
    *(Noise(f"{photons} photons", 0.0, photons) for photons in (2, 5, 20, 100, 500)),
    *(Noise(f"camera, {photons} photons", 2.0, photons, 2.2, 100.0) for photons in (20, 200)),
)
STRENGTHS: dict[str, tuple[dict[str, Any], ...]] = {
    "tv": tuple({"strength": s, "sigma": "auto"} for s in (0.05, 0.3, 0.6, 1.0, 2.0)),
    "nlm": tuple({"strength": s, "sigma": "auto"} for s in (0.2, 0.4, 0.7, 1.0, 1.5)),
    "gaussian": tuple({"sigma": s} for s in (0.4, 0.7, 1.0, 1.5, 2.5)),
    "median": tuple({"size": s} for s in (3, 5, 7, 9, 11)),
    "dncnn": tuple({"trained": s, "depth": 5, "width": 16} for s in (0.02, 0.05, 0.1, 0.2, 0.4)),
}
MODELS = ("gaussian", "poisson-gaussian")


@cache
def weights_for(noise: float) -> str:
    """Weights of a small network that learned this noise level, on images of 0 to 1."""
    file = Path(tempfile.mkdtemp()) / "dncnn.safetensors"
    options = f"--steps=300 --depth=5 --width=16 --sigma={noise}".split()
    subprocess.run([sys.executable, "examples/train_dncnn.py", file, *options], check=True, stdout=subprocess.DEVNULL)
    return str(file)


class Row(NamedTuple):
    """A setting that was tried: the estimate of its error, and the truth."""

    image: str
    noise: str
    setting: str
    estimate: float  # NaN where the noise was taken for correlated
    truth: float
    is_suggested: bool

    @property
    def is_close(self) -> bool:
        return abs(self.estimate - self.truth) <= max(0.03, 0.15 * self.truth)


def rows_of(known: bool) -> Iterator[Row]:
    """Yield the rows of all images and noises; ``known`` noise is written in the job."""
    for (number, (name, image)), noise in itertools.product(enumerate(images().items()), NOISES):
        truth, relative = noise.truth(image), float(noise.variance(image).mean())
        found = _compared(noise.draw(image, number), noise, known)
        spans = [slice(*found.place[axis]) for axis in "yx"]
        for tried in found.tried:
            error = float(np.mean(np.square(tried.denoised[0] - truth[tuple(spans)]))) / relative
            yield Row(name, noise.name, " ".join(tried.setting), tried.error, error, tried is found.suggested)


def _compared(drawn: NDArray[Any], noise: Noise, known: bool) -> Comparison:
    with tempfile.TemporaryDirectory() as folder:
        source = write_zarr(Path(folder) / "a.zarr", drawn)
        jobs = {}
        # The network takes values of 0 to 1.
        ends = [offset := noise.offset, offset + noise.gain * (noise.photons or 1)]
        for denoiser, choices in STRENGTHS.items():
            for options in choices:
                label: Setting = (denoiser, *(f"{k}={v}" for k, v in options.items() if v != "auto"))
                trained, given = options.get("trained"), {k: v for k, v in options.items() if k != "trained"}
                parts: dict[str, Any] = {}
                if trained:
                    given["weights"], parts["input"] = weights_for(trained), {"range": ends}
                for model in MODELS if "strength" in options and drawn.dtype.kind == "u" else MODELS[:1]:
                    parts["noise"] = _section(model, noise if known else None)
                    jobs[*label, model] = job_of(source, Path(folder) / "o.zarr", denoiser, given, **parts)
        return compare(list(jobs), jobs.__getitem__)


def _section(model: str, noise: Noise | None) -> dict[str, Any]:
    if noise is None or (noise.photons and model == "gaussian"):
        return {"model": model}
    counted = {"gain": noise.gain, "offset": noise.offset} if noise.photons else {}
    return {"model": model, "read_sigma": noise.read, **counted}


def losses(rows: Sequence[Row]) -> list[float]:
    """By image and noise, what the suggested setting loses against the best one, in dB; those without a suggestion do not count."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.image, row.noise), []).append(row)
    best = {key: min(row.truth for row in group) for key, group in groups.items()}
    found = {key: row.truth for key, group in groups.items() for row in group if row.is_suggested}
    return [10 * math.log10(truth / best[key]) for key, truth in found.items()]


def _measured(folder: Path, known: bool) -> list[Row]:
    """The rows, measured once."""
    kept = folder / f"choosing-{known}.json"
    if not kept.exists():
        kept.write_text(json.dumps(list(rows_of(known))))
    return [Row(*row) for row in json.loads(kept.read_text())]


def _figure(of: Callable[[list[Row]], float], known: bool) -> Callable[[Path], float]:
    return lambda folder: of(_measured(folder, known))


WANTED: list[tuple[str, Callable[[list[Row]], float], str, float]] = [
    ("settings whose error is estimated farther than 0.03, or 15 %, from the truth", lambda rows: 100 * float(np.mean([not row.is_close for row in rows if math.isfinite(row.estimate)])), "%", 5),
    ("images for which the suggested setting loses more than 0.3 dB", lambda rows: 100 * float(np.mean(np.array(losses(rows)) > 0.3)), "%", 5),
    ("most that a suggestion loses", lambda rows: max(losses(rows)), "dB", 1),
]  # fmt: skip
CHOOSING_ROWS = tuple(
    Figure("choosing", f"`try`, noise {'known' if known else 'estimated'}: {title}", _figure(of, known), unit, bar, 1)
    for known in (True, False)
    for title, of, unit, bar in WANTED
)
