"""Weights of networks, read from files without running what is in them."""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halotile.errors import WeightsError
from halotile.tasks.devices.device import is_out_of_memory

if TYPE_CHECKING:
    import torch

SUFFIXES = (".safetensors", ".pth", ".pt")
WRAPPERS = ("state_dict", "params")
"""Keys under which training scripts put the state dictionary."""
PICKLES = (b"PK", b"\x80")
"""How files begin that torch.save writes, now and long ago."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shape of every tensor, by name."""


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
    with _checked(path, sha256) as file:
        # The file that was checked is the file that is read: a swap in between changes nothing.
        read = _read_safetensors if path.suffix == ".safetensors" else _read_pickle
        return _tensors_only(path, read(path, file, map_location))


def weight_shapes(path: str | Path, sha256: str | None = None) -> Shapes:
    """The shape of every tensor in a weights file; of a ``.safetensors`` file without importing torch.

    Raises
    ------
    WeightsError
        As :func:`load_weights` would, but for a damage that the file's header does not tell.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        return shapes_of(load_weights(path, sha256))
    _checked(path, sha256).close()
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 - it is no dict
    except Exception as error:
        raise _not_whole(path, error) from error


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    """The shape of every tensor."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def misfits(wanted: Shapes, found: Shapes) -> list[str]:
    """What keeps tensors from being those of a network, one short line each.

    Examples
    --------
    >>> misfits({"a": (3,), "b": (1,)}, {"a": (4,)})
    ['missing b', 'a is (4,) where (3,) belongs']
    """
    lines = [f"missing {name}" for name in wanted if name not in found]
    lines += [f"unexpected {name}" for name in found if name not in wanted]
    return lines + [
        f"{name} is {found[name]} where {shape} belongs"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]


def listed(problems: list[str], most: int = 8) -> str:
    """The first problems in one line, and how many more there are."""
    more = f", and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more


def check_digest(path: Path, found: str, wanted: str) -> None:
    """Refuse a checksum that is not the wanted one."""
    if found != wanted.strip().lower():
        raise WeightsError(
            f"sha256 is {wanted}, but {str(path)!r} has {found}: it is not the file that was meant. "
            "Fetch it again, or write the sha256 of the file that you trust."
        )


def _checked(path: Path, sha256: str | None) -> BufferedReader:
    """The file, opened, with the right ending and checksum."""
    if path.suffix not in SUFFIXES:
        raise WeightsError(f"weights are {str(path)!r}: write a file that ends in {', '.join(SUFFIXES)}.")
    file = _open(path)
    if sha256 is None:
        return file
    try:
        check_digest(path, hashlib.file_digest(file, "sha256").hexdigest(), sha256)
    except WeightsError:
        file.close()
        raise
    file.seek(0)
    return file


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
        if is_out_of_memory(error):
            raise
        raise _not_whole(path, error) from error
    return {name: tensor.to(map_location) for name, tensor in tensors.items()}


def _not_whole(path: Path, error: Exception) -> WeightsError:
    return WeightsError(f"{str(path)!r} is not a whole safetensors file ({error}). Fetch it again.")


def _read_pickle(path: Path, file: BufferedReader, map_location: str) -> Any:
    import torch

    head = file.peek(2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it only says what is told below
            return torch.load(file, map_location=map_location, weights_only=True)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # Not in torch's words: those advise to run what is in the file.
        if isinstance(error, pickle.UnpicklingError) and head.startswith(PICKLES):
            raise WeightsError(
                f"{str(path)!r} holds pickled code, which is not run. Save the tensors alone, with "
                "torch.save(model.state_dict(), ...) or as .safetensors."
            ) from error
        raise WeightsError(
            f"{str(path)!r} is damaged, or is no weights file. Fetch it again, or save it again with "
            "torch.save(model.state_dict(), ...)."
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
