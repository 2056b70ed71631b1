"""The environment that workers start in, and Dask's settings, in the driver and in workers on other machines alike."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from halotile.errors import ConfigError
from halotile.storage.cache import user_cache

# Start method of multiprocessing for workers. Elsewhere there are system libraries that do not survive a fork.
METHOD = "forkserver" if sys.platform == "linux" else "spawn"
ALLOCATOR_ENVIRONMENT = {
    # Convolution layers allocate and free large activations over and over. With these the memory stays in
    # the process instead of being mapped anew each time: 1.6 times faster end to end on a small CNN.
    "MALLOC_MMAP_THRESHOLD_": str(4 * 1024**3),
    "MALLOC_TRIM_THRESHOLD_": str(8 * 1024**3),
    "MALLOC_TOP_PAD_": str(256 * 1024**2),
    # One heap for all threads: growth with the size of the image falls from 170 MB to 26 MB.
    "MALLOC_ARENA_MAX": "1",
}
WORKER_ENVIRONMENT = ALLOCATOR_ENVIRONMENT | {
    # One thread for each worker; more of them fight over the cores.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # Numbers of GPUs as NVML counts them; CUDA's own order begins with the fastest.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}


def keep_compiled_code_at_home() -> None:
    """Have torch keep compiled code in the user's cache: by default it trusts a folder of ``$TMPDIR``, whoever made it."""
    with suppress(ConfigError):  # without a home, torch's default stays
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(user_cache() / "torchinductor"))


@contextmanager
def own_environment() -> Iterator[None]:
    """An environment for processes that start in the context; this process gets its own back at the end.

    Dask's nanny writes the environment meant for workers into the process that starts them.
    """
    before = dict(os.environ)
    keep_compiled_code_at_home()
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


PREFIX = "halotile-scratch-"
_DASK_FOLDER = "dask-scratch-space"  # part of the path of each folder that Dask makes for a server


@contextmanager
def private_scratch() -> Iterator[str]:
    """A folder of mode 0700 in ``$TMPDIR`` for the servers that start in the context, whatever Dask's configuration says.

    Dask's own, ``$TMPDIR/dask-scratch-space``, belongs to whoever makes it first.
    """
    import dask

    from halotile.graphs.clusters.common.security import owned_folder  # with tornado, which most commands do without

    with (
        owned_folder(Path(tempfile.gettempdir()), PREFIX) as folder,
        dask.config.set({"temporary-directory": str(folder)}),
    ):
        yield str(folder)


@contextmanager
def own_servers(settings: dict[str, Any]) -> Iterator[None]:
    """The environment, Dask's settings and the scratch folder of the servers that start in the context."""
    import dask
    from distributed.utils import silence_logging_cmgr

    with own_environment(), dask.config.set(settings), private_scratch(), silence_logging_cmgr(SILENT):
        yield


def keep_off_path() -> None:
    """Remove the folders of Dask's servers from ``sys.path``, where Dask puts them first."""
    sys.path[:] = [place for place in sys.path if _DASK_FOLDER not in str(place)]


SETTINGS: dict[str, Any] = {
    "distributed.scheduler.worker-saturation": "inf",
    # Interval at which an idle worker takes tasks that wait at a slow one.
    "distributed.scheduler.work-stealing-interval": "200ms",
    "distributed.comm.timeouts.connect": "30s",
    # Other users of the machine can read the pages on loopback: no logs, and no lines of anybody's source.
    "distributed.scheduler.http.routes": [
        "distributed.http.scheduler.prometheus",
        "distributed.http.health",
        "distributed.http.statics",
    ],
    "distributed.worker.http.routes": [],
    # Dask's memory of past tasks: a million of them pass through.
    "distributed.admin.low-level-log-length": 100,
    "distributed.diagnostics.computations.max-history": 2,
    # Blocks hold no results on workers: nothing to spill, and pausing would only stall the stream.
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": 0.98,
    "distributed.nanny.pre-spawn-environ": WORKER_ENVIRONMENT,
    # Dask samples itself 50 to 100 times a second in every process: on few cores that is taken from the computation.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "2s",
    "distributed.worker.memory.monitor-interval": "200ms",
}

# Settings for workers on this machine.
LOCAL_SETTINGS = SETTINGS | {
    # A worker that is not back by then is given up for good, also one that died again only just now.
    "distributed.deploy.lost-worker-timeout": "365 days",
    "distributed.worker.multiprocessing-method": METHOD,
    # Variables that a worker would inherit from the process that it is forked from; the user's environment takes precedence.
    "distributed.nanny.environ": {"PYTHONPATH": "", "PYTHONSAFEPATH": ""},
}

# Level of Dask's messages until its event loop has ended: its clusters set it back before their last messages are sent, which
# log tracebacks where a worker has died.
SILENT = 50
