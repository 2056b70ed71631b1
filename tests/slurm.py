"""A private Slurm: two nodes on this machine with two fake GPUs each, and no files outside of one folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

NODES = 2
CORES = 2
GPUS = 2
DAEMONS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
"""Required commands, with the Debian package of each."""
START_SECONDS = 60.0
_SYSTEM = "/usr/sbin:/usr/bin:/sbin:/bin"


def why_not() -> str | None:
    """The reason why it cannot run here; None where it can."""
    missing = sorted({package for name, package in DAEMONS.items() if not shutil.which(name, path=_SYSTEM)})
    if missing:
        return f"a real Slurm needs packages that are not installed: apt-get install {' '.join(missing)}"
    return None if os.getuid() == 0 else "a Slurm of our own needs root: its daemons start jobs for users"


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
def running(folder: Path) -> Iterator[Slurm]:
    """A Slurm for the length of the context."""
    slurm = Slurm(folder)
    _lay_out(folder)
    try:
        _start(slurm)
        yield slurm
    finally:
        with suppress(subprocess.SubprocessError):
            slurm.call("scancel", "--user=root")
        time.sleep(1)
        _stop(folder)


def _lay_out(folder: Path) -> None:
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
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _start(slurm: Slurm) -> None:
    folder = slurm.folder
    files = (
        "key-file=munge/key",
        "socket=run/munge.sock",
        "pid-file=run/munged.pid",
        "log-file=log/munged.log",
        "seed-file=munge/seed",
    )
    _daemon(slurm, "munged", *(f"--{option}={folder}/{path}" for option, path in (file.split("=") for file in files)))
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


def _stop(folder: Path) -> None:
    """End the daemons, the nodes first, by their process files."""
    for name in ("slurmd-*.pid", "slurmctld.pid", "munged.pid"):
        for file in (folder / "run").glob(name):
            with suppress(psutil.Error, ValueError):
                daemon = psutil.Process(int(file.read_text()))
                daemon.terminate()
                daemon.wait(START_SECONDS)
