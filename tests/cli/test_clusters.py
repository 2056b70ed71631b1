"""`exec`, and the options of the cluster."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from halotile import denoise
from halotile.cli.arguments import Flags
from halotile.cli.config.loading import load_cluster, load_job
from halotile.errors import ConfigError
from halotile.graphs.clusters import slurm
from halotile.graphs.clusters.base import Order, starter_of
from halotile.graphs.kinds.sections import Cluster
from halotile.graphs.submission import check_walltime
from tests.cli.engine import Engine, MonkeyPatch, printed, refused
from tests.faults import REPOSITORY
from tests.hpc import BLOCKS, HpcJob, finish, wait_for

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


@pytest.fixture
def home(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """A private cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.cluster
def test_a_script_joins_the_cluster_that_is_up_for_it(home: Path) -> None:
    (home / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "halotile", "exec", "script.py", "--workers", "3", "one", "--two", "3"],
        cwd=home,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    output = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert output["words"] == "['one', '--two', '3']"
    assert output["address"].startswith("tls://127.0.0.1:")
    assert output["sum"] == "6"
    assert output["workers"] == "3 (1, 1, 20, 20)"
    assert Path(output["key"]).parent == home / "cache" / "halotile"
    assert not Path(output["key"]).exists()


def test_options_replace_what_the_file_says(config: Path) -> None:
    job = load_job(config, flags=Flags(cluster="slurm", no_dashboard=True))
    assert (job.cluster.kind, job.cluster.dashboard) == ("slurm", False)
    assert load_cluster(config, Flags(cluster="pbs")).kind == "pbs"


@pytest.mark.thorough
@pytest.mark.cluster
def test_copies_end_when_the_first_one_is_refused(tmp_path: Path) -> None:
    launch = os.environ | {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": f"refused-{os.getpid()}"}
    HpcJob.create(tmp_path)
    first, other = (HpcJob(tmp_path, launch | {"OMPI_COMM_WORLD_RANK": str(rank)}) for rank in range(2))
    (tmp_path / "out.zarr").mkdir()
    (tmp_path / "out.zarr/mine").touch()
    words = ("run", "job.yaml", "--allow-import")
    waiting = other.start(*words)
    assert "out.zarr" in first.call(*words, code=2)
    assert finish(waiting, timeout=30) == ""
    assert not first.run_directory.exists()


@pytest.mark.parametrize(
    ("values", "words"),
    [
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
        ("kind: htcondor, queue: gpu", "htcondor has nothing of the kind"),
        ("walltime: four hours", "is not a time; write hours, minutes and seconds"),
        ("gpus: -1", "-1 is too small; write at least 0"),
        ("partition: fast", "unknown key"),
        ("prologue: module load cuda", "is not a list"),
        (r'queue: "gpu\ntouch here"', "is not a name; write a word of one line"),
        (r'directives: ["--mem=3\ntouch here"]', "is more than a line; write an entry for each directive"),
        ('directives: ["#SBATCH --mem=3"]', 'has the mark of a directive before it, which is added; write "--mem=3"'),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_with_its_line(config: Path, values: str, words: str) -> None:
    text = config.read_text()
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("cluster"))
    config.write_text(f"{kept}\ncluster: {{{values}}}\n")
    for load in (load_job, load_cluster):
        with pytest.raises(ConfigError) as caught:
            load(config)
        assert words in str(caught.value)
        assert f"{config}:" in str(caught.value)


def test_no_tls_is_for_this_machine_alone(config: Path) -> None:
    assert not load_job(config, flags=Flags(no_tls=True, cluster="local")).cluster.tls
    with pytest.raises(ConfigError, match=r"cluster\.tls"):
        load_job(config, flags=Flags(no_tls=True, cluster="slurm"))


@pytest.mark.parametrize("kind", ["slurm", "ranks"])
def test_other_machines_need_tls_whatever_the_environment(kind: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    order = Order(workers=1, memory_bytes=2**30, choice=Cluster(tls=False, interface="lo"), folder=tmp_path)
    with pytest.raises(ConfigError, match="reachable from other machines"), starter_of(kind).start(order):
        pass


def test_a_variable_that_names_no_cluster_is_told(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("HALOTILE_CLUSTER", "slrum")
    assert "HALOTILE_CLUSTER is 'slrum', and there is no such kind of cluster. Did you mean slurm?" in refused("doctor")


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


def test_copies_that_nobody_counts_run_each_for_itself_where_the_cluster_is_written(
    config: Path, engine: Engine, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("PALS_RANKID", "1")
    assert "Set HALOTILE_SIZE" in refused("run", config, "--cluster", "ranks")
    assert "finished" in printed("run", config, "--cluster", "local")


@pytest.mark.parametrize("size", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_copies_of_a_script_are_refused(size: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv(size, "3")
    monkeypatch.setenv(size.replace("SIZE", "RANK"), "1")
    with pytest.raises(ConfigError, match=r"a script is its own driver.*`recon-cli exec --workers \d+ \S"):
        denoise(tmp_path / "in.zarr", tmp_path / "out.zarr", "median", size=3)
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_the_batch_system_is_told(config: Path, monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    start = starter_of("pbs").start(Order(workers=1, memory_bytes=2**30))
    with pytest.raises(ConfigError, match="there is no qsub here, which submits PBS jobs"), start:
        pass


@pytest.mark.parametrize(
    ("kind", "words"),
    [("sge", "there is no qsub here"), ("slurm-alloc", "is no Slurm allocation"), ("ranks", "the only copy")],
)
def test_a_cluster_that_cannot_start_leaves_nothing_behind(
    kind: str, words: str, config: Path, monkeypatch: MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    before = sorted(config.parent.iterdir())
    assert words in refused("run", config, "--cluster", kind)
    assert sorted(config.parent.iterdir()) == before


@pytest.mark.filterwarnings("ignore:OAR Job memory")
@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("slurm", "#SBATCH --cpus-per-task=1"),
        ("pbs", "#PBS -l select=1:ncpus=1:mem="),
        ("sge", "#$ -l mem_free="),
        ("lsf", '#BSUB -R "rusage[mem='),
        ("oar", "#OAR -O "),
        ("htcondor", "RequestCpus = "),
        ("local", "plan"),
    ],
)
def test_a_dry_run_shows_the_script_of_a_worker_and_writes_nothing(
    kind: str, line: str, config: Path, monkeypatch: MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    before = sorted(config.parent.iterdir())
    done = printed("run", config, "--cluster", kind, "--dry-run")
    assert f"\n{line}" in f"\n{done}"
    assert ("halotile.graphs.clusters.workers tls://DRIVER:PORT" in done) == (kind != "local")
    assert "\n  workers " in done
    assert sorted(config.parent.iterdir()) == before


def test_a_scheduler_in_the_environment_may_be_asked_for(config: Path, monkeypatch: MonkeyPatch) -> None:
    text = "\n".join(line for line in config.read_text().splitlines() if not line.startswith("cluster"))
    config.write_text(text)
    with pytest.raises(ConfigError, match=r"cluster\.address: missing"):
        load_job(config, (), Flags(cluster="scheduler"))
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tls://10.9.8.7:9")
    assert load_job(config, (), Flags(cluster="scheduler")).cluster.kind == "scheduler"


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


@pytest.mark.parametrize(
    ("words", "variable", "message"),
    [
        (["exec", "none.py"], None, "is no file. Write the path of a Python script"),
        (["exec", "s.py", "--worker", "4"], None, "exec has no --worker; did you mean --workers? What is the script's own comes after --."),
        (["exec", "s.py", "--workers", "0"], None, "Write --workers 1 or more"),
        (["submit", "--set", 'cluster={directives: ["--signal=B:TERM@20"]}'], None, DRAINS),
        (["submit", "--set", 'cluster={directives: ["--signal=USR1@20"]}'], None, DRAINS),
        (["submit", "--set", 'cluster={directives: ["--signal=B:USR2@60"]}'], None, DRAINS),
        (["submit", "--set", 'cluster={walltime: "3"}'], None, SHORT),
        (["submit"], "3", "cluster.walltime is 3, and a run drains 120 s before its end"),
        (["submit"], "0:02:00", "cluster.walltime is 0:02:00, and a run drains 120 s before its end"),
    ],
)  # fmt: skip
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
