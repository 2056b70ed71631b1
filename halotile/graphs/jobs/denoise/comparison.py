"""Settings that were compared on one crop: the values, their figures as a table, and the sheet."""

from __future__ import annotations

import base64
import itertools
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from halotile.errors import MissingPackage
from halotile.graphs.jobs.denoise.place import Spans
from halotile.graphs.kinds.base import Row
from halotile.graphs.words import counted, flow, html_table
from halotile.storage.images.png import Cell, blends, draw_sheet, grey
from halotile.tasks.noise.noise_correlation import NoiseCorrelation
from halotile.tasks.noise.photon_noise import PhotonNoise
from halotile.tasks.noise.quality import FaintDetail, Risk
from halotile.tasks.noise.quiet_windows import Values
from halotile.tasks.noise.residual import Residual

Setting = tuple[str, ...]  # overrides of a job file, such as `("denoiser.strength=0.5",)`
Score = Literal["SURE", "PURE"]  # unbiased risk estimates for Gaussian noise, and for noise of photons
# Ratio of errors up to which a setting may be preferred for the faint detail that it keeps, and what the best keeps of
# that at most.
NEAR, MUCH_LESS = 2.0, 2 / 3
TIE = 10**0.01  # ratio of errors, 0.1 dB, up to which settings are equal
TAILS = (0.5, 99.5)  # percentiles of the noisy crop that are black and white
NOISE_LEVELS = 3  # residual that is black or white, in noise levels
GREY = 128  # holes in a residual


@dataclass(frozen=True)
class TriedSetting:
    """A setting with the crop that it denoised."""

    setting: Setting  # overrides of the job file
    denoised: NDArray[Any]  # pixels that a run writes there
    # noisy crop less the denoised one, relative to the standard deviation of the noise; NaN in holes
    residual: Values
    statistics: Residual  # its size relative to the noise, and the correlation of its neighbouring pixels
    # estimate of the squared error relative to that of the noisy crop; it may be below 0. NaN where noise is correlated
    risk: Risk
    detail: tuple[FaintDetail, ...]  # faint detail that is left, by its height
    repairs: bool = False  # true if its job replaces defects

    @property
    def error(self) -> float:
        """Estimate of the squared error, relative to that of the noisy crop."""
        return self.risk.error

    @property
    def detail_kept(self) -> float:
        """Share of the faint detail that is left, the mean over its heights."""
        return float(np.mean([found.kept for found in self.detail])) if self.detail else 1.0


@dataclass(frozen=True)
class Comparison:
    """Settings compared on one crop."""

    place: Spans  # crop: first and last pixel, excluding that, along each axis of the image
    noisy: Values  # crop; NaN in holes
    noise: float  # mean standard deviation of the noise there, in the units of the file
    # noise by which all settings are judged, of shapes that broadcast to the crop; None for Gaussian noise
    photons: PhotonNoise | None
    score: Score  # the estimate of the error
    tried: tuple[TriedSetting, ...]  # settings that could be used, as they were listed
    failed: Mapping[Setting, str]  # others, with the reason
    outliers: int = 0  # hot, dead and other pixels that noise does not explain: they were replaced, and do not count
    correlation: NoiseCorrelation | None = None  # that of the noise, where it is clear: no error can be estimated then
    preferred: Setting | None = None  # the one that is suggested among those of equal errors
    # that of each channel by its name, this one first, and what a job file has for the suggestions where they differ;
    # empty where one channel was compared, or all together
    channels: Mapping[str, Comparison] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    colours: tuple[str, ...] = ()  # colours of these channels, six hexadecimal digits each
    missing: Mapping[str, str] = field(default_factory=dict)  # channels that cannot be compared, with the reason

    @property
    def best(self) -> TriedSetting:
        """The setting with the smallest estimated error; the first where none can be estimated."""
        return min(self.tried, key=lambda tried: tried.error)

    @property
    def tied(self) -> list[TriedSetting]:
        """The settings whose errors are the smallest as far as the estimate can tell: it leaves outliers out, so those that replace them, if any do."""
        least = [tried for tried in self.tried if tried.error <= max(TIE * self.best.error, self.best.error)]
        return [tried for tried in least if tried.repairs and self.outliers] or least

    @property
    def suggested(self) -> TriedSetting | None:
        """One of these, if the smallest error is less than that of the noisy crop."""
        tied = sorted(self.tied, key=lambda tried: (tried.setting != self.preferred, tried.error))
        return tied[0] if self.best.error < 1 else None

    @property
    def keeps_more(self) -> TriedSetting | None:
        """A setting of little more error than the best that keeps much more of the faint detail, which hardly counts in the error."""
        if (suggested := self.suggested) is None:
            return None
        near = [tried for tried in self.tried if tried.error <= NEAR * max(self.best.error, 0)]
        most = max(near, key=lambda tried: tried.detail_kept, default=suggested)
        return most if suggested.detail_kept < MUCH_LESS * most.detail_kept else None

    def _repr_html_(self) -> str:
        sheet = ""
        with suppress(MissingPackage):  # the table is shown without Pillow, too
            sheet = f'<img style="max-width: 100%" src="data:image/png;base64,{base64.b64encode(draw(self)).decode()}">'
        return sheet + html_table(rows_of(self))


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


def draw(comparison: Comparison) -> bytes:
    """Return the sheet as PNG: the noisy crop, and each setting's result above its residual."""
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
    return draw_sheet(cells, [*_notes(comparison), *(f"Not shown: {failure}" for failure in failures_of(comparison))])


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
