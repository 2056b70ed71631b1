"""`doctor` checks the environment of a run and reports faults."""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import dask
import pytest

import halotile
from halotile.cli.main import app
from halotile.errors import ConfigError
from halotile.graphs import doctor
from halotile.graphs.plans import identity
from tests.cli.engine import RUNNER


def test_the_doctor_tells_what_a_run_would_find(tmp_path: Path) -> None:
    done = RUNNER.invoke(app, ["doctor", "--output", str(tmp_path), "--cluster", "local", "--json"])
    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert found["cluster"]["text"] == "local: as written"
    assert found["platform"]["text"].startswith(
        f"{platform.system()} {platform.machine()}, on which halotile is "
    )
    assert "rename, fsync" in found["file system"]["text"]
    assert found["encryption"]["verdict"] == "ok"
    assert done.exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_does_without_an_installed_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a package index, with a checkout on the path."""

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(identity, "version", version)
    monkeypatch.setattr(doctor, "package_version", identity.package_version.__wrapped__)  # uncached
    done = RUNNER.invoke(app, ["doctor", "--output", str(tmp_path), "--cluster", "local"])
    assert done.exit_code == 0
    assert f"halotile {halotile.__version__}, dask unknown" in " ".join(done.output.split())


@pytest.mark.cluster
def test_the_doctor_compares_the_workers(tmp_path: Path) -> None:
    done = RUNNER.invoke(
        app, ["doctor", "--output", str(tmp_path), "--start", "--workers", "1", "--cluster", "local"]
    )
    assert "ok 1 worker of 1 on 127.0.0.1" in done.stdout
    assert "ok the same on every worker" in done.stdout


def test_the_doctor_tells_of_a_file_system_that_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("halotile.graphs.doctor.fcntl.flock", refuse)
    done = RUNNER.invoke(app, ["doctor", "--output", str(tmp_path), "--cluster", "local"])
    assert done.exit_code == 1
    assert "MISSING:" in done.stdout
    assert "Operation not supported" in done.stdout


@pytest.mark.parametrize(("kind", "verdict"), [("local", "note: "), ("ranks", "MISSING: ")])
def test_the_doctor_tells_of_locks_that_other_machines_do_not_see(
    kind: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = SimpleNamespace(mountpoint="/", fstype="lustre", opts="rw,localflock")
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: [mount])
    done = RUNNER.invoke(app, ["doctor", "--output", str(tmp_path), "--cluster", kind])
    output = " ".join(done.stdout.split())
    assert f"{verdict}{tmp_path}: flock works, but other machines do not see it" in output
    assert "localflock: mount it with flock" in output


def test_the_doctor_tells_all_it_knows_where_the_cluster_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = RUNNER.invoke(app, ["doctor", "--cluster", "pbs", "--output", str(tmp_path), "--start"])
    assert done.exit_code == 1
    assert "flock work" in done.stdout
    assert "MISSING: cluster.kind is pbs, and there is no qsub here" in done.stdout


def test_the_doctor_looks_at_the_certificates_of_a_scheduler_that_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tls://10.9.8.7:9")
    (tmp_path / "bad.pem").write_text("rubbish")
    tls = dict.fromkeys(("ca-file", "client.cert", "client.key"), str(tmp_path / "bad.pem"))
    with dask.config.set({f"distributed.comm.tls.{key}": path for key, path in tls.items()}):
        done = RUNNER.invoke(app, ["doctor", "--output", str(tmp_path)])
    assert done.exit_code == 1
    assert "MISSING: the certificates of distributed.comm.tls cannot be used" in done.stdout


def test_the_doctor_misses_certificates_that_are_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tls://10.9.8.7:9")
    done = RUNNER.invoke(app, ["doctor", "--output", str(tmp_path)])
    assert done.exit_code == 1
    assert "set distributed.comm.tls.ca-file" in " ".join(done.stdout.split())


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("slurm", "sbatch"),
        ("pbs", "qsub"),
        ("sge", "qsub"),
        ("lsf", "bsub"),
        ("oar", "oarsub"),
        ("htcondor", "condor_submit"),
    ],
)
def test_the_doctor_misses_the_command_that_submits(
    kind: str, command: str, installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if not installed:
        monkeypatch.setitem(sys.modules, "dask_jobqueue", None)
    done = RUNNER.invoke(app, ["doctor", "--cluster", kind, "--output", str(tmp_path / "not" / "there")])
    assert done.exit_code == 1
    assert f"there is no {command} here: cluster {kind} submits its jobs with it" in done.stdout


def test_the_doctor_tells_all_it_knows_where_a_package_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: str) -> None:
        raise ConfigError("cluster 'mine' is the plug-in 'mine', which cannot be loaded")

    monkeypatch.setattr("halotile.graphs.clusters.launches.batch_system.find", broken)
    done = RUNNER.invoke(app, ["doctor", "--cluster", "local", "--output", str(tmp_path)])
    assert done.exit_code == 1
    assert "MISSING: cluster 'mine' is the plug-in 'mine', which cannot be loaded" in done.stdout
    assert "flock work" in done.stdout
