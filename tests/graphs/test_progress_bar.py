"""The progress bar of a job from Python without an observer, at a terminal or in a notebook."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from halotile.graphs.watching.progress import Progress, progress_shown

MOMENTS = [
    Progress(phase="start", done=2, resumed=2, total=8, pixels_done=0, pixels_total=800, seconds=0.1),
    Progress(
        phase="denoise", done=6, resumed=2, total=8, pixels_done=4_000_000, pixels_total=8_000_000, seconds=2.0,
        message="block 3 is tried again",
    ),
]  # fmt: skip


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def seen(monkeypatch: pytest.MonkeyPatch, screen: io.StringIO) -> str:
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_shown(None) as observe:
        for moment in MOMENTS:
            if observe is not None:
                observe(moment)
    return screen.getvalue()


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    text = seen(monkeypatch, Screen())
    assert "denoise" in text
    assert "6/8" in text
    assert "2 Mpix/s" in text
    assert "block 3 is tried again\n" in text


def test_a_notebook_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its standard error is no terminal; without widgets the bar is of text, without a warning."""
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    screen = io.StringIO()
    assert "6/8" in seen(monkeypatch, screen)
    assert "IProgress" not in screen.getvalue()


def test_a_log_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(monkeypatch, io.StringIO()) == ""


def test_an_observer_of_ones_own_stands_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    got: list[Progress] = []
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_shown(got.append) as observe:
        assert observe is not None
        observe(MOMENTS[0])
    assert got == MOMENTS[:1]
    assert screen.getvalue() == ""
