"""The GPUs of this machine, as NVML lists them: CUDA itself is not initialised, since processes forked later could not use it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass

PACKAGE = "dask_cuda"
INSTALL = "pip install 'halotile[cuda]'"
_HIDDEN = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs that workers may use.

    Parameters
    ----------
    names : tuple of str
        Their names in CUDA_VISIBLE_DEVICES: numbers, or UUIDs.
    why_none : str
        The reason in a few words why there is none; empty where there is one.
    """

    names: tuple[str, ...] = ()
    why_none: str = ""


def gpus_here(environment: Mapping[str, str] = os.environ) -> Gpus:
    """The GPUs that this process may use.

    Examples
    --------
    >>> gpus_here({"CUDA_VISIBLE_DEVICES": ""}).why_none
    'CUDA_VISIBLE_DEVICES shows none'
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in _HIDDEN:
        return Gpus(why_none="CUDA_VISIBLE_DEVICES shows none")
    count, why = _counted()
    if not count:
        return Gpus(why_none=why)
    if visible is None:
        return Gpus(tuple(str(number) for number in range(count)))
    names = shown_by(visible, count)
    return Gpus(names, "" if names else f"CUDA_VISIBLE_DEVICES is {visible!r}, which shows none of {count}")


def shown_by(visible: str, count: int) -> tuple[str, ...]:
    """The GPUs out of ``count`` that CUDA_VISIBLE_DEVICES shows: numbers or UUIDs, up to the first that names none.

    Source: NVIDIA, "CUDA C++ Programming Guide", CUDA environment variables.

    Examples
    --------
    >>> shown_by("1,0", 2), shown_by("0,7,1", 2), shown_by("GPU-84fd49f2", 2), shown_by("all", 2)
    (('1', '0'), ('0',), ('GPU-84fd49f2',), ())
    """
    names: dict[str, None] = {}
    for name in map(str.strip, visible.split(",")):
        if not name.startswith(("GPU-", "MIG-")) and not (name.isdigit() and int(name) < count):
            break
        names[name] = None
    return tuple(names)


def has_dask_cuda() -> bool:
    """Return True if the package that starts a worker for each GPU is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def _counted() -> tuple[int, str]:
    """Number of GPUs that NVML lists, and the reason why none."""
    try:
        import pynvml
    except ImportError:
        return 0, "none can be found (nvidia-ml-py is not installed)"
    try:
        pynvml.nvmlInit()
        try:
            count = int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except getattr(pynvml, "NVMLError_LibraryNotFound", ()):
        return 0, "there is no NVIDIA driver"
    except pynvml.NVMLError as error:
        return 0, f"NVML finds none ({error})"
    return count, "" if count else "NVML finds none"
