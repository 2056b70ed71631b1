"""Commands of batch systems and their answers."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

from halotile.errors import ClusterFailed

CALL_SECONDS = 30.0


def answer_of(words: Sequence[str], title: str = "Slurm", **options: Any) -> str:
    """Run a command and return its output.

    Raises
    ------
    ClusterFailed
        With the message of the batch system when it fails.
    """
    done = run_command(words, title, **options)
    if done.returncode != 0:
        raise failure_of(done)
    return done.stdout


def run_command(
    words: Sequence[str], title: str = "Slurm", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command of a batch system.

    Raises
    ------
    ClusterFailed
        When it does not start, or does not end in time.
    """
    try:
        return subprocess.run(
            words, capture_output=True, text=True, timeout=CALL_SECONDS, check=False, **options
        )
    except FileNotFoundError as error:
        raise ClusterFailed(
            f"{words[0]} is not installed here: this machine is not part of a {title} cluster."
        ) from error
    except OSError as error:
        raise ClusterFailed(f"{words[0]} does not start ({error}).") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterFailed(
            f"{words[0]} did not answer within {CALL_SECONDS:g} s. Try again later."
        ) from error


def failure_of(done: subprocess.CompletedProcess[str]) -> ClusterFailed:
    """The message of a command that failed, as an error."""
    message = " ".join(done.stderr.split())
    return ClusterFailed(message or f"{done.args[0]} ended with exit code {done.returncode}")
