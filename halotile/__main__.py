"""``recon-cli``, and ``python -m halotile``."""

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress

from halotile.errors import ConfigError

# A denoiser that needs no torch for planes without holes.
FILTER = re.compile(r"\bdenoiser\W+(name\W+)?(gaussian|median|none)\b")
# Photon noise, which torch transforms, or another denoiser by `--set`.
NOT_ALONE = re.compile(r"\bnoise\b|denoiser\.")


def main() -> None:
    """Entry point: processes that import torch for workers or trials are started before anything else is imported."""
    if sys.getfilesystemencoding() != "utf-8":  # names in job files are text of UTF-8, whatever the locale
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    _begin_early(sys.argv[1:])
    from halotile.cli.main import main as run_command

    run_command()


def _begin_early(words: Sequence[str]) -> None:
    """Start the process that imports torch where the words of a command leave no doubt that it is needed."""
    is_trial = words[:1] == ["plan"] and "--allow-import" in words
    texts = _texts_of(words) if words[:1] == ["run"] else ()
    if not is_trial and not _have_workers_here(words, texts):
        return
    from halotile.graphs.clusters.workers.fork_server import ensure_forks, expect_no_torch, expect_no_workers

    if is_trial:
        expect_no_workers()
    elif all(map(FILTER.search, texts)) and not any(map(NOT_ALONE.search, (*words, *texts))):
        expect_no_torch()
    with suppress(ConfigError):  # reported where it is needed
        ensure_forks()


def _texts_of(words: Sequence[str]) -> list[str]:
    """The job files that a command names."""
    from pathlib import Path

    if {"--dry-run", "-h", "--help"} & set(words):
        return []
    with suppress(OSError, UnicodeDecodeError):
        return [
            path.read_text("utf-8") for path in map(Path, words) if path.suffix in (".yaml", ".yml") and path.is_file()
        ]
    return []


def _have_workers_here(words: Sequence[str], texts: Sequence[str]) -> bool:
    """True for a run with workers on this machine: neither the words of the command nor its job files mention a cluster."""
    if not texts or any("cluster" in text for text in (*words, *texts)):
        return False
    from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of
    from halotile.graphs.kinds.sections import Cluster

    with suppress(ConfigError):
        return cluster_kind_of(Cluster()).traits.is_here
    return False


if __name__ == "__main__":
    main()
