"""All that the outcome of a trial follows from, as one digest: the network itself, the code around it, the processor."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.processor import processor
from halotile.tasks.usercode import loaded_code, whole_digest


def origin_of(denoiser: Denoiser, *question: Any) -> str | None:
    """Digest of a denoiser, as it is built in this process, and of a question about it.

    None where the digest would not tell everything: the network holds something that cannot be looked into, or the files of what was
    imported cannot be read.
    """
    network, loaded = whole_digest((denoiser, denoiser.build())), loaded_code()
    if network is None or loaded is None:
        return None
    words = [network, loaded, _halotile(), processor(), *question]
    return hashlib.sha256(repr(words).encode()).hexdigest()


def _halotile() -> str:
    """Digest of halotile's sources, which change between two versions where they are worked on."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
