"""Checksums of JSON values and of lines, ``<crc32c of the rest> <rest>``, which reveal truncated lines."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import google_crc32c


def digest(document: Any) -> str:
    """A short checksum of a JSON value."""
    text = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_checksum(content: bytes) -> bytes:
    """A line with a checksum of the content, which contains no line break.

    Examples
    --------
    >>> with_checksum(b"+0-31")
    b'b9645eac +0-31\\n'
    >>> without_checksum(with_checksum(b"+0-31")), without_checksum(with_checksum(b"+0-31")[:-3])
    (b'+0-31', None)
    """
    return b"%08x %s\n" % (google_crc32c.value(content), content)


def without_checksum(line: bytes) -> bytes | None:
    """The content of a line; None when its checksum does not match."""
    content = line[9:-1]
    return content if line == with_checksum(content) else None
