"""The environment that workers start in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from halotile.errors import ConfigError
from halotile.storage.cache import user_cache

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
