"""Lines that carry their checksum: ``<crc32c of the rest> <rest>``. One that is cut short is told from a whole one."""

from __future__ import annotations

import google_crc32c


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
