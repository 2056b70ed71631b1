"""A name for everything that decides on the last bits of what this process computes."""

from __future__ import annotations

import functools
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LEVELS = {"avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "asimd": "NEON"}
"""Vector instruction sets by CPU flag, the widest first."""
LIMITS = (
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES",
)  # fmt: skip
"""Environment variables that keep a library from using the widest one."""
LIBRARIES = ("torch", "numpy", "scipy")
_CPUS = Path("/proc/cpuinfo")
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")


@functools.cache
def cpu_kind() -> str:
    """CPU model, its vector instructions and L2 cache, and versions of the numerical libraries.

    Libraries choose the order of sums by all of these: two workers that differ in one may round differently.

    Examples
    --------
    >>> "torch 2" in cpu_kind()
    True
    """
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if os.environ.get(name)]
    return ", ".join([*_cpu(), *limits, *filter(None, map(_library, LIBRARIES))])


def _cpu() -> list[str]:
    """Maker, family and model rather than the name, which includes the clock rate."""
    facts = dict(_facts())
    if not facts:
        return [platform.processor() or platform.machine()]
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    level = next((word for flag, word in LEVELS.items() if flag in flags), "no vectors known")
    keys = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    parts = [" ".join(facts[key] for key in keys if key in facts), level]
    return [*parts, f"L2 {_CACHE.read_text('utf-8').strip()}"] if _CACHE.exists() else parts


def _facts() -> list[tuple[str, str]]:
    """The entries of /proc/cpuinfo for the first CPU."""
    if not _CPUS.exists():
        return []
    lines = _CPUS.read_text("utf-8").split("\n\n")[0].splitlines()
    return [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]


def _library(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return ""
