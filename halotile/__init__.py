"""Denoise and reconstruct images bigger than memory: exact overlapping tiles on Dask, Zarr in, Zarr out.

Examples
--------
Map a function over overlapping blocks of an array; the result is that of the whole image.

>>> import halotile, numpy
>>> image = numpy.arange(12.0).reshape(3, 4)
>>> smooth = halotile.map_overlap(lambda block: block + 1, image, depth=1, boundary="reflect")
>>> float(smooth.compute()[2, 3])
12.0

From disk to disk, for images of any size:

>>> halotile.denoise("noisy.zarr", "clean.zarr", "tv", strength=1.0, sigma="auto")  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from halotile import errors

__version__ = "0.1.0"

if TYPE_CHECKING:
    from halotile import posterior
    from halotile.cli.api import export, info, plan, preview, status, try_settings, validate, verify, view
    from halotile.cli.export import add_levels
    from halotile.graphs.distributed.context import DistributedContext
    from halotile.graphs.distributed.distribute import distribute
    from halotile.graphs.jobs.denoise.call import denoise
    from halotile.graphs.jobs.ptychography import call as ptychography
    from halotile.graphs.jobs.reconstruct.call import measurement, reconstruct
    from halotile.graphs.jobs.samples.call import samples
    from halotile.graphs.jobs.simulate.call import simulate
    from halotile.graphs.jobs.train.call import train
    from halotile.graphs.map_overlap import map_overlap
    from halotile.graphs.subsets import ordered_subset
    from halotile.storage.arrays import open_source
    from halotile.tasks.groups import collectives, torch_group

__all__ = [
    "DistributedContext",
    "add_levels",
    "collectives",
    "denoise",
    "distribute",
    "export",
    "info",
    "map_overlap",
    "measurement",
    "open_source",
    "ordered_subset",
    "plan",
    "posterior",
    "preview",
    "ptychography",
    "reconstruct",
    "samples",
    "simulate",
    "status",
    "torch_group",
    "train",
    "try_settings",
    "validate",
    "verify",
    "view",
]

_PUBLIC = {
    **dict.fromkeys(
        ("export", "info", "plan", "preview", "status", "try_settings", "validate", "verify", "view"),
        "halotile.cli.api",
    ),
    "add_levels": "halotile.cli.export",
    "DistributedContext": "halotile.graphs.distributed.context",
    "distribute": "halotile.graphs.distributed.distribute",
    "denoise": "halotile.graphs.jobs.denoise.call",
    "map_overlap": "halotile.graphs.map_overlap",
    "measurement": "halotile.graphs.jobs.reconstruct.call",
    "open_source": "halotile.storage.arrays",
    "ordered_subset": "halotile.graphs.subsets",
    "reconstruct": "halotile.graphs.jobs.reconstruct.call",
    "samples": "halotile.graphs.jobs.samples.call",
    "simulate": "halotile.graphs.jobs.simulate.call",
    "train": "halotile.graphs.jobs.train.call",
}
_MODULES = ("collectives", "posterior", "ptychography", "torch_group")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: Dask and torch take seconds to load."""
    if name in _PUBLIC or name in _MODULES:
        if sys.platform == "win32":
            raise ImportError(errors.WINDOWS)
        if name in _MODULES:
            return importlib.import_module(f"halotile.{name}")
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'halotile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
