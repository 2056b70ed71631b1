"""The command ``recon-cli``.

Its commands are in :mod:`halotile.cli.commands`. Heavy packages are imported by the command that needs them,
so that ``--help`` answers at once. The interface of the engine that is used here::

    halotile.graphs.plans.plan.make_plan(job, *, fresh, refuse, same_input, probe, report) -> Plan     Plan.summary() -> figures
    halotile.graphs.runs.driver.run(plan, *, observer, cluster) -> Outcome
    halotile.graphs.runs.verify.verify(output, *, job, repair, observer) -> Verdict
"""

import gc
import signal
import sys
from typing import NoReturn

import psutil

from halotile.cli import exits
from halotile.cli.app import app
from halotile.cli.commands import clusters, images, jobs, scans
from halotile.graphs.clusters.workers.settings import keep_compiled_code_at_home
from halotile.tasks.devices.device import allow_memory

__all__ = ["app", "clusters", "images", "jobs", "main", "scans"]

_ASKED = (signal.SIGTERM, signal.SIGUSR1)  # signals on which a run drains instead


def _stop_early(number: int, _: object) -> NoReturn:
    for requested in _ASKED:  # it may come twice, to the process and to its group
        signal.signal(requested, signal.SIG_IGN)
    raise exits.StoppedEarly(f"stopped on {signal.Signals(number).name}")


def main() -> None:
    """Entry point of ``recon-cli``."""
    for requested in _ASKED:
        signal.signal(requested, _stop_early)
    keep_compiled_code_at_home()
    # An input that is damaged, or crafted for it, may request all the memory of a machine.
    allow_memory(psutil.virtual_memory().available)
    try:
        app(prog_name="recon-cli")
    except SystemExit as end:
        # Cleanup at exit must not be interrupted as well.
        if end.code in (exits.INTERRUPTED, exits.STOPPED):
            for number in (signal.SIGINT, *_ASKED):
                signal.signal(number, signal.SIG_IGN)
        raise
    except exits.StoppedEarly as stopped:  # while the words of the command were read
        print(stopped, file=sys.stderr)
        sys.exit(exits.STOPPED)
    finally:
        # All of it ends with the process: collecting it takes a second where torch is loaded, and triton,
        # which deepinv loads, complains about objects that are not collected in thirty lines on the screen.
        if "triton" not in sys.modules:
            gc.freeze()


if __name__ == "__main__":
    main()
