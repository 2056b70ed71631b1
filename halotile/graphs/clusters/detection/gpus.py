"""The GPUs of this machine, as NVML lists them: CUDA itself is not initialised, since processes forked later could not use it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass

from halotile.errors import ConfigError
from halotile.graphs.amounts import counted
from halotile.graphs.kinds.sections import Cluster, Run
from halotile.graphs.words import shown

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


def chosen(cluster: Cluster, here: Gpus | None = None) -> tuple[str, ...]:
    """Return the GPUs of this machine that a cluster section names, as CUDA_VISIBLE_DEVICES has them.

    Raises
    ------
    ConfigError
        Where there is no GPU, or not the one that is asked for.

    Examples
    --------
    >>> two = Gpus(("0", "1"))
    >>> chosen(Cluster(), two), chosen(Cluster(gpus=1), two), chosen(Cluster(gpus=(1,)), two)
    (('0', '1'), ('0',), ('1',))
    >>> chosen(Cluster(gpus=(0, 2)), two)
    Traceback (most recent call last):
    halotile.errors.ConfigError: cluster.gpus is [0, 2], and there are 2 GPUs here. Write gpus: all, or how many, or which of them as a list, counted from 0.
    """
    here = here or gpus_here()
    if not here.names:
        raise ConfigError(
            f"cluster.kind is local-cuda, and there is no GPU here: {here.why_none}. Write kind: local to compute on CPUs."
        )
    requested = cluster.gpus
    if requested in (0, "all"):
        return here.names
    places = (
        tuple(range(requested))
        if isinstance(requested, int)
        else tuple(index for index in requested if isinstance(index, int))
    )
    if not places or max(places) >= len(here.names):
        count = counted(len(here.names), "GPU")
        raise ConfigError(
            f"cluster.gpus is {shown(requested)}, and there {'is' if len(here.names) == 1 else 'are'} {count} here. Write gpus: all, "
            "or how many, or which of them as a list, counted from 0."
        )
    return tuple(dict.fromkeys(here.names[index] for index in places))


def requested_by(run: Run, cluster: Cluster) -> str:
    """Return the key and value of a job that ask for GPUs.

    Examples
    --------
    >>> requested_by(Run(device="cuda"), Cluster()), requested_by(Run(), Cluster(gpus=1))
    ('run.device is cuda', 'cluster.gpus is 1')
    """
    return "run.device is cuda" if run.device == "cuda" else f"cluster.gpus is {shown(cluster.gpus)}"
