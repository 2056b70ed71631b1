"""Small computed results in the user's cache, each under a digest of everything it depends on.

An entry is one line of JSON with its checksum: nothing in it is executed, and a damaged entry counts as absent. Files are replaced
atomically, so that several processes may write at once.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from halotile.errors import ConfigError
from halotile.storage.run_directory.json_files import with_checksum, without_checksum

MOST_ENTRIES = 1000
"""Limit beyond which the older half of the entries is removed."""
MOST_BYTES = 2**16
"""Maximum size of an entry."""


def user_cache() -> Path:
    """The folder of halotile in the user's cache, which may not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(cache or Path.home() / ".cache") / "halotile"
    except RuntimeError as error:
        raise ConfigError(
            f"HOME is unset, and the system knows no home of user {os.geteuid()}. Set HOME or XDG_CACHE_HOME to a folder of yours."
        ) from error


def is_private(status: os.stat_result) -> bool:
    """Return True for a folder of this user that nobody else may read or write."""
    is_closed = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
    return is_closed and status.st_uid == os.geteuid()


def read_cached(key: str) -> Any:
    """The value stored under this key; None when there is none.

    Examples
    --------
    >>> read_cached("0" * 64) is None
    True
    """
    with suppress(OSError, ValueError), _open_folder() as folder:
        fd = os.open(key, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
        with open(fd, "rb") as file:
            content = without_checksum(file.read(MOST_BYTES))
        return None if content is None else json.loads(content)
    return None


def write_cached(key: str, value: Any) -> None:
    """Store a JSON value; do nothing without a usable cache folder, or with an entry longer than :data:`MOST_BYTES`."""
    content = with_checksum(json.dumps(value).encode())
    if len(content) > MOST_BYTES:
        return
    partial = f"{key}.{secrets.token_hex(4)}"
    with suppress(OSError, ConfigError), _open_folder() as folder:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        with open(fd, "wb") as file:
            file.write(content)
        os.replace(partial, key, src_dir_fd=folder, dst_dir_fd=folder)
        _remove_old_entries(folder)


@contextmanager
def _open_folder() -> Iterator[int]:
    """Open the folder of the entries."""
    path = user_cache() / "found"
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # Check the open descriptor, because the path may have been replaced since.
        if not is_private(os.fstat(fd)):
            raise PermissionError(f"{path} is not private")
        yield fd
    finally:
        os.close(fd)


def _remove_old_entries(folder: int) -> None:
    """Remove the older half of the files when there are too many, including partial files of killed processes."""
    names = os.listdir(folder)
    if len(names) > MOST_ENTRIES:
        with suppress(FileNotFoundError):  # another process does the same
            names.sort(key=lambda name: os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns)
            for name in names[: len(names) // 2]:
                os.unlink(name, dir_fd=folder)
