"""`exec`, the options of the cluster, batch jobs, and `doctor`, which checks the environment of a run; messages on platforms where halotile is not tested."""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import dask
import numpy as np
import pytest

import halotile
from halotile import denoise
from halotile.cli import batch, exits
from halotile.cli.arguments import Flags
from halotile.cli.config.loading import load_cluster, load_job
from halotile.errors import ConfigError
from halotile.graphs import doctor
from halotile.graphs.clusters import sge, slurm
from halotile.graphs.clusters.base import Order, starter_of
from halotile.graphs.kinds.sections import Cluster
from halotile.graphs.plans import identity
from halotile.graphs.submission import check_walltime
from tests.batch_systems import GridEngine
from tests.cli.engine import Engine, MonkeyPatch, ask, printed, refused
from tests.faults import REPOSITORY, run_python
from tests.hpc import BLOCKS, HpcJob, finish, pretended_pbs, wait_for

SCRIPT = """
import os, sys
from pathlib import Path
import torch
from distributed import Client
from halotile import DistributedContext, distribute

print("words", sys.argv[1:])
print("address", os.environ["DASK_SCHEDULER_ADDRESS"])
with Client() as client:
    print("sum", client.submit(sum, [1, 2, 3]).result())
with DistributedContext() as ctx:
    smooth = distribute(torch.nn.AvgPool2d(3, 1, 1), ctx, type_object="denoiser", patch_size=8, overlap=1)
    print("workers", ctx.world_size, tuple(smooth(torch.ones(1, 1, 20, 20)).shape))
print("key", Path(os.environ["DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY"]).parent)
sys.exit(7)
"""


@pytest.mark.cluster
def test_a_script_joins_the_cluster_that_is_up_for_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ("-m", "halotile", "exec", "script.py", "--workers", "2", "one", "--two", "3")
    done = run_python(*words, environment={"XDG_CACHE_HOME": str(tmp_path / "cache")}, cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    output = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert output["words"] == "['one', '--two', '3']"
    assert output["address"].startswith("tls://127.0.0.1:")
    assert output["sum"] == "6"
    assert output["workers"] == "2 (1, 1, 20, 20)"
    assert Path(output["key"]).parent == tmp_path / "cache" / "halotile"
    assert not Path(output["key"]).exists()


CANNOT_BE = [
    ("kind: slrum", "no cluster is called slrum; did you mean slurm?"),
    ("kind: scheduler", "missing; write that of the running scheduler"),
    ("kind: slurm, address: 'tls://10.0.0.7:8786'", "is for cluster scheduler"),
    ("address: '10.0.0.7:8786'", "is not the address of a scheduler"),
    ("address: 'tcp://10.0.0.7:8786'", "write one that begins with tls://"),
    ("address: 'tcp://127.0.0.1:8786'", "write tls: false"),
    ("address: 'tls://10.0.0.7:8786', tls: false", "anyone who connects can run code as you"),
    ("address: 'tls://10.0.0.7:8786', scheduler_file: s.json", "leave one of them out"),
    ("kind: slurm, tls: false", "cluster slurm is reachable from other machines"),
    ("kind: slurm-alloc, tls: false", "cluster slurm-alloc is reachable from other machines"),
    ("kind: htcondor, queue: gpu", "htcondor has no such setting"),
    ("walltime: four hours", "is not a time; write hours, minutes and seconds"),
    ("gpus: -1", "-1 is too small; write at least 0"),
    ("partition: fast", "unknown key"),
    ("prologue: module load cuda", "is not a list"),
    (r'queue: "gpu\ntouch here"', "is not a name; write a word of one line"),
    (r'directives: ["--mem=3\ntouch here"]', "is more than a line; write an entry for each directive"),
    ('directives: ["#SBATCH --mem=3"]', 'has the mark of a directive before it, which is added; write "--mem=3"'),
]  # fmt: skip


@pytest.mark.parametrize(("values", "words"), CANNOT_BE)
def test_what_cannot_be_is_told_with_its_line(config: Path, values: str, words: str) -> None:
    kept = "\n".join(line for line in config.read_text().splitlines() if not line.startswith("cluster"))
    config.write_text(f"{kept}\ncluster: {{{values}}}\n")
    for load in (load_job, load_cluster):
        with pytest.raises(ConfigError) as caught:
            load(config)
        assert words in str(caught.value)
        assert f"{config}:" in str(caught.value)


@pytest.mark.parametrize("kind", ["slurm", "ranks"])
def test_other_machines_need_tls_whatever_the_environment(kind: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    order = Order(workers=1, memory_bytes=2**30, choice=Cluster(tls=False, interface="lo"), folder=tmp_path)
    with pytest.raises(ConfigError, match="reachable from other machines"), starter_of(kind).start(order):
        pass


def test_options_and_variables_replace_what_a_file_says(config: Path, engine: Engine, monkeypatch: MonkeyPatch) -> None:
    job = load_job(config, flags=Flags(cluster="slurm", no_dashboard=True))
    assert (job.cluster.kind, job.cluster.dashboard) == ("slurm", False)
    assert load_cluster(config, Flags(cluster="pbs")).kind == "pbs"
    assert not load_job(config, flags=Flags(no_tls=True, cluster="local")).cluster.tls
    with pytest.raises(ConfigError, match=r"cluster\.tls"):
        load_job(config, flags=Flags(no_tls=True, cluster="slurm"))
    with pytest.raises(ConfigError, match=r"cluster\.address: missing"):
        load_job(config, (), Flags(cluster="scheduler"))
    with monkeypatch.context() as patch:
        patch.setenv("HALOTILE_CLUSTER", "slrum")
        said = "HALOTILE_CLUSTER is 'slrum', and there is no such kind of cluster. Did you mean slurm?"
        assert said in refused("doctor")
        patch.delenv("HALOTILE_CLUSTER")
        patch.setenv("PALS_RANKID", "1")  # copies that nobody counts run each for itself where the cluster is written
        assert "Set HALOTILE_SIZE" in refused("run", config, "--cluster", "ranks")
        assert "finished" in printed("run", config, "--cluster", "local")
    config.write_text("\n".join(line for line in config.read_text().splitlines() if not line.startswith("cluster")))
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tls://10.9.8.7:9")
    assert load_job(config, (), Flags(cluster="scheduler")).cluster.kind == "scheduler"


def leave_behind(run_directory: Path, host: str) -> None:
    """Leave the file of a launch of the same name that was killed."""
    (run_directory / "workers").mkdir(parents=True)
    certificate = run_directory / "workers/certificate.pem"
    certificate.touch()
    # Within its ten seconds the first has made itself known, on a busy machine too.
    worker = {"arguments": ["--death-timeout", "10"], "pid": 2**22 + 1}
    values = worker | {"address": "tcp://127.0.0.1:9", "certificate": str(certificate), "host": host}
    (run_directory / "workers/driver-run_1.json").write_text(json.dumps(values))


@pytest.mark.cluster
@pytest.mark.thorough
@pytest.mark.parametrize("host", [socket.gethostname(), "elsewhere"])
def test_copies_that_mpirun_starts_become_workers_of_the_first(host: str, tmp_path: Path) -> None:
    """Copies with the variables of Open MPI, of which nothing else is used."""
    sizes = dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), "3")
    launch = os.environ | sizes | {"PMIX_NAMESPACE": "run/1"}
    jobs = [HpcJob(tmp_path, launch | {"OMPI_COMM_WORLD_RANK": str(rank)}) for rank in range(3)]
    HpcJob.create(tmp_path).set_pace(1)
    leave_behind(jobs[0].run_directory, host)
    copies = [job.start("run", "job.yaml", "--allow-import") for job in jobs]
    # The first worker does not wait for the second.
    wait_for(lambda: len({process for _, process, *_ in jobs[0].log()}) == 2)
    jobs[0].set_pace(0)
    first, *others = map(finish, copies)
    assert f"{BLOCKS} of {BLOCKS} done" in first
    assert others == ["", ""]
    jobs[0].check_whole()


@pytest.mark.parametrize("size", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_copies_of_a_script_are_refused(size: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv(size, "3")
    monkeypatch.setenv(size.replace("SIZE", "RANK"), "1")
    with pytest.raises(ConfigError, match=r"a script is its own driver.*`recon-cli exec --workers \d+ \S"):
        denoise(tmp_path / "in.zarr", tmp_path / "out.zarr", "median", size=3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [("sge", "there is no qsub here"), ("pbs", "there is no qsub here, which submits PBS jobs"), ("slurm-alloc", "is no Slurm allocation"), ("ranks", "the only copy")],
)  # fmt: skip
def test_a_failing_cluster_leaves_nothing(kind: str, words: str, config: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(config.parent))
    before = sorted(config.parent.iterdir())
    assert words in refused("run", config, "--cluster", kind)
    assert sorted(config.parent.iterdir()) == before


SCRIPTS = {
    "slurm": "#SBATCH --cpus-per-task=1", "pbs": "#PBS -l select=1:ncpus=1:mem=", "sge": "#$ -l mem_free=", "lsf": '#BSUB -R "rusage[mem=',
    "oar": "#OAR -O ", "htcondor": "RequestCpus = ", "local": "plan",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:OAR Job memory")
@pytest.mark.parametrize(("kind", "line"), SCRIPTS.items())
def test_a_dry_run_shows_the_script_of_a_worker(kind: str, line: str, config: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(config.parent))
    before = sorted(config.parent.iterdir())
    done = printed("run", config, "--cluster", kind, "--dry-run")
    assert f"\n{line}" in f"\n{done}"
    assert ("halotile.graphs.clusters.workers tls://DRIVER:PORT" in done) == (kind != "local")
    assert "\n  workers " in done
    assert sorted(config.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("walltime", "notice", "hint"),
    [("5", 120, "USR1@80"), ("2", 30, "USR1@20"), ("1", 30, None), ("6", 120, ""), ("3", 40, "")],
)
def test_the_walltime_leaves_time_for_work(walltime: str, notice: int, hint: str | None) -> None:
    cluster = Cluster(walltime=walltime, directives=(f"--signal=B:USR1@{notice}",))
    if hint == "":
        check_walltime(cluster, slurm.SYSTEM)
        return
    with pytest.raises(ConfigError) as refused:
        check_walltime(cluster, slurm.SYSTEM)
    assert ("USR1" in str(refused.value), str(hint) in str(refused.value)) == (hint is not None,) * 2


DRAINS = "a run drains when USR1 comes to the batch shell"


SHORT = (
    "a run drains 120 s before its end, to which Slurm adds up to 60 s: nothing would be done. "
    'Write at least 6 minutes, or directives: ["--signal=B:USR1@40"] for a shorter notice'
)


CANNOT_DO = [
    (["exec", "none.py"], None, "is no file. Write the path of a Python script"),
    (["exec", "s.py", "--worker", "4"], None, "exec has no --worker; did you mean --workers? Put the script's own arguments after --."),
    (["exec", "s.py", "--workers", "0"], None, "Write --workers 1 or more"),
    (["submit", "--set", 'cluster={directives: ["--signal=B:TERM@20"]}'], None, DRAINS),
    (["submit", "--set", 'cluster={directives: ["--signal=USR1@20"]}'], None, DRAINS),
    (["submit", "--set", 'cluster={directives: ["--signal=B:USR2@60"]}'], None, DRAINS),
    (["submit", "--set", 'cluster={walltime: "3"}'], None, SHORT),
    (["submit"], "3", "cluster.walltime is 3, and a run drains 120 s before its end"),
    (["submit"], "0:02:00", "cluster.walltime is 0:02:00, and a run drains 120 s before its end"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "variable", "message"), CANNOT_DO)
def test_what_a_command_cannot_do_is_refused(
    words: list[str], variable: str | None, message: str, config: Path, monkeypatch: MonkeyPatch
) -> None:
    if variable is not None:  # one of Dask's settings
        monkeypatch.setenv("DASK_JOBQUEUE__SLURM__WALLTIME", variable)
    if words[0] == "submit":
        words = ["submit", str(config), "--dry-run", "--set", "cluster.kind=slurm", *words[1:]]
    else:
        monkeypatch.chdir(config.parent)
        Path("s.py").touch()
    assert message in " ".join(refused(*words).split())


def test_the_doctor_tells_what_a_run_would_find(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    done = ask("doctor", "--output", tmp_path, "--cluster", "local", "--json")
    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert found["cluster"]["text"] == "local: as written"
    assert found["platform"]["text"].startswith(f"{platform.system()} {platform.machine()}, on which halotile is ")
    assert "rename, fsync" in found["file system"]["text"]
    assert found["encryption"]["verdict"] == "ok"
    assert done.exit_code == 0
    assert list(tmp_path.iterdir()) == []
    # A machine without a package index, with a checkout on the path.
    monkeypatch.setattr(identity, "version", Mock(side_effect=PackageNotFoundError("dask")))
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
def test_locks_of_one_machine_are_told(kind: str, verdict: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    mount = SimpleNamespace(mountpoint="/", fstype="lustre", opts="rw,localflock")
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: [mount])
    output = " ".join(ask("doctor", "--output", tmp_path, "--cluster", kind).stdout.split())
    assert f"{verdict}{tmp_path}: flock works, but other machines do not see it" in output
    assert "localflock: mount it with flock" in output


PLUG_IN = "cluster 'mine' is the plug-in 'mine', which cannot be loaded"
BAD_TLS = {f"distributed.comm.tls.{key}": "bad.pem" for key in ("ca-file", "client.cert", "client.key")}
MISSING: list[tuple[str, Any, str, tuple[str, ...]]] = [
    ("halotile.graphs.doctor.fcntl.flock", OSError(95, "Operation not supported"), "--cluster local", ("MISSING:", "Operation not supported")),
    ("DASK_SCHEDULER_ADDRESS", "tls://10.9.8.7:9", "", ("set distributed.comm.tls.ca-file",)),
    ("DASK_SCHEDULER_ADDRESS", BAD_TLS, "", ("MISSING: the certificates of distributed.comm.tls cannot be used",)),
    ("halotile.graphs.clusters.launches.batch_system.find", ConfigError(PLUG_IN), "--cluster local", ("flock work", f"MISSING: {PLUG_IN}")),
]  # fmt: skip


@pytest.mark.parametrize(("place", "value", "words", "said"), MISSING)
def test_the_doctor_tells_all_it_knows_where_something_is_missing(
    place: str, value: Any, words: str, said: tuple[str, ...], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    (tmp_path / "bad.pem").write_text("rubbish")
    monkeypatch.chdir(tmp_path)
    if isinstance(value, Exception):
        monkeypatch.setattr(place, Mock(side_effect=value))
    else:
        monkeypatch.setenv(place, value if isinstance(value, str) else "tls://10.9.8.7:9")
    with dask.config.set(value if isinstance(value, dict) else {}):
        done = ask("doctor", "--output", tmp_path, *words.split())
    assert done.exit_code == 1
    assert [each for each in said if each not in " ".join(done.stdout.split())] == []


@pytest.mark.parametrize("installed", [True, False])
def test_the_doctor_misses_the_command_that_submits(installed: bool, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if not installed:
        monkeypatch.setitem(sys.modules, "dask_jobqueue", None)
    kinds = ("slurm", "pbs", "sge", "lsf", "oar", "htcondor")
    for kind, command in zip(kinds, ("sbatch", "qsub", "qsub", "bsub", "oarsub", "condor_submit"), strict=True):
        done = ask("doctor", "--cluster", kind, "--output", tmp_path / "not" / "there")
        assert done.exit_code == 1
        assert f"there is no {command} here: cluster {kind} submits its jobs with it" in done.stdout


@pytest.mark.parametrize(
    "code", ["import halotile.cli.main", "import runpy; runpy.run_module('halotile', run_name='__main__')", "import halotile; halotile.denoise"]
)  # fmt: skip
def test_the_command_names_wsl_on_windows(code: str) -> None:
    done = run_python("-c", f"import sys; sys.platform = 'win32'; sys.modules['fcntl'] = None; {code}")
    if "denoise" in code:  # a script
        assert done.stderr.splitlines()[-1].startswith("ImportError: halotile does not run on Windows")
        return
    assert done.returncode == 2
    assert done.stderr.startswith("error: halotile does not run on Windows")
    assert "wsl --install" in done.stderr
    assert "Traceback" not in done.stderr


UTF8_JOB = """# größe in µm → Ж
version: 1
job: denoise
input: {path: größe.npy}
output: {path: Ж→.zarr, shard: 128, chunk: 32}
denoiser: {name: gaussian, sigma: 1.0}
"""


WORDS = """info größe.npy; plan jöb→.yaml; status fehlt→.zarr; resume fehlt→.zarr; verify fehlt→.zarr; levels fehlt→.zarr
preview größe.npy bild→.png; export größe.npy bild→.tif; convert fehlt→.h5 scan→.zarr"""
ONE_PROCESS = """
import runpy, sys
for words in sys.argv[1:]:
    sys.argv, code = ["recon-cli", *words.split()], 0
    try:
        runpy.run_module("halotile", run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    print("ended with", code, words, flush=True)
"""


def test_words_and_names_are_utf8_in_any_locale(tmp_path: Path) -> None:
    np.save(tmp_path / "größe.npy", np.random.default_rng(0).random((64, 64), np.float32))
    (tmp_path / "jöb→.yaml").write_text(UTF8_JOB, "utf-8")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    commands = [each.strip() for each in WORDS.replace("\n", ";").split(";")]
    code = [sys.executable, "-c", ONE_PROCESS, *commands]
    done = subprocess.run(code, cwd=tmp_path, env=os.environ | plain, capture_output=True, timeout=120)
    text = (done.stdout + done.stderr).decode()
    assert "Unicode" not in text
    for words in commands:
        codes = (2, 4) if "fehlt" in words else (0,)
        assert any(f"ended with {code} {words}" in text for code in codes), text
    for said in ("größe.npy", "Ж→.zarr", "fehlt→.zarr: ", "bild→.png", "bild→.tif", "fehlt→.h5"):
        assert said in text


SLEEPY = '''
import time
from pathlib import Path


def sleepy(pixels, folder):
    """The same pixels, after a while."""
    with open(Path(folder) / "log", "a") as log:
        log.write("called\\n")
    time.sleep(60)
    return pixels
'''


@pytest.mark.parametrize("pattern", ["in.zarr", "*n.zarr"])
def test_a_function_is_tried_for_seconds_at_submission(pattern: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    job = HpcJob.create(tmp_path, walltime="60", kind="slurm")
    (tmp_path / "noting.py").write_text(SLEEPY.replace("sleepy", "noted"))
    job.config.write_text(job.config.read_text().replace("in.zarr", pattern).replace("out.zarr", "{stem}-clean.zarr"))
    monkeypatch.setattr(batch, "TRIAL_SECONDS", 3.0)
    began = time.monotonic()
    words = ("--allow-import", "--dry-run", "--json", "--set", "run.workers=3")
    shown = json.loads(printed("submit", job.config, *words))
    assert time.monotonic() - began < 50
    assert len(job.log()) == 1
    assert shown["plan"]["notes"] == [
        "trying noting:noted takes longer than the 3 s allowed on this machine; the batch job will plan the run"
    ]
    assert "#SBATCH --ntasks=3\n" in shown["script"]


@pytest.fixture
def job(tmp_path: Path) -> HpcJob:
    """A job whose PBS is three commands that start scripts on this machine."""
    return HpcJob.create(tmp_path / "job", pretended_pbs(tmp_path / "pbs"), kind="pbs", interface="lo", walltime="60")


SUBMIT = ("submit", "job.yaml", "--allow-import")


CORES = "cluster.kind=sge --set cluster.cores=4"
NO_ENVIRONMENT = "cluster.cores is 4, and SGE gives a job several cores by a parallel environment"
REFUSED = [
    *((SUBMIT, f"cluster.kind={kind}", f"cluster.kind is {kind}, and submit is for Slurm, PBS, SGE and LSF") for kind in ("oar", "local")),
    *((words, CORES, NO_ENVIRONMENT) for words in (SUBMIT, (*SUBMIT, "--dry-run"), ("run", *SUBMIT[1:], "--dry-run"))),
]  # fmt: skip


def test_other_kinds_of_clusters_and_cores_of_sge_without_a_parallel_environment_are_refused(config: Path) -> None:
    before = sorted(config.parent.iterdir())
    for (command, _, *options), sets, said in REFUSED:
        assert said in refused(command, config, *options, "--set", *sets.split(), code=exits.USAGE)
        assert sorted(config.parent.iterdir()) == before


@pytest.mark.cluster
def test_a_driver_whose_time_is_up_submits_itself_again(job: HpcJob) -> None:
    job.set_pace(1)
    assert job.json_of(*SUBMIT)["job"] == "1"
    assert "job 1 of this run is in the queue" in job.call(*SUBMIT, code=2)
    wait_for(lambda: len(job.log()) > 4)
    assert "ssh -N -L" in job.call("dashboard", "out.zarr.run")
    os.kill(job.status()["pid"], signal.SIGUSR1)
    wait_for(lambda: job.record()["number"] != "1")
    number, begun = job.record()["number"], len(job.log())
    assert 4 < begun < BLOCKS
    assert f"job {number}: in the queue, 1 attempt so far" in job.call("status", "out.zarr.run")
    job.wait_finished()
    assert sorted(int(block) for block, *_ in job.log()) == list(range(1, BLOCKS + 1)), "a block twice"
    after = job.record()
    assert (after["attempts"], after["number"], after["system"]) == (2, number, "pbs")
    assert "finishing the blocks in flight" in job.call("logs", "out.zarr.run")
    wait_for(lambda: job.status()["batch"]["state"] is None)
    assert job.status()["state"] == "finished"
    job.check_whole()


@pytest.mark.cluster
@pytest.mark.thorough
def test_a_real_grid_engine_starts_workers_and_drivers(grid_engine: GridEngine, tmp_path: Path) -> None:
    module = [f"export {name}={shlex.quote(value)}" for name, value in grid_engine.settings.items()]
    job = HpcJob.create(
        tmp_path / "job", dict(os.environ) | grid_engine.settings, kind="sge", interface="lo",
        walltime="60", cores=2, directives=["-pe smp 2"], prologue=[*module, f"export PYTHONPATH={REPOSITORY}"],
    )  # fmt: skip
    job.call("run", "job.yaml", "--allow-import")
    assert len({process for _, process, *_ in job.log()}) == 2
    job.check_whole()
    wait_for(lambda: not grid_engine.jobs())
    (job.folder / "log").write_text("")
    job.set_pace(1)
    number = job.json_of(*SUBMIT, "--fresh")["job"]
    assert grid_engine.jobs() == [number]
    assert "parallel environment" not in grid_engine.call("qstat", "-j", number)
    wait_for(lambda: len(job.log()) > 4)
    os.kill(job.status()["pid"], signal.SIGUSR1)
    wait_for(lambda: job.record()["number"] != number)
    job.wait_finished()
    assert sorted(int(block) for block, *_ in job.log()) == list(range(1, BLOCKS + 1)), "a block twice"
    job.check_whole()
    wait_for(lambda: not grid_engine.jobs())


@pytest.mark.cluster
@pytest.mark.thorough
def test_a_real_grid_engine_explains_errors(grid_engine: GridEngine, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    for name, value in grid_engine.settings.items():
        monkeypatch.setenv(name, value)
    script, queue = tmp_path / "batch.sh", sge.SYSTEM
    script.write_text("#$ -S /bin/bash\n#$ -o /no/such/folder/log\ntrue\n")
    number = queue.submit(script)
    assert "Eqw" in wait_for(lambda: (state := queue.state_of(number)) != "in the queue" and state)
    assert "/no/such/folder" in str(queue.state_of(number))
    states = queue.states([number, "999999"])
    assert {job: state.over for job, state in states.items()} == {number: True, "999999": True}
    queue.cancel(number)
    wait_for(lambda: queue.state_of(number) is None)
