"""Checksums of text: of a JSON value, and in lines, ``<crc32c of the rest> <rest>``, of which one that is cut short is told from a whole one."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import google_crc32c


def digest(document: Any) -> str:
    """A short checksum of a JSON value."""
    text = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sealed(content: bytes) -> bytes:
    """A line with this content, which has no line break.

    Examples
    --------
    >>> sealed(b"+0-31")
    b'b9645eac +0-31\\n'
    >>> opened(sealed(b"+0-31")), opened(sealed(b"+0-31")[:-3])
    (b'+0-31', None)
    """
    return b"%08x %s\n" % (google_crc32c.value(content), content)


def opened(line: bytes) -> bytes | None:
    """The content of a line; None where it is not whole."""
    content = line[9:-1]
    return content if line == sealed(content) else None
