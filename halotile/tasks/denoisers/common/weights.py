"""Weights of networks, read from files without running code in them."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import shlex
import warnings
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from halotile.errors import WeightsError
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.devices.device import is_out_of_memory
from halotile.tasks.lazy import torch

SUFFIXES = (".safetensors", ".pth", ".pt")
METADATA = "halotile"  # key of what a job writes into the header of its weights, as JSON
WRAPPERS = ("state_dict", "params")  # keys under which training scripts put the state dictionary
PICKLES = (b"PK", b"\x80")  # first bytes of the files of torch.save, in the present format and the old one
Shapes = Mapping[str, tuple[int, ...]]  # shape of every tensor, by name


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file as 64 hexadecimal digits."""
    with _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_weights(path: str | Path, sha256: str | None = None) -> dict[str, torch.Tensor]:
    """Load the tensors of a weights file, by name.

    ``path``: a `.safetensors` file, or a `.pth` or `.pt` file with nothing but tensors: pickled code is refused, never run; ``sha256``: checksum that
    the file must have.
    """
    path = Path(path)
    with _open_checked(path, sha256) as file:
        # Read from the open file whose checksum was checked: replacing it in between has no effect.
        read = _read_safetensors if path.suffix == ".safetensors" else _read_pickle
        return _tensors_only(path, read(path, file))


def weight_shapes(path: str | Path, sha256: str | None = None) -> Shapes:
    """The shape of every tensor in a weights file; of a ``.safetensors`` file without importing torch."""
    path = Path(path)
    if path.suffix != ".safetensors":
        return shapes_of(load_weights(path, sha256))
    _open_checked(path, sha256).close()
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 - not a dict
    except Exception as error:
        raise _damaged(path, error) from error


def trained_range(path: str | Path) -> tuple[float, float] | None:
    """Values of pixels that were 0 and 1 while the weights were trained; None where they were not trained by a job."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy") as tensors:
            low, high = map(float, json.loads((tensors.metadata() or {})[METADATA])["values"])
    except Exception:  # a file of another program, or none: whoever loads it says so
        return None
    if not -math.inf < low < high < math.inf:
        raise WeightsError(
            f"{path}: its metadata map the pixel values {low:g} and {high:g} to 0 and 1, which is not a valid range. Train the network again."
        )
    return low, high


class TrainedPixels(NamedTuple):
    """Mean and standard deviation of each channel of the images that weights were trained on, in the units of the network."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]


def trained_pixels(path: str | Path) -> TrainedPixels | None:
    """The pixels that a job trained weights on; None where their file does not tell."""
    if trained_range(path) is None:
        return None
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy") as tensors:
            parts = (tuple(tensors.get_tensor(name).ravel().tolist()) for name in TrainedPixels._fields)
            return TrainedPixels(*parts)
    except Exception:  # a network without them, or damage: whoever loads it says so
        return None


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    """The shape of every tensor."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def shape_mismatches(wanted: Shapes, found: Shapes) -> list[str]:
    """Differences between the shapes of a network and those of a file, one short line each.

    >>> shape_mismatches({"a": (3,), "b": (1,)}, {"a": (4,)})
    ['missing b', 'a is (4,) instead of (3,)']
    """
    lines = [f"missing {name}" for name in wanted if name not in found]
    lines += [f"unexpected {name}" for name in found if name not in wanted]
    return lines + [
        f"{name} is {found[name]} instead of {shape}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]


def summarize(problems: list[str], most: int = 8) -> str:
    """The first problems in one line, with the number of the others."""
    more = f", and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more


def check_digest(path: Path, found: str, wanted: str) -> None:
    """Refuse a file whose checksum is not the wanted one."""
    if found != wanted.strip().lower():
        raise WeightsError(
            f"sha256 is {wanted}, but {str(path)!r} has {found}: it is another file. "
            "Download it again, or write the sha256 of the file that you trust."
        )


def _open_checked(path: Path, sha256: str | None) -> BufferedReader:
    """Open a file with a known suffix and the right checksum."""
    if path.suffix not in SUFFIXES:
        raise WeightsError(f"weights are {str(path)!r}: write a file that ends with one of {', '.join(SUFFIXES)}.")
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
    """Open a file; a folder or a loop of links is refused."""
    try:
        return open(path, "rb")
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WeightsError(
            f"weights are {str(path)!r}, which cannot be opened ({reason}). Write the path of a weights file."
        ) from error


def _read_safetensors(path: Path, file: BufferedReader) -> Any:
    import safetensors.torch

    try:
        return safetensors.torch.load(file.read())
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> WeightsError:
    run = RunDirectory.beside(path.absolute()).path
    if run.is_dir() and not path.stat().st_size:
        return WeightsError(
            f"{str(path)!r} is empty: the training in {run} has not written it yet. Wait for it, or go on with `recon-cli resume {shlex.quote(str(run))}`."
        )
    return WeightsError(f"{str(path)!r} is not a complete safetensors file ({error}). Download it again.")


def _read_pickle(path: Path, file: BufferedReader) -> Any:

    head = file.peek(2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error below says the same
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # Not with torch's message, which advises to run the code in the file.
        if isinstance(error, pickle.UnpicklingError) and head.startswith(PICKLES):
            raise WeightsError(
                f"{str(path)!r} holds pickled code, which is not run. Save only the tensors, with "
                "torch.save(model.state_dict(), ...) or as .safetensors."
            ) from error
        raise WeightsError(
            f"{str(path)!r} is damaged, or not a weights file. Download it again, or save it again with "
            "torch.save(model.state_dict(), ...)."
        ) from error


def _tensors_only(path: Path, content: Any) -> dict[str, torch.Tensor]:
    """Unwrap the state dictionary; refuse anything else."""
    for key in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content:
        raise WeightsError(f"{str(path)!r} holds no state dictionary. Save model.state_dict() into it.")
    others = [str(key) for key, value in content.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise WeightsError(
            f"{str(path)!r} holds entries that are not tensors: {', '.join(others[:5])}. Save only model.state_dict()."
        )
    return dict(content)
