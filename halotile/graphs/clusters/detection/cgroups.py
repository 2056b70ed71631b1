"""The control groups by which Linux bounds what a process may use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MOUNTED = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def cgroups_of(controller: str) -> Iterator[Path]:
    """Folders of the control groups that bound this process, its own and those around it, of both versions.

    Parameters
    ----------
    controller : str
        The bounded resource: ``cpu`` or ``memory``.
    """
    lines = []
    with suppress(OSError):  # no Linux
        lines = OWN.read_text("utf-8").splitlines()
    for line in lines:
        _, controllers, own = line.split(":", 2)  # version 2 names no controllers
        if not controllers or controller in controllers.split(","):
            root = MOUNTED / controller if controllers else MOUNTED
            yield from (root / str(path).lstrip("/") for path in (Path(own), *Path(own).parents))
