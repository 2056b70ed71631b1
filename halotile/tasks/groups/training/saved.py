"""The state of a training in a file that is replaced as a whole."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
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
    """Return the content of a file, nothing where there is no file."""
    try:
        with path.open("rb") as file:
            digest, body = file.read(DIGEST_BYTES), file.read()
    except FileNotFoundError:
        return b""
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder. Write the path of a file for the checkpoint.") from None
    if hashlib.sha256(body).digest() != digest:
        raise DamagedData(f"{path} is damaged. Remove it to begin anew.")
    return body


def state_in(content: bytes | memoryview) -> dict[str, Any]:
    """Return the state in the content of a file. Code in it is not run."""
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state


def shared_state(path: Path | None, group: TorchGroup) -> dict[str, Any] | None:
    """Return the state in the file that rank 0 reads, on every rank; None where there is no file."""
    content = read_content(path) if path and group.rank == 0 else b""
    if group.world_size == 1:
        return state_in(content) if content else None
    size = int(group.broadcast(torch.tensor([len(content)], device=group.device)))
    if not size:
        return None
    sent = torch.zeros(size, dtype=torch.uint8)
    if content:
        sent.numpy()[:] = np.frombuffer(content, np.uint8)
    del content  # there may be no room for many copies
    return state_in(group.broadcast(sent.to(group.device)).cpu().numpy().data)
