"""The certificates of one run: a pair for scheduler, workers and client alike, gone when the run is.

Where workers start on other machines they are files, of mode 0600 in a folder of mode 0700. Its owner holds a lock in it: one whose
owner was killed is found out by the lock, and swept.
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

from distributed.security import Security

from halotile.errors import OutputRefused
from halotile.storage.cache import user_cache
from halotile.storage.run_directory.locks import flock

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
        Where they lie.
    """

    folder: Path

    @property
    def security(self) -> Security:
        """As Dask takes them; encryption is required."""
        certificate, key = self.paths
        roles = ("scheduler", "worker", "client")
        files = {f"tls_{role}_cert": certificate for role in roles}
        files |= {f"tls_{role}_key": key for role in roles}
        return Security(tls_ca_file=certificate, require_encryption=True, **files)

    @property
    def paths(self) -> tuple[str, str]:
        """The certificate, which vouches for itself, and its key."""
        return str(self.folder / _CERTIFICATE), str(self.folder / _KEY)

    def environment(self) -> dict[str, str]:
        """Variables by which any Dask client finds them. They name files, and hold no secret."""
        certificate, key = self.paths
        tls = "DASK_DISTRIBUTED__COMM__TLS__"
        roles = {
            f"{tls}{role}__{what}": path
            for role in ("SCHEDULER", "WORKER", "CLIENT")
            for what, path in (("CERT", certificate), ("KEY", key))
        }
        return roles | {
            f"{tls}CA_FILE": certificate,
            "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "true",
        }


@contextmanager
def credentials(base: Path) -> Iterator[Credentials]:
    """Certificates made for this context, in a folder of their own inside ``base``, which workers see too.

    Folders there whose owners are gone are removed.
    """
    with owned_folder(base, PREFIX) as folder:
        made = Credentials(folder)
        temporary = Security.temporary().get_tls_config_for_role("client")
        for path, text in zip(made.paths, (temporary["cert"], temporary["key"]), strict=True):
            _write_private(path, text)
        yield made


@contextmanager
def owned_folder(base: Path, prefix: str) -> Iterator[Path]:
    """A folder of mode 0700 in ``base``, for the length of the context.

    Those of its prefix that owners on this machine left behind are removed. Locks of others may not be seen here.
    """
    ours = f"{prefix}{socket.gethostname()}-tmp"
    sweep_stale(base, ours)
    # It gets its name once it is owned: nobody sweeps it in between.
    unnamed = Path(tempfile.mkdtemp(prefix="tmp", dir=base))  # of mode 0700
    folder = unnamed.with_name(ours + unnamed.name.removeprefix("tmp"))
    try:
        with ExitStack() as held:
            with suppress(OutputRefused):  # on a file system without locks nobody sweeps
                held.enter_context(_owned(unnamed))
            unnamed.rename(folder)
            yield folder
    finally:
        for made in (unnamed, folder):
            shutil.rmtree(made, ignore_errors=True)


def sweep_stale(base: Path, prefix: str = PREFIX) -> None:
    """Remove folders, by default of certificates, that were left behind by owners that are gone: none where there are no locks."""
    for folder in base.glob(f"{prefix}*"):
        with suppress(OSError, OutputRefused), _owned(folder, os.geteuid()):
            shutil.rmtree(folder)


def private_base() -> Path:
    """A folder of the user's own, for certificates of what has no run directory.

    It is in the home, which machines of a cluster share.
    """
    folder = user_cache()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


@contextmanager
def _owned(folder: Path, user: int | None = None) -> Iterator[None]:
    """Hold the lock of a folder; OSError when somebody else does, or it is not this user's, OutputRefused where there are no locks."""
    with ExitStack() as held:
        # What others planted under such a name is not followed, nor is anything made in it.
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        held.callback(os.close, place)
        if user not in (None, os.fstat(place).st_uid):
            raise PermissionError(f"{folder} is another user's")
        lock = os.open(_OWNER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=place)
        held.callback(os.close, lock)
        flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _write_private(path: str, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
