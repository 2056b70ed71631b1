"""A worker computes with the files and the code that its job was planned with, or refuses with the reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from halotile.errors import ConfigError, WeightsError
from halotile.tasks.denoisers.function import Function
from halotile.tasks.denoisers.torch import UserNetwork
from halotile.tasks.options import import_reference
from halotile.tasks.trials import provenance
from halotile.tasks.trials.provenance import build_sealed, opened_files, seals_of
from halotile.tasks.user_code import imported_digest


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of two functions, and another one that shares code with it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    provenance._digest_at_first.cache_clear()
    for name in ("shared_code", "first_code", "second_code"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "shared_code.py").write_text("FACTOR = 1\n")
    for name in ("first_code", "second_code"):
        (tmp_path / f"{name}.py").write_text(
            "from shared_code import FACTOR\ndef one(x):\n    return x * FACTOR\ndef two(x):\n    return x + FACTOR\n"
        )
    return tmp_path / "shared_code.py"


def of(name: str) -> tuple[Function, dict[str, str]]:
    """A denoiser, and what a job that is planned now takes it to be."""
    denoiser = Function(import_=name, depth=0)
    return denoiser, dict(seals_of(denoiser, {name: imported_digest(name, import_reference(name))}))


@pytest.mark.parametrize("later", ["first_code:one", "first_code:two", "second_code:one"])
def test_a_worker_that_outlives_a_job_does_not_compute_with_its_code(module: Path, later: str) -> None:
    build_sealed(*of("first_code:one"))
    build_sealed(*of(later))
    module.write_text("FACTOR = 100\n")
    with pytest.raises(
        ConfigError, match=r"changed since this worker imported it for an earlier job.*Restart the workers"
    ):
        build_sealed(*of(later if later == "first_code:one" else later.replace("one", "two")))


def test_code_that_is_edited_while_its_job_runs_stays_what_it_was_in_memory(module: Path) -> None:
    requested = of("first_code:one")
    build_sealed(*requested)
    module.write_text("FACTOR = 100\n")
    build_sealed(*requested)


def test_code_that_was_changed_before_a_worker_begins_is_not_computed_with(module: Path) -> None:
    requested = of("first_code:one")
    module.write_text("FACTOR = 100\n")
    with pytest.raises(ConfigError, match=r"first_code:one was changed while the job ran.*Restore the old version"):
        build_sealed(*requested)


NETWORK = """
import json
from pathlib import Path
import torch
HERE = Path(__file__).parent
class Scaled(torch.nn.Module):
    def __init__(self, factor, layers, weight):
        super().__init__()
        self.factor = factor
        self.layers = torch.nn.Sequential(*(getattr(torch.nn, name)() for name in layers))
        self.weight = torch.nn.Parameter(torch.tensor(float(weight)))
    def forward(self, x):
        return self.layers(x) * self.factor * self.weight
def build():
    return Scaled(**json.loads((HERE / "settings.json").read_text()))
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings that the function of a network reads by itself."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "reading_code", raising=False)
    (tmp_path / "reading_code.py").write_text(NETWORK)
    settings = tmp_path / "settings.json"
    settings.write_text('{"factor": 2, "layers": ["ReLU"], "weight": 1}')
    return settings


@pytest.mark.parametrize(
    "later",
    [
        '{"factor": 3, "layers": ["ReLU"], "weight": 1}',
        '{"factor": 2, "layers": ["Tanh"], "weight": 1}',
        '{"factor": 2, "layers": ["ReLU"], "weight": 5}',
    ],
)
def test_what_the_users_code_reads_belongs_to_the_network(settings: Path, later: str) -> None:
    denoiser = UserNetwork(import_="reading_code:build")
    code = denoiser.check()
    assert denoiser.check() == code
    settings.write_text(later)
    assert denoiser.check() != code


def test_weights_that_the_users_code_reads_may_not_change_while_its_job_runs(settings: Path) -> None:
    denoiser = UserNetwork(import_="reading_code:build")
    seals = seals_of(denoiser, denoiser.check())
    build_sealed(denoiser, seals)
    settings.write_text('{"factor": 2, "layers": ["ReLU"], "weight": 5}')
    with pytest.raises(WeightsError, match="what reading_code:build reads its weights from was changed while"):
        build_sealed(denoiser, seals)


@pytest.mark.parametrize("name", ["median.c", "kernels.h", "kernels.so", "library.py"])
def test_compiled_filters_belong_to_halotile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    place = tmp_path / "tasks/denoisers/compiled" / name
    place.parent.mkdir(parents=True)
    monkeypatch.setattr(provenance, "_PACKAGE", tmp_path)
    digests = {provenance._halotile()}
    for content in (b"1", b"2"):
        place.write_bytes(content)
        digests.add(provenance._halotile())
    assert len(digests) == 3


def test_files_that_are_only_written_do_not_count(tmp_path: Path) -> None:
    seen = opened_files()
    (tmp_path / "log.txt").write_text("tried")
    assert str(tmp_path / "log.txt") not in seen
    (tmp_path / "log.txt").read_text()
    assert str(tmp_path / "log.txt") in seen
