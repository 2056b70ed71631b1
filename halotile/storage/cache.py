"""What was found out once, kept in the user's cache by the digest of all that it follows from.

An entry is one line of JSON with its checksum: nothing in it is run, and one that is damaged is none. Files are put in place in
one step, so that several processes may write at once.
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
from halotile.storage.run_directory.checksummed_lines import opened, sealed

MOST_ENTRIES = 1000
"""Beyond them the oldest half goes."""
MOST_BYTES = 2**16
"""No entry is larger."""


def user_cache() -> Path:
    """The folder of halotile in the user's cache, which need not be there.

    Raises
    ------
    ConfigError
        When neither the environment nor the system names a home.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(cache or Path.home() / ".cache") / "halotile"
    except RuntimeError as error:
        raise ConfigError(
            f"HOME is unset, and the system knows no home of user {os.geteuid()}. Set HOME or XDG_CACHE_HOME to a folder of yours."
        ) from error


def recall(key: str) -> Any:
    """What was kept by this key; None where there is nothing.

    Examples
    --------
    >>> recall("0" * 64) is None
    True
    """
    with suppress(OSError, ValueError), _folder() as folder:
        fd = os.open(key, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
        with open(fd, "rb") as file:
            content = opened(file.read(MOST_BYTES))
        return None if content is None else json.loads(content)
    return None


def keep(key: str, value: Any) -> None:
    """Keep a value that JSON can hold; not, where there is no place for it."""
    partial = f"{key}.{secrets.token_hex(4)}"
    with suppress(OSError, ConfigError), _folder() as folder:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        with open(fd, "wb") as file:
            file.write(sealed(json.dumps(value).encode()))
        os.replace(partial, key, src_dir_fd=folder, dst_dir_fd=folder)
        _bound(folder)


@contextmanager
def _folder() -> Iterator[int]:
    """The folder, open.

    Raises
    ------
    OSError, ConfigError
        When there is none, or another user could write to it.
    """
    path = user_cache() / "found"
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # Of what is open: the path may lead elsewhere by now.
        facts = os.fstat(fd)
        if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
            raise PermissionError(f"{path} is not private")
        yield fd
    finally:
        os.close(fd)


def _bound(folder: int) -> None:
    """Remove the older half where there are too many; files that a killed process left are among them."""
    names = os.listdir(folder)
    if len(names) <= MOST_ENTRIES:
        return
    ages = []
    for name in names:
        with suppress(FileNotFoundError):
            ages.append((os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns, name))
    for _, name in sorted(ages)[: len(ages) // 2]:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
