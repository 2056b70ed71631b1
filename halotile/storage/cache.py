"""Small computed results in the user's cache, each under a digest of everything it depends on.

An entry is one line of JSON with its checksum: nothing in it is executed, and a damaged entry counts as absent. Files are replaced
atomically, so that several processes may write at once.
"""

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from halotile.errors import ConfigError
from halotile.storage.disk.durable import DISK
from halotile.storage.run_directory.json_files import FILE_MODE, with_checksum, without_checksum

MOST_ENTRIES = 1000  # limit beyond which the older half of the entries is removed
MOST_BYTES = 2**16  # maximum size of an entry


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

    >>> read_cached("0" * 64) is None
    True
    """
    with suppress(OSError, ValueError):
        content = without_checksum((_folder() / key).read_bytes())
        return None if content is None else json.loads(content)
    return None


def write_cached(key: str, value: Any) -> None:
    """Store a JSON value; do nothing without a usable cache folder, or with an entry longer than :data:`MOST_BYTES`."""
    content = with_checksum(json.dumps(value).encode())
    if len(content) > MOST_BYTES:
        return
    with suppress(OSError, ConfigError):
        folder = _folder()
        DISK.write_file(folder / key, [content], mode=FILE_MODE, sync=False)
        entries = list(folder.iterdir())
        if len(entries) > MOST_ENTRIES:  # with partial files of killed processes
            for entry in sorted(entries, key=lambda entry: entry.stat().st_mtime_ns)[: len(entries) // 2]:
                entry.unlink()


def _folder() -> Path:
    """The folder of the entries, which nobody else may write to."""
    path = user_cache() / "found"
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(0o700)
    if not is_private(path.lstat()):
        raise PermissionError(f"{path} is not private")
    return path
