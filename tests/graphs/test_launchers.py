"""Copies of a command are recognised by the variables of their launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from halotile.errors import ClusterFailed, ConfigError
from halotile.graphs.clusters import ranks
from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of, is_other_copy
from halotile.graphs.kinds.sections import Cluster
from halotile.tasks.groups.opening import Copy, copy_of
from tests.faults import REPOSITORY

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


def of(prefix: str, **words: object) -> dict[str, str]:
    """Variables whose names begin alike."""
    return {f"{prefix}{name}": str(word) for name, word in words.items()}


PMI = of("PMI_", RANK=3, SIZE=4)
PALS = of("PALS_", RANKID=3, LOCAL_RANKID=1, APID="a-b")
SET_BY = {
    "srun": (STEP | {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2"}, Copy(1, 2, 1, 2, "7-0")),
    "srun on two nodes": (STEP | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, Copy(1, 2, None, None, "7-0")),
    "mpirun of Open MPI": (
        of("OMPI_COMM_WORLD_", RANK=3, SIZE=4, LOCAL_RANK=1, LOCAL_SIZE=2)
        | of("PMIX_", NAMESPACE="prterun-a-1@1", RANK=3),
        Copy(3, 4, 1, 2, "prterun-a-1@1"),
    ),
    "mpiexec of MPICH": (PMI | of("MPI_", LOCALRANKID=1, LOCALNRANKS=2), Copy(3, 4, 1, 2)),
    "mpirun_rsh of MVAPICH2": (
        of("MV2_COMM_WORLD_", RANK=3, SIZE=4, LOCAL_RANK=1, LOCAL_SIZE=2) | {"MPIRUN_ID": "99"},
        Copy(3, 4, 1, 2, "99"),
    ),
    "MVAPICH 3": (of("MVP_COMM_WORLD_", RANK=3, SIZE=4), Copy(3, 4)),
    "mpiexec of PALS": (PALS | PMI | {"PMI_LOCAL_SIZE": "2"}, Copy(3, 4, 1, 2, "a-b")),
    "torchrun": (
        of("", RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, MASTER_PORT=29500)
        | {"TORCHELASTIC_RUN_ID": "none"},
        Copy(3, 4, 1, 2, "none-29500"),
    ),
    "torchrun in a step of each node": (STEP | of("", RANK=3, WORLD_SIZE=4, MASTER_PORT=1), Copy(3, 4, launch="7-1")),
    "PMIx with a count": ({"PMIX_RANK": "3", "HALOTILE_SIZE": "4"}, Copy(3, 4)),
    "PMIx with a number on its machine": ({"PMIX_RANK": "3"} | of("HALOTILE_", SIZE=4, LOCAL_RANK=1), Copy(3, 4, 1)),
    "PALS with a count": (PALS | {"HALOTILE_SIZE": "4"}, Copy(3, 4, 1, launch="a-b")),
    "PMIx in a batch job's script": (
        of("SLURM_", JOB_ID=7, PROCID=0) | {"PMIX_RANK": "3", "HALOTILE_SIZE": "4"},
        Copy(3, 4, launch="7"),
    ),
    "whoever knows better": (STEP | of("HALOTILE_", RANK=3, SIZE=4, LOCAL_RANK=1), Copy(3, 4, 1, launch="7")),
}
ALONE: dict[str, Mapping[str, str]] = {
    "nothing": {},
    "one task": STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"},
    "variables of somebody's own": {"RANK": "colonel", "WORLD_SIZE": "large"},
    "a size alone": {"WORLD_SIZE": "8"},
    "whoever knows better": {"HALOTILE_RANK": "0", "HALOTILE_SIZE": "1", "RANK": "0", "WORLD_SIZE": "4"},
    "PALS with a count of one": {"HALOTILE_SIZE": "1", "PALS_RANKID": "0"},
}


@pytest.mark.parametrize("how", SET_BY)
def test_a_copy_knows_its_number(how: str) -> None:
    environment, copy = SET_BY[how]
    assert copy_of(environment) == copy
    assert cluster_kind_of(Cluster(), environment).name == "ranks"
    assert is_other_copy(Cluster(), environment)


@pytest.mark.parametrize("how", ALONE)
def test_one_copy_is_no_rank(how: str) -> None:
    assert copy_of(ALONE[how]) is None


@pytest.mark.parametrize("name", ["PMIX_RANK", "PALS_RANKID"])
def test_copies_that_nobody_counts_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is 0.*Set HALOTILE_SIZE"):
        cluster_kind_of(Cluster(), {name: "0"})


LOOK = "import sys; from halotile.tasks.groups.opening import copy_of; sys.exit(copy_of() is not None)"
AT_A_TERMINAL = f"import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn([sys.executable, '-c', {LOOK!r}])))"


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        (STEP | {"SLURM_PTY_PORT": "9"}, False),
        (STEP | {"SLURM_PTY_PORT": "9", "PMI_RANK": "1", "PMI_SIZE": "2"}, False),
        (STEP, True),
        (STEP | {"SLURM_PTY_PORT": "9", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, True),
    ],
)
def test_the_shell_of_an_interactive_step_is_no_rank(environment: Mapping[str, str], several: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_A_TERMINAL],
        env=os.environ | dict(environment),
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    assert done.returncode == several


def test_a_copy_that_is_alone_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(ranks, "log_line", lines.append)
    monkeypatch.setattr(ranks, "WORD_SECONDS", 0.05)
    monkeypatch.setattr(ranks, "WAIT_SECONDS", 0.5)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ClusterFailed, match="the first copy of the command did not begin within"):
        ranks.serve(tmp_path)
    (line,) = lines
    assert line.startswith("copy 1 of 2 (counted from 0) waits for the first copy")
    assert "unset the variables that number copies, as RANK and WORLD_SIZE" in line
