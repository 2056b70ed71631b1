"""Weights of networks, read from files without running what is in them."""

from __future__ import annotations

import hashlib
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halotile.errors import WeightsError

if TYPE_CHECKING:
    import torch

SUFFIXES = (".safetensors", ".pth", ".pt")
WRAPPERS = ("state_dict", "params")
"""Keys under which training scripts put the state dictionary."""


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file as 64 hexadecimal digits, read piece by piece.

    Raises
    ------
    WeightsError
        When there is no such file, or it cannot be read.
    """
    with _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_weights(
    path: str | Path, sha256: str | None = None, map_location: str = "cpu"
) -> dict[str, torch.Tensor]:
    """The tensors in a weights file, by name.

    Parameters
    ----------
    path : str or Path
        A ``.safetensors`` file, or a ``.pth`` or ``.pt`` file that holds nothing but tensors: pickled
        code is refused, never run.
    sha256 : str, optional
        The checksum that the file has to have.
    map_location : str
        Device that the tensors go to.

    Raises
    ------
    WeightsError
        When the file is missing, has another checksum, or is not safe to load.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise WeightsError(f"weights are {str(path)!r}: write a file that ends in {', '.join(SUFFIXES)}.")
    with _open(path) as file:
        if sha256 is not None:
            check_digest(path, hashlib.file_digest(file, "sha256").hexdigest(), sha256)
            file.seek(0)
        # The file that was checked is the file that is read: a swap in between changes nothing.
        read = _read_safetensors if path.suffix == ".safetensors" else _read_pickle
        return _tensors_only(path, read(path, file, map_location))


def check_digest(path: Path, found: str, wanted: str) -> None:
    """Refuse a checksum that is not the wanted one."""
    if found != wanted.strip().lower():
        raise WeightsError(
            f"sha256 is {wanted}, but {str(path)!r} has {found}: it is not the file that was meant. "
            "Fetch it again, or write the sha256 of the file that you trust."
        )


def _open(path: str | Path) -> BufferedReader:
    """The file, opened; a directory or a loop of links is not one."""
    try:
        if Path(path).is_dir():
            raise WeightsError(
                f"weights are {str(path)!r}, which is a directory. Write the path of a file in it."
            )
        return open(path, "rb")
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WeightsError(
            f"weights are {str(path)!r}, which cannot be opened ({reason}). Write the path of a weights file."
        ) from error


def _read_safetensors(path: Path, file: BufferedReader, map_location: str) -> Any:
    import safetensors.torch

    try:
        tensors = safetensors.torch.load(file.read())
    except Exception as error:
        raise WeightsError(
            f"{str(path)!r} is not a whole safetensors file ({error}). Fetch it again."
        ) from error
    return {name: tensor.to(map_location) for name, tensor in tensors.items()}


def _read_pickle(path: Path, file: BufferedReader, map_location: str) -> Any:
    import torch

    try:
        return torch.load(file, map_location=map_location, weights_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WeightsError(
            f"{str(path)!r} was not loaded: it is damaged, or holds more than tensors, which may run code "
            f"({reason}). Save the state_dict() alone, best as .safetensors."
        ) from error


def _tensors_only(path: Path, content: Any) -> dict[str, torch.Tensor]:
    """The state dictionary, unwrapped; anything else is refused."""
    import torch

    for key in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content:
        raise WeightsError(f"{str(path)!r} holds no state dictionary. Save model.state_dict() into it.")
    strangers = [str(key) for key, value in content.items() if not isinstance(value, torch.Tensor)]
    if strangers:
        raise WeightsError(
            f"{str(path)!r} holds entries that are not tensors: {', '.join(strangers[:5])}. "
            "Save model.state_dict() alone."
        )
    return dict(content)
