"""A whole run in a separate process, which reports whether it initialised CUDA: ``driver.py FOLDER KIND DEVICE``."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from halotile.graphs.kinds.sections import Cluster
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from tests.support import job_of


def main(folder: Path, kind: str, device: str) -> None:
    """Run the job of ``in.zarr`` to ``out.zarr`` there, on the first GPU."""
    options = {
        "import": "tests.gpu.models:build",
        "options": {"folder": str(folder)},
        "receptive_field": 3,
        "alignment": 1,
    }
    job = job_of(
        folder / "in.zarr",
        folder / "out.zarr",
        "torch",
        options,
        tile={"block": 128},
        run={"device": device, "workers": 1},
    )
    outcome = run(make_plan(replace(job, cluster=Cluster(kind=kind, gpus=(0,) if kind == "local-cuda" else 0))))
    import torch

    report = {"pid": os.getpid(), "done": outcome.done, "total": outcome.total}
    print(json.dumps(report | {"initialised_cuda": torch.cuda.is_initialized()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
