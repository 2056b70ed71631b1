"""The certificates of one run: a pair for scheduler, workers and client alike, removed at its end.

Where workers start on other machines they are files, of mode 0600 in a folder of mode 0700. Its owner holds a lock in it: a folder
whose owner was killed is recognised by the lock that nobody holds, and removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from halotile.errors import OutputRefused
from halotile.storage.cache import user_cache
from halotile.storage.run_directory.locks import flock

if TYPE_CHECKING:
    from distributed.security import Security

PREFIX = "tls-"
_OWNER = "owner"
_CERTIFICATE = "certificate.pem"
_KEY = "key.pem"


@dataclass(frozen=True)
class Credentials:
    """Certificates in a folder.

    Parameters
    ----------
    folder : Path
        Their folder.
    """

    folder: Path

    @property
    def security(self) -> Security:
        """In Dask's form; encryption is required."""
        from distributed.security import Security

        certificate, key = self.paths
        roles = ("scheduler", "worker", "client")
        files = {f"tls_{role}_cert": certificate for role in roles}
        files |= {f"tls_{role}_key": key for role in roles}
        return Security(tls_ca_file=certificate, require_encryption=True, **files)

    @property
    def paths(self) -> tuple[str, str]:
        """The certificate, which is its own authority, and its key."""
        return str(self.folder / _CERTIFICATE), str(self.folder / _KEY)

    def environment(self) -> dict[str, str]:
        """Variables by which any Dask client finds them. They name files, and hold no secret."""
        certificate, key = self.paths
        tls = "DASK_DISTRIBUTED__COMM__TLS__"
        variables = {f"{tls}CA_FILE": certificate, "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "true"}
        for role in ("SCHEDULER", "WORKER", "CLIENT"):
            variables |= {f"{tls}{role}__CERT": certificate, f"{tls}{role}__KEY": key}
        return variables


@contextmanager
def credentials(base: Path) -> Iterator[Credentials]:
    """Certificates made for this context, in a folder of their own inside ``base``, which workers see too.

    Folders there whose owners are gone are removed.
    """
    from distributed.security import Security

    with owned_folder(base, PREFIX) as folder:
        tls = Credentials(folder)
        temporary = Security.temporary().get_tls_config_for_role("client")
        for path, text in zip(tls.paths, (temporary["cert"], temporary["key"]), strict=True):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
        yield tls


@contextmanager
def owned_folder(base: Path, prefix: str) -> Iterator[Path]:
    """A folder of mode 0700 in ``base``, for the length of the context.

    Folders of its prefix that owners on this machine left behind are removed. Locks of other machines may not be seen here.
    """
    own_prefix = f"{prefix}{socket.gethostname()}-tmp"
    remove_stale(base, own_prefix)
    # It gets its name once it is owned: nobody removes it in between.
    unnamed = Path(tempfile.mkdtemp(prefix="tmp", dir=base))  # of mode 0700
    folder = unnamed.with_name(own_prefix + unnamed.name.removeprefix("tmp"))
    try:
        with ExitStack() as lock:
            with suppress(OutputRefused):  # on a file system without locks nobody removes folders
                lock.enter_context(owned(unnamed))
            unnamed.rename(folder)
            yield folder
    finally:
        for path in (unnamed, folder):
            shutil.rmtree(path, ignore_errors=True)


def remove_stale(base: Path, prefix: str = PREFIX, mark: str = "") -> list[Path]:
    """Remove folders, by default of certificates, whose owners are gone; none on a file system without locks.

    With ``mark``, only folders in which the owner made a lock file of this name. Returns the folders that were removed.
    """
    removed = []
    for folder in base.glob(f"{prefix}*/{mark}"):
        place = folder.parent if mark else folder
        with suppress(OSError, OutputRefused), owned(place, os.geteuid(), mark or _OWNER):
            shutil.rmtree(place)
            removed.append(place)
    return removed


def private_base() -> Path:
    """A private folder of the user, for certificates of a cluster without a run directory.

    It is in the home, which machines of a cluster share.
    """
    folder = user_cache()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


@contextmanager
def owned(folder: Path, user: int | None = None, name: str = _OWNER) -> Iterator[None]:
    """Hold the lock of a folder, a file of this name in it.

    Raises
    ------
    OSError
        When somebody else holds it, or the folder is not this user's.
    OutputRefused
        On a file system without locks.
    """
    with ExitStack() as opened:
        # A link that another user planted under such a name is not followed, and nothing is created in it.
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        opened.callback(os.close, place)
        if user not in (None, os.fstat(place).st_uid):
            raise PermissionError(f"{folder} is another user's")
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=place)
        opened.callback(os.close, lock)
        flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
