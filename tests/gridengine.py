"""A private Grid Engine: one machine with a queue of a few slots, and no files outside of one folder."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

PROGRAMS = Path("/usr/lib/gridengine")
RESOURCES = Path("/usr/share/gridengine")
DAEMONS = {"sge_qmaster": "gridengine-master", "sge_execd": "gridengine-exec", "qsub": "gridengine-client"}
"""Required commands, with the Debian package of each."""
START_SECONDS = 60.0
SLOTS = 6
QUEUE = {
    "qname": "all.q",
    "slots": str(SLOTS),
    "shell": "/bin/csh",  # as it is where nobody changed it: scripts have to name their own
    "load_thresholds": "NONE",
    "pe_list": "smp",
}
EAGER = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}


def why_not() -> str | None:
    """The reason why it cannot run here; None where it can."""
    missing = sorted({package for name, package in DAEMONS.items() if not (PROGRAMS / name).is_file()})
    if missing:
        return f"a real Grid Engine needs packages that are not installed: apt-get install {' '.join(missing)}"
    return None if os.getuid() == 0 else "a Grid Engine of our own needs root: its daemons start jobs for users"


@dataclass(frozen=True)
class GridEngine:
    """A running Grid Engine.

    Parameters
    ----------
    folder : Path
        Everything that it has.
    ports : tuple of int
        Ports of its two daemons.
    """

    folder: Path
    ports: tuple[int, int]

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
def running(folder: Path) -> Iterator[GridEngine]:
    """A Grid Engine for the length of the context."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], other.getsockname()[1]
    engine = GridEngine(folder, ports)
    _lay_out(engine)
    try:
        _start(engine)
        yield engine
    finally:
        with suppress(subprocess.SubprocessError):
            engine.call("qdel", "-u", "*")
        time.sleep(2)
        _stop(engine)


def _lay_out(engine: GridEngine) -> None:
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


def _start(engine: GridEngine) -> None:
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


def _stop(engine: GridEngine) -> None:
    """End its own daemons."""
    for process in psutil.process_iter(["name"]):
        with suppress(psutil.Error):
            if process.info["name"] in DAEMONS and process.environ().get("SGE_ROOT") == str(engine.folder):
                process.terminate()
                process.wait(START_SECONDS)
    shutil.rmtree(engine.folder / "spool", ignore_errors=True)
