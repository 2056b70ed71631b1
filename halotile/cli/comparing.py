"""Settings of a denoising job tried on one crop: the lists of the command line, the figures, and the sheet."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halotile.cli.arguments import Flags, TryRequest
from halotile.cli.config.loading import load_job
from halotile.errors import ConfigError
from halotile.graphs.kinds.sections import Job, first_job
from halotile.graphs.waiting import Report, no_report
from halotile.storage.disk.durable import DISK

if TYPE_CHECKING:
    from halotile.graphs.jobs.denoise.comparison import Comparison, Setting

MOST = 32  # settings of one sheet at most


def try_settings(request: TryRequest, report: Report = no_report) -> Comparison:
    """Denoise a crop with every setting, and draw the sheet if there is one."""
    from halotile.graphs.jobs.denoise.compare import compare
    from halotile.graphs.jobs.denoise.comparison import draw
    from halotile.storage.images.png import check_drawing

    region = None if request.region == "auto" else request.area
    at, settings = request.at, settings_of(request.overrides or ())
    if request.file is not None:
        if request.file.suffix.lower() != ".png":
            raise ConfigError(f"{request.file}: a sheet is written as PNG. Write a name that ends in .png.")
        check_drawing()
    comparison = compare(settings, partial(_load, request), at=at, region=region, report=report)
    if request.file is not None:
        DISK.write_file(request.file, [draw(comparison)])
    return comparison


def _load(request: TryRequest, setting: Setting) -> Job:
    # A setting may name another image.
    job = first_job(load_job(request.config, setting, Flags(allow_import=request.allow_import)))
    if request.file is not None:
        source = getattr(job, "input", None)
        request.check_file(request.file, [*([source.path] if source else []), job.place])
    return job


def settings_of(overrides: Sequence[str]) -> list[Setting]:
    """Return every combination of values that are listed for keys.

    >>> settings_of(["denoiser.name=tv,nlm", "tile.size=[64, 64]"])
    [('denoiser.name=tv', 'tile.size=[64, 64]'), ('denoiser.name=nlm', 'tile.size=[64, 64]')]
    """
    values: dict[str, list[str]] = {}
    for override in overrides:
        key, equals, listed = override.partition("=")
        values[key.strip()] = [f"{key.strip()}{equals}{value}" for value in _split(listed)]
    if (count := math.prod(map(len, values.values()))) > MOST:
        raise ConfigError(
            f"--set: the lists of {', '.join(values)} make {count:,} settings, and a sheet shows {MOST}. Write fewer values."
        )
    return list(itertools.product(*values.values()))


def listed(values: Any) -> str:
    """Return values as a list of the command line; a text or a number is one value.

    >>> listed(["tv", 0.5, [64, 64]]), list(_split(listed(["a,b", "c"])))
    ('tv,0.5,[64, 64]', ['"a,b"', 'c'])
    """
    texts = []
    for value in [values] if isinstance(values, str) or not isinstance(values, Iterable) else values:
        is_word = isinstance(value, str) and len(list(_split(value))) == 1
        text = json.dumps(value, default=lambda each: each.item() if hasattr(each, "item") else str(each))  # of NumPy
        texts.append(value if is_word else text)
    return ",".join(texts)


def _split(text: str) -> Iterator[str]:
    """Split a text at commas outside of brackets and quotes."""
    depth, quote, part = 0, "", ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += 0 if quote else (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            yield part.strip()
            part = ""
        else:
            part += letter
    yield part.strip()


def comparison_json(comparison: Comparison, file: Path | None) -> dict[str, Any]:
    """Return the figures of all settings, for programs."""
    return {
        **({"written": dict(comparison.written)} if comparison.channels else {}),
        "channels": {name: comparison_json(one, None) for name, one in comparison.channels.items()},
        "file": None if file is None else str(file),
        "place": {axis: list(span) for axis, span in comparison.place.items()},
        "noise_level": comparison.noise,
        "photon_noise": comparison.photons and comparison.photons.to_json(),
        "outliers": comparison.outliers,
        "noise_correlation": comparison.correlation and {a: list(getattr(comparison.correlation, a)) for a in "yx"},
        "score": comparison.score,
        "settings": [
            {
                "set": list(tried.setting),
                "residual": tried.statistics.ratio,
                **tried.statistics.structure_json(),
                "error": None if math.isnan(tried.error) else tried.error,
                "faint_detail": [found._asdict() for found in tried.detail],
            }
            for tried in comparison.tried
        ],
        "failed": [{"set": list(setting), "error": why} for setting, why in comparison.failed.items()],
        "missing": dict(comparison.missing),
        "suggested": None if comparison.suggested is None else list(comparison.suggested.setting),
    }
