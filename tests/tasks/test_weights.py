"""Weights files: what is read, and what is refused."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from halotile.errors import WeightsError
from halotile.tasks.denoisers.common.weights import file_sha256, load_weights
from tests.cases import in_folders

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}


def save(path: Path, content: Any = None) -> Path:
    content = TENSORS if content is None else content
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(content, path)
    else:
        torch.save(content, path)
    return path


def test_tensors_come_back_as_they_were_saved(tmp_path: Path) -> None:
    for suffix in (".safetensors", ".pth", ".pt"):
        loaded = load_weights(save(tmp_path / f"net{suffix}"))
        assert loaded.keys() == TENSORS.keys()
        assert all(torch.equal(loaded[key], tensor) for key, tensor in TENSORS.items())


def test_a_state_dictionary_inside_a_checkpoint_is_found(tmp_path: Path) -> None:
    for wrapper in ("state_dict", "params"):
        path = save(tmp_path / "net.pth", {wrapper: TENSORS, "epoch": 7})
        assert load_weights(path).keys() == TENSORS.keys()


def test_the_checksum_is_compared(tmp_path: Path) -> None:
    for suffix in (".safetensors", ".pth"):
        path = save(tmp_path / f"net{suffix}")
        right = hashlib.sha256(path.read_bytes()).hexdigest()
        assert file_sha256(path) == right
        assert load_weights(path, right.upper()).keys() == TENSORS.keys()
        wrong = "0" * 64
        with pytest.raises(WeightsError, match=rf"(?s){wrong}.*{right}"):
            load_weights(path, wrong)


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


def test_pickled_code_is_refused_and_not_run(tmp_path: Path) -> None:
    rows: list[Any] = [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))]
    for write in rows:
        path, mark = tmp_path / "net.pth", tmp_path / "mark"
        write({"a.weight": Malicious(mark)}, path)
        with pytest.raises(
            WeightsError, match=r"holds pickled code, which is not run\. Save only the tensors"
        ) as failed:
            load_weights(path)
        assert "weights_only" not in str(failed.value)
        assert not mark.exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_file_that_memory_does_not_hold_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    path = save(tmp_path / f"w{suffix}")
    monkeypatch.setattr(safetensors.torch, "load", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(MemoryError):
        load_weights(path)


def missing(folder: Path) -> Path:
    return folder / "nowhere.pth"


def directory(folder: Path) -> Path:
    (folder / "net.pth").mkdir()
    return folder / "net.pth"


def loop(folder: Path) -> Path:
    (folder / "a.pth").symlink_to(folder / "b.pth")
    (folder / "b.pth").symlink_to(folder / "a.pth")
    return folder / "a.pth"


def truncated(suffix: str) -> Any:
    def make(folder: Path) -> Path:
        path = save(folder / f"net{suffix}")
        path.write_bytes(path.read_bytes()[:-20])
        return path

    return make


def holding(content: Any) -> Any:
    return lambda folder: save(folder / "net.pth", content)


def unfinished(folder: Path) -> Path:
    (folder / "net.safetensors.run").mkdir()
    (folder / "net.safetensors").touch()
    return folder / "net.safetensors"


def other_suffix(folder: Path) -> Path:
    (folder / "net.npz").touch()
    return folder / "net.npz"


def test_what_is_not_a_weights_file_is_refused(tmp_path: Path) -> None:
    rows = [
        (missing, "cannot be opened .*No such file"),
        (directory, "cannot be opened .Is a directory.*Write the path of a weights file"),
        (loop, "cannot be opened .*symbolic links"),
        (truncated(".pth"), "damaged"),
        (truncated(".safetensors"), "not a complete safetensors"),
        (unfinished, r"in .*/net.safetensors.run has not written it yet"),
        (holding([1, 2]), "no state dictionary"),
        (holding({}), "no state dictionary"),
        (holding({"lr": 0.1}), "not tensors: lr"),
        (other_suffix, "ends with one of .safetensors"),
    ]
    for folder, (make, message) in in_folders(tmp_path, rows):
        with pytest.raises(WeightsError, match=message):
            load_weights(make(folder))


def test_the_checksum_of_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    rows: list[Any] = [missing, directory, loop]
    for make in rows:
        with pytest.raises(WeightsError, match="Write the path"):
            file_sha256(make(tmp_path))
