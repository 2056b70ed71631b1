"""The state of a training in a file that is replaced as a whole."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from halotile.errors import ConfigError, DamagedData
from halotile.storage.disk.durable import DISK, Disk
from halotile.tasks.groups.group import TorchGroup

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
    ConfigError
        When it is a folder.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return b""
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder. Write the path of a file for the checkpoint.") from None
    digest, body = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise DamagedData(f"{path} is damaged. Remove it to begin anew.")
    return body


def state_in(content: bytes) -> dict[str, Any]:
    """Return the state in the content of a file. Code in it is not run."""
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state


def shared_state(path: Path | None, group: TorchGroup) -> dict[str, Any] | None:
    """Return the state in the file that rank 0 reads, on every rank; None where there is no file."""
    content = read_content(path) if path and group.rank == 0 else b""
    size = int(group.broadcast(torch.tensor([len(content)], device=group.device)))
    if not size:
        return None
    sent = (
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if content
        else torch.zeros(size, dtype=torch.uint8)
    )
    return state_in(group.broadcast(sent.to(group.device)).cpu().numpy().tobytes())
