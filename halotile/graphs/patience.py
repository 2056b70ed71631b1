"""What is being done, told to whoever waits for it; what is done at once is not worth a line."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 2.0

Say = Callable[[str], object]
"""Passes a line on."""


def silent(_: str) -> None:
    """Nobody waits."""


@contextmanager
def told_if_slow(say: Say, what: str) -> Iterator[None]:
    """Say what is being done if it takes longer than :data:`SECONDS`.

    Examples
    --------
    >>> with told_if_slow(print, "adding numbers"):
    ...     assert 1 + 1 == 2
    """
    timer = threading.Timer(SECONDS, say, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
