"""Settings of a denoising job tried on one crop: the lists of the command line, the figures, and the sheet."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halotile.cli.arguments import Flags, TryRequest
from halotile.cli.config.loading import load_job
from halotile.errors import ConfigError
from halotile.graphs.kinds.base import Row
from halotile.graphs.kinds.sections import Job, first_job
from halotile.graphs.waiting import Report, no_report
from halotile.graphs.words import counted, flow

if TYPE_CHECKING:
    from halotile.graphs.jobs.denoise.compare import Comparison, Setting, TriedSetting

MOST = 32  # settings of one sheet at most
TAILS = (0.5, 99.5)  # percentiles of the noisy crop that are black and white
NOISE_LEVELS = 3  # residual that is black or white, in noise levels
GREY = 128  # holes in a residual


def try_settings(request: TryRequest, report: Report = no_report) -> Comparison:
    """Denoise a crop with every setting, and draw the sheet if there is one."""
    from halotile.graphs.jobs.denoise.compare import compare
    from halotile.storage.images.png import check_drawing

    region = None if request.region == "auto" else request.area
    at, settings = request.at, settings_of(request.overrides or ())
    if request.file is not None:
        if request.file.suffix.lower() != ".png":
            raise ConfigError(f"{request.file}: a sheet is written as PNG. Write a name that ends in .png.")
        check_drawing()
    comparison = compare(settings, partial(_load, request), at=at, region=region, report=report)
    if request.file is not None:
        draw(request.file, comparison)
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


def labels_of(settings: Sequence[Setting]) -> dict[Setting, str]:
    """Return what tells each setting from the others.

    >>> labels_of([("a.b=1", "c.d=2"), ("a.b=3", "c.d=2")])
    {('a.b=1', 'c.d=2'): 'b=1', ('a.b=3', 'c.d=2'): 'b=3'}
    """
    differing = [len(set(values)) > 1 for values in zip(*settings, strict=True)]
    differing = differing if any(differing) else [True] * len(differing)
    keys = [part.partition("=")[0] for part in itertools.compress(settings[0], differing)]
    ends = [key.rpartition(".")[2] for key in keys]
    shown = ends if len(set(ends)) == len(ends) else keys
    labels = {}
    for setting in settings:
        parts = zip(shown, itertools.compress(setting, differing), strict=True)
        pairs = (f"{name}={part.partition('=')[2]}" for name, part in parts)
        labels[setting] = ", ".join(pairs) or "the job as it is"
    return labels


def _labels(comparison: Comparison) -> dict[Setting, str]:
    return labels_of([*(tried.setting for tried in comparison.tried), *comparison.failed])


def written(setting: Setting) -> str:
    """Return a setting as options of a command.

    >>> written(("denoiser.strength=2", "tile.size=[64, 64]"))
    "--set denoiser.strength=2 --set 'tile.size=[64, 64]'"
    """
    return " ".join(f"--set {shlex.quote(part)}" for part in setting)


def rows_of(comparison: Comparison) -> list[Row]:
    """Return the figures of all settings as a table, for each channel where they were compared apart."""
    rows: list[Row] = []
    for name, one in (comparison.channels or {"": comparison}).items():
        labels = _labels(one)
        rows += [("channel", name)] if name else []
        rows += [("crop", _place_text(one)), ("noise", _noise_text(one)), *_remarks(one), ("", "")]
        for tried in one.tried:
            structure = "; the residual holds structure" if tried.statistics.is_structured else ""
            rows.append((labels[tried.setting], ", ".join(_lines(tried, one)) + structure))
        if len(one.tried) > 1:
            rows += [("", ""), ("suggested", _suggestion(one, name))]
            rows += [("faint detail", text) for text in _faint(one)]
        rows += [("", "")] if name else []
    lines = _to_paste(comparison)
    label = "to paste" if lines[:1] and lines[0].startswith("denoiser:") else "for all"
    return [*rows, *(("" if n else label, line) for n, line in enumerate(lines))]


def _to_paste(comparison: Comparison) -> list[str]:
    """Return the lines of a job file with the suggestions for all channels."""
    best = [one.suggested.setting for one in comparison.channels.values() if one.suggested]
    others = {tuple(part for part in one if not part.startswith(("denoiser", "channels"))) for one in best}
    if len(others) > 1:
        return ["the suggestions differ in more than the denoiser: write a job for each channel, with input.channels"]
    if comparison.written:
        more = [f"and with {written(*others)}"] if any(others) else []
        return [f"{key}: {flow(value)}" for key, value in comparison.written.items()] + more
    return [written(best[0]) or "the job as it is"] if best and len(comparison.tried) > 1 else []


def failures_of(comparison: Comparison) -> Iterator[str]:
    """Yield the channels and settings that cannot be used, these by their reasons."""
    yield from (f"channel {name}: {why}" for name, why in comparison.missing.items())
    labels = _labels(comparison)
    settings: dict[str, list[str]] = {}
    for setting, why in comparison.failed.items():
        settings.setdefault(why, []).append(labels[setting])
    for why, alike in settings.items():
        first, *others = why.splitlines()
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        yield f"{alike[0]}{more}: {'; '.join(others) or first}"


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


def draw(file: Path, comparison: Comparison) -> None:
    """Draw the sheet: the noisy crop, and each setting's result above its residual."""
    import numpy as np

    from halotile.storage.images.png import Cell, blends, draw_sheet, grey

    channels = list(comparison.channels.values()) or [comparison]
    labels = _labels(comparison)
    windows = [tuple(np.nanpercentile(one.noisy, TAILS).tolist()) for one in channels]

    def drawn(images: Sequence[Any]) -> Any:
        if len(channels) == 1:
            return grey(images[0], *windows[0])
        ((mixed, _),) = blends([np.stack([image[0] for image in images], -1)], comparison.colours, windows)
        return grey(np.moveaxis(mixed, -1, 0), 0, 1)

    cells = [Cell("noisy", [drawn([one.noisy for one in channels])])]
    for tried in comparison.tried:
        same = [each for one in channels for each in one.tried if each.setting == tried.setting]
        if len(same) < len(channels):
            continue
        worst = max(same, key=lambda each: each.statistics.correlation)
        residual = grey(worst.residual, -NOISE_LEVELS, NOISE_LEVELS, GREY)
        suggested = [each is one.suggested for each, one in zip(same, channels, strict=True)]
        remark = "the residual holds structure" if worst.statistics.is_structured else ""
        lines = _lines(tried, comparison)
        if comparison.channels:
            named = zip(comparison.channels, same, suggested, strict=True)
            lines = [f"{name}: error {each.error:.3f}{', suggested' * is_best}" for name, each, is_best in named]
        images = [drawn([each.denoised for each in same]), residual]
        is_best = all(suggested) and len(comparison.tried) > 1
        cells.append(Cell(labels[tried.setting], images, lines, is_best, remark))
    draw_sheet(file, cells, [*_notes(comparison), *(f"Not shown: {failure}" for failure in failures_of(comparison))])


def _suggestion(comparison: Comparison, channel: str = "") -> str:
    """Return the best setting, and the plane that it is best for; a sentence where none is worth it, or none is known to be."""
    if comparison.correlation:
        return "none: settings cannot be compared by their errors. Compare the residuals, and the faint detail"
    if comparison.suggested is None:
        return "no setting is better than the image as it is, by this estimate"
    plane = "" if channel else _plane_text(comparison)
    where = f" (for plane {plane}; others may need another: --plane)" if plane else ""
    doubt = ""
    if comparison.suggested.statistics.is_structured:
        doubt = ". Its residual holds structure of the image, so its error may be larger than estimated: compare weaker settings"
    return (written(comparison.suggested.setting) or "the job as it is") + where + doubt


def _plane_text(comparison: Comparison) -> str:
    """Return the indices of the crop along axes other than rows and columns."""
    spans = comparison.place.items()
    return ", ".join(f"{a}={first}" for a, (first, last) in spans if a not in "yx" and last - first == 1)


def _lines(tried: TriedSetting, comparison: Comparison) -> list[str]:
    found = tried.statistics
    kept, seen = ("/".join(f"{100 * each[i]:.0f}" for each in tried.detail) for i in (1, 2))
    return [
        f"residual {found.ratio:.2f} of the noise",
        f"correlation {found.correlation_text}",
        *([] if math.isnan(tried.error) else [f"error {tried.error:.3f} ({comparison.score})"]),
        *([f"faint detail {kept} % kept, {seen} % detected"] if kept else []),
    ]


def _faint(comparison: Comparison) -> list[str]:
    """Return a sentence on a setting that keeps more faint detail than the suggested one."""
    if (more := comparison.keeps_more) is None or (suggested := comparison.suggested) is None:
        return []
    return [
        f"the suggested setting keeps {100 * suggested.detail_kept:.0f} % of it, and {_labels(comparison)[more.setting]} "
        f"{100 * more.detail_kept:.0f} %, with an error of {more.error:.3f}. To keep small faint features, use {written(more.setting)}"
    ]


def _remarks(comparison: Comparison) -> Iterator[Row]:
    """Yield the number of pixels that were left out, and the reason why no error can be estimated."""
    if comparison.outliers:
        count = counted(comparison.outliers, "pixel")
        advice = (
            ""
            if any(tried.repairs for tried in comparison.tried)
            else ". To replace such pixels, write input.defects: auto"
        )
        yield "outliers", f"{count} far beyond the noise, hot or dead: left out of all figures{advice}"
    if found := comparison.correlation:
        why = f"the noise is correlated, by {found}, but the estimate assumes noise that is independent from pixel to pixel"
        yield "error", f"none can be estimated: {why}. {found.advice}"


def _noise_text(comparison: Comparison) -> str:
    """Return the noise by which settings are judged, in the words of the plan."""
    if comparison.photons is None:
        return f"noise level {comparison.noise:.4g}"
    import numpy as np

    gain, offset, read = (
        ", ".join(f"{number:.4g}" for number in dict.fromkeys(np.ravel(part).tolist())) for part in comparison.photons
    )
    return f"photon noise of gain {gain}, offset {offset} and read noise {read}; {comparison.noise:.4g} on average"


def _place_text(comparison: Comparison) -> str:
    rows, columns = (":".join(map(str, comparison.place[axis])) for axis in "yx")
    plane = f"; plane {text}" if (text := _plane_text(comparison)) and not comparison.channels else ""
    return f"{rows},{columns} (rows, columns){plane}"


def _notes(comparison: Comparison) -> list[str]:
    below = (
        f"Below each result: what it took away, the residual. Grey is 0, black and white are -{NOISE_LEVELS} and +{NOISE_LEVELS} noise levels.",
    )
    if comparison.channels:
        of = (
            f"channels {', '.join(comparison.channels)} in their colours; residual of the one with most structure in it"
        )
        return [f"Crop {_place_text(comparison)} of {of}.", *below, *_to_paste(comparison)]
    several = len(comparison.tried) > 1
    return [
        *(f"{label.capitalize()}: {text}." for label, text in _remarks(comparison)),
        f"Crop {_place_text(comparison)}. {_noise_text(comparison).capitalize()}.",
        *below,
        "residual: its standard deviation relative to the noise. correlation: that of neighbouring pixels of the residual, along the axis where it is larger; about 0 for noise alone, higher "
        "where it holds structure of the image. error: estimated squared error of the result; that of the noisy crop is 1.",
        "faint detail: remaining height of small spots and lines that were added at 1, 2 and 5 noise levels, and the share of them that is still detected.",
        *([f"Suggested: {_suggestion(comparison)}"] if several else []),
        *([f"Faint detail: {text}." for text in _faint(comparison)] if several else []),
    ]
