"""The result of a ptychographic reconstruction on one PNG: object, probe, losses, positions and resolution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from halotile.errors import MissingPackage
from halotile.storage.disk.durable import DISK
from halotile.storage.scans.export import Reconstruction

MODES = 4
"""Modes of the probe, at most, that are drawn."""
MICRON = 1e-6


def draw_scan_sheet(path: Path, result: Reconstruction) -> None:
    """Draw a result.

    Raises
    ------
    MissingPackage
        Without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage(
            "the sheet of a result is drawn with matplotlib, which is not installed. Write: pip install matplotlib"
        ) from error
    panels: Mapping[str, Callable[[Any, Reconstruction], None]] = {
        "object, modulus": _modulus,
        "object, phase": _phase,
        "probe, modulus of the modes": _probe,
        "loss": _losses,
        "positions before (grey) and after": _positions,
    }
    if result.rings is not None:
        panels = {**panels, "Fourier ring correlation": _rings}
    figure = Figure(figsize=(15, 9.5), layout="constrained")
    places = list(figure.subplots(2, 3).flat)
    for axes in places:
        axes.set_axis_off()
    for axes, (title, draw) in zip(places, panels.items(), strict=False):
        axes.set_axis_on()
        axes.set_title(title)
        draw(axes, result)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=100)
    DISK.write_file(path, [content.getvalue()])


def _modulus(axes: Any, result: Reconstruction) -> None:
    modulus = np.abs(result.image)
    _draw(axes, modulus, result, "gray", np.percentile(modulus[result.scanned], (0.5, 99.5)))


def _phase(axes: Any, result: Reconstruction) -> None:
    """The phase, with that of the mean as 0: it is known but for a constant."""
    phase = np.angle(result.image * np.conj(result.image[result.scanned].mean()))
    _draw(axes, phase, result, "twilight", np.percentile(phase[result.scanned], (0.5, 99.5)))


def _draw(axes: Any, pixels: Any, result: Reconstruction, colors: str, limits: Any) -> None:
    height, width = result.extent
    drawn = axes.imshow(
        pixels,
        cmap=colors,
        vmin=limits[0],
        vmax=limits[1],
        extent=(0, width, height, 0),
        interpolation="none",
    )
    axes.figure.colorbar(drawn, ax=axes, shrink=0.8)
    axes.set_xlabel("µm")


def _probe(axes: Any, result: Reconstruction) -> None:
    modes = np.abs(result.probe[:MODES])
    drawn = axes.imshow(np.concatenate([mode / mode.max() for mode in modes], 1), cmap="gray")
    power = (np.abs(result.probe) ** 2).sum((1, 2))
    shares = ", ".join(f"{100 * share:.3g} %" for share in power[:MODES] / power.sum())
    axes.set_xlabel(f"shares of the intensity: {shares}")
    axes.set_xticks([])
    axes.set_yticks([])
    drawn.set_interpolation("none")


def _losses(axes: Any, result: Reconstruction) -> None:
    axes.semilogy(np.arange(1, len(result.losses) + 1), result.losses)
    axes.set_xlabel("epoch")
    axes.set_ylabel("mean loss of a pixel")


def _positions(axes: Any, result: Reconstruction) -> None:
    for places, look in ((result.before, {"color": "0.7", "s": 14}), (result.after, {"color": "C0", "s": 5})):
        axes.scatter(places[:, 1] / MICRON, places[:, 0] / MICRON, **look)
    moved = np.linalg.norm(result.after - result.before, axis=1) / result.pixel[0]
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.set_xlabel(f"µm; moved by {np.median(moved):.2g} pixels (median), {moved.max():.2g} (most)")


def _rings(axes: Any, result: Reconstruction) -> None:
    assert result.rings is not None
    frequency = result.rings["ring_frequency"] * MICRON
    axes.plot(frequency, result.rings["ring_correlation"], label="two halves of the positions")
    axes.plot(frequency, result.rings["ring_threshold"], color="0.5", label="1/2 bit")
    axes.axvline(0.5 * MICRON / result.rings["resolution"], color="C1", linewidth=1)
    axes.set_ylim(-0.1, 1.05)
    axes.set_xlabel(f"periods per µm; resolution {1e9 * result.rings['resolution']:.4g} nm")
    axes.legend()
