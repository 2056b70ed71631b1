"""``recon-cli``, and ``python -m halotile``."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point: trials of user code import torch in another process, which is started before anything else is imported."""
    if sys.argv[1:2] == ["plan"] and "--allow-import" in sys.argv:
        from contextlib import suppress

        from halotile.errors import ConfigError
        from halotile.graphs.clusters.workers.fork_server import ensure_forks, expect_no_workers

        expect_no_workers()
        with suppress(ConfigError):  # reported where a trial is made
            ensure_forks()
    from halotile.cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    main()
