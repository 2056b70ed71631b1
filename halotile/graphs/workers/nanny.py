"""A nanny whose workers do not run the script that started them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

from distributed import Nanny

from halotile.graphs.workers.forks import ensure_forks

NOT_IMPORTED = "__main__"
"""A main module of this name is left alone by processes that multiprocessing starts."""

_guard = threading.Lock()
_held: list[Any] = []


class OwnNanny(Nanny):  # type: ignore[misc]
    """Starts and restarts a worker without the main module.

    A process that multiprocessing spawns imports the main module of its parent. A script without
    ``if __name__ == "__main__":`` would start workers of its own in each worker. Workers need nothing of it: functions
    of a script are pickled by value.
    """

    async def instantiate(self) -> Any:
        """Start the process, and wait until it answers."""
        with script_not_imported():
            ensure_forks()
            return await super().instantiate()


@contextmanager
def script_not_imported() -> Iterator[None]:
    """Processes that are spawned in here do not import the main module; several threads may be in here at once.

    Examples
    --------
    >>> with script_not_imported():
    ...     sys.modules["__main__"].__spec__.name
    '__main__'
    """
    main = sys.modules["__main__"]
    with _guard:
        if not _held:
            known = getattr(main, "__spec__", None)
            main.__spec__ = ModuleSpec(NOT_IMPORTED, None)
        else:
            known = _held[0]
        _held.append(known)
    try:
        yield
    finally:
        with _guard:
            known = _held.pop()
            if not _held:
                main.__spec__ = known
