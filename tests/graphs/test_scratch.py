"""Scratch folders of Dask's servers: nobody else can have made them, and nothing is imported from there."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from distributed import Client, LocalCluster

from halotile.graphs.clusters import htcondor, slurm
from halotile.graphs.clusters.base import Order
from halotile.graphs.clusters.common.security import credentials
from halotile.graphs.clusters.launches.batch_system import BatchSystem, job_arguments, reporting_class
from halotile.graphs.clusters.workers import fork_server, settings
from halotile.graphs.kinds import sections
from tests.faults import REPOSITORY, run_python

NOBODY = 65534


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is $TMPDIR."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def taken(place: Path) -> Path:
    """A shared folder, like ``/tmp``, in which another user has made the folder that Dask would use."""
    place.mkdir(parents=True)
    place.chmod(0o1777)
    theirs = place / "dask-scratch-space"
    theirs.mkdir()
    theirs.chmod(0o777)
    if os.getuid() == 0:  # else it is at least not the run's
        os.chown(theirs, NOBODY, NOBODY)
    return theirs


LOCAL = """
import json, os, subprocess, sys
from pathlib import Path
from halotile.graphs.kinds import sections
from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import Order

ASK = "import json, sys; print(json.dumps(sys.path))"

def look(dask_worker):
    mode = Path(dask_worker.local_directory).parents[1].stat().st_mode
    paths = sys.path + json.loads(subprocess.check_output([sys.executable, "-c", ASK]))
    return mode & 0o7777, paths, os.environ["TORCHINDUCTOR_CACHE_DIR"]

if __name__ == "__main__":
    choice = sections.Cluster(dashboard=False)
    with local.start(Order(workers=1, memory_bytes=2**31, choice=choice)) as cluster:
        cluster.client.restart()
        (seen,) = cluster.client.run(look).values()
        children = json.loads(subprocess.check_output([sys.executable, "-c", ASK]))
        print(json.dumps([seen[0], seen[1] + children + sys.path, seen[2]]))
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a short path: paths of sockets have 107 characters at most."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.cluster
def test_a_folder_that_another_user_made_first_is_not_used(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    theirs = [taken(short_path / name) for name in ("temporary", "configured")]
    places = {
        "TMPDIR": str(theirs[0].parent),
        "DASK_TEMPORARY_DIRECTORY": str(theirs[1].parent),
        "XDG_CACHE_HOME": str(short_path / "cache"),
    }
    script = short_path / "script.py"
    script.write_text(LOCAL)
    done = run_python(str(script), environment=places)
    assert done.returncode == 0, done.stderr
    mode, paths, compiled = json.loads(done.stdout)
    assert mode == 0o700
    assert not [path for path in paths if "scratch" in path]
    assert compiled == str(short_path / "cache" / "halotile" / "torchinductor")
    for folder in theirs:
        assert [*folder.iterdir()] == [], "something was put where another user may change it"
        assert [*folder.parent.iterdir()] == [folder], "something is left behind"


def test_a_temporary_folder_of_a_long_name_is_told_of(tmp_path: Path) -> None:
    (place := tmp_path / ("long" * 25)).mkdir()
    begin = "from halotile.graphs.clusters.workers.fork_server import ensure_forks; ensure_forks()"
    said = run_python("-c", begin, environment={"TMPDIR": str(place)}).stderr
    assert f"$TMPDIR is {place}: its name is too long for a socket in it." in said


@pytest.mark.cluster
def test_nor_on_other_machines_where_dask_jobqueue_is_told_to(tmp_path: Path) -> None:
    theirs = taken(tmp_path / "shared")
    options: dict[str, Any] = {"protocol": "tls://", "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    places = {"TMPDIR": str(theirs.parent), "PYTHONPATH": str(REPOSITORY)}
    with (
        credentials(tmp_path) as made,
        LocalCluster(n_workers=0, security=made.security, **options) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        certificate, key = made.paths
        keys = ["--tls-ca-file", certificate, "--tls-cert", certificate, "--tls-key", key]
        module = [sys.executable, "-P", "-m", "halotile.graphs.clusters.workers", cluster.scheduler_address]
        words = [*module, *keys, "--local-directory", str(theirs.parent)]
        with subprocess.Popen(words, env=os.environ | places) as worker:
            try:
                client.wait_for_workers(1, timeout=60)
                (where,) = client.run(lambda dask_worker: dask_worker.local_directory).values()
                (path,) = client.run(lambda: sys.path).values()
                (mark,) = theirs.parent.glob("pymp-*")
                assert [*fork_server.SEMAPHORES.glob(f"sem.{mark.name}-*")], "a later run could not remove them"
            finally:
                worker.send_signal(signal.SIGTERM)
    assert Path(where).parents[1].name.startswith(settings.PREFIX)
    assert not [each for each in path if "scratch" in each]
    assert [*theirs.iterdir()] == []
    assert [*theirs.parent.iterdir()] == [theirs], "something is left behind"


def test_what_is_no_text_on_the_path_stays_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own: list[Any] = [tmp_path, "here"]
    monkeypatch.setattr(sys, "path", [*own, str(tmp_path / "dask-scratch-space" / "worker-1")])
    settings.keep_off_path()
    assert sys.path == own


KILLED = """
import multiprocessing, os
from halotile.graphs.clusters.workers import fork_server, settings
if __name__ == "__main__":
    fork_server.expect_no_workers()
    fork_server.ensure_forks()
    lock = multiprocessing.get_context(settings.METHOD).Lock()
    print(*fork_server.SEMAPHORES.glob(f"sem.{os.path.basename(fork_server.get_temp_dir())}-*"), flush=True)
    input()
"""


@pytest.mark.skipif(settings.METHOD != "forkserver", reason="multiprocessing leaves nothing behind")
def test_what_a_process_left_that_was_killed_with_its_children_is_removed_by_the_next(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    own = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)}
    command: dict[str, Any] = {"args": [sys.executable, str(script)], "env": own, "text": True}
    begin = partial(subprocess.Popen, **command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with begin() as killed, begin() as lives:
        assert killed.stdout
        assert lives.stdout
        semaphore, of_living = (Path(out.readline().strip()) for out in (killed.stdout, lives.stdout))
        assert semaphore.exists()
        assert of_living.exists()
        for child in psutil.Process(killed.pid).children(recursive=True):
            child.kill()
        killed.kill()
        killed.wait(30)
        subprocess.run(**command, input="\n", check=True)
        assert not semaphore.exists()
        assert of_living.exists()
        assert len([*tmp_path.glob("pymp-*")]) == 1
        lives.communicate("\n")
    assert not [*tmp_path.glob("pymp-*")]


def left(base: Path, host: str) -> Path:
    """A folder that a process on a given machine has left behind."""
    return base / f"{settings.PREFIX}{host}-tmpleft"


def test_only_a_killed_process_of_this_machine_and_user_has_its_folder_removed(temporary: Path) -> None:
    here = socket.gethostname()
    (left(temporary, here) / "worker-1").mkdir(parents=True)
    others = {left(temporary, host) for host in ("other", f"{here}-2")}
    for folder in others:
        folder.mkdir()
    with settings.private_scratch() as first, settings.private_scratch() as second:
        assert {*map(str, temporary.iterdir())} == {first, second, *map(str, others)}
    assert {*temporary.iterdir()} == others


def test_what_another_user_planted_is_neither_followed_nor_opened(temporary: Path) -> None:
    ours, planted = temporary / "ours", left(temporary, socket.gethostname())
    ours.mkdir()
    planted.symlink_to(ours)
    theirs = planted.with_name(f"{settings.PREFIX}{socket.gethostname()}-tmp2")
    if os.getuid() == 0:  # else nobody else's can be made
        theirs.mkdir()
        os.chown(theirs, NOBODY, NOBODY)
    with settings.private_scratch():
        assert [*ours.iterdir()] == []
        assert os.getuid() or [*theirs.iterdir()] == []


def test_without_locks_no_folder_is_removed_or_left_behind(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))))
    with settings.private_scratch() as first, settings.private_scratch() as second:
        assert {*map(str, temporary.iterdir())} == {first, second}
    assert [*temporary.iterdir()] == []
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(OSError, match="Input/output error"), settings.private_scratch():
        pass
    assert [*temporary.iterdir()] == []


@pytest.mark.parametrize("system", [slurm.SYSTEM, htcondor.SYSTEM], ids=lambda system: system.module)
def test_the_script_of_a_job_is_written_where_its_owner_alone_may(system: BatchSystem, tmp_path: Path) -> None:
    dask_jobqueue = pytest.importorskip("dask_jobqueue", reason="the extra hpc is not installed")
    order = Order(workers=1, memory_bytes=2**31, choice=sections.Cluster(interface="lo"))
    kind = reporting_class(getattr(dask_jobqueue, system.cluster).job_cls, tmp_path, system)
    made = kind("tls://127.0.0.1:1", name="0", protocol="tls://", **job_arguments(system, order, tmp_path))
    with made.job_file() as script:
        assert (Path(script).parent, Path(script).stat().st_mode & 0o777) == (tmp_path, 0o600)
        assert Path(script).read_text() == made.job_script()
    assert [*tmp_path.iterdir()] == []
