"""A user's code has the same digest in every process and another one when it is changed; a worker computes with what its job was planned with."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halotile.errors import ConfigError, RankFailed, WeightsError
from halotile.tasks.denoisers.function import Function
from halotile.tasks.denoisers.torch import UserNetwork
from halotile.tasks.groups import script as scripts
from halotile.tasks.groups.opening import Rendezvous
from halotile.tasks.options import import_reference
from halotile.tasks.trials import provenance
from halotile.tasks.trials.provenance import build_sealed, seals_of
from halotile.tasks.user_code import imported_digest, loaded_code, source_files, value_digest
from tests.hpc import wait_for

FACTOR: Any = 1.0


def by_closure(factor: Any) -> Callable[[Any], Any]:
    return lambda image: image * factor


class Times:
    offset = 0

    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def __call__(self, image: Any) -> Any:
        return image * self.factor

    def method(self, image: Any) -> Any:
        return image * self.factor


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def __call__(self, image: Any) -> Any:
        return image * self.factor


MAKERS: list[Callable[[Any], Any]] = [
    by_closure, Times, Slotted, lambda f: (lambda inner: lambda image: inner(image) + 1)(by_closure(f)),
    lambda f: lambda image, factor=f: image * factor, lambda f: lambda image, *, factor=f: image * factor,
    *(lambda f: functools.partial(np.multiply, f), lambda f: Times(f).method, lambda f: functools.lru_cache(by_closure(f))),
]  # fmt: skip


PAIRS: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (lambda: 1, lambda: 2), (lambda: 1, lambda: 1.0), (lambda: (1, 2), lambda: (2, 1)),
    (lambda: {"a": 1}, lambda: {"a": 2}), (lambda: {"a", "b"}, lambda: {"a", "c"}),
    (lambda: np.zeros(3000), lambda: np.append(np.zeros(2999), 1.0)),
    (lambda: np.zeros(4, "float32"), lambda: np.zeros(2, "float64")),
    (lambda: torch.zeros(3, dtype=torch.bfloat16), lambda: torch.ones(3, dtype=torch.bfloat16)),
    (lambda: np.float32(1), lambda: np.float32(2)), (lambda: Path("a"), lambda: Path("b")),
    (lambda: np.sin, lambda: np.cos), (lambda: re.compile("a"), lambda: re.compile("b")),
    (lambda: np.random.default_rng(1), lambda: np.random.default_rng(2)),
]  # fmt: skip


def test_what_a_function_its_class_and_its_decorators_use_belongs_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for make, (one, other) in itertools.product(MAKERS, PAIRS):
        assert value_digest(make(one())) == value_digest(make(one())), (make, one())
        assert value_digest(make(one())) != value_digest(make(other())), (make, one())
    assert value_digest({"a": 1, "b": 2}) != value_digest({"b": 2, "a": 1})
    assert len({*(value_digest(by_closure(threading.Lock())) for _ in range(2))}) == 1

    def wrap(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def wrapped(image: Any) -> Any:
            return call(image)

        wrapped.__module__ = "scipy.ndimage"
        return wrapped

    assert value_digest(wrap(by_closure(1))) != value_digest(wrap(by_closure(2)))
    before = value_digest(Times(1))
    monkeypatch.setattr(Times, "offset", 1)
    assert value_digest(Times(1)) != before


def by_global(image: Any) -> Any:
    return image * FACTOR


def by_global_further_in(image: Any) -> Any:
    return [by_global(line) for line in image]


@pytest.mark.parametrize("call", [by_global, by_global_further_in, lambda image: (lambda: by_global(image))()])
def test_a_global_that_a_function_names_belongs_to_it(monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    before = value_digest(call)
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert value_digest(call) != before


def test_what_goes_round_in_a_circle_ends_and_a_chain_of_many_functions_too() -> None:
    def make(value: int) -> Times:
        first, second = Times(value), Times(None)
        second.factor, first.offset = [first], second  # type: ignore[assignment]
        return first

    assert value_digest(make(1)) == value_digest(make(1)) != value_digest(make(2))
    scope: dict[str, Any] = {"__name__": "chain", "f2000": abs}
    exec("".join(f"def f{i}(x):\n    return f{i + 1}(x)\n" for i in range(2000)), scope)
    before = value_digest(scope["f0"])
    assert value_digest(scope["f0"]) == before
    scope["f2000"] = round
    assert value_digest(scope["f0"]) != before


SCRIPT = """
import dataclasses, functools, re
from halotile.tasks.user_code import value_digest
NAMES = {"alpha", "beta", "gamma", "delta"}
TAG = "".join(["al", "pha"])
@dataclasses.dataclass
class Times:
    factor: int = 2
    @functools.lru_cache
    def cached(self): return "alpha", TAG
    @property
    def size(self): return {"one", "two", "three"}
    def __call__(self, image): return image * self.factor if TAG in NAMES else again(image)
def again(image): return (lambda i: Times()(i) if i in {"a", "b", "c"} else re.compile("a"))(image)
print(value_digest(again), value_digest([Times(), "alpha", TAG]))
"""


def test_a_script_gets_the_same_digest_in_every_process_and_place(tmp_path: Path) -> None:
    found = set()
    for seed, above in [("1", ""), ("2", ""), ("3", "# one line more\n")]:
        script = tmp_path / seed / "script.py"
        script.parent.mkdir()
        script.write_text(above + SCRIPT)
        found.add(subprocess.check_output([sys.executable, script], env=(os.environ | {"PYTHONHASHSEED": seed})))
    assert len(found) == 1


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules, which are not imported."""
    files = {
        "entry.py": "import json\nimport sibling\nfrom package.deep import thing\n",
        "sibling.py": "def f():\n    import late\n", "late.py": "", "package/__init__.py": "from . import near\n",
        "package/near.py": "from .. import package\n", "package/deep/__init__.py": "from ..far import x\n",
        "package/deep/thing.py": "", "package/far.py": "", "stranger.py": "", "json.py": "",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.delitem(sys.modules, "sibling", raising=False)  # imported by another test
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def test_a_change_to_a_file_that_an_import_runs_is_noticed(lab: Path) -> None:
    package = [f"package/{name}.py" for name in ("__init__", "near", "deep/thing", "far")]
    for file in ("entry.py", "sibling.py", "late.py", *package, "stranger.py"):
        before = imported_digest("entry:f", None)
        with (lab / file).open("a") as opened:
            opened.write("\nx = 1\n")
        assert (imported_digest("entry:f", None) != before) == (file != "stranger.py"), file


def test_a_project_that_is_moved_stays_what_it_is(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, moved = imported_digest("entry:f", None), lab.with_name("moved")
    lab.rename(moved)
    monkeypatch.setattr(sys, "path", [str(moved), *sys.path[1:]])
    assert imported_digest("entry:f", None) == before


def test_code_elsewhere_on_the_path_counts(lab: Path, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path_factory.mktemp("other") / "constants_elsewhere.py"
    other.write_text("FACTOR = 1")
    monkeypatch.setattr(sys, "path", [*sys.path, str(other.parent)])
    with (lab / "late.py").open("a") as opened:
        opened.write("\nfrom constants_elsewhere import FACTOR\n")
    before = imported_digest("entry:f", None)
    assert other in source_files("entry").values()
    other.write_text("FACTOR = 5")
    assert imported_digest("entry:f", None) != before


def test_an_installed_package_is_identified_by_its_own_files_and_a_module_without_one_by_its_value(lab: Path) -> None:
    files = source_files("safetensors.torch").values()
    assert {"torch.py", "__init__.py"} <= {file.name for file in files}
    assert all("safetensors" in file.parts for file in files)
    assert source_files("math") == {}
    assert imported_digest("nowhere:f", by_closure(1)) != imported_digest("nowhere:f", by_closure(2))
    (lab / "late.py").write_text("print 'two'")  # a file that cannot be read as Python ends the search there
    assert lab / "late.py" in source_files("entry").values()


@pytest.mark.parametrize("how", ["gone", "in an archive"])
def test_code_that_cannot_be_read_has_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    place = tmp_path
    if how == "gone":
        (tmp_path / "passing.py").write_text("VALUE = 1")
    else:
        place = tmp_path / "some.zip"
        with zipfile.ZipFile(place, "w") as archive:
            archive.writestr("passing.py", "VALUE = 1")
    monkeypatch.syspath_prepend(str(place))
    assert loaded_code() is not None
    importlib.import_module("passing")
    (tmp_path / "passing.py").unlink(missing_ok=True)
    try:
        assert loaded_code() is None
    finally:
        del sys.modules["passing"]


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
        both = "def one(x):\n    return x * FACTOR\ndef two(x):\n    return x + FACTOR\n"
        (tmp_path / f"{name}.py").write_text(f"from shared_code import FACTOR\n{both}")
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
    words = r"changed since this worker imported it for an earlier job.*Restart the workers"
    with pytest.raises(ConfigError, match=words):
        build_sealed(*of(later if later == "first_code:one" else later.replace("one", "two")))


def test_code_that_is_edited_meanwhile_stays_or_is_refused_by_later_workers(module: Path) -> None:
    requested = of("first_code:one")
    build_sealed(*requested)
    module.write_text("FACTOR = 100\n")
    build_sealed(*requested)
    provenance._digest_at_first.cache_clear()
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
    ("old", "new"), [('"factor": 2', '"factor": 3'), ("ReLU", "Tanh"), ('"weight": 1', '"weight": 5')]
)
def test_what_the_users_code_reads_belongs_to_the_network(settings: Path, old: str, new: str) -> None:
    denoiser = UserNetwork(import_="reading_code:build")
    code = denoiser.check()
    assert denoiser.check() == code
    settings.write_text(settings.read_text().replace(old, new))
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
    digests = {provenance.own_digest.__wrapped__()}
    for content in (b"1", b"2"):
        place.write_bytes(content)
        digests.add(provenance.own_digest.__wrapped__())
    assert len(digests) == 3


def test_a_script_prints_where_it_is(tmp_path: Path) -> None:
    path, lines = tmp_path / "train.py", list[str]()
    path.write_text("import time\nprint('begun')\ntime.sleep(150)\n")
    assert scripts.print_place() == ""
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(scripts.run_script, str(path), (), Rendezvous(rank=0, world_size=1), lines.append)
        wait_for(lambda: "begun" in lines)
        assert scripts.print_place() == "see the lines that it printed last\n"
        wait_for(lambda: any(f'"{path}", line 3' in line for line in lines))
        (process,) = scripts._running
        process.kill()
    with pytest.raises(RankFailed, match="SIGKILL"):
        ended.result()
    assert scripts.print_place() == ""
