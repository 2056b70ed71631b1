"""Places in an object store, with the operations of a :class:`~pathlib.Path` that outputs need."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from halotile.errors import OutputRefused, redacted
from halotile.registry import optional

# Errors of obstore for what this user may not do.
DENIED = ("PermissionDeniedError", "UnauthenticatedError", "PermissionError")
SCHEMES = ("s3", "gs", "az")  # schemes of stores that outputs are written to


@dataclass(frozen=True, order=True)
class ObjectPath:
    """A place in an object store. There are no folders: one "exists" where an object is below it.

    >>> clean = ObjectPath("s3://scans/day/clean.zarr")
    >>> str(clean / "c/0/1"), str(clean.parent), clean.name
    ('s3://scans/day/clean.zarr/c/0/1', 's3://scans/day', 'clean.zarr')
    """

    url: str  # such as `s3://bucket/folder/clean.zarr`. Credentials are in the environment, never in it

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self.url}/{name}") if name else self

    @property
    def scheme(self) -> str:
        """The scheme, such as s3."""
        return self.url.partition("://")[0]

    @property
    def bucket(self) -> str:
        """Name of the bucket or container."""
        return self.url.partition("://")[2].partition("/")[0]

    @property
    def key(self) -> str:
        """Name of the object in its bucket; empty for the bucket itself."""
        return self.url.partition("://")[2].partition("/")[2]

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """The place that contains this one."""
        return ObjectPath(self.url.rpartition("/")[0]) if self.key else self

    @property
    def parents(self) -> tuple[ObjectPath, ...]:
        """All places that contain this one, the bucket last."""
        return (self.parent, *self.parent.parents) if self.key else ()

    @property
    def store(self) -> Any:
        """The bucket, as obstore has it."""
        return store_at(f"{self.scheme}://{self.bucket}")

    @property
    def as_name(self) -> str:
        """The place as the name of a file: no output has a + in its place.

        >>> ObjectPath("s3://scans/day/clean.zarr").as_name
        's3+scans+day+clean.zarr'
        """
        return f"{self.scheme}+{self.bucket}/{self.key}".replace("/", "+")

    @classmethod
    def from_name(cls, name: str) -> ObjectPath | None:
        """Return the place with this :attr:`as_name`; None where a name is not of that form."""
        scheme, *parts = name.split("+")
        return cls("/".join((f"{scheme}:/", *parts))) if scheme in SCHEMES and len(parts) > 1 else None

    def with_name(self, name: str) -> ObjectPath:
        """Return a place beside this one."""
        return self.parent / name

    def resolve(self) -> ObjectPath:
        """Return the same place: there are no links."""
        return self

    def is_symlink(self) -> bool:
        """Return False: there are no links."""
        return False

    def is_file(self) -> bool:
        try:
            self.facts()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Return True where there is an object below."""
        return next(self.objects(), None) is not None

    def exists(self) -> bool:
        """Return True for an object, and where there is one below."""
        return self.is_file() or self.is_dir()

    def facts(self) -> Any:
        """Size and tag of an object."""
        import obstore

        with store_errors(self):
            return obstore.head(self.store, self.key)

    def read_bytes(self) -> bytes:
        """Return the content of an object; raises OSError as :meth:`facts`."""
        import obstore

        with store_errors(self):
            return bytes(obstore.get(self.store, self.key).bytes())

    def objects(self) -> Iterator[str]:
        """Yield the names of all objects below, relative to this place; raises OSError as :meth:`facts`."""
        import obstore

        prefix = f"{self.key}/" if self.key else ""
        with store_errors(self):
            for page in obstore.list(self.store, prefix or None):
                yield from (found["path"].removeprefix(prefix) for found in page)


OutputPath = Path | ObjectPath  # place of an output


def path_of(place: str | OutputPath) -> OutputPath:
    """Return a place that is given as text: a path, or where the text has a scheme, a place in a store.

    >>> path_of("s3://scans//clean.zarr/"), path_of("clean.zarr").name
    (ObjectPath(url='s3://scans/clean.zarr'), 'clean.zarr')
    """
    if not isinstance(place, str):
        return place
    if fault := credentials_fault(place):
        raise OutputRefused(f"{place}: the address {fault}.")
    scheme, found, rest = place.partition("://")
    return ObjectPath(f"{scheme}://{'/'.join(filter(None, rest.split('/')))}") if found else Path(place)


def full_path(place: str | OutputPath) -> OutputPath:
    """Return a place as :func:`path_of`; a relative path starts from the working directory."""
    path = path_of(place)
    return path if isinstance(path, ObjectPath) else Path(os.path.abspath(path))


def files_below(place: OutputPath) -> Iterator[str]:
    """Yield the names of all files, or objects, below a place, relative to it; symlinks are not followed."""
    if isinstance(place, ObjectPath):
        yield from place.objects()
        return
    for folder, _, names in os.walk(place):
        inside = os.path.relpath(folder, place)
        yield from (name if inside == "." else f"{inside}/{name}" for name in names)


def lies_in(place: OutputPath, folder: OutputPath) -> bool:
    """Return True for a place in a folder, and for the folder itself.

    >>> lies_in(ObjectPath("s3://scans/a.zarr/0"), ObjectPath("s3://scans/a.zarr"))
    True
    >>> lies_in(ObjectPath("s3://scans/a.zarr2"), ObjectPath("s3://scans/a.zarr")), lies_in(Path("/a"), ObjectPath("s3://scans"))
    (False, False)
    """
    return folder == place or folder in (*place.parents,)


def credentials_fault(path: str) -> str | None:
    """Return the fault of an address with credentials in it, which would be kept in plans and logs; None without.

    >>> credentials_fault("s3://bucket/a.zarr"), (credentials_fault("s3://me:secret@bucket/a.zarr") or "")[:26]
    (None, 'holds a name or a password')
    """
    address = "".join(path.split())
    if not re.match(r"([\w+.-]+::)*[\w+.-]+:/", address) or redacted(address) == address:
        return None
    return (
        "holds a name or a password; leave out what is before the @ or after the ?: credentials are in the environment, such as "
        "AWS_ACCESS_KEY_ID. In place of a signed https:// address, write that of the store, such as s3://bucket/image.zarr"
    )


REQUEST_TIMEOUT = "300 seconds"  # time of one request: that of obstore, 30 s, is too short for a shard on a slow line


@lru_cache(maxsize=64)
def store_at(url: str) -> Any:
    """Return the store at a URL, with credentials, region and endpoint from the environment."""
    obstore = optional("a Zarr at a URL is read and written with obstore", "obstore.store", '"halotile[s3]"')
    # As an argument, it would take the place of all that the environment says of the client.
    os.environ.setdefault("AWS_TIMEOUT", REQUEST_TIMEOUT)
    options: dict[str, Any] = {"client_options": {"allow_http": True}} if url.startswith("http://") else {}
    return obstore.from_url(url, **options)


def is_of_store(error: BaseException) -> bool:
    """Return True when the exception is from obstore, which need not be installed."""
    return any(kind.__module__.partition(".")[0] == "obstore" for kind in type(error).__mro__)


def first_words(error: BaseException) -> str:
    """Return the message of an error of obstore, without what it is debugged with, nor anything in an address that may be a key.

    >>> first_words(Exception("GET https://me:key@host/a?sig=secret timed out, after 10 retries"))
    'GET https://host/a timed out, after 10 retries'
    >>> first_words(Exception("GET https://host/a: <Error><Message>Access Denied</Message></Error>"))
    'Access Denied'
    """
    text = " ".join(str(error).partition("Debug source")[0].split())
    said = re.search("<Message>(.*?)</Message>", text)
    return redacted(said[1] if said else text)


@contextmanager
def store_errors(place: ObjectPath) -> Iterator[None]:
    """Raise errors of the store as the system errors that a disk would give, with its words; what it was asked is kept out of tracebacks."""
    try:
        yield
    except Exception as error:
        if not is_of_store(error) and not isinstance(error, OSError):
            raise
        kind, number = _KINDS.get(type(error).__name__, (OSError, errno.EIO))
        words = first_words(error)
        if number == errno.ENOENT:
            words = "no such object"
        if number == errno.EACCES and "<Message>" not in str(error):  # a HEAD has none
            words = "Access Denied"
        if "NoSuchBucket" in str(error):
            words = "there is no such bucket"
        if "169.254.169.254" in words:  # where virtual machines in a cloud ask for credentials of theirs
            words = "the environment has no credentials for it"
        raise kind(number, words, str(place)) from None


# System errors of obstore's.
_KINDS: dict[str, tuple[type[OSError], int]] = {
    **dict.fromkeys(("FileNotFoundError", "NotFoundError"), (FileNotFoundError, errno.ENOENT)),
    **dict.fromkeys(("AlreadyExistsError", "PreconditionError"), (FileExistsError, errno.EEXIST)),
    **dict.fromkeys(DENIED, (PermissionError, errno.EACCES)),
}
