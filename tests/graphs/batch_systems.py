"""All batch systems, by the names of their kinds of clusters."""

from __future__ import annotations

from halotile.graphs.clusters import htcondor, lsf, oar, pbs, sge, slurm

SYSTEMS = {kind.SYSTEM.module: kind.SYSTEM for kind in (slurm, pbs, sge, lsf, oar, htcondor)}
