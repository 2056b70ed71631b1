"""Whatever stands in a file, a format reads it rightly or refuses it; nothing else comes out, and no process dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage.fuzzing import FORMATS

EXAMPLES = 1_000


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_was_changed_at_random_is_read_rightly_or_refused(tmp_path: Path, name: str) -> None:
    last = tmp_path / "last"
    child = subprocess.run(
        [sys.executable, "-m", "tests.storage.fuzzing", name, str(EXAMPLES), str(last)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert child.returncode == 0, f"{child.stderr}\nThe last file that was tried: {last.read_text()}"
