"""What the mounts of this machine say of locks: on some file systems those of one machine are not seen on another."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
_GLOBAL_ON_BEEGFS = re.compile(r"^\s*tuneUseGlobalFileLocks\s*=\s*true\s*$", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Mount:
    """A mounted file system.

    Parameters
    ----------
    point : Path
        Where it is mounted.
    kind : str
        Its type, such as ``nfs4``.
    options : frozenset of str
        How it is mounted.
    """

    point: Path
    kind: str
    options: frozenset[str]


def mount_of(path: Path) -> Mount | None:
    """The mount that a path lies on; None where the system does not tell."""
    try:
        lines = MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return None
    whole = path.resolve()
    # The last one counts: it lies over the others at the same place.
    around = [mount for mount in map(_mount, lines) if mount and whole.is_relative_to(mount.point)]
    return max(reversed(around), key=lambda mount: len(mount.point.parts), default=None)


def _mount(line: str) -> Mount | None:
    """One line of mountinfo.

    Source: Linux, ``Documentation/filesystems/proc.rst``, section 3.5.

    Examples
    --------
    >>> mount = _mount("36 35 98:0 / /my\\\\040data rw,noatime shared:1 - lustre 10.0.0.1@tcp:/fs rw,localflock")
    >>> str(mount.point), mount.kind, sorted(mount.options)
    ('/my data', 'lustre', ['localflock', 'noatime', 'rw'])
    """
    before, dash, after = line.partition(" - ")
    own, theirs = before.split(" "), after.split(" ")
    if not dash or len(own) < 6 or len(theirs) < 3:
        return None
    point = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), own[4])
    return Mount(Path(point), theirs[0], frozenset([*own[5].split(","), *theirs[2].split(",")]))


def why_locks_are_local(path: Path) -> str | None:
    """Why another machine does not see the locks of this one, and what to do about it; None where it does, as far as is known."""
    mount = mount_of(path)
    if mount is None:
        return None
    place, options = f"{mount.kind} at {mount.point}", mount.options
    if mount.kind == "lustre" and "localflock" in options:
        return f"{place} is mounted with localflock: mount it with flock"
    if mount.kind.startswith("nfs"):
        for option in ("nolock", "local_lock=all", "local_lock=flock"):
            if option in options:
                return f"{place} is mounted with {option}: mount it without"
    if mount.kind == "beegfs" and not _beegfs_locks(options):
        return f"{place} is not known to have tuneUseGlobalFileLocks = true in its client's configuration: set it"
    return None


def _beegfs_locks(options: frozenset[str]) -> bool:
    """Whether the configuration of BeeGFS's client, which the mount names, has locks that all machines see."""
    file = next((option.partition("=")[2] for option in options if option.startswith("cfgFile=")), "")
    try:
        return bool(_GLOBAL_ON_BEEGFS.search(Path(file).read_text()))
    except OSError:
        return False
