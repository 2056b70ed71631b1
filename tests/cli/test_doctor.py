"""`doctor` checks the environment of a run and reports faults."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import dask
import pytest

import halotile
from halotile.errors import ConfigError
from halotile.graphs import doctor
from halotile.graphs.plans import identity
from tests.cli.engine import MonkeyPatch, ask


def test_the_doctor_tells_what_a_run_would_find(tmp_path: Path) -> None:
    done = ask("doctor", "--output", tmp_path, "--cluster", "local", "--json")
    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert found["cluster"]["text"] == "local: as written"
    assert found["platform"]["text"].startswith(f"{platform.system()} {platform.machine()}, on which halotile is ")
    assert "rename, fsync" in found["file system"]["text"]
    assert found["encryption"]["verdict"] == "ok"
    assert done.exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_does_without_an_installed_copy(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """A machine without a package index, with a checkout on the path."""

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(identity, "version", version)
    monkeypatch.setattr(doctor, "package_version", identity.package_version.__wrapped__)  # uncached
    done = ask("doctor", "--output", tmp_path, "--cluster", "local")
    assert done.exit_code == 0
    assert f"halotile {halotile.__version__}, dask unknown" in " ".join(done.output.split())


@pytest.mark.cluster
def test_the_doctor_compares_the_workers(tmp_path: Path) -> None:
    done = ask("doctor", "--output", tmp_path, "--start", "--workers", "1", "--cluster", "local")
    assert "ok 1 worker of 1 on 127.0.0.1" in done.stdout
    assert "ok the same on every worker" in done.stdout


@pytest.mark.parametrize(("kind", "verdict"), [("local", "note: "), ("ranks", "MISSING: ")])
def test_locks_that_other_machines_do_not_see_are_told(
    kind: str, verdict: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    mount = SimpleNamespace(mountpoint="/", fstype="lustre", opts="rw,localflock")
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: [mount])
    done = ask("doctor", "--output", tmp_path, "--cluster", kind)
    output = " ".join(done.stdout.split())
    assert f"{verdict}{tmp_path}: flock works, but other machines do not see it" in output
    assert "localflock: mount it with flock" in output


def test_the_doctor_looks_at_certificates_of_a_scheduler(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tls://10.9.8.7:9")
    (tmp_path / "bad.pem").write_text("rubbish")
    tls = dict.fromkeys(("ca-file", "client.cert", "client.key"), str(tmp_path / "bad.pem"))
    with dask.config.set({f"distributed.comm.tls.{key}": path for key, path in tls.items()}):
        done = ask("doctor", "--output", tmp_path)
    assert done.exit_code == 1
    assert "MISSING: the certificates of distributed.comm.tls cannot be used" in done.stdout


def _raise(error: Exception) -> Callable[..., None]:
    def refuse(*_: object) -> None:
        raise error

    return refuse


def without_locks(patch: MonkeyPatch, folder: Path) -> None:
    patch.setattr("halotile.graphs.doctor.fcntl.flock", _raise(OSError(95, "Operation not supported")))


def without_commands(patch: MonkeyPatch, folder: Path) -> None:
    patch.setenv("PATH", str(folder))


def without_certificates(patch: MonkeyPatch, folder: Path) -> None:
    patch.setenv("DASK_SCHEDULER_ADDRESS", "tls://10.9.8.7:9")


def with_a_broken_plug_in(patch: MonkeyPatch, folder: Path) -> None:
    error = ConfigError("cluster 'mine' is the plug-in 'mine', which cannot be loaded")
    patch.setattr("halotile.graphs.clusters.launches.batch_system.find", _raise(error))


@pytest.mark.parametrize(
    ("break_it", "words", "said"),
    [
        (without_locks, ("--cluster", "local"), ("MISSING:", "Operation not supported")),
        (without_commands, ("--cluster", "pbs", "--start"), ("flock work", "MISSING: cluster.kind is pbs, and there is no qsub here")),
        (without_certificates, (), ("set distributed.comm.tls.ca-file",)),
        (with_a_broken_plug_in, ("--cluster", "local"), ("flock work", "MISSING: cluster 'mine' is the plug-in 'mine', which cannot be loaded")),
    ],
)  # fmt: skip
def test_the_doctor_tells_all_it_knows_where_something_is_missing(
    break_it: Callable[[MonkeyPatch, Path], None], words: tuple[str, ...], said: tuple[str, ...],
    tmp_path: Path, monkeypatch: MonkeyPatch,
) -> None:  # fmt: skip
    break_it(monkeypatch, tmp_path)
    done = ask("doctor", "--output", tmp_path, *words)
    assert done.exit_code == 1
    assert [each for each in said if each not in " ".join(done.stdout.split())] == []


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    ("kind", "command"),
    [("slurm", "sbatch"), ("pbs", "qsub"), ("sge", "qsub"), ("lsf", "bsub"), ("oar", "oarsub"),
     ("htcondor", "condor_submit")],
)  # fmt: skip
def test_the_doctor_misses_the_command_that_submits(
    kind: str, command: str, installed: bool, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if not installed:
        monkeypatch.setitem(sys.modules, "dask_jobqueue", None)
    done = ask("doctor", "--cluster", kind, "--output", tmp_path / "not" / "there")
    assert done.exit_code == 1
    assert f"there is no {command} here: cluster {kind} submits its jobs with it" in done.stdout
