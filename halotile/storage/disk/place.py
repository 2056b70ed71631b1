"""Path checks for inputs, outputs and run directories."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryFile

import psutil

from halotile.errors import HalotileError, OutputRefused
from halotile.storage.disk.durable import PARTIAL
from halotile.storage.disk.object_path import ObjectPath, OutputPath, path_of

_GLOBAL_ON_BEEGFS = re.compile(r"^\s*tuneUseGlobalFileLocks\s*=\s*true\s*$", re.MULTILINE | re.IGNORECASE)
_LOCAL_ON_NFS = ("nolock", "local_lock=all", "local_lock=flock")


def local_lock_reason(path: Path) -> str | None:
    """Explain why other machines do not see the locks of this one, with a remedy; None when no reason is known."""
    resolved = path.resolve()
    mounts = [one for one in psutil.disk_partitions(all=True) if resolved.is_relative_to(one.mountpoint)]
    if not mounts:
        return None
    # The last mount at a mount point hides the earlier ones.
    mount = max(reversed(mounts), key=lambda one: len(Path(one.mountpoint).parts))
    kind, options = mount.fstype, mount.opts.split(",")
    name = f"{kind} at {mount.mountpoint}"
    if kind == "lustre" and "localflock" in options:
        return f"{name} is mounted with localflock: mount it with flock"
    if kind.startswith("nfs") and (local := next((one for one in _LOCAL_ON_NFS if one in options), None)):
        return f"{name} is mounted with {local}: mount it without"
    if kind == "beegfs" and not _has_global_beegfs_locks(options):
        return f"{name} is not known to have tuneUseGlobalFileLocks = true in its client's configuration: set it"
    return None


def _has_global_beegfs_locks(options: Sequence[str]) -> bool:
    """Return True when the BeeGFS client configuration that the mount names has global file locks."""
    file = next((option.partition("=")[2] for option in options if option.startswith("cfgFile=")), "")
    try:
        return bool(_GLOBAL_ON_BEEGFS.search(Path(file).read_text("utf-8")))
    except OSError:
        return False


ZARR_JSON = "zarr.json"
ZARR_FILES = (ZARR_JSON, ".zgroup", ".zarray")  # metadata files; every Zarr has one of them at its root


def outside_zarr(path: str) -> str:
    """Return a path for something that is made of the one given: beside the outermost Zarr that has it, with its names joined by dots.

    >>> outside_zarr("scans/a.npy")
    'scans/a.npy'
    """
    whole = Path(os.path.abspath(path))
    zarrs = [*takewhile(lambda folder: any((folder / name).is_file() for name in ZARR_FILES), whole.parents)]
    if "://" in path or (not zarrs and whole.name == os.path.basename(path)):
        return path
    top = [whole, *zarrs][-1]
    return str(top.parent / ".".join((top.name, *whole.relative_to(top).parts)))


def broken_link(path: str | os.PathLike[str]) -> str:
    """Describe the broken symlink in a path; empty when there is none.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "scans").symlink_to("moved")
    >>> broken_link(folder / "scans" / "a.npy").removeprefix(f"{folder}/")
    'scans is a link to moved, where nothing is'
    >>> broken_link(folder / "a.npy")
    ''
    """
    whole = Path(path)
    for part in (whole, *whole.parents):
        if os.path.exists(part):
            return ""
        if os.path.islink(part):
            return f"{part} is a link to {os.readlink(part)}, where nothing is"
    return ""


def check_path(path: str | OutputPath, key: str = "output.path") -> None:
    """Refuse an output path that resolves to another path through a symlink, or that cannot be created.

    ``path``: path as written: making it absolute would lose a `..` behind a symlink; ``key``: key of the path in the job.
    """
    root = path_of(path)
    if isinstance(root, Path) and root.is_symlink():
        raise OutputRefused(f"{key} is {root}, a symlink to {os.readlink(root)}. Write where it leads.")
    check_parents(root, key)
    if array := next(filter(is_array, root.parents), None):
        raise OutputRefused(
            f"{key} is {root}: {array} is a Zarr array, and everything in its folder belongs to it. "
            "Write a path beside it."
        )
    check_dots(root, key)


def check_dots(path: str | OutputPath, key: str = "output.path") -> None:
    """Refuse a path with ``..`` behind a symlink: made absolute, it would be another one."""
    if isinstance(path := path_of(path), ObjectPath):
        return
    if os.path.realpath(path) != os.path.realpath(os.path.abspath(path)):
        raise OutputRefused(
            f"{key} is {path}: behind a symlink, its .. leads to {os.path.realpath(path)}. Write that path."
        )


def check_parents(path: str | OutputPath, key: str = "output.path", *, may_make: bool = False) -> None:
    """Refuse a path that cannot be created, because its parent is no folder, does not exist, or is not writable.

    With ``may_make`` the parent may be a folder that is to be made in one that exists.
    """
    root = path_of(path)
    if isinstance(root, ObjectPath):
        check_reachable(root, key)
        return
    if not root.name:
        raise OutputRefused(f"{key} is {root}: the path names no output. Write a name in that folder.")
    for parent in root.parents:
        if not os.path.lexists(parent) or parent.is_dir():
            continue
        # This includes a symlink that is broken or part of a loop.
        what = "a symlink that leads to no directory" if parent.is_symlink() else "a file"
        raise OutputRefused(f"{key} is {root}: {parent} is {what}, so nothing can be made in it. Write another path.")
    folder = root.parent.parent if may_make and not root.parent.is_dir() else root.parent
    # A misspelt folder must not be created: it could fill a disk unnoticed.
    if not folder.is_dir():
        raise OutputRefused(
            f"{key} is {root}: there is no folder {root.parent}. "
            f"Make it first (mkdir -p {shlex.quote(str(root.parent))}), or write another path."
        )
    if not os.path.lexists(root) and not os.access(folder, os.W_OK | os.X_OK):
        raise OutputRefused(f"{key} is {root}: you may not write in {folder}. Write a path in a folder of your own.")


def check_apart(source: OutputPath, output: OutputPath, key: str = "output.path") -> None:
    """Refuse an output that is the input, is inside it, or contains it."""
    read, written = source.resolve(), output.resolve()
    if read == written:
        raise OutputRefused(f"{key} is {output}: that is the input. Write another path.")
    if read in written.parents:
        raise OutputRefused(f"{key} is {output}: that is inside the input {read}. Write it elsewhere.")
    if written in read.parents:
        raise OutputRefused(f"{key} is {output}: the input {read} is inside it. Write it elsewhere.")


def check_reachable(place: OutputPath, key: str = "output.path") -> None:
    """Refuse a place in a store that does not answer, has no such bucket, or does not let this user look."""
    try:
        if isinstance(place, ObjectPath):
            place.is_dir()
    except OSError as error:
        raise OutputRefused(
            f"{key} is {place}: {error.strerror}. Write a place that exists and that you may list, read and write; credentials, region and "
            "endpoint are in the environment, such as AWS_ACCESS_KEY_ID, AWS_REGION and AWS_ENDPOINT_URL; AWS_ALLOW_HTTP=true for an endpoint without TLS."
        ) from error


@contextmanager
def refusing_silence() -> Iterator[None]:
    """Raise errors of a store that does not answer, or denies what is asked, as refusals of the output."""
    try:
        yield
    except OSError as error:
        if isinstance(error, HalotileError) or "://" not in str(error.filename):
            raise
        raise OutputRefused(
            f"{error.filename}: {error.strerror}. What is done stays done: when the store answers and permits it, run again."
        ) from error


def check_access(directory: Path) -> None:
    """Refuse a run directory that this user may not enter: run directories are private to their owners."""
    if directory.is_dir() and not os.access(directory, os.R_OK | os.X_OK):
        raise OutputRefused(
            f"{directory} is closed to user {os.geteuid()}: user {directory.stat().st_uid} made it. Ask that user, or write another "
            "output.path."
        )


def check_owner(directory: Path) -> None:
    """Refuse a run directory that another user created, who could control the run; a missing one is accepted."""
    if not directory.exists() or (owner := directory.stat().st_uid) == os.geteuid():
        return
    # Some file systems report one owner for everything that a machine creates.
    with suppress(PermissionError), TemporaryFile(dir=directory) as file:
        if os.fstat(file.fileno()).st_uid == owner:
            return
    raise OutputRefused(
        f"{directory} is where this run would keep its journal, and another user (number {owner}) made it, who could control "
        "the run. Move it away, or write another output.path."
    )


def is_array(folder: OutputPath) -> bool:
    """Return True for a Zarr array. A group may contain other files."""
    if (folder / ".zarray").is_file():
        return True
    try:
        return bool(json.loads((folder / ZARR_JSON).read_bytes()).get("node_type") == "array")
    except (OSError, ValueError, AttributeError):
        return False


def check_place(
    path: str | OutputPath,  # path as written
    *,
    overwrite: bool,  # true: an existing Zarr may be removed. Anything that is not a Zarr may not
    # key, remedy: key of the path in the job, and the option that permits replacement
    key: str = "output.path",
    remedy: str = "output.overwrite: true",
    # true: everything there is known to belong to a run, even without Zarr metadata files
    may_lack_metadata: bool = False,
    is_file: bool = False,  # true: the output is a file, which may replace a file only
) -> None:
    """Refuse a path where no output can be created; nothing is changed."""
    root = path_of(path)
    check_path(root, key)
    if not root.exists():
        return
    if not is_file:
        _check_removable(root, key, may_lack_metadata)
    elif isinstance(root, Path) and not root.is_file():
        raise OutputRefused(f"{key} is {root}: it is a folder, and the output is a file. Write another path.")
    if not overwrite:
        raise OutputRefused(f"{key} is {root}: it already exists. Write another path, or {remedy}.")


def _check_removable(root: OutputPath, key: str, may_lack_metadata: bool) -> None:
    """Refuse to remove anything but a Zarr without foreign files."""
    if isinstance(root, Path):
        _check_not_home(root, key)
    if not root.is_dir():
        raise OutputRefused(f"{key} is {root}: it is a file, not a Zarr. Write another path.")
    is_known = may_lack_metadata or any((root / name).is_file() for name in ZARR_FILES)
    entries = os.listdir(root) if isinstance(root, Path) else root.objects()
    if not is_known and not all(entry.endswith(PARTIAL) for entry in entries):
        raise OutputRefused(
            f"{key} is {root}: it is no Zarr (none of {', '.join(ZARR_FILES)} in it), and is not removed. "
            "Write another path."
        )
    if isinstance(root, Path) and (link := first_link(root)):
        raise OutputRefused(
            f"{key} is {root}: {link} is a symlink, so that it has contents elsewhere. "
            "Remove it by hand, or write another path."
        )


def _check_not_home(root: Path, key: str) -> None:
    """Refuse to remove a folder that holds the home or the working directory."""
    here = root.resolve()
    for name, path in (("home directory", Path(os.path.expanduser("~"))), ("working directory", Path.cwd())):
        if path.resolve().is_relative_to(here):
            raise OutputRefused(f"{key} is {root}: it holds your {name}, and is not removed.")


def first_link(root: Path) -> str:
    """Path of a symlink in a folder; empty when there is none."""
    for folder, folders, files in os.walk(root):
        for entry in (os.path.join(folder, name) for name in (*folders, *files)):
            if os.path.islink(entry):
                return entry
    return ""
