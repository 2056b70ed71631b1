"""Detection of mounts whose file locks are not visible on other machines."""

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
        Mount point.
    kind : str
        Type, such as ``nfs4``.
    options : frozenset of str
        Mount options.
    """

    point: Path
    kind: str
    options: frozenset[str]


def mount_of(path: Path) -> Mount | None:
    """The mount that contains a path; None when the system does not list its mounts."""
    try:
        lines = MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return None
    resolved = path.resolve()
    mounts = [mount for mount in map(_parse_mount, lines) if mount and resolved.is_relative_to(mount.point)]
    # The last mount at a mount point hides the earlier ones.
    return max(reversed(mounts), key=lambda mount: len(mount.point.parts), default=None)


def _parse_mount(line: str) -> Mount | None:
    """The mount in one line of mountinfo.

    Source: Linux, ``Documentation/filesystems/proc.rst``, section 3.5.

    Examples
    --------
    >>> mount = _parse_mount("36 35 98:0 / /my\\\\040data rw,noatime shared:1 - lustre 10.0.0.1@tcp:/fs rw,localflock")
    >>> str(mount.point), mount.kind, sorted(mount.options)
    ('/my data', 'lustre', ['localflock', 'noatime', 'rw'])
    """
    before, dash, after = line.partition(" - ")
    fields, super_fields = before.split(" "), after.split(" ")
    if not dash or len(fields) < 6 or len(super_fields) < 3:
        return None
    point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields[4])
    return Mount(
        Path(point), super_fields[0], frozenset([*fields[5].split(","), *super_fields[2].split(",")])
    )


def local_lock_reason(path: Path) -> str | None:
    """Explain why other machines do not see the locks of this one, with a remedy; None when no reason is known."""
    mount = mount_of(path)
    if mount is None:
        return None
    name, options = f"{mount.kind} at {mount.point}", mount.options
    if mount.kind == "lustre" and "localflock" in options:
        return f"{name} is mounted with localflock: mount it with flock"
    if mount.kind.startswith("nfs"):
        for option in ("nolock", "local_lock=all", "local_lock=flock"):
            if option in options:
                return f"{name} is mounted with {option}: mount it without"
    if mount.kind == "beegfs" and not _has_global_beegfs_locks(options):
        return (
            f"{name} is not known to have tuneUseGlobalFileLocks = true in its client's configuration: set it"
        )
    return None


def _has_global_beegfs_locks(options: frozenset[str]) -> bool:
    """Return True when the BeeGFS client configuration that the mount names has global file locks."""
    file = next((option.partition("=")[2] for option in options if option.startswith("cfgFile=")), "")
    try:
        return bool(_GLOBAL_ON_BEEGFS.search(Path(file).read_text("utf-8")))
    except OSError:
        return False
