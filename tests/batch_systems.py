"""A private Slurm and a private Grid Engine on this machine, neither with files outside of one folder.

Slurm has two nodes with two fake GPUs each, Grid Engine one machine with a queue of a few slots.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_SECONDS = 60.0
_SYSTEM = "/usr/sbin:/usr/bin:/sbin:/bin"


def why_no_slurm() -> str | None:
    """The reason why it cannot run here; None where it can."""
    return _why_not(
        "Slurm", {package for name, package in SLURM_PACKAGES.items() if not shutil.which(name, path=_SYSTEM)}
    )


def why_no_sge() -> str | None:
    """The reason why it cannot run here; None where it can."""
    return _why_not(
        "Grid Engine", {package for name, package in SGE_PACKAGES.items() if not (PROGRAMS / name).is_file()}
    )


def _why_not(title: str, missing: set[str]) -> str | None:
    if missing:
        return f"a real {title} needs packages that are not installed: apt-get install {' '.join(sorted(missing))}"
    return None if os.getuid() == 0 else f"a {title} of our own needs root: its daemons start jobs for users"


NODES = 2
CORES = 2
GPUS = 2
SLURM_PACKAGES = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
"""Required commands, with the Debian package of each."""


@dataclass(frozen=True)
class Slurm:
    """A running Slurm.

    Parameters
    ----------
    folder : Path
        Everything that it has.
    """

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Environment for its commands, without variables of another Slurm."""
        clean = {name: word for name, word in os.environ.items() if not name.startswith("SLURM_")}
        return clean | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *words: str) -> str:
        """Output of a Slurm command.

        Raises
        ------
        CalledProcessError
            When it fails.
        """
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()

    @contextmanager
    def lost(self, node: str) -> Iterator[None]:
        """Kill a node with all that runs on it; it comes back at the end of the context."""
        daemon = psutil.Process(int((self.folder / "run" / f"slurmd-{node}.pid").read_text()))
        doomed = [daemon, *_of_node(self, node)]
        # All at once: killed one by one, an srun whose parent is dead would have the time to cancel its step on another node.
        for end in (psutil.Process.suspend, psutil.Process.kill):
            for process in doomed:
                with suppress(psutil.NoSuchProcess):
                    end(process)
        self.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
        try:
            yield
        finally:
            _daemon(self, "slurmd", "-N", node)
            deadline = time.monotonic() + START_SECONDS
            while _idle(self) < NODES and time.monotonic() < deadline:
                with suppress(subprocess.CalledProcessError):
                    self.call("scontrol", "update", f"NodeName={node}", "State=RESUME")
                time.sleep(0.5)

    def jobs(self) -> list[str]:
        """The numbers of the jobs that are not over."""
        return self.call("squeue", "--noheader", "--format=%i").split()


@contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """A Slurm for the length of the context."""
    slurm = Slurm(folder)
    _lay_out_slurm(folder)
    try:
        _start_slurm(slurm)
        yield slurm
    finally:
        with suppress(subprocess.SubprocessError):
            slurm.call("scancel", "--user=root")
        time.sleep(1)
        _stop_slurm(folder)


def _lay_out_slurm(folder: Path) -> None:
    for name in ("munge", "run", "log", "state", "devices", *(f"spool-n{n}" for n in range(1, NODES + 1))):
        (folder / name).mkdir()
    folder.chmod(0o755)
    (folder / "munge").chmod(0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    for number in range(GPUS):  # devices that swallow what they get, under the names of GPUs
        os.mknod(folder / "devices" / f"nvidia{number}", 0o20666, os.makedev(1, 3))
    (folder / "slurm.conf").write_text(_configuration(folder, _free_ports(NODES + 1)))
    (folder / "gres.conf").write_text(f"NodeName=n[1-{NODES}] Name=gpu File={folder}/devices/nvidia[0-{GPUS - 1}]\n")


def _configuration(folder: Path, ports: Sequence[int]) -> str:
    host = socket.gethostname().split(".")[0]
    # Neither systemd nor control groups are needed.
    settings = f"""
    ClusterName=halotile SlurmctldHost={host}(127.0.0.1) SlurmctldPort={ports[0]} SlurmUser=root SlurmdUser=root
    AuthType=auth/munge AuthInfo=socket={folder}/run/munge.sock CredType=cred/munge
    SlurmctldPidFile={folder}/run/slurmctld.pid SlurmdPidFile={folder}/run/slurmd-%n.pid
    SlurmctldLogFile={folder}/log/slurmctld.log SlurmdLogFile={folder}/log/slurmd-%n.log
    StateSaveLocation={folder}/state SlurmdSpoolDir={folder}/spool-%n
    ProctrackType=proctrack/linuxproc TaskPlugin=task/none JobAcctGatherType=jobacct_gather/none
    AccountingStorageType=accounting_storage/none MpiDefault=none SwitchType=switch/none
    SelectType=select/cons_tres SelectTypeParameters=CR_Core_Memory PropagateResourceLimits=NONE
    SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
    ReturnToService=2 KillWait=5 GresTypes=gpu
    """
    lines = settings.split()
    lines += [
        f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[number]} CPUs={CORES} CoresPerSocket={CORES} "
        f"RealMemory=6000 Gres=gpu:{GPUS} State=UNKNOWN"
        for number in range(1, NODES + 1)
    ]
    lines.append(f"PartitionName=debug Nodes=n[1-{NODES}] Default=YES MaxTime=INFINITE State=UP")
    return "\n".join([*lines, ""])


def _of_node(slurm: Slurm, node: str) -> list[psutil.Process]:
    """Processes of this Slurm's jobs on a node. Another Slurm may have nodes of the same names."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            known = process.environ()
            if known.get("SLURMD_NODENAME") == node and known.get("SLURM_CONF") == slurm.environment["SLURM_CONF"]:
                found += [process, *(parent for parent in process.parents() if "slurmstepd" in parent.name())]
    return found


def _free_ports(count: int) -> list[int]:
    with ExitStack() as opened:
        servers = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def _start_slurm(slurm: Slurm) -> None:
    folder = slurm.folder
    files = {"key": "munge/key", "pid": "run/munged.pid", "log": "log/munged.log", "seed": "munge/seed"}
    words = (f"--{option}-file={folder}/{path}" for option, path in files.items())
    _daemon(slurm, "munged", f"--socket={folder}/run/munge.sock", *words)
    _daemon(slurm, "slurmctld", "-c")
    for number in range(1, NODES + 1):
        _daemon(slurm, "slurmd", "-N", f"n{number}")
    deadline = time.monotonic() + START_SECONDS
    while _idle(slurm) < NODES:
        if time.monotonic() > deadline:
            logs = "\n".join(f"{log}\n{log.read_text()[-2000:]}" for log in (folder / "log").iterdir())
            raise RuntimeError(f"Slurm's nodes did not come up\n{logs}")
        time.sleep(0.2)


def _daemon(slurm: Slurm, name: str, *words: str) -> None:
    subprocess.run([str(shutil.which(name, path=_SYSTEM)), *words], env=slurm.environment, timeout=30, check=True)


def _idle(slurm: Slurm) -> int:
    try:
        return slurm.call("sinfo", "--noheader", "--Node", "--format=%T").split().count("idle")
    except subprocess.CalledProcessError:
        return 0


def _stop_slurm(folder: Path) -> None:
    """End the daemons, the nodes first, by their process files."""
    for name in ("slurmd-*.pid", "slurmctld.pid", "munged.pid"):
        for file in (folder / "run").glob(name):
            with suppress(psutil.Error, ValueError):
                daemon = psutil.Process(int(file.read_text()))
                daemon.terminate()
                daemon.wait(START_SECONDS)


# --- Grid Engine ---

PROGRAMS = Path("/usr/lib/gridengine")
RESOURCES = Path("/usr/share/gridengine")
SGE_PACKAGES = {"sge_qmaster": "gridengine-master", "sge_execd": "gridengine-exec", "qsub": "gridengine-client"}
SLOTS = 6
QUEUE = {
    "qname": "all.q",
    "slots": str(SLOTS),
    "shell": "/bin/csh",  # as it is where nobody changed it: scripts have to name their own
    "load_thresholds": "NONE",
    "pe_list": "smp",
}
EAGER = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}


@dataclass(frozen=True)
class GridEngine:
    """A running Grid Engine.

    Parameters
    ----------
    folder : Path
        Everything that it has.
    ports : sequence of int
        Ports of its two daemons.
    """

    folder: Path
    ports: Sequence[int]

    @property
    def settings(self) -> dict[str, str]:
        """The variables that its commands need, as a site's module sets them."""
        master, execution = map(str, self.ports)
        return {
            "SGE_ROOT": str(self.folder),
            "SGE_CELL": "default",
            "SGE_QMASTER_PORT": master,
            "SGE_EXECD_PORT": execution,
            "LD_LIBRARY_PATH": str(PROGRAMS),
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
        }

    def call(self, *words: str) -> str:
        """Output of a command.

        Raises
        ------
        CalledProcessError
            When it fails.
        """
        command, given = [str(PROGRAMS / words[0]), *words[1:]], dict(os.environ) | self.settings
        options: Any = {"capture_output": True, "text": True, "timeout": 60, "check": True}
        output: str = subprocess.run(command, env=given, cwd=self.folder, **options).stdout
        return output.strip()

    def jobs(self) -> list[str]:
        """The numbers of the jobs that are not over."""
        return re.findall(r"^\s*(\d+) ", self.call("qstat"), re.MULTILINE)


@contextmanager
def running_sge(folder: Path) -> Iterator[GridEngine]:
    """A Grid Engine for the length of the context."""
    engine = GridEngine(folder, _free_ports(2))
    _lay_out_sge(engine)
    try:
        _start_sge(engine)
        yield engine
    finally:
        with suppress(subprocess.SubprocessError):
            engine.call("qdel", "-u", "*")
        time.sleep(2)
        _stop_sge(engine)


def _lay_out_sge(engine: GridEngine) -> None:
    folder, host = engine.folder, socket.gethostname()
    folder.chmod(0o755)
    for name in ("bin", "lib", "utilbin"):
        (folder / name).mkdir()
        (folder / name / "lx-amd64").symlink_to(PROGRAMS)
    (folder / "util").symlink_to(RESOURCES / "util")
    for name in ("default/common", "spool/qmaster/job_scripts", "spool/db", "spool/execd"):
        (folder / name).mkdir(parents=True)
    bootstrap = (RESOURCES / "default-bootstrap").read_text()
    changed = {
        "admin_user": "none",
        "ignore_fqdn": "true",
        "spooling_params": folder / "spool/db",
        "binary_path": folder / "bin",
        "qmaster_spool_dir": folder / "spool/qmaster",
    }
    (folder / "default/common/bootstrap").write_text(_changed(bootstrap, changed))
    (folder / "default/common/act_qmaster").write_text(f"{host}\n")
    (folder / "default/common/host_aliases").write_text(f"{host} localhost\n")
    usual = (RESOURCES / "default-configuration").read_text()
    roots = {"execd_spool_dir": folder / "spool/execd", "min_uid": 0, "min_gid": 0}
    (folder / "configuration").write_text(_changed(usual, roots))
    engine.call("spoolinit", "berkeleydb", "libspoolb", str(folder / "spool/db"), "init")
    engine.call("spooldefaults", "configuration", str(folder / "configuration"))
    for name, path in (("complexes", "centry"), ("usersets", "usersets")):
        engine.call("spooldefaults", name, str(RESOURCES / "util/resources" / path))
    engine.call("spooldefaults", "managers", "root")
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in engine.settings.items()]
    (folder / "default/common/settings.sh").write_text("".join(lines))


def _changed(text: str, values: Mapping[str, object]) -> str:
    """A configuration with other values."""
    for name, value in values.items():
        text = re.sub(rf"(?m)^{name}\s.*$", f"{name} {value}", text)
    return text


def _start_sge(engine: GridEngine) -> None:
    host, folder = socket.gethostname(), engine.folder
    engine.call("sge_qmaster")
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            engine.call("qconf", "-ah", host)
            break
        except subprocess.CalledProcessError as error:
            if "already exists" in error.stderr:
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"Grid Engine did not come up: {error.stderr}") from error
            time.sleep(0.2)
    engine.call("qconf", "-as", host)
    engine.call("sge_execd")
    (folder / "scheduling").write_text(_changed(engine.call("qconf", "-ssconf"), EAGER))
    engine.call("qconf", "-Msconf", "scheduling")
    engine.call("qconf", "-Ap", str(RESOURCES / "util/resources/pe/smp"))
    queue = _changed(engine.call("qconf", "-sq"), QUEUE | {"hostlist": host})
    (folder / "queue").write_text(f"{queue}\n")
    engine.call("qconf", "-Aq", "queue")
    while "lx-amd64" not in engine.call("qstat", "-f"):
        if time.monotonic() > deadline:
            raise RuntimeError("Grid Engine's machine did not come up")
        time.sleep(0.2)


def _stop_sge(engine: GridEngine) -> None:
    """End its own daemons."""
    for process in psutil.process_iter(["name"]):
        with suppress(psutil.Error):
            if process.info["name"] in SGE_PACKAGES and process.environ().get("SGE_ROOT") == str(engine.folder):
                process.terminate()
                process.wait(START_SECONDS)
    shutil.rmtree(engine.folder / "spool", ignore_errors=True)
