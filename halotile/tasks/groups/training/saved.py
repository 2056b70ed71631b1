"""The state of a training in a file that is replaced as a whole."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from halotile.errors import DamagedData
from halotile.storage.disk.durable import DISK, Disk

DIGEST_BYTES = 32
_MODE = 0o600


def write_state(path: Path, state: Mapping[str, Any], disk: Disk = DISK) -> None:
    """Replace a state of tensors, numbers and text; it is durable on return."""
    content = io.BytesIO()
    torch.save(dict(state), content)
    view = content.getbuffer()
    disk.write_file(path, [hashlib.sha256(view).digest(), view], mode=_MODE)


def read_content(path: Path) -> bytes:
    """Return the content of a file, nothing where there is no file.

    Raises
    ------
    DamagedData
        When it is not what was written.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return b""
    digest, body = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise DamagedData(f"{path} is damaged. Remove it to train from the beginning.")
    return body


def state_in(content: bytes) -> dict[str, Any]:
    """Return the state in the content of a file. Code in it is not run."""
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state
