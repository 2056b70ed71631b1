"""A ptychographic scan as a table; a scan, and its reconstruction, each on one PNG."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.cli.screens.screen import echo, print_rows
from halotile.graphs.kinds.base import Row
from halotile.graphs.words import counted, shape_text
from halotile.registry import optional
from halotile.storage.disk.durable import DISK
from halotile.storage.disk.place import outside_zarr
from halotile.storage.lengths import shown_length, shown_resolution
from halotile.storage.scans.formats import knows_scan, opened_scan
from halotile.storage.scans.scan import OPTIONAL, Scan, ScanResult, is_scan, open_scan, reading

Panels = Mapping[str, Callable[..., None]]  # functions that draw on axes, by the title of those
MODES = 4  # modes of the probe, at most, that are drawn
MICRON = 1e-6
MOST_NOISE = 5  # largest difference of two patterns that is drawn, in units of the noise of photons
MOST_LETTERS = 56  # letters of a line below a panel


def draw_result(path: Path, result: ScanResult) -> None:
    """Draw a result; errors as of :func:`draw_scan`."""
    panels: Panels = {
        "object, modulus": _modulus,
        "object, phase": _phase,
        "probe, modulus of the modes": _probe,
        **_comparisons(result),
        "loss": _losses,
        "positions before (grey) and after": _positions,
    }
    if result.rings is not None:
        panels = {**panels, "Fourier ring correlation": _rings}
    heights = (1.0, 1.0) if result.compared is None else (1.0, 0.5, 1.0)
    _draw_panels(path, {title: partial(draw, result=result) for title, draw in panels.items()}, heights)


def draw_scan(path: Path, scan: Scan, mean: NDArray[Any], maximum: NDArray[Any]) -> None:
    """Draw the map of a scan, and the mean and the maximum of its patterns."""
    panels = {
        "places of the beam on the sample": partial(_map, scan=scan),
        "mean pattern": partial(_pattern, image=mean, mask=scan.mask),
        "maximum of each pixel": partial(_pattern, image=maximum, mask=scan.mask),
    }
    _draw_panels(path, panels, (1.0,))


def _draw_panels(path: Path, panels: Panels, heights: Sequence[float]) -> None:
    """Draw three panels in each row, of relative heights."""
    drawing = optional("a sheet is drawn with matplotlib", "matplotlib.figure", "matplotlib")
    figure = drawing.Figure(figsize=(15, 4.75 * sum(heights)), layout="constrained")
    places = list(figure.subplots(len(heights), 3, height_ratios=heights).flat)
    for axes in places:
        axes.set_axis_off()
    for axes, (title, draw) in zip(places, panels.items(), strict=False):
        axes.set_axis_on()
        axes.set_title(title)
        draw(axes)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=100)
    DISK.write_file(path, [content.getvalue()])


def _map(axes: Any, scan: Scan) -> None:
    rows, columns = scan.positions.T / MICRON
    drawn = axes.scatter(columns, rows, c=scan.numbers, s=9)
    axes.plot(columns[scan.numbers.argmin()], rows[scan.numbers.argmin()], "rx")
    axes.figure.colorbar(drawn, ax=axes, shrink=0.8, label="number of the pattern")
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.set_xlabel("µm; x: the first one")


def _pattern(axes: Any, image: NDArray[Any], mask: NDArray[np.bool_] | None) -> None:
    """A pattern by its logarithm; pixels that do not count are red."""
    shown = np.ma.masked_array(image, np.ma.nomask if mask is None else ~mask)
    positive = shown[shown > 0]
    low, high = (positive.min(), positive.max()) if positive.count() else (1, 10)
    drawn = axes.imshow(np.ma.log10(shown.clip(low)), cmap=_with_red(), vmin=np.log10(low), vmax=np.log10(high))
    axes.figure.colorbar(drawn, ax=axes, shrink=0.8, label="log10 of counts")
    rows, columns = image.shape
    axes.plot(columns // 2, rows // 2, "+", color="C1")
    axes.set_xlabel("pixels; +: the middle; red: does not count")


def _with_red(colours: str = "viridis") -> Any:
    from matplotlib import colormaps

    return colormaps[colours].with_extremes(bad="red")


def _modulus(axes: Any, result: ScanResult) -> None:
    modulus = np.abs(result.image)
    _draw(axes, modulus, result, np.percentile(modulus[result.scanned], (0.5, 99.5)))


def _phase(axes: Any, result: ScanResult) -> None:
    """The phase, with that of the mean as 0: it is known but for a constant."""
    phase = np.angle(result.image * np.conj(result.image[result.scanned].mean()))
    _draw(axes, phase, result, np.percentile(phase[result.scanned], (0.5, 99.5)), label="radians")


def _draw(axes: Any, pixels: Any, result: ScanResult, limits: Any, label: str = "") -> None:
    height, width = result.extent
    drawn = axes.imshow(
        pixels, cmap="gray", vmin=limits[0], vmax=limits[1], extent=(0, width, height, 0), interpolation="none"
    )
    axes.figure.colorbar(drawn, ax=axes, shrink=0.8, label=label)
    axes.set_xlabel("µm")


def _probe(axes: Any, result: ScanResult) -> None:
    modes = np.abs(result.probe[:MODES])
    drawn = axes.imshow(np.concatenate([mode / (mode.max() or 1) for mode in modes], 1), cmap="gray")
    power = (np.abs(result.probe) ** 2).sum((1, 2))
    shares = ", ".join(f"{100 * share:.3g} %" for share in power[:MODES] / power.sum())
    axes.set_xlabel(f"shares of the intensity: {shares}\neach by its own brightest pixel")
    axes.set_xticks([])
    axes.set_yticks([])
    drawn.set_interpolation("none")


def _losses(axes: Any, result: ScanResult) -> None:
    axes.semilogy(np.arange(1, len(result.losses) + 1), result.losses)
    axes.set_xlabel("epoch")
    axes.set_ylabel("mean loss of a pixel")


def _positions(axes: Any, result: ScanResult) -> None:
    for places, look in ((result.before, {"color": "0.7", "s": 14}), (result.after, {"color": "C0", "s": 5})):
        axes.scatter(places[:, 1] / MICRON, places[:, 0] / MICRON, **look)
    moved = np.linalg.norm(result.after - result.before, axis=1) / result.pixel[0]
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.set_xlabel(f"µm; moved by {np.median(moved):.2g} pixels (median), {moved.max():.2g} (most)")


def _comparisons(result: ScanResult) -> Panels:
    """A panel for each pattern that is compared."""
    if result.compared is None:
        return {}
    kinds = zip(("smallest", "median", "largest"), result.compared.numbers, result.compared.loss, strict=True)
    return {
        f"pattern {number}, {kind} amplitude_mse: {loss:.3g}": partial(_comparison, n=n)
        for n, (kind, number, loss) in enumerate(kinds)
    }


def _comparison(axes: Any, result: ScanResult, n: int) -> None:
    """A measured pattern, the simulated one, and their difference in units of the noise of photons."""
    assert result.compared is not None
    measured, simulated = (np.sqrt(image[n]) for image in (result.compared.measured, result.compared.simulated))
    rows, columns = measured.shape
    most = np.nanpercentile(measured, 99.5) or 1.0
    pitch = columns + max(1, columns // 16)  # with a gap between the images
    # The root of a count of photons has a standard deviation of about 1/2.
    for n, image in enumerate((measured, simulated, 2 * (measured - simulated))):
        low, high, colours = (-MOST_NOISE, MOST_NOISE, "RdBu") if n == 2 else (0, most, "viridis")
        extent = (n * pitch, n * pitch + columns, rows, 0)
        drawn = axes.imshow(image, cmap=_with_red(colours), vmin=low, vmax=high, extent=extent)
        if n:
            # Below the two patterns, whose scale is one, and below their difference.
            left, label = (0, "root of counts") if n == 1 else (2 * pitch, "photon noise")
            across, width = 2 * pitch + columns, n % 2 * pitch + columns
            bar = axes.inset_axes((left / across, -0.28, width / across, 0.07))
            ticks = None if n == 1 else (1 - MOST_NOISE, 0, MOST_NOISE - 1)
            axes.figure.colorbar(drawn, cax=bar, orientation="horizontal", label=label, ticks=ticks)
    axes.set(xlim=(0, 2 * pitch + columns), yticks=[], frame_on=False)
    axes.set_xticks(pitch * np.arange(3) + columns / 2, ("measured", "simulated", "difference"))
    axes.tick_params(length=0)


def _rings(axes: Any, result: ScanResult) -> None:
    assert result.rings is not None
    frequency = result.rings["ring_frequency"] * MICRON
    axes.plot(frequency, result.rings["ring_correlation"], label="two halves of the positions")
    axes.plot(frequency, result.rings["ring_threshold"], color="0.5", label="1/2 bit")
    if not result.rings.get("resolution_bound", 0):
        axes.axvline(0.5 * MICRON / result.rings["resolution"], color="C1", linewidth=1, label="resolution")
    axes.set_ylim(min(-0.1, 1.1 * result.rings["ring_correlation"].min()), 1.05)
    resolution = shown_resolution(result.rings["resolution"], result.rings.get("resolution_bound", 0))
    # What a bound means has no room in the line of the unit, and as "worse than" not in one of its own.
    axes.set_xlabel(f"periods per µm\n{fill(f'resolution {resolution}', MOST_LETTERS)}")
    axes.legend()


JOB = """version: 1
job: ptychography
input: {{path: {path}}}
output: {{path: {result}}}
model: {{field: far}} # or {{field: near, focus: 3.65 mm}}: the distance from the focus of the beam to the sample"""


@dataclass(frozen=True)
class ScanFacts:
    """Facts about a scan in a file or in a Zarr."""

    path: str
    scan: Scan
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def from_file(cls, path: str) -> ScanFacts | None:
        """The facts of a scan; None where there is none."""
        if is_scan(path):
            scan, patterns = open_scan(path)
            return cls(path, scan, patterns.shape, patterns.dtype.name)
        if not knows_scan(path):
            return None
        with opened_scan(path) as found, reading(path):
            first = found.patterns[:1, :, :]
            return cls(path, found.scan, found.patterns.shape, first.dtype.name)

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON values; lengths are in metres."""
        scan = self.scan
        return {
            "path": self.path,
            "patterns": self.shape[0],
            "pattern": list(self.shape[1:]),
            "dtype": self.dtype,
            "bytes": math.prod(self.shape) * np.dtype(self.dtype).itemsize,
            "scanned": np.ptp(scan.positions, axis=0).tolist(),
            "wavelength": scan.wavelength,
            "distance": scan.distance,
            "pixel": list(scan.pixel),
            "full": scan.full,
            "left_out": 0 if scan.mask is None else int((~scan.mask).sum()),
            "remarks": [f"{label}: {text}" for label, text in scan.remarks],
            "has": [name for name in OPTIONAL if getattr(scan, name) is not None],
        }

    def rows(self) -> list[Row]:
        """The facts as a table."""
        facts = self.to_json()
        (height, width), pixel = facts["scanned"], [value * 1e6 for value in facts["pixel"]]
        has = [name for name in facts["has"] if name != "mask"]
        full = f", {facts['full']:,} since they reach the largest number of their type" if facts["full"] else ""
        rows = [
            ("patterns", f"{facts['patterns']:,} of {shape_text(facts['pattern'])}, {self.dtype}"),
            ("scanned", f"{shown_length(height)} × {shown_length(width)}"),
            ("wavelength", f"{facts['wavelength'] * 1e9:.5g} nm"),
        ]
        if self.scan.angles:
            rows.append(("pixels", f"{pixel[0] / 1e3:.4g} × {pixel[1] / 1e3:.4g} mrad"))
        else:
            rows.append(("distance", f"{facts['distance']:.5g} m to the detector"))
            rows.append(("pixels", f"{pixel[0]:.4g} × {pixel[1]:.4g} µm on the detector"))
        if "mask" in facts["has"] or full:
            rows.append(("mask", f"{counted(facts['left_out'], 'pixel')} of the detector left out{full}"))
        return [*rows, *([("also", ", ".join(has))] if has else []), *self.scan.remarks]

    def show(self) -> None:
        """Print the facts, and the next step."""
        print_rows(self.path, self.rows())
        echo(f"\n{self.next_step()}")

    def next_step(self) -> str:
        """Say what to do with it."""
        stem = outside_zarr(os.path.splitext(self.path.rstrip("/"))[0])
        if not is_scan(self.path):
            return f"To reconstruct it, store it as a Zarr: recon-cli convert {self.path} {stem}.zarr"
        job = JOB.format(path=self.path, result=f"{stem}.result.cxi")
        return f"To reconstruct it, write this to config.yaml and type `recon-cli run config.yaml`:\n\n{job}"
